"""Locks by key and token: what `Locker` and the manager style of `RedLock` have in common, and what is the
Locker's alone.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import pytest
import redis

import redbolt
from redbolt import Locker, NodesUnavailable, RedLock, ReleaseUnconfirmed, SetupError
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import paused
from tests.kit.proxy import FaultProxy
from tests.kit.resp import NIL, OK, error
from tests.kit.rounds import InBackground, by_name
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv
from tests.test_arguments import NO_NAMES, NO_SECONDS, refused
from tests.test_interrupts import Interrupt, Place, interrupted, no_token_is_left

LIMIT = 1.0 * SLACK
"""Seconds that a node may take to answer, where it does."""
FOREIGN = b"somebody else's"
NO_TOKENS: list[tuple[Any, type[Exception]]] = [
    ("", ValueError),
    (b"", ValueError),
    ("\ud800", ValueError),
    ("x" * 65_537, ValueError),
    (None, TypeError),
    (1, TypeError),
    (True, TypeError),
    (bytearray(b"x"), TypeError),
    (["x"], TypeError),
]
NO_COUNTS: list[tuple[Any, type[Exception]]] = [
    (0, ValueError),
    (-1, ValueError),
    (True, TypeError),
    (False, TypeError),
    (3.0, TypeError),
    ("3", TypeError),
    (None, TypeError),
]
NO_PAUSES: list[tuple[Any, type[Exception]]] = [
    *(pair for pair in NO_SECONDS if pair[0] != 0 or pair[0] is False),
    (None, TypeError),
]


class Locks(Protocol):
    """Locks by key, in one of the two styles; times are in milliseconds."""

    def take(self, key: str | bytes, ttl_ms: int = 10_000) -> str | None: ...

    def give_back(self, key: str | bytes, token: str | bytes) -> bool: ...

    def prolong(self, key: str | bytes, token: str | bytes, ttl_ms: int) -> bool: ...


class LockerStyle:
    """A `Locker`, on one node or on a sequence of them."""

    def __init__(
        self,
        urls: Sequence[str],
        kind: str | None,
        tries: int = 3,
        delay: float = 0.01,
        node_timeout: float = LIMIT,
    ) -> None:
        client: Any = urls[0] if len(urls) == 1 else urls
        self.locker = Locker(client, node_timeout=node_timeout, engine=kind)
        self._tries, self._delay = tries, delay

    def take(self, key: str | bytes, ttl_ms: int = 10_000) -> str | None:
        return self.locker.acquire(key, ttl_ms / 1000, self._tries, self._delay)

    def give_back(self, key: str | bytes, token: str | bytes) -> bool:
        return self.locker.release(key, token)

    def prolong(self, key: str | bytes, token: str | bytes, ttl_ms: int) -> bool:
        return self.locker.extend(key, token, ttl_ms / 1000)


class ManagerStyle:
    """A `RedLock` without a name."""

    def __init__(
        self,
        urls: Sequence[str],
        kind: str | None,
        tries: int = 3,
        delay: float = 0.01,
        node_timeout: float = LIMIT,
    ) -> None:
        self.manager = RedLock(
            urls, retry_count=tries, retry_delay=delay, node_timeout=node_timeout, engine=kind
        )

    def take(self, key: str | bytes, ttl_ms: int = 10_000) -> str | None:
        found = self.manager.lock(key, ttl_ms)
        assert found["validity"] is (found["token"] is not None)
        return found["token"]

    def give_back(self, key: str | bytes, token: str | bytes) -> bool:
        return self.manager.unlock(key, token)

    def prolong(self, key: str | bytes, token: str | bytes, ttl_ms: int) -> bool:
        return self.manager.extend(key, token, ttl_ms)


STYLES: dict[str, type[LockerStyle] | type[ManagerStyle]] = {"Locker": LockerStyle, "RedLock": ManagerStyle}


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> type[LockerStyle] | type[ManagerStyle]:
    """Each style in turn."""
    name: str = request.param
    return STYLES[name]


@pytest.fixture(params=[1, 3, 5])
def count(request: pytest.FixtureRequest) -> int:
    """How many nodes."""
    number: int = request.param
    return number


@pytest.fixture
def servers(valkeys: LocalNodes, count: int) -> list[LocalNode]:
    """So many servers."""
    return list(valkeys)[:count]


@pytest.fixture
def locks(style, kind: str, servers: list[LocalNode]) -> Locks:
    """Locks on these servers."""
    return style(urls_of(servers), kind)


def urls_of(servers: Sequence[LocalNode]) -> list[str]:
    return [server.url for server in servers]


def all_answer(servers: Sequence[LocalNode], value: object, *argv: str | bytes | int) -> None:
    """Wait until each server answers this: a quorum is enough for us, so the others may be late."""
    eventually(
        lambda: [raw(server, *argv) for server in servers] == [value] * len(servers),
        1,
        f"all answer {value!r} to {argv!r}",
    )


def taken(locks: Locks, servers: Sequence[LocalNode], key: str = "key", ttl_ms: int = 10_000) -> str:
    """Take a lock, and wait until all servers have it."""
    token = locks.take(key, ttl_ms)
    assert token is not None
    all_answer(servers, token.encode(), "GET", key)
    return token


def ttl_is(servers: Sequence[LocalNode], ttl_ms: int, key: str = "key") -> None:
    """Wait until each server has given the key this life; a part of it may be over."""

    def check() -> bool:
        ttls = [raw(server, "PTTL", key) for server in servers]
        assert all(ttl_ms * 0.6 < ttl <= ttl_ms for ttl in ttls), f"{ttls} ms"
        return True

    eventually(check, 3, f"the key lives on for {ttl_ms} ms")


def ends(servers: Sequence[LocalNode], key: str = "key") -> list[Any]:
    """Value and end of the key on each server."""
    return [(raw(server, "GET", key), raw(server, "PEXPIRETIME", key)) for server in servers]


def addresses(servers: Sequence[LocalNode]) -> set[str]:
    return {f"127.0.0.1:{server.port}" for server in servers}


def tries_of(node: ScriptedNode) -> int:
    return len(node.received("SET"))


# ---- take, prolong, give back ----


def test_a_token_is_taken_prolonged_and_given_back(style, kind: str, nodes: LocalNodes, count: int) -> None:
    servers = list(nodes)[:count]
    locks = style(urls_of(servers), kind)
    token = locks.take("key", 10_000)
    assert isinstance(token, str)
    assert len(bytes.fromhex(token)) == 16
    all_answer(servers, token.encode(), "GET", "key")
    ttl_is(servers, 10_000)
    assert locks.prolong("key", token, 20_000) is True
    ttl_is(servers, 20_000)
    assert locks.give_back("key", token) is True
    all_answer(servers, 0, "DBSIZE")


def test_the_key_is_exactly_the_name(locks: Locks, servers: list[LocalNode]) -> None:
    names: list[str | bytes] = ["order:1", "ключ 🔒", b"\xff\x00\r\n", "x" * 65_536, "*"]
    for name in names:
        token = locks.take(name)
        assert token is not None
        all_answer(servers, [name if isinstance(name, bytes) else name.encode()], "KEYS", "*")
        assert locks.prolong(name, token, 5_000) is True
        assert locks.give_back(name, token) is True
        all_answer(servers, 0, "DBSIZE")


def test_every_take_has_another_token(locks: Locks) -> None:
    seen = set()
    for _ in range(10):
        token = locks.take("key")
        assert token is not None
        assert locks.give_back("key", token)
        seen.add(token)
    assert len(seen) == 10


def test_what_is_taken_stays_so_for_everybody(locks: Locks, servers: list[LocalNode], style, kind) -> None:
    token = taken(locks, servers)
    before = ends(servers)
    for other in (locks, style(urls_of(servers), kind, tries=1)):
        assert other.take("key", 60_000) is None
    assert ends(servers) == before
    lock = RedLock(urls_of(servers), "key", engine=kind, node_timeout=LIMIT)
    assert lock.acquire(blocking=False) is False
    assert locks.give_back("key", token) is True
    assert lock.acquire() is True
    assert locks.take("key") is None
    lock.release()


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_token_may_be_text_or_bytes(locks: Locks, servers: list[LocalNode], as_bytes: bool) -> None:
    for value in ("plain", "ключ 🔑", "\0\r\n"):
        token = value.encode() if as_bytes else value
        for server in servers:
            raw(server, "SET", "key", value, "PX", 1000)
        assert locks.prolong("key", token, 10_000) is True
        ttl_is(servers, 10_000)
        assert locks.give_back("key", token) is True
        all_answer(servers, 0, "DBSIZE")


def test_a_token_that_is_no_text(locks: Locks, servers: list[LocalNode]) -> None:
    for server in servers:
        raw(server, "SET", "key", b"\xff\xfe", "PX", 1000)
    assert locks.prolong("key", b"\xff\xfe", 10_000) is True
    assert locks.give_back("key", b"\xff\xfe") is True


def test_a_wrong_token_changes_nothing(locks: Locks, servers: list[LocalNode]) -> None:
    token = taken(locks, servers)
    before = ends(servers)
    for wrong in ("wrong", token + "x", token[:-1], token.upper() + " ", b"\0"):
        assert locks.give_back("key", wrong) is False
        assert locks.prolong("key", wrong, 60_000) is False
        assert locks.prolong("key", wrong, 10) is False
    assert locks.give_back("another key", token) is False
    assert locks.prolong("another key", token, 60_000) is False
    assert locks.take("key") is None  # all connections have run what went before
    assert ends(servers) == before
    all_answer(servers, 1, "DBSIZE")
    assert locks.give_back("key", token) is True


def test_prolong_sets_the_life_and_does_not_add(locks: Locks, servers: list[LocalNode]) -> None:
    token = taken(locks, servers, ttl_ms=60_000)
    for ttl_ms in (10_000, 10_000, 30_000, 5_000):
        assert locks.prolong("key", token, ttl_ms) is True
        ttl_is(servers, ttl_ms)
        all_answer(servers, token.encode(), "GET", "key")


def test_nothing_is_revived(locks: Locks, servers: list[LocalNode]) -> None:
    """The lease has ended on the servers: a late prolong or give_back does nothing, whoever comes next."""
    token = taken(locks, servers, ttl_ms=60_000)
    for server in servers:
        assert raw(server, "PEXPIRE", "key", 1) == 1
    all_answer(servers, None, "GET", "key")
    assert locks.prolong("key", token, 60_000) is False
    assert locks.give_back("key", token) is False
    all_answer(servers, 0, "DBSIZE")
    after = taken(locks, servers)
    before = ends(servers)
    assert locks.prolong("key", token, 60_000) is False
    assert locks.give_back("key", token) is False
    assert ends(servers) == before
    assert locks.give_back("key", after) is True


def test_the_second_give_back_is_false(locks: Locks, servers: list[LocalNode]) -> None:
    token = taken(locks, servers)
    assert locks.give_back("key", token) is True
    for _ in range(3):
        assert locks.give_back("key", token) is False
        assert locks.prolong("key", token, 1_000) is False
    all_answer(servers, 0, "DBSIZE")


def test_a_key_of_another_type_is_taken_and_left_alone(locks: Locks, servers: list[LocalNode]) -> None:
    for server in servers:
        raw(server, "RPUSH", "key", "a", "b")
    assert locks.take("key") is None
    assert locks.give_back("key", "token") is False
    assert locks.prolong("key", "token", 1_000) is False
    assert [raw(server, "LRANGE", "key", 0, -1) for server in servers] == [[b"a", b"b"]] * len(servers)
    assert [raw(server, "PTTL", "key") for server in servers] == [-1] * len(servers)


def test_many_keys_do_not_meet(locks: Locks, servers: list[LocalNode]) -> None:
    tokens = {f"key {number}": locks.take(f"key {number}") for number in range(20)}
    assert None not in tokens.values()
    all_answer(servers, 20, "DBSIZE")
    assert all(token and locks.give_back(key, token) for key, token in tokens.items())
    all_answer(servers, 0, "DBSIZE")


# ---- refused ----


def holding(argv: Argv) -> bytes | None:
    """A node on which the key is somebody else's."""
    return {b"SET": NIL, b"TYPE": b"+string\r\n", b"EVAL": b":0\r\n"}.get(argv[0])


