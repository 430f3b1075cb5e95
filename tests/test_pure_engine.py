"""The pure engine from within: its reader, interrupts at every step, its agent, names, forks and threads."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

import redbolt._pure
from redbolt import Node
from redbolt._engine import LIFE_TOLD, LOST, MAX_KEY, MAX_REPLY, READY, engine_for
from redbolt._judge import FAULT, GRANTED, NO, YES
from redbolt._programs import DROP, EXISTS, EXTEND, OWNED, TAKE, TYPE
from redbolt._pure import Engine, resolve
from redbolt._pure.agent import AGENT, NEVER
from redbolt._pure.connection import MOST_BACKLOG
from redbolt._pure.resp import (
    BULK,
    ERROR,
    INTEGER,
    NIL,
    OTHER,
    PUSH,
    STATUS,
    SUBSCRIBED,
    Reader,
    Reply,
)
from redbolt._pure.task import mark_of
from tests.kit.clients import SLACK, Client, eventually, fd_count, raw, thread_count
from tests.kit.resp import NIL as NIL_REPLY
from tests.kit.resp import OK, PONG, error
from tests.kit.rounds import KEY, TOKEN, InBackground, ask, attempt, by_name, causes, said
from tests.kit.scripted import Peer, ScriptedNode
from tests.kit.steps import Step, expect, expect_end, hang_up, ignore_rest, send, serve, tell, wait

try:
    import hiredis
except ImportError:
    hiredis = None  # type: ignore[assignment]


def engine_of(*urls: str) -> Engine:
    engine = engine_for(tuple(Node.from_url(url) for url in urls), "pure")
    assert isinstance(engine, Engine)
    return engine


# ---- the reader, beside hiredis' ----

WHOLE = (
    b"+OK\r\n",
    b"+\r\n",
    b"-ERR no \xe2\x82\xac\r\n",
    b":0\r\n",
    b":-9223372036854775808\r\n",
    b":9223372036854775807\r\n",
    b"$0\r\n\r\n",
    b"$12\r\nab\r\n+OK\r\n$-1\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n*2\r\n:1\r\n$2\r\n\r\n\r\n*0\r\n",
    b"_\r\n",
    b",1.5\r\n",
    b"#t\r\n",
    b"(123456789012345678901234567890\r\n",
    b"=7\r\ntxt:a\r\n\r\n",
    b"%1\r\n+a\r\n*1\r\n:1\r\n",
    b"~2\r\n+a\r\n+b\r\n",
    b">2\r\n+invalidate\r\n*1\r\n$1\r\na\r\n",
)
GARBAGE = (
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\r\n",
    b"OK\r\n",
    b":\r\n",
    b":+1\r\n",
    b":01\r\n",
    b":1x\r\n",
    b":9223372036854775808\r\n",
    b"$-2\r\n",
    b"$x\r\n",
    b"*-2\r\n",
    b"*1\r\n?\r\n",
    b"+a\nb\r\n",
    b"-a\rb\r\n",
    b"_x\r\n",
)


def plain(reply: Reply) -> object:
    """A reply of ours as hiredis shows it, where that tells the same."""
    kind, value = reply
    if kind == ERROR:
        assert isinstance(value, bytes)
        return f"error {value.decode(errors='replace')}"
    return {OTHER: "other", PUSH: "push"}.get(kind, value)


def plain_hiredis(value: object) -> object:
    if isinstance(value, hiredis.PushNotification):
        return "push"
    if isinstance(value, list | dict | set | float | bool):
        return "other"
    return f"error {value}" if isinstance(value, hiredis.ReplyError) else value


def read_in(pieces: list[bytes]) -> list[object]:
    reader = Reader()
    found = [plain(reply) for piece in pieces for reply in reader.feed(piece)]
    return [*found, "garbage"] if reader.fault else found


def hiredis_reads_in(pieces: list[bytes]) -> list[object]:
    reader = hiredis.Reader(notEnoughData=...)
    found: list[object] = []
    for piece in pieces:
        reader.feed(piece)
        while True:
            try:
                value = reader.gets()
            except hiredis.ProtocolError:
                return [*found, "garbage"]
            if value is ...:
                break
            found.append(plain_hiredis(value))
    return found


def comparable(stream: bytes) -> bool:
    """hiredis shows these two as plain text."""
    return stream[:1] not in (b"(", b"=")


@pytest.mark.skipif(hiredis is None, reason="there is no hiredis to compare with")
@pytest.mark.parametrize("stream", [*filter(comparable, WHOLE), *GARBAGE], ids=repr)
def test_the_reader_reads_as_hiredis_does_wherever_it_is_cut(stream: bytes) -> None:
    for data in (stream, b"+OK\r\n" + stream + b":1\r\n", stream + stream):
        expected = hiredis_reads_in([data])
        assert read_in([data]) == expected
        assert read_in([data[i : i + 1] for i in range(len(data))]) == expected
        for cut in range(1, len(data)):
            assert read_in([data[:cut], data[cut:]]) == expected
            for second in range(cut + 1, min(cut + 6, len(data))):
                assert read_in([data[:cut], data[cut:second], data[second:]]) == expected


def test_the_reader_tells_a_status_from_a_string() -> None:
    assert list(Reader().feed(b"+OK\r\n$2\r\nOK\r\n:1\r\n_\r\n-ERR\r\n")) == [
        (STATUS, b"OK"),
        (BULK, b"OK"),
        (INTEGER, 1),
        (NIL, None),
        (ERROR, b"ERR"),
    ]


def push_of(*words: bytes) -> bytes:
    return b">%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n", (PUSH, b"a")),
        (b">2\r\n+invalidate\r\n~1\r\n+a\r\n", (PUSH, b"a")),
        (b">2\r\n+invalidate\r\n_\r\n", (PUSH, b"")),
        (b">2\r\n+invalidate\r\n*0\r\n", (PUSH, b"")),
        (b">2\r\n+invalidate\r\n*2\r\n+a\r\n+b\r\n", (PUSH, b"")),
        (b">2\r\n+invalidate\r\n*1\r\n*1\r\n+a\r\n", (PUSH, b"")),
        (b">2\r\n+invalidate\r\n%1\r\n+a\r\n+b\r\n", (PUSH, b"")),
        (b">2\r\n+invalidate\r\n*1\r\n$%d\r\n%b\r\n" % (MAX_KEY + 1, b"x" * (MAX_KEY + 1)), (PUSH, b"")),
        (push_of(b"message", b"channel", b"1"), (PUSH, b"channel")),
        (push_of(b"message", b"x" * MAX_KEY, b"1"), (PUSH, b"x" * MAX_KEY)),
        (push_of(b"message", b"x" * (MAX_KEY + 1), b"1"), (PUSH, b"")),
        (push_of(b"message"), (PUSH, b"")),
        (push_of(b"subscribe", b"channel"), (SUBSCRIBED, None)),
        (push_of(b"pmessage", b"*", b"channel", b"invalidate"), (PUSH, None)),
        (b">0\r\n", (PUSH, None)),
        (b"|0\r\n", (PUSH, None)),
        (b"|1\r\n+invalidate\r\n*1\r\n+a\r\n", (PUSH, None)),
        (b"*2\r\n+invalidate\r\n*1\r\n+a\r\n", (OTHER, None)),
        (b"*1\r\n>2\r\n+invalidate\r\n*1\r\n+a\r\n", (OTHER, None)),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_what_a_push_is_about(data: bytes, expected: Reply) -> None:
    stream = b"+OK\r\n" + data + b":1\r\n"
    for step in (len(stream), 1, 3, 4096) if len(stream) < 1000 else (len(stream), 4096):
        reader = Reader()
        pieces = [stream[at : at + step] for at in range(0, len(stream), step)]
        found = [reply for piece in pieces for reply in reader.feed(piece)]
        assert found == [(STATUS, b"OK"), expected, (INTEGER, 1)]


def test_a_push_that_is_cut_off_leaves_little_behind() -> None:
    reader = Reader()
    big = b"$%d\r\n%b\r\n" % (MAX_KEY, b"x" * MAX_KEY)
    tracemalloc.start()
    try:
        assert not reader.feed(b">1000\r\n")
        for _ in range(12):
            assert not reader.feed(big)
        assert tracemalloc.get_traced_memory()[0] < 4 * MAX_KEY
    finally:
        tracemalloc.stop()


def test_replies_before_garbage_count() -> None:
    reader = Reader()
    assert list(reader.feed(b"+OK\r\n:1\r\nfoo")) == [(STATUS, b"OK"), (INTEGER, 1)]
    assert reader.fault


@pytest.mark.parametrize("head", [b"*60000\r\n", b"%30000\r\n", b"$1000000000\r\n", b"*1\r\n" * 20_000])
def test_what_a_server_announces_costs_nothing(head: bytes) -> None:
    reader = Reader()
    tracemalloc.start()
    try:
        assert not reader.feed(head)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(head) + 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("start", [b"", b"+", b"$90000000\r\n", b"*60000\r\n", b">60000\r\n"], ids=repr)
def test_a_reply_without_end_is_cut_off(start: bytes) -> None:
    reader = Reader()
    block = b":1\r\n" * 1024 if start[:1] in (b"*", b">") else b"x" * 4096
    reader.feed(start or b"-")
    if start[:1] in (b"*", b">"):
        block = b"$100\r\n" + b"x" * 100 + b"\r\n"
    sent = 0
    while not reader.fault:
        reader.feed(block)
        sent += len(block)
        assert sent <= MAX_REPLY + len(block)
    assert sent > MAX_REPLY - 10_000


# ---- interrupts ----


class Interrupt(BaseException):
    """What a signal handler raises; KeyboardInterrupt would end the test run if it went astray."""


def interrupt(*_: object) -> None:
    raise Interrupt


@contextmanager
def alarm() -> Iterator[Callable[[float], None]]:
    """Give a function that lets an Interrupt come after so many seconds; 0 for never."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def nothing_left(clients: list[Client], key: bytes) -> bool:
    return all(client.ask("EXISTS", key) == b":0\r\n" for client in clients)


