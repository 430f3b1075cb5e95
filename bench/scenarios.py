"""What is measured: each scenario has its rows, its targets, and a result of plain numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median
from typing import Any

import redis
from redis.utils import HIREDIS_AVAILABLE

from bench.environments import Unavailable
from bench.floor import Floor
from bench.peers import Peer, Redbolt, RedisPy, RedlockPy, Threads, Worker
from bench.runner import Plan, Row, Slice, figures, interleave, order, quiet, rate, ratios, summary
from redbolt.local import LocalNodes

__all__ = ["Imports", "ManyNodes", "OneNode", "OneStopped", "Scenario", "Setup", "ThreadsOnKeys"]

Result = dict[str, Any]
Wrap = Callable[[Callable[[], Row]], Row]
THREADS = 8


@dataclass
class Setup:
    """What is measured where. The targets for several nodes are for five."""

    urls: list[str]
    engines: Sequence[str]
    plan: Plan
    forced: bool = False
    peers: Sequence[Peer] = ()
    required: bool = False
    """Whether a peer that is missing ends the run; else its row says so."""
    nodes: LocalNodes | None = None
    _numbers: Iterator[int] = field(default_factory=count)

    def key(self) -> str:
        """A name of its own for each lock, all equally long."""
        return f"bench:{os.getpid():07d}:{next(self._numbers):03d}"


def at_most(bound: float, text: str, measured: float) -> Result:
    return {"target": f"<= {bound:.2f} x {text}", "measured": measured, "met": measured <= bound}


def at_least(bound: float, text: str, measured: float) -> Result:
    return {"target": f">= {bound:.2f} x {text}", "measured": measured, "met": measured >= bound}


class Scenario:
    """Rows that can be compared. What cannot run here is listed with the reason."""

    fastest = "apart"
    """Whether the floor is faster with the servers on other cores (apart) or on its own (together)."""
    released_by = ""
    """The command that gives back a lock on the first node; where the scenario finds it out."""

    def __init__(self, setup: Setup, title: str) -> None:
        self.setup = setup
        self.title = title
        self.plan = setup.plan
        self.rows: list[Row] = []
        self.missing: list[Result] = []
        self.slices: dict[str, list[Slice]] = {}

    @property
    def steps(self) -> int:
        """How often `run` calls its `step`."""
        return len(self.rows) * (self.plan.passes + 1)

    def add(self, title: str, make: Callable[[], Row], forced: bool = False) -> None:
        """Make a row; if a module that it needs is not there, say so instead, unless it is forced."""
        try:
            self.rows.append(make())
        except ImportError as error:
            if forced:
                raise
            self.missing.append({"row": title, "missing": f"not run: {error.__cause__ or error}"})

    def add_redbolt(self, what: str, urls: Sequence[str], wrap: Wrap | None = None) -> None:
        """Add a row for each engine of one of redbolt's locks."""
        for engine in self.setup.engines:

            def one(engine: str = engine) -> Row:
                return Redbolt(what, urls, self.setup.key(), engine)

            def make(one: Callable[[], Row] = one) -> Row:
                return wrap(one) if wrap else one()

            self.add(Redbolt.title(what, engine), make, self.setup.forced)

    def add_peers(self, urls: Sequence[str], many_nodes: bool) -> None:
        """Add the peers of redbolt's lock on one node or of the one on many, installing what is missing."""
        for peer in self.setup.peers:
            if peer.many_nodes != many_nodes:
                continue
            try:
                self.rows.append(peer.row(urls, self.setup.key()))
            except Unavailable as error:
                self.leave_out(peer.name, str(error))

    def leave_out(self, peer: str, why: str) -> None:
        """Say that a peer is missing; or end the run, if it is required."""
        if self.setup.required:
            self.close()  # half made, it has no owner yet
            raise Unavailable(f"{peer}: {why}")
        print(f"bench: left out: {peer}: {why}", file=sys.stderr, flush=True)
        self.missing.append({"row": peer, "missing": f"not run: {why}"})

    @property
    def versions(self) -> list[str]:
        """Of the peers that run in environments of their own."""
        return [row.versions for row in self.rows if isinstance(row, Worker)]

    def run(self, step: Callable[[], None]) -> Result:
        """Measure, and say what came of it."""
        self.slices = slices = interleave(self.rows, self.plan, step)
        results = [self.judge(row.name, slices) for row in self.rows]
        return {"title": self.title, "rows": results + self.missing}

    def judge(self, name: str, slices: dict[str, list[Slice]]) -> Result:
        """What came of one row, with its targets."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up all connections."""
        for row in self.rows:
            row.close()