@pytest.mark.parametrize(("tries", "delay"), [(1, 60.0), (2, 45.0), (5, 60.0), (3, 0.0)])
def test_so_many_tries_and_such_pauses(
    style, kind: str, count: int, pauses: list[float], tries: int, delay: float
) -> None:
    """Exactly: a pause stands between two tries, and none at the end."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=holding)) for _ in range(count)]
        locks = style([node.url for node in nodes], kind, tries, delay)
        assert locks.take("key") is None
        eventually(lambda: [tries_of(node) for node in nodes] == [tries] * count)
        assert len(pauses) == (tries - 1 if delay else 0)
        assert all(delay - SLACK <= pause <= delay for pause in pauses)
        tokens = {one.argv[2] for node in nodes for one in node.received("SET")}
        assert len(tokens) == tries  # each try has its own, the same for all nodes


@pytest.mark.parametrize("style_name", STYLES)
def test_by_default_there_are_three_tries(kind: str, pauses: list[float], style_name: str) -> None:
    def take(url: str) -> str | None:
        if style_name == "Locker":
            return Locker(url, engine=kind).acquire("key")
        return RedLock([url], engine=kind, node_timeout=LIMIT).lock("key", 30_000)["token"]

    with ScriptedNode(answer=holding) as taken, ScriptedNode(answer=by_name(SET=error("LOADING"))) as unable:
        assert take(taken.url) is None
        with pytest.raises(NodesUnavailable, match="LOADING"):
            take(unable.url)
        assert (tries_of(taken), tries_of(unable)) == (3, 3)
    delay = 0.1 if style_name == "Locker" else 0.2
    assert len(pauses) == 4
    assert delay / 2 < max(pauses) <= delay


def test_a_later_try_may_get_it(style, kind: str, count: int, pauses: list[float]) -> None:
    """And its token is the one that is returned."""
    with ExitStack() as stack:
        replies = [iter([NIL, NIL, OK]) for _ in range(count)]
        nodes = [
            stack.enter_context(
                ScriptedNode(
                    answer=by_name(SET=lambda argv, left=left: next(left), TYPE=b"+string\r\n")  # type: ignore[misc]
                )
            )
            for left in replies
        ]
        token = style([node.url for node in nodes], kind, 3, 10.0).take("key")
        assert token is not None
        eventually(lambda: [tries_of(node) for node in nodes] == [3] * count)
        assert {node.received("SET")[-1].argv[2] for node in nodes} == {token.encode()}
        assert len(pauses) == 2


@pytest.mark.parametrize("foreign", [2, 3])
def test_what_is_not_granted_leaves_no_key(style, kind: str, valkeys: LocalNodes, foreign: int) -> None:
    """On the reachable nodes; what is somebody else's stays as it is."""
    servers = list(valkeys)
    holders, free = servers[:foreign], servers[foreign:]
    locks = style(urls_of(servers), kind, tries=3, delay=0.001)
    assert locks.give_back("warm up", "token") is False
    for server in holders:
        raw(server, "SET", "key", FOREIGN, "PX", 60_000)
    before = ends(holders)
    if foreign == 3:
        assert locks.take("key") is None
    else:
        free[-1].kill()
        free = free[:-1]
        with pytest.raises(NodesUnavailable, match="2 of them that it is taken; it needs 3") as caught:
            locks.take("key")
        assert set(caught.value.causes) == addresses(servers[-1:])
    all_answer(free, 0, "DBSIZE")
    assert ends(holders) == before