@pytest.fixture
def clients(valkeys: Any) -> Iterator[list[Client]]:
    clients = [Client(node) for node in valkeys]
    yield clients
    for client in clients:
        client.socket.close()


@pytest.mark.parametrize("nodes", [1, 5])
def test_interrupts_at_random_moments_leave_nothing(valkeys: Any, clients: list[Client], nodes: int) -> None:
    """No token after 100 ms, no descriptor, no thread; and never a lock that nobody knows of."""
    engine = engine_of(*(node.url for node in valkeys[:nodes]))
    chance = random.Random(nodes)
    ask(engine, DROP, TOKEN)
    engine.discard(KEY, TOKEN)  # the agent runs
    eventually(lambda: not engine.pending(TOKEN))
    before = fd_count(), thread_count()
    with alarm() as interrupt_after:
        for number in range(300):
            key = b"key %d" % number
            took = dropped = None
            try:
                interrupt_after(1e-6 + chance.random() * 0.0006 * nodes)
                while True:
                    took, dropped = engine.votes(), None
                    engine.attempt(took, key, None, 10_000, nodes // 2 + 1, 0, 10**9)
                    dropped = engine.votes()
                    engine.round(dropped, DROP, key, (took.token,), nodes // 2 + 1, 10**9, took.touched)
            except Interrupt:
                interrupted = time.monotonic()
            if took is not None and took.verdict == GRANTED and (dropped is None or not dropped.token):
                engine.discard(key, took.token)  # the call had returned, or the release had not begun
            while not nothing_left(clients[:nodes], key):
                assert time.monotonic() - interrupted < 0.15 * SLACK
    eventually(lambda: (fd_count(), thread_count()) == before)


class At:
    """Raises an Interrupt before the n-th bytecode that the engine's own modules execute in this thread."""

    FOLDER = os.path.dirname(redbolt._pure.__file__)

    def __init__(self, number: int) -> None:
        self.left = number

    def __enter__(self) -> At:
        if sys.version_info >= (3, 12):  # whose sys.settrace passes most bytecodes over
            monitoring = sys.monitoring
            monitoring.use_tool_id(monitoring.DEBUGGER_ID, "interrupts")
            event = monitoring.events.INSTRUCTION
            monitoring.register_callback(monitoring.DEBUGGER_ID, event, self._instruction)
            for code in engine_code():
                monitoring.set_local_events(monitoring.DEBUGGER_ID, code, event)
        else:
            sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        self.left = 0
        if sys.version_info >= (3, 12):
            for code in engine_code():
                sys.monitoring.set_local_events(sys.monitoring.DEBUGGER_ID, code, 0)
            sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)
        else:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.FOLDER):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self._instruction(frame.f_code, 0)
        return self._step

    def _instruction(self, code: CodeType, offset: int) -> None:
        if code.co_name != "_give_up" and threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left == 0:
                raise Interrupt


