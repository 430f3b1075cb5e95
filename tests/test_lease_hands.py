"""A lease goes from one thread to another: ``lease.hand_over()`` and ``lock.adopt(lease)``."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import redbolt
from redbolt import LockError, LockLost, LockNotOwned
from redbolt.lease import Lease
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.line import AnyLock, nothing_left
from tests.kit.renewing import (
    LIMIT,
    Witness,
    age,
    count,
    is_young,
    lease_of,
    lives,
    once_more,
    renewed,
    witnesses,
)
from tests.kit.rounds import InBackground
from tests.kit.waiting import FACES, NAME, Place


@pytest.fixture(params=FACES)
def place(request: pytest.FixtureRequest, kind: str, valkeys: LocalNodes) -> Iterator[Place]:
    """Where a lock of each kind lives."""
    with Place(request.param, kind, list(valkeys)) as made:
        yield made


@pytest.fixture
def witness(place: Place) -> Iterator[Callable[..., Witness]]:
    with witnesses(place) as make:
        yield make


@pytest.fixture
def reentrant(kind: str, valkeys: LocalNodes) -> Iterator[Place]:
    with Place("ReentrantLock", kind, list(valkeys)) as made:
        yield made


def handed(lock: AnyLock) -> Lease:
    """A lease that the calling thread has acquired, and given out of its hands."""
    lock.acquire()
    lease = lease_of(lock)
    assert lease.hand_over() is lease
    assert lock.lease is None
    assert not lock.held
    assert lease.held
    with pytest.raises(LockNotOwned):
        lock.release()
    with pytest.raises(LockNotOwned):
        lease.hand_over()
    return lease


@pytest.mark.parametrize("other", [True, False])
def test_a_lease_goes_to_another_thread(place: Place, clock, other: bool) -> None:
    """And is renewed all the time; the thread that had it may end."""
    first = renewed(place)
    lease = InBackground(lambda: handed(first)).result()
    age(place)
    clock(10.1)
    once_more(lease, 1)
    eventually(lambda: is_young(place))
    lock = renewed(place) if other else first
    lock.adopt(lease)
    assert lock.lease is lease
    assert lock.held
    age(place)
    clock(10.1)
    once_more(lease, 2)
    eventually(lambda: is_young(place))
    assert InBackground(lambda: renewed(place).acquire(blocking=False)).result() is False
    lock.release()
    nothing_left(place.servers)
    assert not lease.lost.is_set()


def test_the_adopter_holds_a_reentrant_lock_as_often(reentrant: Place) -> None:
    def work() -> Lease:
        first = renewed(reentrant)
        first.acquire()
        return handed(first)

    lease = InBackground(work).result()
    lock = renewed(reentrant)
    lock.adopt(lease)
    assert lock.acquire()
    for held in (3, 2, 1):
        assert raw(reentrant.servers[0], "HGETALL", NAME) == {lease.token: b"%d" % held}
        lock.release()
    nothing_left(reentrant.servers)


def test_of_two_that_adopt_one_wins(place: Place) -> None:
    for _ in range(20):
        lease = handed(renewed(place))
        both = threading.Barrier(2)

        def work(lease: Lease = lease, both: threading.Barrier = both) -> bool:
            lock = renewed(place)
            both.wait()
            try:
                lock.adopt(lease)
            except LockError as error:
                assert "nobody has handed over" in str(error) or "somebody else has taken" in str(error)  # noqa: PT017
                return False
            both.wait()
            lock.release()
            return True

        threads = [InBackground(work), InBackground(work)]
        eventually(lambda both=both: both.n_waiting == 1 or both.broken)  # type: ignore[misc]
        both.wait()
        assert sorted(thread.result() for thread in threads) == [False, True]
        nothing_left(place.servers)


def test_what_cannot_be_adopted(place: Place, clock) -> None:
    lock = renewed(place)
    lock.acquire()
    with pytest.raises(LockError, match="nobody has handed over"):
        renewed(place).adopt(lease_of(lock))
    lock.release()
    lease = handed(lock)
    with pytest.raises(ValueError, match="is not one of lock"):
        renewed(place, name="another").adopt(lease)
    other: AnyLock = redbolt.Lock(place.urls[0], NAME, engine=place.kind)
    if place.face == "ReentrantLock":
        with pytest.raises(ValueError, match="is not one of lock"):
            other.adopt(lease)
    for server in place.servers:
        raw(server, "DEL", NAME)
    clock(10.1)
    assert lease.lost.wait(5 * SLACK)
    with pytest.raises(LockLost, match="its token is gone"):
        lock.adopt(lease)
    assert lock.lease is None
    with lock:
        assert lock.held
    with pytest.raises(LockError):
        lock.adopt(lease)


def test_who_holds_it_already_adopts_nothing(place: Place, clock) -> None:
    first, second = renewed(place), renewed(place)
    lease = handed(first)
    clock(25)
    eventually(lambda: count(lease) == 1)
    for server in place.servers:
        raw(server, "DEL", NAME)
    second.acquire()
    with pytest.raises(LockError, match="is held by this caller already"):
        second.adopt(lease)
    second.release()


def test_a_floating_lease_ends_with_the_last_reference(
    place: Place, witness: Callable[[], Witness], clock
) -> None:
    lease: Lease | None = handed(renewed(place))
    age(place)
    del lease
    gc.collect()
    second = witness()
    clock(10.6)
    second.sees_a_renewal()
    assert max(lives(place)) <= 12_000


@pytest.mark.parametrize("watched", [True, False])
def test_a_fixed_lease_is_renewed_by_a_lock_that_renews(place: Place, clock, watched: bool) -> None:
    """From what it has left, and not from what the new lock would have asked for."""
    options: dict[str, Any] = {"on_lost": print} if watched else {}
    lease = handed(place.lock(timeout=12, node_timeout=LIMIT, **options))
    age(place, ttl_ms=11_000)
    lock = renewed(place)
    lock.adopt(lease)
    once_more(lease, 1)  # at once: less than two thirds of a lease are left
    eventually(lambda: is_young(place))
    assert lock.left() > 29
    age(place)
    clock(10.1)
    once_more(lease, 2)
    lock.release()
    nothing_left(place.servers)
