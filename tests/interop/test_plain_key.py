"""The plain key is one layout for all: our locks and those of other libraries exclude one another.

Every scenario runs in both directions, and with each of our engines. Other libraries are asked through
their own public API alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import redis
from redis.exceptions import LockNotOwnedError
from redlock import Redlock

from redbolt import Lock, LockLost, RedLock
from redbolt.local import LocalNode, LocalNodes
from tests.interop.nodejs import NodeRedlock, RedlockLock
from tests.kit.clients import SLACK, eventually, raw

PAUSE = 0.01  # seconds between two tries of those who wait
LIMIT = 0.2 * SLACK  # seconds that a node may take to answer us
NAMES = ["name", "Schlüssel ключ 鍵 🔒", "two words {tag}:\r\n\x00"]


class Party(Protocol):
    """A user of some lock library, with at most one hold."""

    def take(self, name: str, ttl_ms: int, wait: float = 0) -> bytes | None:
        """The token, or None if the lock stayed taken for ``wait`` seconds; 0 tries once."""

    def give_back(self) -> bool | None:
        """Release what was taken last; whether it was still there (None: the library does not tell)."""

    def extend(self, ttl_ms: int) -> bool | None:
        """Give it that length from now on; whether it was still there (None: the library cannot)."""

    def close(self) -> None:
        """End its connections."""


class Ours:
    """`Lock` on one server, `RedLock` on several."""

    def __init__(self, servers: list[LocalNode], kind: str) -> None:
        self._urls = [server.url for server in servers]
        self._kind = kind

    def take(self, name: str, ttl_ms: int, wait: float = 0) -> bytes | None:
        clients: Any = self._urls if len(self._urls) > 1 else self._urls[0]
        lock = (RedLock if len(self._urls) > 1 else Lock)(
            clients, name, ttl_ms / 1000, PAUSE, thread_local=False, node_timeout=LIMIT, engine=self._kind
        )
        if not lock.acquire(blocking=wait > 0, blocking_timeout=wait or None):
            return None
        self._lock = lock
        assert lock.lease is not None
        return lock.lease.token

    def give_back(self) -> bool:
        try:
            self._lock.release()
        except LockLost:
            return False
        return True

    def extend(self, ttl_ms: int) -> bool:
        try:
            return self._lock.extend(ttl_ms / 1000, replace_ttl=True)
        except LockLost:
            return False

    def close(self) -> None:
        pass


class RedisPy:
    """redis-py's Lock."""

    def __init__(self, server: LocalNode) -> None:
        self._client = redis.Redis.from_url(server.url, socket_timeout=5 * SLACK)

    def take(self, name: str, ttl_ms: int, wait: float = 0) -> bytes | None:
        lock = self._client.lock(name, ttl_ms / 1000, PAUSE, thread_local=False)
        if not lock.acquire(blocking=wait > 0, blocking_timeout=wait or None):
            return None
        self._lock = lock
        return lock.local.token

    def give_back(self) -> bool:
        return self._unless_lost(self._lock.release)

    def extend(self, ttl_ms: int) -> bool:
        return self._unless_lost(lambda: self._lock.extend(ttl_ms / 1000, replace_ttl=True))

    @staticmethod
    def _unless_lost(verb: Callable[[], object]) -> bool:
        try:
            verb()
        except LockNotOwnedError:
            return False
        return True

    def close(self) -> None:
        self._client.close()


class RedlockPy:
    """redlock-py's Redlock."""

    def __init__(self, servers: list[LocalNode]) -> None:
        limit = 5 * SLACK
        self._clients = [redis.Redis.from_url(server.url, socket_timeout=limit) for server in servers]

    def take(self, name: str, ttl_ms: int, wait: float = 0) -> bytes | None:
        manager = Redlock(self._clients, retry_count=1 + math.ceil(wait / PAUSE), retry_delay=PAUSE)
        found = manager.lock(name, ttl_ms)
        if not found:
            return None
        self._manager, self._lock = manager, found
        return bytes(found.key)

    def give_back(self) -> None:
        self._manager.unlock(self._lock)

    def extend(self, ttl_ms: int) -> None:
        pass

    def close(self) -> None:
        for client in self._clients:
            client.close()