class _Cycles(Scenario):
    """Uncontended cycles of one lock, beside the floor and its peers."""

    # By row: at most so many times another row, at least so many times faster than a peer.
    bounds: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]

    def judge(self, name: str, slices: dict[str, list[Slice]]) -> Result:
        mine = slices[name]
        floor = summary(ratios(mine, slices[Floor.name]))
        targets = []
        at_most_times, faster = self.bounds.get(name, ({}, {}))
        for other, bound in at_most_times.items():
            if other in slices:
                what = "floor" if other == Floor.name else other
                targets.append(at_most(bound, what, median(ratios(mine, slices[other]))))
        for peer, bound in faster.items():
            if peer in slices:
                times = median(ratios(slices[peer], mine))
                targets.append(at_least(bound, f"faster than {peer}", times))
        return {"row": name, **figures(mine), "floor": floor, "targets": targets}


class OneNode(_Cycles):
    """A Lock on one node."""

    fastest = "together"
    bounds = {  # noqa: RUF012
        "redbolt Lock, native": ({Floor.name: 1.20}, {RedisPy.title: 3.2}),
        "redbolt Lock, pure": ({}, {RedisPy.title: 1 / 0.85}),
        "redbolt ReentrantLock, native": ({"redbolt Lock, native": 1.3}, {}),
        "redbolt compat Lock, native": ({}, {RedisPy.title: 3.0}),
    }

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "one node")
        urls = setup.urls[:1]
        floor = Floor(urls, setup.key())
        self.released_by = floor.released_by
        self.rows.append(floor)
        for what in ("Lock", "ReentrantLock", "compat Lock"):
            self.add_redbolt(what, urls)
        if setup.required and not HIREDIS_AVAILABLE:
            self.leave_out("redis-py with hiredis", "hiredis is not installed")
        self.rows.append(RedisPy(redis.Redis.from_url(urls[0]), setup.key()))
        self.add_peers(urls, many_nodes=False)


class ManyNodes(_Cycles):
    """A RedLock on all nodes."""

    of_five = {  # noqa: RUF012
        "redbolt RedLock, native": (
            {Floor.name: 1.10},
            {RedlockPy.title: 6.0, "redlock-ng": 4.5, "node redlock": 2.0},
        ),
        "redbolt RedLock, pure": ({}, {RedlockPy.title: 2.0}),
    }

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, f"{len(setup.urls)} nodes")
        self.bounds = self.of_five if len(setup.urls) == 5 else {}
        self.rows.append(Floor(setup.urls, setup.key()))
        self.add_redbolt("RedLock", setup.urls)
        try:
            self.rows.append(RedlockPy(setup.urls, setup.key()))
        except ImportError as error:
            self.leave_out(RedlockPy.title, str(error))
        self.add_peers(setup.urls, many_nodes=True)


