"""ReentrantLock: the layout that Redisson's RLock has on the server, and what a holder may do again."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pytest

import redbolt
from redbolt import LockLost, LockNotOwned, LockTimeout, ReentrantLock, Retry
from redbolt._engine import MAX_KEY, Engine
from redbolt.local import LocalNode
from tests.kit.clients import SLACK, Client, HasAddress, eventually, raw
from tests.kit.monitor import Monitor
from tests.kit.resp import parse_command, reply_length
from tests.kit.scripted import ScriptedNode

T = TypeVar("T")

E = 0.5 * SLACK
"""How late a thread may be scheduled."""
OWNER = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}:[1-9][0-9]*")


class Ear:
    """Hears what is published on a channel."""

    def __init__(self, node: HasAddress, channel: str) -> None:
        self._node, self._channel = node, channel
        self._client = Client(node)
        said = self._client.ask("SUBSCRIBE", channel)
        self._buffer = said[reply_length(said) :]  # a message may have come already

    def heard(self) -> list[bytes]:
        """The messages since the last look; what was published before it is among them."""
        raw(self._node, "PUBLISH", self._channel, "end of this look")
        messages: list[bytes] = []
        while True:
            found = parse_command(self._buffer)
            if found is None:
                more = self._client.read()
                assert more, "the server has hung up"
                self._buffer += more
                continue
            (_, channel, message), length = found
            self._buffer = self._buffer[length:]
            assert channel == self._channel.encode()
            if message == b"end of this look":
                return messages
            messages.append(message)

    def close(self) -> None:
        self._client.__exit__()


class Unsent:
    """An engine whose posted commands stay where they are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.posted: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def post(self, *words: Any) -> None:
        self.posted.append(words)


@dataclass
class Spot:
    """One server, seen by one kind of engine."""

    node: LocalNode
    kind: str

    def lock(self, name: str | bytes = "name", timeout: float | None = 10, **options: Any) -> ReentrantLock:
        """A lock; every call makes another object."""
        return ReentrantLock(self.node.url, name, timeout, engine=self.kind, **options)

    def stranger(
        self, name: str | bytes = "name", timeout: float | None = 10, **options: Any
    ) -> ReentrantLock:
        """A lock of another client of the same server."""
        url = self.node.url.replace("//", "//default@")  # the same user, but named
        return ReentrantLock(url, name, timeout, engine=self.kind, **options)

    def ask(self, *argv: str | bytes | int) -> Any:
        """What the server answers to a command."""
        return raw(self.node, *argv)

    def holders(self, name: str | bytes = "name") -> dict[bytes, bytes]:
        """The hash: counts by owner."""
        return cast(dict[bytes, bytes], raw(self.node, "HGETALL", name))

    def counts(self, name: str | bytes = "name") -> list[int]:
        """The counts of the owners."""
        return [int(count) for count in self.holders(name).values()]

    def lives(self, least: float, most: float, name: str | bytes = "name") -> None:
        """Check the remaining life of the key, in seconds."""
        assert least * 1000 <= raw(self.node, "PTTL", name) <= most * 1000

    def locks(self) -> list[bytes]:
        """The names of all keys but latches, which go a little later."""
        return [key for key in raw(self.node, "KEYS", "*") if not key.startswith(b"redisson_unlock_latch:")]

    def refusals(self) -> int:
        """How many waiting acquires were refused since the last reset; each asks for the type once."""
        return int(raw(self.node, "INFO", "commandstats").get("cmdstat_type", {}).get("calls", 0))


@pytest.fixture
def spot(kind: str, valkey: LocalNode) -> Spot:
    """On Valkey, for what does not depend on the server."""
    return Spot(valkey, kind)


@pytest.fixture
def any_spot(kind: str, node: LocalNode) -> Spot:
    """On each kind of server in turn."""
    return Spot(node, kind)


@pytest.fixture
def listen() -> Iterator[Callable[[HasAddress, str], Ear]]:
    """Listen to a channel of a server: ``listen(node, channel)``."""
    made: list[Ear] = []

    def make(node: HasAddress, channel: str) -> Ear:
        made.append(Ear(node, channel))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def ear(valkey: LocalNode, listen: Callable[[HasAddress, str], Ear]) -> Ear:
    """On the channel of the lock "name"."""
    return listen(valkey, "redisson_lock__channel:{name}")


