"""Leases that are lost: the holder hears of it in time, by every way there is, and once."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import pytest

from redbolt import LockLost, NodesUnavailable, _losses
from redbolt._clock import now_ns
from redbolt.lease import Lease
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import E
from tests.kit.line import AnyLock, Holder, Line, Stay, nothing_left, token_on, writes
from tests.kit.monitor import Monitor
from tests.kit.proxy import FaultProxy
from tests.kit.renewing import LIMIT, age, count, is_young, lease_of, once_more, renewed
from tests.kit.rounds import InBackground
from tests.kit.waiting import FACES, NAME, OWNER, Place, settled

GONE = "its token is gone from the servers"
UNANSWERED = "no quorum of nodes answered a renewal in time"
RAN_OUT = "it ran out"
END = 30 * 0.99 - 0.002
"""When the validity of a lease of 30 seconds ends."""


class Cut(Place):
    """A place whose servers can be cut off."""

    def __init__(self, face: str, kind: str, servers: list[LocalNode]) -> None:
        self._stack = ExitStack()
        self.proxies = [self._stack.enter_context(FaultProxy(one)) for one in servers[: FACES[face]]]
        super().__init__(face, kind, servers, [proxy.url for proxy in self.proxies])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._stack.close()

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.refuse()
            proxy.reset_connections()

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.heal()


@pytest.fixture(params=FACES)
def place(request: pytest.FixtureRequest, kind: str, valkeys: LocalNodes) -> Iterator[Cut]:
    """Where a lock of each kind lives."""
    with Cut(request.param, kind, list(valkeys)) as made:
        yield made


class Told:
    """An ``on_lost`` that remembers what it was told, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[Lease, str]] = []
        self.at: list[int] = []

    def __call__(self, lease: Lease, reason: str) -> None:
        self.at.append(now_ns())
        self.calls.append((lease, reason))

    def once(self) -> tuple[Lease, str]:
        """Wait for the one call, and for no other."""
        eventually(lambda: self.calls, what="on_lost is called")
        assert settled(lambda: len(self.calls)) == 1
        return self.calls[0]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], bool]]:
    """Whether nothing was raised anywhere else, and nothing written to stderr; looked at in the end, too."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr("sys.unraisablehook", raised.append)

    def look() -> bool:
        assert raised == []
        assert capfd.readouterr().err == ""
        return True

    yield look
    look()


def delete(place: Place) -> None:
    for server in place.servers:
        raw(server, "DEL", NAME)


def somebody_else(place: Place) -> None:
    place.take()


WAYS: dict[str, tuple[Callable[[Any], None], str, float]] = {
    # how, the reason, and how many seconds after the grant it is told
    "deleted": (delete, GONE, 10.1),
    "somebody else's": (somebody_else, GONE, 10.1),
    "cut": (Cut.cut, UNANSWERED, END - 1.5),
}


def lose(place: Place, way: str, clock: Callable[[float], None], lock: AnyLock | Lease) -> None:
    """Have it happen, and let the time come at which it is told."""
    happen, _, after = WAYS[way]
    happen(place)
    if way == "cut":
        clock(10.1)
        renewal = (lock if isinstance(lock, Lease) else lease_of(lock)).renewal
        assert renewal is not None
        eventually(lambda: renewal.failed, what="a renewal has failed")
        after -= 10.1
    clock(after)


# ---- how it is told ----


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_is_told_in_time_by_every_way(place: Cut, clock, quiet: Callable[[], bool], way: str) -> None:
    """There was no way to hear of it (Redisson 4698), the process ended of it (node-redlock 283)."""
    told, reason = Told(), WAYS[way][1]
    lock = renewed(place, on_lost=told)
    lock.acquire()
    lease, until = lease_of(lock), lease_of(lock).valid_until_ns
    lost = lock.lost
    assert not lost.is_set()
    assert lost.reason == ""
    waiting = InBackground(lambda: (lost.wait(), now_ns()))
    lose(place, way, clock, lock)
    assert told.once() == (lease, reason)
    came, at = waiting.result()
    assert came is True
    assert max(at, *told.at) < until
    assert now_ns() < until
    assert lost.is_set()
    assert lock.lost.reason == lost.reason == lease.lost.reason == reason
    assert lost.wait(0) is True
    assert (lock.held, lock.left(), lease.held, lease.valid_until_ns) == (False, 0, False, 0)
    with pytest.raises(LockLost, match=reason):
        lock.release()
    assert lock.lease is None
    assert lost.is_set()
    assert lost.reason == reason
    assert told.once() == (lease, reason)
    assert quiet()
    if way == "somebody else's":
        assert OWNER in str(token_on(place.servers[0])) or token_on(place.servers[0]) == b"somebody else's"


@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_was_clean_ends_with_the_loss(place: Cut, clock, way: str) -> None:
    with pytest.raises(LockLost, match=WAYS[way][1]):
        with renewed(place) as lock:
            lease = lease_of(lock)
            lose(place, way, clock, lock)
            assert lease.lost.wait(5 * SLACK)


@pytest.mark.parametrize("way", WAYS)
def test_the_exception_of_the_block_wins(place: Cut, clock, way: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with renewed(place) as lock:
            lease = lease_of(lock)
            lose(place, way, clock, lock)
            assert lease.lost.wait(5 * SLACK)
            raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "was not released cleanly" in note
    assert WAYS[way][1] in note


@pytest.mark.parametrize("way", WAYS)
def test_a_waiter_has_no_trouble_but_its_own(place: Cut, clock, quiet: Callable[[], bool], way: str) -> None:
    """It gets the lock, or its own acquire says why not; the holder's loss is not its business."""
    told = Told()
    holder = renewed(place)
    holder.acquire()
    # Cut off in the middle of a handshake, the nodes may look as if nothing could be listened to.
    line, stay = Line(lambda: renewed(place, on_lost=told, sleep=0.1)), Stay()
    waiting = line.join(0, inside=stay)
    line.listens()
    lose(place, way, clock, holder)
    assert holder.lost.wait(5 * SLACK)
    with pytest.raises(LockLost):
        holder.release()
    if way == "somebody else's":
        place.free()
    place.heal()
    try:
        lease = stay.inside()
    except AssertionError:
        with pytest.raises(NodesUnavailable):
            waiting.result()
        assert way == "cut"
    else:
        assert lease.held
        stay.leave()
        assert line.end() == [True]
        nothing_left(place.servers)
    assert told.calls == []


