"""A release passes the lock on to the next who waits in the same process, and not by way of the servers."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import pytest

import redbolt
from redbolt import LockLost, LockNotOwned, ReleaseUnconfirmed
from redbolt._clock import now_ns
from redbolt._programs import ENTER, EXISTS, SUCCEED, SWAP, TAKE, Program
from redbolt.lease import Lease
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, Client, eventually, raw
from tests.kit.faults import E, Field, T, within
from tests.kit.line import AnyLock, Holder, Line, Stay, count_writes, nothing_left, token_on, writes
from tests.kit.monitor import Monitor
from tests.kit.proxy import FaultProxy
from tests.kit.resp import OK, error
from tests.kit.rounds import InBackground, ask
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, handshake
from tests.kit.waiting import FACES, NAME, Place
from tests.programs import finish, program
from tests.test_interrupts import Interrupt, interrupted

LONG = 5.0 * SLACK
ENTER_SHA = ENTER.forms[0][1]


@pytest.fixture(params=FACES)
def place(request: pytest.FixtureRequest, kind: str, valkeys: LocalNodes) -> Iterator[Place]:
    """Where a lock of each kind lives."""
    with Place(request.param, kind, list(valkeys)) as made:
        yield made


@pytest.fixture
def line(place: Place) -> Iterator[Line]:
    """A line there; in the end nobody stands in it, and no key is left."""
    made = Line(place.lock)
    yield made
    made.end()
    nothing_left(place.servers)


class Monitors:
    """All servers of a place."""

    def __init__(self, place: Place) -> None:
        self._stack = ExitStack()
        self._all = [self._stack.enter_context(Monitor(server)) for server in place.servers]

    def __enter__(self) -> Monitors:
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def seen(self) -> list[list[tuple[str, ...]]]:
        return [monitor.seen() for monitor in self._all]


def tokens(place: Place) -> list[bytes | None]:
    return [token_on(server) for server in place.servers]


def everywhere(place: Place, token: bytes) -> None:
    """Wait until each server has this token, also those that were not needed for the quorum."""
    eventually(lambda: tokens(place) == [token] * len(place.servers), 1, "each server has the token")


# ---- one compare-and-set ----


def test_it_is_one_write(place: Place, line: Line) -> None:
    """The old token is gone, the new one is there with its whole lease, and nothing else was sent."""
    holder, stay = Holder(place.lock(timeout=5)), Stay()
    everywhere(place, holder.token)
    line.join(0, place.lock(timeout=20), inside=stay)
    line.listens()
    with Monitors(place) as monitors:
        holder.let_go().result()
        lease = stay.inside()
        assert lease.token != holder.token
        everywhere(place, lease.token)
        # The first one in line, who listens, may look whether the lock is free: by a try, which is refused.
        seen = [[argv for argv in of_one if "NX" not in argv] for of_one in monitors.seen()]
        told = [[what for what in count_writes(of_one) if what != "take"] for of_one in seen]
        assert told == [["swap"]] * len(place.servers)
        if place.face != "ReentrantLock":
            old, new = holder.token.decode(), lease.token.decode()
            assert [writes(of_one) for of_one in seen] == [
                [("SET", NAME, new, "IFEQ", old, "PX", "20000")] for _ in place.servers
            ]
    for server in place.servers:
        assert 19_000 - 1000 * E < raw(server, "PTTL", NAME) <= 20_000
    assert holder.lease.ended
    assert not holder.lease.held
    assert lease.held
    assert 19 - E < lease.left() < 20
    stay.leave()


def test_a_reentrant_lock_is_handed_on_as_one_field_with_a_count_of_one(kind: str, node: LocalNode) -> None:
    """However often its holder had it; and in one step, so that nobody sees it free or held twice."""
    with Place("ReentrantLock", kind, [node]) as place:
        line, stay = Line(place.lock), Stay()
        holder = place.lock(timeout=5)
        for _ in range(3):
            holder.acquire()
        line.join(0, place.lock(timeout=20), inside=stay)
        old = holder.lease
        assert old is not None
        holder.release()
        holder.release()
        assert holder.held
        assert raw(node, "HGETALL", NAME) == {old.token: b"1"}
        holder.release()
        assert not holder.held
        lease = stay.inside()
        assert raw(node, "HGETALL", NAME) == {lease.token: b"1"}
        assert old.token != lease.token
        assert 19_000 - 1000 * E < raw(node, "PTTL", NAME) <= 20_000
        assert old.ended
        stay.leave()
        assert line.end() == [True]
        nothing_left([node])


def test_the_heir_of_a_reentrant_lock_may_acquire_it_again(place: Place, line: Line) -> None:
    if place.face != "ReentrantLock":
        return
    counts: list[Any] = []

    def again(lock: AnyLock) -> None:
        lock.acquire()
        counts.append(list(raw(place.servers[0], "HGETALL", NAME).values()))
        lock.release()
        counts.append(list(raw(place.servers[0], "HGETALL", NAME).values()))

    with place.lock():
        line.join(0, inside=again)
    line.end()
    assert counts == [[b"2"], [b"1"]]


def test_a_second_release_of_the_old_holder_frees_nobody(place: Place, line: Line) -> None:
    stay = Stay()
    holder = place.lock()
    holder.acquire()
    line.join(0, inside=stay)
    holder.release()
    lease = stay.inside()
    everywhere(place, lease.token)
    with Monitors(place) as monitors:
        with pytest.raises(LockNotOwned):
            holder.release()
        with pytest.raises(LockNotOwned):
            holder.extend(1)
        assert all(not count_writes(of_one) for of_one in monitors.seen())
    assert not holder.held
    assert not holder.owned()
    everywhere(place, lease.token)
    assert lease.held
    stay.leave()


def test_an_object_of_all_threads_is_released_once(kind: str, valkeys: LocalNodes) -> None:
    """``thread_local=False``: any thread may release it, but what was handed on is another object's."""
    for face in ("Lock", "RedLock"):
        with Place(face, kind, list(valkeys)) as place:
            first, second = (place.lock(thread_local=False) for _ in range(2))
            line, stay = Line(place.lock), Stay()
            first.acquire()
            line.join(0, second, inside=stay)
            InBackground(first.release).result()
            lease = stay.inside()
            with pytest.raises(LockNotOwned):
                first.release()
            everywhere(place, lease.token)
            assert second.held
            InBackground(second.release).result()
            eventually(lambda place=place: tokens(place) == [None] * len(place.servers), 1)  # type: ignore[misc]
            stay.leave()
            with pytest.raises(LockNotOwned):
                line.end()


