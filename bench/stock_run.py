"""One run of ``python -m bench stock``: its processes, and the account of what they sold."""

from __future__ import annotations

import bisect
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

import redis

from bench.contenders import WARM_UP
from bench.runner import percentile
from bench.stock_worker import Job
from redbolt.local import LocalNode

__all__ = ["Account", "Entry", "Missing", "Place", "Worker", "run", "split"]

ROOT = Path(__file__).parent.parent
WORKER = (sys.executable, "-m", "bench.stock_worker")
READY = 3 * WARM_UP
GRACE = 30
"""Seconds after the end of the time in which a contender must have come back from its last acquire."""
HEAD_START_NS = 50_000_000
"""From the word to go to the start, so that all processes start at the same moment."""
LOOK = 0.002
"""Seconds between two looks at the stock while its half is waited for."""


class Missing(Exception):
    """The library is not installed here."""


@dataclass(frozen=True)
class Entry:
    """One row: which program runs the contenders, with which lock.

    Attributes:
        title: its name in the table.
        library: which lock the program shall use.
        options: further words for that.
        locked: whether it is a lock: then nothing may be oversold. Default True.
        alone: whether one contender does all the work. Default False.
        command: a program that follows the protocol of `bench.stock_worker`; that is the default.
        env: variables for it.
        unfit: why it cannot be run, if it cannot.
    """

    title: str
    library: str
    options: tuple[tuple[str, Any], ...] = ()
    locked: bool = True
    alone: bool = False
    command: tuple[str, ...] = WORKER
    env: tuple[tuple[str, str], ...] = ()
    unfit: str = ""


@dataclass(frozen=True)
class Place:
    """Where and how much: nodes, contenders and their processes, the work, and the seconds it may take.

    With ``even`` a contender leaves when it has sold its share. The node to ``stop`` is stopped when half of
    the work is done; the stock must be on another one.
    """

    urls: list[str]
    contenders: int
    processes: int
    work: int
    seconds: float
    even: bool = False
    stop: LocalNode | None = None


