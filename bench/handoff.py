"""``python -m bench handoff``: from a holder's call of release() to the moment the waiter has the lock.

Two contenders, in two processes or in two threads of one, pass a lock to and fro. Each waits in its blocking
acquire() for at least 3 ms, asleep, before the other one calls release(); see `bench.handoff_board`. Where a
library polls, the lock is held for a random part of its pause, else for up to 2 ms more. The rows take turns
in short slices. The floors are C: the waiter blocks in recv until the first node tells it, by a message or by
an element of a list, and then writes SET NX to all nodes; see `handoff.c`.

Contenders and servers are put on one core, if not told otherwise. A hand-off is a chain, in which one waits
for the other: on several cores most of it is how long these take to wake, which hides what a row computes.
On one core also what the holder does after its release counts, if it is done before the waiter runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import median
from typing import Any

from bench.cores import HOW, Cores, can_pin
from bench.environments import Unavailable
from bench.floor import build
from bench.handoff_floor import SOURCE, TOLD_BY
from bench.handoff_run import BETWEEN, Pair, Program
from bench.peers import CONTENDING, Contending
from bench.report import Progress, head, publish
from bench.runner import Plan, Slice, figures, ratios, summary
from bench.scenarios import Result, Scenario, Setup, at_most
from redbolt.local import LocalNodes

__all__ = ["FLOOR", "Handoff", "main"]

FULL = Plan(passes=10, seconds=2.5, limit=100)
QUICK = Plan(passes=3, seconds=1.5, limit=50)
FLOOR = TOLD_BY["message"]

BOUNDS = {("processes", 1): 1.35, ("processes", 5): 1.15}
"""At most so many times the floor, for the native engine."""
NOTE = """\
Of each hand-off: from just before release() is called until acquire() has returned to the other contender.
x floor: times "pub/sub + SET" between the same two, on the same nodes. A row that polls has fewer samples."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench handoff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", choices=("1", "5", "both"), default="both", help="default: both")
    add("--between", choices=(*BETWEEN, "both"), default="both", help="default: both")
    add("--engine", choices=("native", "pure", "both"), default="both", help="default: both")
    add("--passes", type=int, metavar="N", help=f"default: {FULL.passes}; quick: {QUICK.passes}")
    add("--samples", type=int, metavar="N", help=f"in a slice; {FULL.limit}; quick: {QUICK.limit}")
    add(
        "--seconds", type=float, metavar="S", help=f"most for a slice; {FULL.seconds}; quick: {QUICK.seconds}"
    )
    add("--quick", action="store_true", help="fewer and shorter slices")
    add(
        "--peers",
        action="store_true",
        help="more peers, between processes, each installed below build/peers when first needed; one that "
        "is missing ends the run, with --quick it is left out",
    )
    add(
        "--pin",
        choices=HOW[1:],
        help="servers on other cores than both contenders (apart), all on one core (together), or as the "
        "system likes (free); default: together, where the system can",
    )
    add("--json", metavar="FILE", help="write all figures; - for stdout, the table then goes to stderr")
    args = parser.parse_args(argv)
    if any(value is not None and not 0 < value < 1e6 for value in (args.passes, args.samples, args.seconds)):
        parser.error("--passes, --samples and --seconds must be above 0")
    return args


def plan(args: argparse.Namespace) -> Plan:
    base = QUICK if args.quick else FULL
    return Plan(args.passes or base.passes, args.seconds or base.seconds, args.samples or base.limit)


class Handoff(Scenario):
    """Hand-offs between two processes, or two threads, on some nodes."""

    def __init__(self, setup: Setup, between: str, peers: Sequence[Contending] = ()) -> None:
        count = len(setup.urls)
        nodes = "1 node" if count == 1 else f"{count} nodes"
        super().__init__(setup, f"hand-off between {between}, {nodes}")
        self.between = between
        self.bounds: dict[str, float] = {}
        lock = "Lock" if count == 1 else "RedLock"
        try:
            for told_by, title in TOLD_BY.items():
                self.pair(title, Program("floor", {"told_by": told_by}))
            for engine in setup.engines:
                self.pair(f"redbolt {lock}, {engine}", Program("redbolt", {"engine": engine}), setup.forced)
            if (between, count) in BOUNDS:
                self.bounds[f"redbolt {lock}, native"] = BOUNDS[between, count]
            if count == 1:
                self.pair("redis-py Lock", Program("redis-py", polls=0.1))
            else:
                self.pair("redlock-py", Program("redlock-py", polls=0.2))
            for peer in peers:
                if between == "processes" and peer.many_nodes == (count > 1):
                    self.peer(peer)
        except BaseException:
            self.close()  # half made, it has no owner yet
            raise

    def pair(self, title: str, program: Program, forced: bool = False) -> None:
        """Add a row."""
        self.add(title, lambda: Pair(title, program, self.between, self.setup.urls, self.setup.key()), forced)

    def peer(self, peer: Contending) -> None:
        """Add a peer in an environment of its own, installing what is missing."""
        try:
            started = peer.program("handoff_worker")
            self.pair(peer.name, Program(peer.library, {}, peer.polls, peer.packages, started))
        except Unavailable as error:
            self.leave_out(peer.name, str(error))

    @property
    def versions(self) -> list[str]:
        return [row.versions for row in self.rows if isinstance(row, Pair) and row.versions]

    def judge(self, name: str, slices: dict[str, list[Slice]]) -> Result:
        mine = slices[name]
        measured = figures(mine)
        ratio = summary(ratios(mine, slices[FLOOR]))
        targets = []
        if name in self.bounds:
            targets.append(at_most(self.bounds[name], FLOOR, median(ratio["per_pass"])))
        return {
            "row": name,
            "samples": measured.pop("cycles"),
            **measured,
            "floor": ratio,
            "targets": targets,
        }


def measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run all scenarios, and report."""
    counts = (1, 5) if args.nodes == "both" else (int(args.nodes),)
    betweens: Iterable[str] = BETWEEN if args.between == "both" else (args.between,)
    engines = ("native", "pure") if args.engine == "both" else (args.engine,)
    build(source=SOURCE)
    with ExitStack() as stack:
        nodes = stack.enter_context(LocalNodes(max(counts)))
        urls = [node.url for node in nodes]
        pin = args.pin or ("together" if can_pin() else "free")
        if can_pin():
            stack.enter_context(closing(Cores(urls))).pin(pin)
        every = Setup(urls, engines, plan(args), args.engine != "both", required=not args.quick)
        setups = [replace(every, urls=urls[:count]) for count in counts]  # no two rows share a key
        peers = CONTENDING if args.peers else ()
        scenarios = [
            stack.enter_context(closing(Handoff(setup, between, peers)))
            for setup in setups
            for between in betweens
        ]
        versions = dict.fromkeys(version for scenario in scenarios for version in scenario.versions)
        top = head(urls, f"{len(urls)} by TCP", "each as it does", ["handoff", *argv], [*versions])
        progress = Progress(sum(scenario.steps for scenario in scenarios))
        results: list[dict[str, Any]] = []
        for scenario in scenarios:
            scenario.title += " (cores as they come)" if pin == "free" else f" (pinned {pin})"
            progress.begin(scenario.title)
            results.append(scenario.run(progress.step))
        progress.end()

    publish(top, results, args.json, NOTE)
    return 0


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    try:
        return measure(args, argv)
    except Unavailable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
