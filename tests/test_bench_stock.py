"""The stock benchmark: its options, its account, its processes, and one tiny run with real nodes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from bench import stock
from bench.stock import arguments, judge, main
from bench.stock_run import Account, Entry, Missing, Place, Worker, run, split, unevenness
from bench.stock_worker import LIBRARIES, Holder, Job, Library, Market, Shelf, Tally, contend
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually
from tests.kit.ports import ports

LONG_NS = 600 * 10**9
LOCK, NO_LOCK = Entry("a lock", "none"), Entry("no lock", "none", locked=False)

# A program that follows the protocol and touches no stock. What it sold, after the start, is its argument.
SELLER = """
import json, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True}), flush=True)
start_ns = int(sys.stdin.readline())
sales = [[start_ns + ns for ns in times] for times in json.loads(sys.argv[1])]
waits = [[1] * len(times) for times in sales]
print(json.dumps({"sales": sales, "waits": waits, "gave_up": 3, "unreleased": 2}))
"""


# ---- options ----


@pytest.mark.parametrize(
    "options",
    [
        ["--contenders", "0"],
        ["--processes", "0"],
        ["--work", "0"],
        ["--passes", "-1"],
        ["--limit", "0"],
        ["--limit", "nan"],
        ["--contenders", "2", "--processes", "3"],
        ["--nodes", "3"],
        ["--contenders", "many"],
        ["--fast"],
    ],
    ids=" ".join,
)
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert "python -m bench stock: error:" in capsys.readouterr().err


def test_quick_is_less_work_unless_told_otherwise() -> None:
    usual, quick, told = arguments([]), arguments(["--quick"]), arguments(["--quick", "--work", "7"])
    assert (usual.contenders, usual.processes, usual.nodes) == (100, 1, 1)
    assert quick.work < usual.work
    assert quick.passes < usual.passes
    assert (told.work, told.passes) == (7, quick.passes)


@pytest.mark.parametrize("nodes", [1, 5])
def test_the_rows_are_both_engines_a_peer_one_alone_and_no_lock(nodes: int) -> None:
    rows = stock.entries(nodes)
    assert [dict(row.options).get("engine") for row in rows] == [None, "native", "pure", None, None]
    assert [row.library for row in rows[3:]] == [{1: "redis-py", 5: "redlock-py"}[nodes], "none"]
    assert [row.alone for row in rows] == [True, False, False, False, False]
    assert [row.locked for row in rows] == [True, True, True, True, False]
    assert {row.library for row in rows} <= {*LIBRARIES}
    assert len({row.title for row in rows}) == len(rows)


# ---- the account ----


def account(*sales: list[int], taken: int | None = None, work: int | None = None, **more: int) -> Account:
    """Of one process that began at 1000; it took as much as was sold."""
    sold = sum(map(len, sales))
    taken = sold if taken is None else taken
    work = taken if work is None else work
    return Account([*sales], [len(sales)], [7] * sold, taken, work, 1000, **more)


def test_starved_median_and_most() -> None:
    row = judge(LOCK, [account([1100], [], [1200, 1300, 1400], [1500, 1600], [])], [])
    assert (row["starved"], row["median"], row["max"], row["uneven"]) == (2, 1, 3, 3.0)
    row = judge(LOCK, [account([1100], [1200, 1300])], [])
    assert (row["starved"], row["median"], row["max"]) == (0, 1.5, 2)
    row = judge(LOCK, [account([], [], [1100])], [])
    assert (row["starved"], row["median"], row["max"], row["uneven"]) == (2, 0, 1, float("inf"))


def test_unevenness_is_the_most_over_the_median() -> None:
    assert unevenness([2, 2, 2]) == 1.0
    assert unevenness([1, 2, 9, 2]) == 4.5
    assert unevenness([0, 0, 9]) == float("inf")


def test_half_way_is_when_half_of_all_sales_were_made_by_the_clock() -> None:
    done = account([1001, 1002, 1003], [1004, 1008], [1005, 1006, 1007])
    assert done.half_way == [3, 1, 0]
    assert done.counts == [3, 2, 3]
    assert account([1002], [1001], [1003]).half_way == [1, 1, 0]  # the one in the middle is in
    assert judge(LOCK, [done], [])["uneven_half"] == 3.0


def test_the_rate_is_until_the_last_sale() -> None:
    assert account([1500, 2000], [1700], []).rate == pytest.approx(3 / 1000 * 1e9)
    assert account([], []).rate == 0.0


def test_oversold_is_what_the_stock_knows_nothing_of() -> None:
    assert account([1100, 1200], [1300]).oversold == 0
    assert account([1100, 1200], [1300], taken=1).oversold == 2
    oversold = judge(LOCK, [account([1100]), account([1100, 1200], taken=1)], [])
    assert oversold["oversold"] == 1
    assert oversold["failed"]
    assert oversold["notes"] == ["**sold what was not there**"]
    assert not judge(LOCK, [account([1100])], [])["failed"]


def test_a_run_without_a_lock_must_oversell_if_there_was_anybody_else() -> None:
    assert not judge(NO_LOCK, [account([1100, 1200], [1300], taken=1)], [])["failed"]
    never = judge(NO_LOCK, [account([1100, 1200], [1300])], [])
    assert never["failed"]
    assert "nothing oversold" in never["notes"][0]
    assert not judge(NO_LOCK, [account([1100, 1200])], [])["failed"]


def test_what_is_left_gave_up_or_was_not_released_is_told() -> None:
    row = judge(LOCK, [account([1100], work=4, gave_up=5, unreleased=6), account([1100], gave_up=1)], [])
    assert row["notes"] == ["time was over with 3 unsold", "6 releases failed"]
    assert row["gave_up"] == 6
    assert not row["failed"]


def test_over_the_passes_rates_and_shares_are_medians_and_the_rest_is_of_the_worst() -> None:
    even, odd, worst = account([1500], [2000]), account([1100], [1200, 1250]), account([], [1400] * 5)
    row = judge(LOCK, [odd, even, worst], [])
    assert row["rate"] == odd.rate == sorted(each.rate for each in (even, odd, worst))[1]
    assert (row["starved"], row["max"]) == (1, 5)
    assert (row["median"], row["uneven"]) == (1.5, unevenness([1, 2]))
    assert row["wait_p99_ms"] == 7 / 1e6


def test_the_wait_is_that_of_99_in_100() -> None:
    waits = [*range(1, 200), 9000]
    assert Account([[1100] * 200], [1], waits, 200, 200, 1000).wait_p99_ns == 198
    assert account([]).wait_p99_ns == 0


def test_alone_is_compared_pass_by_pass() -> None:
    fast, slow = account([1100]), account([1400])
    row = judge(LOCK, [slow, slow, fast], [fast, slow, fast])
    assert row["alone"]["per_pass"] == [0.25, 1.0, 1.0]
    assert "alone" not in judge(LOCK, [fast, slow], [fast])


def test_the_share_of_processes_is_per_contender() -> None:
    done = Account([[1100] * 4, [1100] * 2, [1100]], [2, 1], [], 7, 7, 1000)
    assert done.process_share == pytest.approx(1 / 3)
    assert judge(LOCK, [done], [])["process_share"] == done.process_share
    assert "process_share" not in judge(LOCK, [account([1100])], [])


def test_contenders_are_spread_evenly() -> None:
    assert split(100, 4) == [25, 25, 25, 25]
    assert split(5, 3) == [2, 2, 1]


# ---- a contender ----


class Stock:
    """In memory. Where ``together`` is given, nobody reads on before all have read."""

    def __init__(self, left: int, together: threading.Barrier | None = None) -> None:
        self.value = left
        self._together = together

    def left(self) -> int:
        value = self.value
        if self._together and value:
            self._together.wait(10 * SLACK)
        return value

    def put(self, left: int) -> None:
        self.value = left


class Fake:
    """A lock that answers as told, and raises what is an error; then it is granted."""

    def __init__(self, *answers: bool | Exception, release: Exception | None = None) -> None:
        self._answers = [*answers]
        self._release = release
        self.released = 0

    def acquire(self) -> bool:
        answer = self._answers.pop(0) if self._answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self) -> None:
        self.released += 1
        if self._release:
            raise self._release


class Away(Exception):
    pass


class Unsure(Exception):
    pass


def library(make: Callable[[str], Holder]) -> Library:
    return Library(make, (Away,), (Unsure,))


def market(most: int = 1000, until_ns: int | None = None) -> Market:
    return Market(time.monotonic_ns() + LONG_NS if until_ns is None else until_ns, most)


def sell(lock: Fake, shelf: Shelf, where: Market) -> Tally:
    return contend(lock, library(lambda key: lock), shelf, where)


def test_a_contender_sells_until_the_shelf_is_empty_and_tells_the_others() -> None:
    lock, shelf, where = Fake(), Stock(3), market()
    tally = sell(lock, shelf, where)
    assert (len(tally.sold_ns), len(tally.wait_ns), shelf.value, lock.released) == (3, 3, 0, 4)
    assert [*tally.sold_ns] == sorted(tally.sold_ns)
    assert not where.open()
    assert len(sell(Fake(), Stock(3), where).sold_ns) == 0


def test_a_contender_stops_at_its_most_and_when_the_time_is_over() -> None:
    assert len(sell(Fake(), Stock(5), market(most=2)).sold_ns) == 2
    assert len(sell(Fake(), Stock(5), market(until_ns=0)).sold_ns) == 0


def test_an_acquire_without_the_lock_is_counted_and_tried_again() -> None:
    lock, shelf = Fake(False, Away(), True, False), Stock(2)
    tally = sell(lock, shelf, market())
    assert (tally.gave_up, len(tally.sold_ns), shelf.value) == (3, 2, 0)
    assert lock.released == 3  # and none for what was not got


def test_a_release_that_fails_is_counted() -> None:
    tally = sell(Fake(release=Unsure()), Stock(2), market())
    assert (tally.unreleased, len(tally.sold_ns)) == (3, 2)


@pytest.mark.parametrize("lock", [Fake(KeyError()), Fake(release=KeyError())], ids=["acquire", "release"])
def test_any_other_error_is_not_swallowed(lock: Fake) -> None:
    with pytest.raises(KeyError):
        sell(lock, Stock(2), market())


def test_the_lock_is_given_back_when_the_shelf_breaks() -> None:
    class Broken(Stock):
        def put(self, left: int) -> None:
            raise ConnectionError

    lock = Fake()
    with pytest.raises(ConnectionError):
        sell(lock, Broken(2), market())
    assert lock.released == 1


def test_two_that_read_before_either_has_written_sell_the_same_piece_twice() -> None:
    shelf, where = Stock(4, threading.Barrier(2)), market()
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(sell, Fake(), shelf, where) for _ in range(2)]
        tallies = [each.result() for each in done]
    assert [len(tally.sold_ns) for tally in tallies] == [4, 4]
    found = account(*([*tally.sold_ns] for tally in tallies), taken=4 - shelf.value)
    assert found.oversold == 4
    assert judge(LOCK, [found], [])["failed"]


# ---- the processes ----


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNodes(1) as nodes:
        yield nodes[0]


@pytest.fixture
def place(node: LocalNode) -> Place:
    return Place([node.url], contenders=4, processes=2, work=40, seconds=60 * SLACK)


@pytest.fixture
def job(node: LocalNode) -> Job:
    with redis.Redis.from_url(node.url) as client:
        client.set("bench:test:stock", 5)
    return Job("none", {}, [node.url], "bench:test", "bench:test:stock", 2, 100, 60 * SLACK)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds * SLACK


def program(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *args)


@pytest.mark.parametrize("engine", ["native", "pure"])
def test_a_lock_sells_every_piece_once(place: Place, engine: str) -> None:
    done = run(Entry("redbolt", "redbolt", (("engine", engine),)), place, f"bench:{engine}")
    assert (done.sold, done.taken, done.oversold, done.unreleased) == (40, 40, 0, 0)
    assert (len(done.sales), done.processes, len(done.waits)) == (4, [2, 2], 40)
    assert min(map(min, filter(None, done.sales))) > done.start_ns


def test_in_even_shares_nobody_sells_more_than_its_share(node: LocalNode) -> None:
    place = Place([node.url], contenders=3, processes=1, work=20, seconds=60 * SLACK, even=True)
    done = run(Entry("redbolt", "redbolt"), place, "bench:even")
    assert sorted(done.counts) == [6, 7, 7]
    assert done.oversold == 0


def test_one_alone_does_all_the_work(place: Place) -> None:
    done = run(Entry("redbolt", "redbolt", alone=True), place, "bench:alone")
    assert (done.counts, done.processes) == ([40], [1])


def test_another_program_can_follow_the_protocol(place: Place) -> None:
    entry = Entry("other", "any", command=program(SELLER, "[[5, 6], [7]]"))
    done = run(entry, place, "bench:other")
    assert [[ns - done.start_ns for ns in times] for times in done.sales] == [[5, 6], [7], [5, 6], [7]]
    assert (done.taken, done.oversold, done.gave_up, done.unreleased) == (0, 6, 6, 4)


def test_a_library_that_is_not_there_is_missing(place: Place) -> None:
    code = """print('{"missing": "no such module"}', flush=True); input()"""
    with pytest.raises(Missing, match="no such module"):
        run(Entry("other", "any", command=program(code)), place, "bench:missing")


def test_a_process_that_ends_too_early_says_why(place: Place) -> None:
    entry = Entry("other", "any", command=program("import sys; input(); sys.exit('no luck today')"))
    with pytest.raises(RuntimeError, match="ended with status 1: no luck today"):
        run(entry, place, "bench:early")


def test_an_error_of_a_contender_ends_its_process(job: Job, node: LocalNode) -> None:
    with redis.Redis.from_url(node.url) as client, Worker(Entry("", "").command, job) as worker:
        worker.await_ready(soon())
        client.delete(job.stock)
        worker.start(time.monotonic_ns())
        with pytest.raises(RuntimeError, match="the stock is gone"):
            worker.result(soon())


def test_contenders_that_cannot_warm_up_end_their_process(job: Job) -> None:
    nowhere = replace(job, urls=[f"redis://127.0.0.1:{next(ports)}"])
    with Worker(Entry("", "").command, nowhere) as worker:
        with pytest.raises(RuntimeError, match=r"ended with status 1: .*(refused|connecting)"):
            worker.await_ready(soon())


def test_a_process_that_does_not_answer_is_killed(job: Job) -> None:
    with Worker(program("import time; time.sleep(600)"), job) as worker:
        with pytest.raises(RuntimeError, match="did not answer in time"):
            worker.await_ready(soon(0.05))
    assert worker._process.returncode == -9


def test_a_process_ends_with_its_parent(job: Job) -> None:
    with Worker(Entry("", "").command, job) as worker:
        worker.await_ready(soon())
        assert worker._process.stdin
        worker._process.stdin.close()
        eventually(lambda: worker._process.poll() is not None, 10, "the process has ended")
        assert worker._process.returncode == 1


# ---- the whole ----


def table(text: str) -> dict[str, dict[str, str]]:
    """The cells by row and heading."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    heads = rows[0][1:]
    return {row[0]: dict(zip(heads, row[1:], strict=True)) for row in rows[2:]}


