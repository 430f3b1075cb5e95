"""The benchmark's statistics, its floor, and one tiny run of everything."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bench.floor import Floor, build
from bench.report import without_credentials
from bench.runner import Plan, Slice, cycles, figures, interleave, order, percentile, rate, ratios, summary
from redbolt.local import LocalNodes

ROOT = Path(__file__).parent.parent
KEY = "bench:test"

needs_cc = pytest.mark.skipif(
    shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None, reason="no C compiler"
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with LocalNodes(3) as nodes:
        yield nodes


@pytest.fixture
def floor(nodes: LocalNodes) -> Iterator[Floor]:
    floor = Floor([node.url for node in nodes], KEY)
    yield floor
    floor.close()
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.delete(KEY)


class Row:
    """Runs nothing, and notes its turns."""

    def __init__(self, name: str, turns: list[str]) -> None:
        self.name = name
        self._turns = turns

    def run(self, seconds: float, limit: int) -> Slice:
        self._turns.append(self.name)
        return Slice(array("q", [len(self._turns)]), 1.0)

    def close(self) -> None:
        pass


class Lock:
    def __init__(self, granted: object = True) -> None:
        self.calls: list[str] = []
        self._granted = granted

    def acquire(self, *, blocking: bool) -> bool:
        assert not blocking
        self.calls.append("acquire")
        return self._granted  # type: ignore[return-value]

    def release(self) -> None:
        self.calls.append("release")


def test_percentiles_are_nearest_ranks() -> None:
    values = range(1, 1001)
    assert [percentile(values, p) for p in (0, 50, 99, 99.9, 100)] == [1, 500, 990, 999, 1000]
    assert percentile([7], 99.9) == 7


def test_figures_are_over_all_cycles_of_all_passes_in_microseconds() -> None:
    slices = [
        Slice(array("q", range(1000, 500_000, 1000)), 1.0),
        Slice(array("q", range(500_000, 1_000_001, 1000)), 1.0),
    ]
    expected = {"cycles": 1000, "p50_us": 500, "p99_us": 990, "p999_us": 999, "worst_us": 1000}
    assert figures(slices) == expected


def test_ratios_are_taken_pass_by_pass() -> None:
    mine = [Slice(array("q", [4, 6, 100]), 10.0), Slice(array("q", [30]), 20.0)]
    floor = [Slice(array("q", [2]), 40.0), Slice(array("q", [10, 10]), 40.0)]
    assert ratios(mine, floor) == [3.0, 3.0]
    assert ratios(mine, floor, rate) == [0.25, 0.5]


def test_a_summary_is_the_median_and_the_middle_half() -> None:
    values = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert summary(values) == {"median": 4.5, "low": 3.0, "high": 6.0, "per_pass": values}
    assert summary([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0, "per_pass": [2.0]}


def test_rows_take_turns_in_a_new_order_each_pass_after_warming_up() -> None:
    turns: list[str] = []
    steps: list[None] = []
    rows = [Row(name, turns) for name in "abc"]
    slices = interleave(rows, Plan(passes=3, seconds=0), lambda: steps.append(None))
    assert [turns[at : at + 3] for at in range(0, 12, 3)] == [[*"bac"], [*"abc"], [*"acb"], [*"cab"]]
    assert {name: len(done) for name, done in slices.items()} == {"a": 3, "b": 3, "c": 3}
    assert len(steps) == 12
    assert {row.name for row in order(rows, 5)} == {*"abc"}


def test_a_slice_ends_after_its_cycles_or_its_time() -> None:
    lock = Lock()
    done = cycles(lock, 60, 3)
    assert lock.calls == ["acquire", "release"] * 3
    assert len(done.took_ns) == 3
    assert done.rate > 0
    assert len(cycles(Lock(), 0.001, 10**9).took_ns) > 3


@pytest.mark.parametrize("answer", [False, None, 1])
def test_a_cycle_that_was_not_granted_stops_the_run(answer: object) -> None:
    with pytest.raises(RuntimeError, match="not granted"):
        cycles(Lock(answer), 1, 1)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@host:1/2", "redis://***@host:1/2"),
        ("redis://:a b/c@d@host", "redis://***@host"),
        ("unix:///a.sock?username=me&password=secret&db=1", "unix:///a.sock?username=***&password=***&db=1"),
        ("redis://host:1/2", "redis://host:1/2"),
        ("--quick", "--quick"),
    ],
)
def test_the_head_shows_no_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


@needs_cc
def test_the_floor_compiles_without_a_warning_and_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = build(tmp_path)
    made = library.stat().st_mtime_ns
    assert build(tmp_path) == library
    assert library.stat().st_mtime_ns == made
    assert [*tmp_path.iterdir()] == [library]
    assert capfd.readouterr() == ("", "")


@needs_cc
@pytest.mark.parametrize("address", ["url", "unix_url"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_floor_sets_and_deletes_a_fresh_token_per_cycle(
    nodes: LocalNodes, address: str, count: int
) -> None:
    urls = [getattr(node, address) for node in nodes][:count]
    floor = Floor(urls, KEY)
    try:
        with redis.Redis.from_url(urls[0]) as client, client.monitor() as monitor:
            done = floor.run(60, 20)
            seen = [monitor.next_command()["command"].split() for _ in range(40)]
        assert len(done.took_ns) == 20
        assert min(done.took_ns) > 0
        tokens = {words[2] for words in seen if words[0] == "SET"}
        assert len(tokens) == 20
        assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
        assert {tuple(words[3:]) for words in seen if words[0] == "SET"} == {("NX", "PX", "10000")}
        assert [words[0] for words in seen] == ["SET", floor.released_by] * 20
        assert [words[-1] for words in seen[1::2]] == [words[2] for words in seen[::2]]
    finally:
        floor.close()


@needs_cc
def test_the_floor_goes_on_while_a_node_is_stopped_and_reads_its_late_replies(
    nodes: LocalNodes, floor: Floor
) -> None:
    assert len(floor.run(60, 50).took_ns) == 50
    nodes[1].pause()
    try:
        assert len(floor.run(60, 500).took_ns) == 500
    finally:
        nodes[1].resume()
    assert len(floor.run(60, 500).took_ns) == 500


@needs_cc
def test_the_floor_stops_at_a_reply_that_is_not_the_expected_one(nodes: LocalNodes, floor: Floor) -> None:
    floor.run(60, 5)
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.set(KEY, "somebody else's")
    with pytest.raises(RuntimeError, match=r"node \d: unexpected reply \$-1"):
        floor.run(60, 5)


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_cc
def test_one_tiny_run_has_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("redlock")
    run = bench("--passes", "1", "--seconds", "0.01", "--json", str(tmp_path / "figures.json"))
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "figures.json").read_text())
    assert set(result["head"]) == {"date", "machine", "python", "redbolt", "peers", "servers", "command"}
    assert all(result["head"].values())

    times = {"cycles", "p50_us", "p99_us", "p999_us", "worst_us"}
    fields = {
        "one node": {*times, "floor"},
        "5 nodes": {*times, "floor"},
        "one of 5 nodes stopped": {*times, "healthy_p50_us", "ratio"},
        "8 threads on 8 keys, one node": {*times, "rate", "floor"},
        "import": {"p50_ms", "best_ms"},
    }
    titles = [scenario["title"].partition(" (")[0] for scenario in result["scenarios"]]
    assert titles == [*fields]
    for title, scenario in zip(titles, result["scenarios"], strict=True):
        assert f"| {scenario['title']} " in run.stdout
        names = [row["row"] for row in scenario["rows"]]
        if title == "import":
            assert names == ["import redis", "import redbolt"]
            assert scenario["rows"][1]["ratio"]["median"] > 0
        else:
            assert names[0] == "C floor"
            assert sum(name.startswith("redbolt") for name in names) == 2
            assert len(names) == 4
        for row in scenario["rows"]:
            assert f"| {row['row']} " in run.stdout
            if "missing" in row:
                assert row["missing"] in run.stdout
                continue
            assert set(row) >= {"targets", *fields[title]}
            assert all(row[key] > 0 for key in fields[title] - {"floor", "ratio"})
            for key in {"floor", "ratio"} & set(row):
                assert set(row[key]) == {"median", "low", "high", "per_pass"}
            for target in row["targets"]:
                assert set(target) == {"target", "measured", "met"}
                assert target["target"] in run.stdout
    for title in ("one node", "import"):
        assert any(line.startswith(f"bench: {title}") for line in run.stderr.splitlines())


def test_bad_options_are_refused() -> None:
    for options in (["--passes", "0"], ["--seconds", "-1"], ["--unix", "--nodes", "redis://127.0.0.1"]):
        run = bench(*options)
        assert run.returncode == 2
        assert "error:" in run.stderr
