"""What a watch tells: changes of keys as the servers push them, lives, and the loss and return of nodes."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.connection

import redbolt
from redbolt._clock import now_ns
from redbolt._engine import (
    CHANGED,
    LIFE_TOLD,
    LOST,
    MAX_KEY,
    MAX_REPLY,
    READY,
    Engine,
    Event,
    Votes,
    Watch,
    engine_for,
)
from redbolt._judge import FAULT, GRANTED, NO, OPEN, REFUSED, UNDECIDED, YES, drift_ns
from redbolt._programs import DROP, ENTER, LIFE, SWAP, TAKE, Program
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, Client, HasAddress, eventually, fd_count, raw
from tests.kit.resp import NIL, OK, command, error, push
from tests.kit.rounds import KEY, TOKEN, InBackground, ask, attempt, by_name, causes, said
from tests.kit.scripted import Peer, ScriptedNode
from tests.kit.steps import (
    Argv,
    Step,
    bytewise,
    expect,
    handshake,
    hang_up,
    ignore_rest,
    send,
    serve,
    split,
    tell,
    unknown_command,
    wait,
)
from tests.kit.tls import Certificate, TlsFront

S = 1_000_000_000
E = 0.15 * SLACK
LIMIT = round(2 * SLACK * S)  # for what is answered: long enough never to matter
SHORT = round(0.05 * SLACK * S)
TOPIC = b"channel"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the packets of a connection")

Watching = Callable[..., tuple[Engine, Watch]]


@pytest.fixture
def watching(engine_of: Callable[..., Engine]) -> Iterator[Watching]:
    """Make an engine for some URLs, and a watch, which is closed after the test."""
    with ExitStack() as stack:

        def make(*urls: str, tracking: bool = True) -> tuple[Engine, Watch]:
            engine = engine_of(*urls)
            watch = engine.watch(tracking)
            stack.callback(watch.close)
            return engine, watch

        yield make


def heard(watch: Watch, count: int = 1, limit: float = 3.0) -> list[Event]:
    """The next events, at least so many; an AssertionError if they do not come."""
    until = now_ns() + round(limit * SLACK * S)
    events: list[Event] = []
    while len(events) < count:
        assert now_ns() < until, f"only {events} came"
        events += watch.wait(until)
    return events


def quiet(watch: Watch, seconds: float = 0.03) -> bool:
    """Whether nothing is told for that long (x SLACK)."""
    return watch.wait(now_ns() + round(seconds * SLACK * S)) == []


def armed(watch: Watch, key: bytes = KEY, nodes: int = 1, limit_ns: int = LIMIT, topic: bytes = b"") -> Event:
    """Arm one node, which may have to be connected to, and return the event with the life of the key."""
    for _ in range(2):
        watch.arm(key, nodes, limit_ns, topic)
        (event,) = heard(watch)
        if event[0] == LIFE_TOLD:
            return event
        assert event[0] == READY
    raise AssertionError("it was READY twice")


def take(
    engine: Engine,
    watch: Watch | None,
    key: bytes = KEY,
    token: bytes | None = TOKEN,
    *,
    lease_ms: int = 10_000,
    quorum: int | None = None,
    limit_ns: int = LIMIT,
    program: Program = TAKE,
    extra: tuple[bytes, ...] = (),
    nodes: int = -1,
) -> Votes:
    """A try on the watch's channel, or on any."""
    votes = engine.votes()
    needed = len(engine.nodes) // 2 + 1 if quorum is None else quorum
    drift = drift_ns(lease_ms, 0.01)
    (watch or engine).attempt(
        votes, key, token, lease_ms, needed, drift, limit_ns, program, extra, nodes
    )  # fmt: skip
    return votes


def packets(peer: Peer) -> int:
    """How many packets with data have come in on a connection: `tcpi_data_segs_in` of its tcp_info."""
    info = peer._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    (count,) = struct.unpack_from("I", info, 152)
    return int(count)


def names(node: ScriptedNode) -> list[str]:
    return [one.name for one in node.received()]


def listening(**replies: Any) -> Any:
    """A scripted server whose handshakes are in order, and that answers by name."""
    return ScriptedNode(answer=by_name(**{"PTTL": b":-2\r\n", "SET": OK, **replies}), background=handshake)


def watchers(node: HasAddress, flag: str = "t") -> list[dict[str, str]]:
    """The connections of a server with CLIENT TRACKING on."""
    lines = raw(node, "CLIENT", "LIST")
    clients = [
        dict(part.partition("=")[::2] for part in line.split()) for line in lines.decode().splitlines()
    ]
    return [client for client in clients if flag in client["flags"]]


def changed(engine: Engine, key: bytes = KEY, node: int = 0) -> Event:
    return CHANGED, node, engine.mark(key), 0


def life(engine: Engine, value: int, key: bytes = KEY, node: int = 0) -> Event:
    return LIFE_TOLD, node, engine.mark(key), value


# ---- marks and lives ----


def test_a_mark_is_stable_and_never_0(engine_of) -> None:
    engine = engine_of("redis://127.0.0.1:1")
    keys = [b"", b"a", b"b", b"\0", b"name" * 100, bytes(range(256)), b"k" * MAX_KEY]
    marks = [engine.mark(key) for key in keys]
    assert marks == [engine.mark(bytes(bytearray(key))) for key in keys]
    assert 0 not in marks
    assert len(set(marks)) == len(keys)
    assert all(isinstance(mark, int) for mark in marks)


def test_a_life_is_a_vote_of_a_round(engine_of, node: LocalNode) -> None:
    engine = engine_of(node.url)
    assert said(ask(engine, LIFE)) == [YES]  # there is no such key
    raw(node, "SET", KEY, "x")
    assert said(ask(engine, LIFE)) == [NO]
    raw(node, "PEXPIRE", KEY, 1000)
    assert said(ask(engine, LIFE)) == [NO]


@pytest.mark.parametrize("told", [b":-3\r\n", OK, NIL, b"$2\r\n-2\r\n", b"*0\r\n"], ids=repr)
def test_what_is_no_life_ends_the_connection(engine_of, watching, told: bytes) -> None:
    with listening(PTTL=told) as node:
        engine, watch = watching(node.url)
        votes = ask(engine, LIFE)
        assert (said(votes), causes(votes)) == ([FAULT], ["a reply that does not belong to the command"])
        watch.arm(KEY, 1, LIMIT)
        if heard(watch)[0][0] == LOST:  # it is in its back-off
            time.sleep(0.6)
            watch.arm(KEY, 1, LIMIT)
            assert heard(watch) == [(READY, 0, 0, 0)]
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LOST, 0, 0, 0)]


