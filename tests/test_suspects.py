"""A node that leaves a reply open is left out until it answers; nothing piles up for it, nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from redbolt._engine import Engine
from redbolt._judge import FAULT, GRANTED, UNDECIDED, YES
from redbolt._programs import DROP, EXISTS, EXTEND, OWNED, TYPE, Program
from tests.kit.clients import SLACK, eventually
from tests.kit.resp import NIL, OK, PONG, error, push
from tests.kit.rounds import KEY, TOKEN, anew, ask, attempt, by_name, causes, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import (
    Answer,
    Argv,
    Step,
    expect,
    expect_end,
    hang_up,
    ignore_rest,
    send,
    serve,
    sleep,
    tell,
    wait,
)

E = 0.15 * SLACK
SHORT = 0.02  # seconds: the node limit of rounds that are not answered
LEFT_OUT = f"left out until it answers again: no answer within {round(SHORT * SLACK * 1000)} ms"

READS: list[tuple[Program, tuple[bytes, ...]]] = [
    (EXTEND, (TOKEN, b"5000")),
    (EXISTS, ()),
    (OWNED, (TOKEN, b"5")),
    (TYPE, ()),
]


def names(node: ScriptedNode, connection: int | None = None) -> list[str]:
    return [one.name for one in node.received() if connection in (None, one.connection)]


def granted(engine: Engine) -> bool:
    return said(attempt(engine, token=b"next")) == [YES]


def make_suspect(engine: Engine) -> None:
    votes = attempt(engine, limit=SHORT)
    assert votes.verdict == UNDECIDED
    assert causes(votes) == [f"no answer within {round(SHORT * SLACK * 1000)} ms"]


# ---- left out ----


def test_a_suspect_node_gets_deletes_and_nothing_else(engine_of) -> None:
    with ScriptedNode([ignore_rest()], answer=by_name()) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        started = time.monotonic()
        for _ in range(20):
            votes = attempt(engine, token=None, limit=5.0)
            assert (said(votes), causes(votes)) == ([FAULT], [LEFT_OUT])
        for program, args in READS:
            votes = ask(engine, program, *args, limit=5.0)
            assert (said(votes), causes(votes)) == ([FAULT], [LEFT_OUT])
        assert time.monotonic() - started < E, "it was waited for"
        assert said(ask(engine, DROP, b"held", limit=SHORT)) == [FAULT]
        engine.discard(KEY, b"discarded")
        eventually(lambda: len(node.received()) == 4)
        first, undo, drop, discarded = node.received()
        assert (first.name, undo.name) == ("SET", "EVAL")
        assert b"held" in drop.argv
        assert (discarded.name, discarded.argv[4]) == ("EVAL", b"discarded")
        engine.close()


def test_a_suspect_node_costs_the_others_no_time(engine_of) -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(ScriptedNode([ignore_rest()], answer=by_name()))
        others = [
            stack.enter_context(ScriptedNode(answer=by_name(SET=OK, DELIFEQ=b":1\r\n"))) for _ in range(2)
        ]
        engine = engine_of(silent.url, *(node.url for node in others))
        assert attempt(engine, quorum=3, limit=SHORT).verdict == UNDECIDED
        started = time.monotonic()
        for _ in range(10):
            votes = attempt(engine, token=None, quorum=2, limit=5.0)
            assert votes.verdict == GRANTED
            assert causes(votes)[0] == LEFT_OUT
            assert ask(engine, DROP, votes.token, quorum=2, limit=5.0).verdict == GRANTED
        assert time.monotonic() - started < E
        engine.close()


def test_a_node_whose_late_reply_nobody_waited_for_becomes_suspect_all_the_same(engine_of) -> None:
    """The round is over with the quorum; the third node stays silent beyond the limit."""
    with ExitStack() as stack:
        silent = stack.enter_context(
            ScriptedNode([expect("EXISTS"), send(b":1\r\n"), ignore_rest()], answer=by_name())
        )
        others = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(2)]
        engine = engine_of(silent.url, *(node.url for node in others))
        ask(engine, EXISTS, quorum=3)
        assert attempt(engine, quorum=2, limit=SHORT).verdict == GRANTED
        eventually(lambda: causes(attempt(engine, token=None, quorum=3, limit=SHORT))[0] == LEFT_OUT)
        assert names(silent).count("SET") <= 2
        engine.close()


# ---- back again ----


@pytest.mark.parametrize(
    "late",
    [
        OK + b":1\r\n",
        NIL + b":0\r\n",
        error("LOADING server is loading") * 2,
        push("invalidate", None) + OK + b":1\r\n",
        OK,
    ],
    ids=["yes", "no", "error", "push", "one of two"],
)
def test_any_late_reply_clears_a_suspect_node(engine_of, late: bytes) -> None:
    go, sent = threading.Event(), threading.Event()
    with ScriptedNode(
        [expect("SET"), expect("EVAL"), wait(go), send(late), tell(sent), serve(finish(late))]
    ) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        assert causes(attempt(engine, token=b"early")) == [LEFT_OUT]
        go.set()
        assert sent.wait(5)
        eventually(lambda: granted(engine), 1)
        assert names(node)[2] == "SET"
        assert node.received()[2].argv[2] == b"next"
        engine.close()


def finish(late: bytes) -> Answer:
    """Where the undo was not answered yet, its answer comes with the next one."""
    owed = [b":1\r\n"] if late == OK else []

    def answer(argv: Argv) -> bytes:
        return (owed.pop() if owed else b"") + (OK if argv[0] == b"SET" else b":0\r\n")

    return answer


def test_a_push_is_no_answer(engine_of) -> None:
    go, sent = threading.Event(), threading.Event()
    script = [
        expect("SET"),
        expect("EVAL"),
        wait(go),
        send(push("invalidate", None)),
        tell(sent),
        ignore_rest(),
    ]
    with ScriptedNode(script, answer=by_name()) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        go.set()
        assert sent.wait(5)
        for _ in range(20):
            assert causes(attempt(engine, token=None)) == [LEFT_OUT]
            time.sleep(0.001)
        assert names(node) == ["SET", "EVAL"]
        engine.close()


def test_a_silent_connection_is_replaced_and_the_node_is_asked_whether_it_is_back(engine_of, clock) -> None:
    """Nothing but the PING is sent until that is answered."""
    go = threading.Event()
    second = [expect(["PING"]), wait(go), send(PONG), serve(by_name(SET=OK, EVAL=b":0\r\n"))]
    with ScriptedNode([ignore_rest(), hang_up()], second) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        clock(1.5)
        eventually(lambda: names(node, 1) == ["PING"])
        for _ in range(5):
            votes = attempt(engine, token=None, limit=SHORT)
            assert said(votes) == [FAULT]
        assert names(node, 1) == ["PING"]
        go.set()
        eventually(lambda: granted(engine))
        assert names(node, 1)[:2] in (["PING", "EVAL"], ["PING", "SET"])
        engine.close()


def test_a_server_without_ping_can_come_back(engine_of, clock) -> None:
    """A proxy that answers it with an error, or hangs up."""
    answers: list[bytes | Step] = [error("ERR unknown command 'PING'"), hang_up()]
    for answer in anew(answers):
        with ScriptedNode(
            [ignore_rest(), hang_up()], answer=by_name(SET=OK, PING=answer, EVAL=b":0\r\n")
        ) as node:
            engine = engine_of(node.url)
            make_suspect(engine)
            clock(1.5)
            eventually(partial(granted, engine))
            assert len(node.received("PING")) == 1
            engine.close()


def test_a_node_with_a_password_comes_back_with_its_handshake(engine_of, clock) -> None:
    first = [expect("AUTH"), send(OK), ignore_rest(), hang_up()]
    with ScriptedNode(first, answer=by_name(AUTH=OK, SET=OK, EVAL=b":0\r\n")) as node:
        engine = engine_of(node.url.replace("//", "//:secret@"))
        make_suspect(engine)
        clock(1.5)
        eventually(lambda: granted(engine))
        assert names(node, 1)[0] == "AUTH"
        engine.close()


def test_a_node_that_is_not_used_is_not_asked_for_ever(engine_of, clock) -> None:
    with ScriptedNode([ignore_rest(), hang_up()], answer=lambda argv: None) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        for _ in range(20):
            clock(100)
            time.sleep(0.005)
        assert len(node.peers) < 6
        engine.close()


# ---- retiring ----


def test_a_replaced_connection_is_read_to_its_end(engine_of, clock) -> None:
    """Its sending side is ended; what the server still says is read, not answered by a reset."""
    done = threading.Event()
    late = [send(OK), sleep(0.01), send(b":1\r\n"), sleep(0.01), send(push("bye")), tell(done), hang_up()]
    first = [expect("SET"), expect("EVAL"), expect_end(), *late]
    with ScriptedNode(first, answer=by_name(PING=PONG, SET=OK, EVAL=b":0\r\n")) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        clock(1.5)
        assert done.wait(5)
        eventually(lambda: granted(engine))


def test_its_deletes_go_on_the_next_connection_only_after_its_end(engine_of, clock) -> None:
    """Or a paused server would run them before the writes that they undo."""
    over, go = threading.Event(), threading.Event()
    first = [expect("SET"), expect("EVAL"), expect_end(), tell(over), wait(go), hang_up()]
    with ScriptedNode(first, answer=by_name(PING=PONG, SET=OK, EVAL=b":0\r\n")) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        clock(1.5)
        assert over.wait(5)
        eventually(lambda: granted(engine))
        assert engine.pending(TOKEN)
        assert "EVAL" not in names(node, 1)
        go.set()
        undo = eventually(lambda: [one for one in node.received("EVAL") if one.connection == 1])
        assert undo[0].argv[2:] == (b"1", KEY, TOKEN)


def test_a_connection_that_never_ends_is_closed_after_a_bound(engine_of, clock) -> None:
    over = threading.Event()
    first = [
        expect("SET"),
        expect("EVAL"),
        expect_end(),
        tell(over),
        *[sleep(0.01), send(b":1\r\n", may_fail=True)] * 30,
    ]
    with ScriptedNode(first, answer=by_name(PING=PONG, SET=OK, EVAL=b":0\r\n")) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        clock(1.5)
        assert over.wait(5)
        eventually(lambda: granted(engine))
        clock(11)  # the key of the try has ended by now
        eventually(lambda: not engine.pending(TOKEN))


def test_close_lets_what_was_sent_be_executed(engine_of) -> None:
    """A try and its undo are on their way when the engine is closed: the server gets both, and no reset."""
    closed = threading.Event()
    script = [
        wait(closed),
        expect("SET"),
        expect("EVAL"),
        expect_end(),
        send(OK),
        sleep(0.01),
        send(b":1\r\n"),
    ]
    with ScriptedNode([*script, hang_up()], answer=by_name(PING=PONG)) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        engine.close()
        closed.set()


# ---- bounds ----


def test_what_is_unanswered_on_a_connection_is_bounded(engine_of) -> None:
    """As is what is remembered of the rest."""
    with ScriptedNode([ignore_rest()], answer=lambda argv: None) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        for number in range(400):
            engine.discard(KEY, b"%d" % number * 1000)
        eventually(lambda: settled(lambda: len(node.received())))
        assert sum(len(word) for one in node.received() for word in one.argv) < 600_000
        engine.close()


def settled(value: Callable[[], int]) -> bool:
    before = value()
    time.sleep(0.05)
    return value() == before


def test_a_delete_beyond_the_bound_is_told(engine_of) -> None:
    with ScriptedNode([ignore_rest()], answer=lambda argv: None) as node:
        engine = engine_of(node.url)
        make_suspect(engine)
        found = [causes(ask(engine, DROP, b"t" * 60_000, key=b"k", limit=0.001))[0] for _ in range(8)]
        assert found[-1] in ("too many unanswered commands", "queued behind an unanswered write")
        engine.close()
