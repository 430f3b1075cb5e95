"""ReentrantLock when something goes wrong: servers, networks, replies, permissions, interrupts and forks.

The signals and the forks hit programs of their own: this very module, run with a scenario.
"""

from __future__ import annotations

import dis
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import redbolt
from redbolt import LockLost, LockNotOwned, NodesUnavailable, ReentrantLock, ReleaseUnconfirmed, SetupError
from redbolt._body import Body
from redbolt.local import LocalNode
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import FAULTS, Bad, BadLink, T, paused, within
from tests.kit.monitor import Monitor
from tests.kit.proxy import FaultProxy
from tests.kit.resp import PONG, error
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, Step
from tests.programs import main
from tests.programs.forks import fork, result
from tests.test_interrupts import Interrupt, Place, interrupted
from tests.test_reentrant import Ear, Spot, owner_of

E = 0.5 * SLACK
"""How late a thread may be scheduled; what is measured here would be seconds if it went wrong."""
CHANNEL = "redisson_lock__channel:{name}"
LATCHES = "redisson_unlock_latch:*"


@pytest.fixture
def spot(kind: str, valkey: LocalNode) -> Spot:
    """On Valkey, for what does not depend on the server."""
    return Spot(valkey, kind)


@pytest.fixture
def any_spot(kind: str, node: LocalNode) -> Spot:
    """On each kind of server in turn."""
    return Spot(node, kind)


@pytest.fixture
def proxy(valkey: LocalNode) -> Iterator[FaultProxy]:
    """The way to the server."""
    with FaultProxy(valkey) as proxy:
        yield proxy
        proxy.heal()
        redbolt.close()


@pytest.fixture
def ear(valkey: LocalNode) -> Iterator[Ear]:
    """On the channel of the lock "name"."""
    listening = Ear(valkey, CHANNEL)
    yield listening
    listening.close()


@pytest.fixture
def any_ear(node: LocalNode) -> Iterator[Ear]:
    """The same on each kind of server."""
    listening = Ear(node, CHANNEL)
    yield listening
    listening.close()


@pytest.fixture
def monitor(valkey: LocalNode) -> Iterator[Monitor]:
    watching = Monitor(valkey)
    yield watching
    watching.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Another thread, to have something going on meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def through(url: str, kind: str, timeout: float = 10, **options: Any) -> ReentrantLock:
    """A lock at some address, with the limit `T` for the server and a short pause between tries."""
    given: dict[str, Any] = {"node_timeout": T, "sleep": 0.01, "engine": kind} | options
    return ReentrantLock(url, "name", timeout, **given)


def warm(lock: ReentrantLock) -> None:
    """Open a connection, and have the server learn all scripts."""
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()
    latches_gone(lock.nodes[0].port)


def latches_gone(port: int) -> None:
    eventually(lambda: raw(f"redis://127.0.0.1:{port}", "KEYS", LATCHES) == [], 2, "the latches are gone")


def repeated(verb: Callable[[], Any], limit: float = 5) -> Any:
    """Call it until the server is there again; a reconnect takes its time."""

    def done() -> tuple[Any]:
        try:
            return (verb(),)
        except (NodesUnavailable, ReleaseUnconfirmed) as trouble:
            raise AssertionError(trouble) from trouble

    return eventually(done, limit, "the server answers again")[0]


def hears(ear: Ear, *messages: bytes) -> None:
    """Wait until just these messages have come since the last look."""
    heard: list[bytes] = []

    def all_of_them() -> bool:
        heard.extend(ear.heard())
        assert len(heard) <= len(messages), heard
        return heard == list(messages)

    eventually(all_of_them, 2, f"{messages} are published")


# ---- a server that cannot be reached ----

SILENT = ("paused", "killed", "partitioned", "refused", "lost", "cut", "garbage")
"""Faults under which the server cannot answer, or nobody hears it."""
KEEPING = ("paused", "partitioned", "refused", "lost", "cut")
"""Those of them after which a server still has what it had."""


@contextmanager
def struck(spot: Spot, fault: str) -> Iterator[Bad]:
    """The server, or the way to it, which has not failed yet."""
    bad = FAULTS[fault](spot.node)
    try:
        yield bad
    finally:
        bad.heal()
        redbolt.close()
        bad.close()


