"""The stock benchmark: its options, its account, its processes, and one tiny run with real nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from bench import stock
from bench.contenders import LIBRARIES, Holder, Library, Unfit
from bench.environments import Unavailable
from bench.peers import CONTENDING, Contending
from bench.stock import arguments, first_last, judge, main
from bench.stock_run import Account, Entry, Missing, Place, Worker, run, split, unevenness
from bench.stock_targets import targets
from bench.stock_worker import Job, Market, Shelf, Tally, contend, tries_and_grants
from redbolt import Node
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.ports import ports

PINS = Path(stock.__file__).parent / "pins"
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
        ["--stop"],
        ["--stop", "--nodes", "5", "--peers"],
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
    options = [dict(row.options) for row in rows if row.library == "redbolt" and not row.alone]
    assert options == [
        {"engine": "native"},
        {"engine": "native", "renewed": True},
        {"engine": "native", "local_queue": False},
        {"engine": "pure"},
    ]
    assert [row.library for row in rows[5:]] == [{1: "redis-py", 5: "redlock-py"}[nodes], "none"]
    assert [row.title for row in rows if row.alone] == [rows[0].title]
    assert [row.title for row in rows if not row.locked] == ["no lock"]
    assert {row.library for row in rows} <= {*LIBRARIES}
    assert len({row.title for row in rows}) == len(rows)


def test_when_a_node_stops_only_rows_of_redbolt_are_run() -> None:
    assert {row.library for row in stock.entries(5, stop=True)} == {"redbolt"}


def test_every_peer_has_a_library_and_its_pinned_environment() -> None:
    for peer in CONTENDING:
        assert peer.library in LIBRARIES or peer.library == "node-redlock"
        assert (PINS / f"{peer.packages[0]}.txt" if peer.packages else PINS / "node-redlock").exists()


def peers_are(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Peers of one node; "missing" cannot be installed, the others sell as told."""

    class Peer(Contending):
        def program(self, what: str) -> tuple[list[str], dict[str, str]]:
            assert what == "stock_worker"
            if self.name == "missing":
                raise Unavailable("no network")
            return [*program(SELLER, "[[5]]")], {"NAME": self.name}

    peers = [Peer(name, name, (name,), many_nodes=False) for name in names]
    many = Peer("for many nodes", "missing", (), many_nodes=True)
    monkeypatch.setattr(stock, "CONTENDING", [*peers, many, Peer("no stock", "any", (), False, stock=False)])


def test_peers_run_in_their_environments_with_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    peers_are(monkeypatch, "one", "two")
    rows = stock.peers(1, required=True)
    assert [(row.title, row.library, row.env) for row in rows] == [
        (name, name, (("NAME", name),)) for name in ("one", "two")
    ]
    assert rows[0].command == program(SELLER, "[[5]]")


def test_a_peer_that_cannot_be_had_ends_the_run_or_is_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    peers_are(monkeypatch, "one", "missing")
    rows = stock.peers(1, required=False)
    assert [row.unfit for row in rows] == ["", "no network"]
    with pytest.raises(Missing, match="no network"):
        run(rows[1], place, "bench:unfit")
    assert main(["--peers"]) == 1
    assert capsys.readouterr().err == "bench: missing: no network\n"


# ---- the account ----


def account(*sales: list[int], taken: int | None = None, work: int | None = None, **more: Any) -> Account:
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


@pytest.mark.parametrize(
    ("stopping_ns", "taken", "gap_ns"),
    [
        (1250, 6, 600),  # from the sale before the stop to the one after it
        (1300, 6, 600),  # a sale at that very moment is before it
        (1950, 6, 400),  # later gaps count, too
        (1050, 6, 600),  # where nothing was sold before, from the stop on
        (2300, 6, 0),
        (1950, 5, 700),  # the rest was not sold until the time was over
        (2500, 5, 700),
    ],
)
def test_the_longest_gap_is_between_any_two_sales_from_the_last_before_the_stop(
    stopping_ns: int, taken: int, gap_ns: int
) -> None:
    sales = [[1100, 2300], [1300, 1900], [1200, 1900]]
    done = Account(sales, [3], [], taken, 6, 1000, stopping_ns=stopping_ns, end_ns=3000)
    assert done.gap_ns == gap_ns


