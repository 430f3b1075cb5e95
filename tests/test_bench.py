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
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import redis

import bench.__main__ as command
from bench import environments, report, scenarios
from bench.environments import Unavailable
from bench.floor import Floor, build
from bench.peers import PEERS, Peer, Worker
from bench.peers.worker import serve
from bench.report import lines, picture, without_credentials
from bench.runner import Plan, Slice, cycles, figures, interleave, order, percentile, rate, ratios, summary
from bench.scenarios import ManyNodes, OneNode, Setup
from redbolt.local import LocalNodes

ROOT = Path(__file__).parent.parent
URLS = ["redis://me:secret@127.0.0.1:7/3", "unix:///a.sock?db=2"]
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


def worker(source: str, **options: Any) -> Worker:
    """A worker whose program is only this; `words()` reads a line, `say()` writes one."""
    start = """
        import json, os, sys, time
        words = lambda: json.loads(sys.stdin.readline())
        say = lambda answer: print(json.dumps(answer), flush=True)
    """
    return Worker("a peer", [sys.executable, "-c", dedent(start) + dedent(source)], URLS, KEY, **options)


def test_a_worker_is_told_the_nodes_and_runs_the_slices_that_it_is_asked_for() -> None:
    row = worker("""
        begin = words()
        say({"versions": json.dumps(begin)})
        for line in sys.stdin:
            want = json.loads(line)
            say({"took_ns": [want["limit"], int(want["seconds"] * 1000)], "rate": 0.5})
    """)
    try:
        assert json.loads(row.versions) == {
            "nodes": [
                {
                    "url": URLS[0],
                    "host": "127.0.0.1",
                    "port": 7,
                    "db": 3,
                    "username": "me",
                    "password": "secret",
                },
                {"url": URLS[1], "path": "/a.sock", "db": 2},
            ],
            "key": KEY,
            "lease_ms": 10_000,
        }
        assert row.name == "a peer"
        for limit in (3, sys.maxsize):
            assert row.run(0.25, limit) == Slice(array("q", [limit, 250]), 0.5)
    finally:
        row.close()


def test_a_worker_ends_when_its_row_is_closed_or_else_is_killed() -> None:
    for after in ("sys.stdin.read()", "time.sleep(60)"):
        row = worker(f"words(); say(dict(versions=str(os.getpid()))); {after}")
        row.close()
        with pytest.raises(ProcessLookupError):
            os.kill(int(row.versions), 0)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("print('the cause', file=sys.stderr); sys.exit(3)", "has ended\nthe cause"),
        ("print('oops', flush=True); words()", "answered b'oops\\\\n'"),
        ("time.sleep(60)", "did not answer for 0 s"),
    ],
)
def test_a_worker_that_breaks_off_is_named_with_what_it_said(does: str, told: str) -> None:
    row = worker(f"words(); say(dict(versions='')); words(); {does}", grace=0.1)
    try:
        with pytest.raises(RuntimeError, match=f"the worker of a peer {told}"):
            row.run(0, 1)
    finally:
        row.close()


def test_a_worker_that_does_not_start_is_a_peer_that_is_missing() -> None:
    with pytest.raises(Unavailable, match=r"^it does not start: ImportError: no module of that name$"):
        worker("raise ImportError('no module of that name')")
    with pytest.raises(Unavailable, match=r"cannot be started: .*no-such-program"):
        Worker("a peer", ["no-such-program"], URLS, KEY)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot pin here")
def test_a_worker_runs_with_all_its_threads_on_the_cores_of_this_process() -> None:
    everywhere = os.sched_getaffinity(0)
    row = worker("""
        import threading
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        words()
        say({"versions": ""})
        for line in sys.stdin:
            cores = [sorted(os.sched_getaffinity(who)) for who in (0, thread.native_id)]
            say({"took_ns": sum(cores, []), "rate": 1.0})
    """)
    try:
        for cores in ({min(everywhere)}, {max(everywhere)}, everywhere):
            os.sched_setaffinity(0, cores)
            assert [*row.run(0, 1).took_ns] == sorted(cores) * 2
    finally:
        os.sched_setaffinity(0, everywhere)
        row.close()


