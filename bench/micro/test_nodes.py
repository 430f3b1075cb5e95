"""Single calls against real nodes: a try that is refused, and the first one, which has to connect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import redis

import redbolt

KEY = "bench:micro"
ROUNDS = 200


@pytest.fixture
def _held(urls: list[str]) -> Iterator[None]:
    """Somebody else holds the key, on every node."""
    clients = [redis.Redis.from_url(url) for url in urls]
    for client in clients:
        client.set(KEY, "somebody else's")
    yield
    for client in clients:
        client.delete(KEY)
        client.close()


def _lock(urls: list[str], kind: str, key: str = KEY) -> redbolt.Lock:
    if len(urls) == 1:
        return redbolt.Lock(urls[0], key, timeout=10, engine=kind)
    return redbolt.RedLock(urls, key, timeout=10, engine=kind)


@pytest.mark.benchmark(group="a refused try")
@pytest.mark.usefixtures("_held")
def test_refused(benchmark: Any, urls: list[str], kind: str) -> None:
    lock = _lock(urls, kind)
    assert benchmark(lock.acquire, blocking=False) is False


@pytest.mark.benchmark(group="an acquire that has to connect")
def test_cold_connect(benchmark: Any, urls: list[str], kind: str) -> None:
    # A key for each round: with --benchmark-disable there is no teardown, and nothing is released.
    keys = (f"{KEY}:{kind}:{len(urls)}:{number}" for number in count())

    def closed() -> tuple[tuple[redbolt.Lock], dict[str, Any]]:
        redbolt.close()
        return (_lock(urls, kind, next(keys)),), {}

    def acquire(lock: redbolt.Lock) -> bool:
        return lock.acquire(blocking=False)

    def release(lock: redbolt.Lock) -> None:
        lock.release()

    found = benchmark.pedantic(acquire, setup=closed, teardown=release, rounds=ROUNDS)
    assert found is True
