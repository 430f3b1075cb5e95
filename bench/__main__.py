"""``python -m bench``: redbolt beside the floor of this machine and beside its peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import redbolt
from bench import environments
from bench.cores import HOW, Cores, can_pin
from bench.peers import PEERS
from bench.report import Progress, draw, head, picture, publish
from bench.runner import Plan
from bench.scenarios import Imports, ManyNodes, OneNode, OneStopped, Scenario, Setup, ThreadsOnKeys
from redbolt.local import LocalNodes

FULL = Plan(passes=30, seconds=0.25)
QUICK = Plan(passes=12, seconds=0.17)
EMBEDDED = 5


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="`python -m bench stock --help`: many contenders for one lock; "
        "`python -m bench handoff --help`: how fast a lock is passed on; "
        "`python -m bench renew --help`: what it costs that leases are renewed",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="about a minute in all; without it about four")
    add(
        "--peers",
        action="store_true",
        help="more peers, each installed below build/peers when first needed; one that is missing ends the "
        "run, with --quick it is left out",
    )
    add("--engine", choices=("native", "pure", "both"), default="both", help="default: both")
    add("--nodes", nargs="+", metavar="URL", help="servers to use, the first one for one node")
    add("--unix", action="store_true", help="reach the throwaway servers by unix sockets")
    add(
        "--pin",
        choices=HOW,
        help="servers on other cores (apart), all on one core (together), as the system "
        "likes (free), or what suits each scenario (best); default: best, on throwaway servers",
    )
    add("--passes", type=int, metavar="N", help=f"default: {FULL.passes}; quick: {QUICK.passes}")
    add("--seconds", type=float, metavar="S", help=f"a slice; {FULL.seconds}; quick: {QUICK.seconds}")
    add("--cycles", type=int, metavar="N", help="most cycles in a slice; default: as many as fit")
    add("--json", metavar="FILE", help="write all figures; - for stdout, the table then goes to stderr")
    add("--plot", metavar="FILE.svg", type=Path, help="draw how the durations of the cycles are distributed")
    args = parser.parse_args(argv)
    if args.unix and args.nodes:
        parser.error("--unix is for the throwaway servers; give --nodes unix:// URLs")
    if any(value is not None and value <= 0 for value in (args.passes, args.seconds, args.cycles)):
        parser.error("--passes, --seconds and --cycles must be above 0")
    if args.plot and (why := unfit(args.plot)):
        parser.error(f"--plot {args.plot}: {why}")
    return args


def unfit(plot: Path) -> str:
    """Why the plot cannot be written there, if it cannot."""
    if plot.suffix != ".svg":
        return "the name must end in .svg"
    there = plot.exists()
    try:
        with plot.open("ab"):
            pass
        if not there:
            plot.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def plan(args: argparse.Namespace) -> Plan:
    base = QUICK if args.quick else FULL
    return Plan(args.passes or base.passes, args.seconds or base.seconds, args.cycles or base.limit)


def choose(setup: Setup, nodes: LocalNodes | None, stack: ExitStack) -> Iterator[Scenario]:
    """What can be measured on these nodes; the stack closes it."""

    def closed(scenario: Scenario) -> Scenario:
        return stack.enter_context(closing(scenario))

    yield closed(OneNode(setup))
    if len(setup.urls) > 1:
        yield closed(ManyNodes(setup))
    if nodes:
        yield closed(OneStopped(setup, nodes))
    yield closed(ThreadsOnKeys(setup))
    yield closed(Imports(setup))


def measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run all scenarios, and report."""
    plotter = environments.python("matplotlib") if args.plot else None
    with ExitStack() as stack:
        nodes = None if args.nodes else stack.enter_context(LocalNodes(EMBEDDED))
        urls = args.nodes or [node.unix_url if args.unix else node.url for node in nodes or ()]
        stack.callback(redbolt.close)
        pin = args.pin or ("best" if nodes and can_pin() else None)
        cores = stack.enter_context(closing(Cores(urls))) if pin else None
        engines = ("native", "pure") if args.engine == "both" else (args.engine,)
        setup = Setup(urls, engines, plan(args), forced=args.engine != "both")
        if args.peers:
            setup.peers, setup.required = PEERS, not args.quick
        scenarios = list(choose(setup, nodes, stack))

        where = f"{len(urls)} by {'--nodes' if args.nodes else 'unix socket' if args.unix else 'TCP'}"
        peers = [version for scenario in scenarios for version in scenario.versions]
        top = head(urls, where, scenarios[0].released_by, argv, peers)
        progress = Progress(sum(scenario.steps for scenario in scenarios))
        results = []
        for scenario in scenarios:
            if cores and pin and scenario.fastest:
                how = scenario.fastest if pin == "best" else pin
                cores.pin(how)
                scenario.title += f" ({'cores as they come' if how == 'free' else f'pinned {how}'})"
            progress.begin(scenario.title)
            results.append(scenario.run(progress.step))
        progress.end()

        publish(top, results, args.json)
        if plotter:
            cycles = (OneNode, ManyNodes)
            each = zip(results, scenarios, strict=True)
            panels = [(result, scenario.slices) for result, scenario in each if isinstance(scenario, cycles)]
            draw(plotter, picture(top, panels), args.plot)
    return 0


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["stock"]:
        from bench import stock

        return stock.main(list(argv[1:]))
    if argv[:1] == ["handoff"]:
        from bench import handoff

        return handoff.main(list(argv[1:]))
    if argv[:1] == ["renew"]:
        from bench import renew

        return renew.main(list(argv[1:]))
    args = arguments(argv)
    try:
        return measure(args, argv)
    except environments.Unavailable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