def test_a_python_worker_answers_with_the_same_cycles_as_the_other_rows() -> None:
    lock, answers = Lock(), StringIO()
    asked = [{"seconds": 60, "limit": 3}, {"seconds": 60, "limit": 2}]
    serve(lock, StringIO("\n".join(map(json.dumps, asked))), answers)
    done = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [len(one["took_ns"]) for one in done] == [3, 2]
    assert all(one["rate"] > 0 and min(one["took_ns"]) > 0 for one in done)
    assert lock.calls == ["acquire", "release"] * 5


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node")
def test_the_node_worker_speaks_as_the_python_worker_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sources = {
        "ioredis": """
            module.exports = class {
              constructor(options) { this.options = options; }
              async ping() {}
            };
        """,
        "redlock": """
            const { appendFileSync } = require("fs");
            const say = (words) => appendFileSync(process.env.LOG, JSON.stringify(words) + "\\n");
            exports.default = class {
              constructor(clients, settings) { say([clients.map((client) => client.options), settings]); }
              async acquire(...words) { say(words); return { release: async () => say("release") }; }
            };
        """,
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "package.json").write_text('{"version": "v1.2.3"}')
        (tmp_path / name / "index.js").write_text(source)
    program = ROOT / "bench" / "peers" / "worker.js"
    env = {"NODE_PATH": str(tmp_path), "LOG": str(log)}
    row = Worker("a peer", ["node", str(program)], URLS, KEY, env)
    try:
        assert row.versions.startswith("redlock 1.2.3 (ioredis 1.2.3, Node ")
        done = row.run(60, 2)
        assert len(done.took_ns) == 2
        assert min(done.took_ns) > 0
        assert done.rate > 0
    finally:
        row.close()
    begun, *turns = map(json.loads, log.read_text().splitlines())
    tcp = {"host": "127.0.0.1", "port": 7, "db": 3, "username": "me", "password": "secret"}
    assert begun == [[tcp, {"path": "/a.sock", "db": 2}], {"retryCount": 0}]
    assert turns == [[[KEY], 10_000], "release"] * 2


def pins(tmp_path: Path, text: str) -> dict[str, Path]:
    (tmp_path / "pins").mkdir(exist_ok=True)
    (tmp_path / "pins" / "peer.txt").write_text(text)
    return {"pins": tmp_path / "pins", "build_dir": tmp_path / "build"}


def test_an_environment_is_made_once_and_again_when_its_pins_change(tmp_path: Path) -> None:
    made = []
    for text in ("--no-index\n", "--no-index\n", "--no-index\n# changed\n"):
        interpreter = environments.python("peer", **pins(tmp_path, text))
        made.append(interpreter.parent.stat().st_ctime_ns)
    assert made[0] == made[1] != made[2]
    where = subprocess.run(
        [interpreter, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    )
    assert where.stdout.strip() == str(tmp_path / "build" / "peer")


def test_an_environment_that_could_not_be_made_is_not_taken_for_one(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"^pip failed: ERROR: .*no-such-peer==1"):
            environments.python("peer", **pins(tmp_path, "--no-index\nno-such-peer==1\n"))


def test_without_node_its_peer_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="needs Node, and `node` is not on PATH"):
        environments.node_modules("node-redlock", build_dir=tmp_path)


def test_every_peer_is_pinned() -> None:
    for file in environments.PINS.glob("*.txt"):
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in file.read_text().splitlines()), file
    assert {file.stem for file in environments.PINS.iterdir()} == {
        *("matplotlib", "node-redlock", "pottery", "python-redis-lock", "redlock-ng", "valkey-glide-sync")
    }
    assert [peer.name for peer in PEERS if not peer.many_nodes] == ["python-redis-lock", "valkey-glide-sync"]
    assert [peer.name for peer in PEERS if peer.many_nodes] == [
        "redlock-ng",
        "pottery Redlock",
        "node redlock",
    ]