def test_the_new_lease_counts_from_before_the_write(kind: str, valkey: LocalNode, clock) -> None:
    """The answer takes three seconds by the clock."""
    with FaultProxy(valkey) as proxy:

        def make() -> AnyLock:
            return redbolt.Lock(proxy.url, NAME, 10, sleep=60, node_timeout=100, engine=kind)

        line, stay = Line(make), Stay()
        holder = Holder(make())
        line.join(0, inside=stay)
        proxy.hold("down")
        before = now_ns()
        holder.let_go()
        eventually(lambda: token_on(valkey) != holder.token)
        clock(3)
        proxy.heal()
        lease = stay.inside()
        holder.releasing.result()
        assert lease.token == token_on(valkey)
        assert before <= lease.started_ns < before + (1 + E) * 1e9
        assert lease.left() < 7
        stay.leave()
        line.end()
        nothing_left([valkey])


def test_an_answer_that_comes_when_the_lease_is_over_hands_on_nothing(
    kind: str, valkey: LocalNode, clock
) -> None:
    with FaultProxy(valkey) as proxy:

        def make() -> AnyLock:
            return redbolt.Lock(proxy.url, NAME, 10, sleep=0.01, node_timeout=100, engine=kind)

        line, stay = Line(make), Stay()
        holder = Holder(make())
        line.join(0, inside=stay)
        proxy.hold("down")
        holder.let_go()
        eventually(lambda: token_on(valkey) != holder.token)
        late = token_on(valkey)
        clock(11)
        proxy.heal()
        with pytest.raises(LockLost):  # by the clock, its own lease is over as well
            holder.releasing.result()
        assert stay.inside().token != late
        stay.leave()
        line.end()
        nothing_left([valkey])


def test_a_lease_that_is_over_is_not_handed_on(place: Place, line: Line, clock) -> None:
    holder, stay = Holder(place.lock(timeout=10)), Stay()
    line.join(0, inside=stay)
    with Monitors(place) as monitors:
        clock(11)
        holder.let_go()
        stay.inside()
        try:
            holder.releasing.result()
        except LockLost:
            pass
        assert all("swap" not in count_writes(of_one) for of_one in monitors.seen())
    stay.leave()
    line.end()
    nothing_left(place.servers)


# ---- how often in a row ----