@pytest.mark.parametrize("fault", SILENT)
def test_a_try_that_cannot_be_answered_leaves_nothing(spot: Spot, fault: str) -> None:
    with struck(spot, fault) as bad:
        lock = through(bad.url, spot.kind)
        lock.acquire()
        lock.release()
        bad.strike()
        with within(T + E), pytest.raises(NodesUnavailable) as caught:
            lock.acquire(blocking=False)
        assert list(caught.value.causes) == [redbolt.Node.from_url(bad.url).address]
        assert (lock.held, lock.lease, lock.hold_count) == (False, None, 0)
        bad.heal()
        if bad.server is None:
            return
        eventually(lambda: spot.locks() == [], 2, "nothing is left")
        assert repeated(lambda: lock.acquire(blocking=False)) is True
        assert spot.counts() == [1]
        lock.release()
        assert spot.locks() == []


@pytest.mark.parametrize("fault", ["sliced", "emptied"])
def test_what_only_takes_longer_is_no_fault(spot: Spot, fault: str) -> None:
    with struck(spot, fault) as bad:
        lock = through(bad.url, spot.kind, node_timeout=5)
        lock.acquire()
        lock.release()
        bad.strike()
        assert lock.acquire(blocking=False) is True
        assert lock.acquire(blocking=False) is True
        assert spot.counts() == [2]
        lock.release()
        lock.release()
        assert spot.locks() == []


def test_a_try_of_a_stopped_server_is_taken_back_when_it_wakes(any_spot: Spot, any_ear: Ear) -> None:
    """And whoever heard of it as taken hears that it is free."""
    lock = through(any_spot.node.url, any_spot.kind)
    warm(lock)
    hears(any_ear, b"0")
    for _ in range(3):
        with paused(any_spot.node), pytest.raises(NodesUnavailable):
            lock.acquire(blocking=False)
        hears(any_ear, b"0")
        assert any_spot.locks() == []
        repeated(lock.locked)


@pytest.mark.parametrize("then", ["silence", "reset"])
def test_a_try_whose_reply_was_lost_is_taken_back(
    spot: Spot, proxy: FaultProxy, ear: Ear, monitor: Monitor, then: Any
) -> None:
    lock = through(proxy.url, spot.kind)
    warm(lock)
    hears(ear, b"0")
    monitor.seen()
    proxy.drop_reply("EVALSHA", then)
    with within(T + E), pytest.raises(NodesUnavailable):
        lock.acquire(blocking=False)
    assert proxy.replies_lost == 1
    hears(ear, b"0")
    assert spot.locks() == []
    inside = [words[0] for words in monitor.seen() if words[0].startswith(".")]
    assert inside[:5] == [".EXISTS", ".HSET", ".PEXPIRE", ".HDEL", ".PUBLISH"]
    assert lock.lease is None
    assert repeated(lambda: lock.acquire(blocking=False)) is True
    lock.release()


@pytest.mark.parametrize("fault", KEEPING)
def test_a_waiting_acquire_goes_on_when_the_server_is_back(
    spot: Spot, fault: str, background: ThreadPoolExecutor
) -> None:
    with struck(spot, fault) as bad:
        lock = through(bad.url, spot.kind)
        warm(lock)
        bad.strike()

        def cycle() -> int:
            with lock, lock:
                return lock.hold_count

        waiting = background.submit(cycle)
        if fault in ("lost", "cut"):
            assert isinstance(bad, BadLink)
            eventually(lambda: bad.proxy.replies_lost, what="the first try has failed")
        bad.heal()
        assert waiting.result(10 * SLACK) == 2
        eventually(lambda: spot.locks() == [], 2, "nothing is left")


def test_a_waiting_acquire_without_a_server_ends_with_its_time(spot: Spot) -> None:
    spot.node.kill()
    with within(0.2 + T + E), pytest.raises(NodesUnavailable):
        through(spot.node.url, spot.kind).acquire(blocking_timeout=0.2)
    with within(0.2 + T + E), pytest.raises(NodesUnavailable):
        through(spot.node.url, spot.kind, 0.2).acquire()


# ---- while it is held ----


@pytest.mark.parametrize("fault", SILENT)
@pytest.mark.parametrize("inside", [False, True])
def test_a_reentry_that_cannot_be_answered_changes_no_count(spot: Spot, fault: str, inside: bool) -> None:
    with struck(spot, fault) as bad:
        lock, shorter = through(bad.url, spot.kind, 20), through(bad.url, spot.kind, 10, blocking=False)
        lock.acquire()
        lock.acquire()
        owner = owner_of(lock)
        bad.strike()
        with within(T + E), pytest.raises(NodesUnavailable):
            if inside:
                with shorter:
                    pytest.fail("this block must not run")
            else:
                shorter.acquire()
        assert lock.hold_count == shorter.hold_count == 2
        assert lock.held
        assert 8 < lock.left() <= 10  # the server may have shortened it
        bad.heal()
        if fault in KEEPING:
            assert repeated(lock.reacquire)
            assert spot.holders() == {owner: b"2"}
            spot.lives(18, 20)
            lock.release()
            assert spot.holders() == {owner: b"1"}
            lock.release()
            assert spot.locks() == []
        elif bad.server is not None:
            with pytest.raises(LockLost):
                repeated(lock.reacquire)


