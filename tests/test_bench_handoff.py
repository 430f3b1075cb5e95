"""The hand-off benchmark: its options, its board and turns, its floors in C, a tiny run with real nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import redis

from bench import handoff, handoff_board
from bench.contenders import LIBRARIES, Library
from bench.environments import Unavailable
from bench.floor import build
from bench.handoff import FLOOR, Handoff, arguments, main, plan
from bench.handoff_board import CELLS, WAITS_NS, Board, asleep
from bench.handoff_floor import SOURCE, TOLD_BY, Floor
from bench.handoff_run import Pair, Program
from bench.handoff_worker import Tally, contend
from bench.peers import Contending
from bench.runner import Plan, Slice
from bench.scenarios import Setup
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually

KEY = "bench:handoff"
BOTH = pytest.mark.parametrize("between", ["processes", "threads"])
needs_cc = pytest.mark.skipif(
    shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None, reason="no C compiler"
)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with LocalNodes(3) as nodes:
        yield nodes


@pytest.fixture
def urls(nodes: LocalNodes) -> list[str]:
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    return [node.url for node in nodes]


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create()
    board.begin(6, time.monotonic_ns() + int(60e9 * SLACK))
    yield board
    board.remove()
    board.close()


# ---- options ----


@pytest.mark.parametrize(
    "options",
    [
        ["--nodes", "3"],
        ["--passes", "0"],
        ["--samples", "-1"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--between", "machines"],
        ["--pin", "best"],
        ["--fast"],
    ],
    ids=" ".join,
)
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert "python -m bench handoff: error:" in capsys.readouterr().err


def test_quick_is_less_unless_told_otherwise() -> None:
    usual, quick = plan(arguments([])), plan(arguments(["--quick"]))
    assert (quick.passes, quick.seconds, quick.limit) < (usual.passes, usual.seconds, usual.limit)
    told = plan(arguments(["--quick", "--samples", "7", "--passes", "1", "--seconds", "0.5"]))
    assert told == Plan(1, 0.5, 7)


# ---- the board, and the turns ----


class Passed:
    """A lock in memory that goes to the one who has waited for the longest."""

    def __init__(self) -> None:
        self._free = threading.Semaphore()
        self.log: list[str] = []

    def acquire(self) -> bool:
        self._free.acquire()
        self.log.append(f"acquire {threading.current_thread().name[-1]}")
        return True

    def release(self) -> None:
        self.log.append(f"release {threading.current_thread().name[-1]}")
        self._free.release()


def take_turns(board: Board, *locks: Any) -> list[Tally]:
    with ThreadPoolExecutor(2, "contender") as pool:
        library = Library(lambda key: locks[0], (KeyError,))
        turns = [pool.submit(contend, lock, library, board, number) for number, lock in enumerate(locks)]
        return [each.result() for each in turns]


def test_a_lock_is_passed_to_and_fro_and_all_but_the_first_time_is_counted(board: Board) -> None:
    lock = Passed()
    start = time.monotonic()
    tallies = take_turns(board, lock, lock)
    assert len(lock.log) == 14
    assert lock.log[::2] == [f"acquire {number % 2}" for number in range(7)]
    assert lock.log[1::2] == [f"release {number % 2}" for number in range(7)]
    assert [len(tally.took_ns) for tally in tallies] == [3, 2]
    assert all(0 < ns < 10e9 * SLACK for tally in tallies for ns in tally.took_ns)
    assert time.monotonic() - start > 6 * WAITS_NS / 1e9


def test_it_is_released_no_sooner_than_the_other_one_has_waited(board: Board) -> None:
    seen = []

    class Watched(Passed):
        def release(self) -> None:
            cells = [*board._cells]
            now = time.monotonic_ns()
            turn = cells[handoff_board.RELEASED]
            if turn < board.last:
                seen.append((cells[handoff_board.ASKED] - turn, now - cells[handoff_board.ASKED_NS]))
            super().release()

    lock = Watched()
    take_turns(board, lock, lock)
    assert [asked for asked, _ in seen] == [1] * 6
    assert min(waited for _, waited in seen) >= WAITS_NS


def test_it_is_not_released_while_the_other_one_is_awake(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, looks = Passed(), []

    def look(thread: int) -> bool:
        looks.append((thread, lock.log.count("release 0")))
        return len(looks) > 3

    monkeypatch.setattr(handoff_board, "asleep", look)
    board.begin(1, time.monotonic_ns() + int(60e9 * SLACK))
    take_turns(board, lock, lock)
    assert [released for _, released in looks] == [0] * 4
    assert len({thread for thread, _ in looks} - {threading.get_native_id()}) == 1


@needs_proc
def test_a_process_is_asleep_when_it_waits_and_not_when_it_runs_or_is_stopped() -> None:
    code = "import sys; print(flush=True); sys.stdin.readline(); print(flush=True)\nwhile True: pass"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            process.stdout.readline()
            eventually(lambda: asleep(process.pid), 10, "it waits")
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            assert not any(asleep(process.pid) for _ in range(20))
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: not asleep(process.pid), 10, "it has stopped")
        finally:
            process.kill()
    assert not asleep(process.pid)


def test_when_time_is_over_the_one_who_waits_is_the_last(board: Board) -> None:
    board.begin(1000, 0)
    lock = Passed()
    assert [len(tally.took_ns) for tally in take_turns(board, lock, lock)] == [0, 0]
    assert lock.log == ["acquire 0", "release 0", "acquire 1", "release 1"]
    assert board.last == 1


def test_an_acquire_without_the_lock_is_tried_again(board: Board) -> None:
    class Moody(Passed):
        def __init__(self) -> None:
            super().__init__()
            self.answers = [False, KeyError()]

        def acquire(self) -> bool:
            if threading.current_thread().name[-1] == "1" and self.answers:
                answer = self.answers.pop()
                if isinstance(answer, Exception):
                    raise answer
                return False
            return super().acquire()

    lock = Moody()
    tallies = take_turns(board, lock, lock)
    assert [tally.gave_up for tally in tallies] == [0, 2]


def test_a_lock_that_does_nothing_is_found_out(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_board, "PATIENCE", 0.5)
    lock: Any = LIBRARIES["none"]([], {}).lock("key")
    with pytest.raises((RuntimeError, TimeoutError)):
        take_turns(board, lock, lock)


def test_a_turn_must_have_been_released_after_we_waited(board: Board) -> None:
    board.hold(0, 0)
    board.ask(1)
    with pytest.raises(RuntimeError, match="two held the lock at once"):
        board.hold(1, time.monotonic_ns())
    board.release(0)
    with pytest.raises(RuntimeError, match="released before the other one waited"):
        board.hold(1, time.monotonic_ns())
    with pytest.raises(RuntimeError, match="two held the lock at once"):
        board.hold(1, board._cells[handoff_board.RELEASED_NS] - 1)
    board._cells[handoff_board.ASKED_NS] -= WAITS_NS
    assert board.hold(1, board._cells[handoff_board.RELEASED_NS] + 5) == 5


def test_a_contender_that_is_left_alone_says_so(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_board, "PATIENCE", 0.05)
    with pytest.raises(TimeoutError, match="the other contender is gone"):
        board.ask(1)
    with pytest.raises(TimeoutError, match="the other contender is gone"):
        board.await_waiter(0)
    board.await_waiter(board.last)  # nobody asks after the last one


def test_the_board_is_one_for_all_who_open_its_file_and_is_removed(board: Board) -> None:
    other = Board(board.path)
    board.begin(42, 7, 0.5)
    assert (other.last, other._cells[handoff_board.JITTER_NS]) == (42, 500_000_000)
    board.remove()
    assert not Path(board.path).exists()
    other.close()


def test_every_language_numbers_the_cells_alike() -> None:
    names = [
        "HELD",
        "ASKED",
        "ASKED_NS",
        "WAITER",
        "RELEASED",
        "RELEASED_NS",
        "LAST",
        "UNTIL_NS",
        "JITTER_NS",
    ]
    assert [getattr(handoff_board, name) for name in names] == [*range(CELLS)]
    c = re.search(r"enum \{ (HELD[^}]*) \}", SOURCE.read_text())
    js = re.search(r"\[(HELD[^\]]*)\]", (SOURCE.parent / "peers" / "handoff_worker.js").read_text())
    for found in (c, js):
        assert found
        assert found[1].split(", ") == names


# ---- the floors ----


@needs_cc
def test_the_floors_compile_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path, SOURCE).name.startswith("handoff-")
    assert capfd.readouterr() == ("", "")


def floors(urls: list[str], board: Board, told_by: str = "message") -> list[array[int]]:
    pair = [Floor(urls, KEY, number, told_by) for number in (0, 1)]
    try:
        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(lambda floor: floor.run(board), pair)]
    finally:
        for floor in pair:
            floor.close()


@needs_cc
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("told_by", TOLD_BY)
def test_a_floor_tells_the_waiter_which_then_sets_a_fresh_token(
    urls: list[str], board: Board, told_by: str, count: int
) -> None:
    urls = urls[:count]
    pair = [Floor(urls, KEY, number, told_by) for number in (0, 1)]
    with redis.Redis.from_url(urls[0]) as client, client.monitor() as monitor:
        with ThreadPoolExecutor(2) as pool:
            done = [*pool.map(lambda floor: floor.run(board), pair)]
        client.set("end", 1)
        seen: list[list[str]] = []
        while not seen or seen[-1][:2] != ["SET", "end"]:
            seen.append(monitor.next_command()["command"].split())
        assert client.keys() == [b"end"]
    for floor in pair:
        assert floor.retries == 0
        floor.close()
    assert [len(took_ns) for took_ns in done] == [3, 2]
    assert all(0 < ns < 10e9 * SLACK for took_ns in done for ns in took_ns)
    sets = [words for words in seen[:-1] if words[0] == "SET"]
    assert {(words[1], *words[3:]) for words in sets} == {(KEY, "NX", "PX", "10000")}
    assert len({words[2] for words in sets}) == len(sets) == 1 + 6 * 2  # first refused, then granted
    told = [words for words in seen if words[0] == {"message": "PUBLISH", "list": "RPUSH"}[told_by]]
    assert told == [[told[0][0], f"{KEY}:{number % 2}", "1"] for number in range(1, 7)]
    # Each release deletes the token of the one who holds it, right before it tells the other one.
    for at, words in enumerate(seen):
        if words in told:
            assert words is not seen[0]
            deleted = seen[at - 1][-1]
            assert deleted in {one[2] for one in sets}
    assert [words[0] for words in seen].count("BLPOP") == (6 if told_by == "list" else 0)


@needs_cc
def test_a_floor_finds_out_that_somebody_else_has_the_lock(urls: list[str], board: Board) -> None:
    for url in urls:
        with redis.Redis.from_url(url) as client:
            client.set(KEY, "somebody else's")
    floor = Floor(urls, KEY, 0, "message")
    with pytest.raises(RuntimeError, match="contender 0, node 0: somebody else holds the lock"):
        floor.run(board)
    floor.close()


@needs_cc
def test_a_floor_finds_out_that_its_lock_was_lost_or_never_held(urls: list[str], board: Board) -> None:
    board.begin(0, 0)
    held = threading.Event()

    def steal() -> None:
        end = time.monotonic() + 10 * SLACK
        with redis.Redis.from_url(urls[0]) as client:
            while time.monotonic() < end and not client.delete(KEY):
                time.sleep(0.001)
        held.set()

    thief, floor = threading.Thread(target=steal), Floor(urls[:1], KEY, 0, "message")
    board.begin(1, time.monotonic_ns())
    thief.start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(floor.run, board)
        assert held.wait(20 * SLACK)
        thief.join()
        board._cells[handoff_board.WAITER] = threading.get_native_id()
        board._cells[handoff_board.ASKED] = 1
        with pytest.raises(RuntimeError, match="the lock was not there any more"):
            running.result(20 * SLACK)
    floor.close()

    board.begin(1, time.monotonic_ns())
    board.hold(0, 0)
    floor = Floor(urls[:1], KEY, 1, "message")
    with pytest.raises(RuntimeError, match="contender 1, node 0: two held the lock at once"):
        floor.run(board)
    floor.close()


# ---- the rows ----


@BOTH
@pytest.mark.parametrize("engine", ["native", "pure"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_of_redbolt(urls: list[str], between: str, engine: str, count: int) -> None:
    row = Pair("redbolt", Program("redbolt", {"engine": engine}), between, urls[:count], KEY)
    try:
        done = row.run(60 * SLACK, 2)
        assert len(done.took_ns) == 2
        assert min(done.took_ns) > 0
        assert len(row.run(60 * SLACK, 1).took_ns) == 1
        assert row.gave_up == 0
        assert not Path(row._board.path).exists()
    finally:
        row.close()


@needs_cc
@BOTH
def test_a_row_of_a_floor_ends_in_time(urls: list[str], between: str) -> None:
    row = Pair("floor", Program("floor", {"told_by": "message"}), between, urls, KEY)
    try:
        start = time.monotonic()
        done = row.run(0.2, 10**6)
        assert 1 <= len(done.took_ns) < 200
        assert 0.2 < time.monotonic() - start < 20 * SLACK
    finally:
        row.close()


def program(source: str) -> tuple[list[str], dict[str, str]]:
    start = "import json, os, sys, time\nbegun = json.loads(sys.stdin.readline())\n"
    return [sys.executable, "-c", start + dedent(source)], {}


def test_another_program_can_follow_the_protocol(urls: list[str]) -> None:
    told = program("""
        print(json.dumps({"versions": json.dumps(begun)}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"took_ns": [5 + begun["contenders"][0]], "gave_up": 3}), flush=True)
    """)
    row = Pair("other", Program("any", {"a": 1}, 0.5, ["one"], told), "processes", urls, KEY)
    try:
        begun = json.loads(row.versions)
        assert [node["url"] for node in begun["nodes"]] == urls
        assert (begun["key"], begun["library"], begun["options"]) == (KEY, "any", {"a": 1})
        assert (begun["packages"], begun["contenders"]) == (["one"], [0])
        assert sorted(row.run(1, 1).took_ns) == [5, 6]
        assert row.gave_up == 6
        assert row._board._cells[handoff_board.JITTER_NS] == 500_000_000
    finally:
        row.close()


def test_a_row_whose_library_is_missing_breaks_or_passes_nothing_on(urls: list[str]) -> None:
    with pytest.raises(ImportError, match="no such module"):
        missing = program("""print('{"missing": "no such module"}', flush=True)""")
        Pair("row", Program("any", started=missing), "processes", urls, KEY)
    with pytest.raises(Unavailable, match=r"it does not start: .*no luck today"):
        Pair("row", Program("any", started=program("sys.exit('no luck today')")), "processes", urls, KEY)
    with pytest.raises(ImportError, match="native engine"):
        blocked = [sys.executable, "-c", BLOCKED]
        Pair("row", Program("redbolt", {"engine": "native"}, started=(blocked, {})), "threads", urls, KEY)
    begun = """print('{"versions": ""}', flush=True); sys.stdin.readline();"""
    for does, told in (
        ("sys.exit('no luck today')", "the worker of row has ended\nno luck today"),
        ("""print('{"took_ns": [], "gave_up": 0}', flush=True)""", "row: the lock was not passed on twice"),
    ):
        row = Pair("row", Program("any", started=program(begun + does)), "threads", urls, KEY)
        try:
            with pytest.raises(RuntimeError, match=told):
                row.run(0.1, 1)
        finally:
            row.close()


BLOCKED = """
import sys; sys.modules["redbolt._core"] = None
import bench.handoff_worker as worker; worker.main()
"""


def test_a_contender_that_breaks_ends_its_process_with_the_other_one(urls: list[str]) -> None:
    code = """
        import bench.handoff_worker as worker, time
        class Bad:
            def __init__(self, key): self.key = key
            def acquire(self):
                if self.key == "bench:handoff": raise KeyError("no luck today")
                return True
            def release(self): pass
        worker.LIBRARIES["bad"] = lambda urls, options: worker.Library(Bad)
        worker.main()
    """
    row = Pair(
        "row", Program("bad", started=([sys.executable, "-c", dedent(code)], {})), "threads", urls, KEY
    )
    start = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="no luck today"):
            row.run(60, 3)
        assert time.monotonic() - start < 20 * SLACK
    finally:
        row.close()


# ---- the scenario ----


def scenario(urls: list[str], between: str = "processes", **more: Any) -> Handoff:
    return Handoff(Setup(urls, ("native", "pure"), Plan(1, 1.0, 2)), between, **more)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Program, str]]:
    """The rows that are made, instead of making them."""
    made: list[tuple[str, Program, str]] = []

    class Row:
        versions = ""

        def __init__(self, name: str, program: Program, between: str, urls: list[str], key: str) -> None:
            if program.library in ("redis-py", "redlock-py"):
                raise ImportError("no such module")
            self.name = name
            made.append((name, program, between))

        def close(self) -> None:
            pass

    monkeypatch.setattr(handoff, "Pair", Row)
    return made


class Peer(Contending):
    def program(self, what: str) -> tuple[list[str], dict[str, str]]:
        assert what == "handoff_worker"
        if self.library == "missing":
            raise Unavailable("no network")
        return ["run", self.name], {}


PEERS = [
    Peer("of one", "a", ("one",), many_nodes=False, polls=0.5),
    Peer("of many", "b", ("two",), many_nodes=True),
    Peer("away", "missing", (), many_nodes=False),
]


def test_the_rows_are_the_floors_both_engines_and_peers(
    urls: list[str], pairs: list[tuple[str, Program, str]]
) -> None:
    one = scenario(urls[:1], peers=PEERS)
    assert [name for name, _, _ in pairs] == [
        "pub/sub + SET", "BLPOP + SET", "redbolt Lock, native", "redbolt Lock, pure", "of one",
    ]  # fmt: skip
    assert {between for _, _, between in pairs} == {"processes"}
    assert pairs[-1][1] == Program("a", {}, 0.5, ("one",), (["run", "of one"], {}))
    assert one.missing == [
        {"row": "redis-py Lock", "missing": "not run: no such module"},
        {"row": "away", "missing": "not run: no network"},
    ]
    pairs.clear()
    scenario(urls, peers=PEERS)
    assert [name for name, _, _ in pairs][2:] == [
        "redbolt RedLock, native",
        "redbolt RedLock, pure",
        "of many",
    ]
    pairs.clear()
    scenario(urls, "threads", peers=PEERS)
    assert len(pairs) == 4
    setup = Setup(urls[:1], ("native",), Plan(1, 1.0, 2), required=True)
    with pytest.raises(Unavailable, match="away: no network"):
        Handoff(setup, "processes", PEERS)


@pytest.mark.parametrize(("count", "bound"), [(1, 1.35), (5, 1.15)])
def test_targets_are_for_the_native_engine_between_processes(
    pairs: list[tuple[str, Program, str]], count: int, bound: float
) -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in range(7, 7 + count)]
    name = f"redbolt {'Lock' if count == 1 else 'RedLock'}, "
    for between in ("processes", "threads"):
        judging = scenario(urls, between)
        for times in (bound - 0.05, bound + 0.05):
            slices = {
                FLOOR: [Slice(array("q", [1000]), 1.0)],
                name + "native": [Slice(array("q", [int(1000 * times)]), 1.0)],
                name + "pure": [Slice(array("q", [9000]), 1.0)],
            }
            result = judging.judge(name + "native", slices)
            assert result["floor"]["median"] == pytest.approx(times, abs=0.002)
            assert result["samples"] == 1
            if between == "processes":
                assert [one["met"] for one in result["targets"]] == [times < bound]
                assert result["targets"][0]["target"] == f"<= {bound:.2f} x pub/sub + SET"
            else:
                assert result["targets"] == []
            assert judging.judge(name + "pure", slices)["targets"] == []


# ---- the whole ----


@needs_cc
@pytest.mark.slow
def test_a_tiny_run_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    told = ["--quick", "--passes", "1", "--samples", "2", "--seconds", "0.3", "--between", "threads"]
    told += ["--json", str(file)]
    assert main(told) == 0
    out = capsys.readouterr().out
    written = json.loads(file.read_text())
    titles = [one["title"].split(" (")[0] for one in written["scenarios"]]
    assert titles == [f"hand-off between threads, {count}" for count in ("1 node", "5 nodes")]
    for one in written["scenarios"]:
        assert one["title"] in out
        rows = {row["row"]: row for row in one["rows"] if "missing" not in row}
        assert [*rows][:2] == [*TOLD_BY.values()]
        assert len([name for name in rows if name.startswith("redbolt ")]) == 2
        for row in rows.values():
            assert row["samples"] > 0
            assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"]
            assert row["floor"]["median"] > 0
        assert rows[FLOOR]["floor"]["median"] == 1
    assert "command: python -m bench handoff --quick" in out


def test_bench_hands_its_words_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.__main__ as command

    said: list[list[str]] = []
    told: Callable[[list[str]], int] = lambda argv: said.append(argv) or 3  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(handoff, "main", told)
    assert command.main(["handoff", "--quick"]) == 3
    assert said == [["--quick"]]
