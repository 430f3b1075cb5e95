"""A server that talks nonsense, or without end, costs a fault: no wrong vote, no memory, no time."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from redbolt import Lock, close
from redbolt._engine import Engine
from redbolt._judge import FAULT, NO, YES
from tests.kit.clients import SLACK, eventually
from tests.kit.resp import NIL, OK, error, push
from tests.kit.rounds import anew, attempt, by_name, causes, said
from tests.kit.scripted import Peer, ScriptedNode
from tests.kit.steps import (
    Step,
    expect,
    expect_end,
    handshake,
    hang_up,
    ignore_rest,
    reset,
    send,
    serve,
    tell,
    wait,
)

FULL = "ERR max number of clients reached"
E = 0.15 * SLACK
MOST_SENT = 1 << 28  # what a client takes without end, if it takes that much


# ---- replies that nobody asked for ----


@pytest.mark.parametrize("unasked", [OK, b":1\r\n", NIL, error("ERR unasked"), b"$2\r\nOK\r\n"], ids=repr)
def test_an_unasked_reply_never_answers_the_next_command(engine_of, clock, unasked: bytes) -> None:
    go, sent = threading.Event(), threading.Event()
    script = [expect("SET"), send(OK), wait(go), send(unasked), tell(sent), ignore_rest()]
    with ScriptedNode(script, answer=by_name(SET=NIL)) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine)) == [YES]
        go.set()
        assert sent.wait(5)
        clock(0.01)  # an engine need not look before each command, but surely after a pause
        refused_on_a_new_connection(engine, node)


def refused_on_a_new_connection(engine: Engine, node: ScriptedNode) -> None:
    """No try is granted any more, and soon one is refused, as the node's further connections do."""
    seen: list[int] = []

    def refused() -> bool:
        seen.extend(said(attempt(engine)))
        return seen[-1] == NO

    eventually(refused)
    assert set(seen) <= {FAULT, NO}
    assert node.received("SET")[-1].connection == 1


def test_a_second_reply_in_the_same_piece_ends_the_connection(engine_of) -> None:
    for second in anew([OK, b":1\r\n", NIL]):
        with ScriptedNode([expect("SET"), send(OK + second), expect_end()], answer=by_name(SET=NIL)) as node:
            engine = engine_of(node.url)
            assert said(attempt(engine)) == [YES]
            assert said(attempt(engine)) == [NO]
            assert [one.connection for one in node.received("SET")] == [0, 1]


def test_a_full_server_says_so_and_hangs_up(engine_of) -> None:
    with ScriptedNode([expect("SET"), send(error(FULL)), hang_up()], answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        votes = attempt(engine)
        assert (said(votes), causes(votes)) == ([FAULT], [FULL])
        eventually(lambda: said(attempt(engine)) == [YES])


def test_a_full_server_may_speak_before_it_is_asked(engine_of) -> None:
    script = [send(error(FULL), may_fail=True), ignore_rest()]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url.replace("//", "//:secret@"))
        votes = attempt(engine)
        assert (said(votes), causes(votes)) == ([FAULT], [FULL])
        assert not node.received("SET")


# ---- no RESP at all ----

GARBAGE = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\r\n",
    b"\r\n",
    b"\0\0\0\0",
    b"$abc\r\n",
    b":12x\r\n",
    b":\r\n",
    b":99999999999999999999\r\n",
    b"*-7\r\n",
    b"$-7\r\n",
    b"*x\r\n",
    b"*1\r\n?\r\n",
    b">1\r\n!!\r\n",
    b"OK\r\n",
)


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_is_a_fault_and_ends_the_connection(engine_of, garbage: bytes) -> None:
    for before in anew([b"", push("invalidate", None)]):
        with ScriptedNode(
            [expect("SET"), send(before + garbage), ignore_rest()], answer=by_name(SET=NIL)
        ) as node:
            engine = engine_of(node.url)
            started = time.monotonic()
            votes = attempt(engine, limit=5.0)
            assert said(votes) == [FAULT]
            assert causes(votes) != [""]
            assert time.monotonic() - started < 1.0 * SLACK, "it waited for more"
            refused_on_a_new_connection(engine, node)


def test_garbage_after_an_answer_does_not_change_it(engine_of) -> None:
    for garbage in anew(GARBAGE):
        with ScriptedNode(
            [expect("SET"), send(OK + garbage), ignore_rest()], answer=by_name(SET=NIL)
        ) as node:
            engine = engine_of(node.url)
            assert said(attempt(engine)) == [YES]
            refused_on_a_new_connection(engine, node)


# ---- without end ----


def flood(start: bytes, block: bytes, sent: list[int], seconds: float = 10.0) -> Step:
    """Send ``start``, and ``block`` until the client has gone or the time is up; count it in ``sent``."""

    def run(peer: Peer) -> None:
        deadline = time.monotonic() + seconds
        try:
            peer.send(start)
            while sum(sent) < MOST_SENT and time.monotonic() < deadline and not peer.node.closing.is_set():
                peer.send(block)
                sent.append(len(block))
        except OSError:
            return

    return Step("flood", run)