# ---- nodes that are away ----


def test_without_a_minority_everything_works(style, kind: str, valkeys: LocalNodes) -> None:
    for how in ("kill", "pause"):
        for count, bad in ((3, 1), (5, 2)):
            servers = list(valkeys)[:count]
            locks = style(urls_of(servers), kind)
            assert locks.give_back("warm up", "token") is False
            for server in servers[:bad]:
                getattr(server, how)()
            token = locks.take("key")
            assert token is not None
            assert locks.take("key") is None
            assert locks.prolong("key", token, 20_000) is True
            assert locks.prolong("key", "wrong", 20_000) is False
            assert locks.give_back("key", "wrong") is False
            ttl_is(servers[bad:], 20_000)
            assert locks.give_back("key", token) is True
            all_answer(servers[bad:], 0, "DBSIZE")
            for server in servers[:bad]:
                if how == "kill":
                    server.start(empty=True)
                else:
                    server.resume()


def test_without_a_majority_each_verb_says_so(
    style, kind: str, servers: list[LocalNode], pauses: list[float]
) -> None:
    locks = style(urls_of(servers), kind, tries=3, delay=5.0)
    token = taken(locks, servers)
    bad = len(servers) // 2 + 1
    for server in servers[:bad]:
        server.kill()
    with pytest.raises(NodesUnavailable, match=f"cannot acquire .*it needs {bad}") as caught:
        locks.take("another key")
    assert set(caught.value.causes) == addresses(servers[:bad])
    assert len(pauses) == 2  # it was tried three times
    with pytest.raises(NodesUnavailable, match="cannot extend") as caught:
        locks.prolong("key", token, 20_000)
    assert set(caught.value.causes) == addresses(servers[:bad])
    with pytest.raises(ReleaseUnconfirmed, match="can be tried again") as unconfirmed:
        locks.give_back("key", token)
    assert set(unconfirmed.value.causes) == addresses(servers[:bad])
    all_answer(servers[bad:], 0, "DBSIZE")