class NodesRedlock:
    """npm redlock."""

    _lock: RedlockLock

    def __init__(self, redlock: NodeRedlock) -> None:
        self._redlock = redlock

    def take(self, name: str, ttl_ms: int, wait: float = 0) -> bytes | None:
        # It keeps what a lost vote gave it, and two lost votes may leave it in its own way: so not too often.
        settings = {"retryCount": math.ceil(wait / 0.1), "retryDelay": 100, "retryJitter": 20}
        found = self._redlock.acquire(name, ttl_ms=ttl_ms, timeout=5 + wait, **settings)
        if found is None:
            return None
        self._lock = found
        return found.token

    def give_back(self) -> bool:
        return self._lock.release()

    def extend(self, ttl_ms: int) -> bool:
        return self._lock.extend(ttl_ms)

    def close(self) -> None:
        pass  # the fixture does it


@dataclass(frozen=True)
class Key:
    """What a server has: the value of a key and the time of its end (ms since 1970; negative: none)."""

    value: bytes | None
    ends_at: int


class Field:
    """Some servers, and two parties on them."""

    def __init__(self, servers: list[LocalNode], first: Party, second: Party) -> None:
        self.servers, self.first, self.second = servers, first, second

    def keys(self, name: str) -> list[Key]:
        """The key on each server, without touching it."""
        return [Key(raw(one, "GET", name), raw(one, "PEXPIRETIME", name)) for one in self.servers]

    def keys_with(self, name: str, token: bytes | None) -> list[Key]:
        """The same, once every server has that token: a quorum is enough for an answer, the others follow."""

        def found() -> list[Key]:
            keys = self.keys(name)
            assert [key.value for key in keys] == [token] * len(keys)
            return keys

        return eventually(found, what="all servers have the token")

    def agreed(self, name: str, token: bytes) -> bool:
        """Whether a quorum has that token: on the others, the one before may not have gone yet."""
        return sum(key.value == token for key in self.keys(name)) > len(self.servers) // 2

    def is_gone(self, name: str) -> bool:
        """Wait until the key is on no server."""
        self.keys_with(name, None)
        return True

    def cut_short(self, name: str) -> None:
        """The lease ends in a moment, everywhere at the same time, and sooner than anybody thinks."""
        ends_at = int(time.time() * 1000 + 30 * SLACK)
        for one in self.servers:
            assert raw(one, "PEXPIREAT", name, ends_at) == 1


