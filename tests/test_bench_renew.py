"""The benchmark of renewals: its options, figures and targets, its processes, a tiny run with real nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

import redbolt
from bench import renew, renew_leases, renew_worker
from bench.environments import Unavailable
from bench.peers import CONTENDING, Contending
from bench.renew import QUICK, Cycle, RenewedOrFixed, arguments, main, plan, size
from bench.renew_leases import NORM, PEER, Crowd, Leases, Program, Size, cpu_s, figures, targets
from bench.renew_worker import CROWDS, hold, measured, sockets, threads
from bench.report import lines
from bench.runner import Plan, Slice
from bench.scenarios import Result, Setup
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw

KEY = "bench:renew"
SMALL = Size(3, 30, 0.2)
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")

DONE: dict[str, Any] = {
    "acquired_s": 2.5,
    "seconds": 50.0,
    "cpu_s": 4.0,
    "renewals": 8000,
    "least": 3,
    "failed": 5,
    "lost": 0,
    "sockets": [5, 10],
    "threads": [1, 2],
}
"""What a process of leases tells in the end."""


# ---- options ----


@pytest.mark.parametrize(
    "options",
    [
        ["waits"],
        ["--leases", "0"],
        ["--lease", "-1"],
        ["--lease", "nan"],
        ["--seconds", "0"],
        ["--seconds", "44"],
        ["--quick", "--seconds", "8.9"],
        ["--lease", "60"],
        ["--passes", "0"],
        ["--slice", "0"],
        ["--pin", "loosely"],
        ["--fast"],
    ],
    ids=" ".join,
)
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert "python -m bench renew: error:" in capsys.readouterr().err


def test_quick_is_less_unless_told_otherwise() -> None:
    usual, quick = arguments([]), arguments(["--quick"])
    assert size(usual) == NORM == Size(10_000, 30, 45)
    assert size(quick) == QUICK
    assert (QUICK.leases, QUICK.seconds) < (NORM.leases, NORM.seconds)
    assert (plan(quick).passes, plan(quick).seconds) < (plan(usual).passes, plan(usual).seconds)
    told = arguments(["--quick", "--leases", "7", "--lease", "2", "--seconds", "3", "--passes", "1"])
    assert size(told) == Size(7, 2, 3)
    assert plan(told) == Plan(1, plan(quick).seconds)


def test_both_forms_take_enough_passes_and_hold_leases_long_enough() -> None:
    assert min(renew.FULL_PLAN.passes, renew.QUICK_PLAN.passes) >= 11
    assert all(form.seconds >= 1.5 * form.lease_s for form in (NORM, QUICK, PEER))


# ---- what a process of leases measures ----


class Held:
    """Leases that are renewed when time passes."""

    def __init__(self, *answers: bool) -> None:
        self.keys: list[str] = []
        self.counts = [4, 1, 7]
        self.not_granted = 2
        self.gone = 0
        self._answers = [*answers]

    def acquire(self, key: str) -> bool:
        self.keys.append(key)
        return self._answers.pop(0) if self._answers else True

    def renewed(self) -> list[int]:
        return [*self.counts]

    def failed(self) -> int:
        return self.not_granted

    def lost(self) -> int:
        return self.gone


def test_what_was_before_the_window_is_not_counted() -> None:
    crowd = Held()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        crowd.counts = [7, 3, 12]
        crowd.not_granted, crowd.gone = 3, 1

    done = measured(crowd, 9, wait)
    assert waits == [9]
    assert (done["renewals"], done["least"], done["failed"], done["lost"]) == (10, 2, 1, 1)
    assert done["seconds"] > 0


def test_cpu_is_that_of_all_threads_of_the_process() -> None:
    def burn() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    def wait(seconds: float) -> None:
        other = threading.Thread(target=burn)
        other.start()
        other.join()

    burn()
    assert 0.05 <= measured(Held(), 9, wait)["cpu_s"] <= 0.05 * 20


@needs_proc
def test_sockets_and_threads_are_counted_before_and_after() -> None:
    halt = threading.Event()
    other = threading.Thread(target=halt.wait)
    with socket.socket() as _, open(os.devnull):
        more: list[socket.socket] = []

        def wait(seconds: float) -> None:
            more.append(socket.socket())
            other.start()

        before = sockets(), threads()
        done = measured(Held(), 9, wait)
        halt.set()
        other.join()
        more[0].close()
    assert before[0] is not None
    assert before[1] is not None
    assert done["sockets"] == [before[0], before[0] + 1]
    assert done["threads"] == [before[1], before[1] + 1]
    assert sockets() == before[0] - 1


def test_every_lease_has_a_name_of_its_own_and_a_try_without_grant_is_repeated() -> None:
    crowd = Held(False, True, False, False)
    waits: list[float] = []
    assert hold(crowd, "a", 3, waits.append) > 0
    assert crowd.keys == ["a:0", "a:0", "a:1", "a:1", "a:1", "a:2"]
    assert waits == [0, 0, 0]


def test_a_lock_that_is_not_granted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renew_worker, "PATIENCE", 0.01)
    with pytest.raises(TimeoutError, match="not granted"):
        hold(Held(*[False] * 10**6), "a", 1, lambda seconds: None)


def test_renewals_and_losses_of_redbolts_leases_are_counted(
    kind: str, valkeys: LocalNodes, clock: Callable[[float], None]
) -> None:
    urls = [node.url for node in valkeys]
    crowd = CROWDS["redbolt"](urls, {"engine": kind}, 3600)
    for name in "abc":
        eventually(lambda name=name: crowd.acquire(f"{KEY}:{name}"), 10, "it is granted")  # type: ignore[misc]
    assert not crowd.acquire(f"{KEY}:a")
    assert (crowd.renewed(), crowd.failed(), crowd.lost()) == ([0, 0, 0], 0, 0)
    clock(1300)
    eventually(lambda: crowd.renewed() == [1, 1, 1], 10, "each was renewed")
    assert crowd.lost() == 0
    for node in valkeys:
        raw(node, "DEL", f"{KEY}:b")
    clock(1300)
    eventually(lambda: crowd.lost() == 1, 10, "one is lost")
    eventually(lambda: crowd.renewed() == [2, 1, 2], 10, "the others are renewed")


def test_a_lease_that_is_not_renewed_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        lease = SimpleNamespace(renewal=None)

        def __init__(self, *args: object, **words: object) -> None:
            assert words["renew"] is True

        def acquire(self, *, blocking: bool) -> bool:
            return True

    monkeypatch.setattr(redbolt, "Lock", Fixed)
    crowd = CROWDS["redbolt"](["redis://127.0.0.1:7"], {"engine": "pure"}, 30)
    with pytest.raises(RuntimeError, match="the lease of a is not renewed"):
        crowd.acquire("a")


def test_its_program_needs_only_the_standard_library() -> None:
    """So that it runs in an environment that has only another library."""
    code = "import sys; sys.path.append(sys.argv[1]); import bench.renew_worker"
    root = Path(renew.__file__).parents[1]
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root)], check=True, timeout=60 * SLACK)


# ---- figures and targets ----


def test_figures_are_per_second_and_per_renewal() -> None:
    row = figures("a", 5, 100, DONE)
    assert row["cpu_percent"] == pytest.approx(8)
    assert row["renewals_rate"] == pytest.approx(160)
    assert row["ms_per_1000"] == pytest.approx(500)
    assert row["sockets"] == {"first": 5, "last": 10}
    assert [row[name] for name in ("nodes", "leases", "least", "failed", "lost")] == [5, 100, 3, 5, 0]
    blind = figures("a", 5, 100, {**DONE, "renewals": 0, "sockets": [None, None], "threads": [None, None]})
    assert {*row} - {*blind} == {"ms_per_1000", "sockets", "threads"}


def verdicts(size: Size = NORM, **done: Any) -> dict[str, bool]:
    row = figures("a", 5, size.leases, {**DONE, **done})
    return {one["target"]: one["met"] for one in targets(row, size)}


@pytest.mark.parametrize(
    ("missed", "done"),
    [
        ("", {}),
        ("CPU % <= 10", {"cpu_s": 5.1}),
        ("lost <= 0", {"lost": 1}),
        ("threads beside the main one <= 1", {"threads": [3, 2]}),
        ("threads beside the main one <= 1", {"threads": [2, 3]}),
        ("sockets per node <= 2", {"sockets": [5, 11]}),
        ("sockets per node <= 2", {"sockets": [11, 10]}),
    ],
)
def test_targets_are_about_cpu_losses_threads_and_sockets(missed: str, done: dict[str, Any]) -> None:
    found = verdicts(**done)
    assert [*found] == [
        "CPU % <= 10",
        "lost <= 0",
        "threads beside the main one <= 1",
        "sockets per node <= 2",
    ]
    assert [target for target, met in found.items() if not met] == [missed] * bool(missed)


def test_cpu_has_a_bound_only_where_there_are_as_many_renewals() -> None:
    assert "CPU % <= 10" in verdicts(QUICK)
    assert "CPU % <= 10" not in verdicts(Size(9_999, 30, 45))
    assert "CPU % <= 10" not in verdicts(Size(10_000, 31, 50))


def test_what_cannot_be_seen_has_no_target() -> None:
    found = verdicts(sockets=[None, None], threads=[None, None])
    assert [*found] == ["CPU % <= 10", "lost <= 0"]


def test_a_target_that_only_informs_does_not_cry() -> None:
    row = figures("a", 5, 10_000, {**DONE, "lost": 2})
    row["targets"] = targets(row, NORM)

    def shown(informs: bool) -> str:
        return "\n".join(lines({}, [{"title": "leases", "rows": [{**row, "informs": informs}]}]))

    assert "| CPU % <= 10: 8.00 met; lost <= 0: 2.00 **missed**; " in shown(False)
    assert "| for information: CPU % <= 10: 8.00 met; lost <= 0: 2.00 missed; " in shown(True)
    assert "**" not in shown(True)


@needs_proc
def test_the_cpu_of_servers_is_the_sum(valkeys: LocalNodes) -> None:
    def used(*which: int) -> float:
        found = cpu_s([valkeys[number] for number in which])
        assert found is not None
        return found

    before = used(0), used(1), used(0, 1)
    assert before[0] + before[1] < before[2] + 0.001
    eventually(
        lambda: raw(valkeys[0], "EVAL", "for i = 1, 3000000 do end return 1", 0) and used(0) > before[0] + 0.1
    )
    assert used(0, 1) > before[2] + 0.09


# ---- its processes ----


def program(source: str) -> tuple[list[str], dict[str, str]]:
    start = "import json, sys\nbegun = json.loads(sys.stdin.readline())\n"
    return [sys.executable, "-c", start + dedent(source)], {}


def test_a_row_of_redbolt(kind: str, valkeys: LocalNodes) -> None:
    crowd = Crowd("redbolt", Program("redbolt", {"engine": kind}), [*valkeys], SMALL)
    try:
        row = crowd.run(KEY)
        assert (row["row"], row["nodes"], row["leases"], row["lost"]) == ("redbolt", 5, 3, 0)
        names = [f"{KEY}:{number}".encode() for number in range(3)]
        eventually(lambda: sorted(raw(valkeys[0], "KEYS", "*")) == names, 5, "all are held")
        assert 20_000 < raw(valkeys[0], "PTTL", f"{KEY}:0") <= 30_000
        assert 0 <= row["cpu_percent"] < 200
    finally:
        crowd.close()


TOLD = f"""
print(json.dumps({{"versions": json.dumps(begun)}}), flush=True)
print(json.dumps({{"acquired_s": 2.5, "heard": json.loads(sys.stdin.readline())}}), flush=True)
json.loads(sys.stdin.readline())
print(json.dumps({DONE!r}), flush=True)
sys.stdin.readline()
"""


def test_another_program_can_follow_the_protocol(valkeys: LocalNodes) -> None:
    nodes = [*valkeys][:2]
    crowd = Crowd("other", Program("any", {"a": 1}, ["one"], program(TOLD)), nodes, Size(100, 7, 0.1))
    try:
        begun = json.loads(crowd.versions)
        assert [node["url"] for node in begun["nodes"]] == [node.url for node in nodes]
        assert (begun["library"], begun["options"], begun["packages"]) == ("any", {"a": 1}, ["one"])
        assert begun["lease_s"] == 7
        row = crowd.run(KEY)
    finally:
        crowd.close()
    expected = figures("other", 2, 100, DONE)
    assert {name: row[name] for name in expected} == expected
    assert row.get("nodes_percent", 0) >= 0


def test_a_process_whose_library_is_missing_or_breaks(valkeys: LocalNodes) -> None:
    nodes = [*valkeys][:1]
    with pytest.raises(ImportError, match="no such module"):
        Crowd(
            "a", Program("any", started=program("""print('{"missing": "no such module"}')""")), nodes, SMALL
        )
    with pytest.raises(ImportError, match="whole seconds"):
        code = """
            import types
            for name in ("redis", "redis_lock"):
                sys.modules[name] = types.SimpleNamespace(Lock=object)
            import bench.renew_worker as worker
            worker.Parent.hear = lambda self: begun
            worker.main()
        """
        Crowd("a", Program("python-redis-lock", started=program(code)), nodes, Size(3, 1.5, 3))
    crowd = Crowd(
        "a",
        Program("any", started=program("""print('{"versions": ""}', flush=True); sys.exit('no luck')""")),
        nodes,
        SMALL,
    )
    try:
        with pytest.raises(RuntimeError, match="no luck"):
            crowd.run(KEY)
    finally:
        crowd.close()


@pytest.mark.parametrize("told", [0, 1, 2])
def test_a_process_ends_with_its_parent(valkey: LocalNode, told: int) -> None:
    """Also while it acquires, and while it holds."""
    said: list[dict[str, Any]] = [
        {
            "nodes": [{"url": valkey.url}],
            "library": "redbolt",
            "options": {"engine": "pure"},
            "packages": [],
            "lease_s": 3600,
        },
        {"key": KEY, "leases": 10**9 if told == 1 else 1},
        {"seconds": 3600},
    ]
    command, env = Program("redbolt").started
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            for words in said[: told + 1]:
                print(json.dumps(words), file=process.stdin, flush=True)
                if words is not said[told] or told == 0:
                    assert process.stdout.readline()
            if told == 1:
                eventually(lambda: raw(valkey, "DBSIZE") > 0, 20, "it acquires")
            process.stdin.close()
            assert process.wait(20 * SLACK) == 1
        finally:
            process.kill()


# ---- the leases ----


@pytest.fixture
def crowds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Program, int, Size]]:
    """The rows that are made, instead of making them. Those of an engine "broken" break."""
    made: list[tuple[str, Program, int, Size]] = []

    class Row:
        versions = "1"

        def __init__(self, name: str, program: Program, nodes: Sequence[LocalNode], size: Size) -> None:
            if program.options.get("engine") == "missing":
                raise ImportError("no such module")
            self.name, self.program, self.size = name, program, size
            self.open = True
            made.append((name, program, len(nodes), size))

        def run(self, key: str) -> Result:
            assert self.open
            if self.program.options.get("engine") == "broken":
                raise RuntimeError("a worker has ended\nno luck today")
            return figures(self.name, 5, self.size.leases, {**DONE, "lost": 1})

        def close(self) -> None:
            self.open = False

    monkeypatch.setattr(renew_leases, "Crowd", Row)
    return made


class Peer(Contending):
    def program(self, what: str) -> tuple[list[str], dict[str, str]]:
        assert what == "renew_worker"
        if self.name == "away":
            raise Unavailable("no network")
        return ["run", self.name], {}


PEERS = [
    Peer("other", "python-redis-lock", ("one",), many_nodes=False),
    Peer("no thread", "redlock-ng", ("two",), many_nodes=True),
    Peer("away", "python-redis-lock", ("one",), many_nodes=False),
]


def leases(
    nodes: LocalNodes, *engines: str, peers: Sequence[Contending] = (), required: bool = False
) -> Leases:
    setup = Setup([node.url for node in nodes], engines, Plan(1, 0.1), required=required)
    return Leases(setup, [*nodes], QUICK, peers)


def test_the_rows_are_both_engines_and_a_peer_with_a_thread_per_lock(
    crowds: list[tuple[str, Program, int, Size]], valkeys: LocalNodes
) -> None:
    made = leases(valkeys, "native", "pure", peers=PEERS)
    assert [(name, program.library, count, size) for name, program, count, size in crowds] == [
        ("redbolt RedLock, native", "redbolt", 5, QUICK),
        ("redbolt RedLock, pure", "redbolt", 5, QUICK),
        ("other, leases of 3 s for 6 s", "python-redis-lock", 1, PEER),
    ]
    assert [dict(program.options) for _, program, _, _ in crowds[:2]] == [
        {"engine": "native"}, {"engine": "pure"},
    ]  # fmt: skip
    assert crowds[2][1].started == (["run", "other"], {})
    assert made.missing == [{"row": "away, leases of 3 s for 6 s", "missing": "not run: no network"}]
    assert (made.steps, made.versions) == (3, ["1"] * 3)
    with pytest.raises(Unavailable, match=r"away, .*: no network"):
        leases(valkeys, "native", peers=PEERS, required=True)
    assert any(peer.library in CROWDS for peer in CONTENDING)


def test_only_the_native_engine_decides_and_peers_have_no_targets(
    crowds: list[tuple[str, Program, int, Size]], valkeys: LocalNodes
) -> None:
    steps: list[None] = []
    result = leases(valkeys, "native", "pure", peers=PEERS[:1]).run(lambda: steps.append(None))
    native, pure, peer = result["rows"]
    assert result["title"] == "2,000 renewed leases of 6 s, held for 12 s"
    assert (native["informs"], pure["informs"]) == (False, True)
    assert native["targets"] == pure["targets"]
    assert [one["met"] for one in native["targets"]] == [True, False, True, True]
    assert peer["targets"] == []
    assert [renew.is_wrong(row) for row in result["rows"]] == [True, False, False]
    assert not renew.is_wrong({**native, "lost": 0})
    assert len(steps) == 3


def test_a_row_that_breaks_or_is_missing_does_not_stop_the_others(
    crowds: list[tuple[str, Program, int, Size]], valkeys: LocalNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    raw(valkeys[4], "SET", "left behind", 1)
    made = leases(valkeys, "missing", "broken", "native")
    broken, native, missing = made.run(lambda: None)["rows"]
    assert broken["missing"] == "**broke: no luck today**"
    assert renew.is_wrong(broken)
    assert native["leases"] == 2_000
    assert missing == {"row": "redbolt RedLock, missing", "missing": "not run: no such module"}
    assert not renew.is_wrong(missing)
    assert not any(crowd.open for crowd in made.crowds)  # type: ignore[attr-defined]
    assert raw(valkeys[4], "DBSIZE") == 0
    assert "no luck today" in capsys.readouterr().err
    forced = Setup([], ("missing",), Plan(1, 0.1), forced=True)
    with pytest.raises(ImportError):
        Leases(forced, [*valkeys], QUICK)


# ---- the cycle ----


@pytest.mark.parametrize("count", [1, 3])
def test_a_cycle_is_of_a_renewed_or_a_fixed_lease_of_the_same_length(
    kind: str, valkeys: LocalNodes, count: int
) -> None:
    urls = [node.url for node in valkeys][:count]
    for renewed in (False, True):
        row = Cycle(urls, KEY, kind, renewed)
        assert row.name == Cycle.title("Lock" if count == 1 else "RedLock", kind, renewed)
        assert len(row.run(60 * SLACK, 5).took_ns) == 5
        with row._lock:
            assert (row._lock.lease.renewal is not None) == renewed
            assert 20_000 < raw(urls[0], "PTTL", KEY) <= 30_000
        row.close()
        eventually(lambda: raw(urls[0], "DBSIZE") == 0, 5, "it is released")


def test_a_row_that_is_not_what_it_says_is_refused(
    kind: str, valkey: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = redbolt.Lock
    monkeypatch.setattr(redbolt, "Lock", lambda *args, **words: usual(*args, **words | {"renew": False}))
    with pytest.raises(RuntimeError, match=f"redbolt Lock, {kind}, renewed: the lease is not renewed"):
        Cycle([valkey.url], KEY, kind, renewed=True)
    monkeypatch.setattr(redbolt, "Lock", lambda *args, **words: usual(*args, **words | {"renew": True}))
    with pytest.raises(RuntimeError, match=f"redbolt Lock, {kind}, fixed: the lease is renewed"):
        Cycle([valkey.url], KEY, kind, renewed=False)


@pytest.mark.parametrize(("count", "what"), [(1, "Lock"), (5, "RedLock")])
def test_a_renewed_lease_is_compared_with_the_fixed_one_of_its_engine(
    valkeys: LocalNodes, count: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        renew.Cycle,
        "__init__",
        lambda self, urls, key, *named: setattr(self, "name", Cycle.title(what, *named)),
    )
    cycle = RenewedOrFixed(Setup([node.url for node in valkeys][:count], ("native", "pure"), Plan(1, 0.1)))
    assert cycle.fastest == {1: "together", 5: "apart"}[count]
    names = [row.name for row in cycle.rows]
    assert names == [
        f"redbolt {what}, {engine}, {length}"
        for engine in ("native", "pure")
        for length in ("fixed", "renewed")
    ]
    took = dict(zip(names, (1000, 1090, 2000, 2220), strict=True))
    slices = {name: [Slice(array("q", [ns]), 1.0)] for name, ns in took.items()}
    rows = [cycle.judge(name, slices) for name in names]
    assert [row["targets"] for row in rows[::2]] == [[], []]
    assert [row["ratio"]["median"] for row in rows[1::2]] == [1.09, 1.11]
    assert [[one["met"] for one in row["targets"]] for row in rows[1::2]] == [[True], [False]]
    assert rows[1]["targets"][0]["target"] == "<= 1.10 x fixed"


# ---- the whole ----

TINY = ["--quick", "--leases", "20", "--lease", "3", "--seconds", "4.5", "--passes", "1", "--slice", "0.02"]


@pytest.mark.slow
def test_a_tiny_run_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main([*TINY, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    held, one, five = json.loads(file.read_text())["scenarios"]
    assert held["title"].startswith("20 renewed leases of 3 s, held for 4.5 s (the quick form")
    for scenario in (held, one, five):
        assert scenario["title"] in out
    assert [row["row"] for row in held["rows"]] == [f"redbolt RedLock, {kind}" for kind in ("native", "pure")]
    for row in held["rows"]:
        assert (row["leases"], row["lost"]) == (20, 0)
        assert row["least"] >= 2
        assert 10 * row["least"] < row["renewals_rate"] * 4.5 < 20 * 8
        if "threads" in row:
            assert row["threads"]["last"] == 2
            assert row["sockets"]["last"] == 10
    for scenario, what in ((one, "Lock"), (five, "RedLock")):
        assert f"cycle of a renewed lease, {'1 node' if what == 'Lock' else '5 nodes'}" in scenario["title"]
        assert [row["row"] for row in scenario["rows"]] == [
            Cycle.title(what, kind, renewed) for kind in ("native", "pure") for renewed in (False, True)
        ]
        assert all(row["p50_us"] > 0 for row in scenario["rows"])
    assert "command: python -m bench renew --quick" in out


@pytest.mark.parametrize(
    ("told", "titles"),
    [
        ("leases", ["Leases"]),
        ("cycle", ["RenewedOrFixed"] * 2),
        ("both", ["Leases"] + ["RenewedOrFixed"] * 2),
    ],
)
def test_each_part_can_be_run_alone(
    told: str, titles: list[str], valkeys: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {*titles}:
        monkeypatch.setattr(renew, name, lambda *args, name=name: name)
    setup = Setup([node.url for node in valkeys], ("pure",), Plan(1, 0.1))
    chosen: list[Any] = [*renew.choose(arguments([told]), setup, valkeys)]
    assert chosen == titles


def test_bench_hands_its_words_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.__main__ as command

    said: list[list[str]] = []
    told: Callable[[list[str]], int] = lambda argv: said.append(argv) or 3  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(renew, "main", told)
    assert command.main(["renew", "--quick"]) == 3
    assert said == [["--quick"]]