def test_a_setup_that_waiting_cannot_mend(
    style, kind: str, servers: list[LocalNode], pauses: list[float]
) -> None:
    urls = [url.replace("//", "//ann:s3cret@") for url in urls_of(servers)]
    locks = style(urls, kind, tries=3, delay=5.0)
    for verb in (
        lambda: locks.take("key"),
        lambda: locks.prolong("key", "token", 1_000),
    ):
        with pytest.raises(SetupError) as caught:
            verb()
        assert set(caught.value.causes) <= addresses(servers)
        assert len(caught.value.causes) > len(servers) // 2
        assert "s3cret" not in str(caught.value)
    assert pauses == []  # at once
    with pytest.raises(ReleaseUnconfirmed):
        locks.give_back("key", "token")
    all_answer(servers, 0, "DBSIZE")


def test_an_unconfirmed_give_back_can_be_repeated(style, kind: str, servers: list[LocalNode]) -> None:
    limit = 0.1 * SLACK
    locks = style(urls_of(servers), kind, node_timeout=limit)
    token = taken(style(urls_of(servers), kind), servers)
    with paused(*servers):
        started = time.monotonic()
        with pytest.raises(ReleaseUnconfirmed, match="can be tried again") as caught:
            locks.give_back("key", token)
        assert limit <= time.monotonic() - started < limit + 1 * SLACK
        assert set(caught.value.causes) == addresses(servers)

    def again() -> bool:
        try:
            locks.give_back("key", token)  # the first one may have done it, so False is an answer, too
        except ReleaseUnconfirmed as error:
            raise AssertionError(error) from error
        return True

    eventually(again, 3, "it is confirmed")
    all_answer(servers, 0, "DBSIZE")
    assert locks.give_back("key", token) is False


