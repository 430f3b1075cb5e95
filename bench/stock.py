"""``python -m bench stock``: many contenders sell one stock under one lock, as fast as they can.

The work is fixed: everybody takes from the same stock until it is sold. A library that polls looks fast as
long as the winner keeps winning, so how evenly the contenders were served stands beside the rate; and with
--even a contender leaves when it has sold its share, so that everybody's turn must come. Each contender
counts its own sales; what they add up to beyond what the stock lost was sold twice.

With --stop the node that redbolt asks first while a lock is contended is stopped when half of the work is
done; the stock is on another one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

from bench.environments import Unavailable
from bench.peers import CONTENDING
from bench.report import Progress, head
from bench.runner import summary
from bench.stock_run import Account, Entry, Missing, Place, run, unevenness
from bench.stock_targets import Shape, targets
from redbolt import Node
from redbolt.local import LocalNode, LocalNodes

__all__ = ["entries", "main"]

WORK, PASSES = 2000, 5
QUICK_WORK, QUICK_PASSES = 500, 1

Row = dict[str, Any]

# What a column shows: its heading, the key of a row, and the format.
COLUMNS = (
    ("deductions/s", "rate", "{:,.0f}"),
    ("x alone", "alone", "{median:.2f} ({low:.2f}-{high:.2f})"),
    ("starved", "starved", "{:,}"),
    ("median", "median", "{:,g}"),
    ("max", "max", "{:,}"),
    ("max/median", "uneven", "{:.2f}"),
    ("at half-way", "uneven_half", "{:.2f}"),
    ("p99 wait ms", "wait_p99_ms", "{:,.1f}"),
    ("processes min/max", "process_share", "{:.2f}"),
    ("tries/grant", "tries_per_grant", "{:.2f}"),
    ("longest gap ms", "gap_ms", "{:,.1f}"),
    ("gave up", "gave_up", "{:,}"),
    ("oversold", "oversold", "{:,}"),
)
LEGEND = """\
Over the passes: deductions/s, x alone, median, max/median and "at half-way" (max/median when half of the work
was done) are medians; starved, max, p99 wait, processes min/max (sales per contender) and the longest gap
between two sales are of the worst pass; gave up and oversold are sums. "inf": most contenders had nothing.
tries/grant: of the waiters by the network. Targets: judged by the medians; starved by the worst pass."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench stock", description=__doc__)
    add = parser.add_argument
    add("--contenders", type=int, default=100, metavar="N", help="threads in all; default: 100")
    add("--processes", type=int, default=1, metavar="P", help="that they are shared over; default: 1")
    add("--work", type=int, metavar="M", help=f"deductions in all; default: {WORK}; quick: {QUICK_WORK}")
    add("--nodes", type=int, choices=(1, 5), default=1, help="a Lock on one, a RedLock on 5; default: 1")
    add("--passes", type=int, metavar="K", help=f"runs of each row; default: {PASSES}; quick: {QUICK_PASSES}")
    add("--limit", type=float, default=120.0, metavar="S", help="seconds a run may take; default: 120")
    add("--even", action="store_true", help="a contender that has sold its share of the work leaves")
    add("--stop", action="store_true", help="stop a node half-way, of 5; only with the rows that go on then")
    add(
        "--peers",
        action="store_true",
        help="more peers, each installed below build/peers when first needed; one that is missing ends the "
        "run, with --quick it is left out",
    )
    add("--quick", action="store_true", help="less work, and once")
    args = parser.parse_args(argv)
    args.work = (QUICK_WORK if args.quick else WORK) if args.work is None else args.work
    args.passes = (QUICK_PASSES if args.quick else PASSES) if args.passes is None else args.passes
    if min(args.contenders, args.processes, args.work, args.passes) < 1 or not 0 < args.limit < 1e6:
        parser.error("--contenders, --processes, --work, --passes and --limit must be above 0")
    if args.processes > args.contenders:
        parser.error("there are more --processes than --contenders")
    if args.stop and args.nodes != 5:
        parser.error("--stop is for --nodes 5")
    if args.stop and args.peers:
        parser.error("--stop is not for --peers: they hang")
    return args