class OneStopped(Scenario):
    """All nodes healthy and one of them stopped, in turns, each time another one."""

    def __init__(self, setup: Setup, nodes: LocalNodes) -> None:
        super().__init__(setup, f"one of {len(setup.urls)} nodes stopped")
        self.nodes = nodes
        self.settling = replace(self.plan, seconds=self.plan.seconds / 2)
        self.rows.append(Floor(setup.urls, setup.key()))
        self.add_redbolt("RedLock", setup.urls)
        self.missing.append({"row": RedlockPy.title, "missing": "not run: it hangs for over 8 s"})

    @property
    def steps(self) -> int:
        return len(self.rows) * self.plan.passes * 4

    def run(self, step: Callable[[], None]) -> Result:
        healthy: dict[str, list[Slice]] = {row.name: [] for row in self.rows}
        stopped: dict[str, list[Slice]] = {row.name: [] for row in self.rows}
        worst_ns = dict.fromkeys(stopped, 0)

        def turn(number: int, into: dict[str, list[Slice]]) -> None:
            for plan in (self.settling, self.plan):
                for row in order(self.rows, number):
                    with quiet():
                        done = row.run(plan.seconds, plan.limit)
                    if plan is self.plan:
                        into[row.name].append(done)
                    if into is stopped:
                        worst_ns[row.name] = max(worst_ns[row.name], *done.took_ns)
                    step()

        for number in range(self.plan.passes):
            turn(number, healthy)
            node = self.nodes[number % len(self.setup.urls)]
            node.pause()
            try:
                turn(number, stopped)
            finally:
                node.resume()

        results: list[Result] = []
        for name, mine in stopped.items():
            ratio = summary(ratios(mine, healthy[name]))
            bounded = isinstance(self.rows[len(results)], Redbolt) and len(self.setup.urls) == 5
            targets = [at_most(1.15, "healthy", ratio["median"])] if bounded else []
            result = {"row": name, "healthy_p50_us": figures(healthy[name])["p50_us"], **figures(mine)}
            results.append({**result, "worst_us": worst_ns[name] / 1e3, "ratio": ratio, "targets": targets})
        return {"title": self.title, "rows": results + self.missing}


class ThreadsOnKeys(Scenario):
    """Threads that do not want each other's locks, on one node."""

    fastest = "free"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, f"{THREADS} threads on {THREADS} keys, one node")
        self.plan = replace(setup.plan, seconds=2 * setup.plan.seconds)
        urls = setup.urls[:1]
        client = redis.Redis.from_url(urls[0])

        def threads(one: Callable[[], Row]) -> Row:
            return Threads([one() for _ in range(THREADS)])

        self.rows.append(threads(lambda: Floor(urls, setup.key())))
        self.add_redbolt("Lock", urls, threads)
        self.rows.append(threads(lambda: RedisPy(client, setup.key())))

    def judge(self, name: str, slices: dict[str, list[Slice]]) -> Result:
        mine = slices[name]
        floor = summary(ratios(mine, slices[Floor.name], rate))
        targets = [at_least(0.75, "floor", floor["median"])] if name == "redbolt Lock, native" else []
        cycles_per_second = median(map(rate, mine))
        return {"row": name, "rate": cycles_per_second, **figures(mine), "floor": floor, "targets": targets}


class Imports(Scenario):
    """Importing redbolt and importing redis, each in a fresh interpreter, in turns."""

    fastest = ""
    code = "import time; start = time.perf_counter_ns(); import {}; print(time.perf_counter_ns() - start)"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "import")
        self.times = max(self.plan.passes, 15)

    @property
    def steps(self) -> int:
        return 2 * (self.times + 1)

    def run(self, step: Callable[[], None]) -> Result:
        # From byte code, as an installed package is; the first run is not counted, and may write it.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        took_ns: dict[str, list[int]] = {"redis": [], "redbolt": []}
        for number in range(-1, self.times):
            for module in sorted(took_ns, reverse=number % 2 == 0):
                command = [sys.executable, "-c", self.code.format(module)]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60, env=env).stdout
                if number >= 0:
                    took_ns[module].append(int(out))
                step()
        pairs = zip(took_ns["redbolt"], took_ns["redis"], strict=True)
        ratio = summary([mine / base for mine, base in pairs])
        results: list[Result] = []
        for module, times in took_ns.items():
            figures_ms = {"p50_ms": median(times) / 1e6, "best_ms": min(times) / 1e6}
            results.append({"row": f"import {module}", **figures_ms, "targets": []})
        results[1] |= {"ratio": ratio, "targets": [at_most(1.10, "import redis", ratio["median"])]}
        return {"title": self.title, "rows": results}
