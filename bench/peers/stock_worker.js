"use strict";
// Contenders with node redlock, all in one process; it is spoken to as bench/stock_worker.py is.

const { Redlock, clock, connect, holder, lines, run, sleep, tell, warmUp } = require("./node_redlock.js");

async function contend(lock, shelf, job, market) {
  const sold = [];
  const waits = [];
  let gaveUp = 0;
  let unreleased = 0;
  let asked = clock();
  while (!market.closed && clock() < market.until && sold.length < job.most) {
    if (!(await lock.acquire())) {
      gaveUp += 1;
      continue;
    }
    const waited = clock() - asked;
    try {
      const left = Number(await shelf.get(job.stock));
      if (left > 0) {
        await shelf.set(job.stock, left - 1);
        sold.push(Number(clock()));
        waits.push(Number(waited));
      } else {
        market.closed = true;
      }
    } finally {
      if (!(await lock.release())) unreleased += 1;
    }
    asked = clock();
  }
  return { sold, waits, gaveUp, unreleased };
}

run(async () => {
  const input = lines();
  const job = JSON.parse(await input.next());
  const redlock = new Redlock(await connect(job.urls));
  const [shelf] = await connect(job.urls.slice(0, 1));
  const numbers = Array.from({ length: job.contenders }, (_, number) => number);
  await Promise.all(numbers.map((number) => warmUp(holder(redlock, `${job.key}:${number}`))));
  tell({ ready: true });
  const start = BigInt(await input.next());
  const market = { until: start + BigInt(Math.round(job.seconds * 1e9)), closed: false };
  while (clock() < start) await sleep(Number(start - clock()) / 1e6); // a timer may be early
  const done = await Promise.all(numbers.map(() => contend(holder(redlock, job.key), shelf, job, market)));
  const sum = (of) => done.reduce((all, one) => all + of(one), 0);
  tell({
    sales: done.map((one) => one.sold),
    waits: done.map((one) => one.waits),
    gave_up: sum((one) => one.gaveUp),
    unreleased: sum((one) => one.unreleased),
  });
});
