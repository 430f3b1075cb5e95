"""A token is the proof of ownership, whoever made it: locks by key release and lengthen what other libraries
took, and those what we took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pytest
import redis
import redlock
from redis.exceptions import LockNotOwnedError

from redbolt import Lock, Locker, RedLock
from redbolt.local import LocalNode, LocalNodes
from tests.interop.nodejs import NodeRedlock
from tests.kit.clients import SLACK, eventually, raw

LIMIT = 1.0 * SLACK
NAMES = ["name", "Schlüssel 鍵 🔒", "two words {tag}:\r\n\x00"]


class ByToken(Protocol):
    """Locks by key and token, in one of our two styles."""

    def take(self, name: str, ttl_ms: int) -> str | None: ...

    def give_back(self, name: str, token: str | bytes) -> bool: ...

    def prolong(self, name: str, token: str | bytes, ttl_ms: int) -> bool: ...


class OurLocker:
    """`Locker`."""

    def __init__(self, servers: Sequence[LocalNode], kind: str) -> None:
        urls = [server.url for server in servers]
        self._locker = Locker(urls, node_timeout=LIMIT, engine=kind)

    def take(self, name: str, ttl_ms: int) -> str | None:
        return self._locker.acquire(name, ttl_ms / 1000, retry_delay=0.01)

    def give_back(self, name: str, token: str | bytes) -> bool:
        return self._locker.release(name, token)

    def prolong(self, name: str, token: str | bytes, ttl_ms: int) -> bool:
        return self._locker.extend(name, token, ttl_ms / 1000)


class OurManager:
    """`RedLock` in the manager style."""

    def __init__(self, servers: Sequence[LocalNode], kind: str) -> None:
        urls = [server.url for server in servers]
        self._manager = RedLock(urls, retry_delay=0.01, node_timeout=LIMIT, engine=kind)

    def take(self, name: str, ttl_ms: int) -> str | None:
        return self._manager.lock(name, ttl_ms)["token"]

    def give_back(self, name: str, token: str | bytes) -> bool:
        return self._manager.unlock(name, token)

    def prolong(self, name: str, token: str | bytes, ttl_ms: int) -> bool:
        return self._manager.extend(name, token, ttl_ms)


@pytest.fixture(params=[OurLocker, OurManager])
def ours(request: pytest.FixtureRequest, kind: str, servers: list[LocalNode]) -> ByToken:
    """Each style in turn, on these servers."""
    made: ByToken = request.param(servers, kind)
    return made


@pytest.fixture(params=[1, 3, 5])
def servers(request: pytest.FixtureRequest, nodes: LocalNodes) -> list[LocalNode]:
    """So many servers, of each kind in turn."""
    count: int = request.param
    return list(nodes)[:count]


@pytest.fixture
def clients(servers: list[LocalNode]) -> Iterator[list[redis.Redis]]:
    """redis-py's clients of them."""
    made = [redis.Redis.from_url(server.url, socket_timeout=5 * SLACK) for server in servers]
    yield made
    for client in made:
        client.close()


def all_have(servers: Sequence[LocalNode], value: bytes | None, name: str = "name") -> None:
    """Wait until each server has this value: a quorum is enough for us, so the others may be late."""
    eventually(
        lambda: [raw(server, "GET", name) for server in servers] == [value] * len(servers),
        2,
        f"all have {value!r}",
    )


def lives(servers: Sequence[LocalNode], ttl_ms: int, name: str = "name") -> None:
    """Wait until each server has given the key this life."""

    def check() -> bool:
        ttls = [raw(server, "PTTL", name) for server in servers]
        assert all(ttl_ms * 0.6 < ttl <= ttl_ms for ttl in ttls), f"{ttls} ms"
        return True

    eventually(check, 3, f"the key lives on for {ttl_ms} ms")