@pytest.mark.parametrize("fault", KEEPING)
def test_a_reentry_is_repeated_within_its_time(spot: Spot, fault: str) -> None:
    with struck(spot, fault) as bad, ThreadPoolExecutor(1) as pool:
        lock = through(bad.url, spot.kind, 20)
        warm(lock)
        lock.acquire()
        owner = owner_of(lock)
        bad.strike()

        def heal_later() -> None:
            time.sleep(0.1)
            bad.heal()

        healing = pool.submit(heal_later)
        assert lock.acquire(blocking_timeout=10 * SLACK) is True
        healing.result(5)
        assert lock.hold_count == 2
        assert spot.holders() == {owner: b"2"}
        lock.release()
        lock.release()
        assert spot.locks() == []


@pytest.mark.parametrize("bound", ["time", "tries"])
def test_a_reentry_gives_up_in_time(spot: Spot, bound: str) -> None:
    lock = through(spot.node.url, spot.kind, 20)
    lock.acquire()
    spot.node.kill()
    retry = redbolt.Retry(count=3, delay=0.05)
    other = through(spot.node.url, spot.kind, 20, retry=retry if bound == "tries" else None)
    with within(0.2 + T + E), pytest.raises(NodesUnavailable, match="cannot acquire"):
        other.acquire(blocking_timeout=0.2 if bound == "time" else None)
    assert lock.hold_count == 1
    assert lock.held


def test_a_reentry_that_the_lease_does_not_live_to_see(
    spot: Spot, clock: Callable[[float], None], background: ThreadPoolExecutor
) -> None:
    """It has become an acquire like any other."""
    lock = through(spot.node.url, spot.kind, 5)
    lock.acquire()
    spot.node.kill()
    clock(5 - 0.3)
    with within(0.6 + T + 0.2 * SLACK), pytest.raises(NodesUnavailable):
        lock.acquire(blocking_timeout=0.6)
    assert (lock.held, lock.hold_count, lock.lease) == (False, 0, None)


@pytest.mark.parametrize("fault", SILENT)
def test_a_partial_release_needs_no_answer(spot: Spot, fault: str) -> None:
    with struck(spot, fault) as bad:
        lock, shorter = through(bad.url, spot.kind, 20), through(bad.url, spot.kind, 10)
        lock.acquire()
        lock.acquire()
        lock.acquire()
        owner = owner_of(lock)
        bad.strike()
        with within(T + E):
            shorter.release()
        assert lock.hold_count == 2
        assert lock.held
        assert 8 < lock.left() <= 10
        bad.heal()
        if fault in KEEPING:
            assert repeated(lock.reacquire)
            assert spot.holders() == {owner: b"2"}  # the next command has set it right
            assert 8 < lock.left() <= 10  # the shorter one may still be executed
            lock.release()
            lock.release()
            assert spot.locks() == []
        elif bad.server is not None:
            with pytest.raises(LockLost):
                repeated(lock.reacquire)


def test_the_block_of_a_partial_release_ends_well_without_a_server(spot: Spot) -> None:
    lock = through(spot.node.url, spot.kind, 20)
    with pytest.raises(ReleaseUnconfirmed):
        with lock:
            with lock:
                spot.node.kill()
            assert lock.hold_count == 1


@pytest.mark.parametrize("fault", SILENT)
def test_a_release_that_cannot_be_answered_can_be_repeated(spot: Spot, ear: Ear, fault: str) -> None:
    with struck(spot, fault) as bad:
        lock = through(bad.url, spot.kind, 20)
        lock.acquire()
        bad.strike()
        for _ in range(2 if fault in ("paused", "killed", "partitioned", "refused") else 1):
            with within(T + E), pytest.raises(ReleaseUnconfirmed):
                lock.release()
            assert not lock.held
            assert lock.hold_count == 0
            assert lock.lease is not None
        bad.heal()
        if bad.server is None:
            return
        repeated(lock.release)
        assert lock.lease is None
        assert spot.locks() == []
        if fault in KEEPING:
            hears(ear, b"0")
        with pytest.raises(LockNotOwned) as caught:
            lock.release()
        assert type(caught.value) is LockNotOwned