@pytest.mark.parametrize("most", [0, 1, 3])
def test_so_many_in_a_row_and_then_a_real_release(place: Place, most: int) -> None:
    """In between the key is gone, so that other processes can have it."""
    line = Line(lambda: place.lock(max_handoffs=most))
    with Monitor(place.in_order()[0]) as monitor:
        with place.lock(max_handoffs=most):
            line.join_all(range(9))
        assert line.end() == [True] * 9
        told = count_writes(monitor.seen())
    assert line.served == list(range(9))
    runs, run = [], 0
    for what in told:
        if what == "swap":
            run += 1
        elif what == "drop":
            runs.append(run)
            run = 0
    assert max(runs) == most
    assert len(runs) >= 10 // (most + 1)
    assert sum(runs) <= 9 - 9 // (most + 1)
    nothing_left(place.servers)


def test_the_limit_is_sixteen(place: Place) -> None:
    line = Line(place.lock)
    with Monitor(place.in_order()[0]) as monitor:
        with place.lock():
            line.join_all(range(20))
        line.end()
        told = [what for what in count_writes(monitor.seen()) if what in ("swap", "drop")]
        told = told[told.index("swap") :]  # before that, a refused try may have been undone
    assert told[:17] == ["swap"] * 16 + ["drop"]
    nothing_left(place.servers)


def test_somebody_else_may_have_it_in_between(place: Place) -> None:
    """Another process, which is quicker than those in line."""
    line = Line(lambda: place.lock(max_handoffs=2))
    holder = place.lock(max_handoffs=2)
    holder.acquire()
    line.join_all(range(2))
    stay = Stay()
    line.join(2, inside=stay)
    line.join_all(range(3, 6))
    other = place.lock(local_queue=False)  # stands for another process
    outside = InBackground(lambda: other.acquire(blocking_timeout=20 * SLACK) and (other.release(), True)[1])
    eventually(lambda: place.looks() >= 1)
    holder.release()
    stay.leave()
    line.end()
    assert outside.result() is True
    assert line.served == list(range(6))
    nothing_left(place.servers)


def test_nothing_is_handed_on_without_the_line(place: Place) -> None:
    with Monitors(place) as monitors:
        threads = []
        with place.lock(local_queue=False):
            for _ in range(4):
                lock = place.lock(local_queue=False)
                threads.append(InBackground(lambda lock=lock: [lock.acquire(), lock.release()]))  # type: ignore[misc]
            eventually(lambda: place.looks() >= 4)
        for thread in threads:
            thread.result()
        assert all("swap" not in count_writes(of_one) for of_one in monitors.seen())
    nothing_left(place.servers)


# ---- servers that lack the command ----


@pytest.mark.parametrize("face", FACES)
def test_every_server_can_do_it(kind: str, nodes: LocalNodes, face: str) -> None:
    """By a script, where it has no compare-and-set of its own; sent whole where it does not know it yet."""
    with Place(face, kind, list(nodes)) as place:
        line = Line(lambda **options: place.lock(node_timeout=LONG, **options))
        leases: list[Lease] = []
        with Monitor(place.servers[0]) as monitor:
            with place.lock() as lock:
                assert lock.lease is not None
                leases.append(lock.lease)
                line.join_all(range(6), inside=lambda lock: leases.append(lock.lease))
            assert line.end() == [True] * 6
            seen = monitor.seen()
        assert line.served == list(range(6))
        tokens = {lease.token.decode() for lease in leases}
        assert len(tokens) == 7
        shown = str(seen)
        assert all(token in shown for token in tokens)
        seen = [argv for argv in seen if tokens & set(argv)]  # not what a server is owed since earlier tests
        # A server without the command is asked for it once.
        written = count_writes(seen)
        assert 6 <= written.count("swap") <= 7, shown
        assert "drop" not in written[written.index("swap") : -1], shown
        nothing_left(place.servers)


@pytest.mark.parametrize(
    "refusal",
    [
        "NOPERM this user has no permissions to access one of the keys",
        "ERR syntax error",
        "ERR unknown command 'SET'",
        "ERR wrong number of arguments for 'set' command",
    ],
)
def test_a_server_that_does_not_permit_it_gets_the_script(kind: str, valkey: LocalNode, refusal: str) -> None:
    asked: list[Argv] = []
    guard = threading.Lock()
    with Client(valkey) as client:

        def answer(argv: Argv) -> bytes:
            asked.append(argv)
            if b"IFEQ" in argv:
                return error(refusal)
            with guard:
                return client.ask(*argv)

        with ScriptedNode(answer=answer, background=handshake) as scripted:

            def make() -> AnyLock:
                return redbolt.Lock(scripted.url, NAME, 10, sleep=60, engine=kind, waiting="polling")

            line, stay = Line(make), Stay()
            holder = Holder(make())
            line.join(0, inside=stay)
            line.join(1)
            holder.let_go().result()
            lease = stay.inside()
            assert token_on(valkey) == lease.token != holder.token
            assert 9000 - 1000 * E < raw(valkey, "PTTL", NAME) <= 10_000
            stay.leave()
            assert line.end() == [True, True]
            assert len([argv for argv in asked if b"IFEQ" in argv and argv[0] == b"SET"]) == 1
            nothing_left([valkey])
            redbolt.close()