@pytest.fixture
def monitor(valkey: LocalNode) -> Iterator[Monitor]:
    watching = Monitor(valkey)
    yield watching
    watching.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Another thread, to have something going on meanwhile."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def elsewhere(call: Callable[[], T]) -> T:
    """Call it in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10 * SLACK)


def owner_of(lock: ReentrantLock) -> bytes:
    """The owner under which this thread holds it."""
    assert lock.lease is not None
    return lock.lease.token


VERBS: dict[str, Callable[[ReentrantLock], object]] = {
    "release": lambda lock: lock.release(),
    "extend": lambda lock: lock.extend(1),
    "reacquire": lambda lock: lock.reacquire(),
}


# ---- the layout ----


def test_the_lock_is_a_hash_of_the_owner_and_its_count(any_spot: Spot) -> None:
    lock = any_spot.lock(timeout=5)
    assert lock.acquire() is True
    assert any_spot.ask("KEYS", "*") == [b"name"]
    assert any_spot.ask("TYPE", "name") == b"hash"
    ((owner, count),) = any_spot.holders().items()
    assert OWNER.fullmatch(owner)
    assert owner == owner_of(lock)
    assert count == b"1"
    any_spot.lives(3, 5)
    assert lock.acquire() is True
    assert any_spot.holders() == {owner: b"2"}
    lock.release()
    assert any_spot.holders() == {owner: b"1"}
    lock.release()
    assert any_spot.locks() == []


def test_the_owner_is_the_client_and_a_number_used_once(spot: Spot) -> None:
    seen = []
    for lock in (spot.lock(), spot.lock(), spot.lock("other")):
        with lock:
            seen.append(owner_of(lock))
    assert len({owner.partition(b":")[0] for owner in seen}) == 1
    assert len(set(seen)) == 3
    with spot.stranger() as lock:
        assert owner_of(lock).partition(b":")[0] != seen[0].partition(b":")[0]


def test_a_lock_without_timeout_has_a_lease_of_thirty_seconds(spot: Spot) -> None:
    with spot.lock(timeout=None) as lock:
        spot.lives(28, 30)
        assert 28 < lock.left() <= 30 * 0.99 - 0.002


@pytest.mark.parametrize(("seconds", "ms"), [(0.7, b"700"), (1.0001, b"1001"), (2, b"2000")])
def test_durations_are_rounded_up_to_whole_milliseconds(kind: str, seconds: float, ms: bytes) -> None:
    with ScriptedNode(answer=lambda argv: b":1\r\n") as node:
        lock = ReentrantLock(node.url, "name", seconds, engine=kind)
        lock.acquire()
        lock.acquire()
        lock.extend(seconds, replace_ttl=True)
        lock.release()
        sent = [one.argv for one in node.received("EVALSHA")]
        lock.release()
        redbolt.close()
    assert [argv[2:5] for argv in sent] == [(b"1", b"name", sent[0][4])] * 4
    assert [argv[5:] for argv in sent] == [(ms,), (ms, b"2"), (ms, b"2"), (ms, b"1")]


NAMES = {
    "name": ("redisson_lock__channel:{name}", "redisson_unlock_latch:{name}:"),
    "{t}a": ("redisson_lock__channel:{t}a", "redisson_unlock_latch:{t}a:"),
    "x{y}z": ("redisson_lock__channel:x{y}z", "redisson_unlock_latch:x{y}z:"),
    "x{": ("redisson_lock__channel:x{", "redisson_unlock_latch:x{:"),
    "x}": ("redisson_lock__channel:{x}}", "redisson_unlock_latch:{x}}:"),
    "замо́к 🔒": ("redisson_lock__channel:{замо́к 🔒}", "redisson_unlock_latch:{замо́к 🔒}:"),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_its_key_channel_and_latch(
    spot: Spot, listen: Callable[[HasAddress, str], Ear], name: str
) -> None:
    channel, latch = NAMES[name]
    ear = listen(spot.node, channel)
    lock = spot.lock(name)
    unsent = lock._engine = Unsent(lock._engine)  # so the latch stays
    lock.acquire()
    assert spot.ask("KEYS", "*") == [name.encode()]
    lock.acquire()
    lock.release()
    assert ear.heard() == []
    assert spot.ask("KEYS", "*") == [name.encode()]
    lock.release()
    assert ear.heard() == [b"0"]
    (found,) = spot.ask("KEYS", "*")
    assert found.startswith(latch.encode())
    assert re.fullmatch(rb"[0-9a-f]{32}", found.removeprefix(latch.encode()))
    assert spot.ask("GET", found) == b"1"
    spot.lives(15, 20, found)
    assert [words[1:] for words in unsent.posted] == [(found, ())]


def test_the_latch_goes_with_the_next_command_or_soon_after(spot: Spot, monitor: Monitor) -> None:
    lock = spot.lock()
    for _ in range(5):
        with lock:
            pass
    assert spot.locks() == []
    eventually(lambda: spot.ask("DBSIZE") == 0, 2, "no latch is left")
    seen = monitor.seen()
    made = [words[1] for words in seen if words[0] == ".SET"]
    assert len(set(made)) == 5
    assert [words[1] for words in seen if words[0] == "DEL"] == made


def test_latches_are_not_used_twice(spot: Spot) -> None:
    lock = spot.lock()
    lock._engine = Unsent(lock._engine)
    for _ in range(5):
        with lock:
            pass
    with spot.stranger() as stranger:
        stranger._engine = Unsent(stranger._engine)
    assert spot.ask("DBSIZE") == 6


def test_what_it_runs_on_the_server(spot: Spot, monitor: Monitor) -> None:
    lock = spot.lock(timeout=5)
    lock._engine = Unsent(lock._engine)
    lock.acquire()
    owner = owner_of(lock).decode()
    lock.acquire()
    lock.extend(7, replace_ttl=True)
    lock.owned()
    lock.locked()
    lock.release()
    lock.release()
    lock.force_unlock()
    channel, latch = NAMES["name"]
    seen = [words for words in monitor.seen() if words[0] not in ("EVAL", "EVALSHA", "KEYS")]
    (found,) = spot.ask("KEYS", "*")
    assert found.startswith(latch.encode())
    assert seen == [
        (".EXISTS", "name"),
        (".HSET", "name", owner, "1"),
        (".PEXPIRE", "name", "5000"),
        (".HEXISTS", "name", owner),
        (".HSET", "name", owner, "2"),
        (".PEXPIRE", "name", "5000"),
        (".HEXISTS", "name", owner),
        (".HSET", "name", owner, "2"),
        (".PEXPIRE", "name", "7000"),
        ("HEXISTS", "name", owner),
        ("EXISTS", "name"),
        (".HEXISTS", "name", owner),
        (".HSET", "name", owner, "1"),
        (".PEXPIRE", "name", "5000"),
        (".HDEL", "name", owner),
        (".PUBLISH", channel, "0"),
        (".SET", found.decode(), "1", "PX", "20000"),
        (".HLEN", "name"),
    ]


def test_the_key_is_the_prefix_and_the_name(spot: Spot, listen: Callable[[HasAddress, str], Ear]) -> None:
    ear = listen(spot.node, "redisson_lock__channel:{locks:orders}")
    with spot.lock("orders", prefix="locks:") as lock:
        assert spot.ask("KEYS", "*") == [b"locks:orders"]
        with spot.lock("locks:orders"):  # the same
            assert lock.hold_count == 2
    assert ear.heard() == [b"0"]
    assert spot.locks() == []


@pytest.mark.parametrize("name", ["n" * 10, "{n" * 5])
def test_the_longest_name_leaves_room_for_its_latch(spot: Spot, name: str) -> None:
    room = MAX_KEY - len("redisson_unlock_latch::") - 32 - (0 if "{" in name else 2)
    prefix = "p" * (room - len(name))
    with spot.lock(name, prefix=prefix):
        assert spot.counts(prefix + name) == [1]
    assert spot.locks() == []
    with pytest.raises(ValueError, match="too long"):
        spot.lock(name, prefix=prefix + "p")


# ---- taking it again ----


def test_the_holder_takes_it_again_with_the_same_object(spot: Spot) -> None:
    lock = spot.lock()
    for count in (1, 2, 3):
        assert lock.acquire(blocking=False) is True
        assert lock.hold_count == count
        assert spot.counts() == [count]
        assert lock.held
    for count in (2, 1, 0):
        lock.release()
        assert lock.hold_count == count
        assert spot.counts() == ([count] if count else [])
        assert lock.held is (count > 0)
    with pytest.raises(LockNotOwned):
        lock.release()


def test_the_holder_takes_it_again_with_another_object(spot: Spot) -> None:
    first, second = spot.lock(), spot.lock()
    first.acquire()
    assert second.held  # this thread holds it, whichever object it asks
    second.acquire()
    assert (first.hold_count, second.hold_count) == (2, 2)
    assert spot.counts() == [2]
    assert owner_of(first) == owner_of(second)
    first.release()
    first.release()  # whichever object did what
    assert (first.hold_count, second.hold_count) == (0, 0)
    assert spot.locks() == []
    with pytest.raises(LockNotOwned):
        second.release()


def test_blocks_may_be_nested(spot: Spot, ear: Ear) -> None:
    outer, inner = spot.lock(), spot.lock()
    with outer as entered:
        assert entered is outer
        with inner:
            with outer:
                assert spot.counts() == [3]
            assert spot.counts() == [2]
        assert ear.heard() == []
        assert spot.counts() == [1]
        assert outer.hold_count == 1
    assert ear.heard() == [b"0"]
    assert spot.locks() == []


def test_an_exception_leaves_each_block_once(spot: Spot) -> None:
    lock = spot.lock()
    with lock:
        with pytest.raises(KeyError, match="own"):
            with lock:
                raise KeyError("the body's own")
        assert lock.hold_count == 1
        assert spot.counts() == [1]
    assert spot.locks() == []


@pytest.mark.parametrize(("first", "second"), [(10, 60), (60, 10)])
def test_each_change_of_the_count_begins_the_lease_anew(
    spot: Spot, first: float, second: float, clock: Callable[[float], None]
) -> None:
    """Its length is that of the object that made the change."""
    one, other = spot.lock(timeout=first), spot.lock(timeout=second)

    def lives(length: float) -> None:
        spot.lives(length - 4, length)
        assert length * 0.99 - 4 < one.left() <= length * 0.99 - 0.002
        assert one.left() == pytest.approx(other.left(), abs=0.5)

    one.acquire()
    lives(first)
    other.acquire()
    lives(second)
    spot.ask("PEXPIRE", "name", 3000)
    clock(5)
    one.acquire()
    lives(first)
    other.release()
    lives(second)
    spot.ask("PEXPIRE", "name", 3000)
    one.release()
    lives(first)
    one.release()
    assert spot.locks() == []


def test_other_threads_are_excluded(spot: Spot) -> None:
    lock = spot.lock()
    with lock:
        for other in (lock, spot.lock()):
            assert elsewhere(lambda other=other: other.hold_count) == 0  # type: ignore[misc]
            assert elsewhere(lambda other=other: other.held) is False  # type: ignore[misc]
            assert elsewhere(lambda other=other: other.lease) is None  # type: ignore[misc]
            assert elsewhere(lambda other=other: other.left()) == 0.0  # type: ignore[misc]
            assert elsewhere(other.owned) is False
            assert elsewhere(other.locked) is True
            assert elsewhere(lambda other=other: other.acquire(blocking=False)) is False  # type: ignore[misc]
        assert spot.holders() == {owner_of(lock): b"1"}

    def whole_cycle() -> int:
        with lock, lock:
            return lock.hold_count

    assert elsewhere(whole_cycle) == 2
    assert spot.locks() == []


def test_another_client_in_the_same_thread_is_excluded(spot: Spot) -> None:
    lock, stranger = spot.lock(), spot.stranger()
    for holder, other in ((lock, stranger), (stranger, lock)):
        with holder:
            assert not other.held
            assert other.hold_count == 0
            assert other.acquire(blocking=False) is False
            with pytest.raises(LockNotOwned):
                other.release()
            assert spot.holders() == {owner_of(holder): b"1"}


def test_the_two_engines_exclude_one_another(valkey: LocalNode) -> None:
    native, pure = (ReentrantLock(valkey.url, "name", 10, engine=kind) for kind in ("native", "pure"))
    for holder, other in ((native, pure), (pure, native)):
        with holder:
            assert other.acquire(blocking=False) is False
            assert other.hold_count == 0


def test_another_process_is_excluded(spot: Spot) -> None:
    program = f"""