def not_here() -> Any:
    raise Unavailable("pip failed: no network")


def fake_peer(name: str, many_nodes: bool, took_ns: int) -> Peer:
    """A peer whose cycles always take so long."""
    source = f"""
import json, sys
for line in sys.stdin:
    print(json.dumps(dict(versions="{name} 1.0", took_ns=[{took_ns}], rate=1.0)), flush=True)
"""
    return Peer(name, many_nodes, lambda: ([sys.executable, "-c", source], {}))


@needs_cc
@pytest.mark.parametrize("make", [OneNode, ManyNodes])
def test_a_missing_peer_ends_a_full_run_and_is_left_out_of_a_quick_one(
    nodes: LocalNodes, make: Callable[[Setup], OneNode | ManyNodes], capsys: pytest.CaptureFixture[str]
) -> None:
    many = make is ManyNodes
    peers = [Peer("absent", many, not_here), fake_peer("present", many, 1), fake_peer("other", not many, 1)]
    setup = Setup([node.url for node in nodes], ["pure"], Plan(1, 0.01), peers=peers)
    scenario = make(setup)
    try:
        assert "present" in [row.name for row in scenario.rows]
        assert "other" not in [row.name for row in scenario.rows]
        assert {"row": "absent", "missing": "not run: pip failed: no network"} in scenario.missing
        assert scenario.versions == ["present 1.0"]
        assert "bench: left out: absent: pip failed: no network\n" in capsys.readouterr().err
        table = "\n".join(lines({}, [scenario.run(lambda: None)]))
        assert re.search(r"\| absent .*\| not run: pip failed: no network", table)
    finally:
        scenario.close()
    setup.required = True
    pytest.importorskip("redlock")
    with pytest.raises(Unavailable, match=r"^absent: pip failed: no network$"):
        make(setup)