# ---- leases that are renewed ----


def renewed(place: Place, timeout: float = 10, **options: Any) -> AnyLock:
    return place.lock(timeout=timeout, renew=True, **options)


def test_a_renewed_lease_goes_on_as_it_is(place: Place) -> None:
    """Nothing at all is sent; the token stays, the owner is another, and the old holder has nothing left."""
    line = Line(lambda: renewed(place, max_handoffs=100))
    holder = Holder(renewed(place, max_handoffs=100))
    everywhere(place, holder.token)
    leases: list[Lease] = []
    stay = Stay()

    def look(lock: AnyLock) -> None:
        assert lock.lease is not None
        assert lock.held
        leases.append(lock.lease)

    line.join_all(range(30), inside=look)
    line.join(30, inside=stay)
    eventually(lambda: line.queue.sentinel is not None or line.queue.waiters[0].ears is not None)
    with Monitors(place) as monitors:
        holder.let_go().result()
        last = stay.inside()
        assert all(not writes(of_one) for of_one in monitors.seen())
    assert line.served == list(range(31))
    assert {lease.token for lease in [*leases, last]} == {holder.token}
    assert len({lease.owner for lease in [holder.lease, *leases, last]}) == 32
    assert all(lease.ended for lease in [holder.lease, *leases])
    assert last.held
    assert last.started_ns == holder.lease.started_ns
    assert stay.lock is not None
    everywhere(place, holder.token)
    stay.leave()
    assert line.end() == [True] * 31
    assert last.ended
    nothing_left(place.servers)


def test_a_late_release_of_a_renewed_lease_frees_nobody(place: Place) -> None:
    """Although the token is the same."""
    line, stay = Line(lambda: renewed(place)), Stay()
    holder = renewed(place)
    holder.acquire()
    line.join(0, inside=stay)
    holder.release()
    lease = stay.inside()
    for _ in range(2):
        with pytest.raises(LockNotOwned):
            holder.release()
    assert not holder.held
    everywhere(place, lease.token)
    assert lease.held
    stay.leave()
    line.end()
    nothing_left(place.servers)


def test_a_renewed_lease_of_which_half_is_over_is_given_a_new_one(place: Place, clock) -> None:
    line, stay = Line(lambda: renewed(place)), Stay()
    holder = Holder(renewed(place))
    line.join(0, inside=stay)
    line.listens()
    renewal = holder.lease.renewal
    assert renewal is not None
    with Monitors(place) as monitors:
        renewal.pause()  # it would have been renewed long before
        clock(6)
        holder.let_go().result()
        lease = stay.inside()
        everywhere(place, lease.token)
        for seen in monitors.seen():  # by the clock, the first one in line may also have had a reason to try
            assert [what for what in count_writes(seen) if what != "take"] == ["swap"]
    assert lease.token != holder.token
    assert 9 - E < lease.left() < 10
    for server in place.servers:
        assert 9_000 - 1000 * E < raw(server, "PTTL", NAME) <= 10_000
    stay.leave()
    line.end()
    nothing_left(place.servers)


@pytest.mark.parametrize("holder_is", ["renewed", "fixed"])
def test_a_renewed_lease_and_a_fixed_one(place: Place, holder_is: str) -> None:
    """Neither can be taken for the other."""
    makers = [lambda: renewed(place), place.lock]
    if holder_is == "fixed":
        makers.reverse()
    line, stay = Line(makers[1]), Stay()
    holder = Holder(makers[0]())
    line.join(0, inside=stay)
    holder.let_go().result()
    lease = stay.inside()
    assert lease.token != holder.token
    everywhere(place, lease.token)
    assert 9 - E < lease.left() < 10
    stay.leave()
    line.end()
    nothing_left(place.servers)


# ---- nodes that fail ----


MINORITY = ["paused", "killed", "emptied", "sliced", "cut", "lost", "partitioned", "refused"]