def engine_code() -> Iterator[CodeType]:
    """All functions of the engine."""
    for name, module in list(sys.modules.items()):
        if name.startswith("redbolt._pure."):
            for thing in vars(module).values():
                functions = vars(thing).values() if isinstance(thing, type) else [thing]
                for function in functions:
                    if isinstance(function, FunctionType) and function.__module__ == name:
                        yield function.__code__


@pytest.mark.skipif("coverage" in sys.modules, reason="there can be one trace function only")
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
@pytest.mark.parametrize("verb", ["attempt", "release"])
def test_an_interrupt_before_any_bytecode(
    valkeys: Any, clients: list[Client], verb: str, connected: bool
) -> None:
    engine = engine_of(*(node.url for node in valkeys[:2]))
    step = 7  # of some thousand; another prime each time would see them all
    number, interrupted, returning = 1, True, 0
    while interrupted:
        key = b"key %d" % number
        took, dropped = engine.votes(), engine.votes()
        if verb == "release":
            assert engine.attempt(took, key, None, 10_000, 2, 0, 10**9)
        if not connected:
            engine.close()
        try:
            with At(number):
                if verb == "attempt":
                    engine.attempt(took, key, None, 10_000, 2, 0, 10**9)
                else:
                    engine.round(dropped, DROP, key, (took.token,), 2, 10**9)
            interrupted = False
        except Interrupt:
            if verb == "attempt" and took.verdict == GRANTED:  # it was on its very last step
                returning += 1
                engine.discard(key, took.token)
        if verb == "attempt" and not interrupted:
            engine.round(dropped, DROP, key, (took.token,), 2, 10**9)
        elif verb == "release" and not dropped.token:  # it had not begun
            engine.discard(key, took.token)
        eventually(partial(nothing_left, clients[:2], key), 0.15)
        after = attempt(engine, b"after", None)
        assert said(after) == [YES, YES]
        ask(engine, DROP, after.token, key=b"after")
        number += step
    assert number > 500
    assert returning <= 1