def test_a_take_that_is_not_answered_is_undone_when_the_server_wakes(
    style, kind: str, servers: list[LocalNode]
) -> None:
    locks = style(urls_of(servers), kind, tries=1, node_timeout=0.05 * SLACK)
    assert style(urls_of(servers), kind).give_back("warm up", "token") is False
    with paused(*servers), pytest.raises(NodesUnavailable):
        locks.take("key", 60_000)
    for server in servers:
        eventually(lambda server=server: raw(server, "PING"))  # type: ignore[misc]
    all_answer(servers, 0, "DBSIZE")


@pytest.mark.parametrize("gone", [2, 3])
def test_a_lock_that_a_majority_has_lost_is_not_kept_by_the_rest(
    style, kind: str, valkeys: LocalNodes, gone: int
) -> None:
    servers = list(valkeys)
    locks = style(urls_of(servers), kind)
    token = taken(locks, servers)
    for server in servers[:gone]:
        raw(server, "DEL", "key")
    assert locks.prolong("key", token, 60_000) is (gone == 2)
    all_answer(servers[:gone], None, "GET", "key")  # an extend puts no key back
    if gone == 2:
        ttl_is(servers[gone:], 60_000)
        assert locks.give_back("key", token) is True
    all_answer(servers, 0, "DBSIZE")


def test_a_life_that_was_over_when_the_answer_came_is_none(style, kind: str, clock) -> None:
    def late(argv: Argv) -> bytes:
        clock(2)
        return OK

    with ScriptedNode(answer=by_name(SET=late, EVAL=b":1\r\n")) as node:
        locks = style([node.url], kind, node_timeout=60.0)
        assert locks.prolong("key", "token", 1_000) is False
        eventually(lambda: node.received("EVAL"), what="it is taken back")
        assert node.received("EVAL")[0].argv[2:] == (b"1", b"key", b"token")
        assert locks.prolong("key", "token", 3_000) is True
        assert len(node.received("EVAL")) == 1


# ---- threads ----


def test_threads_share_one_object_for_many_keys(locks: Locks, servers: list[LocalNode]) -> None:
    def work(number: int) -> int:
        done = 0
        for turn in range(10):
            key = f"key {number} {turn}"
            token = locks.take(key)
            assert token is not None
            assert locks.prolong(key, token, 20_000) is True
            assert locks.give_back(key, token) is True
            done += 1
        return done

    threads = [InBackground(lambda number=number: work(number)) for number in range(8)]  # type: ignore[misc]
    assert [thread.result(60) for thread in threads] == [10] * 8
    all_answer(servers, 0, "DBSIZE")


def test_threads_share_one_object_for_one_key(style, kind: str, servers: list[LocalNode]) -> None:
    locks = style(urls_of(servers), kind, tries=1_000_000, delay=0.002)
    total, inside = 0, 0
    crowds: list[int] = []

    def work() -> None:
        nonlocal total, inside
        for _ in range(6):
            token = locks.take("key", 60_000)
            assert token is not None
            inside += 1
            before = total
            raw(servers[0], "PING")  # while it is out, others may run
            crowds.append(inside)
            total = before + 1
            inside -= 1
            assert locks.give_back("key", token) is True

    for thread in [InBackground(work) for _ in range(8)]:
        thread.result(60)
    assert total == 48
    assert set(crowds) == {1}
    all_answer(servers, 0, "DBSIZE")


def test_any_thread_may_give_back_what_another_took(locks: Locks) -> None:
    token = InBackground(lambda: locks.take("key")).result()
    assert token is not None
    assert InBackground(lambda: locks.prolong("key", token, 20_000)).result() is True
    assert locks.give_back("key", token) is True


# ---- interrupts ----


def places_of(prepare: Callable[[str], Any], verb: Callable[[str, Any], object], most: int) -> list[Place]:
    """All places of the second call of a verb, but of those inside the pure engine not more than ``most``."""
    for number in range(2):  # Python 3.12+ begins with the second call of each function
        key = f"first {number}"
        prepared = prepare(key)
        with Interrupt() as nowhere:
            verb(key, prepared)
    inside = [place for place in nowhere.seen if "_pure" in place[0].co_filename]
    outside = [place for place in nowhere.seen if "_pure" not in place[0].co_filename]
    assert len(outside) > 5
    return outside + random.sample(inside, min(most, len(inside)))


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("count", [1, 5], indirect=True)
def test_an_interrupt_at_each_place_of_take(
    style, kind: str, servers: list[LocalNode], waiting: bool
) -> None:
    urls = urls_of(servers)
    locks = style(urls, kind, tries=1_000_000, delay=0.002)
    tokens: list[tuple[str, str | None]] = []

    def prepare(key: str) -> None:
        if waiting:
            for server in servers:
                raw(server, "SET", key, FOREIGN, "PX", 3)

    def take(key: str, _: object = None) -> None:
        tokens.append((key, locks.take(key)))

    count = 0
    for number, at in enumerate(places_of(prepare, take, 60)):
        key = f"key {number}"
        prepare(key)
        count += interrupted(at, lambda key=key: take(key))  # type: ignore[misc]
        give_all_back(locks, tokens)
    assert count > 5
    no_token_is_left(urls)