@pytest.mark.parametrize("fault", MINORITY)
@pytest.mark.parametrize("bad", [1, 2])
def test_while_less_than_a_quorum_fails_it_is_handed_on(
    kind: str, valkeys: LocalNodes, fault: str, bad: int
) -> None:
    """In time; and nowhere does the old token stay."""
    with Field(valkeys, 5, bad, fault, kind) as field:
        field.warm_up()

        def make(**options: Any) -> AnyLock:
            return field.lock(NAME, blocking=True, sleep=60, **options)

        line, stay = Line(make), Stay()
        holder = Holder(make())
        eventually(lambda: list(map(token_on, field.servers())) == [holder.token] * 5)
        line.join(0, inside=stay)
        line.join(1)
        field.strike()
        with within(T + E):
            holder.let_go().result()
        lease = stay.inside()
        assert lease.token != holder.token
        assert lease.held
        eventually(lambda: list(map(token_on, field.good)) == [lease.token] * len(field.good))
        field.heal()
        eventually(lambda: holder.token not in map(token_on, field.servers()), 2, "the old token is gone")
        stay.leave()
        assert line.end() == [True, True]
        nothing_left(field.servers(), 2)


@pytest.mark.parametrize("fault", ["paused", "killed", "cut", "lost", "partitioned", "refused"])
@pytest.mark.parametrize(("of", "bad"), [(1, 1), (5, 3), (5, 5)])
def test_without_a_quorum_nothing_is_handed_on(
    kind: str, valkeys: LocalNodes, fault: str, of: int, bad: int
) -> None:
    """Whatever was exchanged is taken back; the release can be repeated, and whoever waits goes on waiting,
    and is served when the nodes are well again.
    """
    with Field(valkeys, of, bad, fault, kind) as field:
        field.warm_up()

        def make(**options: Any) -> AnyLock:
            return field.lock(NAME, blocking=True, sleep=0.02, **options)

        line, stay = Line(make), Stay()
        holder = make()
        holder.acquire()
        assert holder.lease is not None
        old = holder.lease
        eventually(lambda: list(map(token_on, field.servers())) == [old.token] * of)
        line.join(0, inside=stay)
        line.join(1)
        field.strike()
        confirmed = False
        with within(T + E):
            try:
                holder.release()
                confirmed = True
            except ReleaseUnconfirmed:
                assert holder.lease is old
        assert not holder.held
        if fault not in ("cut", "lost"):  # these happen once, and then all is well
            assert not confirmed
            assert line.served == []
        field.heal()
        if not confirmed:

            def again() -> bool:
                try:
                    holder.release()
                except ReleaseUnconfirmed:
                    return False
                except LockLost:
                    assert fault == "killed"  # its servers have forgotten everything
                return True

            eventually(again, 5, "the release is confirmed")
        lease = stay.inside()
        assert lease.held
        assert lease.token != old.token
        stay.leave()
        assert line.end() == [True, True]
        assert line.served == [0, 1]
        nothing_left(field.servers(), 2)


@pytest.mark.parametrize("of", [1, 5])
def test_a_lock_that_was_lost_is_not_handed_on(kind: str, valkeys: LocalNodes, of: int) -> None:
    with Field(valkeys, of, 0, "emptied", kind) as field:

        def make(**options: Any) -> AnyLock:
            return field.lock(NAME, blocking=True, sleep=60, **options)

        line, stay = Line(make), Stay()
        holder = Holder(make())
        line.join(0, inside=stay)
        for server in field.good:
            eventually(lambda server=server: raw(server, "DEL", NAME) == 1)  # type: ignore[misc]
        try:
            with pytest.raises(LockLost):
                holder.let_go().result()
            stay.inside()
        finally:
            stay.leave()
        assert line.end() == [True]
        nothing_left(field.servers())