@pytest.mark.parametrize("then", ["silence", "reset"])
@pytest.mark.parametrize("late", [False, True])
def test_a_release_whose_reply_was_lost_is_answered_by_its_latch(
    spot: Spot, proxy: FaultProxy, ear: Ear, monitor: Monitor, clock: Any, then: Any, late: bool
) -> None:
    """Also after the lease: that it was released in time is known, then."""
    lock = through(proxy.url, spot.kind)
    warm(lock)
    hears(ear, b"0")
    lock.acquire()
    lease = lock.lease
    assert lease is not None
    owner = lease.token.decode()
    monitor.seen()
    proxy.drop_reply("EVALSHA", then)
    with within(T + E), pytest.raises(ReleaseUnconfirmed):
        lock.release()
    assert proxy.replies_lost == 1
    assert spot.locks() == []
    (latch,) = spot.ask("KEYS", LATCHES)
    assert spot.ask("GET", latch) == b"1"
    assert 10_000 < spot.ask("PTTL", latch) <= 20_000
    assert not lock.held
    if late:
        clock(10)
    repeated(lock.release)
    assert lock.lease is None
    hears(ear, b"0")
    latches_gone(spot.node.port)
    seen = monitor.seen()
    sent = [words[4:7] for words in seen if words[0] in ("EVAL", "EVALSHA") and words[2] == "3"]
    assert len(sent) >= 2
    assert set(sent) == {(CHANNEL, latch.decode(), owner)}  # the very same each time
    assert seen.count((".SET", latch.decode(), "1", "PX", "20000")) == 1
    assert (".EXISTS", latch.decode()) in seen
    assert seen[-1] != ("DEL", "name")
    assert [words for words in seen if words[0] == "DEL"] == [("DEL", latch.decode())]


@pytest.mark.parametrize("late", [False, True])
def test_without_its_latch_a_repeated_release_goes_by_the_lease(
    spot: Spot, proxy: FaultProxy, clock: Callable[[float], None], late: bool
) -> None:
    lock = through(proxy.url, spot.kind)
    warm(lock)
    lock.acquire()
    proxy.drop_reply("EVALSHA", "reset")
    with pytest.raises(ReleaseUnconfirmed):
        lock.release()
    (latch,) = spot.ask("KEYS", LATCHES)
    spot.ask("DEL", latch)
    if late:
        clock(10)
        with pytest.raises(LockLost):
            repeated(lock.release)
    else:
        repeated(lock.release)
    assert lock.lease is None


def test_the_latch_of_one_release_does_not_answer_for_another(spot: Spot) -> None:
    lock = spot.lock()
    for _ in range(2):
        lock.acquire()
        spot.ask("DEL", "name")
        with pytest.raises(LockLost):
            lock.release()
        lock.acquire()
        lock.release()


@pytest.mark.parametrize("then", ["silence", "reset"])
def test_a_reentry_whose_reply_was_lost(spot: Spot, proxy: FaultProxy, then: Any) -> None:
    lock = through(proxy.url, spot.kind)
    warm(lock)
    lock.acquire()
    owner = owner_of(lock)
    proxy.drop_reply("EVALSHA", then)
    with pytest.raises(NodesUnavailable):
        lock.acquire(blocking=False)
    assert lock.hold_count == 1
    assert spot.holders() == {owner: b"2"}  # for the moment
    proxy.drop_reply("EVALSHA", then)
    assert lock.acquire(blocking_timeout=10 * SLACK) is True
    assert lock.hold_count == 2
    assert spot.holders() == {owner: b"2"}
    proxy.drop_reply("EVALSHA", then)
    lock.release()
    assert lock.hold_count == 1
    eventually(lambda: spot.counts() == [1], 2)
    repeated(lock.release)
    assert spot.locks() == []


def test_a_last_release_ends_a_count_that_the_server_has_wrong(spot: Spot) -> None:
    lock = spot.lock()
    lock.acquire()
    spot.ask("HSET", "name", owner_of(lock), 17)
    lock.release()
    assert spot.locks() == []


def test_a_reentry_that_is_granted_too_late_is_none(kind: str, clock: Callable[[float], None]) -> None:
    """Its short lease has ended before the answer came."""

    def answer(argv: Argv) -> bytes | Step:
        if argv[-1] != b"2":
            return b":1\r\n" if argv[-1] == b"10000" else b":0\r\n"

        def late(peer: Any) -> None:
            clock(1)
            peer.send(b":1\r\n")

        return Step("late", late)

    with ScriptedNode(answer=answer) as node:
        lock, short = (ReentrantLock(node.url, "name", s, node_timeout=5, engine=kind) for s in (10, 0.5))
        assert lock.acquire()
        assert short.acquire(blocking=False) is False
        assert (lock.held, lock.hold_count, lock.lease) == (False, 0, None)
        eventually(lambda: [one for one in node.received("EVAL") if b"publish" in one.argv[1]], 2)
        redbolt.close()


