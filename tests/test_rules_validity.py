"""A lease is valid by the local clock, counted from before its first byte, whatever the nodes do later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from redbolt import Lock, LockError, LockLost, NodesUnavailable, ReentrantLock, ReleaseUnconfirmed
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import FAULTS, BadLink, E, Field, T, absent, within
from tests.kit.proxy import FaultProxy

Move = Callable[[float], None]
NAME = "name"
DRIFT = 10 * 0.01 + 0.002
PLACES = {"lock": (1, 1), "all five": (5, 5)}


@pytest.fixture(params=["paused", "killed", "emptied", "lost", "partitioned", "refused"])
def fault(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=PLACES)
def field(request: pytest.FixtureRequest, kind: str, fault: str, valkeys: LocalNodes) -> Iterator[Field]:
    of, bad = PLACES[request.param]
    with Field(valkeys, of, bad, fault, kind) as made:
        made.warm_up()
        yield made


def test_held_ends_with_validity_whatever_the_nodes_do(field: Field, clock: Move) -> None:
    lock = field.lock(NAME, timeout=10)
    assert lock.acquire()
    assert lock.lease is not None
    field.strike()
    with within(0.05 * SLACK):  # nothing is asked
        assert lock.held
        assert 10 - DRIFT - 1 * SLACK < lock.left() <= 10 - DRIFT
        clock(lock.left() - 0.5 * SLACK)
        assert lock.held
        assert 0 < lock.left() <= 0.5 * SLACK
        clock(0.5 * SLACK)
        assert not lock.held
        assert lock.left() == 0.0
        assert not lock.lease.held
        clock(3600)
        assert not lock.held
    for call in (lambda: lock.extend(10), lambda: lock.extend(10, replace_ttl=True), lock.reacquire):
        with pytest.raises(LockLost):
            call()
    assert not lock.held
    with within(T + E):
        try:
            lock.release()
        except LockError:
            pass
    assert not lock.held


def test_an_extension_that_is_not_confirmed_may_shorten_but_not_lengthen(field: Field, clock: Move) -> None:
    """The nodes may have got it, or not: the earlier end is the safe one."""
    lock = field.lock(NAME, timeout=10)
    assert lock.acquire()
    field.strike()
    before = lock.left()
    try:
        lock.extend(100)
    except LockError:
        assert lock.left() <= before
    else:
        assert field.decided
    try:
        lock.extend(2, replace_ttl=True)
    except LockError:
        pass
    assert lock.left() <= 2
    clock(2)
    assert not lock.held


@pytest.mark.parametrize("fault", ["paused", "partitioned", "lost"], indirect=True)
def test_a_release_whose_outcome_is_unknown(field: Field, clock: Move) -> None:
    """While validity lasts, a token that is gone is our own work; afterwards the lease was lost."""
    for later, error in ((0.0, None), (60.0, LockLost)):
        name = f"name {later}"
        lock = field.lock(name, timeout=10)
        eventually(lock.acquire, what="the nodes are well again")
        field.strike()
        with pytest.raises(ReleaseUnconfirmed):
            lock.release()
        field.heal()
        eventually(absent(field.servers(), name), 2)
        clock(later)
        found: list[BaseException | None] = []
        eventually(partial(release_again, lock, found))
        assert [type(one) for one in found] == [type(None) if error is None else error]
        assert lock.lease is None


def release_again(lock, found: list[BaseException | None]) -> bool:
    try:
        lock.release()
        found.append(None)
    except ReleaseUnconfirmed:
        return False
    except LockError as error:
        found.append(error)
    return True


class Slow(BadLink):
    """Every reply takes a while."""

    def strike(self) -> None:
        self.proxy.delay(down=0.06)


@pytest.fixture
def slow(
    kind: str, valkeys: LocalNodes, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Field]:
    monkeypatch.setitem(FAULTS, "slow", Slow)
    with Field(valkeys, request.param, request.param, "slow", kind) as made:
        made.warm_up()
        made.strike()
        yield made


@pytest.mark.parametrize("slow", [1, 5], indirect=True)
def test_the_time_of_the_try_is_taken_off(slow: Field) -> None:
    lock = slow.lock(NAME, timeout=10, node_timeout=1.0 * SLACK)
    started = time.monotonic()
    assert lock.acquire()
    took = time.monotonic() - started
    assert took >= 0.06
    assert lock.left() <= 10 - DRIFT - 0.06
    assert lock.left() >= 10 - DRIFT - took - 0.1 * SLACK
    lock.extend(10, replace_ttl=True)
    assert lock.left() <= 10 - DRIFT - 0.06
    lock.release()


@pytest.mark.parametrize("slow", [1, 5], indirect=True)
def test_a_lease_that_has_ended_when_it_is_granted_is_none(slow: Field) -> None:
    lock = slow.lock(NAME, timeout=0.05, node_timeout=1.0 * SLACK)
    with pytest.raises(NodesUnavailable, match="no validity was left"):
        lock.acquire()
    assert not lock.held
    eventually(absent(slow.servers(), NAME), 1)


@pytest.mark.parametrize("slow", [1, 5], indirect=True)
def test_an_extension_that_comes_too_late_does_not_revive(slow: Field, clock: Move) -> None:
    lock = slow.lock(NAME, timeout=10, node_timeout=2.0 * SLACK)
    assert lock.acquire()
    clock(lock.left() - 0.03)
    with pytest.raises(LockError):
        lock.extend(0.05, replace_ttl=True)
    assert not lock.held


# ---- a node that wakes later ----


@pytest.mark.parametrize("of", [1, 5])
def test_what_a_paused_node_was_sent_is_gone_when_it_wakes(kind: str, valkeys: LocalNodes, of: int) -> None:
    """Its try ran out of time; it runs it when it wakes, and then the undo that follows it."""
    with Field(valkeys, of, of // 2 + 1, "paused", kind) as field:
        lock = field.lock(NAME, timeout=30, node_timeout=0.01 * SLACK)
        woken = [one.server for one in field.bad if one.server is not None]
        for _ in range(20):
            eventually(lambda: answers(field), what="all nodes answer again")
            for server in woken:
                raw(server, "CONFIG", "RESETSTAT")
            field.strike()
            with pytest.raises(NodesUnavailable):
                lock.acquire()
            field.heal()
            eventually(lambda: all(calls(server) == 1 for server in woken), what="they have run the try")
            eventually(absent(field.servers(), NAME), 1)


def answers(field: Field) -> bool:
    lock = field.lock("answers", quorum=field.of) if field.of > 1 else field.lock("answers")
    try:
        found = lock.acquire()
    except NodesUnavailable:
        return False
    lock.release()
    return found


def calls(server: LocalNode) -> int:
    return raw(server, "INFO", "commandstats").get("cmdstat_set", {}).get("calls", 0)


def test_a_node_that_sleeps_for_long_has_nothing_left_when_it_wakes(
    kind: str, valkey: LocalNode, clock: Move
) -> None:
    """Its connection was given up meanwhile, and replaced by one that it does not answer, either."""
    with Field([valkey], 1, 1, "paused", kind) as field:
        for number in range(5):
            name = f"name {number}"
            eventually(lambda: answers(field))
            raw(valkey, "CONFIG", "RESETSTAT")
            field.strike()
            for _ in range(3):
                with pytest.raises(NodesUnavailable):
                    field.lock(name, timeout=60).acquire()
                clock(1.5)
            field.heal()
            eventually(lambda: calls(valkey) >= 1)
            eventually(absent([valkey], name), 1)


def test_a_holder_that_slept_through_its_lease_does_not_take_the_lock_from_the_next(
    kind: str, valkeys: LocalNodes, clock: Move
) -> None:
    with Field(valkeys, 5, 0, "paused", kind) as field:
        first, second = field.lock(NAME, timeout=0.1), field.lock(NAME, timeout=10, blocking=True, sleep=0.01)
        assert first.acquire()
        second.acquire()  # the key has ended on the servers
        clock(1)
        assert not first.held
        with pytest.raises(LockLost):
            first.extend(10)
        with pytest.raises(LockLost):
            first.release()
        assert second.owned()
        second.release()


@pytest.mark.parametrize("lock_class", [Lock, ReentrantLock])
def test_a_late_short_extension_is_reckoned_with(
    kind: str, valkey: LocalNode, lock_class: type[Lock] | type[ReentrantLock]
) -> None:
    """It hangs in the network while a longer one is confirmed on another connection."""
    with FaultProxy(valkey) as proxy:
        lock = lock_class(proxy.url, NAME, 10, node_timeout=0.05 * SLACK, engine=kind)
        lock.acquire()
        proxy.delay(up=3600)
        with pytest.raises(NodesUnavailable):
            lock.extend(3, replace_ttl=True)
        proxy.delay(up=0)

        def extended() -> bool:
            try:
                return lock.extend(60, replace_ttl=True)
            except NodesUnavailable:
                return False

        eventually(extended)
        assert raw(valkey, "PTTL", NAME) > 50_000
        assert lock.left() <= 3
        assert lock.reacquire()
        assert lock.left() <= 3
        raw(valkey, "DEL", NAME)