@pytest.mark.parametrize("answers", ["first", "last"])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_node_that_lost_the_key_gets_it_back(
    kind: str, valkeys: LocalNodes, answers: str, lost: int
) -> None:
    """Or else the quorum would have no margin any more; a little later if it says so after the others."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(server)) for server in valkeys]
        urls = [proxy.url for proxy in proxies]

        def make(**options: Any) -> AnyLock:
            return redbolt.RedLock(urls, NAME, 10, sleep=60, engine=kind, node_timeout=LONG, **options)

        line, stay = Line(make), Stay()
        holder = Holder(make())
        eventually(lambda: list(map(token_on, valkeys)) == [holder.token] * 5)
        more = 0 if answers == "first" else 3
        line.join_all(range(more))
        line.join(more, inside=stay)
        line.listens()
        forgetful = list(valkeys)[5 - lost :]
        for server in forgetful:
            raw(server, "DEL", NAME)
        for proxy in proxies[: 5 - lost] if answers == "first" else proxies[5 - lost :]:
            proxy.delay(down=0.02 * SLACK)
        holder.let_go().result()
        lease = stay.inside()
        try:
            eventually(
                lambda: list(map(token_on, valkeys)) == [lease.token] * 5, 1, "each node has the new token"
            )
            for server in forgetful:
                assert 9_000 - 1000 * E < raw(server, "PTTL", NAME) <= 10_000
        finally:
            stay.leave()
            line.end()
        nothing_left(valkeys)


def test_somebody_elses_key_is_not_handed_on(place: Place, line: Line) -> None:
    holder = Holder(place.lock())
    line.join(0)
    line.listens()
    place.take()
    foreign = tokens(place)
    with pytest.raises(LockLost):
        holder.let_go().result()
    assert tokens(place) == foreign
    assert line.served == []
    assert line.size == 1
    place.free()


@pytest.mark.parametrize("swap", [SWAP, SUCCEED], ids=lambda program: program.name)
def test_it_is_sent_behind_an_unanswered_write_of_the_token_before(
    engine_of, valkeys: LocalNodes, swap: Program
) -> None:
    """Although another thread uses that connection: else the node may run them in the wrong order."""
    asked = threading.Event()

    def answer(argv: Argv) -> bytes | None:
        if argv[0] == b"EXISTS":
            asked.set()
        return OK if argv[0] == b"SET" and b"NX" in argv else (b":1\r\n" if ENTER_SHA in argv else None)

    take, extra = (TAKE, ()) if swap is SWAP else (ENTER, (b"channel",))
    with ScriptedNode(answer=answer, background=handshake) as slow:
        engine = engine_of(slow.url, valkeys[0].url, valkeys[1].url)
        limit = round(2 * SLACK * 1e9)

        def run(program: Program, token: bytes, *more: bytes, quorum: int = 2) -> bool:
            votes = engine.votes()
            granted: bool = engine.attempt(
                votes, b"name", token, 10_000, quorum, 10**8, limit, program, (*extra, *more)
            )
            return granted

        assert run(take, b"one", quorum=3)
        assert run(swap, b"two", b"one")
        busy = InBackground(lambda: ask(engine, EXISTS, key=b"other", quorum=3, limit=1))
        assert asked.wait(LONG)
        assert run(swap, b"three", b"two")

        def sent() -> list[int]:
            return [one.connection for one in slow.received() if b"three" in one.argv]

        assert eventually(sent) == [0]
        busy.result()
        engine.close()


@pytest.mark.parametrize("held", ["up", "down"])
def test_chains_while_a_node_is_late(kind: str, valkeys: LocalNodes, held: Literal["up", "down"]) -> None:
    """What waits on the way to it arrives in any order of its connections, of which other threads use some in
    between; no token stays there for that.
    """
    with FaultProxy(valkeys[0]) as proxy:
        urls = [proxy.url, *(server.url for server in list(valkeys)[1:])]
        options: Any = {"sleep": 60, "engine": kind, "node_timeout": 0.5 * SLACK, "max_handoffs": 100}
        stop = threading.Event()

        def make() -> AnyLock:
            return redbolt.RedLock(urls, NAME, 20, **options)

        def disturb(number: int) -> None:
            other = redbolt.RedLock(urls, f"other {number}", 20, **options)
            while not stop.is_set():
                with other:
                    pass

        others = [InBackground(lambda number=number: disturb(number)) for number in range(3)]  # type: ignore[misc]
        for attempt in range(15):
            line, stay = Line(make), Stay()
            holder = Holder(make())
            line.join_all(range(3))
            line.join(3, inside=stay)
            line.join_all(range(4, 8))
            proxy.hold(held)
            holder.let_go().result()
            stay.inside()
            if attempt % 2:
                proxy.heal()
            stay.leave()
            line.end()
            proxy.heal()

            def gone() -> bool:
                found = list(map(token_on, valkeys))
                assert not any(found), str(found)
                return True

            eventually(gone, 2, f"no token is left in round {attempt}")
        stop.set()
        for other in others:
            other.result()
        nothing_left(valkeys, 2)


def test_nodes_that_come_and_go_while_the_lock_is_passed_on(kind: str, valkeys: LocalNodes) -> None:
    """One node after the other is stopped and woken: nobody holds it while somebody else does, nobody is
    forgotten, and no token stays.
    """
    inside: list[int] = []
    broken: list[str] = []
    served = [0] * 6
    stop = threading.Event()
    urls = [server.url for server in valkeys]

    def work(number: int) -> None:
        lock = redbolt.RedLock(urls, NAME, 10, sleep=0.01, engine=kind, blocking_timeout=10 * SLACK)
        while not stop.is_set():
            if not lock.acquire():
                broken.append(f"{number} was not served")
                return
            inside.append(number)
            if inside != [number]:
                broken.append(f"{inside} at once")
            inside.remove(number)
            try:
                lock.release()
            except ReleaseUnconfirmed:
                pass
            served[number] += 1

    workers = [InBackground(lambda number=number: work(number)) for number in range(6)]  # type: ignore[misc]
    chance = random.Random(7)
    for _ in range(20):
        server = chance.choice(list(valkeys))
        server.pause()
        stop.wait(chance.uniform(0, 0.08))
        server.resume()
        stop.wait(chance.uniform(0, 0.01))
    stop.set()
    for worker in workers:
        worker.result(20)
    assert not broken
    assert min(served) > 3
    nothing_left(valkeys, 3)


# ---- who has gone when it comes ----


class Struck(BaseException):
    """What a signal handler raises here."""


@contextmanager
def signals() -> Iterator[Callable[[], None]]:
    """The main thread can be interrupted: the value does that."""
    main = threading.main_thread().ident
    assert main is not None

    def strike(number: int, frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_interrupted_in_line(place: Place, line: Line) -> None:
    """At the head, and behind somebody."""
    place.take()
    for ahead in (0, 1):
        line.join_all(range(ahead))
        lock = place.lock()

        def strike(ahead: int = ahead) -> None:
            eventually(lambda: line.size == ahead + 1)
            line.listens()
            hit()

        with signals() as hit:
            striking = InBackground(strike)
            with pytest.raises(Struck):
                lock.acquire()
        striking.result()
        assert lock.lease is None
        assert line.size == ahead
    line.join(1)
    place.free()
    line.end()
    assert line.served == [0, 1]


@pytest.mark.parametrize("others", [0, 2])
def test_interrupted_while_it_is_handed_the_lock(kind: str, valkey: LocalNode, others: int) -> None:
    """It has gone when the answer comes: the lock goes on to the next, or is free."""
    with FaultProxy(valkey) as proxy:

        def make(**options: Any) -> AnyLock:
            return redbolt.Lock(proxy.url, NAME, 10, sleep=60, engine=kind, node_timeout=LONG, **options)

        line = Line(make)
        holder = Holder(make())
        lock = make()

        def strike() -> None:
            eventually(lambda: line.size == 1)
            line.join_all(range(others))
            proxy.hold("down")
            holder.let_go()
            eventually(lambda: token_on(valkey) != holder.token)
            hit()

        with signals() as hit:
            striking = InBackground(strike)
            with pytest.raises(Struck):
                lock.acquire()
        striking.result()
        assert lock.lease is None
        proxy.heal()
        holder.releasing.result()
        assert line.end() == [True] * others
        assert line.served == list(range(others))
        assert not line.queue.held_here()
        nothing_left([valkey])


def test_its_time_ends_while_it_is_handed_the_lock(kind: str, valkey: LocalNode) -> None:
    """It waits for what comes of it, which is soon known; either way the next one is served."""
    with FaultProxy(valkey) as proxy:

        def make(**options: Any) -> AnyLock:
            return redbolt.Lock(proxy.url, NAME, 10, sleep=60, engine=kind, node_timeout=LONG, **options)

        line = Line(make)
        holder = Holder(make())
        patience = 0.15 * SLACK
        started = now_ns()
        line.join(0, blocking_timeout=patience)
        line.join(1)
        proxy.hold("down")
        holder.let_go()
        eventually(lambda: token_on(valkey) != holder.token)
        eventually(lambda: now_ns() > started + (patience + 0.02) * 1e9)
        assert line.threads[0].is_alive()
        proxy.heal()
        holder.releasing.result()
        assert line.end() == [True, True]
        assert line.served == [0, 1]
        nothing_left([valkey])


def test_the_releaser_is_interrupted_while_the_answer_is_awaited(kind: str, valkey: LocalNode) -> None:
    """The one in line is served all the same, and the release can be repeated."""
    with FaultProxy(valkey) as proxy:

        def make(**options: Any) -> AnyLock:
            return redbolt.Lock(proxy.url, NAME, 10, sleep=60, engine=kind, node_timeout=LONG, **options)

        line = Line(make)
        lock = make()
        lock.acquire()
        assert lock.lease is not None
        old = lock.lease.token
        line.join_all(range(2))
        proxy.hold("down")

        def strike() -> None:
            eventually(lambda: token_on(valkey) != old)
            hit()

        with signals() as hit:
            striking = InBackground(strike)
            with pytest.raises(Struck):
                lock.release()
        striking.result()
        assert not lock.held
        proxy.heal()
        lock.release()
        assert line.end() == [True, True]
        assert line.served == [0, 1]
        nothing_left([valkey])


def some(seen: list[Any], outside: int = 300, inside: int = 25) -> list[Any]:
    """Of the places that a call came by: those of the steps and of the line, some of the pure engine's."""
    pure = [at for at in seen if "_pure" in at[0].co_filename]
    others = [at for at in seen if "_pure" not in at[0].co_filename]
    assert len(others) > 20
    return random.sample(others, min(outside, len(others))) + random.sample(pure, min(inside, len(pure)))