def test_engines_that_were_closed_while_it_was_held(spot: Spot) -> None:
    lock = spot.lock()
    lock.acquire()
    redbolt.close()
    lock.acquire()
    assert spot.counts() == [2]
    redbolt.close()
    lock.release()
    lock.release()
    assert spot.locks() == []
    lock._engine.close()  # which `redbolt.close` knows no more


# ---- scripts that are not known, or not permitted ----


def test_scripts_are_forgotten_between_every_two_verbs(any_spot: Spot) -> None:
    lock = any_spot.lock()

    def gives(expected: list[int], verb: Callable[[], object]) -> None:
        any_spot.ask("SCRIPT", "FLUSH")
        verb()
        assert any_spot.counts() == expected
        any_spot.ask("SCRIPT", "FLUSH")
        verb()

    for _ in range(3):
        any_spot.ask("SCRIPT", "FLUSH")
        lock.acquire()
        any_spot.ask("SCRIPT", "FLUSH")
        lock.acquire()
        gives([2], lambda: lock.extend(5))
        gives([2], lock.reacquire)
        any_spot.ask("SCRIPT", "FLUSH")
        lock.release()
        assert any_spot.counts() == [1]
        any_spot.ask("SCRIPT", "FLUSH")
        lock.release()
        assert any_spot.locks() == []
        lock.acquire()
        any_spot.ask("SCRIPT", "FLUSH")
        assert lock.force_unlock() is True
        assert any_spot.locks() == []


def test_known_scripts_are_not_sent_again(spot: Spot, monitor: Monitor) -> None:
    lock = spot.lock()
    warm(lock)
    monitor.seen()
    warm(lock)
    assert {words[0] for words in monitor.seen()} & {"EVAL", "EVALSHA"} == {"EVALSHA"}


@pytest.fixture
def limited(any_spot: Spot) -> Iterator[Callable[[str], str]]:
    """Make or change a user: ``limited("-eval")`` returns the URL for it."""

    def user(*rules: str) -> str:
        any_spot.ask("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", *rules)
        return any_spot.node.url.replace("//", "//limited:secret@")

    yield user
    any_spot.ask("ACL", "DELUSER", "limited")


def test_without_evalsha_scripts_are_sent_whole(any_spot: Spot, limited: Callable[[str], str]) -> None:
    lock = ReentrantLock(limited("-evalsha"), "name", 10, engine=any_spot.kind)
    for _ in range(2):
        with lock:
            with lock:
                assert any_spot.counts() == [2]
                lock.extend(1)
        assert any_spot.locks() == []
    lock.acquire()
    assert lock.force_unlock() is True
    assert any_spot.locks() == []


def refuses_at_once(lock: ReentrantLock, verb: Callable[[ReentrantLock], object], said: str) -> None:
    """A call that would wait for long is an error before that."""
    with within(E), pytest.raises(SetupError, match=said):
        verb(lock)


@pytest.mark.parametrize("verb", [ReentrantLock.acquire, ReentrantLock.__enter__])
def test_that_scripts_are_not_permitted_is_told_at_once(
    any_spot: Spot, limited: Callable[[str], str], verb: Callable[[ReentrantLock], object]
) -> None:
    lock = ReentrantLock(limited("-@scripting"), "name", 10, engine=any_spot.kind)
    refuses_at_once(lock, verb, "NOPERM")
    assert any_spot.locks() == []


@pytest.mark.parametrize("verb", [ReentrantLock.acquire, ReentrantLock.__enter__])
def test_that_a_command_in_a_script_is_not_permitted_is_told_at_once(
    spot: Spot, verb: Callable[[ReentrantLock], object]
) -> None:
    spot.ask("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-hset")
    try:
        url = spot.node.url.replace("//", "//limited:secret@")
        refuses_at_once(ReentrantLock(url, "name", 10, engine=spot.kind), verb, "ACL failure")
        assert spot.locks() == []
    finally:
        spot.ask("ACL", "DELUSER", "limited")


