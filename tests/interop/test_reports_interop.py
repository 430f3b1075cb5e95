"""What went wrong in other lock libraries, as told in their public bug reports, does not go wrong here: those
reports in which somebody else's server, data or lock has a part.

Each comment names the project and the number of its report.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

import redbolt.retry
from redbolt import Lock, LockLost, LockNotOwned, LockTimeout, RedLock, SetupError
from redbolt.local import LocalNode, LocalNodes, find_server
from tests.kit.clients import SLACK, Client, eventually, raw
from tests.kit.ports import ports
from tests.kit.resp import PONG, error
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, handshake

E = 0.15 * SLACK


class Address:
    """Where a server listens."""

    host = "127.0.0.1"

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://{self.host}:{port}"


@pytest.fixture
def sentinels(server: str | None, node: LocalNode, tmp_path: Path) -> Iterator[list[Address]]:
    """Two real sentinels that watch ``node``."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(address: Address) -> None:
        settings = tmp_path / f"{address.port}.conf"
        settings.write_text(
            f"port {address.port}\nbind {address.host}\ndir {tmp_path}\n"
            f"sentinel monitor main {node.host} {node.port} 1\n"
        )
        argv = [find_server(server), str(settings), "--sentinel"]
        with (tmp_path / "log").open("ab") as log:
            processes.append(subprocess.Popen(argv, stdout=log, stderr=log))

    def answers(address: Address) -> bool:
        assert all(process.poll() is None for process in processes), (tmp_path / "log").read_text()
        try:
            with Client(address) as client:
                return client.ask("PING") == PONG
        except OSError:
            return False

    addresses = [Address(next(ports)), Address(next(ports))]
    try:
        for address in addresses:
            start(address)
        for address in addresses:
            eventually(partial(answers, address), 10, "the sentinel answers")
        yield addresses
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(5 * SLACK)


def refuses_at_once(urls: list[str], kind: str, *says: str) -> None:
    """The first call of a lock that would wait for ever names a server that cannot serve it, and says why."""
    for verb in (Lock.acquire, Lock.__enter__):
        many = len(urls) > 1
        lock = RedLock(urls, "name", engine=kind) if many else Lock(urls[0], "name", engine=kind)
        started = time.monotonic()
        with pytest.raises(SetupError) as caught:
            verb(lock)
        assert time.monotonic() - started < 1 * SLACK
        told = {node: cause for node, cause in caught.value.causes.items() if says[0] in cause}
        assert told
        for node, cause in told.items():
            assert any(url.endswith(node) for url in urls)
            for text in (node, *says):
                assert text in f"{node}: {cause}"
                assert text in str(caught.value)


# mike-marcacci/node-redlock 50
@pytest.mark.parametrize("count", [1, 3])
def test_a_server_too_old_for_the_command_looked_like_a_taken_lock(kind: str, count: int) -> None:
    def answer(argv: Argv) -> bytes:
        """Redis 2.6.0: its SET has no options."""
        if argv[0] == b"SET" and len(argv) > 3:
            return error("ERR syntax error")
        return handshake(argv) or error(f"ERR unknown command '{argv[0].decode()}'")

    with ExitStack() as stack:
        old = [stack.enter_context(ScriptedNode(answer=answer)) for _ in range(count)]
        refuses_at_once([node.url for node in old], kind, "syntax error")


# mike-marcacci/node-redlock 304
@pytest.mark.parametrize("count", [1, 3])
def test_the_port_of_a_sentinel_looked_like_a_taken_lock(
    kind: str, nodes: LocalNodes, sentinels: list[Address], count: int
) -> None:
    urls = [sentinels[0].url, sentinels[1].url, nodes[1].url]
    refuses_at_once(urls[:count], kind, "unknown command", "SET")
    eventually(lambda: raw(nodes[1], "DBSIZE") == 0, what="nothing is left on the one that could be locked")


DATA: dict[str, tuple[str, ...]] = {
    "string": ("SET", "x", "data"),
    "hash": ("HSET", "x", "field", "data"),
    "list": ("RPUSH", "x", "data"),
    "zset": ("ZADD", "x", "1", "data"),
}


def dumped(node: LocalNode) -> tuple[Any, int]:
    """All that the server has under that key, and its remaining life."""
    with redis.Redis.from_url(node.url) as client:
        return client.dump("x"), int(client.pttl("x"))


# joanvila/aioredlock 82, mike-marcacci/node-redlock 195
@pytest.mark.parametrize("found", DATA)
def test_the_lock_used_the_very_key_of_the_users_data(kind: str, node: LocalNode, found: str) -> None:
    raw(node, *DATA[found])
    before = dumped(node)
    lock = Lock(node.url, "x", 10, engine=kind)
    assert lock.acquire(blocking=False) is False
    lock.blocking_timeout = 0.02
    named = f"its key holds a {found}" if found != "string" else "somebody else holds it"
    with pytest.raises(LockTimeout, match=named):
        with lock:
            pytest.fail("the block ran")
    for verb in (lock.release, lock.reacquire, lambda: lock.extend(1)):
        with pytest.raises(LockNotOwned):
            verb()
    assert dumped(node) == before
    with Lock(node.url, "x", 10, prefix="lock:", engine=kind):
        assert sorted(raw(node, "KEYS", "*")) == [b"lock:x", b"x"]
        assert dumped(node) == before
    assert raw(node, "KEYS", "*") == [b"x"]
    assert dumped(node) == before