def give_all_back(locks: Locks, tokens: list[tuple[str, str | None]]) -> None:
    while tokens:
        key, token = tokens.pop()
        assert token is not None
        assert locks.give_back(key, token) is True


@pytest.mark.parametrize("count", [1, 5], indirect=True)
@pytest.mark.parametrize("verb", ["give_back", "prolong"])
def test_an_interrupt_at_each_place_of_the_other_verbs(
    style, kind: str, servers: list[LocalNode], verb: str
) -> None:
    """It can be repeated, and then the key is gone."""
    urls = urls_of(servers)
    locks = style(urls, kind)

    def prepare(key: str) -> str:
        token = locks.take(key)
        assert token is not None
        return token

    def call(key: str, token: str) -> object:
        return locks.give_back(key, token) if verb == "give_back" else locks.prolong(key, token, 20_000)

    if verb == "prolong":
        call("warm up", prepare("warm up"))
    tokens = [(f"key {number}", at) for number, at in enumerate(places_of(prepare, call, 40))]
    for key, at in tokens:
        token = prepare(key)
        interrupted(at, lambda key=key, token=token: call(key, token))  # type: ignore[misc]
        locks.give_back(key, token)
    for server in servers:
        raw(server, "DEL", "first 0", "first 1", "warm up")
    no_token_is_left(urls)