import redbolt
lock = redbolt.ReentrantLock({spot.node.url!r}, "name", 10, engine={spot.kind!r})
print(lock.acquire(blocking=False), lock.locked(), lock.hold_count)
try:
    lock.release()
except redbolt.LockNotOwned:
    print("not owned")
"""
    with spot.lock() as lock:
        ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        assert ran.stdout.split("\n") == ["False True 0", "not owned", ""]
        assert spot.holders() == {owner_of(lock): b"1"}


def test_a_thread_that_ended_while_it_held_it(spot: Spot) -> None:
    """Nobody else can ever be taken for it, not even a thread with its id."""
    lock = spot.lock()
    seen: list[tuple[int, bool]] = []

    def body() -> None:
        seen.append((threading.get_ident(), lock.acquire(blocking=False)))

    while len(seen) < 2 or (seen[-1][0] != seen[0][0] and len(seen) < 100):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert [got for _, got in seen] == [True] + [False] * (len(seen) - 1)
    assert spot.counts() == [1]
    spot.ask("PEXPIRE", "name", 1)
    eventually(lambda: lock.acquire(blocking=False), 1, "its lease has ended")
    assert spot.holders() == {owner_of(lock): b"1"}
    lock.release()


# ---- giving it back ----


@pytest.mark.parametrize("verb", VERBS)
def test_whoever_does_not_hold_it_sends_nothing(kind: str, verb: str) -> None:
    with ScriptedNode() as node:
        lock = ReentrantLock(node.url, "name", engine=kind)
        with pytest.raises(LockNotOwned, match="not held by this caller") as caught:
            VERBS[verb](lock)
        assert type(caught.value) is LockNotOwned
        assert (lock.held, lock.left(), lock.hold_count, lock.lease) == (False, 0.0, 0, None)
        assert lock.owned() is False
        assert node.peers == []  # not even a connection


@pytest.mark.parametrize("verb", VERBS)
def test_the_hold_of_another_thread_is_left_alone(spot: Spot, monitor: Monitor, verb: str) -> None:
    with spot.lock() as lock:
        with spot.lock():
            monitor.seen()
            for other in (lock, spot.lock()):
                with pytest.raises(LockNotOwned) as caught:
                    elsewhere(lambda other=other: VERBS[verb](other))  # type: ignore[misc]
                assert type(caught.value) is LockNotOwned
            assert [argv for argv in monitor.seen() if argv[0] != "DEL"] == []
            assert spot.counts() == [2]
            assert lock.hold_count == 2


def test_one_release_too_many_sends_nothing(spot: Spot, monitor: Monitor) -> None:
    lock = spot.lock()
    with lock:
        pass
    with spot.stranger() as stranger:
        monitor.seen()
        with pytest.raises(LockNotOwned) as caught:
            lock.release()
        assert type(caught.value) is LockNotOwned
        assert [argv for argv in monitor.seen() if argv[0] != "DEL"] == []
        assert spot.holders() == {owner_of(stranger): b"1"}


def test_a_block_that_releases_the_lock_itself(spot: Spot) -> None:
    with pytest.raises(LockNotOwned):
        with spot.lock() as lock:
            lock.release()
    with pytest.raises(LockNotOwned):
        with lock:
            with lock:
                lock.release()
    assert spot.locks() == []


def test_a_partial_release_is_not_the_end_of_what_is_left(spot: Spot, clock: Callable[[float], None]) -> None:
    lock = spot.lock(timeout=5)
    lock.acquire()
    lock.acquire()
    clock(4)
    lock.release()
    clock(4)  # beyond the first lease, but not beyond the one that began with the release
    assert lock.held
    assert lock.hold_count == 1
    assert 0.5 < lock.left() <= 1
    clock(1)
    assert not lock.held
    assert lock.hold_count == 0
    assert lock.left() == 0.0


# ---- what it knows, and asks ----


def test_extend_and_reacquire_keep_the_count(spot: Spot) -> None:
    lock, other = spot.lock(timeout=10), spot.lock(timeout=20)
    lock.acquire()
    lock.acquire()
    assert lock.extend(30, replace_ttl=True) is True
    spot.lives(27, 30)
    assert spot.counts() == [2]
    assert 26 < lock.left() <= 30 * 0.99 - 0.002
    assert lock.extend(30) is True
    spot.lives(55, 60.01)
    assert spot.counts() == [2]
    assert lock.reacquire() is True
    spot.lives(8, 10)
    assert other.reacquire() is True  # a lease of its own length
    spot.lives(18, 20)
    assert spot.counts() == [2]
    assert lock.hold_count == 2
    lock.release()
    assert spot.counts() == [1]
    lock.extend(5)
    assert spot.counts() == [1]
    lock.release()
    assert spot.locks() == []


def test_locked_and_owned_ask_the_server(any_spot: Spot) -> None:
    lock, stranger = any_spot.lock(), any_spot.stranger()
    assert not lock.locked()
    assert not lock.owned()
    with lock, lock:
        assert lock.locked()
        assert lock.owned()
        assert stranger.locked()
        assert not stranger.owned()
        any_spot.ask("DEL", "name")
        assert lock.held  # by what it knows
        assert not lock.locked()
        assert not lock.owned()
        any_spot.ask("HSET", "name", "somebody else", 1)
        assert lock.locked()
        assert not lock.owned()
        any_spot.ask("DEL", "name")
        any_spot.ask("HSET", "name", owner_of(lock), 2)
        assert lock.owned()


def test_validity_ends_before_the_key_does(spot: Spot, clock: Callable[[float], None]) -> None:
    lock = spot.lock(timeout=10)
    lock.acquire()
    lock.acquire()
    assert 9 < lock.left() <= 10 - 0.1 - 0.002
    clock(9.9)
    assert not lock.held
    assert lock.hold_count == 0
    assert not lock.owned()
    assert spot.counts() == [2]
    with pytest.raises(LockLost):
        lock.release()  # a part of it: nothing is a part of nothing
    assert lock.lease is None
    eventually(lambda: spot.locks() == [], 1, "what was left of it is taken back")


def test_the_last_release_after_the_lease_ran_out_by_our_clock(
    spot: Spot, clock: Callable[[float], None]
) -> None:
    with pytest.raises(LockLost, match="was lost while its block ran: it ran out"):
        with spot.lock(timeout=5):
            clock(5)  # by our clock alone: the key is still there, but nothing warranted it
    assert spot.locks() == []


# ---- a lost lock ----


def _remove(spot: Spot) -> None:
    spot.ask("DEL", "name")


def _flush(spot: Spot) -> None:
    spot.ask("FLUSHALL")


def _force(spot: Spot) -> None:
    assert spot.stranger().force_unlock() is True


def _force_in_a_thread(spot: Spot) -> None:
    assert elsewhere(spot.lock().force_unlock) is True


def _expire(spot: Spot) -> None:
    spot.ask("PEXPIRE", "name", 1)
    eventually(lambda: spot.ask("EXISTS", "name") == 0)


def _pass_on(spot: Spot) -> None:
    spot.ask("DEL", "name")
    spot.ask("HSET", "name", "somebody else", 3)
    spot.ask("PEXPIRE", "name", 60_000)


def _overwrite(spot: Spot) -> None:
    spot.ask("SET", "name", "data", "PX", 60_000)


LOSSES: dict[str, Callable[[Spot], None]] = {
    "removed": _remove,
    "flushed": _flush,
    "forced by another client": _force,
    "forced by another thread": _force_in_a_thread,
    "expired": _expire,
    "passed on": _pass_on,
    "overwritten": _overwrite,
}
TAKEN = ("passed on", "overwritten")


def is_untouched(spot: Spot, how: str) -> bool:
    """Whether what somebody else has put there is as it was."""
    if how == "passed on":
        return spot.holders() == {b"somebody else": b"3"} and spot.ask("PTTL", "name") > 40_000
    if how == "overwritten":
        return bool(spot.ask("GET", "name") == b"data" and spot.ask("PTTL", "name") > 40_000)
    return spot.locks() == []


@pytest.fixture(params=LOSSES)
def how(request: pytest.FixtureRequest) -> str:
    """How the lock gets lost."""
    name: str = request.param
    return name


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_is_seen_by_each_verb(any_spot: Spot, how: str, verb: str, count: int) -> None:
    lock = any_spot.lock()
    for _ in range(count):
        lock.acquire()
    LOSSES[how](any_spot)
    assert lock.hold_count == count  # by what it knows
    with pytest.raises(LockLost):
        VERBS[verb](lock)
    assert not lock.held
    assert lock.hold_count == 0
    assert not lock.owned()
    if verb == "release":
        assert lock.lease is None
        with pytest.raises(LockNotOwned) as caught:
            lock.release()
        assert type(caught.value) is LockNotOwned
    else:
        with pytest.raises(LockLost):
            lock.release()
    assert any_spot.lock("other").acquire(blocking=False)  # what the loss left to clean up has been done
    any_spot.ask("DEL", "other")
    assert is_untouched(any_spot, how)


def test_an_acquire_after_a_loss_begins_anew(any_spot: Spot, how: str) -> None:
    lock, other = any_spot.lock(timeout=10), any_spot.lock(timeout=60)
    lock.acquire()
    lock.acquire()
    before = owner_of(lock)
    LOSSES[how](any_spot)
    if how in TAKEN:
        assert other.acquire(blocking=False) is False
        assert (lock.held, lock.lease, lock.hold_count) == (False, None, 0)
        assert is_untouched(any_spot, how)
        return
    assert other.acquire(blocking=False) is True
    assert (lock.hold_count, other.hold_count) == (1, 1)
    assert owner_of(lock) != before
    assert any_spot.holders() == {owner_of(lock): b"1"}
    any_spot.lives(50, 60)
    assert 50 < lock.left() <= 60
    lock.release()
    assert any_spot.locks() == []


def test_blocks_around_a_loss_say_so(spot: Spot) -> None:
    lock = spot.lock()
    with pytest.raises(LockNotOwned):
        with lock:
            spot.ask("DEL", "name")
            with lock:  # a new one
                assert lock.hold_count == 1
                assert spot.counts() == [1]
            assert spot.locks() == []
    with pytest.raises(LockLost) as caught:
        with lock:
            with lock:
                spot.ask("DEL", "name")
    (note,) = caught.value.__notes__
    assert "not held" in note
    assert (lock.held, lock.lease) == (False, None)


def test_a_loss_can_be_logged_instead(spot: Spot, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "redbolt"):
        with spot.lock(raise_on_release_error=False) as lock:
            with lock:
                pass
            assert caplog.records == []
            spot.ask("DEL", "name")
    (record,) = caplog.records
    assert "'name'" in record.getMessage()
    assert "lost" in record.getMessage()


def test_the_exception_of_the_block_wins_over_that_of_the_release(spot: Spot) -> None:
    with pytest.raises(KeyError, match="own") as caught:
        with spot.lock() as lock:
            with lock:
                spot.ask("DEL", "name")
                raise KeyError("the body's own")
    first, second = caught.value.__notes__
    assert "lost" in first
    assert "not held" in second


def test_after_its_own_lease_ended_it_waits_for_the_key_like_anybody(
    spot: Spot, clock: Callable[[float], None]
) -> None:
    lock = spot.lock(timeout=5)
    lock.acquire()
    before = owner_of(lock)
    clock(5)  # by our clock alone
    assert lock.acquire(blocking=False) is False
    assert spot.holders() == {before: b"1"}
    spot.ask("DEL", "name")
    assert lock.acquire(blocking=False) is True
    assert lock.hold_count == 1
    assert owner_of(lock) != before
    lock.release()


# ---- force_unlock ----


def test_force_unlock_frees_it_and_wakes_those_who_wait(
    any_spot: Spot, listen: Callable[[HasAddress, str], Ear]
) -> None:
    ear = listen(any_spot.node, "redisson_lock__channel:{name}")
    lock, stranger = any_spot.lock(), any_spot.stranger()
    assert stranger.force_unlock() is False
    assert ear.heard() == []
    with pytest.raises(LockNotOwned):
        with lock, lock:
            assert stranger.force_unlock() is True
            assert ear.heard() == [b"0"]
            assert any_spot.locks() == []
            assert stranger.acquire(blocking=False)
    assert any_spot.holders() == {owner_of(stranger): b"1"}
    stranger.release()
    assert ear.heard() == [b"0"]
    any_spot.ask("HSET", "name", "a", 1, "b", 2)
    assert lock.force_unlock() is True
    assert ear.heard() == [b"0"]


@pytest.mark.parametrize("gone", [False, True])
def test_force_unlock_ends_the_hold_of_its_caller(spot: Spot, gone: bool) -> None:
    lock = spot.lock()
    lock.acquire()
    lock.acquire()
    lease = lock.lease
    assert lease is not None
    if gone:
        spot.ask("DEL", "name")
    assert spot.lock().force_unlock() is not gone
    assert (lock.held, lock.hold_count, lock.lease, lock.left()) == (False, 0, None, 0.0)
    assert not lease.held
    with pytest.raises(LockNotOwned):
        lock.release()
    assert lock.acquire(blocking=False)
    assert spot.counts() == [1]
    lock.release()


# ---- other data under the name ----

DATA: dict[str, tuple[str, ...]] = {
    "string": ("SET", "name", "data"),
    "list": ("RPUSH", "name", "data"),
    "zset": ("ZADD", "name", "1", "data"),
    "hash": ("HSET", "name", "field", "data"),
}


@pytest.mark.parametrize("found", DATA)
def test_data_under_the_name_is_left_alone(any_spot: Spot, found: str) -> None:
    any_spot.ask(*DATA[found])
    before = any_spot.ask("DUMP", "name")
    lock = any_spot.lock(blocking_timeout=0.03, sleep=0.01)
    assert lock.acquire(blocking=False) is False
    assert lock.locked()
    said = "somebody else holds it" if found == "hash" else f"its key holds a {found}"
    with pytest.raises(LockTimeout, match=said):
        with lock:
            pytest.fail("this block must not run")
    if found != "hash":
        assert lock.force_unlock() is False
    assert any_spot.ask("DUMP", "name") == before
    assert any_spot.ask("PTTL", "name") == -1


def test_whoever_waits_for_data_to_go_is_warned(
    spot: Spot, background: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    spot.ask("SET", "name", "data")
    lock = spot.lock(sleep=0.01)

    def cycle() -> int:
        with lock:
            return lock.hold_count

    with caplog.at_level(logging.WARNING, "redbolt"):
        waiting = background.submit(cycle)
        eventually(lambda: caplog.records)
        spot.ask("DEL", "name")
        assert waiting.result(5 * SLACK) == 1
    (record,) = caplog.records
    assert "waiting for lock b'name', but its key holds a string" in record.getMessage()


def test_a_plain_lock_of_the_same_name_and_this_one_exclude_each_other(any_spot: Spot) -> None:
    ours = any_spot.lock()
    plain = redbolt.Lock(any_spot.node.url, "name", 10, engine=any_spot.kind)
    with plain:
        assert plain.lease is not None
        assert ours.acquire(blocking=False) is False
        assert ours.locked()
        assert ours.force_unlock() is False
        assert any_spot.ask("GET", "name") == plain.lease.token
    with ours, ours:
        assert plain.acquire(blocking=False) is False
        assert plain.locked()
        assert any_spot.holders() == {owner_of(ours): b"2"}
        with pytest.raises(LockTimeout, match="its key holds a hash"):
            with redbolt.Lock(any_spot.node.url, "name", 10, 0.01, True, 0.02, engine=any_spot.kind):
                pytest.fail("this block must not run")
    assert any_spot.locks() == []


# ---- arguments ----


def test_an_owner_of_the_callers_own(any_spot: Spot) -> None:
    lock = any_spot.lock()
    for token in ("mine", b"mine", "ключ 🔑", b"\x00\r\n\xff"):
        owner = token.encode() if isinstance(token, str) else token
        assert lock.acquire(token=token) is True
        assert any_spot.holders() == {owner: b"1"}
        assert lock.acquire(token=token) is True
        assert lock.acquire() is True
        assert any_spot.holders() == {owner: b"3"}
        assert lock.owned()
        assert lock.extend(1)
        for _ in range(3):
            lock.release()
        assert any_spot.locks() == []


@pytest.mark.parametrize("token", ["another", b"another"])
def test_another_owner_cannot_take_it_again(spot: Spot, monitor: Monitor, token: str | bytes) -> None:
    for own in (None, "mine"):
        lock = spot.lock()
        assert lock.acquire(token=own)
        monitor.seen()
        with pytest.raises(ValueError, match="holds the lock already"):
            lock.acquire(token=token)
        assert [argv for argv in monitor.seen() if argv[0] != "DEL"] == []
        assert lock.hold_count == 1
        assert spot.holders() == {owner_of(lock): b"1"}
        lock.release()


def test_an_owner_that_the_hash_has_already_is_taken(spot: Spot) -> None:
    spot.ask("HSET", "name", "mine", 1)
    spot.ask("PEXPIRE", "name", 60_000)
    assert spot.lock().acquire(blocking=False, token="mine") is False
    assert spot.holders() == {b"mine": b"1"}
    spot.lives(50, 60)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"thread_local": False}, ValueError, "belongs to the thread"),
        ({"thread_local": None}, TypeError, "thread_local"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": 5}, TypeError, "name"),
        ({"name": "n" * 65_537}, ValueError, "at most 65536"),
        ({"prefix": "p" * 65_536}, ValueError, "at most 65536"),
        ({"name": "n" * 65_536}, ValueError, "too long"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"timeout": 0.001}, ValueError, "no validity"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"timeout": "5"}, TypeError, "timeout"),
        ({"timeout": True}, TypeError, "timeout"),
        ({"sleep": -1}, ValueError, "sleep"),
        ({"blocking": 1}, TypeError, "blocking"),
        ({"blocking_timeout": -1}, ValueError, "blocking_timeout"),
        ({"raise_on_release_error": 1}, TypeError, "raise_on_release_error"),
        ({"retry": 5}, TypeError, "retry"),
        ({"node_timeout": 0}, ValueError, "node_timeout"),
        ({"engine": "other"}, ValueError, "no engine"),
    ],
)
def test_arguments_that_cannot_work(kind: str, arguments: dict[str, Any], error: Any, said: str) -> None:
    with ScriptedNode() as node:
        with pytest.raises(error, match=said):
            ReentrantLock(node.url, **({"name": "name", "engine": kind} | arguments))
        assert node.peers == []


@pytest.mark.parametrize(
    ("verb", "error"),
    [
        (lambda lock: lock.acquire(sleep=-1), ValueError),
        (lambda lock: lock.acquire(sleep="1"), TypeError),
        (lambda lock: lock.acquire(blocking=1), TypeError),
        (lambda lock: lock.acquire(blocking_timeout=-1), ValueError),
        (lambda lock: lock.acquire(token=""), ValueError),
        (lambda lock: lock.acquire(token=5), TypeError),
        (lambda lock: lock.acquire(token="t" * 65_537), ValueError),
        (lambda lock: lock.extend(0), ValueError),
        (lambda lock: lock.extend("1"), TypeError),
        (lambda lock: lock.extend(1, 1), TypeError),
        (lambda lock: lock.extend(0.001, replace_ttl=True), ValueError),
    ],
)
@pytest.mark.parametrize("held", [False, True])
def test_arguments_of_the_verbs_that_cannot_work(
    spot: Spot, monitor: Monitor, verb: Callable[[ReentrantLock], object], error: Any, held: bool
) -> None:
    lock = spot.lock()
    if held:
        lock.acquire()
        monitor.seen()
    left = lock.left()
    with pytest.raises((error, LockNotOwned) if not held else error):
        verb(lock)
    assert monitor.seen() == []
    assert lock.hold_count == held
    assert lock.left() <= left
    assert lock.left() > 7 or not held
    if held:
        lock.release()


# ---- waiting ----


@pytest.mark.parametrize(("waiting", "more"), [("tracking", 1), ("channel", 0), ("polling", 2)])
def test_whoever_waits_gets_it_when_it_is_free(
    spot: Spot, background: ThreadPoolExecutor, waiting: str, more: int
) -> None:
    """The holder has it twice. When it gives it back once, the key changes, but nothing is published."""
    holder, waiter = spot.lock(), spot.lock(sleep=0.01, waiting=waiting)
    holder.acquire()
    holder.acquire()
    spot.ask("CONFIG", "RESETSTAT")

    def cycle() -> int:
        with waiter:
            return waiter.hold_count

    result = background.submit(cycle)
    eventually(spot.refusals, what="it was refused once")
    time.sleep(0.02)

    def asked() -> int:  # while the holder is in its process, a change is answered by a look
        stats = spot.ask("INFO", "commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("evalsha", "pttl"))

    before = asked()
    holder.release()
    eventually(lambda: asked() > before + more, what="it asks again")
    assert not result.done()  # the holder still has it once
    holder.release()
    assert result.result(5 * SLACK) == 1


@pytest.mark.parametrize("retry", [None, Retry(delay=0.01), Retry(count=500, delay=0.02, backoff=1.5)])
def test_whoever_waits_gets_it_when_the_lease_of_a_dead_holder_ends(spot: Spot, retry: Retry | None) -> None:
    spot.ask("HSET", "name", "somebody who is gone", 3)
    spot.ask("PEXPIRE", "name", 150)
    with spot.lock(sleep=0.02, retry=retry, blocking_timeout=10 * SLACK) as lock:
        assert spot.holders() == {owner_of(lock): b"1"}


def test_the_number_of_tries_is_bounded(spot: Spot, monitor: Monitor) -> None:
    with spot.stranger():
        monitor.seen()
        assert spot.lock(retry=Retry(count=4, delay=0)).acquire() is False
        assert [argv[0] for argv in monitor.seen()].count(".EXISTS") == 4


@pytest.mark.parametrize("inside", [False, True])
def test_blocking_timeout_bounds_the_wait(spot: Spot, inside: bool) -> None:
    with spot.stranger() as stranger:
        lock = spot.lock(sleep=0.03, blocking_timeout=0.1)
        started = time.monotonic()
        if inside:
            with pytest.raises(LockTimeout, match="somebody else holds it"):
                with lock:
                    pytest.fail("this block must not run")
        else:
            assert lock.acquire() is False
        assert 0.1 <= time.monotonic() - started < 0.1 + E
        assert spot.holders() == {owner_of(stranger): b"1"}


def test_an_acquire_that_does_not_wait(spot: Spot) -> None:
    with spot.stranger():
        started = time.monotonic()
        assert spot.lock().acquire(blocking=False) is False
        assert spot.lock(blocking=False).acquire() is False
        assert spot.lock().acquire(blocking_timeout=0) is False
        assert time.monotonic() - started < E


def test_of_many_threads_one_is_inside(spot: Spot) -> None:
    inside: list[int] = []
    crowds: list[int] = []

    def come_and_go(number: int) -> None:
        lock = spot.lock(sleep=0.001) if number % 2 else spot.stranger(sleep=0.001)
        for _ in range(10):
            with lock, lock:
                inside.append(number)
                with lock:
                    crowds.append(len(inside))
                inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(come_and_go, number) for number in range(4)]:
            done.result(60 * SLACK)
    assert crowds == [1] * 40
    assert spot.locks() == []