def test_the_gap_is_of_the_worst_pass_and_a_stop_that_came_too_late_is_told() -> None:
    stopped = [
        Account([[1100, 1200, 1200 + gap]], [1], [1] * 3, 3, 3, 1000, 0, 0, 0, 0, 1150, 1250, 3000)
        for gap in (100, 900, 300)
    ]
    row = judge(LOCK, stopped, [])
    assert row["gap_ms"] == 900 / 1e6
    assert row["notes"] == []
    assert "gap_ms" not in judge(LOCK, [account([1100])], [])
    late = replace(stopped[0], stopped_ns=1300)
    assert "nothing was sold after" in judge(LOCK, [stopped[0], late], [])["notes"][0]
    assert "nothing was sold after" in judge(LOCK, [replace(late, stopped_ns=0)], [])["notes"][0]


def test_tries_per_grant_are_shown_where_the_library_counts_them() -> None:
    done = [account([1100], tries=tries, grants=2) for tries in (3, 2, 8)]
    assert judge(LOCK, done, [])["tries_per_grant"] == 1.5
    assert "tries_per_grant" not in judge(LOCK, [account([1100])], [])


def test_what_contenders_note_is_told_once() -> None:
    done = replace(account([1100]), notes=("beware",))
    assert judge(LOCK, [done, done], [])["notes"] == ["beware"]


# ---- the targets ----

NATIVE = Entry("", "redbolt", (("engine", "native"),))
LOCAL = replace(NATIVE, options=(("engine", "native"), ("renewed", True)))


