"""Lock and RedLock as a program with threads uses them; after each verb the servers themselves are read."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import redis
import redis.lock

import redbolt
import redbolt.retry
from redbolt import LockError, LockLost, LockNotOwned, LockTimeout, NodesUnavailable, ReleaseUnconfirmed
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import paused
from tests.kit.proxy import FaultProxy
from tests.kit.resp import NIL, OK, reply
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, handshake

T = TypeVar("T")

E = 0.15 * SLACK
"""How late a thread may be scheduled."""


@dataclass
class Place:
    """Where a lock lives: on one server, or on five."""

    nodes: Sequence[LocalNode]
    kind: str

    def lock(self, name: str | bytes = "name", timeout: float | None = 10, **options: Any) -> redbolt.Lock:
        """A lock of this place; every call makes another object."""
        if len(self.nodes) == 1:
            return redbolt.Lock(self.nodes[0].url, name, timeout, engine=self.kind, **options)
        urls = [node.url for node in self.nodes]
        return redbolt.RedLock(urls, name, timeout, engine=self.kind, **options)

    def ask(self, *argv: str | bytes | int) -> list[Any]:
        """What each server answers to a command."""
        return [raw(node, *argv) for node in self.nodes]

    def all(self, value: object, *argv: str | bytes | int) -> None:
        """Check that each server answers this to a command.

        A RedLock goes on when a quorum has answered, so the others may be late.
        """
        eventually(
            lambda: self.ask(*argv) == [value] * len(self.nodes), 1, f"all answer {value!r} to {argv!r}"
        )

    def refusals(self) -> int:
        """How many waiting acquires were refused since the last reset; each asks for the type once. One in a
        line with the holder does it only after a moment.
        """
        return int(raw(self.nodes[0], "INFO", "commandstats").get("cmdstat_type", {}).get("calls", 0))

    def key_is(self, value: bytes | None, key: str = "name") -> None:
        """Check the value of the key on all servers."""
        self.all(value, "GET", key)

    def token(self, lock: redbolt.Lock) -> bytes:
        """The token of the lock's lease, which all servers have."""
        assert lock.lease is not None
        self.key_is(lock.lease.token, lock.lease.key.decode())
        return lock.lease.token

    def ttl_is(self, least: float, most: float, key: str = "name") -> None:
        """Check the remaining life of the key in seconds, on all servers."""

        def check() -> bool:
            ttls = self.ask("PTTL", key)
            assert all(least * 1000 <= ttl <= most * 1000 for ttl in ttls), f"{ttls} ms"
            return True

        eventually(check, 1, f"the key lives on for {least} to {most} s")


@pytest.fixture(params=["Lock", "RedLock"])
def place(request: pytest.FixtureRequest, kind: str, valkeys: LocalNodes) -> Place:
    """Each class of lock in turn, on Valkey."""
    return Place(list(valkeys)[: 1 if request.param == "Lock" else 5], kind)


@pytest.fixture(params=["Lock", "RedLock"])
def any_place(request: pytest.FixtureRequest, kind: str, nodes: LocalNodes) -> Place:
    """Each class of lock in turn, on each kind of server."""
    return Place(list(nodes)[: 1 if request.param == "Lock" else 5], kind)


@pytest.fixture
def five(kind: str, valkeys: LocalNodes) -> Place:
    """Five servers, for what only a RedLock has."""
    return Place(list(valkeys), kind)