def used_up(ours: ByToken, servers: Sequence[LocalNode], name: str, token: bytes) -> None:
    """Lengthen and release a foreign token, as text and as bytes; a wrong one changes nothing."""
    all_have(servers, token, name)
    assert ours.take(name, 10_000) is None
    for wrong in (token + b"x", token[:-1], b"wrong"):
        assert ours.prolong(name, wrong, 99_000) is False
        assert ours.give_back(name, wrong) is False
    all_have(servers, token, name)
    lives(servers, 10_000, name)
    assert ours.prolong(name, token.decode(), 60_000) is True
    lives(servers, 60_000, name)
    assert ours.prolong(name, token, 30_000) is True
    lives(servers, 30_000, name)
    assert ours.give_back(name, token.decode()) is True
    all_have(servers, None, name)
    assert ours.give_back(name, token) is False
    assert ours.prolong(name, token, 30_000) is False
    all_have(servers, None, name)


# ---- redis-py ----


@pytest.mark.parametrize("servers", [1], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_redis_py(ours: ByToken, servers, clients: list[redis.Redis], name: str) -> None:
    lock = clients[0].lock(name, timeout=10)
    for token in (None, "a token of the caller's own"):
        assert lock.acquire(blocking=False, token=token)
        assert lock.local.token is not None
        used_up(ours, servers, name, lock.local.token)
        with pytest.raises(LockNotOwnedError):
            lock.release()


@pytest.mark.parametrize("servers", [1], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_redis_py_uses_our_token(ours: ByToken, servers, clients: list[redis.Redis], name: str) -> None:
    token = ours.take(name, 10_000)
    assert token is not None
    theirs = clients[0].lock(name, timeout=20)
    assert theirs.acquire(blocking=False) is False
    theirs.local.token = token.encode()
    assert theirs.owned()
    assert theirs.extend(60, replace_ttl=True)
    lives(servers, 60_000, name)
    assert theirs.reacquire()
    lives(servers, 20_000, name)
    assert ours.prolong(name, token, 10_000) is True
    theirs.release()
    all_have(servers, None, name)
    assert ours.give_back(name, token) is False
    assert ours.prolong(name, token, 10_000) is False


# ---- redlock-py ----


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_redlock_py(ours: ByToken, servers, clients: list[redis.Redis], name: str) -> None:
    theirs = redlock.Redlock(clients, retry_count=1, retry_delay=0.01)
    found = theirs.lock(name, 10_000)
    assert found
    used_up(ours, servers, name, found.key)
    theirs.unlock(found)
    again = ours.take(name, 10_000)
    assert again is not None
    theirs.unlock(found)  # late
    all_have(servers, again.encode(), name)


@pytest.mark.parametrize("name", NAMES)
def test_redlock_py_uses_our_token(ours: ByToken, servers, clients: list[redis.Redis], name: str) -> None:
    theirs = redlock.Redlock(clients, retry_count=1, retry_delay=0.01)
    token = ours.take(name, 10_000)
    assert token is not None
    all_have(servers, token.encode(), name)
    assert theirs.lock(name, 10_000) is False
    theirs.unlock(redlock.Lock(0, name, "wrong"))
    all_have(servers, token.encode(), name)
    theirs.unlock(redlock.Lock(0, name, token))
    all_have(servers, None, name)
    assert ours.give_back(name, token) is False
    assert theirs.lock(name, 10_000)


# ---- npm redlock ----


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_npm_redlock(
    ours: ByToken, servers, node_redlock: Callable[..., NodeRedlock], name: str
) -> None:
    found = node_redlock(*servers).acquire(name, ttl_ms=10_000)
    assert found is not None
    used_up(ours, servers, name, found.token)
    assert found.release() is False


# ---- our own locks ----


@pytest.mark.parametrize("servers", [1, 5], indirect=True)
def test_a_token_of_our_own_locks(ours: ByToken, servers, kind: str) -> None:
    urls = [server.url for server in servers]
    locks = [RedLock(urls, "name", 10, node_timeout=LIMIT, engine=kind)]
    locks += [Lock(urls[0], "name", 10, engine=kind)] if len(urls) == 1 else []  # type: ignore[list-item]
    for lock in locks:
        assert lock.acquire()
        assert lock.lease is not None
        used_up(ours, servers, "name", lock.lease.token)
        assert lock.owned() is False