def ran(rate: float, **more: Any) -> Account:
    """So many sales in a second by two contenders, evenly."""
    each = int(rate) // 2
    times = [1000 + (number + 1) * 10**9 // each for number in range(each)]
    return Account([times, times], [1, 1], [7], 2 * each, 2 * each, 1000, **more)


def verdicts(
    entry: Entry, shape: tuple[int, int, int], *done: Account, stopped: bool = False, **others: Account
) -> dict[str, Any]:
    rows = {name.replace("_", "-"): [other] * len(done) for name, other in others.items()}
    found = targets(entry, shape, stopped, done, rows)
    return {one["target"]: (pytest.approx(one["measured"], rel=0.01), one["met"]) for one in found}


@pytest.mark.parametrize(
    ("shape", "local", "swapped"),
    [((100, 1, 1), 1.0, 0.85), ((100, 1, 5), 1.4, 0.95), ((100, 4, 5), 1.2, 0.75)],
)
def test_targets_beside_one_alone(shape: tuple[int, int, int], local: float, swapped: float) -> None:
    for entry, bound in ((LOCAL, local), (NATIVE, swapped)):
        for share, met in ((1.02, True), (0.98, False)):
            found = verdicts(entry, shape, ran(2000 * bound * share), redbolt=ran(2000))
            assert found[f"x alone >= {bound:g}"] == (bound * share, met)


def test_targets_of_one_process_are_also_about_how_even_half_way_was() -> None:
    even, uneven = account([1001, 1003], [1002, 1004]), account([1001, 1002], [1003, 1004])
    for nodes in (1, 5):
        assert verdicts(NATIVE, (100, 1, nodes), even)["at half-way <= 1.1"] == (1.0, True)
        assert verdicts(NATIVE, (100, 1, nodes), uneven)["at half-way <= 1.1"] == (2.0, False)


def test_targets_of_processes_on_five_nodes() -> None:
    good = ran(100)
    assert verdicts(NATIVE, (100, 4, 5), good) == {
        "p99 wait ms <= 120": (7 / 1e6, True),
        "processes min/max >= 0.6": (1.0, True),
        "starved <= 0": (0, True),
    }
    bad = replace(good, sales=[good.sales[0], []], waits=[121_000_000])
    assert verdicts(NATIVE, (100, 4, 5), bad) == {
        "p99 wait ms <= 120": (121.0, False),
        "processes min/max >= 0.6": (0.0, False),
        "starved <= 0": (1, False),
    }
    assert verdicts(NATIVE, (100, 4, 5), good, good, bad)["p99 wait ms <= 120"] == (7 / 1e6, True)
    assert verdicts(NATIVE, (100, 4, 5), good, good, bad)["starved <= 0"] == (1, False)


def test_the_target_of_ten_processes_is_beside_python_redis_lock() -> None:
    assert verdicts(NATIVE, (100, 10, 1), ran(400)) == {"starved <= 0": (0, True)}
    for times, met in ((3.1, True), (2.9, False)):
        found = verdicts(NATIVE, (100, 10, 1), ran(400 * times), python_redis_lock=ran(400))
        assert found["x python-redis-lock >= 3"] == (times, met)


def test_with_a_stopped_node_the_target_is_the_gap() -> None:
    for gap_ns, met in ((150_000_000, True), (151_000_000, False)):
        done = Account([[1000, 1000 + gap_ns]], [1], [], 2, 2, 900, stopping_ns=1000)
        found = verdicts(NATIVE, (100, 4, 5), done, stopped=True, redbolt=ran(20))
        assert found == {"longest gap ms <= 150": (gap_ns / 1e6, met)}


@pytest.mark.parametrize(
    "entry",
    [
        Entry("", "redis-py"),
        Entry("", "redbolt", alone=True),
        Entry("", "redbolt", (("engine", "pure"),)),
        Entry("", "redbolt", (("engine", "native"), ("local_queue", False))),
    ],
    ids=["peer", "alone", "pure", "no queue"],
)
def test_other_rows_and_other_shapes_have_no_targets(entry: Entry) -> None:
    assert verdicts(entry, (100, 1, 1), ran(20), redbolt=ran(20)) == {}
    assert verdicts(NATIVE, (99, 2, 1), ran(20), redbolt=ran(20)) == {}
    assert verdicts(NATIVE, (100, 1, 1)) == {}


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


def test_tries_and_grants_are_those_of_each_queue_once() -> None:
    one, two = SimpleNamespace(tries=5, grants=2), SimpleNamespace(tries=1, grants=1)
    locks: list[Any] = [SimpleNamespace(_queue=queue) for queue in (one, two, one)]
    assert tries_and_grants(locks) == {"tries": 6, "grants": 3}
    assert tries_and_grants([*locks, Fake(), *[SimpleNamespace(_queue=None)]]) == {"tries": 6, "grants": 3}
    assert tries_and_grants([Fake()]) == {}


# ---- how redbolt's locks are made ----


class Made:
    """A lock that remembers its words."""

    def __init__(
        self,
        client: str,
        name: str,
        *,
        timeout: float,
        engine: str,
        local_queue: bool = True,
        renew: bool | None = None,
    ) -> None:
        self.words = (client, name, timeout, engine, local_queue)
        self.renew = renew


class Older(Made):
    """One that knows neither."""

    __slots__ = ()

    def __init__(self, client: str, name: str, *, timeout: float, engine: str) -> None:
        super().__init__(client, name, timeout=timeout, engine=engine)


def made(monkeypatch: pytest.MonkeyPatch, kind: type[Made], **options: Any) -> tuple[Any, Library]:
    monkeypatch.setattr("redbolt.Lock", kind)
    library = LIBRARIES["redbolt"](["redis://127.0.0.1:7"], {"engine": "pure", **options})
    return library.lock("key"), library


def test_a_lock_without_its_queue_is_made_where_redbolt_knows_that(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, Made)[0].words == ("redis://127.0.0.1:7", "key", 10, "pure", True)
    assert made(monkeypatch, Made, local_queue=False)[0].words[-1] is False
    assert made(monkeypatch, Older)[0].words[-1] is True
    with pytest.raises(Unfit, match="no local_queue"):
        made(monkeypatch, Older, local_queue=False)


def test_a_lock_is_told_that_its_lease_is_renewed_where_redbolt_knows_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, library = made(monkeypatch, Made, renewed=True)
    assert lock.renew is True
    assert library.notes == set()
    assert made(monkeypatch, Made)[0].renew is None
    lock, library = made(monkeypatch, Older, renewed=True)
    assert lock.renew is None
    assert [*library.notes] == ["this redbolt knows no renewed leases: they are fixed"]


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


COUNTING = """
import types, bench.stock_worker as worker
queue = types.SimpleNamespace(tries=3, grants=2)
def library(urls, options):
    def lock(key):
        made = worker.LIBRARIES["none"](urls, options).lock(key)
        made._queue = queue
        return made
    return worker.Library(lock, notes={"beware"})
worker.LIBRARIES["counting"] = library
worker.main()
"""


def test_tries_grants_and_notes_are_those_of_all_processes(place: Place) -> None:
    done = run(Entry("counting", "counting", command=program(COUNTING)), place, "bench:counting")
    assert (done.tries, done.grants, done.notes) == (6, 4, ("beware",))


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
    assert "bench: redbolt Lock, native, compare-and-set" in err
    assert "6 threads in 2 processes, 1 node, 120 deductions" in out
    rows = table(out)
    assert [*rows] == [entry.title for entry in stock.entries(1)]
    for title, row in rows.items():
        if row["notes"].startswith("not run: this redbolt knows no"):
            continue
        assert float(row["deductions/s"].replace(",", "")) > 0
        assert row["notes"] in ("", "this redbolt knows no renewed leases: they are fixed")
        if title == "no lock":
            assert int(row["oversold"]) > 0
            continue
        assert row["oversold"] == "0"
        assert 0 < int(row["max"]) <= 120
        assert 0 <= int(row["starved"]) < 6
        assert all(row[head] for head in row if head not in ("notes", "processes min/max", "tries/grant"))
    assert rows["redbolt Lock, one thread alone"]["max"] == "120"


@pytest.mark.slow
def test_a_tiny_run_on_five_nodes_in_even_shares(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("redlock")
    assert main([*TINY, "--nodes", "5", "--even"]) == 0
    rows = table(capsys.readouterr().out)
    assert [*rows] == [entry.title for entry in stock.entries(5)]
    native, pure = (f"redbolt RedLock, {engine}, compare-and-set" for engine in ("native", "pure"))
    for title in (native, pure, "redlock-py"):
        assert (rows[title]["starved"], rows[title]["max"], rows[title]["oversold"]) == ("0", "20", "0")


def rows_are(monkeypatch: pytest.MonkeyPatch, *rows: Entry) -> None:
    monkeypatch.setattr(stock, "entries", lambda nodes, stop: [*rows])


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


def test_the_first_node_of_the_common_order_comes_last() -> None:
    with LocalNodes(3) as nodes:
        ordered = first_last([*nodes])
        assert {node.url for node in ordered} == {node.url for node in nodes}
        assert Node.from_url(ordered[-1].url).address == min(
            Node.from_url(node.url).address for node in nodes
        )


# Each sale takes a moment, so that the stop comes in time.
SLOW = """
import bench.stock_worker as worker, time
put = worker._RedisShelf.put
worker._RedisShelf.put = lambda self, left: (time.sleep(0.005), put(self, left))
worker.main()
"""


def test_a_node_is_stopped_half_way_and_resumed() -> None:
    entry = Entry("redbolt", "redbolt", (("engine", "pure"),), command=program(SLOW))
    with LocalNodes(3) as nodes:
        urls = [node.url for node in nodes]
        place = Place(urls, contenders=2, processes=1, work=60, seconds=60 * SLACK, stop=nodes[2])
        done = run(entry, place, "bench:stop")
        assert (
            done.start_ns
            < done.stopping_ns
            < done.stopped_ns
            < max(ns for times in done.sales for ns in times)
        )
        assert 10 <= sum(ns < done.stopping_ns for times in done.sales for ns in times) <= 50
        assert (done.sold, done.oversold) == (60, 0)
        assert 0 < done.sold_while_stopped <= 50
        assert raw(nodes[2], "PING")
        hasty = run(entry, replace(place, seconds=0), "bench:hasty")
        assert (hasty.stopping_ns, hasty.stopped_ns) == (0, 0)


def test_a_run_with_a_stop_tells_the_longest_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_are(monkeypatch, Entry("redbolt", "redbolt", (("engine", "pure"),), command=program(SLOW)))
    told = ["--nodes", "5", "--stop", "--contenders", "2", "--work", "60", "--passes", "1"]
    assert main(told) == 0
    out = capsys.readouterr().out
    assert "60 deductions, one node stopped half-way" in out
    row = next(iter(table(out).values()))
    assert 5 < float(row["longest gap ms"]) < 60_000
    assert row["targets and notes"].startswith("longest gap ms <= 150: ")
    assert "nothing was sold" not in row["targets and notes"]


def test_targets_stand_beside_their_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seller = program(SELLER, json.dumps([[1000, 1001, 1002]] * 60 + [[2000]] * 40))
    native = Entry("native", "redbolt", (("engine", "native"),), locked=True, command=seller)
    monkeypatch.setattr(Account, "oversold", 0)  # it touches no stock
    rows_are(monkeypatch, native, Entry("peer", "redis-py", command=seller))
    assert main(["--work", "220", "--passes", "1"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["native"]["targets and notes"].startswith("at half-way <= 1.1: 1.33 **missed**; ")
    assert "at half-way" not in rows["peer"]["targets and notes"]


def test_the_programs_of_contenders_need_only_the_standard_library() -> None:
    """So that they run in an environment that has only another library."""
    programs = ("stock_worker", "handoff_worker")
    code = "import sys; sys.path.append(sys.argv[1]); import " + ", ".join(
        f"bench.{name}" for name in programs
    )
    root = Path(stock.__file__).parents[1]
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root)], check=True, timeout=60 * SLACK)