def elsewhere(call: Callable[[], T]) -> T:
    """Call it in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10 * SLACK)


def repeated(verb: Callable[[], object]) -> None:
    """Call it until the nodes are there again; a reconnect takes its time."""

    def done() -> bool:
        try:
            verb()
        except (NodesUnavailable, ReleaseUnconfirmed) as error:
            raise AssertionError(error) from error
        return True

    eventually(done, 2, "a quorum answers again")


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Another thread, to have something going on meanwhile."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def agreeable(argv: Argv) -> bytes | None:
    """A node that grants and confirms everything."""
    return {b"SET": OK, b"DELIFEQ": reply(1), b"EXISTS": reply(1)}.get(argv[0]) or handshake(argv)


# ---- acquire and release ----


def test_acquire_writes_one_random_token_with_the_lease_and_release_removes_it(any_place: Place) -> None:
    lock = any_place.lock(timeout=5)
    assert lock.acquire() is True
    token = any_place.token(lock)
    assert len(bytes.fromhex(token.decode())) == 16
    any_place.ttl_is(4.5, 5)
    assert lock.held
    lock.release()
    any_place.key_is(None)
    assert not lock.held


def test_every_acquire_has_another_token(place: Place) -> None:
    lock = place.lock()
    seen = set()
    for _ in range(10):
        with lock:
            seen.add(place.token(lock))
    assert len(seen) == 10


def test_the_key_is_the_prefix_and_the_name(place: Place) -> None:
    with place.lock("orders", prefix="locks:"):
        place.all(1, "EXISTS", "locks:orders")
        place.all(1, "DBSIZE")
    place.all(0, "DBSIZE")


def test_a_lock_without_timeout_has_a_lease_of_thirty_seconds(place: Place) -> None:
    with place.lock(timeout=None) as lock:
        place.ttl_is(29.5, 30)
        assert 29.2 < lock.left() <= 30 * 0.99 - 0.002


@pytest.mark.parametrize(
    ("seconds", "ms"), [(0.7, 700), (0.1 + 0.2, 300), (1.0001, 1001), (0.2001, 201), (2, 2000), (0.29, 290)]
)
def test_durations_are_rounded_up_to_whole_milliseconds(kind: str, seconds: float, ms: int) -> None:
    with ScriptedNode(answer=agreeable) as node:
        lock = redbolt.Lock(node.url, "name", seconds, engine=kind)
        lock.acquire()
        lock.extend(seconds, replace_ttl=True)
        sent = [one.argv for one in node.received("SET")]
        lock.release()
    assert [argv[-1] for argv in sent] == [b"%d" % ms] * 2


def test_the_key_never_lacks_an_expiry(kind: str, node: LocalNode) -> None:
    stop = threading.Event()

    def watch() -> set[bool]:
        seen = set()
        with redis.Redis.from_url(node.url) as client:
            while not stop.is_set():
                ttl = client.pttl("name")
                assert ttl != -1
                seen.add(ttl > 0)
        return seen

    lock = redbolt.Lock(node.url, "name", 1, engine=kind)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for _ in range(200):
            with lock:
                lock.extend(1)
                lock.reacquire()
        stop.set()
        assert watching.result(5) == {True, False}  # it has looked while the key was there, and while not


def test_a_second_acquire_by_the_holder_is_an_error_at_once(place: Place) -> None:
    with place.lock() as lock:
        token = place.token(lock)
        started = time.monotonic()
        with pytest.raises(LockError, match="held by this caller already") as caught:
            lock.acquire()
        assert time.monotonic() - started < E
        assert type(caught.value) is LockError
        assert place.token(lock) == token
        assert lock.held
    place.key_is(None)


def test_a_second_object_is_refused_and_takes_nothing_away(place: Place) -> None:
    with place.lock() as lock:
        token = place.token(lock)
        other = place.lock()
        assert other.acquire(blocking=False) is False
        assert not other.held
        assert other.lease is None
        place.key_is(token)


def test_an_acquire_by_the_last_holder_after_the_lease_ran_out(
    place: Place, clock: Callable[[float], None]
) -> None:
    lock = place.lock(timeout=5)
    lock.acquire()
    place.token(lock)
    clock(5)
    assert (
        lock.acquire(blocking=False) is False
    )  # the servers' clocks have not moved, so the key is still there
    place.ask("DEL", "name")
    assert lock.acquire(blocking=False) is True
    assert 4 < lock.left() < 5
    lock.release()
    place.key_is(None)


def test_a_waiting_acquire_gets_the_lock_when_it_is_released(
    place: Place, background: ThreadPoolExecutor
) -> None:
    holder, waiter = place.lock(), place.lock(sleep=0.01)
    holder.acquire()
    place.ask("CONFIG", "RESETSTAT")

    def cycle() -> bool:
        with waiter:
            return waiter.held

    waiting = background.submit(cycle)
    eventually(lambda: place.refusals(), what="it was refused once")
    assert not waiting.done()
    holder.release()
    assert waiting.result(2 * SLACK) is True


def test_a_waiting_acquire_gets_the_lock_when_the_lease_of_a_dead_holder_ends(place: Place) -> None:
    started = time.monotonic()
    place.lock(timeout=0.15).acquire()
    with place.lock(sleep=0.02, blocking_timeout=5):
        assert 0.15 <= time.monotonic() - started < 0.2 + E


# ---- the arguments of acquire, and of the constructor ----


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"blocking": False}, {}),
        ({}, {"blocking": False}),
        ({"blocking_timeout": 0}, {}),
        ({}, {"blocking_timeout": 0}),
        ({"blocking": False, "blocking_timeout": 5}, {}),
    ],
)
def test_an_acquire_that_does_not_wait(
    kind: str, valkey: LocalNode, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    place = Place([valkey], kind)
    with place.lock():
        started = time.monotonic()
        assert place.lock(**options).acquire(**arguments) is False
        assert time.monotonic() - started < E


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"blocking_timeout": 0.1}, {}),
        ({}, {"blocking_timeout": 0.1}),
        ({"blocking_timeout": 5}, {"blocking_timeout": 0.1}),
        ({"blocking": False}, {"blocking": True, "blocking_timeout": 0.1}),
        ({"blocking": False, "blocking_timeout": 0.1}, {"blocking": True}),
    ],
)
def test_an_acquire_that_waits_for_a_while(
    kind: str, valkey: LocalNode, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    place = Place([valkey], kind)
    with place.lock():
        started = time.monotonic()
        assert place.lock(sleep=0.03, **options).acquire(**arguments) is False
        assert 0.1 <= time.monotonic() - started < 0.1 + E


def test_sleep_is_the_longest_pause_between_tries(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be told of a release; each pause is drawn anew, and here as long as it can be."""
    monkeypatch.setattr(redbolt.retry, "_random", SimpleNamespace(uniform=lambda low, high: high))
    with ScriptedNode(answer=lambda argv: NIL if argv[0] == b"SET" else b"+string\r\n") as node:
        lock = redbolt.Lock(node.url, "name", sleep=30, engine=kind, waiting="polling")
        assert lock.acquire(sleep=0.05, blocking_timeout=0.22) is False
        tries = [one.at for one in node.received("SET")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert 4 <= len(tries) <= 6
    assert min(gaps[:-1]) >= 0.049  # the last comes just before the end, whenever that is


def test_a_token_of_the_callers_own(any_place: Place) -> None:
    lock = any_place.lock()
    for token in (
        "mine",
        b"mine",
        "ключ 🔑",
        b"\x00\r\n\xff",
    ):  # the second: a token used again after its release
        assert lock.acquire(token=token) is True
        assert any_place.token(lock) == (token.encode() if isinstance(token, str) else token)
        assert lock.owned()
        assert lock.extend(1)
        lock.release()
        any_place.key_is(None)


def test_a_key_that_already_holds_the_callers_token_is_taken(kind: str, valkey: LocalNode) -> None:
    place = Place([valkey], kind)
    raw(valkey, "SET", "name", "mine", "PX", 60_000)
    assert place.lock().acquire(blocking=False, token="mine") is False
    place.key_is(b"mine")
    place.ttl_is(50, 60)


def test_redis_pys_lock_and_this_one_exclude_each_other(kind: str, node: LocalNode) -> None:
    ours = redbolt.Lock(node.url, "name", 10, engine=kind)
    with redis.Redis.from_url(node.url) as client:
        theirs = redis.lock.Lock(client, "name", timeout=10)
        with ours:
            assert theirs.acquire(blocking=False) is False
            assert theirs.locked()
        assert theirs.acquire(blocking=False) is True
        assert ours.acquire(blocking=False) is False
        assert ours.locked()
        theirs.release()
        assert ours.acquire(blocking=False) is True
        ours.release()


# ---- what a lock knows by itself ----


def test_before_the_first_acquire_nothing_is_held(kind: str) -> None:
    with ScriptedNode() as node:
        lock = redbolt.Lock(node.url, "name", engine=kind)
        assert not lock.held
        assert lock.left() == 0.0
        assert lock.lease is None
        assert lock.owned() is False
        with pytest.raises(LockNotOwned, match="not held by this caller"):
            lock.release()
        with pytest.raises(LockNotOwned, match="not held by this caller"):
            lock.extend(1)
        with pytest.raises(LockNotOwned, match="not held by this caller"):
            lock.reacquire()
        assert node.peers == []  # not even a connection


def test_validity_ends_before_the_key_does(place: Place, clock: Callable[[float], None]) -> None:
    lock = place.lock(timeout=10)
    lock.acquire()
    token = place.token(lock)
    assert lock.lease is not None
    assert 9.5 < lock.left() <= 10 - 0.1 - 0.002
    clock(9.7 - 0.002)
    assert lock.held
    assert 0 < lock.left() <= 0.2
    clock(0.2)
    assert not lock.held
    assert lock.left() == 0.0
    assert not lock.lease.held
    assert lock.lease.left() == 0.0
    place.key_is(token)
    lock.release()
    place.key_is(None)


def test_held_and_left_ask_nobody(place: Place) -> None:
    lock = place.lock()
    lock.acquire()
    for node in place.nodes:
        node.kill()
    started = time.monotonic()
    for _ in range(1000):
        assert lock.held
        assert lock.left() > 9
    assert time.monotonic() - started < E


def test_the_lease_tells_its_facts(place: Place) -> None:
    with place.lock("orders", timeout=10, prefix="p:") as lock:
        lease = lock.lease
        assert isinstance(lease, redbolt.Lease)
        assert lease.key == b"p:orders"
        assert lease.length_ms == 10_000
        assert place.token(lock) == lease.token
        assert lease.held
        assert lease.token.decode() not in repr(lease)
    assert lock.lease is None
    assert not lease.held


def test_locked_asks_whether_anybody_has_it(any_place: Place) -> None:
    lock, other = any_place.lock(), any_place.lock()
    assert lock.locked() is False
    lock.acquire()
    assert lock.locked() is True
    assert other.locked() is True
    lock.release()
    assert other.locked() is False


def test_owned_asks_whether_the_servers_still_have_our_token(any_place: Place) -> None:
    lock = any_place.lock()
    assert lock.owned() is False
    lock.acquire()
    token = any_place.token(lock)
    assert lock.owned() is True
    assert any_place.lock().owned() is False
    for foreign in (token + b"x", token[:-1], b"", b"x" * 100_000):  # nearly ours, and far too long
        any_place.ask("SET", "name", foreign)
        assert lock.owned() is False
    any_place.ask("DEL", "name")
    assert lock.owned() is False
    any_place.ask("LPUSH", "name", "x")
    assert lock.owned() is False


def test_owned_is_false_after_the_end_of_validity(place: Place, clock: Callable[[float], None]) -> None:
    lock = place.lock()
    lock.acquire()
    clock(10)
    assert lock.owned() is False


def test_a_repr_names_the_lock_and_its_nodes(place: Place) -> None:
    text = repr(place.lock("a name"))
    assert "a name" in text
    for node in place.nodes:
        assert f"127.0.0.1:{node.port}" in text


# ---- release ----


def test_a_release_of_a_key_that_is_gone_says_lost(any_place: Place) -> None:
    lock = any_place.lock()
    lock.acquire()
    any_place.token(lock)
    any_place.ask("DEL", "name")
    with pytest.raises(LockLost):
        lock.release()
    assert not lock.held
    with pytest.raises(LockNotOwned) as caught:
        lock.release()
    assert type(caught.value) is LockNotOwned  # that lease is over and known to be


def test_a_release_leaves_a_foreign_token_alone(any_place: Place) -> None:
    lock = any_place.lock()
    lock.acquire()
    any_place.token(lock)
    any_place.ask("SET", "name", "somebody else's", "PX", 60_000)
    with pytest.raises(LockLost):
        lock.release()
    any_place.key_is(b"somebody else's")
    any_place.ttl_is(50, 60)


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_an_unconfirmed_release_claims_nothing_and_can_be_repeated(place: Place, how: str) -> None:
    lock = place.lock(node_timeout=0.1)
    lock.acquire()
    for node in place.nodes:
        getattr(node, how)()
    started = time.monotonic()
    with pytest.raises(ReleaseUnconfirmed, match="can be tried again") as caught:
        lock.release()
    assert time.monotonic() - started < 0.1 + E
    assert set(caught.value.causes) == {f"127.0.0.1:{node.port}" for node in place.nodes}
    assert not lock.held
    assert lock.left() == 0.0
    for node in place.nodes:
        if how == "kill":
            node.start()
        else:
            node.resume()
    repeated(lock.release)
    place.key_is(None)


def test_an_acquire_after_an_unconfirmed_release(place: Place) -> None:
    lock = place.lock(node_timeout=0.05)
    lock.acquire()
    with paused(*place.nodes):
        with pytest.raises(ReleaseUnconfirmed):
            lock.release()
    assert lock.acquire(sleep=0.01, blocking_timeout=2 * SLACK) is True
    assert lock.owned()
    lock.release()
    place.key_is(None)


# ---- extend and reacquire ----


def test_extend_adds_to_what_is_left(any_place: Place, clock: Callable[[float], None]) -> None:
    lock = any_place.lock(timeout=10)
    lock.acquire()
    token = any_place.token(lock)
    clock(4)
    assert lock.extend(5) is True
    any_place.ttl_is(10.5, 11.001)
    assert 10.5 < lock.left() <= 11 * 0.99 - 0.001
    assert any_place.token(lock) == token
    assert lock.lease is not None
    assert 10_900 < lock.lease.length_ms <= 11_001


def test_extend_can_set_the_remaining_time(any_place: Place) -> None:
    with any_place.lock(timeout=10) as lock:
        for seconds in (20, 3):  # longer, and shorter
            assert lock.extend(seconds, replace_ttl=True) is True
            any_place.ttl_is(seconds * 0.9, seconds)
            assert seconds * 0.9 < lock.left() <= seconds * 0.99 - 0.002


def test_reacquire_gives_the_full_lease_again(any_place: Place, clock: Callable[[float], None]) -> None:
    with any_place.lock(timeout=10) as lock:
        token = any_place.token(lock)
        any_place.ask("PEXPIRE", "name", 4_000)
        clock(6)
        assert lock.left() < 4
        assert lock.reacquire() is True
        any_place.ttl_is(9.5, 10)
        assert 9.5 < lock.left() <= 9.9
        assert any_place.token(lock) == token


def test_nothing_revives_a_lease_that_ran_out(place: Place, clock: Callable[[float], None]) -> None:
    lock = place.lock(timeout=2)
    lock.acquire()
    place.token(lock)
    clock(2)  # by our clock alone: the servers would still agree
    for verb in (lock.reacquire, lambda: lock.extend(60), lambda: lock.extend(60, replace_ttl=True)):
        with pytest.raises(LockLost):
            verb()
        assert not lock.held
        assert lock.left() == 0.0
    place.ttl_is(-0.002, 2)


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_a_lease_that_the_servers_have_lost_cannot_be_lengthened(any_place: Place, verb: str) -> None:
    for value in (None, b"somebody else's"):
        lock = any_place.lock()
        lock.acquire()
        any_place.token(lock)
        any_place.ask("DEL", "name")
        if value:
            any_place.ask("SET", "name", value, "PX", 1000)
        with pytest.raises(LockLost):
            lock.extend(60) if verb == "extend" else lock.reacquire()
        assert not lock.held
        assert lock.left() == 0.0
        any_place.key_is(value)
        any_place.ttl_is(-0.002, 1)


def test_an_extend_without_a_quorum_leaves_the_lease_as_it_was(place: Place) -> None:
    lock = place.lock(timeout=10, node_timeout=0.1)
    lock.acquire()
    for node in place.nodes:
        node.kill()
    before = lock.left()
    with pytest.raises(NodesUnavailable, match="cannot extend"):
        lock.extend(20)
    assert lock.held
    assert before - 0.1 - E < lock.left() <= before
    with pytest.raises(NodesUnavailable):
        lock.extend(3, replace_ttl=True)  # some node may have done it
    assert 2 < lock.left() <= 3
    with pytest.raises(NodesUnavailable):
        lock.extend(3)
    assert 2 < lock.left() <= 3


@pytest.mark.parametrize(("seconds", "least", "most"), [(2, 1.5, 2), (60, 9, 10)])
def test_while_an_extend_runs_the_shorter_validity_counts(
    kind: str, valkey: LocalNode, background: ThreadPoolExecutor, seconds: float, least: float, most: float
) -> None:
    with FaultProxy(valkey) as proxy:
        lock = redbolt.Lock(proxy.url, "name", 10, thread_local=False, engine=kind)
        lock.acquire()
        up = proxy.bytes_up
        proxy.hold("down")
        extending = background.submit(lock.extend, seconds, True)
        eventually(lambda: proxy.bytes_up > up, what="the command is under way")
        assert least < lock.left() <= most
        proxy.heal()
        assert extending.result(2 * SLACK) is True
        assert seconds * 0.9 < lock.left() <= seconds
        lock.release()
        redbolt.close()


def test_extends_add_up(place: Place) -> None:
    with place.lock(timeout=2) as lock:
        for _ in range(5):
            lock.extend(2)
        place.ttl_is(11.5, 12.005)


# ---- with ----


def test_with_holds_the_lock_for_its_block(place: Place) -> None:
    lock = place.lock()
    with lock as entered:
        assert entered is lock
        assert lock.held
        place.token(lock)
    assert not lock.held
    place.key_is(None)


def test_the_block_does_not_run_unless_held(place: Place) -> None:
    with place.lock() as lock:
        token = place.token(lock)
        with pytest.raises(LockTimeout, match="somebody else holds it") as caught:
            with place.lock(blocking_timeout=0.05):
                pytest.fail("this block must not run")
        place.key_is(token)
    assert caught.value.lock_name == "name"


def test_the_block_does_not_run_without_a_quorum(place: Place) -> None:
    for node in place.nodes:
        node.kill()
    with pytest.raises(NodesUnavailable):
        with place.lock(blocking=False):
            pytest.fail("this block must not run")


def test_an_exception_in_the_block_comes_out_and_the_lock_is_released(place: Place) -> None:
    lock = place.lock()
    error = KeyError("the body's own")
    with pytest.raises(KeyError) as caught:
        with lock:
            raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    place.key_is(None)


@pytest.mark.parametrize("raise_on_release_error", [True, False])
def test_the_exception_of_the_block_wins_over_that_of_the_release(
    place: Place, raise_on_release_error: bool
) -> None:
    with pytest.raises(KeyError, match="own") as caught:
        with place.lock(raise_on_release_error=raise_on_release_error) as lock:
            place.token(lock)
            place.ask("DEL", "name")
            raise KeyError("the body's own")
    (note,) = caught.value.__notes__
    assert "not released cleanly" in note
    assert "lost" in note


def test_a_block_whose_lease_ended_says_so(place: Place, clock: Callable[[float], None]) -> None:
    lock = place.lock(timeout=5)
    with pytest.raises(LockLost, match="was lost while its block ran: it ran out"):
        with lock:
            place.token(lock)
            clock(5)  # by our clock alone: the key is still there, but nothing warranted it
    place.key_is(None)
    with pytest.raises(LockLost, match="gone from the servers"):
        with lock:
            place.token(lock)
            place.ask("DEL", "name")


def test_a_release_error_can_be_logged_instead(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "redbolt"):
        with place.lock(raise_on_release_error=False):
            pass
        assert caplog.records == []
        with place.lock(raise_on_release_error=False) as lock:
            place.token(lock)
            place.ask("DEL", "name")
    (record,) = caplog.records
    assert record.name == "redbolt"
    assert "'name'" in record.getMessage()
    assert "lost" in record.getMessage()


def test_a_second_with_by_the_holder_does_not_release_the_first(place: Place) -> None:
    with place.lock() as lock:
        token = place.token(lock)
        with pytest.raises(LockError, match="held by this caller already"):
            with lock:
                pytest.fail("this block must not run")
        assert lock.held
        assert place.token(lock) == token


def test_a_block_that_releases_the_lock_itself(place: Place) -> None:
    with pytest.raises(LockNotOwned):
        with place.lock() as lock:
            lock.release()
    place.key_is(None)


# ---- threads ----


def test_a_lease_belongs_to_its_thread(place: Place) -> None:
    lock = place.lock()
    lock.acquire()
    assert elsewhere(lambda: lock.held) is False
    assert elsewhere(lambda: lock.left()) == 0.0
    assert elsewhere(lambda: lock.lease) is None
    assert elsewhere(lock.owned) is False
    assert elsewhere(lock.locked) is True
    for verb in (lock.release, lock.reacquire, lambda: lock.extend(1)):
        with pytest.raises(LockNotOwned) as caught:
            elsewhere(verb)
        assert type(caught.value) is LockNotOwned
    assert elsewhere(lambda: lock.acquire(blocking=False)) is False
    assert lock.owned()
    lock.release()

    def whole_cycle() -> bool:
        with lock:
            return lock.held

    assert elsewhere(whole_cycle) is True


@pytest.mark.parametrize("thread_local", [True, False])
def test_a_new_thread_with_the_id_of_a_dead_one_holds_nothing(
    kind: str, valkey: LocalNode, thread_local: bool
) -> None:
    lock = Place([valkey], kind).lock(thread_local=thread_local)
    seen: list[tuple[int, bool]] = []

    def body() -> None:
        seen.append((threading.get_ident(), lock.acquire(blocking=False)))  # no LockError, either

    while len(seen) < 2 or (seen[-1][0] != seen[0][0] and len(seen) < 100):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert [got for _, got in seen] == [True] + [False] * (len(seen) - 1)


def test_without_thread_local_any_thread_may_go_on(place: Place) -> None:
    lock = place.lock(thread_local=False)
    lock.acquire()
    assert elsewhere(lambda: lock.held) is True
    assert elsewhere(lock.owned) is True
    assert elsewhere(lambda: lock.extend(20)) is True
    assert lock.left() > 25
    assert (
        elsewhere(lambda: lock.acquire(blocking=False)) is False
    )  # that thread is not the one that holds it
    assert lock.owned()
    elsewhere(lock.release)
    assert not lock.held
    place.key_is(None)


def test_without_thread_local_a_thread_may_wait_for_another(
    place: Place, background: ThreadPoolExecutor
) -> None:
    lock = place.lock(thread_local=False, sleep=0.01)
    lock.acquire()
    first = lock.lease
    place.ask("CONFIG", "RESETSTAT")
    waiting = background.submit(lock.acquire)
    eventually(lambda: place.refusals(), what="it was refused once")
    lock.release()
    assert waiting.result(2 * SLACK) is True
    assert lock.lease is not first
    lock.release()
    place.key_is(None)


@pytest.mark.parametrize("verb", ["acquire", "with"])
def test_without_thread_local_a_failed_acquire_takes_nothing_from_another_thread(
    kind: str, valkey: LocalNode, background: ThreadPoolExecutor, verb: str
) -> None:
    place = Place([valkey], kind)
    retry = redbolt.Retry(delay=60)  # so it comes too late, and nobody hands it the lock
    lock = place.lock(
        thread_local=False, retry=retry, node_timeout=0.05, local_queue=False, waiting="polling"
    )
    lock.acquire()
    raw(valkey, "CONFIG", "RESETSTAT")

    def wait() -> None:
        if verb == "acquire":
            assert lock.acquire(blocking_timeout=0.2) is False
        else:
            lock.blocking_timeout = 0.2
            with lock:
                pytest.fail("this block must not run")

    waiting = background.submit(wait)
    eventually(lambda: place.refusals(), what="it was refused once")
    lock.release()
    lock.acquire(blocking=False)  # now its lease is another than when the other thread began to wait
    token = place.token(lock)
    if verb == "acquire":
        waiting.result(2 * SLACK)
    else:
        with pytest.raises(LockTimeout):
            waiting.result(2 * SLACK)
    assert lock.owned()
    place.key_is(token)
    lock.release()


@pytest.mark.parametrize("again", [True, False])
def test_without_thread_local_an_error_in_acquire_takes_nothing_from_another_thread(
    kind: str, valkey: LocalNode, background: ThreadPoolExecutor, again: bool
) -> None:
    place = Place([valkey], kind)
    retry = redbolt.Retry(delay=0.4 * SLACK)
    lock = place.lock(
        thread_local=False, retry=retry, node_timeout=0.05, local_queue=False, waiting="polling"
    )
    lock.acquire()
    raw(valkey, "CONFIG", "RESETSTAT")
    waiting = background.submit(lock.acquire, blocking_timeout=0.6 * SLACK)
    eventually(lambda: place.refusals(), what="it was refused once")
    lock.release()
    if again:
        lock.acquire(blocking=False)
    with paused(valkey):  # so its next tries fail
        with pytest.raises(NodesUnavailable):
            waiting.result(2 * SLACK)
    assert lock.held is again
    if again:
        repeated(lock.locked)
        assert lock.owned()
        lock.release()
    place.key_is(None)


# ---- many nodes ----


def test_a_quorum_of_the_configured_nodes_is_enough(five: Place) -> None:
    for node in five.nodes[:2]:
        node.kill()
    lock = five.lock()
    assert lock.acquire() is True
    assert lock.extend(5)
    assert lock.reacquire()
    assert lock.owned()
    assert lock.locked()
    lock.release()
    Place(five.nodes[2:], five.kind).key_is(None)


def test_less_than_a_quorum_is_not_enough(five: Place) -> None:
    for node in five.nodes[:3]:
        node.kill()
    lock = five.lock()
    with pytest.raises(NodesUnavailable) as caught:
        lock.acquire(blocking=False)
    assert not lock.held
    assert set(caught.value.causes) == {f"127.0.0.1:{node.port}" for node in five.nodes[:3]}
    Place(five.nodes[3:], five.kind).key_is(None)


@pytest.mark.parametrize(("dead", "granted"), [(1, True), (2, False)])
def test_a_quorum_above_the_majority(five: Place, dead: int, granted: bool) -> None:
    lock = five.lock(quorum=4)
    for node in five.nodes[:dead]:
        node.kill()
    if granted:
        assert lock.acquire() is True
        return
    with pytest.raises(NodesUnavailable, match="needs 4"):
        lock.acquire(blocking=False)


@pytest.mark.parametrize(("taken", "granted"), [(2, True), (3, False)])
def test_the_majority_decides_whether_it_is_taken(five: Place, taken: int, granted: bool) -> None:
    for node in five.nodes[:taken]:
        raw(node, "SET", "name", "somebody else's", "PX", 60_000)
    lock = five.lock()
    assert lock.locked() is not granted
    assert lock.acquire(blocking=False) is granted
    if granted:
        lock.release()
    Place(five.nodes[:taken], five.kind).key_is(b"somebody else's")
    Place(five.nodes[taken:], five.kind).key_is(None)


@pytest.mark.parametrize(("gone", "lost"), [(2, False), (3, True)])
def test_the_majority_decides_whether_it_is_lost(five: Place, gone: int, lost: bool) -> None:
    lock = five.lock()
    lock.acquire()
    five.token(lock)
    for node in five.nodes[:gone]:
        raw(node, "DEL", "name")
    assert lock.owned() is not lost
    if lost:
        with pytest.raises(LockLost):
            lock.extend(60)
        assert not lock.held
        five.key_is(None)  # the rest is taken back, too
    else:
        assert lock.extend(60)
        Place(five.nodes[:gone], five.kind).key_is(None)  # an extend puts no key back
        Place(five.nodes[gone:], five.kind).ttl_is(65, 70.1)
        lock.release()
        five.key_is(None)


def test_the_drift_factor_is_taken_off_the_validity(five: Place) -> None:
    lock = five.lock(timeout=10, clock_drift_factor=0.5)
    lock.acquire()
    assert 4.5 < lock.left() <= 5 - 0.002
    lock.extend(20, replace_ttl=True)
    assert 9.5 < lock.left() <= 10 - 0.002
    five.ttl_is(19, 20)


@pytest.mark.parametrize("limit", [0.03, 0.2])
def test_the_node_timeout_bounds_how_long_silent_nodes_are_waited_for(five: Place, limit: float) -> None:
    lock = five.lock(node_timeout=limit)
    with paused(*five.nodes[:3]):
        started = time.monotonic()
        with pytest.raises(NodesUnavailable, match=f"within {limit * 1000:.0f} ms"):
            lock.acquire(blocking=False)
        assert limit <= time.monotonic() - started < limit + E


def test_a_locks_node_timeout_is_by_default_its_clients_socket_timeout(kind: str, valkey: LocalNode) -> None:
    lock = redbolt.Lock(f"{valkey.url}?socket_timeout=0.1", "name", engine=kind)
    with paused(valkey):
        started = time.monotonic()
        with pytest.raises(NodesUnavailable, match="within 100 ms"):
            lock.acquire(blocking=False)
        assert 0.1 <= time.monotonic() - started < 0.1 + E


def test_a_waiting_acquire_without_a_quorum_goes_on_until_its_deadline(place: Place) -> None:
    for node in place.nodes:
        node.kill()
    started = time.monotonic()
    with pytest.raises(NodesUnavailable):
        place.lock(sleep=0.02).acquire(blocking_timeout=0.15)
    assert 0.15 <= time.monotonic() - started < 0.15 + E


def test_an_endless_acquire_without_a_quorum_gives_up_after_one_lease_length(place: Place) -> None:
    for node in place.nodes:
        node.kill()
    started = time.monotonic()
    with pytest.raises(NodesUnavailable):
        place.lock(timeout=0.1, sleep=0.02).acquire()
    assert 0.1 <= time.monotonic() - started < 0.15 + E


def test_a_waiting_acquire_gets_the_lock_when_the_nodes_come_back(
    place: Place, background: ThreadPoolExecutor
) -> None:
    for node in place.nodes:
        node.kill()
    lock = place.lock(thread_local=False, sleep=0.02)
    waiting = background.submit(lock.acquire)
    for node in place.nodes:
        node.start()
    assert waiting.result(3 * SLACK) is True
    assert lock.owned()
    lock.release()


def test_locks_of_many_names_do_not_meet(place: Place) -> None:
    locks = [place.lock(f"name {i}") for i in range(20)]
    assert all(lock.acquire(blocking=False) for lock in locks)
    place.all(20, "DBSIZE")
    for lock in locks:
        lock.release()
    place.all(0, "DBSIZE")