@needs_cc
def test_a_full_run_with_peers_needs_the_ones_of_this_environment_too(
    nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup([node.url for node in nodes], ["pure"], Plan(1, 0.01), required=True)
    monkeypatch.setitem(sys.modules, "redlock", None)
    with pytest.raises(Unavailable, match=r"^redlock-py: "):
        ManyNodes(setup)
    monkeypatch.setattr(scenarios, "HIREDIS_AVAILABLE", False)
    with pytest.raises(Unavailable, match=r"^redis-py with hiredis: "):
        OneNode(setup)


@needs_cc
@pytest.mark.parametrize(("options", "status"), [([], 1), (["--quick"], 0)])
def test_the_command_names_the_missing_peer(
    options: Sequence[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("redlock")
    monkeypatch.setattr(command, "PEERS", [Peer("absent", True, not_here)])
    monkeypatch.setattr(scenarios.Imports, "run", lambda self, step: {"title": "import", "rows": []})
    tiny = ["--passes", "1", "--cycles", "3", "--engine", "pure", "--pin", "free"]
    assert command.main(["--peers", *tiny, *options]) == status
    out, err = capsys.readouterr()
    if status:
        assert err == "bench: absent: pip failed: no network\n"
        assert out == ""
    else:
        assert "bench: left out: absent: pip failed: no network\n" in err
        assert re.search(r"\| absent .*\| not run: pip failed: no network", out)


def test_redlock_has_targets_beside_each_of_its_peers() -> None:
    scenario = ManyNodes.__new__(ManyNodes)
    scenario.bounds = ManyNodes.of_five
    took = {"C floor": 100, "redbolt RedLock, native": 105, "redlock-py": 700, "redlock-ng": 462}
    slices = {name: [Slice(array("q", [ns]), 1.0)] for name, ns in {**took, "node redlock": 210}.items()}
    result = {"title": "5 nodes", "rows": [scenario.judge("redbolt RedLock, native", slices)]}
    shown = lines({}, [result])
    assert (
        "<= 1.10 x floor: 1.05 met; >= 6.00 x faster than redlock-py: 6.67 met; "
        ">= 4.50 x faster than redlock-ng: 4.40 **missed**; >= 2.00 x faster than node redlock: 2.00 met"
    ) in "\n".join(shown)
    del slices["node redlock"]
    targets = scenario.judge("redbolt RedLock, native", slices)["targets"]
    assert [target["target"].rpartition(" ")[2] for target in targets] == [
        "floor",
        "redlock-py",
        "redlock-ng",
    ]


HEAD = dict.fromkeys(("date", "machine", "python", "redbolt", "servers"), "words")


def test_a_picture_has_every_cycle_of_every_row_that_ran() -> None:
    slices = {"C floor": [Slice(array("q", [3, 1]), 1.0), Slice(array("q", [2]), 1.0)]}
    ran = {"row": "C floor", "p50_us": 0.002, "floor": {"median": 1.0}, "targets": []}
    missing = {"row": "absent", "missing": "not run"}
    data = picture({**HEAD, "command": "secret"}, [({"title": "one node", "rows": [ran, missing]}, slices)])
    row = {"row": "C floor", "p50_us": 0.002, "ratio": 1.0, "took_ns": [3, 1, 2]}
    assert data == {**HEAD, "panels": [{"title": "one node", "rows": [row]}]}


def test_a_picture_is_drawn_from_its_data_by_the_drawing_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "draw.py"
    script.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())")
    monkeypatch.setattr(report, "DRAWING", script)
    report.draw(Path(sys.executable), {"panels": [1, 2]}, tmp_path / "plot.svg")
    assert json.loads((tmp_path / "plot.svg").read_text()) == {"panels": [1, 2]}


@needs_cc
def test_a_run_draws_one_node_and_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(environments, "python", Path)
    monkeypatch.setattr(command, "draw", lambda *words: drawn.append(words))
    monkeypatch.setattr(scenarios.Imports, "run", lambda self, step: {"title": "import", "rows": []})
    file = tmp_path / "plot.svg"
    tiny = ["--passes", "2", "--cycles", "3", "--pin", "free", "--plot", str(file)]
    assert command.main(tiny) == 0
    assert not file.exists()
    [(interpreter, data, where)] = drawn
    assert (interpreter, where) == (Path("matplotlib"), file)
    assert [panel["title"].partition(" (")[0] for panel in data["panels"]] == ["one node", "5 nodes"]
    for panel in data["panels"]:
        assert "C floor" in [row["row"] for row in panel["rows"]]
        assert all(len(row["took_ns"]) == 6 for row in panel["rows"])


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.svg").mkdir()
    for name, why in (
        ("plot.png", r"the name must end in \.svg"),
        ("nowhere/plot.svg", "No such file or directory"),
        ("folder.svg", "Is a directory"),
    ):
        with pytest.raises(SystemExit):
            command.main(["--plot", str(tmp_path / name)])
        assert re.search(f"error: --plot .*{name}: {why}", capsys.readouterr().err)
    kept = tmp_path / "kept.svg"
    kept.write_text("an earlier plot")
    assert command.arguments(["--plot", str(kept)]).plot == kept
    assert kept.read_text() == "an earlier plot"


def test_stock_has_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import stock

    monkeypatch.setattr(stock, "main", lambda argv: [argv, 7][-1] if argv == ["--quick", "x"] else 1)
    assert command.main(["stock", "--quick", "x"]) == 7


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
            ours = [name.removeprefix("redbolt ") for name in names if name.startswith("redbolt ")]
            locks = {
                "one node": ("Lock", "ReentrantLock", "compat Lock"),
                "8 threads on 8 keys, one node": ("Lock",),
            }
            wanted = locks.get(title, ("RedLock",))
            assert ours == [f"{lock}, {engine}" for lock in wanted for engine in ("native", "pure")]
            assert len(names) == len(ours) + 2
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