def test_a_lost_lock_can_be_had_again_and_is_renewed(place: Cut, clock) -> None:
    """One failed renewal switched later ones off (Redisson 2515, RedLock.net 93)."""
    told = Told()
    lock = renewed(place, on_lost=told)
    for round_ in range(1, 4):
        lock.acquire()
        first = lease_of(lock)
        lose(place, "cut", clock, lock)
        eventually(lambda: len(told.calls) == round_)  # noqa: B023
        assert not lock.held
        place.heal()
        delete(place)
        eventually(lambda: lock.acquire(blocking_timeout=1) or lock.held, 10)
        lease = lease_of(lock)
        assert lease is not first
        for number in (1, 2):
            age(place)
            clock(10.1)
            once_more(lease, number)
            eventually(lambda: is_young(place))
        assert lock.held
        assert not lock.lost.is_set()
        lock.release()
        nothing_left(place.servers)


def test_one_that_raises_is_logged_and_the_others_are_called(
    place: Cut, clock, quiet: Callable[[], bool], caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()

    def fail(lease: Lease, reason: str) -> None:
        told(lease, reason)
        raise SystemExit("by on_lost")

    def die(lease: Lease, reason: str) -> None:
        told(lease, reason)
        raise ZeroDivisionError

    locks = [renewed(place, name=f"name {i}", on_lost=call) for i, call in enumerate([fail, told, die, told])]
    leases = []
    for lock in locks:
        lock.acquire()
        leases.append(lease_of(lock))
        for server in place.servers:
            raw(server, "DEL", lease_of(lock).key)
    with caplog.at_level(logging.ERROR, "redbolt"):
        clock(10.6)
        eventually(lambda: len(told.calls) == 4)
        eventually(lambda: len(caplog.records) == 2)
    assert {id(lease) for lease, _ in told.calls} == {id(lease) for lease in leases}
    assert "on_lost of lock b'name 0' has failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    for lock in locks:
        with pytest.raises(LockLost):
            lock.release()
    assert settled(lambda: len(told.calls)) == 4


def test_a_loss_is_told_although_the_lock_was_given_up_at_once(place: Cut, clock) -> None:
    """Another ``on_lost`` takes long, and meanwhile nobody refers to the lease any more."""
    told, inside, go_on = Told(), threading.Event(), threading.Event()

    def slow(lease: Lease, reason: str) -> None:
        inside.set()
        go_on.wait(10 * SLACK)

    first = renewed(place, name="first", on_lost=slow)
    first.acquire()
    for server in place.servers:
        raw(server, "DEL", "first")
    clock(10.1)
    assert inside.wait(5 * SLACK)
    lock = renewed(place, on_lost=told)
    lock.acquire()
    delete(place)
    clock(10.1)
    assert lock.lost.wait(5 * SLACK)
    with pytest.raises(LockLost):
        lock.release()
    del lock
    gc.collect()
    go_on.set()
    assert told.once()[1] == GONE
    with pytest.raises(LockLost):
        first.release()


def test_what_was_released_is_not_lost(place: Cut, clock) -> None:
    told = Told()
    for _ in range(20):
        with renewed(place, on_lost=told) as lock:
            lost = lock.lost
        assert not lost.is_set()
    nothing_left(place.servers)
    clock(40)
    assert not lost.is_set()
    assert lost.wait(0) is False
    assert settled(lambda: len(told.calls)) == 0


# ---- waiting for it ----


def test_waiting_for_a_loss_has_an_end(place: Cut, clock) -> None:
    with renewed(place) as lock:
        started = time.monotonic()
        assert lock.lost.wait(0) is False
        assert lock.lost.wait(0.1) is False
        assert 0.1 <= time.monotonic() - started < 0.1 + 2 * E
        waiting = InBackground(lambda: lock.lost.wait(25))  # nothing: the lease is another thread's
        assert waiting.result() is False
        lost = lock.lost
        waiting = InBackground(lambda: lost.wait(25))
        clock(10.1)
        once_more(lock, 1)
        clock(10.1)
        once_more(lock, 2)
        assert waiting.is_alive()
        clock(5)
        assert waiting.result() is False
    assert renewed(place).lost.wait() is False


@pytest.mark.parametrize("how", ["released", "handed on", "handed on by the servers", "released by another"])
@pytest.mark.parametrize("renew", [True, False])
def test_whoever_waits_for_a_loss_goes_on_when_it_is_released(place: Cut, how: str, renew: bool) -> None:
    if how == "released by another" and place.face == "ReentrantLock":
        return
    options: dict[str, Any] = {"thread_local": False} if how == "released by another" else {}
    lock = renewed(place, 20, renew=renew, **options)
    lock.acquire()
    lost = lock.lost
    waiting = [InBackground(lost.wait) for _ in range(3)]
    waiting.append(InBackground(lambda: lost.wait(60)))
    line, stay = Line(lambda: renewed(place, 20 if how == "handed on" else 21)), Stay()
    if how.startswith("handed on"):
        line.join(0, inside=stay)
    time.sleep(0.02)
    if how == "released by another":
        InBackground(lock.release).result()
    else:
        lock.release()
    for one in waiting:
        assert one.result(2) is False
    stay.leave()
    line.end()
    nothing_left(place.servers)


def test_a_loss_is_told_while_the_lease_is_nobodys(place: Cut, clock) -> None:
    told = Told()
    lock = renewed(place, on_lost=told)
    lock.acquire()
    lease = lease_of(lock).hand_over()
    waiting = InBackground(lambda: lease.lost.wait())
    delete(place)
    clock(10.1)
    assert waiting.result() is True
    assert told.once() == (lease, GONE)


def test_the_one_who_adopts_is_told(place: Cut, clock) -> None:
    before, told = Told(), Told()
    lock = renewed(place, on_lost=before)
    lock.acquire()
    lease = lease_of(lock).hand_over()
    other = renewed(place, on_lost=told)
    other.adopt(lease)
    delete(place)
    clock(10.1)
    assert told.once() == (lease, GONE)
    with pytest.raises(LockLost):
        other.release()
    assert before.calls == []


# ---- leases that are not renewed ----


@pytest.mark.parametrize("listens", [True, False])
def test_a_fixed_lease_is_lost_by_the_clock(place: Cut, clock, listens: bool) -> None:
    told = Told()
    options: dict[str, Any] = {"on_lost": told} if listens else {}
    lock = place.lock(timeout=30, node_timeout=LIMIT, **options)
    lock.acquire()
    lease, until = lease_of(lock), lease_of(lock).valid_until_ns
    waiting = InBackground(lambda: (lease.lost.wait(), now_ns()))
    with Monitor(place.servers[0]) as monitor:
        clock(END - 0.5)
        assert not lock.lost.is_set()
        assert lock.held
        assert waiting.is_alive()
        came, at = waiting.result()
        assert came is True
        assert at >= until
        assert lock.lost.is_set()
        assert lock.lost.reason == RAN_OUT
        if listens:
            assert told.once() == (lease, RAN_OUT)
            assert until <= told.at[0] < until + (0.1 + 2 * E) * 1e9
        assert writes(monitor.seen()) == []
    if listens:
        with pytest.raises(LockLost, match=RAN_OUT):
            lock.release()
    else:
        lock.release()  # by the clock of the servers, the key is still there
    nothing_left(place.servers)


def test_a_fixed_lease_that_is_extended_is_lost_later(place: Cut, clock) -> None:
    told = Told()
    lock = place.lock(timeout=30, node_timeout=LIMIT, on_lost=told)
    lock.acquire()
    lease = lease_of(lock)
    waiting = InBackground(lambda: lease.lost.wait())
    lock.extend(30)
    clock(45)
    assert lock.held
    assert settled(lambda: len(told.calls)) == 0
    clock(60 * 0.99 - 45)
    assert told.once() == (lease, RAN_OUT)
    assert waiting.result() is True
    with pytest.raises(LockLost):
        lock.release()


@pytest.mark.parametrize("renew", [True, False])
@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_an_extension_that_finds_the_key_gone_tells_of_the_loss(place: Cut, renew: bool, verb: str) -> None:
    told = Told()
    lock = renewed(place, renew=renew, on_lost=told)
    lock.acquire()
    lease = lease_of(lock)
    waiting = InBackground(lambda: lease.lost.wait())
    delete(place)
    with pytest.raises(LockLost, match="is lost"):
        lock.extend(1) if verb == "extend" else lock.reacquire()
    assert lock.lost.is_set()
    assert lock.lost.reason == GONE
    assert told.once() == (lease, GONE)
    assert waiting.result() is True
    with pytest.raises(LockLost):
        lock.release()
    assert told.once() == (lease, GONE)


# ---- extensions of leases that are renewed ----


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_extensions_while_renewals_are_under_way(place: Cut, verb: str) -> None:
    """They get along with them: whoever asks healthy nodes gets an answer."""
    renewals: list[int] = []

    def work(number: int) -> None:
        lock, extensions = renewed(place, 0.15, name=f"name {number}"), 0
        while extensions < 40:
            lock.acquire()
            lease = lease_of(lock)
            try:
                for _ in range(10):
                    time.sleep(random.uniform(0, 0.1))
                    if verb == "extend":
                        lock.extend(0.15, replace_ttl=True)
                    else:
                        lock.reacquire()
                    extensions += 1
                    assert lock.left() <= 0.15
                renewals.append(count(lease))
                lock.release()
            except LockLost:  # the machine stood still for longer than a lease
                assert not lock.held

                if lock.lease is not None:
                    with pytest.raises(LockLost):
                        lock.release()

    for worker in [InBackground(lambda number=number: work(number)) for number in range(6)]:  # type: ignore[misc]
        worker.result(60)
    assert sum(renewals) > 24
    nothing_left(place.servers)


def test_an_extension_beyond_the_lease_is_kept(place: Cut, clock) -> None:
    """The next renewal comes when a lease's two thirds are left of it."""
    with renewed(place) as lock:
        clock(5)
        lock.extend(60, replace_ttl=True)
        assert lock.left() > 59 - E
        eventually(lambda: is_young(place, lease=60))
        clock(39)
        assert settled(lambda: count(lock)) == 0
        assert lock.left() > 20 - E
        clock(1.5)
        once_more(lock, 1)
        assert 28 < lock.left() < 30


def test_a_renewed_lease_is_not_cut_short(place: Cut) -> None:
    """Less than a node may take to answer is left then, so that it would be lost at once."""
    with renewed(place) as lock:
        assert lock.extend(0.1, replace_ttl=True)
        assert lock.left() > 29 - E
        assert not lock.lost.is_set()
        eventually(lambda: is_young(place))


def test_an_extension_adds_to_what_is_really_left(place: Cut, clock) -> None:
    with renewed(place) as lock:
        clock(10.1)
        once_more(lock, 1)
        clock(5)
        lock.extend(10)  # 25 are left, and 35 from now on
        assert 34 - E < lock.left() < 35
        eventually(lambda: is_young(place, lease=35))
        clock(5)
        assert lock.reacquire()
        assert 29 - E < lock.left() < 30
        clock(10.1)
        once_more(lock, 2)


# ---- nodes that fail for a while ----


def test_a_short_cut_does_not_end_it(place: Cut) -> None:
    """The renewal died of the first error (Artemis 2371)."""
    told = Told()
    lock = renewed(place, 2 * SLACK, on_lost=told)
    lock.acquire()
    once_more(lock, 1)
    renewal = lease_of(lock).renewal
    assert renewal is not None
    place.cut()
    time.sleep(0.5 * SLACK)
    eventually(lambda: renewal.failed, what="a renewal has failed")
    place.heal()
    eventually(lambda: count(lock) >= 4, 10, "renewals go on")
    assert lock.held
    assert told.calls == []
    assert {token_on(server) for server in place.servers} == {lease_of(lock).token}
    lock.release()
    nothing_left(place.servers)


def test_an_answer_that_comes_too_late_revives_nothing(place: Cut, clock) -> None:
    """A renewal did not look how long it took itself (redsync 71)."""
    told = Told()
    lock = renewed(place, on_lost=told, node_timeout=100)
    lock.acquire()
    lease = lease_of(lock)
    clock(10.1)
    once_more(lock, 1)  # it is connected
    until = lease.valid_until_ns
    age(place)
    for proxy in place.proxies:
        proxy.hold("down")
    clock(10.1)
    eventually(lambda: is_young(place), what="the servers have run it")
    assert lock.held
    clock(END - 10.1 - 3.4)  # an eighth of a lease before its end it is too late
    assert told.once() == (lease, UNANSWERED)
    assert told.at[0] < until
    clock(5)
    place.heal()
    assert settled(lambda: count(lease)) == 1
    assert not lock.held
    assert lock.left() == 0
    with pytest.raises(LockLost, match="no quorum"):
        lock.release()
    nothing_left(place.servers, 2)


@pytest.fixture
def five(kind: str, valkeys: LocalNodes) -> Iterator[Cut]:
    with Cut("RedLock", kind, list(valkeys)) as made:
        yield made


def test_a_minority_that_forgets_is_given_the_key_again_and_a_majority_ends_it(five: Cut, clock) -> None:
    """As after a jump of its clock, or a start without memory (redsync 149, Valkey 2651)."""
    told = Told()
    lock = renewed(five, on_lost=told)
    lock.acquire()
    token = lease_of(lock).token
    eventually(lambda: [token_on(server) for server in five.servers] == [token] * 5)
    clock(10.1)
    once_more(lock, 1)
    for number in range(2, 8):
        for server in (five.servers[number % 5], five.servers[(number + 2) % 5]):
            raw(server, "DEL", NAME)
        clock(10.1)
        once_more(lock, number)
        eventually(lambda: [token_on(server) for server in five.servers] == [token] * 5, 5, "it is put back")
        assert lock.held
    for server in five.servers[1:4]:
        raw(server, "DEL", NAME)
    clock(10.1)
    assert told.once()[1] == GONE
    assert not lock.held
    eventually(lambda: [token_on(server) for server in five.servers] == [None] * 5, 2, "the rest is deleted")
    with pytest.raises(LockLost):
        lock.release()


# ---- the thread that calls ----


def callers() -> int:
    return sum(thread.name == "redbolt-lost" for thread in threading.enumerate())


def test_the_thread_is_there_while_somebody_listens(place: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_losses, "_LINGER_NS", 100_000_000)
    eventually(lambda: callers() == 0, 3)
    with renewed(place):
        assert callers() == 0
    with place.lock(timeout=10):
        assert callers() == 0
    told = Told()
    locks = [renewed(place, name=f"name {i}", on_lost=told) for i in range(5)]
    assert callers() == 0
    for lock in locks:
        lock.acquire()
        assert callers() == 1
    time.sleep(0.3)
    assert callers() == 1
    for lock in locks:
        lock.release()
    eventually(lambda: callers() == 0, 3)
    locks[0].acquire()
    assert callers() == 1
    if place.face == "ReentrantLock":
        locks[0].release()  # such a lock is held by the thread
    del lock, locks
    gc.collect()
    eventually(lambda: callers() == 0, 3)


def test_nobody_is_forgotten_while_the_thread_ends(
    place: Cut, monkeypatch: pytest.MonkeyPatch, clock
) -> None:
    """It ends all the time, and just then somebody listens."""
    monkeypatch.setattr(_losses, "_LINGER_NS", 1)
    told = Told()
    for _ in range(50):
        with renewed(place, on_lost=told):
            pass
    lock = renewed(place, on_lost=told)
    lock.acquire()
    delete(place)
    clock(10.1)
    assert told.once()[1] == GONE
    with pytest.raises(LockLost):
        lock.release()


def test_the_next_holder_hears_of_a_loss_in_time(place: Cut, clock) -> None:
    """Also where the one before had nothing to be called."""
    told = Told()
    line, stay = Line(lambda: renewed(place, on_lost=told)), Stay()
    holder = Holder(renewed(place))
    line.join(0, inside=stay)
    holder.let_go().result()
    lease = stay.inside()
    assert lease.token == holder.token
    delete(place)
    clock(10.1)
    assert lease.lost.wait(5 * SLACK)
    at = now_ns()
    told.once()
    assert told.at[0] - at < 0.5 * SLACK * 1e9
    stay.leave()
    with pytest.raises(LockLost):
        line.end()
