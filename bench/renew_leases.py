"""Many leases, each held and renewed by a process of its own: the first part of ``python -m bench renew``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from bench.environments import Unavailable
from bench.peers import Contending, Process, Redbolt
from bench.renew_worker import CROWDS
from bench.scenarios import Result, Scenario, Setup
from redbolt.local import LocalNode

__all__ = ["NORM", "PEER", "Crowd", "Leases", "Program", "Size", "figures", "targets"]

ROOT = Path(__file__).parent.parent
GRACE = 60.0
"""Seconds that a process may take longer than it was asked to, also to acquire a thousand locks."""


@dataclass(frozen=True)
class Size:
    """How many leases of how many seconds are held, and for how long once all are acquired."""

    leases: int
    lease_s: float
    seconds: float

    @property
    def title(self) -> str:
        return f"{self.leases:,} renewed leases of {self.lease_s:g} s, held for {self.seconds:g} s"


PEER = Size(200, 3, 6)
"""What a peer is asked for that has a thread per lock."""
NORM = Size(10_000, 30, 45)
"""The usual size; for that the bound of CPU was set."""
MOST_CPU = 10
"""Per cent of one core."""


def _own() -> tuple[list[str], dict[str, str]]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", "bench.renew_worker"], {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Program:
    """What holds the leases: a library and its options, and how its program is started."""

    library: str
    options: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()
    started: tuple[list[str], dict[str, str]] = field(default_factory=_own)


class Crowd:
    """A row: a process that holds many leases on some nodes.

    Raises:
        ImportError: the library is not there, or cannot do what is wanted.
        Unavailable: its program does not start.
    """

    def __init__(self, name: str, program: Program, nodes: Sequence[LocalNode], size: Size) -> None:
        self.name = name
        self.program = program
        self.size = size
        self._nodes = nodes
        command, env = program.started
        self._process = Process(
            name,
            command,
            [node.url for node in nodes],
            env,
            library=program.library,
            options=dict(program.options),
            packages=list(program.packages),
            lease_s=size.lease_s,
        )
        self.versions = self._process.versions

    def run(self, key: str) -> Result:
        """Have the leases acquired and renewed, and say what came of it.

        Raises:
            RuntimeError: the process broke off, or did not come to its end.
        """
        process, size = self._process, self.size
        process.say({"key": key, "leases": size.leases})
        done = process.hear(GRACE * (1 + size.leases / 1000))
        before, begin = cpu_s(self._nodes), time.monotonic()
        process.say({"seconds": size.seconds})
        done |= process.hear(size.seconds + GRACE)
        after, took = cpu_s(self._nodes), time.monotonic() - begin
        row = figures(self.name, len(self._nodes), size.leases, done)
        if before is not None and after is not None:
            row["nodes_percent"] = (after - before) / took * 100
        return row

    def close(self) -> None:
        """End the process, with all that it holds."""
        self._process.close()


def cpu_s(nodes: Sequence[LocalNode]) -> float | None:
    """Seconds of CPU that the servers have used so far; None where one cannot see that."""
    ticks = 0
    for node in nodes:
        try:
            stat = Path(f"/proc/{node.pid}/stat").read_text()
        except FileNotFoundError:
            return None
        user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


def figures(name: str, nodes: int, leases: int, done: Mapping[str, Any]) -> Result:
    """A row of what its process measured; see `bench.renew_worker.measured`."""
    row: Result = {
        "row": name,
        "nodes": nodes,
        "leases": leases,
        "acquired_s": done["acquired_s"],
        "cpu_percent": done["cpu_s"] / done["seconds"] * 100,
        "renewals_rate": done["renewals"] / done["seconds"],
        "least": done["least"],
        "failed": done["failed"],
        "lost": done["lost"],
        "targets": [],
    }
    if done["renewals"]:
        row["ms_per_1000"] = done["cpu_s"] / done["renewals"] * 1e6
    for what in ("sockets", "threads"):
        first, last = done[what]
        if first is not None and last is not None:
            row[what] = {"first": first, "last": last}
    return row


def targets(row: Result, size: Size) -> list[Result]:
    """What a row of redbolt shall reach; the bound of CPU, for as many renewals a second as in `NORM`."""
    verdicts = []
    if size.leases * NORM.lease_s == NORM.leases * size.lease_s:
        verdicts.append(_at_most(MOST_CPU, "CPU %", row["cpu_percent"]))
    verdicts.append(_at_most(0, "lost", row["lost"]))
    if "threads" in row:
        verdicts.append(_at_most(1, "threads beside the main one", max(row["threads"].values()) - 1))
    if "sockets" in row:
        # One to acquire by, and one to renew by.
        verdicts.append(_at_most(2, "sockets per node", max(row["sockets"].values()) / row["nodes"]))
    return verdicts


def _at_most(bound: float, what: str, measured: float) -> Result:
    return {"target": f"{what} <= {bound:g}", "measured": measured, "met": measured <= bound}


class Leases(Scenario):
    """Many renewed leases on all nodes, by each engine; and a peer's, fewer and shorter, on one node."""

    fastest = "free"

    def __init__(
        self, setup: Setup, nodes: Sequence[LocalNode], size: Size, peers: Sequence[Contending] = ()
    ) -> None:
        super().__init__(setup, size.title)
        self.nodes = nodes
        self.crowds: list[Crowd] = []
        try:
            for engine in setup.engines:
                self.crowd(Redbolt.title("RedLock", engine), Program("redbolt", {"engine": engine}), size)
            for peer in peers:
                if peer.library in CROWDS:
                    self.peer(peer)
        except BaseException:
            self.close()  # half made, it has no owner yet
            raise

    def crowd(self, title: str, program: Program, size: Size) -> None:
        """Add a row; if its library is not there, say so instead, unless it is forced."""
        try:
            self.crowds.append(Crowd(title, program, self.nodes, size))
        except ImportError as error:
            if self.setup.forced:
                raise
            self.missing.append({"row": title, "missing": f"not run: {error}"})

    def peer(self, peer: Contending) -> None:
        """Add a peer in an environment of its own, installing what is missing."""
        title = f"{peer.name}, leases of {PEER.lease_s:g} s for {PEER.seconds:g} s"
        try:
            program = Program(peer.library, {}, peer.packages, peer.program("renew_worker"))
            self.crowds.append(Crowd(title, program, self.nodes[:1], PEER))
        except (ImportError, Unavailable) as error:
            self.leave_out(title, str(error))

    @property
    def steps(self) -> int:
        return len(self.crowds)

    @property
    def versions(self) -> list[str]:
        return [crowd.versions for crowd in self.crowds if crowd.versions]

    def run(self, step: Callable[[], None]) -> Result:
        """Measure one row after the other. What one has left behind is removed before the next begins."""
        rows = []
        for crowd in self.crowds:
            try:
                rows.append(self.measure(crowd))
            except RuntimeError as error:
                print(f"bench: {error}", file=sys.stderr, flush=True)
                why = str(error).splitlines()[-1]
                rows.append({"row": crowd.name, "missing": f"**broke: {why}**", "broke": True})
            finally:
                crowd.close()
            for node in self.nodes:
                with redis.Redis.from_url(node.url) as client:
                    client.flushall()
            step()
        return {"title": self.title, "rows": rows + self.missing}

    def measure(self, crowd: Crowd) -> Result:
        """What came of a row; redbolt's have targets, that only the native engine must reach."""
        row = crowd.run(self.setup.key())
        if crowd.program.library == "redbolt":
            row["targets"] = targets(row, crowd.size)
            row["informs"] = crowd.program.options["engine"] != "native"
        return row

    def close(self) -> None:
        """End all processes."""
        for crowd in self.crowds:
            crowd.close()
