"""The manager style of `RedLock`: its mapping, its arguments one by one, and both styles side by side.

What it has in common with `Locker` is in test_locker.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from redbolt import LockError, LockLost, LockNotOwned, NodesUnavailable, RedLock, ReleaseUnconfirmed, Retry
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import paused
from tests.kit.resp import OK
from tests.kit.rounds import InBackground, by_name
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv
from tests.test_arguments import NO_NAMES, NO_SECONDS, refused
from tests.test_locker import (
    FOREIGN,
    LIMIT,
    NO_COUNTS,
    NO_PAUSES,
    all_answer,
    holding,
    tries_of,
    ttl_is,
    urls_of,
)

REFUSED = {"validity": False, "token": None, "validity_ms": 0, "servers": 0}
NAMELESS = "made without a name"
NO_TTLS: list[tuple[Any, type[Exception]]] = [
    (0, ValueError),
    (-1, ValueError),
    (1, ValueError),  # the drift of clocks alone takes more
    (2, ValueError),
    (10**40, ValueError),
    (True, TypeError),
    (False, TypeError),
    (None, TypeError),
    ("1000", TypeError),
    (b"1000", TypeError),
    (1000.0, TypeError),
    (math.nan, TypeError),
    (math.inf, TypeError),
    ([1000], TypeError),
]


@pytest.fixture(params=[1, 3, 5])
def servers(request: pytest.FixtureRequest, valkeys: LocalNodes) -> list[LocalNode]:
    """So many servers."""
    count: int = request.param
    return list(valkeys)[:count]


@pytest.fixture
def manager(kind: str, servers: list[LocalNode]) -> RedLock:
    """A manager on these servers."""
    return RedLock(urls_of(servers), node_timeout=LIMIT, engine=kind)


@pytest.fixture
def named(kind: str, servers: list[LocalNode]) -> RedLock:
    """A lock with a name and a lease of ten seconds, on these servers."""
    return RedLock(urls_of(servers), "name", 10, node_timeout=LIMIT, engine=kind)


@pytest.fixture
def silent() -> Iterator[ScriptedNode]:
    """A node to which nobody may even connect."""
    with ScriptedNode() as node:
        yield node
        assert node.peers == []


# ---- the mapping ----


def test_what_lock_returns(manager: RedLock, servers: list[LocalNode]) -> None:
    found = manager.lock("order:1", 30_000)
    assert set(found) == {"validity", "token", "validity_ms", "servers"}
    assert found["validity"] is True
    assert isinstance(found["token"], str)
    assert 30_000 - 302 - 1000 * LIMIT < found["validity_ms"] <= 30_000 - 302
    assert isinstance(found["validity_ms"], int)
    assert len(servers) // 2 + 1 <= found["servers"] <= len(servers)
    all_answer(servers, found["token"].encode(), "GET", "order:1")
    assert manager.lock("order:1", ttl_ms=30_000) == REFUSED
    assert manager.unlock("order:1", found["token"]) is True
    all_answer(servers, 0, "DBSIZE")


def test_each_mapping_is_its_own(manager: RedLock, servers: list[LocalNode]) -> None:
    for _ in range(2):
        found = manager.lock("order:1", 30_000)
        assert found["validity"]
        again: Any = manager.lock("order:1", 30_000)
        assert again == REFUSED
        again["validity"] = True  # a caller may do with it what it likes
        assert found["token"]
        assert manager.unlock("order:1", found["token"])


@pytest.mark.parametrize(("factor", "drift_ms"), [(0.01, 102), (0.5, 5_002), (0, 2)])
@pytest.mark.parametrize("elapsed", [0, 3])
def test_validity_is_what_the_try_and_the_drift_leave_of_the_lease(
    kind: str, clock: Callable[[float], None], factor: float, drift_ms: int, elapsed: int
) -> None:
    def late(argv: Argv) -> bytes:
        clock(elapsed)
        return OK

    with ScriptedNode(answer=by_name(SET=late)) as node:
        manager = RedLock([node.url], node_timeout=60, clock_drift_factor=factor, engine=kind)
        found = manager.lock("order:1", 10_000)
        most = 10_000 - 1000 * elapsed - drift_ms
        assert most - 500 * SLACK < found["validity_ms"] <= most
        assert found["servers"] == 1


def test_validity_counts_from_the_try_that_was_granted(kind: str, clock: Callable[[float], None]) -> None:
    """Not from the first one."""
    replies = iter([b"$-1\r\n", OK])

    def reply(argv: Argv) -> bytes:
        clock(8)
        return next(replies)

    with ScriptedNode(answer=by_name(SET=reply, TYPE=b"+string\r\n")) as node:
        manager = RedLock([node.url], node_timeout=60, retry_delay=0, engine=kind)
        found = manager.lock("order:1", 10_000)
        assert 10_000 - 8_000 - 102 - 500 * SLACK < found["validity_ms"] <= 10_000 - 8_000 - 102


def test_a_grant_without_validity_is_none(kind: str, clock: Callable[[float], None]) -> None:
    """It comes when the lease is over, less the drift: then it is taken back."""

    def late(argv: Argv) -> bytes:
        clock(0.95)
        return OK

    with ScriptedNode(answer=by_name(SET=late, EVAL=b":1\r\n")) as node:
        manager = RedLock([node.url], node_timeout=60, retry_count=1, clock_drift_factor=0.1, engine=kind)
        with pytest.raises(NodesUnavailable, match="no validity was left"):
            manager.lock("order:1", 1_000)
        eventually(lambda: node.received("EVAL"), what="it is taken back")
        assert node.received("EVAL")[0].argv[3:] == (b"order:1", node.received("SET")[0].argv[2])


@pytest.mark.parametrize(("count", "dead"), [(1, 0), (3, 1), (5, 2)])
def test_servers_counts_the_grants(kind: str, valkeys: LocalNodes, count: int, dead: int) -> None:
    servers = list(valkeys)[:count]
    manager = RedLock(urls_of(servers), node_timeout=LIMIT, engine=kind)
    for server in servers[:dead]:
        server.kill()
    assert manager.lock("order:1", 30_000)["servers"] == count - dead


def test_servers_counts_not_those_that_refuse(kind: str, valkeys: LocalNodes) -> None:
    servers = list(valkeys)
    for server in servers[:2]:
        raw(server, "SET", "order:1", FOREIGN, "PX", 60_000)
    found = RedLock(urls_of(servers), node_timeout=LIMIT, engine=kind).lock("order:1", 30_000)
    assert (found["validity"], found["servers"]) == (True, 3)
    all_answer(servers[:2], FOREIGN, "GET", "order:1")


# ---- what the arguments do, one by one ----


def test_the_documented_defaults() -> None:
    found = inspect.signature(RedLock.__init__).parameters
    defaults = {name: found[name].default for name in ("name", "retry_count", "retry_delay", "node_timeout")}
    assert defaults == {"name": None, "retry_count": 3, "retry_delay": 0.2, "node_timeout": 0.05}
    assert found["clock_drift_factor"].default == 0.01
    assert list(inspect.signature(RedLock.lock).parameters) == ["self", "resource", "ttl_ms"]
    assert list(inspect.signature(RedLock.unlock).parameters) == ["self", "resource", "token"]


def test_retry_count_and_retry_delay_are_those_of_lock_alone(kind: str, pauses: list[float]) -> None:
    with ScriptedNode(answer=holding) as node:
        manager = RedLock(
            [node.url], "name", retry=Retry(2, 5.0), retry_count=4, retry_delay=7.0, engine=kind,
            node_timeout=LIMIT, waiting="polling",
        )  # fmt: skip
        assert manager.lock("order:1", 30_000) == REFUSED
        assert tries_of(node) == 4
        assert [round(pause + 0.4) for pause in pauses] == [7, 7, 7]
        pauses.clear()
        assert manager.acquire() is False
        assert tries_of(node) == 6
        assert [round(pause + 0.4) for pause in pauses] == [5]


def test_ttl_ms_is_the_life_of_the_key(kind: str) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        manager = RedLock([node.url], engine=kind, node_timeout=LIMIT)
        for ttl_ms in (3, 700, 12_345, 86_400_000):
            if ttl_ms > 3:
                manager.lock("order:1", ttl_ms)
            else:
                with ExitStack() as stack:  # so short that it may be over when the answer comes
                    stack.enter_context(_ignored(NodesUnavailable))
                    manager.lock("order:1", ttl_ms)
            assert node.received("SET")[-1].argv[3:] == (b"NX", b"PX", b"%d" % ttl_ms)
        manager.extend("order:1", "token", 777)
        assert node.received("SET")[-1].argv == (
            b"SET", b"order:1", b"token", b"IFEQ", b"token", b"PX", b"777",
        )  # fmt: skip


class _ignored:
    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._kind)


def test_prefix_stands_before_each_resource(kind: str, servers: list[LocalNode]) -> None:
    manager = RedLock(urls_of(servers), prefix="locks:", engine=kind, node_timeout=LIMIT)
    found = manager.lock("order:1", 30_000)
    assert found["token"]
    all_answer(servers, [b"locks:order:1"], "KEYS", "*")
    assert manager.extend("order:1", found["token"], 60_000) is True
    ttl_is(servers, 60_000, "locks:order:1")
    assert manager.unlock("order:1", found["token"]) is True
    all_answer(servers, 0, "DBSIZE")


@pytest.mark.parametrize(("dead", "granted"), [(1, True), (2, False)])
def test_quorum_counts_for_every_verb(kind: str, valkeys: LocalNodes, dead: int, granted: bool) -> None:
    servers = list(valkeys)
    manager = RedLock(urls_of(servers), quorum=4, retry_count=1, engine=kind, node_timeout=LIMIT)
    for server in servers[:dead]:
        server.kill()
    if granted:
        found = manager.lock("order:1", 30_000)
        assert found["servers"] == 4
        assert found["token"]
        assert manager.extend("order:1", found["token"], 60_000) is True
        assert manager.unlock("order:1", found["token"]) is True
        return
    with pytest.raises(NodesUnavailable, match="needs 4"):
        manager.lock("order:1", 30_000)
    for server in servers[dead:]:
        raw(server, "SET", "order:2", "token", "PX", 10_000)
    with pytest.raises(NodesUnavailable, match="needs 4"):
        manager.extend("order:2", "token", 30_000)
    with pytest.raises(ReleaseUnconfirmed, match="4 are needed"):
        manager.unlock("order:2", "token")


@pytest.mark.parametrize("verb", ["lock", "extend", "unlock"])
def test_node_timeout_bounds_every_verb(kind: str, servers: list[LocalNode], verb: str) -> None:
    manager = RedLock(urls_of(servers), node_timeout=0.123, retry_count=1, engine=kind)
    args: Any = {
        "lock": ("order:1", 30_000),
        "extend": ("order:1", "token", 30_000),
        "unlock": ("order:1", "token"),
    }
    with paused(*servers):
        with pytest.raises((NodesUnavailable, ReleaseUnconfirmed), match="within 123 ms"):
            getattr(manager, verb)(*args[verb])
    all_answer(servers, 0, "DBSIZE")


def test_clients_may_be_any_iterable_of_nodes(kind: str, valkeys: LocalNodes) -> None:
    servers = list(valkeys)[:3]
    manager = RedLock((url for url in urls_of(servers)), engine=kind, node_timeout=LIMIT)
    assert [node.port for node in manager.nodes] == [server.port for server in servers]
    assert manager.lock("order:1", 30_000)["validity"]


# ---- without a name ----


def test_without_a_name_there_is_nothing_to_acquire(kind: str, silent: ScriptedNode) -> None:
    for lock in (RedLock([silent.url], engine=kind), RedLock([silent.url], None, prefix="p:", engine=kind)):
        entered = False

        def enter(lock: RedLock = lock) -> None:
            nonlocal entered
            with lock:
                entered = True

        for verb in (
            lock.acquire,
            lambda lock=lock: lock.acquire(blocking=False, token="token"),
            lock.locked,
            enter,
        ):
            text = refused(ValueError, verb)
            assert NAMELESS in text
            assert "lock(), unlock() and extend()" in text  # what to do instead
        assert not entered
        for change in (lock.release, lock.reacquire, lambda lock=lock: lock.extend(5)):
            with pytest.raises(LockNotOwned) as caught:
                change()
            assert type(caught.value) is LockNotOwned
        assert lock.held is False
        assert lock.left() == 0.0
        assert lock.lease is None
        assert lock.owned() is False
        assert lock.name is None
        assert f"127.0.0.1:{silent.port}" in repr(lock)
        assert repr(lock).startswith("<RedLock ")


def test_an_empty_name_is_none(kind: str, silent: ScriptedNode) -> None:
    for name in ("", b""):
        assert "name" in refused(ValueError, RedLock, [silent.url], name, engine=kind)


# ---- with a name: both styles side by side ----


def test_both_styles_exclude_each_other(named: RedLock, servers: list[LocalNode]) -> None:
    with named:
        assert named.lock("name", 30_000) == REFUSED
        assert named.owned()
        other = named.lock("another", 30_000)
        assert other["validity"]
    found = named.lock("name", 30_000)
    assert found["token"]
    assert named.acquire(blocking=False) is False
    assert named.locked() is True
    assert not named.held  # a token is nobody's hold
    with pytest.raises(LockNotOwned):
        named.release()
    assert named.unlock("name", found["token"]) is True
    assert other["token"]
    assert named.unlock("another", other["token"]) is True
    all_answer(servers, 0, "DBSIZE")


def test_a_hold_can_be_given_back_by_its_token(named: RedLock, servers: list[LocalNode]) -> None:
    named.acquire()
    assert named.lease is not None
    token = named.lease.token
    all_answer(servers, token, "GET", "name")
    assert named.extend("name", token, 60_000) is True
    ttl_is(servers, 60_000, "name")
    assert 9 < named.left() < 10  # what the object knows is not touched
    assert InBackground(lambda: named.unlock("name", token)).result() is True
    with pytest.raises(LockLost):
        named.release()


def test_extend_in_both_styles(named: RedLock, servers: list[LocalNode]) -> None:
    named.acquire()
    found = named.lock("order:1", 10_000)
    token = found["token"]
    assert token
    assert named.extend(10) is True
    ttl_is(servers, 20_000, "name")
    assert named.extend(7, True) is True
    assert named.extend(additional_time=7, replace_ttl=True) is True
    assert named.extend(replace_ttl=True, additional_time=7) is True
    ttl_is(servers, 7_000, "name")
    assert 4 < named.left() < 7
    ttl_is(servers, 10_000, "order:1")  # that one is untouched
    for ttl_ms, args, options in (
        (60_000, ("order:1", token, 60_000), {}),
        (50_000, (b"order:1", token.encode(), 50_000), {}),
        (40_000, ("order:1", token), {"ttl_ms": 40_000}),
        (30_000, ("order:1",), {"ttl_ms": 30_000, "token": token}),
        (20_000, (), {"ttl_ms": 20_000, "token": token, "resource": "order:1"}),
    ):
        verb: Any = named.extend
        assert verb(*args, **options) is True
        ttl_is(servers, ttl_ms, "order:1")
    ttl_is(servers, 7_000, "name")
    assert named.extend("order:1", "wrong", 99_000) is False
    assert named.extend("name", token, 99_000) is False
    named.release()
    with pytest.raises(LockNotOwned):
        named.extend(5)
    assert named.extend("order:1", token, 5_000) is True


MIXED_UP: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, "additional_time"),
    (("order:1",), {}, "token"),
    (("5",), {}, "token"),
    (("order:1", "token"), {}, "ttl_ms"),
    (("order:1", 5_000), {}, "ttl_ms"),
    (("order:1", 5_000, "token"), {}, "ttl_ms"),
    (("order:1", "token", 5_000, True), {}, "positional"),
    ((5, "token", 5_000), {}, "positional"),
    ((5, True, 5_000), {}, "positional"),
    ((5, "token"), {}, "replace_ttl"),
    ((5,), {"token": "token"}, "token"),
    ((5,), {"ttl_ms": 5_000}, "ttl_ms"),
    ((5,), {"resource": "order:1"}, "resource"),
    ((), {"token": "token", "ttl_ms": 5_000}, "token"),
    ((), {"resource": "order:1", "additional_time": 5}, "additional_time"),
    (("order:1", "token"), {"replace_ttl": True}, "replace_ttl"),
    (("order:1", "token", 5_000), {"replace_ttl": True}, "replace_ttl"),
    (("order:1", "token", 5_000), {"resource": "order:1"}, "resource"),
    (("order:1", 5, 5_000), {}, "token"),
    (("order:1", None, 5_000), {}, "token"),
    (("order:1", "token", 5.0), {}, "ttl_ms"),
    (("order:1", "token", "5000"), {}, "ttl_ms"),
    (("order:1", "token", True), {}, "ttl_ms"),
    ((), {"resource": 5, "token": "token", "ttl_ms": 5_000}, "name"),
    ((), {"resource": None, "token": "token", "ttl_ms": 5_000}, "name"),
    ((None,), {}, "additional_time"),
    ((bytearray(b"order:1"), "token"), {}, "additional_time"),
    ((True,), {}, "additional_time"),
]


@pytest.mark.parametrize(("args", "options", "told"), MIXED_UP)
def test_arguments_of_extend_that_are_mixed_up(
    kind: str, args: tuple[Any, ...], options: dict[str, Any], told: str
) -> None:
    """Each is a TypeError that names the argument, before anything is sent."""
    with ScriptedNode(answer=by_name(SET=OK, DELIFEQ=b":1\r\n")) as node:
        lock: Any = RedLock([node.url], "name", 10, engine=kind, node_timeout=LIMIT)
        lock.acquire()
        assert told in refused(TypeError, lock.extend, *args, **options)
        assert len(node.received()) == 1
        assert 9 < lock.left() < 10
        lock.release()


# ---- arguments that are none ----


def test_a_length_of_time_that_is_none(kind: str, silent: ScriptedNode) -> None:
    manager = RedLock([silent.url], engine=kind)
    for value, error in NO_TTLS:
        assert "ttl_ms" in refused(error, manager.lock, "order:1", value)
        assert "ttl_ms" in refused(error, manager.lock, resource="order:1", ttl_ms=value)
        assert "ttl_ms" in refused(error, manager.extend, "order:1", "token", value)
        assert "ttl_ms" in refused(error, manager.extend, resource="order:1", token="token", ttl_ms=value)


def test_a_drift_that_leaves_no_validity(kind: str, silent: ScriptedNode) -> None:
    manager = RedLock([silent.url], clock_drift_factor=0.9, engine=kind)
    for verb in (
        lambda ttl_ms: manager.lock("order:1", ttl_ms),
        lambda ttl_ms: manager.extend("order:1", "token", ttl_ms),
    ):
        assert "no validity" in refused(ValueError, verb, 20)


def test_a_name_or_resource_that_is_none(kind: str, silent: ScriptedNode) -> None:
    manager = RedLock([silent.url], engine=kind)
    for name, error in NO_NAMES:
        assert "name" in refused(error, manager.lock, name, 30_000)
        assert "name" in refused(error, manager.unlock, name, "token")
        assert "name" in refused(error, manager.extend, resource=name, token="token", ttl_ms=30_000)
        if name is not None:
            assert "name" in refused(error, RedLock, [silent.url], name, engine=kind)


def test_arguments_of_the_manager_that_are_none(silent: ScriptedNode) -> None:
    nodes = [silent.url]
    value: Any
    error: type[Exception]
    for value, error in NO_COUNTS:
        assert "retry_count" in refused(error, RedLock, nodes, retry_count=value)
    for value, error in NO_PAUSES:
        assert "retry_delay" in refused(error, RedLock, nodes, retry_delay=value)
    for value, error in NO_SECONDS:
        assert "node_timeout" in refused(error, RedLock, nodes, node_timeout=value)
    factors: list[tuple[Any, type[Exception]]] = [
        (-0.01, ValueError), (1, ValueError), (2, ValueError), (math.nan, ValueError), (math.inf, ValueError),
        (True, TypeError), ("0.01", TypeError), (None, TypeError),
    ]  # fmt: skip
    for value, error in factors:
        assert "clock_drift_factor" in refused(error, RedLock, nodes, clock_drift_factor=value)
    prefixes: list[tuple[Any, type[Exception]]] = [
        (None, TypeError), (1, TypeError), ("\ud800", ValueError), ("x" * 65_537, ValueError),
    ]  # fmt: skip
    for value, error in prefixes:
        assert "prefix" in refused(error, RedLock, nodes, prefix=value)  # also without a name
    for value in (0, 2, True, "1"):
        refused(ValueError if type(value) is int else TypeError, RedLock, nodes, quorum=value)
    refused(ValueError, RedLock, [])
    refused(TypeError, RedLock, silent.url)
    refused(ValueError, RedLock, nodes, engine="fast")


def test_there_are_no_further_arguments(kind: str, silent: ScriptedNode) -> None:
    manager: Any = RedLock([silent.url], engine=kind)
    refused(TypeError, manager.lock, "order:1")
    refused(TypeError, manager.lock, "order:1", 30_000, 3)
    refused(TypeError, manager.lock, "order:1", ttl=30_000)
    refused(TypeError, manager.unlock, "order:1")
    refused(TypeError, manager.unlock, {"resource": "order:1", "token": "token"})


def test_errors_are_of_the_one_tree_and_name_the_resource(kind: str, valkeys: LocalNodes) -> None:
    servers = list(valkeys)[:3]
    manager = RedLock(urls_of(servers), prefix="p:", retry_count=1, engine=kind, node_timeout=LIMIT)
    for server in servers:
        server.kill()
    for verb in (
        lambda: manager.lock("order:1", 30_000),
        lambda: manager.extend("order:1", "token", 30_000),
        lambda: manager.unlock("order:1", "token"),
    ):
        with pytest.raises(LockError) as caught:
            verb()
        assert caught.value.lock_name == "p:order:1"
        assert "'p:order:1'" in str(caught.value)