@contextmanager
def memory_grows_at_most(mib: int) -> Iterator[None]:
    """Fail if the process had more than ``mib`` MiB more at any moment inside the block."""
    before = _peak_kib(reset=True)
    yield
    assert _peak_kib() - before < mib * 1024


def _peak_kib(reset: bool = False) -> int:
    """The most memory that this process has had, since the last reset where the system can forget."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(status.read_text().partition("VmHWM:")[2].split()[0])


ENDLESS = {
    "bulk": (b"$2147483647\r\n", b"x" * 65_536),
    "status": (b"+", b"x" * 65_536),
    "number": (b":", b"1" * 65_536),
    "length": (b"$", b"1" * 65_536),
    "list": (b"*60000\r\n", b"$2\r\nxx\r\n" * 8192),
    "bulk in a list": (b"*2\r\n$2147483647\r\n", b"x" * 65_536),
    "nesting": (b"", b"*1\r\n" * 16_384),
    "push": (b">2\r\n$2147483647\r\n", b"x" * 65_536),
}


@pytest.mark.parametrize(("start", "block"), ENDLESS.values(), ids=ENDLESS)
def test_a_reply_without_end_is_cut_off(engine_of, start: bytes, block: bytes) -> None:
    sent: list[int] = []
    with ScriptedNode([expect("SET"), flood(start, block, sent)], answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        with memory_grows_at_most(16):
            started = time.monotonic()
            votes = attempt(engine, limit=5.0)
            assert said(votes) == [FAULT]
            assert "no answer" not in causes(votes)[0]
            assert time.monotonic() - started < 1.5 * SLACK
            eventually(lambda: said(attempt(engine, token=b"later")) == [YES])


@pytest.mark.parametrize(
    "head",
    [
        b"$9223372036854775807\r\n",
        b"$2147483647\r\n",
        b"*2147483647\r\n",
        b"*9223372036854775807\r\n",
        b"%1000000000\r\n",
    ],
    ids=repr,
)
def test_a_giant_length_allocates_nothing(engine_of, head: bytes) -> None:
    with ScriptedNode(answer=by_name(SET=head)) as node:
        engine = engine_of(node.url)
        with memory_grows_at_most(4):
            assert said(attempt(engine, limit=0.05)) == [FAULT]


@pytest.mark.parametrize("depth", [8, 100, 10_000, 200_000])
def test_deep_nesting_is_a_fault_and_nothing_more(engine_of, depth: int) -> None:
    nested = b"*1\r\n" * depth + b"+OK\r\n"
    with ScriptedNode([expect("SET"), send(nested), ignore_rest()], answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine)) == [FAULT]
        eventually(lambda: said(attempt(engine, token=b"later")) == [YES])


FLOODS = {
    "pushes": push("invalidate", None) * 100_000,
    "statuses": OK * 300_000,
    "numbers": b":1\r\n" * 300_000,
    "strings": b"$2\r\nxx\r\n" * 300_000,
}


@pytest.mark.parametrize("block", FLOODS.values(), ids=FLOODS)
def test_a_flood_holds_nobody_up(engine_of, block: bytes) -> None:
    """Neither the round that reads it, nor the agent that sees the connection to its end."""
    with ScriptedNode(
        [expect("SET"), flood(b"", block, [], 0.5), serve(by_name())], answer=by_name()
    ) as node:
        engine = engine_of(node.url)
        started = time.monotonic()
        attempt(engine, limit=0.1)
        assert time.monotonic() - started < 0.1 * SLACK + E
        started = time.monotonic()
        engine.pending(b"some token")
        assert time.monotonic() - started < E, "the agent is held up"
        engine.close()


def test_pushes_that_nobody_reads_do_not_pile_up(engine_of) -> None:
    begun = threading.Event()
    pushes = flood(b"", push("m", b"x" * 60_000), [], 0.3)
    with ScriptedNode(
        [expect("SET"), send(OK), tell(begun), pushes, serve(by_name(SET=OK))], answer=by_name()
    ) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine)) == [YES]
        begun.wait(5)
        with memory_grows_at_most(16):
            eventually(lambda: said(attempt(engine, limit=0.3)) == [YES])
        engine.close()


@pytest.mark.parametrize(
    "how", [hang_up(), reset(), send(error(FULL))], ids=["hangs up", "resets", "is full"]
)
def test_a_waiter_to_whom_no_further_connection_is_given_tries_on_that_which_it_has(
    kind: str, how: Step
) -> None:
    answers = iter([NIL] * 4 + [OK])
    held = by_name(SET=lambda argv: next(answers), DELIFEQ=b":1\r\n", PTTL=b":30000\r\n", TYPE=b"+string\r\n")
    with ScriptedNode([serve(lambda argv: handshake(argv) or held(argv))], answer=lambda argv: how) as node:
        lock = Lock(node.url, "name", node_timeout=0.1 * SLACK, sleep=0.01, engine=kind)
        assert lock.acquire(blocking_timeout=5 * SLACK) is True
        assert len(node.received("SET")) == 5
        lock.release()
        close()