class Struck(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("count", [1, 5], indirect=True)
@pytest.mark.parametrize("how", ["silent", "taken"])
def test_a_signal_ends_a_take_at_once(style, kind: str, servers: list[LocalNode], how: str) -> None:
    locks = style(urls_of(servers), kind, tries=1_000_000, delay=60.0, node_timeout=30.0)
    assert locks.give_back("warm up", "token") is False
    struck = 0.0

    def strike(*_: object) -> None:
        nonlocal struck
        struck = time.monotonic()
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with ExitStack() as stack:
            if how == "silent":
                stack.enter_context(paused(*servers))
            else:
                for server in servers:
                    raw(server, "SET", "key", FOREIGN, "PX", 60_000)
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            with pytest.raises(Struck):
                locks.take("key", 60_000)
            assert time.monotonic() - struck < 1 * SLACK  # and not a minute, or the limit of a node
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for server in servers:
        eventually(lambda server=server: raw(server, "PING"))  # type: ignore[misc]
    all_answer(servers, FOREIGN if how == "taken" else None, "GET", "key")


# ---- forks ----


def test_a_forked_child_has_connections_of_its_own_and_the_token_is_the_proof(
    locks: Locks, servers: list[LocalNode]
) -> None:
    token = taken(locks, servers)
    for server in servers:
        raw(server, "CONFIG", "RESETSTAT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child does nothing that needs other threads
        child = os.fork()
    if child == 0:
        try:
            own = locks.take("child")
            fine = (
                locks.take("key") is None
                and locks.prolong("key", token, 20_000)
                and locks.give_back("key", token)
                and own is not None
                and locks.give_back("child", own)
            )
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert locks.give_back("key", token) is False
    after = taken(locks, servers)
    assert locks.give_back("key", after) is True
    all_answer(servers, 0, "DBSIZE")


def test_tokens_after_a_fork_are_others(locks: Locks) -> None:
    assert locks.take("warm up") is not None
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(write, (locks.take("child") or "none").encode())
        finally:
            os._exit(0)
    os.close(write)
    theirs = os.read(read, 100).decode()
    os.close(read)
    os.waitpid(child, 0)
    assert len(theirs) == 32
    assert theirs not in [locks.take(f"key {number}") for number in range(3)]


# ---- arguments that are none ----


@pytest.fixture
def silent() -> Iterator[ScriptedNode]:
    """A node to which nobody may even connect."""
    with ScriptedNode() as node:
        yield node
        assert node.peers == []


def test_a_key_that_is_none(style, kind: str, silent: ScriptedNode) -> None:
    locks = style([silent.url], kind)
    for name, error_type in NO_NAMES:
        for verb in (
            lambda name: locks.take(name),
            lambda name: locks.give_back(name, "token"),
        ):
            assert "name" in refused(error_type, verb, name)
        if style is LockerStyle or isinstance(name, (str, bytes)):  # else it is Lock.extend's own argument
            assert "name" in refused(error_type, locks.prolong, name, "token", 1_000)


def test_a_token_that_is_none(style, kind: str, silent: ScriptedNode) -> None:
    locks = style([silent.url], kind)
    for token, error_type in NO_TOKENS:
        assert "token" in refused(error_type, locks.give_back, "key", token)
        assert "token" in refused(error_type, locks.prolong, "key", token, 1_000)


def test_a_length_of_time_that_is_none(kind: str, silent: ScriptedNode) -> None:
    locker = Locker(silent.url, engine=kind)
    for value, error_type in NO_SECONDS:
        assert "timeout" in refused(error_type, locker.acquire, "key", value)
        assert "timeout" in refused(error_type, locker.acquire, "key", timeout=value)
        assert "seconds" in refused(error_type, locker.extend, "key", "token", value)
        assert "node_timeout" in refused(error_type, Locker, silent.url, node_timeout=value, engine=kind)
    nothing: Any
    for nothing in (None, {}):
        refused(TypeError, locker.acquire, "key", nothing)
        refused(TypeError, locker.extend, "key", "token", nothing)
    for short in (0.001, 0.002, 1e-9):
        assert "no validity" in refused(ValueError, locker.acquire, "key", short)
        assert "no validity" in refused(ValueError, locker.extend, "key", "token", short)


def test_numbers_of_tries_and_pauses_that_are_none(kind: str, silent: ScriptedNode) -> None:
    locker = Locker(silent.url, engine=kind)
    value: Any
    error_type: type[Exception]
    for value, error_type in NO_COUNTS:
        assert "retry_times" in refused(error_type, locker.acquire, "key", 10, value)
        assert "retry_times" in refused(error_type, locker.acquire, "key", retry_times=value)
    for value, error_type in NO_PAUSES:
        assert "retry_delay" in refused(error_type, locker.acquire, "key", 10, 3, value)
        assert "retry_delay" in refused(error_type, locker.acquire, "key", retry_delay=value)


def test_arguments_of_the_constructor_that_are_none(silent: ScriptedNode) -> None:
    url = silent.url
    prefix: Any
    for prefix in (None, 1, ["x"]):
        assert "prefix" in refused(TypeError, Locker, url, prefix=prefix)
    assert "prefix" in refused(ValueError, Locker, url, prefix="\ud800")
    refused(ValueError, Locker, url, prefix="x" * 65_536)
    refused(ValueError, Locker, url, engine="fast")
    client: Any
    for client in (None, 6379, url.encode(), [None], [6379], [[url]], object()):
        refused(TypeError, Locker, client)
    assert "at least one node" in refused(ValueError, Locker, [])
    assert "the same node twice" in refused(ValueError, Locker, [url, url])
    refused(ValueError, Locker, "http://127.0.0.1")


def test_a_prefix_and_a_key_that_are_too_long_together(kind: str, silent: ScriptedNode) -> None:
    locker = Locker(silent.url, prefix="x" * 40_000, engine=kind)
    for verb in (
        lambda key: locker.acquire(key),
        lambda key: locker.release(key, "token"),
        lambda key: locker.extend(key, "token", 1),
    ):
        assert "prefix and name" in refused(ValueError, verb, "x" * 40_000)


def test_there_are_no_further_arguments(kind: str, silent: ScriptedNode) -> None:
    locker: Any = Locker(silent.url, engine=kind)
    refused(TypeError, locker.acquire)
    refused(TypeError, locker.acquire, "key", 30, 3, 0.1, True)
    refused(TypeError, locker.acquire, "key", ttl=30)
    refused(TypeError, locker.release, "key")
    refused(TypeError, locker.extend, "key", "token")
    refused(TypeError, Locker, silent.url, "prefix")


# ---- what the Locker's arguments do, one by one ----


def test_the_documented_defaults() -> None:
    def defaults(verb: Callable[..., object]) -> dict[str, object]:
        found = inspect.signature(verb).parameters.values()
        return {one.name: one.default for one in found if one.default is not one.empty}

    assert defaults(Locker.acquire) == {"timeout": 30, "retry_times": 3, "retry_delay": 0.1}
    assert defaults(Locker.release) == defaults(Locker.extend) == {}
    assert defaults(Locker.__init__) == {"prefix": "", "node_timeout": None, "engine": None}


def test_client_may_be_anything_that_names_a_node(kind: str, valkeys: LocalNodes) -> None:
    first, *others = valkeys
    with redis.Redis.from_url(first.url) as client:
        for one in (first.url, redbolt.Node.from_url(first.url), client, [first.url], (client,)):
            locker = Locker(one, node_timeout=LIMIT, engine=kind)
            assert [node.address for node in locker.nodes] == [f"127.0.0.1:{first.port}"]
            token = locker.acquire("key")
            assert token is not None
            assert raw(first, "GET", "key") == token.encode()
            assert locker.release("key", token) is True
    assert [raw(server, "DBSIZE") for server in others] == [0] * 4


def test_clients_may_be_any_iterable_of_nodes(kind: str, valkeys: LocalNodes) -> None:
    servers = list(valkeys)[:3]
    many: Any
    for many in (
        urls_of(servers),
        tuple(urls_of(servers)),
        (url for url in urls_of(servers)),
        [servers[0].url, redbolt.Node.from_url(servers[1].url), redis.Redis.from_url(servers[2].url)],
    ):
        locker = Locker(many, node_timeout=LIMIT, engine=kind)
        assert [node.port for node in locker.nodes] == [server.port for server in servers]
        token = locker.acquire("key")
        assert token is not None
        all_answer(servers, token.encode(), "GET", "key")
        assert locker.release("key", token) is True
        all_answer(servers, 0, "DBSIZE")


def test_prefix_stands_before_every_key(kind: str, valkey: LocalNode) -> None:
    for prefix in ("locks:", b"\xff:"):
        locker = Locker(valkey.url, prefix=prefix, engine=kind)
        token = locker.acquire("key")
        assert token is not None
        head = prefix if isinstance(prefix, bytes) else prefix.encode()
        assert raw(valkey, "KEYS", "*") == [head + b"key"]
        assert locker.acquire("key", retry_times=1) is None
        assert locker.extend("key", token, 99) is True
        assert raw(valkey, "TTL", head + b"key") in (98, 99)
        assert locker.release("key", token) is True
        assert raw(valkey, "DBSIZE") == 0


@pytest.mark.parametrize("limit", [0.05, 0.3])
def test_node_timeout_bounds_how_long_a_node_is_waited_for(
    kind: str, valkey: LocalNode, limit: float
) -> None:
    locker = Locker(valkey.url, node_timeout=limit, engine=kind)
    with paused(valkey):
        started = time.monotonic()
        with pytest.raises(NodesUnavailable, match=f"within {limit * 1000:.0f} ms"):
            locker.acquire("key", retry_times=1)
        assert limit <= time.monotonic() - started < limit + 1 * SLACK


@pytest.mark.parametrize(
    ("query", "several", "told"),
    [("", False, "1000"), ("?socket_timeout=0.1", False, "100"), ("?socket_timeout=9", True, "50")],
)
def test_node_timeout_is_by_default_that_of_lock_and_redlock(
    kind: str, valkey: LocalNode, clock, query: str, several: bool, told: str
) -> None:
    with FaultProxy(valkey) as proxy:
        proxy.hold()
        url = f"{proxy.url}{query}"
        waiting = InBackground(lambda: Locker([url] if several else url, engine=kind).acquire("key", 30, 1))
        eventually(lambda: proxy.bytes_up > 0 or not waiting.is_alive())
        clock(5)
        with pytest.raises(NodesUnavailable, match=f"within {told} ms"):
            waiting.result()
        proxy.heal()
        redbolt.close()


def test_engine_says_which_engine_is_used(kind: str, valkey: LocalNode) -> None:
    locker = Locker(valkey.url, engine=kind)
    assert locker._engine.kind == kind


def test_timeout_is_the_life_of_the_key_in_seconds(kind: str) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        locker = Locker(node.url, engine=kind)
        assert locker.acquire("key") is not None
        assert locker.acquire("key", 0.7) is not None
        assert locker.acquire("key", timeout=1.0001) is not None
        assert locker.extend("key", "token", 0.29) is True
        assert locker.extend("key", "token", seconds=5) is True
        sent = [one.argv for one in node.received("SET")]
    assert [argv[-1] for argv in sent] == [b"30000", b"700", b"1001", b"290", b"5000"]
    assert sent[0] == (b"SET", b"key", sent[0][2], b"NX", b"PX", b"30000")
    assert sent[4] == (b"SET", b"key", b"token", b"IFEQ", b"token", b"PX", b"5000")


def test_retry_times_and_retry_delay_are_those_of_the_call(kind: str, pauses: list[float]) -> None:
    with ScriptedNode(answer=holding) as node:
        locker = Locker(node.url, engine=kind)
        assert locker.acquire("key", 30, 4, 7.0) is None
        assert tries_of(node) == 4
        assert len(pauses) == 3
        assert locker.acquire("key", retry_delay=11.0, retry_times=2) is None
        assert tries_of(node) == 6
    assert [round(pause + 0.4) for pause in pauses] == [7, 7, 7, 11]


def test_a_repr_names_the_nodes_and_no_secret(silent: ScriptedNode) -> None:
    text = repr(Locker(silent.url.replace("//", "//ann:s3cret@")))
    assert text == f"<Locker on 127.0.0.1:{silent.port}>"


def test_threads_that_wait_get_it_one_after_the_other(kind: str, valkey: LocalNode) -> None:
    """A waiting acquire gets the lock when it is given back."""
    locker = Locker(valkey.url, engine=kind)
    token = locker.acquire("key")
    assert token is not None
    raw(valkey, "CONFIG", "RESETSTAT")
    got = threading.Event()

    def wait() -> str | None:
        found = locker.acquire("key", 30, 1_000_000, 0.005)
        got.set()
        return found

    waiting = InBackground(wait)
    eventually(lambda: "cmdstat_type" in raw(valkey, "INFO", "commandstats"), what="it was refused")
    assert not got.is_set()
    assert locker.release("key", token) is True
    after = waiting.result()
    assert after is not None
    assert raw(valkey, "GET", "key") == after.encode()
    assert locker.release("key", after) is True
