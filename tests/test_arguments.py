"""What callers may give; all else is a ValueError or TypeError before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
import redis

import redbolt
from redbolt import Lock, LockTimeout, NodesUnavailable, RedLock, Retry
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import eventually, raw
from tests.kit.resp import OK, reply
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, handshake

NO_SECONDS: list[tuple[Any, type[Exception]]] = [
    (0, ValueError),
    (0.0, ValueError),
    (-0.0, ValueError),
    (-1, ValueError),
    (-1e-9, ValueError),
    (math.nan, ValueError),
    (math.inf, ValueError),
    (-math.inf, ValueError),
    (1e300, ValueError),
    (10**40, ValueError),
    (False, TypeError),
    (True, TypeError),
    ("1", TypeError),
    (b"1", TypeError),
    (Decimal(1), TypeError),
    (1 + 0j, TypeError),
    ([1], TypeError),
]
NO_NAMES: list[tuple[Any, type[Exception]]] = [
    ("", ValueError),
    (b"", ValueError),
    ("\ud800", ValueError),
    ("fine until here \udcff", ValueError),
    ("x" * 65_537, ValueError),
    ("é" * 40_000, ValueError),
    (b"x" * 65_537, ValueError),
    (None, TypeError),
    (1, TypeError),
    (bytearray(b"x"), TypeError),
    (memoryview(b"x"), TypeError),
    (["x"], TypeError),
]


def refused(kind: type[Exception], call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Check that the call raises this very type (a LockError is a ValueError, too); returns the message."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert caught.type is kind
    assert str(caught.value)
    return str(caught.value)


@pytest.fixture
def silent() -> Iterator[ScriptedNode]:
    """A node to which nobody may even connect."""
    with ScriptedNode() as node:
        yield node
        assert node.peers == []


@pytest.fixture
def untouched(kind: str) -> Iterator[Lock]:
    """A lock that is held, and whose node must not get another command until the test ends."""

    def agree(argv: Argv) -> bytes | None:
        return {b"SET": OK, b"DELIFEQ": reply(1)}.get(argv[0]) or handshake(argv)

    with ScriptedNode(answer=agree) as node:
        lock = Lock(node.url, "name", 10, engine=kind)
        lock.acquire()
        before = len(node.received())
        yield lock
        assert len(node.received()) == before
        assert lock.held
        assert 9 < lock.left() < 10
        lock.release()


# ---- the constructor ----


@pytest.mark.parametrize(("name", "error"), NO_NAMES)
def test_a_name_that_is_none(kind: str, silent: ScriptedNode, name: Any, error: type[Exception]) -> None:
    assert "name" in refused(error, Lock, silent.url, name, engine=kind)
    if name is not None:  # a RedLock without a name is for the manager style
        assert "name" in refused(error, RedLock, [silent.url], name, engine=kind)


@pytest.mark.parametrize("option", ["timeout", "node_timeout"])
@pytest.mark.parametrize(("value", "error"), NO_SECONDS)
def test_a_length_of_time_that_is_none(
    kind: str, silent: ScriptedNode, option: str, value: Any, error: type[Exception]
) -> None:
    assert option in refused(error, Lock, silent.url, "name", engine=kind, **{option: value})
    assert option in refused(error, RedLock, [silent.url], "name", engine=kind, **{option: value})


@pytest.mark.parametrize("option", ["sleep", "blocking_timeout"])
@pytest.mark.parametrize(
    ("value", "error"), [pair for pair in NO_SECONDS if pair[0] != 0 or pair[0] is False]
)
def test_a_pause_that_is_none(
    kind: str, silent: ScriptedNode, option: str, value: Any, error: type[Exception]
) -> None:
    assert option in refused(error, Lock, silent.url, "name", engine=kind, **{option: value})
    lock = Lock(silent.url, "name", engine=kind)
    assert option in refused(error, lock.acquire, **{option: value})


@pytest.mark.parametrize("timeout", [0.001, 0.002, 1e-9])
def test_a_timeout_that_leaves_no_validity(kind: str, silent: ScriptedNode, timeout: float) -> None:
    assert "no validity" in refused(ValueError, Lock, silent.url, "name", timeout, engine=kind)


def test_a_drift_factor_that_leaves_no_validity(kind: str, silent: ScriptedNode) -> None:
    RedLock([silent.url], "name", 0.021, clock_drift_factor=0.9, engine=kind)
    text = refused(ValueError, RedLock, [silent.url], "name", 0.020, clock_drift_factor=0.9, engine=kind)
    assert "no validity" in text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"blocking": 1}, TypeError),
        ({"blocking": None}, TypeError),
        ({"blocking": 0.5}, TypeError),
        ({"thread_local": "yes"}, TypeError),
        ({"raise_on_release_error": 0}, TypeError),
        ({"prefix": None}, TypeError),
        ({"prefix": 1}, TypeError),
        ({"prefix": "\ud800"}, ValueError),
        ({"prefix": "x" * 65_536}, ValueError),
        ({"retry": 3}, TypeError),
        ({"retry": Retry}, TypeError),
        ({"engine": "fast"}, ValueError),
        ({"engine": ""}, ValueError),
    ],
)
def test_an_option_that_is_none(
    silent: ScriptedNode, options: dict[str, Any], error: type[Exception]
) -> None:
    refused(error, Lock, silent.url, "name", **options)
    refused(error, RedLock, [silent.url], "name", **options)


@pytest.mark.parametrize(
    ("quorum", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2, ValueError),
        (6, ValueError),
        (True, TypeError),
        (3.0, TypeError),
        ("3", TypeError),
    ],
)
def test_a_quorum_below_a_majority_or_above_all(
    kind: str, silent: ScriptedNode, quorum: Any, error: type[Exception]
) -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in range(1, 5)] + [silent.url]
    assert "quorum" in refused(error, RedLock, urls, "name", quorum=quorum, engine=kind)


@pytest.mark.parametrize(("nodes", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_a_majority_is_more_than_half(kind: str, nodes: int, majority: int) -> None:
    urls = [f"redis://127.0.0.1:{port}" for port in range(1, nodes + 1)]
    assert f"{majority} (a majority)" in refused(
        ValueError, RedLock, urls, "name", quorum=majority - 1, engine=kind
    )
    RedLock(urls, "name", quorum=majority, engine=kind)
    with pytest.raises(NodesUnavailable, match=f"needs {majority}"):  # nothing listens on these ports
        RedLock(urls, "name", engine=kind).acquire(blocking=False)


@pytest.mark.parametrize(
    ("factor", "error"),
    [
        (-0.01, ValueError),
        (1, ValueError),
        (math.nan, ValueError),
        (True, TypeError),
        ("0.01", TypeError),
        (None, TypeError),
    ],
)
def test_a_drift_factor_that_is_none(
    kind: str, silent: ScriptedNode, factor: Any, error: type[Exception]
) -> None:
    assert "drift_factor" in refused(
        error, RedLock, [silent.url], "name", clock_drift_factor=factor, engine=kind
    )


# ---- the nodes ----


def test_no_nodes(kind: str) -> None:
    nothing: Any
    for nothing in ([], (), iter(())):
        assert "at least one node" in refused(ValueError, RedLock, nothing, "name", engine=kind)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://127.0.0.1:7001", "redis://127.0.0.1:7001"),
        ("redis://localhost:7001", "redis://127.0.0.1:7001"),
        ("redis://LocalHost:7001", "redis://localhost:7001"),
        ("redis://[::1]:7001", "redis://localhost:7001"),
        ("redis://127.0.0.1", "redis://127.0.0.1:6379"),
        ("redis://127.0.0.1:7001/0", "redis://127.0.0.1:7001/1"),  # one server, so one vote
        ("redis://:one@127.0.0.1:7001", "redis://ann:two@127.0.0.1:7001"),
        ("redis://EXAMPLE.org:7001", "redis://example.org:7001"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock?db=1"),
    ],
)
def test_the_same_node_twice(kind: str, silent: ScriptedNode, one: str, other: str) -> None:
    text = refused(ValueError, RedLock, [one, silent.url, other], "name", engine=kind)
    assert "the same node twice" in text
    assert "two" not in text.replace("twice", "")  # no password
    clients = [redis.Redis.from_url(one), redbolt.Node.from_url(other)]
    assert "the same node twice" in refused(ValueError, RedLock, clients, "name", engine=kind)


def test_one_node_where_a_sequence_is_wanted(kind: str, silent: ScriptedNode) -> None:
    one: Any
    for one in (
        silent.url,
        silent.url.encode(),
        redbolt.Node.from_url(silent.url),
        redis.Redis.from_url(silent.url),
    ):
        assert "sequence" in refused(TypeError, RedLock, one, "name", engine=kind)
    refused(TypeError, RedLock, 5, "name", engine=kind)
    refused(TypeError, RedLock, None, "name", engine=kind)


def test_a_sequence_where_one_node_is_wanted(kind: str, silent: ScriptedNode) -> None:
    for many in ([silent.url], (silent.url,), None, 6379, silent.url.encode()):
        refused(TypeError, Lock, many, "name", engine=kind)
        refused(TypeError, RedLock, [many], "name", engine=kind)


# ---- the verbs ----


@pytest.mark.parametrize(
    ("token", "error"),
    [
        ("", ValueError),
        (b"", ValueError),
        ("\ud800", ValueError),
        (b"x" * 65_537, ValueError),
        (1, TypeError),
        (bytearray(b"x"), TypeError),
        (("x",), TypeError),
    ],
)
def test_a_token_that_is_none(kind: str, silent: ScriptedNode, token: Any, error: type[Exception]) -> None:
    lock = Lock(silent.url, "name", engine=kind)
    assert "token" in refused(error, lock.acquire, token=token)
    assert not lock.held


@pytest.mark.parametrize("blocking", [1, 0, "no", 0.5])
def test_a_blocking_that_is_none(kind: str, silent: ScriptedNode, blocking: Any) -> None:
    assert "blocking" in refused(TypeError, Lock(silent.url, "name", engine=kind).acquire, blocking=blocking)


def test_an_extend_that_is_none(untouched: Lock) -> None:
    for value, error in NO_SECONDS:
        assert "additional_time" in refused(error, untouched.extend, value)
        assert "additional_time" in refused(error, untouched.extend, value, replace_ttl=True)
    for flag in (1, 0, None, "yes"):
        assert "replace_ttl" in refused(TypeError, untouched.extend, 1, replace_ttl=flag)


def test_an_extend_that_leaves_no_validity(untouched: Lock) -> None:
    for value in (0.001, 0.002):
        assert "no validity" in refused(ValueError, untouched.extend, value, replace_ttl=True)


# ---- names, byte for byte ----


NAMES: list[str | bytes] = [
    "plain",
    "with space",
    "\x00",
    "a\x00b",
    "\r\n",
    "a\r\nSET injected 1\r\n",
    "$5\r\nhello\r\n*1",
    "🔒🗝️",
    "日本語",
    "é",
    "e\u0301",  # looks the same, and is another name
    "{tag}rest",
    b"\xff\xfe\x00",
    b"\x80",
    "x" * 65_536,
    "*",
    "[a-z]?",
    "%s{}\\",
]


def test_names_are_kept_byte_for_byte(kind: str, node: LocalNode) -> None:
    for name in NAMES:
        key = name if isinstance(name, bytes) else name.encode()
        with Lock(node.url, name, engine=kind) as lock:
            assert raw(node, "KEYS", "*") == [key]
            assert lock.owned()
            assert lock.locked()
            lock.extend(1)
            assert Lock(node.url, key, engine=kind).acquire(blocking=False) is False
            assert repr(lock).isprintable()
        assert raw(node, "DBSIZE") == 0


def test_a_prefix_and_a_name_of_different_types(kind: str, valkey: LocalNode) -> None:
    for prefix, name in (("ключ:", b"\xff"), (b"\xff", "ключ"), (b"a", b"b"), ("", "x")):
        with Lock(valkey.url, name, prefix=prefix, engine=kind):
            parts = [part.encode() if isinstance(part, str) else part for part in (prefix, name)]
            assert raw(valkey, "KEYS", "*") == [b"".join(parts)]


# ---- a key of another type ----

FOREIGN = {
    "list": ("RPUSH", "name", "a", "b"),
    "hash": ("HSET", "name", "field", "value"),
    "set": ("SADD", "name", "a"),
    "zset": ("ZADD", "name", "1", "a"),
    "stream": ("XADD", "name", "1-1", "field", "value"),
}


def test_a_key_of_another_type_is_taken_and_stays_as_it_was(kind: str, nodes: LocalNodes) -> None:
    for what, command in FOREIGN.items():
        for node in nodes:
            raw(node, "DEL", "name")
            raw(node, *command)
        before = [raw(node, "DUMP", "name") for node in nodes]
        urls = [node.url for node in nodes]
        for lock in (Lock(urls[0], "name", engine=kind), RedLock(urls, "name", engine=kind)):
            assert lock.acquire(blocking=False) is False
            assert lock.acquire(sleep=0.005, blocking_timeout=0.01) is False
            assert lock.locked() is True
            lock.blocking = False
            with pytest.raises(LockTimeout, match=f"holds a {what}"):
                with lock:
                    pytest.fail("this block must not run")
            assert not lock.held
        assert [raw(node, "DUMP", "name") for node in nodes] == before
        assert [raw(node, "PTTL", "name") for node in nodes] == [-1] * 5
        assert [raw(node, "DBSIZE") for node in nodes] == [1] * 5


def test_a_key_that_turned_into_another_type_is_lost_and_stays_as_it_is(kind: str, nodes: LocalNodes) -> None:
    urls = [node.url for node in nodes]

    def replaced(lock: Lock) -> Lock:
        lock.acquire()
        eventually(lambda: all(raw(node, "EXISTS", "name") for node in lock_nodes(lock, nodes)))
        for node in nodes:
            raw(node, "DEL", "name")
            raw(node, "RPUSH", "name", "a", "b")
        return lock

    for make in (lambda: Lock(urls[0], "name", engine=kind), lambda: RedLock(urls, "name", engine=kind)):
        for verb in (Lock.release, Lock.reacquire, lambda lock: lock.extend(1)):
            lock = replaced(make())
            assert lock.owned() is False
            with pytest.raises(redbolt.LockLost):
                verb(lock)
            assert not lock.held
            assert [raw(node, "LRANGE", "name", 0, -1) for node in nodes] == [[b"a", b"b"]] * 5
            assert [raw(node, "PTTL", "name") for node in nodes] == [-1] * 5
            for node in nodes:
                raw(node, "DEL", "name")


def lock_nodes(lock: Lock, nodes: LocalNodes) -> list[LocalNode]:
    """The servers that the lock lives on."""
    return list(nodes)[: len(lock.nodes)]