def test_a_permission_that_is_taken_away_while_it_is_held(
    any_spot: Spot, limited: Callable[[str], str]
) -> None:
    lock = ReentrantLock(limited("+eval"), "name", 10, engine=any_spot.kind)
    lock.acquire()
    owner = owner_of(lock)
    limited("-@scripting")
    refuses_at_once(lock, ReentrantLock.acquire, "NOPERM")
    assert lock.hold_count == 1
    assert any_spot.holders() == {owner: b"1"}
    with pytest.raises(ReleaseUnconfirmed, match="NOPERM"):
        lock.release()
    limited("+@scripting")
    lock.release()
    assert any_spot.locks() == []


# ---- replies that make no sense ----

WRONG = (b":2\r\n", b":-1\r\n", b"$1\r\n1\r\n", b"*0\r\n", b"#t\r\n", b"+QUEUED\r\n", b"-\xff\xfe\r\n")


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_replies_of_the_wrong_kind(kind: str, wrong: bytes) -> None:
    says = [b":1\r\n"]

    def answer(argv: Argv) -> bytes:
        return says[0] if argv[0] == b"EVALSHA" else PONG if argv[0] == b"PING" else b":1\r\n"

    with ScriptedNode(answer=answer) as node:
        lock = through(node.url, kind)
        says[0] = wrong
        with pytest.raises(NodesUnavailable):
            lock.acquire(blocking=False)
        assert lock.lease is None
        (tried, *_) = node.received("EVALSHA")
        owner = tried.argv[4]
        undone = eventually(lambda: [one for one in node.received("EVAL") if one.argv[-1] == owner])
        assert b"publish" in undone[0].argv[1]
        assert undone[0].argv[2:] == (b"2", b"name", CHANNEL.encode(), owner)
        says[0] = b":1\r\n"
        assert repeated(lambda: lock.acquire(blocking=False)) is True
        says[0] = wrong
        with pytest.raises(NodesUnavailable):
            lock.acquire(blocking=False)
        assert lock.hold_count == 1
        assert lock.held
        says[0] = b":1\r\n"
        assert repeated(lambda: lock.acquire(blocking=False)) is True
        says[0] = wrong
        lock.release()
        assert lock.hold_count == 1
        with pytest.raises(ReleaseUnconfirmed):
            lock.release()
        assert lock.hold_count == 0
        says[0] = b":1\r\n"
        repeated(lock.release)
        assert lock.lease is None
        redbolt.close()


@pytest.mark.parametrize("told", ["LOADING server is loading", "READONLY You can't write", "BUSY a script"])
def test_errors_of_the_server_are_told(kind: str, told: str) -> None:
    says = [error(told)]
    with ScriptedNode(answer=lambda argv: says[0]) as node:
        lock = through(node.url, kind)
        with pytest.raises(NodesUnavailable, match=told.partition(" ")[0]):
            lock.acquire(blocking=False)
        says[0] = b":1\r\n"
        assert lock.acquire(blocking=False)
        says[0] = error(told)
        with pytest.raises(NodesUnavailable, match=told.partition(" ")[0]):
            lock.acquire(blocking=False)
        assert lock.hold_count == 1
        with pytest.raises(ReleaseUnconfirmed, match=told.partition(" ")[0]):
            lock.release()
        says[0] = b":1\r\n"
        lock.release()
        with pytest.raises(NodesUnavailable, match=told.partition(" ")[0]):
            says[0] = error(told)
            lock.force_unlock()
        says[0] = b":1\r\n"
        redbolt.close()


# ---- interrupts at each place, one by one ----


def some(
    prepare: Callable[[str], ReentrantLock], verb: Callable[[ReentrantLock], object], most: int = 100
) -> list[Place]:
    """All places of this call, but of those inside the pure engine not more than ``most``."""
    for _ in range(2):  # Python 3.12+ begins with the second call of each function
        lock = prepare("first")
        with Interrupt() as nowhere:
            verb(lock)
        lock.force_unlock()
    inside = [place for place in nowhere.seen if "_pure" in place[0].co_filename]
    outside = [place for place in nowhere.seen if "_pure" not in place[0].co_filename]
    assert len(outside) > 5
    return [place for place in outside + random.sample(inside, min(most, len(inside))) if is_real(place)]


def is_real(place: Place) -> bool:
    """At the end of a loop it looks for signals when it jumps, and so before it goes on behind the loop."""
    code, offset, _ = place
    before = [one for one in dis.get_instructions(code) if one.offset < offset][-1]
    return not before.opname.startswith("JUMP_BACKWARD")


def nothing_is_left(spot: Spot) -> None:
    eventually(lambda: spot.locks() == [], 1, "no owner is left")


def free(spot: Spot, name: str) -> ReentrantLock:
    return spot.lock(name, 30)


def once(spot: Spot, name: str) -> ReentrantLock:
    lock = spot.lock(name, 30)
    lock.acquire()
    return lock


