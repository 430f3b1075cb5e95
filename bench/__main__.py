"""``python -m bench``: redbolt beside the floor of this machine and beside its peers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import redbolt
from bench.cores import HOW, Cores, can_pin
from bench.report import Progress, head, lines
from bench.runner import Plan
from bench.scenarios import Imports, ManyNodes, OneNode, OneStopped, Scenario, Setup, ThreadsOnKeys
from redbolt.local import LocalNodes

FULL = Plan(passes=30, seconds=0.25)
QUICK = Plan(passes=12, seconds=0.17)
EMBEDDED = 5


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="about a minute in all; without it about four")
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
    args = parser.parse_args(argv)
    if args.unix and args.nodes:
        parser.error("--unix is for the throwaway servers; give --nodes unix:// URLs")
    if any(value is not None and value <= 0 for value in (args.passes, args.seconds, args.cycles)):
        parser.error("--passes, --seconds and --cycles must be above 0")
    return args


def plan(args: argparse.Namespace) -> Plan:
    base = QUICK if args.quick else FULL
    return Plan(args.passes or base.passes, args.seconds or base.seconds, args.cycles or base.limit)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    with ExitStack() as stack:
        nodes = None if args.nodes else stack.enter_context(LocalNodes(EMBEDDED))
        urls = args.nodes or [node.unix_url if args.unix else node.url for node in nodes or ()]
        stack.callback(redbolt.close)
        pin = args.pin or ("best" if nodes and can_pin() else None)
        cores = stack.enter_context(closing(Cores(urls))) if pin else None
        engines = ("native", "pure") if args.engine == "both" else (args.engine,)
        setup = Setup(urls, engines, plan(args), forced=args.engine != "both")

        one_node = OneNode(setup)
        scenarios: list[Scenario] = [one_node]
        if len(urls) > 1:
            scenarios.append(ManyNodes(setup))
        if nodes:
            scenarios.append(OneStopped(setup, nodes))
        scenarios += [ThreadsOnKeys(setup), Imports(setup)]
        for scenario in scenarios:
            stack.enter_context(closing(scenario))

        where = f"{len(urls)} by {'--nodes' if args.nodes else 'unix socket' if args.unix else 'TCP'}"
        top = head(urls, where, one_node.released_by, argv)
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

        text = json.dumps({"head": top, "scenarios": results}, indent=1)
        if args.json == "-":
            print(text)
        elif args.json:
            Path(args.json).write_text(text + "\n")
        print(*lines(top, results), sep="\n", file=sys.stderr if args.json == "-" else sys.stdout)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