TINY = ["--contenders", "6", "--processes", "2", "--work", "120", "--passes", "1"]


def test_a_tiny_run_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    out, err = capsys.readouterr()
    assert "bench: redbolt Lock, native" in err
    assert "6 threads in 2 processes, 1 node, 120 deductions" in out
    rows = table(out)
    assert [*rows] == [entry.title for entry in stock.entries(1)]
    for title, row in rows.items():
        assert float(row["deductions/s"].replace(",", "")) > 0
        assert row["notes"] == ""
        if title == "no lock":
            assert int(row["oversold"]) > 0
            continue
        assert row["oversold"] == "0"
        assert 0 < int(row["max"]) <= 120
        assert 0 <= int(row["starved"]) < 6
        assert all(row[head] for head in row if head not in ("notes", "processes min/max"))
    assert rows["redbolt Lock, one thread alone"]["max"] == "120"


@pytest.mark.slow
def test_a_tiny_run_on_five_nodes_in_even_shares(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("redlock")
    assert main([*TINY, "--nodes", "5", "--even"]) == 0
    rows = table(capsys.readouterr().out)
    assert [*rows] == [entry.title for entry in stock.entries(5)]
    for title in ("redbolt RedLock, native", "redbolt RedLock, pure", "redlock-py"):
        assert (rows[title]["starved"], rows[title]["max"], rows[title]["oversold"]) == ("0", "20", "0")


def rows_are(monkeypatch: pytest.MonkeyPatch, *rows: Entry) -> None:
    monkeypatch.setattr(stock, "entries", lambda nodes: [*rows])


def test_a_lock_that_does_nothing_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_are(monkeypatch, Entry("trust me", "none"))
    assert main(["--contenders", "8", "--work", "400", "--passes", "1", "--limit", "5"]) == 1
    row = table(capsys.readouterr().out)["trust me"]
    assert int(row["oversold"].replace(",", "")) > 0
    assert "**sold what was not there**" in row["notes"]


def test_the_exit_code_is_about_locked_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seller = program(SELLER, json.dumps([[5], [6]]))
    told = ["--contenders", "2", "--work", "2", "--passes", "1"]
    rows_are(monkeypatch, Entry("no lock", "any", locked=False, command=seller))
    assert main(told) == 0
    rows_are(monkeypatch, Entry("a lock", "any", command=seller))
    assert main(told) == 1
    rows_are(monkeypatch, Entry("no lock", "any", locked=False, command=program(SELLER, "[[], []]")))
    assert main(told) == 1
    assert "nothing oversold" in capsys.readouterr().out


def test_a_row_that_breaks_or_is_missing_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Entry("missing", "any", command=program("""print('{"missing": "no such module"}'); input()"""))
    broken = Entry("broken", "any", command=program("raise SystemExit('no luck today')"))
    alone = Entry("alone", "redbolt", alone=True)
    rows_are(monkeypatch, missing, alone)
    assert main(["--work", "20", "--passes", "2"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["missing"]["notes"] == "not run: no such module"
    assert rows["alone"]["oversold"] == "0"
    rows_are(monkeypatch, broken, alone)
    assert main(["--work", "20", "--passes", "2"]) == 1
    out, err = capsys.readouterr()
    assert "no luck today**" in table(out)["broken"]["notes"]
    assert "no luck today" in err
    assert table(out)["alone"]["oversold"] == "0"


def test_the_worker_needs_nothing_of_ours_to_be_imported() -> None:
    """So that it runs in an environment that has only redis-py and another library."""
    text = Path(stock.__file__).with_name("stock_worker.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "redbolt" in line or "bench" in line or "redis" in line]