def twice(spot: Spot, name: str) -> ReentrantLock:
    lock = once(spot, name)
    lock.acquire()
    return lock


ENTRIES = [ReentrantLock.acquire, ReentrantLock.__enter__]
EXITS = [ReentrantLock.release, lambda lock: lock.__exit__(None, None, None)]


@pytest.mark.parametrize("verb", ENTRIES)
def test_an_interrupt_at_each_place_of_acquire(spot: Spot, verb: Callable[[ReentrantLock], object]) -> None:
    for number, at in enumerate(some(lambda name: free(spot, name), verb)):
        lock = free(spot, f"name {number}")
        if interrupted(at, lambda lock=lock: verb(lock)):  # type: ignore[misc]
            assert (lock.lease, lock.hold_count) == (None, 0), at
        else:
            lock.release()
    nothing_is_left(spot)


@pytest.mark.parametrize("verb", ENTRIES)
def test_an_interrupt_at_each_place_of_a_reentry(spot: Spot, verb: Callable[[ReentrantLock], object]) -> None:
    for number, at in enumerate(some(lambda name: once(spot, name), verb)):
        lock = once(spot, f"name {number}")
        token = owner_of(lock)
        if not interrupted(at, lambda lock=lock: verb(lock)):  # type: ignore[misc]
            lock.release()
        elif lock.hold_count == 2 and at[0] is Body.acquire.__code__:
            lock.release()  # where `_again` has returned, and nobody looks for signals
        assert lock.hold_count == 1, at
        assert lock.held
        assert owner_of(lock) == token
        assert lock.owned()
        lock.release()
        assert lock.lease is None
    nothing_is_left(spot)


@pytest.mark.parametrize("verb", EXITS)
def test_an_interrupt_at_each_place_of_a_partial_release(
    spot: Spot, verb: Callable[[ReentrantLock], object]
) -> None:
    for number, at in enumerate(some(lambda name: twice(spot, name), verb)):
        lock = twice(spot, f"name {number}")
        through = not interrupted(at, lambda lock=lock: verb(lock))  # type: ignore[misc]
        count = lock.hold_count
        assert count in ((1,) if through else (1, 2)), at
        assert lock.owned()
        for _ in range(count):
            lock.release()
        assert lock.lease is None
    nothing_is_left(spot)


@pytest.mark.parametrize("verb", EXITS)
def test_an_interrupt_at_each_place_of_the_last_release(
    spot: Spot, verb: Callable[[ReentrantLock], object]
) -> None:
    for number, at in enumerate(some(lambda name: once(spot, name), verb)):
        lock = once(spot, f"name {number}")
        if interrupted(at, lambda lock=lock: verb(lock)):  # type: ignore[misc]
            assert not lock.held or lock.owned(), at
            if lock.lease is not None:
                lock.release()  # it can be repeated
        assert not lock.held
        assert lock.lease is None
    nothing_is_left(spot)


def test_an_interrupt_at_each_place_of_force_unlock(spot: Spot) -> None:
    for number, at in enumerate(some(lambda name: twice(spot, name), ReentrantLock.force_unlock)):
        lock = twice(spot, f"name {number}")
        if interrupted(at, lock.force_unlock):
            lock.force_unlock()
        assert lock.lease is None
        assert lock.hold_count == 0
    nothing_is_left(spot)


# ---- and at any moment ----