@dataclass(frozen=True)
class Account:
    """What came of one run.

    Attributes:
        sales: per contender the moments of its sales, as it counted them itself.
        processes: how many of the contenders, in their order, were in each process.
        waits: how long was waited for the lock before each sale, all contenders together, in ns.
        taken: by how much the stock has become smaller.
        work: what the stock was.
        start_ns: when it began.
        gave_up, unreleased: acquires that ended without the lock, and releases that failed.
        tries, grants: of the waiters by the network, where the library counts them.
        stopping_ns, stopped_ns: when a node was about to be stopped, and when it had stopped; 0 if none was.
        end_ns: when time was over, if a node was to be stopped.
        notes: what else the contenders told.
    """

    sales: list[list[int]]
    processes: list[int]
    waits: list[int]
    taken: int
    work: int
    start_ns: int
    gave_up: int = 0
    unreleased: int = 0
    tries: int = 0
    grants: int = 0
    stopping_ns: int = 0
    stopped_ns: int = 0
    end_ns: int = 0
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> list[int]:
        """Sales per contender."""
        return [len(times) for times in self.sales]

    @property
    def sold(self) -> int:
        return sum(self.counts)

    @property
    def oversold(self) -> int:
        """Sales that the stock knows nothing of."""
        return self.sold - self.taken

    @property
    def rate(self) -> float:
        """Sales per second, until the last one."""
        if not self.sold:
            return 0.0
        return self.sold / (max(map(max, filter(None, self.sales))) - self.start_ns) * 1e9

    @property
    def starved(self) -> int:
        """Contenders that sold nothing."""
        return self.counts.count(0)

    @property
    def half_way(self) -> list[int]:
        """Sales per contender when half of all were done."""
        ordered = sorted((sold_ns, who) for who, times in enumerate(self.sales) for sold_ns in times)
        counted = Counter(who for _, who in ordered[: (len(ordered) + 1) // 2])
        return [counted[who] for who in range(len(self.sales))]

    @property
    def gap_ns(self) -> int:
        """The longest time between two sales, whoever made them, from the last one before a node was stopped.

        Where time was over with something left, it is one of the two.
        """
        ordered = sorted(sold_ns for times in self.sales for sold_ns in times)
        before = bisect.bisect_right(ordered, self.stopping_ns)
        moments = [*(ordered[before - 1 : before] or [self.stopping_ns]), *ordered[before:]]
        if self.taken < self.work:
            moments.append(max(self.end_ns, moments[-1]))
        return max((later - earlier for earlier, later in pairwise(moments)), default=0)

    @property
    def sold_while_stopped(self) -> int:
        """Sales after a node had stopped."""
        return sum(sold_ns > self.stopped_ns > 0 for times in self.sales for sold_ns in times)

    @property
    def process_share(self) -> float:
        """Sales per contender in the process that sold the least, as a part of those where it was most."""
        counts = iter(self.counts)
        shares = [sum(next(counts) for _ in range(size)) / size for size in self.processes]
        return min(shares) / max(shares) if max(shares) else 0.0

    @property
    def wait_p99_ns(self) -> int:
        return percentile(sorted(self.waits), 99) if self.waits else 0


def unevenness(counts: Sequence[int]) -> float:
    """The most that one contender has, over the median; infinite where the median is 0."""
    middle = median(counts)
    return max(counts) / middle if middle else float("inf")


def split(contenders: int, processes: int) -> list[int]:
    """Share contenders evenly over processes."""
    each, more = divmod(contenders, processes)
    return [each + (number < more) for number in range(processes)]


class Worker:
    """One process of contenders. Leaving the ``with`` block ends it."""

    def __init__(self, command: Sequence[str], job: Job, env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **(env or {})},
            )
        except BaseException:
            self._errors.close()
            raise
        try:
            self._say(json.dumps(asdict(job)))
        except BaseException:
            self.close()
            raise

    def await_ready(self, deadline: float) -> None:
        """Wait until its contenders can start."""
        told = self._hear(deadline)
        if "missing" in told:
            raise Missing(told["missing"])

    def start(self, at_ns: int) -> None:
        """Let them start at that moment."""
        self._say(str(at_ns))

    def result(self, deadline: float) -> dict[str, Any]:
        """What they did; see `bench.stock_worker`."""
        return self._hear(deadline)

    def close(self) -> None:
        """End the process, if it has not ended."""
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[self._process.stdin.write(data) or 0 :]
        except BrokenPipeError:
            raise self._broken() from None

    def _hear(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout
        pipe = self._process.stdout.fileno()
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._broken(in_time=False)
            data = os.read(pipe, 1 << 20)
            if not data:
                raise self._broken()
            pieces.append(data)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told

    def _broken(self, in_time: bool = True) -> RuntimeError:
        if in_time:  # its pipes are closed: it is about to end, if it has not
            try:
                how = f"ended with status {self._process.wait(5)}"
            except subprocess.TimeoutExpired:
                how = "closed its pipes"
        else:
            how = "did not answer in time"
        self._errors.seek(0)
        told = self._errors.read().decode(errors="replace").strip().splitlines()[-20:]
        error = RuntimeError(f"a process of contenders {how}: {told[-1] if told else 'it said nothing'}")
        error.add_note("\n".join(told))
        return error


def run(entry: Entry, place: Place, key: str) -> Account:
    """Have the contenders of one row sell the stock.

    Raises:
        Missing: its library is not there.
        RuntimeError: a process broke off, or did not come to its end.
    """
    if entry.unfit:
        raise Missing(entry.unfit)
    contenders, processes = (1, 1) if entry.alone else (place.contenders, place.processes)
    # Without a lock the stock goes up again and again: there an end is needed that does not depend on it.
    share = -(-place.work // contenders)
    most = 2 * share if not entry.locked else share if place.even else place.work
    sizes = split(contenders, processes)
    stock = f"{key}:stock"
    stopped_ns = (0, 0)
    with ExitStack() as stack:
        client = stack.enter_context(closing(redis.Redis.from_url(place.urls[0])))
        client.set(stock, place.work)
        if place.stop:
            stack.callback(place.stop.resume)
        workers = []
        for size in sizes:
            job = Job(entry.library, dict(entry.options), place.urls, key, stock, size, most, place.seconds)
            workers.append(stack.enter_context(Worker(entry.command, job, dict(entry.env))))
        deadline = time.monotonic() + READY
        for worker in workers:
            worker.await_ready(deadline)
        start_ns = time.monotonic_ns() + HEAD_START_NS
        for worker in workers:
            worker.start(start_ns)
        end = start_ns / 1e9 + place.seconds
        if place.stop:
            stopped_ns = _stop_half_way(place.stop, client, stock, place.work // 2, end)
        results = [worker.result(end + GRACE) for worker in workers]
        left = _left(client, stock)
    return Account(
        sales=[times for result in results for times in result["sales"]],
        processes=sizes,
        waits=[wait for result in results for waits in result["waits"] for wait in waits],
        taken=place.work - left,
        work=place.work,
        start_ns=start_ns,
        gave_up=sum(result["gave_up"] for result in results),
        unreleased=sum(result["unreleased"] for result in results),
        tries=sum(result.get("tries", 0) for result in results),
        grants=sum(result.get("grants", 0) for result in results),
        stopping_ns=stopped_ns[0],
        stopped_ns=stopped_ns[1],
        end_ns=start_ns + int(place.seconds * 1e9) if place.stop else 0,
        notes=tuple(sorted({note for result in results for note in result.get("notes", ())})),
    )


def _left(client: redis.Redis, stock: str) -> int:
    left = client.get(stock)
    if not isinstance(left, bytes):
        raise RuntimeError("the stock is gone from the server")
    return int(left)


def _stop_half_way(
    node: LocalNode, client: redis.Redis, stock: str, half: int, end: float
) -> tuple[int, int]:
    """Stop a node when half of the stock is sold; from when to when that took, or zeros if time was over."""
    while _left(client, stock) > half:
        if time.monotonic() > end:
            return 0, 0
        time.sleep(LOOK)
    stopping_ns = time.monotonic_ns()
    node.pause()
    return stopping_ns, time.monotonic_ns()