# joanvila/aioredlock 82, mike-marcacci/node-redlock 195
@pytest.mark.parametrize("found", DATA)
@pytest.mark.parametrize("verb", [Lock.release, Lock.reacquire, lambda lock: lock.extend(60)])
def test_data_written_over_a_held_lock_was_deleted_with_it(
    kind: str, node: LocalNode, found: str, verb: Callable[[Lock], object]
) -> None:
    lock = Lock(node.url, "x", 10, engine=kind)
    lock.acquire()
    raw(node, "DEL", "x")
    raw(node, *DATA[found])
    before = dumped(node)
    with pytest.raises(LockLost):
        verb(lock)
    assert not lock.held
    assert lock.acquire(blocking=False) is False  # what the loss left to clean up has been done by now
    assert dumped(node) == before


@pytest.fixture
def theirs(node: LocalNode) -> Iterator[Any]:
    """A lock of redis-py of the same name, held."""
    with redis.Redis.from_url(node.url) as client:
        lock = client.lock("name", timeout=60)
        assert lock.acquire(blocking=False)
        yield lock


def sets(node: LocalNode) -> int:
    """How many SETs it has run since CONFIG RESETSTAT."""
    return int(raw(node, "INFO", "commandstats").get("cmdstat_set", {"calls": 0})["calls"])


# redis/redis-py 498, jazzband/django-redis 596
@pytest.mark.parametrize("place", ["constructor", "call", "call over constructor"])
@pytest.mark.usefixtures("theirs")
def test_the_waiting_time_given_was_ignored(kind: str, node: LocalNode, place: str) -> None:
    made = {"constructor": 0.3, "call": None, "call over constructor": 30.0}[place]
    lock = Lock(node.url, "name", 10, blocking_timeout=made, engine=kind)
    started = time.monotonic()
    assert lock.acquire(blocking_timeout=None if place == "constructor" else 0.3) is False
    assert 0.3 <= time.monotonic() - started < 0.3 + E
    if place == "constructor":
        with pytest.raises(LockTimeout):
            lock.__enter__()
        assert 0.6 <= time.monotonic() - started < 0.6 + 2 * E


# redis/redis-py 498, jazzband/django-redis 596
@pytest.mark.usefixtures("theirs")
def test_that_it_must_not_wait_was_ignored(kind: str, node: LocalNode) -> None:
    started = time.monotonic()
    assert Lock(node.url, "name", 10, engine=kind).acquire(blocking=False) is False
    assert Lock(node.url, "name", 10, blocking=False, engine=kind).acquire() is False
    assert time.monotonic() - started < E
    lock = Lock(node.url, "name", 10, blocking=False, engine=kind)
    assert lock.acquire(blocking=True, blocking_timeout=0.2) is False
    assert time.monotonic() - started >= 0.2


# redis/redis-py 498, jazzband/django-redis 596
@pytest.mark.usefixtures("theirs")
def test_the_pause_between_two_tries_was_ignored(
    kind: str, node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the longest one, where nothing can be heard; each is drawn, and here as long as it can be."""
    monkeypatch.setattr(redbolt.retry, "_random", SimpleNamespace(uniform=lambda low, high: high))
    tries = {}
    for made, given in ((0.01, None), (0.15, None), (0.01, 0.15), (0.15, 0.01)):
        raw(node, "CONFIG", "RESETSTAT")
        lock = Lock(node.url, "name", 10, made, engine=kind, waiting="polling")
        assert lock.acquire(sleep=given, blocking_timeout=0.3) is False
        tries[made, given] = sets(node)
    assert tries[0.15, None] <= 4
    assert tries[0.01, 0.15] <= 4
    assert tries[0.01, None] >= 6
    assert tries[0.15, 0.01] >= 6


# redis/redis-py 498, jazzband/django-redis 596
def test_the_token_and_the_length_given_were_ignored(kind: str, node: LocalNode) -> None:
    lock = Lock(node.url, "name", 3, engine=kind)
    lock.acquire(token="mine")
    assert raw(node, "GET", "name") == b"mine"
    assert 3000 - 1000 * E < raw(node, "PTTL", "name") <= 3000
    lock.extend(4)
    assert 7000 - 1000 * E < raw(node, "PTTL", "name") <= 7000
    lock.extend(4, replace_ttl=True)
    assert 4000 - 1000 * E < raw(node, "PTTL", "name") <= 4000
    with redis.Redis.from_url(node.url) as client:
        other = client.lock("name", timeout=1)
        assert other.acquire(blocking=False) is False
        other.local.token = b"mine"  # a token that is told to another library is a hold there, too
        other.release()
    with pytest.raises(LockLost):
        lock.release()
