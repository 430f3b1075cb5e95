"""The programs of contenders in Node, with stand-ins for the packages that they use."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import stock
from bench.handoff_run import Pair, Program
from bench.stock_run import Worker
from bench.stock_worker import Job
from tests.kit.clients import SLACK

PROGRAMS = Path(stock.__file__).with_name("peers")
URLS = ["redis://me:secret@127.0.0.1:7/3", "redis://127.0.0.1:8"]
KEY = "bench:node"

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node")

IOREDIS = """
const stock = new Map();
module.exports = class {
  constructor(url) { this.url = url; }
  async ping() {}
  async get(key) { return stock.has(key) ? stock.get(key) : process.env.STOCK; }
  async set(key, value) { stock.set(key, String(value)); }
};
"""

# A file per lock, which also other processes see; its first try at a contended key fails.
REDLOCK = """
const fs = require("fs");
let tries = 0;
exports.default = class {
  constructor(clients, ...more) {
    const words = [clients.map((client) => client.url), ...more];
    fs.appendFileSync(process.env.LOG, JSON.stringify(words) + "\\n");
  }
  async acquire([key], lease) {
    if (lease !== 10000) throw new Error(`a lease of ${lease}`);
    if (key === process.env.MOODY && tries++ === 0) {
      const error = new Error("no quorum");
      error.name = "ExecutionError";
      throw error;
    }
    const path = `${process.env.LOCKS}/${key.replaceAll(":", "_")}`;
    for (;;) {
      try {
        fs.closeSync(fs.openSync(path, "wx"));
        return { release: async () => fs.unlinkSync(path) };
      } catch (error) {
        if (error.code !== "EEXIST") throw error;
        await new Promise((resolve) => setTimeout(resolve, 1));
      }
    }
  }
};
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The variables with which a program uses the stand-ins."""
    for name, source in {"ioredis": IOREDIS, "redlock": REDLOCK}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "package.json").write_text('{"version": "v1.2.3"}')
        (tmp_path / name / "index.js").write_text(source)
    (tmp_path / "locks").mkdir()
    return {
        "NODE_PATH": str(tmp_path),
        "LOCKS": str(tmp_path / "locks"),
        "LOG": str(tmp_path / "log"),
        "MOODY": KEY,
        "STOCK": "30",
    }


@pytest.fixture
def row(env: dict[str, str]) -> Iterator[Pair]:
    started = ["node", str(PROGRAMS / "handoff_worker.js")], env
    row = Pair("node redlock", Program("node-redlock", {}, 0.01, (), started), "processes", URLS, KEY)
    yield row
    row.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_contenders_take_turns_as_those_in_python_do(env: dict[str, str], row: Pair) -> None:
    assert row.versions.startswith("redlock 1.2.3 (ioredis 1.2.3, Node ")
    for hand_offs in (4, 3):
        done = row.run(60 * SLACK, hand_offs)
        assert len(done.took_ns) == hand_offs
        assert 0 < min(done.took_ns) <= max(done.took_ns) < 10e9 * SLACK
    assert row.gave_up == 2  # one try of each
    with pytest.raises(RuntimeError, match="not passed on twice in 0 s"):
        row.run(0, 1000)
    made = [json.loads(line) for line in Path(env["LOG"]).read_text().splitlines()]
    assert made == [[URLS]] * 2  # with its own settings


def test_a_contender_ends_with_its_parent(row: Pair) -> None:
    for process in row._processes:
        assert process._process.stdin
        process._process.stdin.close()
        assert process._process.wait(10 * SLACK) == 1


def test_a_lock_that_does_nothing_is_found_out(env: dict[str, str]) -> None:
    index = Path(env["NODE_PATH"]) / "redlock" / "index.js"
    index.write_text("exports.default = class { async acquire() { return { release: async () => {} }; } };")
    started = ["node", str(PROGRAMS / "handoff_worker.js")], env
    row = Pair("node redlock", Program("node-redlock", started=started), "processes", URLS, KEY)
    try:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Error: two held the lock at once"):
            row.run(60, 3)
        assert time.monotonic() - start < 20 * SLACK
    finally:
        row.close()


def test_contenders_sell_the_stock_and_tell_what_they_did(env: dict[str, str]) -> None:
    job = Job("node-redlock", {}, URLS, KEY, f"{KEY}:stock", contenders=3, most=12, seconds=60 * SLACK)
    with Worker(("node", str(PROGRAMS / "stock_worker.js")), job, env) as worker:
        deadline = time.monotonic() + 30 * SLACK
        worker.await_ready(deadline)
        start_ns = time.monotonic_ns() + 50_000_000
        worker.start(start_ns)
        done = worker.result(deadline)
    counts = [len(sales) for sales in done["sales"]]
    assert len(counts) == 3
    assert sum(counts) == 30
    assert max(counts) <= 12
    assert [len(waits) for waits in done["waits"]] == counts
    assert all(start_ns <= ns < time.monotonic_ns() for sales in done["sales"] for ns in sales)
    assert all(0 <= ns < 60e9 * SLACK for waits in done["waits"] for ns in waits)
    assert (done["gave_up"], done["unreleased"]) == (1, 0)


def test_contenders_stop_when_the_time_is_over(env: dict[str, str]) -> None:
    job = Job("node-redlock", {}, URLS, KEY, f"{KEY}:stock", contenders=2, most=100, seconds=0)
    with Worker(("node", str(PROGRAMS / "stock_worker.js")), job, env) as worker:
        deadline = time.monotonic() + 30 * SLACK
        worker.await_ready(deadline)
        worker.start(time.monotonic_ns())
        assert worker.result(deadline)["sales"] == [[], []]
