"""ReentrantLock and npm ``node-redisson`` on one server: two libraries, one lock."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from redbolt import LockLost, LockNotOwned, LockTimeout, ReentrantLock
from redbolt.local import LocalNode
from tests.interop.nodejs import NodeRedisson, RedissonLock
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.monitor import Monitor
from tests.kit.npm import Call, PeerError
from tests.test_reentrant import Ear, Spot, owner_of

NAMES = ["name", "{tag}name", "замо́к 🔒"]


@pytest.fixture
def spot(kind: str, node: LocalNode) -> Spot:
    """Our side, on each kind of server in turn."""
    return Spot(node, kind)


@pytest.fixture
def peer(spot: Spot, node_redisson: Callable[..., NodeRedisson]) -> NodeRedisson:
    """Their side."""
    return node_redisson(spot.node)


@pytest.fixture
def theirs(peer: NodeRedisson) -> RedissonLock:
    """Their lock "name"."""
    return peer.lock("name")


@pytest.fixture
def monitor(spot: Spot) -> Iterator[Monitor]:
    watching = Monitor(spot.node)
    yield watching
    watching.close()


def subscribers(spot: Spot, channel: str) -> int:
    return int(spot.ask("PUBSUB", "NUMSUB", channel)[1])


def waits(spot: Spot, theirs: RedissonLock) -> Call:
    """Have them wait for it, and go on when they listen: what is published before is lost to them."""
    listeners = subscribers(spot, theirs.channel)
    waiting = theirs.start_lock(10_000)
    eventually(lambda: subscribers(spot, theirs.channel) > listeners, what="it listens")
    for _ in range(2):
        assert theirs.is_locked()  # so their process has read by now that it listens
    return waiting


def refused(theirs: RedissonLock) -> None:
    """They may not unlock what is not theirs."""
    with pytest.raises(PeerError) as caught:
        theirs.unlock()
    assert caught.value.name == "RedissonLockError"


@pytest.mark.parametrize("name", NAMES)
def test_each_excludes_the_other(spot: Spot, peer: NodeRedisson, name: str) -> None:
    ours, theirs = spot.lock(name), peer.lock(name)
    for _ in range(2):
        assert not theirs.is_locked()
        with ours:
            assert theirs.try_lock(0, 10_000) is False
            assert theirs.is_locked()
            assert theirs.hold_count() == 0
            refused(theirs)
            assert spot.holders(name) == {owner_of(ours): b"1"}
        assert not theirs.is_locked()
        assert theirs.try_lock(0, 10_000) is True
        assert ours.acquire(blocking=False) is False
        assert ours.locked()
        assert not ours.owned()
        with pytest.raises(LockNotOwned):
            ours.release()
        assert spot.holders(name) == {theirs.owner: b"1"}
        theirs.unlock()
        assert not ours.locked()


@pytest.mark.parametrize("name", NAMES)
def test_both_leave_the_same_on_the_server(spot: Spot, peer: NodeRedisson, name: str) -> None:
    """Key, type, form of the field, counts, remaining life and message."""
    ours, theirs = spot.lock(name, 12.345), peer.lock(name)
    with closing(Ear(spot.node, theirs.channel)) as ear:
        compare(spot, name, ours, theirs, ear)


def compare(spot: Spot, name: str, ours: ReentrantLock, theirs: RedissonLock, ear: Ear) -> None:
    """Have both do the same, one after the other, and look at the server in between."""

    def look(life_ms: int) -> tuple[object, ...]:
        (owner,) = spot.holders(name)
        form = re.sub(rb"[0-9a-f]", b"x", owner.partition(b":")[0]), owner.partition(b":")[2].isdigit()
        left = spot.ask("PTTL", name)
        assert life_ms - 2000 * SLACK < left <= life_ms
        return spot.locks(), spot.ask("TYPE", name), form, spot.ask("HGET", name, owner), ear.heard()

    seen: list[list[object]] = []
    steps: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (ours.acquire, lambda: theirs.lock(12_345)),
        (ours.acquire, lambda: theirs.lock(12_345)),
        (ours.release, theirs.unlock),
    ]
    for side in range(2):
        seen.append([])
        for step in steps:
            step[side]()
            seen[side].append(look(12_345))
        ours.release() if side == 0 else theirs.unlock()
        seen[side].append((spot.locks(), ear.heard()))
    assert seen[0] == seen[1]
    assert [entry[3] for entry in seen[0][:3]] == [b"1", b"2", b"1"]  # type: ignore[index]
    assert seen[0][3] == ([], [b"0"])


def test_counts_are_seen_by_the_other_side(spot: Spot, theirs: RedissonLock) -> None:
    ours = spot.lock()
    for count in (1, 2, 3):
        theirs.lock(10_000)
        assert theirs.hold_count() == count
        assert spot.holders() == {theirs.owner: b"%d" % count}
        assert ours.locked()
    for count in (2, 1):
        theirs.unlock()
        assert spot.counts() == [count]
        assert ours.acquire(blocking=False) is False
    theirs.unlock()
    with ours, ours:
        assert spot.counts() == [2]
        assert theirs.is_locked()
        ours.release()
        assert theirs.is_locked()
        assert theirs.try_lock(0, 10_000) is False
        ours.acquire()
    assert not theirs.is_locked()
    refused(theirs)


def test_our_owner_could_be_one_of_theirs(
    spot: Spot, node_redisson: Callable[..., NodeRedisson], theirs: RedissonLock
) -> None:
    """Under their very owner, a hold of ours is one of theirs, and the other way round."""
    ours = spot.lock()
    ours.acquire(token=theirs.owner)
    assert theirs.is_held()
    theirs.lock(10_000)
    assert spot.holders() == {theirs.owner: b"2"}
    theirs.unlock()
    assert spot.holders() == {theirs.owner: b"1"}
    theirs.unlock()
    with pytest.raises(LockLost):
        ours.release()


def published(monitor: Monitor) -> list[tuple[str, ...]]:
    """What scripts have published since the last look; an `Ear` would speak to those who wait, too."""
    return [argv[1:] for argv in monitor.seen() if argv[0] == ".PUBLISH"]


def test_our_last_release_wakes_their_waiter(spot: Spot, theirs: RedissonLock, monitor: Monitor) -> None:
    """And no other: while a hold is left, nothing is said."""
    ours = spot.lock(timeout=60)
    ours.acquire()
    ours.acquire()
    waiting = waits(spot, theirs)
    ours.release()
    assert published(monitor) == []
    assert not waiting.done
    ours.release()
    waiting.result(10)
    assert published(monitor) == [(theirs.channel, "0")]
    assert spot.holders() == {theirs.owner: b"1"}
    theirs.unlock()


@pytest.mark.parametrize("how", ["force_unlock", "an undo"])
def test_whatever_frees_ours_wakes_their_waiter(spot: Spot, theirs: RedissonLock, how: str) -> None:
    ours = spot.lock(timeout=60)
    ours.acquire()
    waiting = waits(spot, theirs)
    if how == "force_unlock":
        assert spot.stranger().force_unlock() is True
    else:
        ours._target.take_back(ours._engine, owner_of(ours), -1)
    waiting.result(10)
    assert spot.holders() == {theirs.owner: b"1"}
    theirs.unlock()


def test_their_unlock_frees_it_for_us(spot: Spot, theirs: RedissonLock) -> None:
    ours = spot.lock(sleep=0.01)
    theirs.lock(60_000)
    theirs.lock(60_000)
    spot.ask("CONFIG", "RESETSTAT")

    def cycle() -> int:
        with ours:
            return ours.hold_count

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cycle)
        eventually(spot.refusals, what="it was refused once")
        theirs.unlock()
        assert not waiting.done()
        assert spot.holders() == {theirs.owner: b"1"}
        theirs.unlock()
        assert waiting.result(10 * SLACK) == 1
    assert spot.locks() == []


def test_a_lock_that_they_renew_is_taken_for_as_long(
    spot: Spot, node_redisson: Callable[..., NodeRedisson]
) -> None:
    """Their watchdog gives it a life of 600 ms, every 200 ms."""
    theirs = node_redisson(spot.node, watchdog_ms=600).lock("name")
    theirs.lock()
    spot.ask("CONFIG", "RESETSTAT")

    def renewals() -> int:
        return int(spot.ask("INFO", "commandstats").get("cmdstat_pexpire", {"calls": 0})["calls"])

    ours = spot.lock(sleep=0.01)
    for more in (2, 4):
        eventually(lambda more=more: renewals() >= more, what="it was renewed")  # type: ignore[misc]
        assert ours.acquire(blocking_timeout=0.05) is False
        assert spot.holders() == {theirs.owner: b"1"}
    theirs.unlock()
    assert ours.acquire(blocking=False) is True
    ours.release()


def test_the_lock_of_their_dead_client_is_free_when_its_lease_ends(
    spot: Spot, node_redisson: Callable[..., NodeRedisson]
) -> None:
    dead = node_redisson(spot.node, watchdog_ms=400)
    theirs = dead.lock("name")
    theirs.lock()
    spot.ask("CLIENT", "KILL", "TYPE", "normal")
    spot.ask("PEXPIRE", "name", 200)
    spot.ask("HSET", "name", "somebody who is gone", 1)
    spot.ask("HDEL", "name", theirs.owner)  # so their watchdog finds nothing
    ours = spot.lock(sleep=0.01, blocking_timeout=10 * SLACK)
    with ours:
        assert spot.holders() == {owner_of(ours): b"1"}


def test_a_lost_lock_is_lost_to_them(spot: Spot, theirs: RedissonLock) -> None:
    ours = spot.lock()
    ours.acquire()
    ours.acquire()
    assert theirs.force_unlock() is True
    assert theirs.try_lock(0, 60_000) is True
    for verb in (ours.reacquire, ours.release):
        with pytest.raises(LockLost):
            verb()
    assert ours.acquire(blocking=False) is False
    assert spot.holders() == {theirs.owner: b"1"}
    assert spot.ask("PTTL", "name") > 40_000
    assert ours.force_unlock() is True
    refused(theirs)


def test_leases_are_exact_on_both_sides(spot: Spot, theirs: RedissonLock) -> None:
    for life_ms in (2_999, 12_345, 1_000_001):
        theirs.lock(life_ms)
        spot.lives(life_ms / 1000 - 2 * SLACK, life_ms / 1000)
        assert spot.lock().acquire(blocking=False) is False
        spot.lives(life_ms / 1000 - 2 * SLACK, life_ms / 1000)  # a refused try changes nothing
        theirs.unlock()
        with spot.lock(timeout=life_ms / 1000) as ours:
            spot.lives(life_ms / 1000 - 2 * SLACK, life_ms / 1000)
            assert theirs.try_lock(0, 60_000) is False
            spot.lives(life_ms / 1000 - 2 * SLACK, life_ms / 1000)
            ours.extend(5, replace_ttl=True)
            spot.lives(5 - 2 * SLACK, 5)


def test_a_string_in_the_way_is_told(spot: Spot, theirs: RedissonLock) -> None:
    spot.ask("SET", "name", "data")
    with pytest.raises(LockTimeout, match="its key holds a string"):
        with spot.lock(blocking_timeout=0.02, sleep=0.01):
            pytest.fail("this block must not run")
    assert theirs.is_locked()
    assert spot.ask("GET", "name") == b"data"


def test_no_latch_of_either_is_left(spot: Spot, theirs: RedissonLock) -> None:
    for _ in range(3):
        theirs.lock(10_000)
        theirs.unlock()
        with spot.lock():
            pass
    eventually(lambda: spot.ask("DBSIZE") == 0, what="all latches are gone")


def test_of_both_libraries_one_is_inside(spot: Spot, node_redisson: Callable[..., NodeRedisson]) -> None:
    inside: list[str] = []
    crowds: list[list[str]] = []

    def stay(who: str) -> None:
        inside.append(who)
        raw(spot.node, "PING")  # while it is out, others may run
        crowds.append(list(inside))
        inside.remove(who)

    def ours(who: str) -> None:
        lock = spot.lock(timeout=30, sleep=0.002)
        for _ in range(15):
            with lock:
                with lock:
                    stay(who)
            raw(spot.node, "PING")

    def theirs(who: str) -> None:
        lock = node_redisson(spot.node).lock("name")
        for _ in range(15):
            # One try at a time: a waiter of theirs may miss what is published before it listens.
            eventually(lambda: lock.try_lock(0, 30_000), 30, "it gets the lock")
            lock.lock(30_000)
            stay(who)
            lock.unlock()
            lock.unlock()

    work = [(ours, "ours 1"), (ours, "ours 2"), (theirs, "theirs 1"), (theirs, "theirs 2")]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(body, who) for body, who in work]:
            done.result(60 * SLACK)
    assert len(crowds) == 60
    assert [crowd for crowd in crowds if len(crowd) > 1] == []
    assert spot.locks() == []
