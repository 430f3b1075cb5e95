"""Shows results: the progress on the way, and the table and the head at the end."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import redis

import redbolt
from bench.runner import Slice

__all__ = ["Progress", "draw", "head", "lines", "picture", "publish", "without_credentials"]

DRAWING = Path(__file__).with_name("draw.py")

# What a column shows: its heading, the key of a result, and the format.
COLUMNS = (
    ("cycles/s", "rate", "{:,.0f}"),
    ("samples", "samples", "{:,}"),
    ("healthy p50 us", "healthy_p50_us", "{:.1f}"),
    ("p50 us", "p50_us", "{:.1f}"),
    ("p99 us", "p99_us", "{:.1f}"),
    ("p99.9 us", "p999_us", "{:.1f}"),
    ("worst us", "worst_us", "{:.0f}"),
    ("p50 ms", "p50_ms", "{:.1f}"),
    ("best ms", "best_ms", "{:.1f}"),
    ("x floor", "floor", "{median:.2f} ({low:.2f}-{high:.2f})"),
    ("ratio", "ratio", "{median:.2f} ({low:.2f}-{high:.2f})"),
    ("nodes", "nodes", "{}"),
    ("leases", "leases", "{:,}"),
    ("acquired in s", "acquired_s", "{:.1f}"),
    ("CPU %", "cpu_percent", "{:.1f}"),
    ("renewals/s", "renewals_rate", "{:,.0f}"),
    ("CPU ms/1,000 renewals", "ms_per_1000", "{:.1f}"),
    ("least", "least", "{:,}"),
    ("failed", "failed", "{:,}"),
    ("lost", "lost", "{:,}"),
    ("sockets", "sockets", "{first}, {last}"),
    ("threads", "threads", "{first}, {last}"),
    ("nodes CPU %", "nodes_percent", "{:.1f}"),
)


class Progress:
    """A bar on a terminal; elsewhere a line per scenario."""

    def __init__(self, steps: int, out: TextIO = sys.stderr) -> None:
        self._steps = max(steps, 1)
        self._done = 0
        self._what = ""
        self._out = out
        self._bar = out.isatty()
        self._shown = 0.0

    def begin(self, what: str) -> None:
        """Name what is measured now."""
        self._what = what
        if not self._bar:
            print(f"bench: {what}", file=self._out, flush=True)

    def step(self) -> None:
        """One slice is done."""
        self._done += 1
        now = time.monotonic()
        if self._bar and now - self._shown > 0.1:
            self._shown = now
            share = self._done / self._steps
            bar = ("#" * round(30 * share)).ljust(30, ".")
            print(f"\r[{bar}] {share:4.0%} {self._what:.60}\x1b[K", end="", file=self._out, flush=True)

    def end(self) -> None:
        """Clear the bar."""
        if self._bar:
            print("\r\x1b[K", end="", file=self._out, flush=True)


def without_credentials(argument: str) -> str:
    """The argument; if it is a URL, without its user and password."""
    bare = re.sub(r"://.*@", "://***@", argument, flags=re.DOTALL)
    return re.sub(r"((?:username|password)=)[^&]*", r"\1***", bare)


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _server(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        info: dict[str, Any] = client.info("server")
    name = info.get("server_name", "redis")
    return f"{name} {info.get(f'{name}_version') or info.get('redis_version')}"


def head(
    urls: Sequence[str], where: str, released_by: str, argv: Sequence[str], peers: Sequence[str] = ()
) -> dict[str, str]:
    """When, where and with what it was measured; `peers` are those in environments of their own."""
    system = platform.uname()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {system.system} {system.release}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "redbolt": f"{redbolt.__version__}, engine {redbolt.engine()}",
        "peers": ", ".join([*map(_version, ("redis", "hiredis", "redlock-py")), *peers]),
        "servers": f"{', '.join(dict.fromkeys(map(_server, urls)))}; {where}; released by {released_by}",
        "command": " ".join(["python -m bench", *map(without_credentials, argv)]),
    }


def _targets(result: Mapping[str, Any]) -> str:
    informs = result.get("informs", False)
    missed = "missed" if informs else "**missed**"

    def verdict(one: Mapping[str, Any]) -> str:
        return f"{one['target']}: {one['measured']:.2f} {'met' if one['met'] else missed}"

    return ("for information: " if informs else "") + "; ".join(map(verdict, result["targets"]))


def _table(scenario: Mapping[str, Any]) -> Iterator[list[str]]:
    results = scenario["rows"]
    columns = [column for column in COLUMNS if any(column[1] in result for result in results)]
    yield [scenario["title"], *(heading for heading, _, _ in columns), "target"]
    for result in results:
        cells = []
        for _, key, form in columns:
            value = result.get(key)
            if isinstance(value, Mapping):
                cells.append(form.format(**value))
            else:
                cells.append("" if value is None else form.format(value))
        yield [result["row"], *cells, result.get("missing") or _targets(result)]


def publish(
    head: Mapping[str, str], scenarios: Sequence[Mapping[str, Any]], json_to: str | None, *notes: str
) -> None:
    """Print the report. All figures go to a file, or to the standard output ("-"), and then it does not."""
    text = json.dumps({"head": head, "scenarios": scenarios}, indent=1)
    if json_to == "-":
        print(text)
    elif json_to:
        Path(json_to).write_text(text + "\n")
    print(*lines(head, scenarios), *notes, sep="\n", file=sys.stderr if json_to == "-" else sys.stdout)


def lines(head: Mapping[str, str], scenarios: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The report as Markdown that also reads well on a terminal."""
    yield from (f"- {what}: {text}" for what, text in head.items())
    for scenario in scenarios:
        rows = list(_table(scenario))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        inner = slice(1, -1)  # the columns of numbers
        rule = ["-" * width for width in widths]
        rule[inner] = [dashes[:-1] + ":" for dashes in rule[inner]]
        yield ""
        for row in (rows[0], rule, *rows[1:]):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            cells[inner] = [cell.strip().rjust(len(cell)) for cell in cells[inner]]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "Ratios are taken within a pass, of p50 (threads: cycles/s): median over the passes (middle half)."


def picture(
    head: Mapping[str, str], panels: Sequence[tuple[Mapping[str, Any], Mapping[str, Sequence[Slice]]]]
) -> dict[str, Any]:
    """What draw.py needs: for each panel a scenario's result, and its slices by row."""
    drawn = []
    for result, slices in panels:
        rows = []
        for row in result["rows"]:
            if row["row"] in slices:
                took_ns = [ns for done in slices[row["row"]] for ns in done.took_ns]
                ratio = row["floor"]["median"]
                rows.append({"row": row["row"], "p50_us": row["p50_us"], "ratio": ratio, "took_ns": took_ns})
        drawn.append({"title": result["title"], "rows": rows})
    shown = ("date", "machine", "python", "redbolt", "servers")
    return {**{name: head[name] for name in shown}, "panels": drawn}


def draw(interpreter: Path, data: Mapping[str, Any], file: Path) -> None:
    """Have the picture drawn, by an interpreter that has matplotlib."""
    command = [str(interpreter), "-P", str(DRAWING), str(file)]
    subprocess.run(command, input=json.dumps(data), text=True, check=True, timeout=300)
