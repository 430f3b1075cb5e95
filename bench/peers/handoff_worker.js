"use strict";
// One contender with node redlock; it is spoken to as bench/handoff_worker.py is, and takes turns as it does.

const fs = require("node:fs");
const { Redlock, clock, connect, holder, lines, run, sleep, tell, versions, warmUp } = require("./node_redlock.js");

// The cells of the board, as bench/handoff_board.py numbers them.
const [HELD, ASKED, ASKED_NS, WAITER, RELEASED, RELEASED_NS, LAST, UNTIL_NS, JITTER_NS] = Array(9).keys();
const WAITS_NS = 3_000_000;
const PATIENCE_MS = 30_000;

class Board {
  constructor(path) {
    this.file = fs.openSync(path, "r+");
    this.cell = Buffer.alloc(8);
  }
  get(at) {
    fs.readSync(this.file, this.cell, 0, 8, 8 * at);
    return Number(this.cell.readBigInt64LE());
  }
  set(at, value) {
    this.cell.writeBigInt64LE(BigInt(value));
    fs.writeSync(this.file, this.cell, 0, 8, 8 * at);
  }
  waits(turn) {
    return (
      this.get(ASKED) === turn &&
      Number(clock()) - this.get(ASKED_NS) >= WAITS_NS &&
      / S [^)]*$/.test(fs.readFileSync(`/proc/${this.get(WAITER)}/stat`, "latin1"))
    );
  }
}

async function until(condition, ms) {
  const end = clock() + BigInt(PATIENCE_MS * 1_000_000);
  while (!condition()) {
    if (clock() > end) throw new Error("the other contender is gone");
    await sleep(ms);
  }
}

async function contend(lock, board, number) {
  const took = [];
  let gaveUp = 0;
  for (let turn = number; turn <= board.get(LAST); turn += 2) {
    if (turn) {
      await until(() => board.get(HELD) >= turn - 1, 1);
      board.set(WAITER, process.pid);
      board.set(ASKED_NS, clock());
      board.set(ASKED, turn);
    }
    while (!(await lock.acquire())) gaveUp += 1;
    const now = Number(clock());
    if (turn) {
      const released = board.get(RELEASED_NS);
      if (board.get(RELEASED) !== turn - 1 || released > now) throw new Error("two held the lock at once");
      if (released - board.get(ASKED_NS) < WAITS_NS) throw new Error("it was released before the other one waited");
      if (turn > 1) took.push(now - released);
    }
    board.set(HELD, turn);
    if (turn < board.get(LAST)) {
      await until(() => board.waits(turn + 1), 0.5);
      if (Number(clock()) > board.get(UNTIL_NS)) board.set(LAST, turn + 1);
      await sleep((board.get(JITTER_NS) / 1e6) * Math.random());
    }
    board.set(RELEASED_NS, clock());
    board.set(RELEASED, turn);
    if (!(await lock.release())) throw new Error("it was not released");
    await sleep(2);
  }
  return { took_ns: took, gave_up: gaveUp };
}

run(async () => {
  const input = lines();
  const begun = JSON.parse(await input.next());
  const redlock = new Redlock(await connect(begun.nodes.map((node) => node.url)));
  const [number] = begun.contenders;
  await warmUp(holder(redlock, `${begun.key}:${number}`));
  const board = new Board(begun.board);
  tell({ versions: versions() });
  for (;;) {
    await input.next();
    tell(await contend(holder(redlock, begun.key), board, number));
  }
});