def run(scenario: str, **arguments: Any) -> Any:
    """Run a scenario of this module as a program, and return what it has written."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.test_reentrant_faults", json.dumps([scenario, arguments])],
        capture_output=True,
        text=True,
        timeout=60 * SLACK,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def interrupt_anything(url: str, kind: str, times: int, span: float) -> dict[str, Any]:
    """Interrupt calls at random moments; tell what was wrong, and how many were hit inside of a call."""

    def strike(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # should this one be dropped
        raise KeyboardInterrupt

    def block(lock: ReentrantLock) -> None:
        with lock, lock:
            pass

    verbs: list[tuple[int, Callable[[ReentrantLock], object]]] = [
        (0, ReentrantLock.acquire), (1, ReentrantLock.acquire), (0, ReentrantLock.__enter__),
        (2, ReentrantLock.release), (1, ReentrantLock.release), (0, block), (1, block),
    ]  # fmt: skip
    sys.unraisablehook = lambda what: None  # an interrupt may hit the callback of a weak reference
    signal.signal(signal.SIGALRM, strike)
    inside, wrong = 0, []
    for number in range(times):
        before, verb = verbs[number % len(verbs)]
        lock = ReentrantLock(url, f"name {number}", 30, engine=kind)
        for _ in range(before):
            lock.acquire()
        begun = returned = False
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, span))
            begun = True
            verb(lock)
            returned = True
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
        inside += begun and not returned
        count = lock.hold_count
        if count > before + 1 or (count and not lock.owned()):
            wrong.append(f"{number}: it claims {count} holds")
        try:
            for _ in range(max(1, count)):
                lock.release()
        except LockNotOwned as problem:
            if type(problem) is not LockNotOwned or count:
                wrong.append(f"{number}: {problem!r}")
        if lock.held or lock.lease is not None:
            wrong.append(f"{number}: still claimed")
    try:
        eventually(lambda: [key for key in raw(url, "KEYS", "*") if key.startswith(b"name")] == [], 2)
    except AssertionError as problem:
        wrong.append(str(problem))
    return {"inside": inside, "wrong": wrong}


def test_an_interrupt_at_any_moment(spot: Spot) -> None:
    outcome = run("interrupt_anything", url=spot.node.url, kind=spot.kind, times=400, span=0.0004)
    assert outcome["wrong"] == []
    assert outcome["inside"] > 40  # else nothing was tested


# ---- forks ----


def fork_while_holding(url: str, kind: str) -> dict[str, Any]:
    """A child has nothing of what its parent holds, and is a client of its own."""
    lock = ReentrantLock(url, "name", 30, engine=kind)
    own, given = ReentrantLock(url, "child's", 30, engine=kind), ReentrantLock(url, "given", 30, engine=kind)
    lock.acquire()
    lock.acquire()
    before = raw(url, "HGETALL", "name")

    def cycle(token: str | None = None) -> tuple[str, str]:
        lock = given if token else own
        lock.acquire(token=token)
        lease = lock.lease
        assert lease is not None
        with lock:
            assert lock.hold_count == 2
            assert lock.owned()
        lock.release()
        return lease.token.decode(), lease.latch.decode()

    def child() -> list[tuple[str, str]]:
        assert (lock.held, lock.hold_count, lock.left(), lock.owned()) == (False, 0, 0.0, False)
        for verb in (lock.release, lock.reacquire, lambda: lock.extend(1)):
            with pytest.raises(LockNotOwned, match="parent") as caught:
                verb()
            assert type(caught.value) is LockNotOwned
        assert raw(url, "HGETALL", "name") == before
        assert lock.locked()
        for other in (lock, ReentrantLock(url, "name", 30, engine=kind)):
            assert other.acquire(blocking=False) is False
        assert raw(url, "HGETALL", "name") == before
        return [cycle("given"), cycle(), cycle()]

    before_fork = cycle()  # and its latch is still to be deleted
    childs = result(fork(child))
    assert lock.held
    assert lock.hold_count == 2
    assert lock.owned()
    assert raw(url, "HGETALL", "name") == before
    parents = [cycle("given"), cycle(), before_fork]
    lock.release()
    lock.release()
    return {"childs": childs, "parents": parents}


def test_a_fork_while_it_is_held(spot: Spot, monitor: Monitor) -> None:
    found = run("fork_while_holding", url=spot.node.url, kind=spot.kind)
    owners = {side: [owner for owner, _ in found[side][1:]] for side in ("childs", "parents")}
    (childs,), (parents,) = ({owner.partition(":")[0] for owner in owners[side]} for side in owners)
    assert childs != parents
    for side, client in (("childs", childs), ("parents", parents)):
        assert {latch.rpartition(":")[2][:12] for _, latch in found[side]} == {client[-12:]}
    latches = [latch for side in found.values() for _, latch in side]
    assert len(set(latches)) == len(latches) == 6
    assert spot.locks() == []
    deleted = [words[1] for words in monitor.seen() if words[0] == "DEL"]
    assert len(set(deleted)) == len(deleted)  # what the parent had posted is not the child's to send


def fork_and_take_over(url: str, kind: str) -> dict[str, Any]:
    """The child takes the lock with the very object, once the parent has given it back."""
    lock = ReentrantLock(url, "name", 30, 0.005, engine=kind)
    lock.acquire()

    def child() -> int:
        with lock, lock:
            return lock.hold_count

    started = fork(child)
    assert lock.acquire()
    lock.release()
    lock.release()
    return {"count": result(started)}


def test_a_child_takes_it_when_its_parent_gave_it_back(spot: Spot) -> None:
    assert run("fork_and_take_over", url=spot.node.url, kind=spot.kind) == {"count": 2}
    assert spot.locks() == []


if __name__ == "__main__":
    main(globals())