@pytest.mark.skipif("coverage" in sys.modules, reason="there can be one trace function only")
@pytest.mark.parametrize("verb", ["attempt", "arm", "wait", "close"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
def test_an_interrupt_of_a_watch_before_any_bytecode(
    valkeys: Any, clients: list[Client], verb: str, connected: bool
) -> None:
    """The agent puts its connections in order, and it begins anew; nothing stays in use."""
    engine = engine_of(*(node.url for node in valkeys[:2]))
    pool = engine._pool
    number, interrupted = 1, True
    while interrupted:
        key = b"key %d" % number
        votes = engine.votes()
        watch = engine.watch()
        if not connected:
            engine.close()
        elif verb == "close":
            assert can_be_armed(watch)
        else:
            watch.arm(KEY, 3, 10**9)
        if verb in ("wait", "close"):
            watch.arm(b"other", 3, 10**9, b"channel" if number % 2 else b"")
        try:
            with At(number):
                if verb == "attempt":
                    watch.attempt(votes, key, None, 10_000, 2, 0, 10**9)
                elif verb == "arm":
                    watch.arm(key, 3, 10**9, b"channel" if number % 2 else b"")
                elif verb == "wait":
                    watch.wait(now() + 10**8)
                else:
                    watch.close()
            interrupted = False
        except Interrupt:
            pass
        if votes.verdict == GRANTED:
            engine.discard(key, votes.token)
        if verb != "close":  # which may have come to its end, or not
            assert can_be_armed(watch)
            watch.close()
        watch.close()
        eventually(partial(nothing_left, clients[:2], key), 0.3)
        eventually(lambda: not any(channel.owner for channel in pool.channels), 0.3)
        assert not any(channel.events is not None for channel in pool.channels)
        number += 1 if verb == "close" else 7
    assert number > (50 if verb == "close" else 100)
    assert len(pool.channels) < 5
    engine.close()
    eventually(lambda: not pool.channels and not pool.connections)


def test_an_interrupted_watch_begins_anew_and_says_so(valkeys: Any) -> None:
    engine = engine_of(*(node.url for node in valkeys[:2]))
    watch = engine.watch()
    assert can_be_armed(watch)
    with alarm() as interrupt_after:
        interrupt_after(0.02)
        with pytest.raises(Interrupt):
            watch.wait(now() + 10**9)
    assert watch.wait(now() + 10**9) == [(LOST, 0, 0, 0), (LOST, 1, 0, 0)]
    watch.arm(KEY, 3, 10**9)
    assert {event[0] for event in watch.wait(now() + 10**9)} == {LIFE_TOLD}  # its connections were in order
    watch.close()


def test_a_watch_blames_a_node_by_the_shortest_limit_of_what_is_unanswered(valkey: Any) -> None:
    engine = engine_of(valkey.url)
    watch = engine.watch()
    watch.arm(KEY, 1, 10**9)
    assert watch.wait(now() + 10**9) == [(READY, 0, 0, 0)]
    valkey.pause()
    watch.arm(b"long", 1, 5 * 10**9)
    watch.arm(b"short", 1, 5 * 10**7)
    started = time.monotonic()
    assert watch.wait(now() + 3 * 10**9) == [(LOST, 0, 0, 0)]
    assert time.monotonic() - started < 0.05 + 0.15 * SLACK
    assert engine._sites[0].cause == "no answer within 50 ms"
    valkey.resume()
    watch.close()


def test_an_interrupted_post_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token may be there by an earlier write."""
    go = threading.Event()
    script = [expect("SET"), wait(go), send(OK), serve(by_name(SET=NIL_REPLY))]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        first = InBackground(lambda: attempt(engine))
        eventually(lambda: node.received("SET"))
        attempt(engine, b"other", b"other")
        with monkeypatch.context() as patch:
            patch.setattr(engine._pool, "put_back", interrupt)
            with pytest.raises(Interrupt):
                engine.post(TAKE, KEY, (TOKEN, b"5000"))
        go.set()
        assert said(first.result()) == [YES]
        eventually(lambda: not engine.pending(TOKEN))
        assert {one.name for one in node.received() if TOKEN in one.argv} == {"SET"}
        engine.close()


def can_be_armed(watch: Any) -> bool:
    """Whether two nodes answer, after whatever else it has to tell."""
    until = now() + 10**9
    heard: set[int] = set()
    watch.arm(b"fine", 3, 10**9)
    while heard != {0, 1} and now() < until:
        for what, index, mark, _ in watch.wait(until):
            if what == LIFE_TOLD and mark == mark_of(b"fine"):
                heard.add(index)
            elif what in (READY, LOST):
                watch.arm(b"fine", 1 << index, 10**9)
    return heard == {0, 1}


def test_an_interrupted_wait_is_over_at_once(valkey: Any) -> None:
    engine = engine_of(valkey.url)
    ask(engine, EXISTS)
    valkey.pause()
    with alarm() as interrupt_after:
        interrupt_after(0.05)
        started = time.monotonic()
        with pytest.raises(Interrupt):
            attempt(engine, limit=5.0)
        assert time.monotonic() - started < 0.05 + 0.1 * SLACK
    assert engine.pending(TOKEN)
    valkey.resume()
    eventually(lambda: not engine.pending(TOKEN))
    assert raw(valkey, "EXISTS", KEY) == 0


def test_an_interrupt_while_sending_does_not_garble_the_stream(valkey: Any) -> None:
    """The connection is given up; the delete comes on another when the server has read the first one."""
    engine = engine_of(valkey.url)
    ask(engine, EXISTS)
    (connection,) = engine._pool.connections
    put = type(connection).put

    def interrupted_put(self: Any, *args: Any) -> None:
        put(self, *args)
        if threading.current_thread() is threading.main_thread():
            raise Interrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(connection), "put", interrupted_put)
        with pytest.raises(Interrupt):
            attempt(engine)
    eventually(lambda: not engine.pending(TOKEN))
    assert raw(valkey, "EXISTS", KEY) == 0
    assert connection not in engine._pool.connections
    assert said(attempt(engine)) == [YES]


# ---- channels and threads ----


def test_a_write_for_a_token_goes_behind_the_unanswered_one_of_another_thread() -> None:
    go, seen = threading.Event(), threading.Event()
    script = [
        expect("SET"),
        tell(seen),
        wait(go),
        send(OK),
        expect("EVAL"),
        send(b":1\r\n"),
        serve(by_name(SET=OK)),
    ]
    with ScriptedNode(script, answer=by_name()) as node:
        engine = engine_of(node.url)
        first = InBackground(lambda: attempt(engine))
        assert seen.wait(5)
        votes = ask(engine, DROP, TOKEN, limit=0.1)
        assert (said(votes), causes(votes)) == ([FAULT], ["queued behind an unanswered write"])
        assert engine.pending(TOKEN)
        assert said(ask(engine, EXISTS)) == [NO]  # other commands take another channel
        go.set()
        assert said(first.result()) == [YES]
        eventually(lambda: not engine.pending(TOKEN))
        assert {one.connection for one in node.received() if TOKEN in one.argv} == {0}
        engine.close()


def test_a_write_for_a_token_goes_behind_one_that_is_not_sent_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread has only begun: its connection is not even open."""
    go = threading.Event()
    script = [expect("AUTH"), wait(go), send(OK), expect("SET"), send(OK), expect("EVAL"), send(b":1\r\n")]
    with ScriptedNode([*script, ignore_rest()], answer=by_name(AUTH=OK)) as node:
        engine = engine_of(node.url.replace("//", "//:secret@"))
        first = InBackground(lambda: attempt(engine))
        eventually(lambda: node.received("AUTH"))
        engine.discard(KEY, TOKEN)
        time.sleep(0.02)
        assert engine.pending(TOKEN)
        go.set()
        assert said(first.result()) == [YES]
        eventually(lambda: not engine.pending(TOKEN))
        assert [one.name for one in node.received() if TOKEN in one.argv] == ["SET", "EVAL"]
        engine.close()


def test_many_threads_share_an_engine(valkeys: Any) -> None:
    engine = engine_of(*(node.url for node in valkeys[:3]))
    inside = [0] * 4
    collisions: list[int] = []

    def work(number: int) -> int:
        granted = 0
        for count in range(60):
            which = (number + count) % 4
            key = b"shared %d" % which
            votes = attempt(engine, key, None)
            if votes.verdict == GRANTED:
                granted += 1
                inside[which] += 1
                if inside[which] != 1:
                    collisions.append(which)
                inside[which] -= 1
                assert ask(engine, DROP, votes.token, key=key).hits >= 1
        return granted

    threads = [InBackground(partial(work, number)) for number in range(8)]
    assert sum(thread.result(60) for thread in threads) > 100
    assert not collisions
    assert len(engine._pool.channels) <= 9
    eventually(lambda: all(raw(node, "DBSIZE") == 0 for node in valkeys[:3]))


def test_a_threads_round_does_not_stop_the_others() -> None:
    with ScriptedNode(answer=by_name(SET=None)) as node:
        engine = engine_of(node.url)
        held_back = InBackground(lambda: attempt(engine, limit=0.2))
        count = 0
        while held_back.is_alive():
            count += 1
            time.sleep(0)
        assert count > 100
        assert said(held_back.result()) == [FAULT]


def test_surplus_channels_are_closed_after_a_while(valkey: Any, clock: Callable[[float], None]) -> None:
    engine = engine_of(valkey.url)
    barrier = threading.Barrier(3)

    def work() -> None:
        channel = engine._pool.check_out(_task(engine), True)
        barrier.wait(5)
        engine._pool.put_back(channel, now(), 10**9)

    for thread in [InBackground(work) for _ in range(3)]:
        thread.result()
    assert len(engine._pool.idle) == 3
    clock(31)
    eventually(lambda: len(engine._pool.idle) == 1)
    assert len(engine._pool.channels) == 1


def _task(engine: Engine) -> Any:
    from redbolt._pure.resp import PLANS
    from redbolt._pure.task import Task

    return Task(PLANS[EXISTS.index], KEY, (), 10**9, 0, len(engine.nodes))


def now() -> int:
    from redbolt._clock import now_ns

    return now_ns()


# ---- nodes that go and come ----


def test_a_restarted_node_is_connected_in_the_same_round(valkey: Any) -> None:
    engine = engine_of(valkey.url)
    assert said(attempt(engine)) == [YES]
    valkey.kill()
    valkey.start(empty=True)
    time.sleep(0.003)
    assert said(attempt(engine)) == [YES]


def test_a_paused_node_costs_its_limit_once_and_comes_back(valkeys: Any) -> None:
    engine = engine_of(*(node.url for node in valkeys[:3]))
    attempt(engine, quorum=3)
    ask(engine, DROP, TOKEN, quorum=3)
    valkeys[1].pause()
    votes = attempt(engine, b"other", None, quorum=3, limit=0.05)
    assert said(votes)[1] == FAULT
    assert causes(votes)[1].startswith("no answer within")
    started = time.monotonic()
    for _ in range(20):
        votes = attempt(engine, b"other", None, quorum=3, limit=5.0)
        assert causes(votes)[1].startswith("left out until it answers again: no answer within")
    assert time.monotonic() - started < 1.0 * SLACK
    valkeys[1].resume()
    eventually(lambda: attempt(engine, b"last", b"last", quorum=3).verdict == GRANTED)
    eventually(lambda: raw(valkeys[1], "EXISTS", "other") == 0)


def test_a_connection_that_stays_silent_is_replaced(valkey: Any, clock: Callable[[float], None]) -> None:
    engine = engine_of(valkey.url)
    attempt(engine)
    valkey.pause()
    attempt(engine, b"other", b"other", limit=0.05)
    (old,) = engine._pool.connections
    clock(1.1)
    eventually(lambda: old in engine._pool.retired)
    clock(0.6)
    eventually(lambda: len(engine._pool.connections) > 1)
    valkey.resume()
    eventually(lambda: old not in engine._pool.connections)
    eventually(lambda: not engine.pending(b"other"))
    assert raw(valkey, "EXISTS", "other") == 0


def test_a_dead_node_does_not_wake_anybody_for_long(valkey: Any) -> None:
    engine = engine_of(valkey.url)
    attempt(engine)
    ask(engine, DROP, TOKEN)
    valkey.kill()
    time.sleep(0.003)  # long enough for a look at the connection before anything is sent
    for _ in range(3):
        assert said(attempt(engine)) == [FAULT]
    eventually(lambda: engine._pool.care.due_ns == NEVER)
    valkey.start()


def test_the_agent_sleeps_while_nothing_is_outstanding(valkeys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(*(node.url for node in valkeys))
    looks: list[int] = []
    look_after = type(engine._pool.care).look_after

    def counted(self: Any) -> None:
        looks.append(1)
        look_after(self)

    monkeypatch.setattr(type(engine._pool.care), "look_after", counted)
    started = time.monotonic()
    for _ in range(300):
        votes = attempt(engine, KEY, None, limit=0.05)
        assert votes.verdict == GRANTED
        ask(engine, DROP, votes.token, limit=0.05)
    spent = time.monotonic() - started
    assert len(looks) <= spent / 0.05 + 3, "once per node limit is enough"
    eventually(lambda: AGENT._next_due() == NEVER)
    looks.clear()
    time.sleep(0.15)
    assert not looks


def test_an_error_in_the_agent_is_logged_and_it_goes_on(
    valkey: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(valkey.url)
    attempt(engine)
    care = engine._pool.care
    with monkeypatch.context() as patch:
        patch.setattr(type(care), "_discard", lambda *_: 1 / 0)
        engine.discard(KEY, TOKEN)
        eventually(lambda: "ZeroDivisionError" in caplog.text)
    eventually(lambda: raw(valkey, "EXISTS", KEY) == 0)


def test_unanswered_bytes_are_bounded() -> None:
    with ScriptedNode(answer=by_name(EVAL=None, DELIFEQ=None, SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        big = b"x" * 60_000
        told = [causes(ask(engine, DROP, big, limit=0.001))[0] for _ in range(12)]
        assert told[-1] == "too many unanswered commands"
        assert max(conn.backlog for conn in engine._pool.connections) <= MOST_BACKLOG + 70_000
        engine.close()


def test_retired_connections_are_read_to_their_end() -> None:
    """Closed with an unread reply, a connection would be reset, and what was sent on it lost."""
    script = [expect("SET"), send(NIL_REPLY), expect("EVAL"), expect_end(), send(b":0\r\n"), hang_up()]
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        attempt(engine)
        engine.discard(KEY, TOKEN)
        eventually(lambda: node.received("EVAL"))
        engine.close()
        node.check()
        eventually(lambda: not engine._pool.connections)
        assert not engine.pending(TOKEN)


def test_a_closed_engine_pays_what_it_owes_and_keeps_nothing(valkeys: Any) -> None:
    engine = engine_of(*(node.url for node in valkeys[:3]))
    assert attempt(engine).verdict == GRANTED
    engine.discard(KEY, TOKEN)
    engine.close()
    eventually(lambda: all(raw(node, "EXISTS", KEY) == 0 for node in valkeys[:3]))
    eventually(lambda: not engine._pool.connections and not engine._pool.channels)
    assert attempt(engine).verdict == GRANTED


def test_a_server_that_hangs_up_on_ping_is_not_pinged_again() -> None:
    with ScriptedNode(
        [expect("SET"), ignore_rest()], [expect("PING"), hang_up()], answer=by_name(SET=OK)
    ) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine, limit=0.02)) == [FAULT]
        node.peers[0].hang_up()
        eventually(lambda: said(attempt(engine, b"other", b"other")) == [YES])
        assert len(node.received("PING")) == 1


def test_a_node_that_was_silent_is_greeted_with_ping() -> None:
    with ScriptedNode([expect("SET"), ignore_rest()], answer=by_name(SET=OK, PING=PONG)) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine, limit=0.02)) == [FAULT]
        node.peers[0].hang_up()
        eventually(lambda: said(attempt(engine, b"other", b"other")) == [YES])
        second = [one.name for one in node.received() if one.connection == 1]
        assert second[:2] == ["PING", "EVAL"]


# ---- logging in ----


def test_the_password_is_in_no_cause() -> None:
    echo = "ERR unknown command 'AUTH', with args beginning with: 's3cret'"
    with ScriptedNode([expect("AUTH"), send(error(echo)), ignore_rest()]) as node:
        votes = attempt(engine_of(node.url.replace("//", "//:s3cret@")))
        assert said(votes) == [FAULT]
        assert causes(votes) == ["ERR unknown command 'AUTH'"]


def test_nothing_is_sent_before_the_database_is_selected() -> None:
    with ScriptedNode([expect("SELECT"), send(error("ERR DB index is out of range")), ignore_rest()]) as node:
        votes = attempt(engine_of(f"{node.url}/99"))
        assert causes(votes) == ["ERR DB index is out of range"]
        assert [one.name for one in node.received()] == ["SELECT"]


# ---- forms, on real servers ----


def test_a_restricted_user_releases_and_extends_by_what_is_left_to_it(valkey: Any) -> None:
    for forbidden in (["-delifeq"], ["-delifeq", "-evalsha"], ["-evalsha", "-eval"]):
        raw(valkey, "ACL", "SETUSER", "app", "reset", "on", ">pw", "~*", "+@all", *forbidden)
        engine = engine_of(valkey.url.replace("//", "//app:pw@"))
        assert said(attempt(engine)) == [YES]
        assert said(ask(engine, EXTEND, TOKEN, b"5000")) == [YES]
        votes = ask(engine, DROP, TOKEN)
        assert (said(votes), votes.hits) == ([YES], 1)
        redbolt.close()


def test_scripts_may_be_flushed_between_any_two_commands(node: Any) -> None:
    engine = engine_of(node.url)
    for _ in range(3):
        assert said(attempt(engine)) == [YES]
        raw(node, "SCRIPT", "FLUSH")
        assert said(ask(engine, EXTEND, TOKEN, b"5000")) == [YES]
        raw(node, "SCRIPT", "FLUSH")
        assert said(ask(engine, OWNED, TOKEN, b"6")) == [YES]
        votes = ask(engine, DROP, TOKEN)
        assert (said(votes), votes.hits) == ([YES], 1)
        assert causes(ask(engine, TYPE)) == ["none"]


def test_an_extension_that_was_answered_too_late_is_still_done_by_script() -> None:
    """The reply that tells that the node does not know the command is read by nobody who waits."""
    go = threading.Event()
    script = [expect("SET"), wait(go), send(error("ERR syntax error")), expect("EVAL"), send(b":1\r\n")]
    with ScriptedNode([*script, ignore_rest()]) as node:
        engine = engine_of(node.url)
        assert said(ask(engine, EXTEND, TOKEN, b"5000", limit=0.02)) == [FAULT]
        go.set()
        eventually(lambda: node.received("EVAL"))
        eventually(lambda: not engine.pending(TOKEN))
        engine.close()


def test_an_extension_is_not_repeated_after_a_release() -> None:
    go = threading.Event()
    script = [
        expect("SET"),
        expect("EVAL"),
        wait(go),
        send(error("ERR syntax error"), b":1\r\n"),
        expect_end(),
    ]
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        assert said(ask(engine, EXTEND, TOKEN, b"5000", limit=0.02)) == [FAULT]
        engine.discard(KEY, TOKEN)
        eventually(lambda: node.received("EVAL"))
        go.set()
        eventually(lambda: not engine.pending(TOKEN))
        engine.close()
        node.check()


# ---- addresses ----


def test_a_name_server_that_hangs_holds_up_nobody_else(valkeys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = resolve._ask_for

    def hanging(host: str, port: int, flags: int) -> Any:
        if host == "slow.invalid":
            if flags:
                raise socket.gaierror(socket.EAI_NONAME, "not numeric")
            go.wait(10)
        return real("127.0.0.1", port, flags)

    monkeypatch.setattr(resolve, "_ask_for", hanging)
    urls = [valkeys[0].url, valkeys[1].url, f"redis://slow.invalid:{valkeys[2].port}"]
    engine = engine_of(*urls)
    started = time.monotonic()
    assert attempt(engine).verdict == GRANTED
    votes = attempt(engine, b"all", None, quorum=3, limit=0.05)
    assert causes(votes)[2] == f"no connection within {round(50 * SLACK)} ms"
    assert time.monotonic() - started < 1.0 * SLACK
    go.set()
    eventually(lambda: attempt(engine, b"again", b"again", quorum=3).verdict == GRANTED)
    eventually(lambda: all(thread.name != "redbolt-resolver" for thread in threading.enumerate()))


def test_a_name_without_an_address_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(resolve, "_ask_for", unknown)
    votes = attempt(engine_of("redis://no.invalid:1"))
    assert causes(votes) == ["cannot resolve its name: Name or service not known"]
    eventually(lambda: all(thread.name != "redbolt-resolver" for thread in threading.enumerate()))


def test_all_addresses_of_a_name_are_tried_in_one_round(valkey: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def two(host: str, port: int, flags: int) -> Any:
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "not numeric")
        asked.append(port)
        refusing = (socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.2", 1))
        return [*refusing, (socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr(resolve, "_ask_for", two)
    engine = engine_of(f"redis://localhost:{valkey.port}")
    assert said(attempt(engine)) == [YES]
    engine.close()
    assert said(ask(engine, EXISTS)) == [YES]
    assert len(asked) == 1, "the addresses are kept"


def test_the_backlog_of_a_unix_socket_may_be_full(tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        engine = engine_of(f"unix://{path}")
        asking = InBackground(lambda: attempt(engine))
        time.sleep(0.02)
        accepted = [listener.accept()[0]]
        accepted.append(listener.accept()[0])
        accepted[1].recv(1000)
        accepted[1].sendall(OK)
        assert said(asking.result()) == [YES]
        engine.close()
        for one in accepted:
            one.close()


def test_a_port_where_nobody_listens_is_refused_and_backs_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    engine = engine_of(f"redis://127.0.0.1:{port}")
    started = time.monotonic()
    for _ in range(200):
        assert causes(attempt(engine)) == ["Connection refused"]
    assert time.monotonic() - started < 0.5 * SLACK
    assert fd_count() < 200


# ---- processes ----


def test_a_child_has_nothing_of_its_parent(valkeys: Any) -> None:
    engine = engine_of(*(node.url for node in valkeys[:3]))
    valkeys[2].pause()
    assert attempt(engine, limit=0.1).verdict == GRANTED
    assert engine.pending(TOKEN)
    valkeys[2].resume()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pool = engine._pool
            assert not pool.connections
            assert not pool.channels
            assert not AGENT._pipe
            assert not engine.pending(TOKEN)
            assert attempt(engine, b"child", None).verdict == GRANTED
            engine.discard(KEY, TOKEN)
            eventually(lambda: raw(valkeys[0], "EXISTS", KEY) == 0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert attempt(engine, b"parent", None).verdict == GRANTED
    eventually(lambda: not engine.pending(TOKEN))


def test_tokens_of_parent_and_child_differ(valkey: Any) -> None:
    engine = engine_of(valkey.url)
    attempt(engine, b"first", None)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b" ".join(attempt(engine, b"c%d" % i, None).token for i in range(20)))
        os._exit(0)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        os.close(writer)
        theirs = set(pipe.read().split())
    ours = {attempt(engine, b"p%d" % i, None).token for i in range(80)}
    assert len(theirs) == 20
    assert not theirs & ours


def test_a_child_that_a_signal_handler_forks_in_a_round_leaves_the_round_to_its_parent(valkey: Any) -> None:
    engine = engine_of(valkey.url)
    attempt(engine, b"first", None)
    pids: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: pids.append(os.fork()))
    valkey.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        try:
            votes = attempt(engine, limit=0.3)
        except RuntimeError:  # the child
            os._exit(0 if pids == [0] and not engine.pending(TOKEN) else 1)
        finally:
            if pids == [0]:
                os._exit(2)
    finally:
        signal.signal(signal.SIGALRM, before)
        valkey.resume()
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert said(votes) == [FAULT]
    eventually(lambda: not engine.pending(TOKEN))


def test_a_fork_during_the_rounds_of_other_threads_ends_well(valkeys: Any) -> None:
    engine = engine_of(*(node.url for node in valkeys[:3]))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            votes = attempt(engine, b"busy", None)
            ask(engine, DROP, votes.token, key=b"busy")

    threads = [InBackground(work) for _ in range(3)]
    try:
        for _ in range(15):
            pid = os.fork()
            if pid == 0:
                signal.alarm(5)
                votes = attempt(engine, b"child", None)
                dropped = ask(engine, DROP, votes.token, key=b"child")
                os._exit(0 if votes.verdict == dropped.verdict == GRANTED else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.result()


@pytest.mark.parametrize("silent", [False, True])
def test_the_end_of_the_interpreter_is_quiet_and_quick(valkeys: Any, silent: bool) -> None:
    urls = [node.url for node in valkeys[:3]]
    program = f"""
import time, redbolt
lock = redbolt.RedLock({urls!r}, "name", engine="pure")
for _ in range(20):
    lock.acquire()
    lock.release()
lock.acquire()
print(time.time())
"""
    if silent:
        valkeys[0].pause()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=20,
    )
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, "")
    assert ended - float(done.stdout) < 0.3 * SLACK


def test_nothing_is_left_when_an_engine_is_used_and_forgotten(valkey: Any) -> None:
    before = fd_count()
    for _ in range(5):
        engine = Engine((Node.from_url(valkey.url),))
        attempt(engine)
        engine.close()
        del engine
    gc.collect()
    eventually(lambda: fd_count() <= before)


def test_a_late_reply_never_counts_for_a_later_round() -> None:
    """The first reply comes when the second round waits."""
    second = threading.Event()

    def answer_both(peer: Peer) -> None:
        peer.send(OK + NIL_REPLY)

    script = [expect("SET"), expect("EVAL"), expect("DELIFEQ"), tell(second), Step("both", answer_both)]
    with ScriptedNode([*script, ignore_rest()], answer=by_name()) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine, limit=0.02)) == [FAULT]
        votes = ask(engine, DROP, TOKEN)
        assert said(votes) == [FAULT]  # nil is no answer to the EVAL before it
        engine.close()