@pytest.mark.parametrize("longest", ["fixed", "renewed"])
def test_the_releaser_is_interrupted_at_each_place(place: Place, longest: str) -> None:
    """The one in line is served, and so is the next; nothing stays."""

    def make(name: str) -> AnyLock:
        return renewed(place, name=name) if longest == "renewed" else place.lock(name)

    def prepare(name: str) -> tuple[AnyLock, Line]:
        lock, line = make(name), Line(lambda: make(name))
        lock.acquire()
        line.join(0)
        return lock, line

    for _ in range(2):  # Python 3.12+ begins with the second call of each function
        lock, line = prepare("first")
        with Interrupt() as nowhere:
            lock.release()
        line.end()
    for at in some(nowhere.seen):
        kinds: list[type[LockNotOwned]] = []
        lock, line = prepare("name")
        interrupted(at, lock.release)
        assert not lock.held or lock.owned(), at
        if lock.lease is not None:
            try:
                lock.release()
            except LockNotOwned as problem:
                kinds.append(type(problem))
        assert kinds in ([], [LockNotOwned]), at
        assert not lock.held
        try:
            assert line.threads[0].result(2) is True, at
        except TimeoutError:
            raise AssertionError(f"the one in line was forgotten: {at}") from None
        assert line.size == 0, at
        assert not line.queue.held_here(), at
    nothing_left(place.servers)


