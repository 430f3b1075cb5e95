"""``python -m bench renew``: what it costs that leases are renewed.

`leases`: a process holds many locks on 5 nodes, each with a lease that is renewed every third of its length.
When all are acquired it does nothing but wait, at least one and a half lease lengths: what CPU it uses then
is that of the renewals. They need one thread, and one connection to each node, however many there are.

`cycle`: acquire and release of a lock with a renewed lease, and of one with a fixed lease, which nobody else
wants. The rows take turns in short slices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import median
from typing import Any

import redbolt
from bench.cores import HOW, Cores, can_pin
from bench.environments import Unavailable
from bench.peers import CONTENDING
from bench.renew_leases import NORM, Leases, Size
from bench.report import Progress, head, publish
from bench.runner import Plan, Slice, cycles, figures, ratios, summary
from bench.scenarios import Result, Scenario, Setup, at_most
from redbolt.local import LocalNodes

__all__ = ["Cycle", "RenewedOrFixed", "main"]

NODES = 5
QUICK = Size(2_000, 6, 12)
FULL_PLAN, QUICK_PLAN = Plan(passes=30, seconds=0.25), Plan(passes=12, seconds=0.17)
LEAST = 1.5
"""Lease lengths for which the leases are held at least."""

LEASE = 30
"""That of a lock which is told nothing, in seconds."""
BOUND = 1.1
"""At most so many times the cycle of a fixed lease."""

NOTE = """\
CPU: of the process that holds the leases, all its threads, in per cent of one core; "nodes CPU %": of all
servers. "least": how often the lease was renewed that was renewed the least. Sockets and threads: when all
were acquired, and at the end; the connections to renew by are opened with the first renewal. The leases are
held once; what they must reach is decided by the native engine."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench renew",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="?", choices=("leases", "cycle", "both"), default="both", help="default: both")
    add("--leases", type=int, metavar="N", help=f"default: {NORM.leases:,}; quick: {QUICK.leases:,}")
    add("--lease", type=float, metavar="S", help=f"how long one is; {NORM.lease_s:g}; {QUICK.lease_s:g}")
    add("--seconds", type=float, metavar="S", help=f"to hold them; {NORM.seconds:g}; {QUICK.seconds:g}")
    add("--engine", choices=("native", "pure", "both"), default="both", help="default: both")
    add("--passes", type=int, metavar="N", help=f"of the cycles; {FULL_PLAN.passes}; {QUICK_PLAN.passes}")
    add(
        "--slice",
        type=float,
        metavar="S",
        help=f"seconds of cycles in a row; {FULL_PLAN.seconds}; {QUICK_PLAN.seconds}",
    )
    add("--quick", action="store_true", help="fewer and shorter leases, as many renewals a second; a minute")
    add(
        "--peers",
        action="store_true",
        help="also a peer that has a thread per lock, installed below build/peers when first needed; if it "
        "is missing, the run ends, with --quick it is left out",
    )
    add(
        "--pin",
        choices=HOW,
        help="of the cycles: servers on other cores (apart), all on one core (together), as the system "
        "likes (free), or what suits each (best); default: best, where the system can",
    )
    add("--json", metavar="FILE", help="write all figures; - for stdout, the table then goes to stderr")
    args = parser.parse_args(argv)
    told = (args.leases, args.lease, args.seconds, args.passes, args.slice)
    if any(value is not None and not 0 < value < 1e6 for value in told):
        parser.error("--leases, --lease, --seconds, --passes and --slice must be above 0")
    asked = size(args)
    if asked.seconds < LEAST * asked.lease_s:
        parser.error(f"--seconds must be at least {LEAST:g} times --lease: {LEAST * asked.lease_s:g}")
    return args


def size(args: argparse.Namespace) -> Size:
    base = QUICK if args.quick else NORM
    return Size(args.leases or base.leases, args.lease or base.lease_s, args.seconds or base.seconds)


def plan(args: argparse.Namespace) -> Plan:
    base = QUICK_PLAN if args.quick else FULL_PLAN
    return Plan(args.passes or base.passes, args.slice or base.seconds)


