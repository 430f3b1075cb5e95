"use strict";
// Runs cycles of node redlock on ioredis; it is spoken to as worker.py is.

const { readFileSync } = require("node:fs");
const readline = require("node:readline");
const Redis = require("ioredis");
const { default: Redlock } = require("redlock");

function version(name) {
  const about = JSON.parse(readFileSync(`${process.env.NODE_PATH}/${name}/package.json`));
  return `${name} ${about.version.replace(/^v/, "")}`;
}

function connect({ host, port, path, db, username, password }) {
  return new Redis({ host, port, path, db, username, password });
}

async function slice(redlock, { key, lease_ms: lease }, { seconds, limit }) {
  const clock = process.hrtime.bigint;
  const took = [];
  const begin = clock();
  const end = begin + BigInt(Math.round(seconds * 1e9));
  let now = begin;
  while (now < end && took.length < limit) {
    const start = clock();
    const lock = await redlock.acquire([key], lease);
    await lock.release();
    now = clock();
    took.push(Number(now - start));
  }
  return { took_ns: took, rate: (took.length / Number(now - begin)) * 1e9 };
}

async function main() {
  let begun;
  let redlock;
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const words = JSON.parse(line);
    let answer;
    if (!begun) {
      begun = words;
      const clients = begun.nodes.map(connect);
      await Promise.all(clients.map((client) => client.ping()));
      redlock = new Redlock(clients, { retryCount: 0 }); // a refused try is an error, not a pause
      answer = { versions: `${version("redlock")} (${version("ioredis")}, Node ${process.versions.node})` };
    } else {
      answer = await slice(redlock, begun, words);
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
  process.exit(0); // the connections would keep it alive
}

main().catch((error) => {
  console.error(error.stack);
  console.error(String(error)); // last, as in a Python traceback
  process.exit(1);
});