def tries(server: LocalNode) -> int:
    """How many commands that may take a lock it has run since CONFIG RESETSTAT."""
    stats = raw(server, "INFO", "commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("set", "eval", "evalsha"))


class Scenarios:
    """What holds for each pair of libraries. A subclass says who the other is, and on how many servers."""

    @pytest.fixture
    def servers(self, nodes: LocalNodes) -> list[LocalNode]:
        raise NotImplementedError

    @pytest.fixture
    def other(self) -> Iterator[Party]:
        raise NotImplementedError

    @pytest.fixture(params=["ours first", "theirs first"])
    def field(
        self, request: pytest.FixtureRequest, kind: str, servers: list[LocalNode], other: Party
    ) -> Iterator[Field]:
        ours = Ours(servers, kind)
        parties: tuple[Party, Party] = (ours, other) if request.param == "ours first" else (other, ours)
        yield Field(servers, *parties)
        other.close()

    def test_the_holder_excludes_the_other(self, field: Field) -> None:
        token = field.first.take("name", 10_000)
        assert token
        before = field.keys_with("name", token)
        for _ in range(3):  # what a refused try cleans up late is seen by the next
            assert field.second.take("name", 60_000) is None
            assert field.keys("name") == before
        assert field.first.give_back() is not False
        token = field.second.take("name", 10_000)
        assert token
        assert field.agreed("name", token)
        assert field.first.take("name", 10_000) is None
        assert field.agreed("name", token)
        assert field.second.give_back() is not False
        assert field.is_gone("name")

    def test_a_late_release_or_extension_leaves_the_next_holder_alone(self, field: Field) -> None:
        late = field.first.take("name", 60_000)
        assert late
        field.keys_with("name", late)
        field.cut_short("name")
        assert field.is_gone("name")
        token = field.second.take("name", 10_000)
        assert token
        assert token != late
        before = field.keys_with("name", token)
        assert not field.first.extend(60_000)
        assert field.keys("name") == before
        assert not field.first.give_back()
        assert field.keys("name") == before
        assert field.first.take("name", 60_000) is None  # its connections have run all that went before
        assert field.keys("name") == before
        assert field.second.give_back() is not False
        assert field.is_gone("name")

    @pytest.mark.parametrize("how", ["released", "extended and released", "ran out"])
    def test_the_other_waits_until_it_is_free(self, field: Field, how: str) -> None:
        token = field.first.take("name", 60_000)
        assert token
        field.keys_with("name", token)
        last = field.servers[-1]
        raw(last, "CONFIG", "RESETSTAT")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(field.second.take, "name", 10_000, 5 * SLACK)
            polls = not isinstance(field.second, Ours)  # while we listen, and hear nothing
            eventually(lambda: tries(last) >= 1 + polls, what="it was refused")
            if how == "ran out":
                field.cut_short("name")
            if how == "extended and released" and field.first.extend(20_000) is not None:
                soon = time.time() * 1000 + 20_000
                keys = field.keys_with("name", token)
                assert sum(key.ends_at <= soon for key in keys) > len(keys) // 2
            if how != "ran out":
                assert not waiting.done()
                assert field.first.give_back() is not False
            theirs = waiting.result(10 * SLACK)
        assert theirs
        assert theirs != token
        if how == "ran out":
            field.first.give_back()
        assert field.agreed("name", theirs)
        assert field.second.give_back() is not False
        assert field.is_gone("name")

    @pytest.mark.parametrize("name", NAMES)
    def test_the_key_is_the_name_and_the_value_the_token(self, field: Field, name: str) -> None:
        for holder, other in ((field.first, field.second), (field.second, field.first)):
            token = holder.take(name, 10_000)
            assert token
            field.keys_with(name, token)
            for server in field.servers:
                assert raw(server, "KEYS", "*") == [name.encode()]
                assert raw(server, "TYPE", name) == b"string"
            assert other.take(name, 10_000) is None
            assert holder.give_back() is not False
            assert field.is_gone(name)

    def test_the_lease_is_exact(self, field: Field) -> None:
        for ttl_ms in (12_345, 2_999, 1_000_001):
            earliest = int(time.time() * 1000) + ttl_ms
            token = field.first.take("name", ttl_ms)
            assert token
            keys = field.keys_with("name", token)
            latest = math.ceil(time.time() * 1000) + ttl_ms
            for key in keys:
                assert earliest <= key.ends_at <= latest
            assert latest - earliest < 1000 * SLACK
            assert field.first.give_back() is not False
            assert field.is_gone("name")


class TestRedisPy(Scenarios):
    """redis-py's Lock, on one server."""

    @pytest.fixture
    def servers(self, nodes: LocalNodes) -> list[LocalNode]:
        return [nodes[0]]

    @pytest.fixture
    def other(self, servers: list[LocalNode]) -> Party:
        return RedisPy(servers[0])


class TestRedlockPy(Scenarios):
    """redlock-py, on one server and on several."""

    @pytest.fixture(params=[1, 3, 5])
    def servers(self, request: pytest.FixtureRequest, nodes: LocalNodes) -> list[LocalNode]:
        return list(nodes)[: request.param]

    @pytest.fixture
    def other(self, servers: list[LocalNode]) -> Party:
        return RedlockPy(servers)


class TestNodeRedlock(Scenarios):
    """npm redlock, on one server and on several."""

    @pytest.fixture(params=[1, 3, 5])
    def servers(self, request: pytest.FixtureRequest, nodes: LocalNodes) -> list[LocalNode]:
        return list(nodes)[: request.param]

    @pytest.fixture
    def other(self, servers: list[LocalNode], node_redlock: Callable[..., NodeRedlock]) -> Party:
        return NodesRedlock(node_redlock(*servers))


@pytest.mark.parametrize("count", [1, 3])
def test_of_many_libraries_one_is_inside(
    nodes: LocalNodes, node_redlock: Callable[..., NodeRedlock], count: int
) -> None:
    servers = list(nodes)[:count]
    parties: list[Party] = [Ours(servers, "native"), Ours(servers, "pure"), RedlockPy(servers)]
    parties += [NodesRedlock(node_redlock(*servers)), NodesRedlock(node_redlock(*servers))]
    parties += [RedisPy(servers[0])] if count == 1 else []
    inside: list[Party] = []  # what only the holder may touch
    crowds: list[list[Party]] = []

    def come_and_go(party: Party) -> None:
        for _ in range(10):
            # One try at a time: a waiting npm redlock keeps the minority that it got.
            eventually(lambda: party.take("name", 30_000), 20, f"{party} gets it")
            inside.append(party)
            raw(nodes[4], "PING")  # while it is out, others may run
            crowds.append(list(inside))
            inside.remove(party)
            assert party.give_back() is not False

    try:
        with ThreadPoolExecutor(len(parties)) as pool:
            for ended in [pool.submit(come_and_go, party) for party in parties]:
                ended.result()
    finally:
        for party in parties:
            party.close()
    assert len(crowds) == 10 * len(parties)
    assert [crowd for crowd in crowds if len(crowd) > 1] == []
