"use strict";
// What the programs with node redlock share: connections, versions, lines, and one try.

const { readFileSync } = require("node:fs");
const readline = require("node:readline");
const Redis = require("ioredis");
const { default: Redlock } = require("redlock");

const LEASE_MS = 10_000;
const clock = process.hrtime.bigint; // CLOCK_MONOTONIC

function version(name) {
  const about = JSON.parse(readFileSync(`${process.env.NODE_PATH}/${name}/package.json`));
  return `${name} ${about.version.replace(/^v/, "")}`;
}

function versions() {
  return `${version("redlock")} (${version("ioredis")}, Node ${process.versions.node})`;
}

/** The clients of some nodes, connected. */
async function connect(urls) {
  const clients = urls.map((url) => new Redis(url));
  await Promise.all(clients.map((client) => client.ping()));
  return clients;
}

/** A lock of one contender; `acquire` and `release` say whether it was done. By default it tries 11 times. */
function holder(redlock, key) {
  let held;
  return {
    async acquire() {
      try {
        held = await redlock.acquire([key], LEASE_MS);
        return true;
      } catch (error) {
        if (error.name !== "ExecutionError") throw error;
        return false;
      }
    },
    async release() {
      try {
        await held.release();
        return true;
      } catch (error) {
        if (error.name !== "ExecutionError") throw error;
        return false;
      }
    },
  };
}

async function warmUp(lock) {
  while (!(await lock.acquire()));
  await lock.release();
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

function tell(what) {
  process.stdout.write(`${JSON.stringify(what)}\n`);
}

/** Hand each line from the parent to `next()`; the process ends with them, whatever it is doing. */
function lines() {
  const arrived = [];
  const wanted = [];
  const input = readline.createInterface({ input: process.stdin });
  input.on("line", (line) => (wanted.length ? wanted.shift()(line) : arrived.push(line)));
  input.on("close", () => process.exit(1));
  return { next: () => new Promise((resolve) => (arrived.length ? resolve(arrived.shift()) : wanted.push(resolve))) };
}

function run(main) {
  main().catch((error) => {
    console.error(error.stack);
    console.error(String(error)); // last, as in a Python traceback
    process.exit(1);
  });
}

module.exports = { Redlock, clock, connect, holder, lines, run, sleep, tell, versions, warmUp };
