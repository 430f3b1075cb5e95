"""What a lock does with each fault, on the one node of a Lock and on one, two and all five of a RedLock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from redbolt import LockLost, NodesUnavailable, ReleaseUnconfirmed
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import FAULTS, E, Field, T, absent, values, within
from tests.kit.rounds import InBackground

PLACES = {"lock": (1, 1), "one of five": (5, 1), "two of five": (5, 2), "all five": (5, 5)}
NAME = "name"


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=PLACES)
def field(request: pytest.FixtureRequest, kind: str, fault: str, valkeys: LocalNodes) -> Iterator[Field]:
    """A lock's nodes with open connections, before some of them fail."""
    of, bad = PLACES[request.param]
    with Field(valkeys, of, bad, fault, kind) as made:
        made.warm_up()
        yield made


def check_causes(field: Field, error: NodesUnavailable) -> None:
    """Each cause belongs to a node that failed, and there are enough of them to explain it."""
    assert set(error.causes) <= field.addresses()
    assert len(error.causes) >= field.of - field.quorum + 1
    assert all(error.causes.values())
    for address, cause in error.causes.items():
        assert f"{address}: {cause}" in str(error)


def test_acquire(field: Field) -> None:
    """Granted where a quorum answers; else an error with the causes, in time, and no token stays behind."""
    lock = field.lock(NAME)
    field.strike()
    if field.decided:
        with within(T + E):
            assert lock.acquire()
        assert lock.held
        assert lock.lease is not None
        token = lock.lease.token
        assert values(field.reachable(), NAME).count(token) >= len(field.good)
        with within(T + E):
            lock.release()
    else:
        with within(T + E), pytest.raises(NodesUnavailable) as caught:
            lock.acquire()
        check_causes(field, caught.value)
        assert f"of {field.of} nodes answered; it needs {field.quorum}" in str(caught.value)
        assert lock.lease is None
    assert not lock.held
    assert lock.left() == 0.0
    eventually(absent(field.reachable(), NAME), T + E)
    field.heal()
    eventually(absent(field.servers(), NAME), 1)


def test_extend(field: Field) -> None:
    """A new life from a quorum; else the old one stays, or is known to be lost."""
    lock = field.lock(NAME, timeout=10)
    assert lock.acquire()
    before = lock.left()
    field.strike()
    if field.fault == "emptied" and len(field.bad) >= field.quorum:
        with within(T + E), pytest.raises(LockLost):
            lock.extend(20)
        assert not lock.held
    elif field.decided:
        with within(T + E):
            assert lock.extend(20)
        assert 29 < lock.left() < 30
        eventually(lambda: all(raw(server, "PTTL", NAME) > 20_000 for server in field.good), T + E)
    else:
        with within(T + E), pytest.raises(NodesUnavailable) as caught:
            lock.extend(20)
        check_causes(field, caught.value)
        assert before - 2 < lock.left() <= before
    field.heal()


def test_release(field: Field) -> None:
    """Confirmed by a quorum; else it can be tried again, until it is confirmed, and that is a success."""
    lock = field.lock(NAME, timeout=10)
    assert lock.acquire()
    field.strike()
    if field.fault == "emptied" and len(field.bad) == field.of:
        with within(T + E), pytest.raises(LockLost):
            lock.release()
    elif field.decided:
        with within(T + E):
            lock.release()
    else:
        with within(T + E), pytest.raises(ReleaseUnconfirmed) as caught:
            lock.release()
        assert set(caught.value.causes) <= field.addresses()
        assert len(caught.value.causes) >= field.of - field.quorum + 1
        assert lock.lease is not None
        assert not lock.held
        eventually(absent(field.reachable(), NAME), T + E)
        field.heal()
        eventually(lambda: release_again(lock))
    assert lock.lease is None
    assert not lock.held
    eventually(absent(field.reachable(), NAME), T + E)
    field.heal()
    eventually(absent(field.servers(), NAME), 1)


def release_again(lock) -> bool:
    with within(T + E):
        try:
            lock.release()
        except ReleaseUnconfirmed:
            return False
    return True


WAIT = 0.1
BREAKING = ("paused", "killed", "cut", "partitioned", "refused", "garbage")
WAITING = ("lock", "two of five", "all five")


@pytest.mark.parametrize("field", WAITING, indirect=True)
@pytest.mark.parametrize(
    "fault", ["paused", "killed", "cut", "partitioned", "refused", "garbage"], indirect=True
)
def test_a_waiting_acquire_uses_its_time_and_no_more(field: Field) -> None:
    """It goes on trying, so a reset connection costs it one try."""
    lock = field.lock(NAME, blocking=True, blocking_timeout=WAIT, sleep=0.01)
    field.strike()
    started = time.monotonic()
    if field.decided or field.fault == "cut":
        with within(WAIT + T + E):
            assert lock.acquire()
        with within(T + E):
            lock.release()
    else:
        with within(WAIT + T + E), pytest.raises(NodesUnavailable) as caught:
            lock.acquire()
        assert time.monotonic() - started > WAIT - 0.005
        check_causes(field, caught.value)
    eventually(absent(field.reachable(), NAME), T + E)
    field.heal()
    eventually(absent(field.servers(), NAME), 1)


@pytest.mark.parametrize("field", ["all five"], indirect=True)
@pytest.mark.parametrize("fault", ["lost"], indirect=True)
def test_a_waiting_acquire_outlives_a_lost_reply(field: Field) -> None:
    """A connection that stays silent is replaced after a second."""
    lock = field.lock(NAME, blocking=True, blocking_timeout=5, sleep=0.01)
    field.strike()
    with within(1.3 * SLACK):
        assert lock.acquire()
    lock.release()


@pytest.mark.parametrize("field", ["lock", "all five"], indirect=True)
@pytest.mark.parametrize("fault", ["paused", "refused", "partitioned", "killed"], indirect=True)
def test_a_waiting_acquire_gets_the_lock_when_the_nodes_come_back(field: Field) -> None:
    lock = field.lock(NAME, blocking=True, blocking_timeout=5, sleep=0.01)
    field.strike()

    def use() -> bool:
        got = lock.acquire() and lock.held
        lock.release()
        return got

    waiting = InBackground(use)
    time.sleep(2 * T)  # so that it has met the fault
    assert waiting.is_alive()
    field.heal()
    assert waiting.result(2)
    eventually(absent(field.servers(), NAME), 1)