def entries(nodes: int, stop: bool = False) -> list[Entry]:
    """The rows for so many nodes; with ``stop`` only those that go on when one stops."""
    lock = "Lock" if nodes == 1 else "RedLock"
    native, pure = ("engine", "native"), ("engine", "pure")
    rows = [
        Entry(f"redbolt {lock}, one thread alone", "redbolt", alone=True),
        Entry(f"redbolt {lock}, native, compare-and-set", "redbolt", (native,)),
        Entry(f"redbolt {lock}, native, passed on locally", "redbolt", (native, ("renewed", True))),
        Entry(f"redbolt {lock}, native, no local queue", "redbolt", (native, ("local_queue", False))),
        Entry(f"redbolt {lock}, pure, compare-and-set", "redbolt", (pure,)),
    ]
    if not stop:
        rows.append(Entry("redis-py Lock", "redis-py") if nodes == 1 else Entry("redlock-py", "redlock-py"))
        rows.append(Entry("no lock", "none", locked=False))
    return rows


def peers(nodes: int, required: bool) -> list[Entry]:
    """The peers in environments of their own, installed if need be.

    Raises:
        Unavailable: one of them cannot be had here, and is required.
    """
    rows = []
    for peer in CONTENDING:
        if not peer.stock or peer.many_nodes != (nodes > 1):
            continue
        entry = Entry(peer.name, peer.library)
        try:
            command, env = peer.program("stock_worker")
            rows.append(replace(entry, command=tuple(command), env=tuple(env.items())))
        except Unavailable as error:
            if required:
                raise Unavailable(f"{peer.name}: {error}") from None
            rows.append(replace(entry, unfit=str(error)))
    return rows


def first_last(nodes: Sequence[LocalNode]) -> list[LocalNode]:
    """The nodes, with the one at the end that comes first in the common order of redbolt's contenders."""
    return sorted(nodes, key=lambda node: Node.from_url(node.url).address)[::-1]


def judge(entry: Entry, done: Sequence[Account], alone: Sequence[Account]) -> Row:
    """What came of the runs of a row; ``alone`` are those of the uncontended one."""
    row: Row = {"row": entry.title, "rate": median(each.rate for each in done), "notes": []}
    oversold = row["oversold"] = sum(each.oversold for each in done)
    if not entry.locked:
        # Its contenders end early, on purpose: their shares tell nothing.
        contended = any(len(each.sales) > 1 for each in done)
        row["failed"] = contended and oversold <= 0
        if row["failed"]:
            row["notes"].append("**nothing oversold: the contenders were never there at the same time**")
        return row
    row |= {
        "starved": max(each.starved for each in done),
        "median": median(median(each.counts) for each in done),
        "max": max(max(each.counts) for each in done),
        "uneven": median(unevenness(each.counts) for each in done),
        "uneven_half": median(unevenness(each.half_way) for each in done),
        "wait_p99_ms": max(each.wait_p99_ns for each in done) / 1e6,
        "gave_up": sum(each.gave_up for each in done),
    }
    if any(len(each.processes) > 1 for each in done):
        row["process_share"] = min(each.process_share for each in done)
    if all(each.grants for each in done):
        row["tries_per_grant"] = median(each.tries / each.grants for each in done)
    if any(each.end_ns for each in done):
        row["gap_ms"] = max(each.gap_ns for each in done) / 1e6
        if not all(each.sold_while_stopped for each in done):
            row["notes"].append("**in a pass nothing was sold after the node had stopped**")
    if len(alone) == len(done) and all(each.rate for each in alone):
        row["alone"] = summary([mine.rate / base.rate for mine, base in zip(done, alone, strict=True)])
    row["failed"] = any(each.oversold for each in done)
    if row["failed"]:
        row["notes"].append("**sold what was not there**")
    if unsold := sum(max(0, each.work - each.taken) for each in done):
        row["notes"].append(f"time was over with {unsold:,} unsold")
    if unreleased := sum(each.unreleased for each in done):
        row["notes"].append(f"{unreleased:,} releases failed")
    row["notes"] += dict.fromkeys(note for each in done for note in each.notes)
    return row