class Cycle:
    """A row: one lock object, whose lease is renewed, as it is if one says nothing, or fixed.

    Raises:
        ImportError: the engine is not there.
        RuntimeError: the lease is not what it should be.
    """

    def __init__(self, urls: Sequence[str], key: str, engine: str, renewed: bool) -> None:
        what = "Lock" if len(urls) == 1 else "RedLock"
        self.name = self.title(what, engine, renewed)
        make: Any = getattr(redbolt, what)
        length = {} if renewed else {"timeout": LEASE}
        self._lock = make(urls[0] if len(urls) == 1 else urls, key, engine=engine, **length)
        with self._lock:
            if (self._lock.lease.renewal is not None) != renewed:
                raise RuntimeError(f"{self.name}: the lease is {'not ' if renewed else ''}renewed")

    @staticmethod
    def title(what: str, engine: str, renewed: bool) -> str:
        return f"redbolt {what}, {engine}, {'renewed' if renewed else 'fixed'}"

    def run(self, seconds: float, limit: int) -> Slice:
        return cycles(self._lock, seconds, limit)

    def close(self) -> None:
        pass


class RenewedOrFixed(Scenario):
    """The cycle of a renewed lease beside that of a fixed one, by each engine."""

    def __init__(self, setup: Setup) -> None:
        count = len(setup.urls)
        super().__init__(setup, f"cycle of a renewed lease, {'1 node' if count == 1 else f'{count} nodes'}")
        self.fastest = "together" if count == 1 else "apart"
        what = "Lock" if count == 1 else "RedLock"
        self.fixed: dict[str, str] = {}
        """By the row of a renewed lease that of the fixed one."""
        for engine in setup.engines:
            fixed, renewed = (Cycle.title(what, engine, renewed) for renewed in (False, True))
            self.fixed[renewed] = fixed
            for renews in (False, True):
                self.cycle(Cycle.title(what, engine, renews), engine, renews)

    def cycle(self, title: str, engine: str, renewed: bool) -> None:
        """Add a row."""
        setup = self.setup
        self.add(title, lambda: Cycle(setup.urls, setup.key(), engine, renewed), setup.forced)

    def judge(self, name: str, slices: dict[str, list[Slice]]) -> Result:
        mine = slices[name]
        row: Result = {"row": name, **figures(mine), "targets": []}
        if name in self.fixed:
            ratio = row["ratio"] = summary(ratios(mine, slices[self.fixed[name]]))
            row["targets"].append(at_most(BOUND, "fixed", median(ratio["per_pass"])))
        return row


def choose(args: argparse.Namespace, setup: Setup, nodes: LocalNodes) -> Iterator[Scenario]:
    """What is to be measured."""
    if args.what != "cycle":
        yield Leases(setup, [*nodes], size(args), CONTENDING if args.peers else ())
    if args.what != "leases":
        yield RenewedOrFixed(replace(setup, urls=setup.urls[:1]))
        yield RenewedOrFixed(setup)


def measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run all scenarios, and report."""
    engines = ("native", "pure") if args.engine == "both" else (args.engine,)
    with ExitStack() as stack:
        nodes = stack.enter_context(LocalNodes(NODES))
        urls = [node.url for node in nodes]
        stack.callback(redbolt.close)
        pin = args.pin or ("best" if can_pin() else None)
        cores = stack.enter_context(closing(Cores(urls))) if pin else None
        setup = Setup(urls, engines, plan(args), args.engine != "both", required=not args.quick)
        scenarios = [stack.enter_context(closing(each)) for each in choose(args, setup, nodes)]
        versions = dict.fromkeys(version for scenario in scenarios for version in scenario.versions)
        top = head(urls, f"{len(urls)} by TCP", "each as it does", ["renew", *argv], [*versions])
        progress = Progress(sum(scenario.steps for scenario in scenarios))
        results: list[dict[str, Any]] = []
        for scenario in scenarios:
            told = ["the quick form"] if args.quick else []
            if cores and pin:
                how = scenario.fastest if pin == "best" or isinstance(scenario, Leases) else pin
                cores.pin(how)
                told.append("cores as they come" if how == "free" else f"pinned {how}")
            scenario.title += f" ({', '.join(told)})" if told else ""
            progress.begin(scenario.title)
            results.append(scenario.run(progress.step))
        progress.end()

    publish(top, results, args.json, NOTE)
    return int(any(is_wrong(row) for result in results for row in result["rows"]))


def is_wrong(row: Result) -> bool:
    """Whether a row broke, or leases were lost that had to be renewed."""
    return bool(row.get("broke")) or (row.get("lost", 0) > 0 and row.get("informs") is False)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    try:
        return measure(args, argv)
    except Unavailable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