@pytest.mark.parametrize("longest", ["fixed", "renewed"])
def test_the_one_in_line_is_interrupted_at_each_place(place: Place, longest: str) -> None:
    """It was about to be handed the lock, or just was: the lock is free again, or its own."""

    def make() -> AnyLock:
        return renewed(place) if longest == "renewed" else place.lock()

    queue = make()._queue

    def passed_on(at: Any) -> tuple[bool, AnyLock, list[Any]]:
        """Acquire while somebody holds it who releases when we stand in line."""
        over = threading.Event()
        holder = Holder(make())

        def release() -> None:
            eventually(lambda: queue.waiters or over.is_set())
            holder.let_go().result()

        releasing = InBackground(release)
        lock = make()
        seen: list[Any] = []
        hit = False
        try:
            with Interrupt(at) as struck:
                lock.acquire()
        except KeyboardInterrupt:
            hit = True
        finally:
            seen = struck.seen
            over.set()
            releasing.result()
        return hit, lock, seen

    places: list[Any] = []
    for _ in range(2):
        _, lock, places = passed_on(None)
        lock.release()
    for at in some(places):
        hit, lock, _ = passed_on(at)
        if hit:
            assert lock.lease is None, at
        else:
            lock.release()
        assert not queue.waiters, at
        assert not queue.held_here(), at
        other = Line(make)
        assert other.join(0, blocking_timeout=2 * SLACK).result() is True, at
    nothing_left(place.servers)


@pytest.mark.parametrize("hits", ["acquire", "release"])
@pytest.mark.parametrize("longest", ["fixed", "renewed"])
@pytest.mark.parametrize("face", ["Lock", "RedLock"])
def test_interrupts_at_any_moment_while_others_pass_it_on(
    kind: str, valkeys: LocalNodes, face: str, longest: str, hits: str
) -> None:
    urls = [server.url for server in valkeys][: FACES[face]]
    span = 0.002 if hits == "acquire" else 0.0004
    arguments: dict[str, Any] = {"face": face, "urls": urls, "kind": kind, "hits": hits}
    arguments["renewed"] = longest == "renewed"
    with program("lines", "interrupted", times=250, span=span * SLACK, **arguments) as process:
        result = json.loads(finish(process, 60))
    assert result["wrong"] == []
    assert result["hit"] > 20
    assert min(result["served"]) > 10