def measure(rows: Sequence[Entry], place: Place, passes: int, progress: Progress) -> list[Row]:
    """Run every row in each pass, in turned order."""
    done: dict[Entry, list[Account]] = {entry: [] for entry in rows}
    broken: dict[Entry, Row] = {}
    numbers = count()
    for number in range(passes):
        first = number % len(rows)
        for entry in [*rows[first:], *rows[:first]]:
            if entry not in broken:
                progress.begin(entry.title)
                try:
                    done[entry].append(run(entry, place, f"bench:{os.getpid():07d}:{next(numbers):03d}"))
                except Missing as error:
                    broken[entry] = {"row": entry.title, "notes": [f"not run: {error}"], "failed": False}
                except RuntimeError as error:
                    broken[entry] = {"row": entry.title, "notes": [f"**broke: {error}**"], "failed": True}
                    print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            progress.step()
    alone = next((done[entry] for entry in rows if entry.alone and entry not in broken), [])
    others = {entry.library: done[entry] for entry in rows if entry.library != "redbolt"}
    others["redbolt"] = alone
    shape: Shape = (place.contenders, place.processes, len(place.urls))
    results = []
    for entry in rows:
        row = broken.get(entry) or judge(entry, done[entry], alone)
        if entry not in broken:
            row["targets"] = targets(entry, shape, bool(place.stop), done[entry], others)
        results.append(row)
    return results


def lines(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """The table, as Markdown that also reads well on a terminal."""
    columns = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    judged = any(row.get("targets") for row in rows)
    table = [[title, *(heading for heading, _, _ in columns), "targets and notes" if judged else "notes"]]
    for row in rows:
        cells = []
        for _, key, form in columns:
            value = row.get(key)
            if value is None:
                cells.append("")
            else:
                cells.append(form.format(**value) if isinstance(value, dict) else form.format(value))
        verdicts = [
            f"{one['target']}: {one['measured']:.2f} {'met' if one['met'] else '**missed**'}"
            for one in row.get("targets", ())
        ]
        table.append([row["row"], *cells, "; ".join([*verdicts, *row["notes"]])])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:-1]), "-" * widths[-1]]
    for cells in (table[0], rule, *table[1:]):
        first, *numbers, last = cells
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)]
        yield f"| {' | '.join([first.ljust(widths[0]), *aligned, last.ljust(widths[-1])])} |"


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    try:
        return measured(args, argv)
    except Unavailable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def measured(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run all rows, and report."""
    rows = entries(args.nodes, args.stop)
    if args.peers:
        rows += peers(args.nodes, required=not args.quick)
    with LocalNodes(args.nodes) as nodes:
        ordered = first_last([*nodes])
        urls = [node.url for node in ordered]
        stop = ordered[-1] if args.stop else None
        place = Place(urls, args.contenders, args.processes, args.work, args.limit, args.even, stop)
        top = head(urls, f"{len(urls)} by TCP", "each library as it does", ["stock", *argv])
        progress = Progress(len(rows) * args.passes, sys.stderr)
        results = measure(rows, place, args.passes, progress)
        progress.end()
    each = "processes" if args.processes > 1 else "process"
    one = f"{args.nodes} {'nodes' if args.nodes > 1 else 'node'}"
    title = f"{args.contenders} threads in {args.processes} {each}, {one}, {args.work:,} deductions"
    title += ", in even shares" if args.even else ""
    title += ", one node stopped half-way" if args.stop else ""
    print(*(f"- {what}: {text}" for what, text in top.items()), "", sep="\n")
    print(*lines(title, results), "", LEGEND, sep="\n")
    return int(any(row["failed"] for row in results))