def test_the_life_of_a_key_is_told(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    assert armed(watch) == life(engine, -2)
    raw(node, "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]
    assert armed(watch) == life(engine, -1)
    raw(node, "PEXPIRE", KEY, 5000)
    assert heard(watch) == [changed(engine)]
    what, index, mark, value = armed(watch)
    assert (what, index, mark) == (LIFE_TOLD, 0, engine.mark(KEY))
    assert 5000 - 1000 * E <= value <= 5000


def test_nothing_is_opened_before_it_is_used(watching) -> None:
    with listening() as node:
        engine, watch = watching(node.url)
        before = fd_count()
        assert quiet(watch, 0.01)
        watch.poke()
        assert watch.wait(now_ns() + S) == []
        watch.close()
        assert fd_count() <= before + 2  # what wakes it
        assert node.peers == []
        assert engine.absent() == 0


# ---- what the servers push ----

Change = Callable[[LocalNode], object]
HOLDERS = {
    "deleted": lambda node: raw(node, "DEL", KEY),
    "released": lambda node: raw(node, "EVAL", "return redis.call('DEL', KEYS[1])", 1, KEY),
    "expires": lambda node: raw(node, "PEXPIRE", KEY, 5),
    "lengthened": lambda node: raw(node, "PEXPIRE", KEY, 9000),
    "handed on": lambda node: raw(node, "SET", KEY, "other", "PX", 9000),
    "flushed": lambda node: raw(node, "FLUSHALL"),
    "renamed": lambda node: raw(node, "RENAME", KEY, "another"),
}


@pytest.mark.parametrize("change", HOLDERS.values(), ids=HOLDERS)
def test_a_change_of_a_key_is_told(watching, node: LocalNode, change: Change) -> None:
    raw(node, "SET", KEY, TOKEN, "PX", 10_000)
    engine, watch = watching(node.url)
    assert armed(watch)[3] > 0
    assert quiet(watch)
    change(node)
    what, index, mark, value = heard(watch)[0]
    assert (what, index, value) == (CHANGED, 0, 0)
    assert mark == (0 if change is HOLDERS["flushed"] else engine.mark(KEY))
    watch.wait(now_ns() + S // 50)  # its expiry may be told by itself


def test_the_end_of_a_lease_is_told(watching, node: LocalNode) -> None:
    raw(node, "SET", KEY, TOKEN, "PX", 150)
    engine, watch = watching(node.url)
    armed(watch)
    started = time.monotonic()
    assert heard(watch) == [changed(engine)]
    assert 0.05 < time.monotonic() - started < 0.15 + 0.2 + E


def test_a_compare_and_set_is_told_where_there_is_one(watching, valkey: LocalNode) -> None:
    raw(valkey, "SET", KEY, TOKEN, "PX", 10_000)
    engine, watch = watching(valkey.url)
    armed(watch)
    assert raw(valkey, "SET", KEY, TOKEN, "IFEQ", TOKEN, "PX", 9000)
    assert heard(watch) == [changed(engine)]


def test_a_holder_in_the_same_process_is_told_of_too(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    assert said(attempt(engine)) == [YES]
    armed(watch)
    ask(engine, DROP, TOKEN)
    assert heard(watch) == [changed(engine)]


def test_a_key_that_is_missing_and_then_set_is_told(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    assert armed(watch)[3] == -2
    raw(node, "SET", KEY, "x", "NX", "PX", 1000)
    assert heard(watch) == [changed(engine)]


def test_a_change_is_told_once_until_it_is_armed_again(watching, node: LocalNode) -> None:
    raw(node, "SET", KEY, "x")
    engine, watch = watching(node.url)
    armed(watch)
    for value in "abc":
        raw(node, "SET", KEY, value)
    assert heard(watch) == [changed(engine)]
    assert quiet(watch)
    raw(node, "DEL", KEY)
    assert quiet(watch)
    armed(watch)
    raw(node, "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]


def test_its_own_writes_are_not_told(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    assert said(take(engine, watch)) == [YES]
    (told,) = heard(watch)
    assert told[:3] == life(engine, 0)[:3]
    assert 0 < told[3] <= 10_000
    assert said(take(engine, watch, token=b"second", extra=(TOKEN,), program=SWAP)) == [YES]
    assert {event[0] for event in heard(watch)} == {LIFE_TOLD}  # one behind each form
    assert {event[0] for event in watch.wait(now_ns() + S // 50)} <= {LIFE_TOLD}
    assert quiet(watch)
    raw(node, "DEL", KEY)
    assert changed(engine) in heard(watch)


def test_several_keys_on_one_watch(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    keys = [b"key %d" % number for number in range(20)]
    for key in keys:
        armed(watch, key)
    for key in keys[::2]:
        raw(node, "SET", key, "x")
    assert sorted(heard(watch, 10)) == sorted(changed(engine, key) for key in keys[::2])
    assert quiet(watch)


def test_several_nodes(watching, nodes: LocalNodes) -> None:
    engine, watch = watching(*[node.url for node in nodes])
    watch.arm(KEY, 0b10101, LIMIT)
    assert sorted(heard(watch, 3)) == [(READY, index, 0, 0) for index in (0, 2, 4)]
    watch.arm(KEY, 0b10101, LIMIT)
    assert sorted(heard(watch, 3)) == [life(engine, -2, node=index) for index in (0, 2, 4)]
    for node in nodes:
        raw(node, "SET", KEY, "x")
    assert sorted(heard(watch, 3)) == [changed(engine, node=index) for index in (0, 2, 4)]
    assert [len(watchers(node)) for node in nodes] == [1, 0, 1, 0, 1]


def test_keys_of_all_kinds(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    for key in (b"a\0b\0", b"\r\n*1\r\n$4\r\nPING\r\n", bytes(range(256)), b"%s%d", b"k" * MAX_KEY, b"1"):
        assert armed(watch, key) == life(engine, -2, key)
        raw(valkey, "SET", key, "x")
        assert heard(watch) == [changed(engine, key)]


def test_a_key_that_is_too_long_is_refused(watching, valkey: LocalNode) -> None:
    _, watch = watching(valkey.url)
    armed(watch)
    for key, topic in ((b"k" * (MAX_KEY + 1), b""), (KEY, b"t" * (MAX_KEY + 1))):
        with pytest.raises(ValueError, match="at most"):
            watch.arm(key, 1, LIMIT, topic)
    assert armed(watch)[0] == LIFE_TOLD


# ---- a try and its look in one write ----


@on_linux
def test_a_try_and_its_look_are_one_packet(watching) -> None:
    with listening() as node:
        engine, watch = watching(node.url)
        take(engine, watch)
        (peer,) = node.peers
        for _ in range(20):
            heard(watch)
            before = packets(peer)
            assert said(take(engine, watch)) == [YES]
            heard(watch)
            assert packets(peer) == before + 1
            take(engine, watch)
    sent = [one for one in node.received() if one.name in ("SET", "PTTL")]
    assert [one.name for one in sent] == ["SET", "PTTL"] * (len(sent) // 2)
    assert {one.argv for one in sent if one.name == "PTTL"} == {(b"PTTL", KEY)}


def test_the_bytes_of_a_try_and_its_look(watching) -> None:
    both = command(b"SET", KEY, TOKEN, b"NX", b"PX", b"10000") + command(b"PTTL", KEY)
    with ScriptedNode([expect(both), send(NIL, b":77\r\n")], background=handshake) as node:
        engine, watch = watching(node.url)
        votes = take(engine, watch)
        assert (said(votes), votes.verdict) == ([NO], REFUSED)
        assert heard(watch) == [life(engine, 77)]
        hello, tracking = node.received()[:2]
        assert hello.argv == (b"HELLO", b"3")
        assert tracking.argv == (b"CLIENT", b"TRACKING", b"ON", b"NOLOOP")


def test_the_look_is_not_waited_for(watching) -> None:
    go = threading.Event()
    script = [expect("SET"), expect("PTTL"), send(NIL), wait(go), send(b":5\r\n")]
    with ScriptedNode(script, background=handshake) as node:
        engine, watch = watching(node.url)
        started = time.monotonic()
        assert said(take(engine, watch)) == [NO]
        assert time.monotonic() - started < E
        assert quiet(watch)
        go.set()
        assert heard(watch) == [life(engine, 5)]


def test_a_refused_try_is_armed(watching, node: LocalNode) -> None:
    raw(node, "SET", KEY, "other", "PX", 5000)
    engine, watch = watching(node.url)
    assert said(take(engine, watch)) == [NO]
    assert 0 < heard(watch)[0][3] <= 5000
    raw(node, "DEL", KEY)
    assert heard(watch) == [changed(engine)]
    votes = take(engine, watch)
    assert votes.verdict == GRANTED
    assert votes.token == TOKEN
    assert raw(node, "GET", KEY) == TOKEN


def test_a_try_by_a_script_that_the_server_does_not_know_yet(watching, node: LocalNode) -> None:
    """Behind each form goes a look; the last one is behind what was executed."""
    engine, watch = watching(node.url)
    votes = take(engine, watch, program=ENTER, extra=(b"",))
    assert said(votes) == [YES]
    lives = [event[3] for event in heard(watch, 2)]
    assert lives[0] == -2
    assert 0 < lives[1] <= 10_000
    raw(node, "DEL", KEY)
    assert heard(watch) == [changed(engine)]


def test_a_try_that_misses_its_quorum_is_undone_on_the_same_channel(watching, valkeys: LocalNodes) -> None:
    nodes = list(valkeys)[:3]
    for node in nodes[:2]:
        raw(node, "SET", KEY, "other")
    engine, watch = watching(*[node.url for node in nodes])
    votes = take(engine, watch, token=None)
    assert said(votes)[:2] == [NO, NO]
    eventually(lambda: raw(nodes[2], "EXISTS", KEY) == 0)
    heard(watch, 2)
    eventually(lambda: watch.wait(now_ns() + S // 100) == [] and not engine.pending(votes.token))


# ---- several of the nodes ----


@pytest.mark.parametrize("on_watch", [False, True], ids=["engine", "watch"])
def test_only_the_nodes_of_the_mask_are_asked(watching, on_watch: bool) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(listening()) for _ in range(5)]
        engine, watch = watching(*[node.url for node in nodes])
        votes = take(engine, watch if on_watch else None, nodes=0b01010, quorum=2)
        assert said(votes) == [OPEN, YES, OPEN, YES, OPEN]
        assert causes(votes) == [""] * 5
        assert (votes.verdict, votes.yes, votes.no) == (GRANTED, 2, 0)
        assert votes.touched == 0b01010
        assert [node.received("SET") != [] for node in nodes] == [False, True, False, True, False]
        assert [len(node.peers) for node in nodes] == [0, 1, 0, 1, 0]
        if on_watch:
            assert sorted(heard(watch, 2)) == [life(engine, -2, node=index) for index in (1, 3)]
        assert engine.absent() == 0


@pytest.mark.parametrize("on_watch", [False, True], ids=["engine", "watch"])
def test_the_verdict_is_over_those_asked(watching, on_watch: bool) -> None:
    with ExitStack() as stack:
        replies = [OK, NIL, error("OOM no room"), OK]
        nodes = [stack.enter_context(listening(SET=told)) for told in replies]
        engine, watch = watching(*[node.url for node in nodes])
        for mask, quorum, verdict, votes_of in (
            (0b0001, 1, GRANTED, [YES, OPEN, OPEN, OPEN]),
            (0b0010, 1, REFUSED, [OPEN, NO, OPEN, OPEN]),
            (0b0100, 1, UNDECIDED, [OPEN, OPEN, FAULT, OPEN]),
            (0b1011, 2, GRANTED, None),
            (0b0110, 2, REFUSED, None),  # one no, and both would have to say yes
        ):
            votes = take(engine, watch if on_watch else None, nodes=mask, quorum=quorum)
            assert votes.verdict == verdict, bin(mask)
            assert votes_of is None or said(votes) == votes_of
            assert [vote == OPEN for vote in said(votes)][1] or mask & 2


@pytest.mark.parametrize("on_watch", [False, True], ids=["engine", "watch"])
def test_only_those_asked_are_undone_and_suspected(watching, on_watch: bool) -> None:
    with ExitStack() as stack:
        good = stack.enter_context(listening(EVAL=b":1\r\n"))
        silent = [stack.enter_context(listening(SET=None, EVAL=None)) for _ in range(2)]
        engine, watch = watching(good.url, *[node.url for node in silent])
        attempt(engine, b"first", b"first", quorum=1)
        votes = take(engine, watch if on_watch else None, nodes=0b011, quorum=2, limit_ns=SHORT)
        assert said(votes) == [YES, FAULT, OPEN]
        assert votes.verdict == UNDECIDED
        assert engine.absent() & 0b101 == 0 or silent[1].received("SET")  # the first round asked it
        eventually(lambda: [one for one in good.received("EVAL") if TOKEN in one.argv])
        eventually(lambda: [one for one in silent[0].received("EVAL") if TOKEN in one.argv])
        assert [one for one in silent[1].received() if TOKEN in one.argv] == []


def test_a_node_that_is_not_asked_does_not_get_it_behind_an_earlier_write(engine_of) -> None:
    with ExitStack() as stack:
        good = stack.enter_context(listening(EVAL=b":1\r\n"))
        silent = stack.enter_context(listening(SET=None))
        engine = engine_of(good.url, silent.url)
        first = InBackground(lambda: attempt(engine, quorum=2, limit=0.5))
        eventually(lambda: silent.received("SET"))
        take(engine, None, nodes=0b01, quorum=1)
        assert said(first.result()) == [YES, FAULT]
        time.sleep(0.05)
        assert len(silent.received("SET")) == 1


# ---- waiting, and being poked ----


@pytest.mark.parametrize("connected", [False, True])
def test_it_waits_until_its_time(watching, valkey: LocalNode, connected: bool) -> None:
    _, watch = watching(valkey.url)
    if connected:
        armed(watch)
    for seconds in (0.0, 0.001, 0.05, 0.2):
        started = time.monotonic()
        until = now_ns() + int(seconds * S)
        assert watch.wait(until) == []
        assert now_ns() >= until
        assert time.monotonic() - started < seconds + E


def test_a_time_that_is_over_brings_what_is_there(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    raw(valkey, "SET", KEY, "x")
    time.sleep(0.02 * SLACK)
    assert watch.wait(0) == [changed(engine)]


def test_a_wait_without_end_costs_no_time(watching, valkey: LocalNode) -> None:
    _, watch = watching(valkey.url)
    armed(watch)
    spent: list[float] = []

    def work() -> list[Event]:
        before = time.thread_time()
        events = watch.wait(1 << 62)
        spent.append(time.thread_time() - before)
        return events

    waiting = InBackground(work)
    time.sleep(0.5)
    watch.poke()
    assert waiting.result() == []
    assert spent[0] < 0.01 * SLACK


def test_a_poke_before_ends_the_next_wait_and_only_that(watching, valkey: LocalNode) -> None:
    _, watch = watching(valkey.url)
    for _ in range(2):
        watch.poke()
        watch.poke()
        started = time.monotonic()
        assert watch.wait(now_ns() + 5 * S) == []
        assert time.monotonic() - started < E
        until = now_ns() + S // 20
        assert watch.wait(until) == []
        assert now_ns() >= until
        armed(watch)


def test_a_poke_ends_the_wait_that_runs(watching, valkey: LocalNode) -> None:
    _, watch = watching(valkey.url)
    for _ in range(3):
        waiting = InBackground(lambda: watch.wait(now_ns() + 10 * S))
        time.sleep(0.02)
        assert waiting.is_alive()
        started = time.monotonic()
        watch.poke()
        assert waiting.result() == []
        assert time.monotonic() - started < E


def test_no_poke_is_missed(watching, valkey: LocalNode) -> None:
    """A thread pokes a thousand times, each time as soon as the one before was noticed."""
    _, watch = watching(valkey.url)
    armed(watch)
    noticed = threading.Semaphore(0)
    late: list[int] = []

    def work() -> None:
        for number in range(1000):
            watch.poke()
            if not noticed.acquire(timeout=5 * SLACK):
                late.append(number)

    poking = InBackground(work)
    started = time.monotonic()
    for _ in range(1000):
        assert watch.wait(now_ns() + 60 * S) == []
        noticed.release()
    poking.result(60)
    assert late == []
    assert time.monotonic() - started < 10 * SLACK


def test_pokes_of_many_threads(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    threads = [InBackground(lambda: [watch.poke() for _ in range(1000)]) for _ in range(4)]
    while any(thread.is_alive() for thread in threads):
        assert watch.wait(now_ns() + S // 100) == []
        assert said(take(engine, watch, token=None, quorum=1))
        ask(engine, DROP, b"none")
        watch.wait(0)
    for thread in threads:
        thread.result()
    while watch.wait(0):
        pass
    assert [event for event in watch.wait(0) if event[0] == LOST] == []


def test_pokes_do_not_disturb_a_try(watching) -> None:
    with listening(SET=split(OK, 1, pause=0.03)) as node:
        engine, watch = watching(node.url)
        assert quiet(watch, 0.01)
        before = time.thread_time()
        for _ in range(5):
            watch.poke()
            assert said(take(engine, watch)) == [YES]
        assert time.thread_time() - before < 0.05 * SLACK


@pytest.mark.parametrize("seconds", [30.0, -30.0])
def test_a_moved_clock_ends_the_wait_if_it_is_over(
    watching, valkey: LocalNode, clock, seconds: float
) -> None:
    _, watch = watching(valkey.url)
    armed(watch)
    if seconds < 0:
        clock(-seconds)
    waiting = InBackground(lambda: (watch.wait(now_ns() + 20 * S), now_ns()))
    time.sleep(0.05)
    started = time.monotonic()
    clock(seconds)
    if seconds > 0:
        assert waiting.result()[0] == []
        assert time.monotonic() - started < E
    else:
        time.sleep(0.05)
        assert waiting.is_alive()
        watch.poke()
        assert waiting.result()[0] == []


# ---- pushes at awkward moments ----

PUSHES = {
    "a key": (push("invalidate", [KEY]), [KEY]),
    "status words": (b">2\r\n+invalidate\r\n*1\r\n+name\r\n", [KEY]),
    "nil": (b">2\r\n$10\r\ninvalidate\r\n_\r\n", [None]),
    "old nil": (push("invalidate", None), [None]),
    "several keys": (push("invalidate", [KEY, b"other"]), [None]),
    "the empty key": (push("invalidate", [b""]), None),
    "two pushes": (push("invalidate", [KEY]) + push("invalidate", [b"other"]), [KEY, b"other"]),
    "line ends": (push("invalidate", [b"\r\n>1\r\n"]), [b"\r\n>1\r\n"]),
    "a message": (push("message", TOPIC, b"free"), [TOPIC]),
    "an empty message": (push("message", TOPIC, b""), [TOPIC]),
    "others": (
        push("subscribe", TOPIC, 1)
        + push("pmessage", b"*", TOPIC, KEY)
        + push("tracking-redir-broken")
        + push("monitor", [KEY], [KEY])
        + push()
        + push("invalidat", [KEY])
        + push("invalidates", [KEY]),
        [],
    ),
    "after an attribute": (
        b"|1\r\n$10\r\ninvalidate\r\n*1\r\n$4\r\nname\r\n" + push("invalidate", [KEY]),
        [KEY],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "keys"), PUSHES.values(), ids=PUSHES)
def test_a_push_is_read_alike_wherever_it_is_cut(
    watching, data: bytes, keys: list[bytes | None] | None
) -> None:
    end = push("invalidate", [b"end"])
    cuts = [(), *((at,) for at in range(1, len(data))), tuple(range(1, len(data)))]
    with listening() as node:
        engine, watch = watching(node.url)
        armed(watch)
        (peer,) = node.peers
        for cut in cuts:
            split(data + end, *cut, pause=0.0003).run(peer)
            events: list[Event] = []
            while changed(engine, b"end") not in events:
                events += heard(watch)
            if keys is None:
                assert [event[0] for event in events[:-1]] == [CHANGED]
                continue
            marks = [0 if key is None else engine.mark(key) for key in keys]
            assert events[:-1] == [(CHANGED, 0, mark, 0) for mark in marks], f"cut at {cut}"
        assert len(node.peers) == 1


@pytest.mark.parametrize("verb", ["attempt", "arm"])
def test_pushes_between_the_replies(watching, verb: str) -> None:
    """Before, between and behind the answers to a try and its look, wherever they are cut."""
    one, two = push("invalidate", [b"one"]), push("invalidate", [b"two"])
    replies = {"attempt": one + NIL + two + b":9\r\n" + one, "arm": one + b":9\r\n" + two + one}[verb]
    cuts = [(), *((at,) for at in range(1, len(replies))), tuple(range(1, len(replies)))]
    pieces = iter([split(replies, *cut, pause=0.0003) for cut in cuts])

    def answer(argv: Argv) -> bytes | Step | None:
        return next(pieces) if argv[0] == b"PTTL" else None

    with ScriptedNode(answer=answer, background=handshake) as node:
        engine, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(READY, 0, 0, 0)]
        for cut in cuts:
            if verb == "attempt":
                assert said(take(engine, watch)) == [NO]
            else:
                watch.arm(KEY, 1, LIMIT)
            events = heard(watch, 4)
            assert sorted(events) == sorted(
                [changed(engine, b"one"), changed(engine, b"two"), changed(engine, b"one"), life(engine, 9)]
            ), f"cut at {cut}"
            assert [event[2] for event in events if event[0] == CHANGED] == [
                engine.mark(key) for key in (b"one", b"two", b"one")
            ]
        assert len(node.peers) == 1


def test_pushes_that_come_between_two_calls_are_kept(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch, b"one")
    armed(watch, b"two")
    raw(valkey, "SET", "one", "x")
    time.sleep(0.01)
    assert said(take(engine, watch)) == [YES]  # reads it
    raw(valkey, "SET", "two", "x")
    events = heard(watch, 3)
    assert events[0] == changed(engine, b"one")
    assert {event[:3] for event in events[1:]} == {changed(engine, b"two")[:3], life(engine, 0)[:3]}


def test_far_too_many_pushes_are_one(watching) -> None:
    with listening(SET=send(b"".join(push("invalidate", [b"%d" % i]) for i in range(3000)), NIL)) as node:
        engine, watch = watching(node.url)
        armed(watch, b"first")
        assert said(take(engine, watch)) == [NO]
        events: list[Event] = []
        while life(engine, -2) not in events and (CHANGED, 0, 0, 0) not in events[-2:]:
            events += heard(watch)
        assert len(events) <= 600
        assert (CHANGED, 0, 0, 0) in events
        assert {event[0] for event in events} <= {CHANGED, LIFE_TOLD}
        while watch.wait(now_ns() + S // 50):
            pass
        assert armed(watch)[0] == LIFE_TOLD


def test_what_is_said_of_a_node_is_not_lost_among_pushes(watching) -> None:
    many = b"".join(push("invalidate", [b"%d" % i]) for i in range(300))
    with ExitStack() as stack:
        go = threading.Event()
        first = stack.enter_context(
            ScriptedNode([expect("PTTL"), send(b":1\r\n"), wait(go), hang_up()], background=handshake)
        )
        second = stack.enter_context(listening(SET=send(many, many, many, NIL)))
        engine, watch = watching(first.url, second.url)
        armed(watch, nodes=0b01)
        armed(watch, nodes=0b10)
        go.set()
        first.check()
        for _ in range(3):
            assert said(take(engine, watch, nodes=0b10, quorum=1)) == [OPEN, NO]
        watch.arm(KEY, 0b10, LIMIT)
        events: list[Event] = []
        until = now_ns() + 3 * S
        while (LOST, 0, 0, 0) not in events:
            assert now_ns() < until
            events += watch.wait(until)
        assert len(events) < 600


# ---- nodes that are lost, and come back ----


def test_a_connection_that_the_server_ends_is_lost_and_can_be_armed_again(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    for _ in range(3):
        armed(watch)
        (client,) = watchers(node)
        raw(node, "CLIENT", "KILL", "ID", client["id"])
        assert heard(watch) == [(LOST, 0, 0, 0)]
        assert quiet(watch)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(READY, 0, 0, 0)]
        armed(watch)
        raw(node, "SET", KEY, "x")
        assert heard(watch) == [changed(engine)]
        assert engine.absent() == 0


def test_a_connection_that_ends_between_two_tries(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch, b"other")
    raw(valkey, "CLIENT", "KILL", "ID", watchers(valkey)[0]["id"])
    time.sleep(0.01)
    assert said(take(engine, watch)) == [YES]  # on a new one
    events = heard(watch, 2)
    assert events[0] == (LOST, 0, 0, 0)
    assert events[1][:3] == life(engine, 0)[:3]


def test_a_node_that_does_not_answer_is_suspect_and_lost(watching, valkeys: LocalNodes) -> None:
    engine, watch = watching(valkeys[0].url, valkeys[1].url)
    armed(watch, nodes=0b01)
    armed(watch, nodes=0b10)
    valkeys[1].pause()
    started = time.monotonic()
    watch.arm(KEY, 0b11, SHORT)
    events = heard(watch, 2)
    assert life(engine, -2) in events
    assert (LOST, 1, 0, 0) in events
    assert 0.04 * SLACK < time.monotonic() - started < 0.05 * SLACK + E
    assert engine.absent() == 0b10
    watch.arm(KEY, 0b10, SHORT)
    assert watch.wait(now_ns()) == [(LOST, 1, 0, 0)]  # at once
    votes = take(engine, watch, quorum=2)
    assert said(votes) == [YES, FAULT]
    assert causes(votes)[1].startswith("left out until it answers again: no answer within")
    valkeys[1].resume()
    eventually(lambda: watch.wait(now_ns() + S // 100) is not None and engine.absent() == 0)
    eventually(lambda: arms(engine, watch, 0b10))


def arms(engine: Engine, watch: Watch, nodes: int) -> bool:
    """Whether some node can be armed; whatever else is told is passed over."""
    watch.arm(b"another", nodes, LIMIT)
    until = now_ns() + S // 10
    while now_ns() < until:
        for event in watch.wait(until):
            if event[0] == LIFE_TOLD and event[2] == engine.mark(b"another") and nodes >> event[1] & 1:
                return True
            if event[0] == READY:
                watch.arm(b"another", nodes, LIMIT)
    return False


def test_who_does_not_listen_for_long_blames_no_node(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    for _ in range(3):
        watch.arm(KEY, 1, SHORT)
        time.sleep(0.1 * SLACK)
        assert heard(watch) == [life(engine, -2)]
        assert engine.absent() == 0


def test_nor_who_has_much_to_read_first(watching) -> None:
    many = b"".join(push("invalidate", [b"%d" % i]) for i in range(3000))
    with listening(PTTL=send(many, b":-2\r\n")) as node:
        engine, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(READY, 0, 0, 0)]
        watch.arm(KEY, 1, SHORT)
        time.sleep(0.1 * SLACK)
        events: list[Event] = []
        while life(engine, -2) not in events:
            events += heard(watch)
        assert {event[0] for event in events} == {CHANGED, LIFE_TOLD}
        assert engine.absent() == 0


def test_a_node_that_answers_late_was_armed(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    valkey.pause()
    watch.arm(KEY, 1, SHORT)
    assert heard(watch) == [(LOST, 0, 0, 0)]
    valkey.resume()
    assert heard(watch) == [life(engine, -2)]
    assert engine.absent() == 0
    raw(valkey, "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]


def test_a_node_that_never_answers_is_connected_anew(watching) -> None:
    script = [expect("PTTL"), send(b":-2\r\n"), ignore_rest()]
    with ScriptedNode(script, answer=by_name(PTTL=b":5\r\n"), background=handshake) as node:
        engine, watch = watching(node.url)
        armed(watch)
        watch.arm(KEY, 1, SHORT)
        assert heard(watch) == [(LOST, 0, 0, 0)]
        assert watch.wait(now_ns() + int(1.3 * SLACK * S)) == []  # it is told once
        eventually(lambda: arms(engine, watch, 1), 10)
        assert len(node.peers) >= 2


def test_a_node_that_only_a_watch_suspects_can_tell_that_it_is_back(watching, valkey: LocalNode) -> None:
    """The connection of the watch has been given up by then, and that of the rounds waits for nothing."""
    engine, watch = watching(valkey.url)
    armed(watch)
    ask(engine, LIFE)
    valkey.pause()
    watch.arm(KEY, 1, SHORT)
    assert heard(watch) == [(LOST, 0, 0, 0)]
    assert watch.wait(now_ns() + int(1.2 * SLACK * S)) == []
    assert engine.absent() == 1
    valkey.resume()
    eventually(lambda: engine.absent() == 0)
    assert eventually(lambda: arms(engine, watch, 1))


def test_a_server_that_accepts_and_says_nothing(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    valkey.pause()
    started = time.monotonic()
    watch.arm(KEY, 1, SHORT)
    assert heard(watch) == [(LOST, 0, 0, 0)]
    assert time.monotonic() - started < 0.05 * SLACK + E
    assert engine.absent() == 1
    valkey.resume()
    until = now_ns() + 3 * S
    while engine.absent() and now_ns() < until:
        watch.wait(now_ns() + S // 100)
    assert eventually(lambda: arms(engine, watch, 1))


def test_a_killed_server_and_its_return(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url)
    armed(watch)
    node.kill()
    assert heard(watch) == [(LOST, 0, 0, 0)]
    for _ in range(3):
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LOST, 0, 0, 0)]  # refused, or in its back-off
    assert engine.absent() == 1
    votes = take(engine, watch)
    assert said(votes) == [FAULT]
    node.start(empty=True)
    assert eventually(lambda: arms(engine, watch, 1))
    assert engine.absent() == 0
    raw(node, "SET", "another", "x")
    while changed(engine, b"another") not in watch.wait(now_ns() + 3 * S):
        pass


def test_absent_tells_of_the_back_off(engine_of, valkeys: LocalNodes) -> None:
    engine = engine_of(*[node.url for node in list(valkeys)[:3]])
    assert engine.absent() == 0
    attempt(engine, quorum=3)
    assert engine.absent() == 0
    valkeys[1].kill()
    time.sleep(0.01)
    assert said(attempt(engine, b"second", quorum=3))[1] == FAULT
    assert engine.absent() & 0b101 == 0
    valkeys[1].start(empty=True)
    eventually(lambda: said(attempt(engine, b"third", None, quorum=3)) == [YES] * 3)
    assert engine.absent() == 0


def test_an_error_as_an_answer_is_a_loss(watching) -> None:
    told = iter([b":1\r\n", error("LOADING server is loading"), error("NOPERM no PTTL for you"), b":2\r\n"])
    with listening(PTTL=lambda argv: next(told)) as node:
        engine, watch = watching(node.url)
        assert armed(watch) == life(engine, 1)
        for value in (0, 1):
            watch.arm(KEY, 1, LIMIT)
            assert heard(watch) == [(LOST, 0, 0, value)]
        assert armed(watch) == life(engine, 2)
        assert len(node.peers) == 1


def test_an_address_where_nobody_listens(watching) -> None:
    engine, watch = watching("redis://127.0.0.1:1")
    watch.arm(KEY, 1, LIMIT)
    assert heard(watch) == [(LOST, 0, 0, 0)]
    assert engine.absent() == 1
    watch.arm(KEY, 1, LIMIT)
    assert heard(watch) == [(LOST, 0, 0, 0)]


def test_a_name_that_has_to_be_looked_up(watching, valkey: LocalNode) -> None:
    engine, watch = watching(f"redis://localhost:{valkey.port}")
    assert armed(watch) == life(engine, -2)


def test_a_name_that_nobody_knows(watching) -> None:
    _, watch = watching("redis://no-such-host.invalid:6379")
    watch.arm(KEY, 1, LIMIT)
    assert heard(watch, limit=10) == [(LOST, 0, 0, 0)]


def test_a_unix_socket(watching, valkey: LocalNode) -> None:
    engine, watch = watching(f"unix://{valkey.unix_path}")
    assert armed(watch) == life(engine, -2)
    raw(valkey, "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]


# ---- servers that do not know or permit it ----

TRACKING = (b"CLIENT", b"TRACKING")
WITHOUT = {
    "no HELLO": lambda argv: unknown_command(argv) if argv[0] == b"HELLO" else handshake(argv),
    "no RESP3": lambda argv: error("NOPROTO no such protocol") if argv[0] == b"HELLO" else handshake(argv),
    "no CLIENT": lambda argv: unknown_command(argv) if argv[0] == b"CLIENT" else handshake(argv),
    "no TRACKING": lambda argv: (
        error("ERR unknown subcommand 'TRACKING'") if argv[:2] == TRACKING else handshake(argv)
    ),
    "not for you": lambda argv: error("NOPERM not for you") if argv[:2] == TRACKING else handshake(argv),
    "hangs up on HELLO": lambda argv: hang_up() if argv[0] == b"HELLO" else handshake(argv),
    "hangs up on TRACKING": lambda argv: hang_up() if argv[:2] == TRACKING else handshake(argv),
}


@pytest.mark.parametrize("without", WITHOUT)
def test_a_server_that_lacks_what_it_takes(watching, without: str) -> None:
    answer = by_name(PTTL=b":7\r\n", SET=OK, SUBSCRIBE=lambda argv: push("subscribe", argv[1], 1))
    with ScriptedNode(answer=answer, background=WITHOUT[without]) as node:
        engine, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LOST, 0, 0, 1)]
        peers = len(node.peers)
        for _ in range(3):
            watch.arm(KEY, 1, LIMIT)
            assert watch.wait(now_ns()) == [(LOST, 0, 0, 1)]  # at once
        votes = take(engine, watch)
        assert (said(votes), votes.verdict) == ([FAULT], UNDECIDED)
        assert "does not know or permit" in causes(votes)[0]
        assert heard(watch) == [(LOST, 0, 0, 1)]
        assert len(node.peers) == peers == 1
        assert engine.absent() == 0
        assert said(attempt(engine)) == [YES]
        other = engine.watch(tracking=False)
        try:
            if "HELLO" in without or "RESP3" in without:
                other.arm(KEY, 1, LIMIT, TOPIC)
                assert heard(other) == [(LOST, 0, 0, 1)]
            else:
                assert armed(other, topic=TOPIC) == life(engine, 7)
        finally:
            other.close()


def test_a_server_that_lacks_it_is_asked_again_when_it_was_away(watching, node: LocalNode) -> None:
    raw(node, "ACL", "SETUSER", "default", "-client|tracking")  # the server forgets that with its end
    try:
        engine, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LOST, 0, 0, 1)]
        assert said(attempt(engine)) == [YES]
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LOST, 0, 0, 1)]
    finally:
        node.kill()
    eventually(lambda: said(attempt(engine, b"second", None)) == [FAULT] and engine.absent() == 1)
    node.start(empty=True)
    eventually(lambda: said(attempt(engine, b"third", None)) == [YES])
    watch.arm(KEY, 1, LIMIT)
    assert heard(watch) == [(READY, 0, 0, 0)]


def test_a_user_who_must_not_track(watching, node: LocalNode) -> None:
    raw(node, "ACL", "SETUSER", "amy", "on", ">hers", "~*", "&*", "+@all", "-client|tracking")
    url = node.url.replace("//", "//amy:hers@")
    engine, watch = watching(url)
    watch.arm(KEY, 1, LIMIT)
    assert heard(watch) == [(LOST, 0, 0, 1)]
    other = engine.watch(tracking=False)
    try:
        assert armed(other, topic=TOPIC) == life(engine, -2)
        assert raw(node, "PUBLISH", TOPIC, "0") == 1
        assert heard(other) == [changed(engine, TOPIC)]
    finally:
        other.close()


def test_a_wrong_password_is_no_lack(watching, node: LocalNode) -> None:
    raw(node, "ACL", "SETUSER", "amy", "on", ">hers", "~*", "+@all")
    _, watch = watching(node.url.replace("//", "//amy:wrong@"))
    watch.arm(KEY, 1, LIMIT)
    assert heard(watch) == [(LOST, 0, 0, 0)]


def test_credentials_database_and_name(watching, node: LocalNode) -> None:
    raw(node, "ACL", "SETUSER", "amy", "on", ">hers", "~*", "+@all")
    engine, watch = watching(node.url.replace("//", "//amy:hers@") + "/3?client_name=mine")
    armed(watch)
    (client,) = watchers(node)
    assert (client["user"], client["db"], client["name"], client["resp"]) == ("amy", "3", "mine", "3")
    raw(node.url + "/3", "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]


# ---- channels ----


def test_a_message_is_a_change_of_its_channel(watching, node: LocalNode) -> None:
    engine, watch = watching(node.url, tracking=False)
    assert armed(watch, topic=TOPIC) == life(engine, -2)
    assert watchers(node) == []
    for payload in ("0", "1", "x" * 100_000):
        assert raw(node, "PUBLISH", TOPIC, payload) == 1
        assert heard(watch) == [changed(engine, TOPIC)]
    raw(node, "SET", KEY, "x")
    assert quiet(watch)
    assert armed(watch, topic=TOPIC)[3] == -1
    assert armed(watch, topic=b"second")[3] == -1
    assert raw(node, "PUBLISH", TOPIC, "0") == 1
    assert raw(node, "PUBLISH", "second", "0") == 1
    assert heard(watch, 2) == [changed(engine, TOPIC), changed(engine, b"second")]


def test_a_channel_is_subscribed_to_once_on_each_connection(watching) -> None:
    answer = by_name(PTTL=b":7\r\n", SUBSCRIBE=lambda argv: push("subscribe", argv[1], 1))
    with ScriptedNode(answer=answer, background=handshake) as node:
        _, watch = watching(node.url, tracking=False)
        for _ in range(3):
            armed(watch, topic=TOPIC)
        assert names(node) == ["HELLO", "SUBSCRIBE", "PTTL", "PTTL", "PTTL"]
        node.peers[0].hang_up()
        assert heard(watch) == [(LOST, 0, 0, 0)]
        armed(watch, topic=TOPIC)
        assert names(node)[5:] == ["HELLO", "SUBSCRIBE", "PTTL"]


@on_linux
def test_a_subscription_and_its_look_are_one_packet(watching) -> None:
    answer = by_name(PTTL=b":7\r\n", SUBSCRIBE=lambda argv: push("subscribe", argv[1], 1))
    with ScriptedNode(answer=answer, background=handshake) as node:
        _, watch = watching(node.url, tracking=False)
        armed(watch)
        before = packets(node.peers[0])
        armed(watch, topic=TOPIC)
        assert packets(node.peers[0]) == before + 1


def test_a_channel_that_is_not_permitted(watching, node: LocalNode) -> None:
    raw(node, "ACL", "SETUSER", "amy", "on", ">hers", "~*", "resetchannels", "&mine*", "+@all")
    engine, watch = watching(node.url.replace("//", "//amy:hers@"), tracking=False)
    armed(watch)
    for _ in range(2):
        watch.arm(KEY, 1, LIMIT, b"theirs")
        assert (LOST, 0, 0, 1) in heard(watch)
        until = now_ns() + S // 20
        while now_ns() < until:
            watch.wait(until)
    assert armed(watch, topic=b"mine too")[0] == LIFE_TOLD
    assert raw(node, "PUBLISH", "mine too", "0") == 1
    assert heard(watch) == [changed(engine, b"mine too")]


# ---- ends, and what is used again ----


def test_the_next_watch_uses_the_connections_of_the_last(watching) -> None:
    with listening() as node:
        engine, watch = watching(node.url)
        armed(watch)
        for _ in range(5):
            watch.close()
            watch.close()
            watch = engine.watch()
            watch.arm(KEY, 1, LIMIT)
            assert heard(watch) == [life(engine, -2)]
        other = engine.watch()
        armed(other)
        assert len(node.peers) == 2
        other.close()
        watch.close()
        plain = engine.watch(tracking=False)
        armed(plain)
        assert len(node.peers) == 3  # of another kind
        plain.close()
        assert said(attempt(engine)) == [YES]
        assert len(node.peers) == 4  # a round has its own


def test_what_was_armed_by_the_last_watch_is_at_most_a_change(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch, b"old")
    watch.arm(b"late", 1, LIMIT)
    watch.close()
    raw(valkey, "SET", "old", "x")
    time.sleep(0.01)
    again = engine.watch()
    try:
        again.arm(KEY, 1, LIMIT)
        events = heard(again)
        while life(engine, -2) not in events:
            events += heard(again)
        assert set(events) <= {life(engine, -2), changed(engine, b"old")}
    finally:
        again.close()


def test_one_that_has_subscribed_is_not_used_again(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url, tracking=False)
    armed(watch, topic=TOPIC)
    watch.close()
    eventually(lambda: raw(valkey, "PUBSUB", "NUMSUB", TOPIC)[1] == 0)
    again = engine.watch(tracking=False)
    again.arm(KEY, 1, LIMIT)
    assert heard(again) == [(READY, 0, 0, 0)]
    again.close()


def test_a_closed_watch_is_of_no_use(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    watch.close()
    watch.close()
    watch.poke()
    for call in (
        lambda: watch.wait(now_ns() + S),
        lambda: watch.arm(KEY, 1, LIMIT),
        lambda: take(engine, watch),
    ):
        with pytest.raises(RuntimeError):
            call()
    assert raw(valkey, "EXISTS", KEY) == 0


def test_connections_of_no_use_are_closed_after_a_while(watching, valkey: LocalNode, clock) -> None:
    engine, watch = watching(valkey.url)
    others = [engine.watch() for _ in range(3)]
    for one in (watch, *others):
        armed(one)
    assert len(watchers(valkey)) == 4
    for one in others:
        one.close()
    time.sleep(0.05)
    assert len(watchers(valkey)) == 4
    clock(31)
    eventually(lambda: len(watchers(valkey)) == 1)
    watch.close()
    clock(31)
    eventually(lambda: watchers(valkey) == [])


def test_no_descriptor_is_left_when_the_engine_is_closed(engine_of, valkeys: LocalNodes) -> None:
    before = fd_count()
    engine = engine_of(*[node.url for node in valkeys])
    watches = [engine.watch(tracking) for tracking in (True, False, True)]
    for watch in watches:
        watch.arm(KEY, 0b11111, LIMIT)
        heard(watch, 5)
        watch.arm(KEY, 0b11111, LIMIT, TOPIC)
        heard(watch, 5)
    attempt(engine)
    for watch in watches[:2]:
        watch.close()
    engine.close()
    assert eventually(lambda: fd_count() <= before + 7)  # the last one is in use
    watch = watches[2]
    watch.arm(b"another", 0b11111, LIMIT)
    heard(watch, 5)
    watch.close()
    engine.close()
    eventually(lambda: fd_count() <= before)


def test_a_watch_that_is_forgotten_is_closed(engine_of, valkey: LocalNode) -> None:
    before = fd_count()
    engine = engine_of(valkey.url)
    armed(engine.watch())
    assert len(watchers(valkey)) == 1
    engine.close()
    eventually(lambda: watchers(valkey) == [])
    eventually(lambda: fd_count() <= before)


def test_an_engine_that_was_closed_can_be_watched_again(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    watch.close()
    engine.close()
    again = engine.watch()
    assert armed(again) == life(engine, -2)
    again.close()


# ---- writes and deletes: order, posts ----


def test_a_delete_follows_a_try_that_the_watch_has_not_read_yet(watching) -> None:
    go, seen = threading.Event(), threading.Event()
    script = [expect("SET"), expect("PTTL"), tell(seen), wait(go), send(OK, b":1\r\n"), serve(by_name())]
    with ScriptedNode(script, answer=by_name(), background=handshake) as node:
        engine, watch = watching(node.url)
        votes = take(engine, watch, limit_ns=SHORT)
        assert said(votes) == [FAULT]
        assert seen.wait(5)
        assert engine.pending(TOKEN)
        votes = ask(engine, DROP, TOKEN, limit=0.1)
        assert said(votes) == [FAULT]
        go.set()
        eventually(lambda: watch.wait(now_ns() + S // 100) is not None and not engine.pending(TOKEN))
        assert {one.connection for one in node.received() if TOKEN in one.argv} == {0}
        assert next(one.name for one in node.received() if TOKEN in one.argv) == "SET"
        watch.close()
        engine.close()


def test_what_a_closed_watch_has_left_is_looked_after(watching) -> None:
    go = threading.Event()
    script = [
        expect("SET"),
        expect("PTTL"),
        expect("EVAL"),
        wait(go),
        send(OK, b":1\r\n", b":1\r\n"),
        ignore_rest(),
    ]
    with ScriptedNode(script, answer=by_name(SET=OK), background=handshake) as node:
        engine, watch = watching(node.url)
        assert said(take(engine, watch, limit_ns=SHORT)) == [FAULT]
        watch.close()
        assert engine.pending(TOKEN)
        go.set()
        eventually(lambda: not engine.pending(TOKEN))
        eventually(lambda: said(attempt(engine)) == [YES])
        engine.close()


def test_a_delete_is_sent_though_the_watch_does_not_listen(watching, node: LocalNode) -> None:
    """There is no other connection, and that of the watch has a reply that nobody reads."""
    engine, watch = watching(node.url)
    armed(watch, b"other")
    raw(node, "SET", KEY, TOKEN)
    watch.arm(b"other", 1, LIMIT)
    engine.discard(KEY, TOKEN)
    eventually(lambda: raw(node, "EXISTS", KEY) == 0)
    eventually(lambda: not engine.pending(TOKEN))
    assert heard(watch)[0][0] == LIFE_TOLD


def test_a_posted_write_is_executed(engine_of, node: LocalNode) -> None:
    engine = engine_of(node.url)
    attempt(engine, b"first")
    engine.post(TAKE, KEY, (TOKEN, b"5000"))
    eventually(lambda: raw(node, "GET", KEY) == TOKEN)
    assert 0 < raw(node, "PTTL", KEY) <= 5000
    eventually(lambda: not engine.pending(TOKEN))
    assert raw(node, "GET", KEY) == TOKEN  # it is not undone


def test_a_posted_write_never_takes_what_is_taken(engine_of, node: LocalNode) -> None:
    engine = engine_of(node.url)
    attempt(engine, b"first")
    raw(node, "SET", KEY, "other")
    engine.post(TAKE, KEY, (TOKEN, b"5000"))
    ask(engine, LIFE)
    eventually(lambda: not engine.pending(TOKEN))
    assert raw(node, "GET", KEY) == b"other"


def test_a_delete_follows_a_posted_write(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DELIFEQ=b":1\r\n", EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine, b"first", b"first")
        engine.post(TAKE, KEY, (TOKEN, b"5000"))
        assert engine.pending(TOKEN)
        assert said(ask(engine, DROP, TOKEN)) == [YES]
        sent = [one for one in node.received() if TOKEN in one.argv]
        assert [one.name for one in sent] == ["SET", "DELIFEQ"]
        assert sent[0].argv == (b"SET", KEY, TOKEN, b"NX", b"PX", b"5000")
        assert {one.connection for one in sent} == {0}
        eventually(lambda: not engine.pending(TOKEN))


def test_a_delete_follows_a_posted_write_of_another_thread(engine_of) -> None:
    """There are several channels; it goes on the one with the write, also when nobody waits for it."""
    held_back = threading.Event()

    def answer_late(peer: Peer) -> None:
        held_back.wait(5)
        peer.send(OK)

    def slow(argv: Argv) -> bytes | Step | None:
        return Step("answer late", answer_late) if b"slow" in argv else OK

    with ScriptedNode(answer=by_name(SET=slow, DELIFEQ=b":1\r\n", EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        first = InBackground(lambda: attempt(engine, b"slow", b"slow"))
        eventually(lambda: node.received("SET"))
        attempt(engine, b"second", b"second")  # on a second channel
        engine.post(TAKE, KEY, (TOKEN, b"5000"))
        held_back.set()
        first.result()  # the first channel is idle now, and on top
        assert said(ask(engine, DROP, TOKEN)) == [YES]
        sent = [one for one in node.received() if TOKEN in one.argv]
        assert sent[0].name == "SET"
        assert len({one.connection for one in sent}) == 1
        engine.discard(KEY, TOKEN)
        eventually(lambda: not engine.pending(TOKEN))


def test_a_posted_write_follows_an_earlier_one_of_its_token(engine_of) -> None:
    """That one is unanswered, on a channel that another thread uses."""
    go = threading.Event()
    script = [expect("SET"), wait(go), send(OK), expect("SET"), send(NIL), serve(by_name())]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        first = InBackground(lambda: attempt(engine))
        eventually(lambda: node.received("SET"))
        attempt(engine, b"second", b"second")  # on another channel
        engine.post(TAKE, KEY, (TOKEN, b"5000"))
        go.set()
        assert said(first.result()) == [YES]
        eventually(lambda: not engine.pending(TOKEN))
        assert {one.connection for one in node.received("SET") if TOKEN in one.argv} == {0}
        engine.close()


def test_a_posted_write_goes_only_to_the_nodes_of_the_mask(engine_of) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(3)]
        engine = engine_of(*[node.url for node in nodes])
        attempt(engine, b"first", b"first", quorum=3)
        engine.post(TAKE, KEY, (TOKEN, b"5000"), 0b101)
        attempt(engine, b"second", b"second", quorum=3)
        assert [len([one for one in node.received() if TOKEN in one.argv]) for node in nodes] == [1, 0, 1]


def test_a_posted_write_that_was_not_answered_is_undone_on_the_next_connection(engine_of) -> None:
    script = [expect("SET"), send(OK), expect("SET"), hang_up()]
    with ScriptedNode(script, answer=by_name(SET=OK, EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine, b"first", b"first")
        engine.post(TAKE, KEY, (TOKEN, b"5000"))
        node.check()
        eventually(lambda: [one for one in node.received("EVAL") if TOKEN in one.argv])
        eventually(lambda: not engine.pending(TOKEN))
        (undo,) = [one for one in node.received("EVAL") if TOKEN in one.argv]
        assert undo.argv[2:] == (b"1", KEY, TOKEN)


def test_a_posted_write_is_not_sent_to_a_suspect(engine_of, valkey: LocalNode) -> None:
    engine = engine_of(valkey.url)
    attempt(engine, b"first", b"first")
    valkey.pause()
    assert said(attempt(engine, b"second", b"second", limit=0.05)) == [FAULT]
    engine.post(TAKE, KEY, (TOKEN, b"5000"))
    time.sleep(0.1)
    valkey.resume()
    eventually(lambda: said(attempt(engine, b"third", None)) == [YES])
    assert raw(valkey, "EXISTS", KEY) == 0
    assert not engine.pending(TOKEN)


# ---- forks ----


def in_child(body: Callable[[], object]) -> None:
    """Run it in a forked child, which has to end well."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(int(10 * SLACK))
            body()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_has_no_watch_of_its_parent(watching, valkey: LocalNode) -> None:
    before = fd_count()
    engine, watch = watching(valkey.url)
    idle = engine.watch()
    armed(idle)
    armed(watch)
    assert quiet(watch, 0.01)
    assert quiet(idle, 0.01)
    idle.close()
    watch.poke()

    def child() -> None:
        assert fd_count() <= before
        for call in (
            lambda: watch.wait(now_ns() + S),
            lambda: watch.arm(KEY, 1, LIMIT),
            lambda: take(engine, watch),
        ):
            with pytest.raises(RuntimeError):
                call()
        watch.poke()
        watch.close()
        watch.close()
        own = engine.watch()
        assert armed(own) == life(engine, -2)
        own.close()
        assert said(attempt(engine, b"child", b"child")) == [YES]

    in_child(child)
    assert watch.wait(now_ns() + S) == []  # it was poked
    assert raw(valkey, "EXISTS", KEY) == 0
    raw(valkey, "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]  # the child has not read it, nor ended it
    assert engine.absent() == 0


def test_a_fork_by_a_signal_handler_in_the_middle_of_a_wait(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    pids: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: pids.append(os.fork()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        try:
            events = watch.wait(now_ns() + S // 5)
        except RuntimeError:  # the child
            os._exit(0 if pids == [0] else 1)
        finally:
            if pids == [0]:
                os._exit(2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert events == []
    raw(valkey, "SET", KEY, "x")
    assert heard(watch) == [changed(engine)]


# ---- interrupts ----


class Interrupt(BaseException):
    """What a signal handler raises; KeyboardInterrupt would end the test run if it went astray."""


def interrupt(*_: object) -> None:
    raise Interrupt


@contextmanager
def alarm() -> Iterator[Callable[[float], object]]:
    """Give a function that lets an Interrupt come after so many seconds."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("until", [S, 1 << 62])
def test_an_interrupted_wait_is_over_at_once(watching, valkey: LocalNode, until: int) -> None:
    engine, watch = watching(valkey.url)
    armed(watch)
    for _ in range(3):
        with alarm() as interrupt_after:
            interrupt_after(0.03)
            started = time.monotonic()
            with pytest.raises(Interrupt):
                watch.wait(until if until > S else now_ns() + until)
            assert time.monotonic() - started < 0.03 + 0.1 * SLACK
        eventually(lambda: arms(engine, watch, 1))
        raw(valkey, "DEL", KEY)
    watch.close()


def test_a_handler_that_returns_does_not_end_a_wait(watching, valkey: LocalNode) -> None:
    _, watch = watching(valkey.url)
    armed(watch)
    calls: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        until = now_ns() + S // 5
        assert watch.wait(until) == []
        assert now_ns() >= until
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) > 5


def test_a_handler_that_pokes_ends_a_wait(watching, valkey: LocalNode) -> None:
    _, watch = watching(valkey.url)
    armed(watch)
    before = signal.signal(signal.SIGALRM, lambda *_: watch.poke())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        started = time.monotonic()
        assert watch.wait(now_ns() + 5 * S) == []
        assert time.monotonic() - started < 0.03 + 0.1 * SLACK
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_try_is_undone(watching, valkey: LocalNode) -> None:
    engine, watch = watching(valkey.url)
    armed(watch, b"other")
    valkey.pause()
    with alarm() as interrupt_after:
        interrupt_after(0.03)
        with pytest.raises(Interrupt):
            take(engine, watch)
    assert engine.pending(TOKEN)
    valkey.resume()
    eventually(lambda: watch.wait(now_ns() + S // 100) is not None and not engine.pending(TOKEN))
    assert raw(valkey, "EXISTS", KEY) == 0
    assert eventually(lambda: arms(engine, watch, 1))


@pytest.mark.parametrize("count", [1, 3])
def test_interrupts_at_random_moments_leave_nothing(watching, valkeys: LocalNodes, count: int) -> None:
    nodes = list(valkeys)[:count]
    engine, watch = watching(*[node.url for node in nodes])
    everybody = (1 << count) - 1
    before = fd_count()
    hit = 0
    with alarm() as interrupt_after, ExitStack() as stack:
        clients = [stack.enter_context(Client(node)) for node in nodes]
        for number in range(150):
            key = b"key %d" % number
            votes = engine.votes()
            try:
                interrupt_after(1e-5 + (number % 50) * 2e-5 * count)
                for turn in range(1000):
                    watch.arm(b"another", everybody, LIMIT)
                    votes = engine.votes()
                    watch.attempt(votes, key, None, 10_000, count // 2 + 1, 0, LIMIT)
                    watch.wait(now_ns() + S // 1000 * (turn % 3))
                    engine.discard(key, votes.token)
            except Interrupt:
                hit += 1
            engine.discard(key, votes.token)  # it may have been granted before
            eventually(lambda key=key: all(one.ask("EXISTS", key) == b":0\r\n" for one in clients), 1)  # type: ignore[misc]
    assert hit == 150
    assert eventually(lambda: arms(engine, watch, 1))
    watch.close()
    engine.close()
    eventually(lambda: fd_count() <= before)


# ---- connections of a client's own class ----


class Own(redis.connection.Connection):
    """As good as any other, and so it has to be dialled."""


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_dialled_connection(valkey: LocalNode, protocol: int) -> None:
    pool = redis.ConnectionPool(
        connection_class=Own, host=valkey.host, port=valkey.port, protocol=protocol, client_name="mine", db=2
    )
    engine = engine_for((redbolt.Node.from_client(redis.Redis(connection_pool=pool)),), "pure")
    watch = engine.watch()
    try:
        assert armed(watch) == life(engine, -2)
        (client,) = watchers(valkey)
        assert (client["resp"], client["name"], client["db"]) == ("3", "mine", "2")
        raw(valkey.url + "/2", "SET", KEY, "x")
        assert heard(watch) == [changed(engine)]
        assert said(take(engine, watch, b"free")) == [YES]
        raw(valkey, "CLIENT", "KILL", "ID", client["id"])
        while (LOST, 0, 0, 0) not in heard(watch):
            pass
        assert armed(watch, b"free")[3] > 0
    finally:
        watch.close()
        engine.close()


class Slow(redis.connection.Connection):
    """Waits before it connects."""

    def __init__(self, gate: threading.Event, **settings: Any) -> None:
        self.gate = gate
        super().__init__(**settings)

    def connect(self) -> None:
        assert self.gate.wait(10)
        super().connect()


def test_a_dialled_connection_that_takes_long(valkey: LocalNode) -> None:
    gate = threading.Event()
    pool = redis.ConnectionPool(connection_class=Slow, gate=gate, host=valkey.host, port=valkey.port)
    engine = engine_for((redbolt.Node.from_client(redis.Redis(connection_pool=pool)),), "pure")
    watch = engine.watch()
    try:
        watch.arm(KEY, 1, 5 * S)
        waiting = InBackground(lambda: watch.wait(now_ns() + 10 * S))
        time.sleep(0.1)
        assert waiting.is_alive()
        started = time.monotonic()
        gate.set()
        assert waiting.result() == [(READY, 0, 0, 0)]
        assert time.monotonic() - started < E + 0.1 * SLACK
        assert armed(watch) == life(engine, -2)
    finally:
        gate.set()
        watch.close()
        engine.close()


def test_a_dialled_connection_to_a_server_without_tracking() -> None:
    with ScriptedNode(answer=by_name(SET=OK), background=WITHOUT["no TRACKING"]) as node:
        pool = redis.ConnectionPool(connection_class=Own, host=node.host, port=node.port)
        engine = engine_for((redbolt.Node.from_client(redis.Redis(connection_pool=pool)),), "pure")
        watch = engine.watch()
        try:
            watch.arm(KEY, 1, LIMIT)
            assert heard(watch) == [(LOST, 0, 0, 1)]
            assert said(attempt(engine)) == [YES]
        finally:
            watch.close()
            engine.close()


def test_a_tls_connection(tmp_path: Path, valkey: LocalNode) -> None:
    with TlsFront(valkey, Certificate(tmp_path)) as front:
        node = redbolt.Node.from_url(f"rediss://localhost:{front.port}?ssl_ca_certs={front.ca}")
        engine = engine_for((node,), "pure")
        watch = engine.watch()
        try:
            assert armed(watch) == life(engine, -2)
            for _ in range(3):
                raw(valkey, "SET", KEY, "x")
                assert heard(watch) == [changed(engine)]
                assert armed(watch) == life(engine, -1)
            assert said(take(engine, watch)) == [NO]
            assert heard(watch) == [life(engine, -1)]
        finally:
            watch.close()
            engine.close()


# ---- hostile servers ----

HOSTILE = {
    "a giant key": b">2\r\n$10\r\ninvalidate\r\n*1\r\n$%d\r\n" % (2 * MAX_REPLY) + b"x" * (2 * MAX_REPLY),
    "giant announcements": b">2\r\n$10\r\ninvalidate\r\n*60000\r\n" + b"*60000\r\n" * 200_000,
    "deeply nested": b">2\r\n$10\r\ninvalidate\r\n" + b"*1\r\n" * 500_000,
    "an endless list": b">60000\r\n" + (b"$100\r\n" + b"x" * 100 + b"\r\n") * 20_000,
    "an endless kind": b">2\r\n+" + b"x" * (2 * MAX_REPLY),
    "garbage": b">2\r\n$10\r\ninvalidate\r\n?\r\n",
    "an unasked reply": b":1\r\n",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_push_ends_the_connection(watching, data: bytes) -> None:
    script = [expect("PTTL"), send(b":-2\r\n"), send(data, may_fail=True), ignore_rest()]
    with ScriptedNode(script, answer=by_name(PTTL=b":3\r\n"), background=handshake) as node:
        engine, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(READY, 0, 0, 0)]
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch, 2, limit=10) == [life(engine, -2), (LOST, 0, 0, 0)]
        assert eventually(lambda: arms(engine, watch, 1))


HARMLESS = {
    "a long key": (push("invalidate", [b"k" * (MAX_KEY + 1)]), None),
    "the longest key": (push("invalidate", [b"k" * MAX_KEY]), b"k" * MAX_KEY),
    "a number": (push("invalidate", [7]), 0),
    "no list": (push("invalidate", KEY), 0),
    "a list in the list": (push("invalidate", [[KEY]]), 0),
    "many keys": (push("invalidate", [b"%d" % i for i in range(5000)]), 0),
    "a long channel": (push("message", b"k" * (MAX_KEY + 1), b""), None),
    "a message that is none": (push("message", [TOPIC], KEY), 0),
}


@pytest.mark.parametrize(("data", "key"), HARMLESS.values(), ids=HARMLESS)
def test_an_odd_push_is_a_change_of_any_key(watching, data: bytes, key: bytes | int | None) -> None:
    """Or of the one that it names; None: it may be the mark of a key that is longer than any lock's."""
    with listening() as node:
        engine, watch = watching(node.url)
        armed(watch)
        node.peers[0].send(data)
        (event,) = heard(watch)
        assert (event[:2], event[3]) == ((CHANGED, 0), 0)
        if key is not None:
            assert event[2] == (engine.mark(key) if isinstance(key, bytes) else key)
        assert event[2] not in (engine.mark(KEY), engine.mark(b"k" * 100))
        assert armed(watch) == life(engine, -2)
        assert len(node.peers) == 1


def test_a_very_deep_push_is_a_change_of_any_key_or_the_end(watching) -> None:
    deep = b">2\r\n$10\r\ninvalidate\r\n" + b"*1\r\n" * 5_000 + b"$4\r\nname\r\n"
    script = [expect("PTTL"), send(b":-2\r\n"), send(deep), ignore_rest()]
    with ScriptedNode(script, answer=by_name(PTTL=b":3\r\n"), background=handshake) as node:
        engine, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        heard(watch)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch, 2)[1] in ((CHANGED, 0, 0, 0), (LOST, 0, 0, 0))
        watch.close()
        engine.close()


@pytest.mark.parametrize(
    "data",
    [push("invalidate"), push("message"), push([b"invalidate"], [KEY]), push(1, KEY), b">0\r\n", b"|0\r\n",
     b"|1\r\n$10\r\ninvalidate\r\n*1\r\n$4\r\nname\r\n"],
    ids=repr,
)  # fmt: skip
def test_a_push_of_no_shape_does_no_harm(watching, data: bytes) -> None:
    with listening() as node:
        engine, watch = watching(node.url)
        armed(watch)
        node.peers[0].send(data)
        events = watch.wait(now_ns() + S // 50)
        assert {event[0] for event in events} <= {CHANGED}
        assert armed(watch) == life(engine, -2)
        assert len(node.peers) == 1


def test_pushes_on_the_connections_of_rounds_are_nobodys_events(watching) -> None:
    with listening(SET=push("invalidate", [KEY]) + OK) as node:
        engine, watch = watching(node.url)
        armed(watch)
        assert said(attempt(engine)) == [YES]
        assert quiet(watch)


def test_an_error_before_the_handshake_is_over(watching) -> None:
    full = error("ERR max number of clients reached")
    with ScriptedNode(answer=lambda argv: bytewise(full)) as node:
        _, watch = watching(node.url)
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LOST, 0, 0, 0)]
