"""A round writes to all nodes before it reads any, ends when it is decided, and counts its own replies."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from redbolt._engine import Engine, Votes
from redbolt._judge import FAULT, GRANTED, NO, OPEN, REFUSED, UNDECIDED, YES
from redbolt._programs import DROP, EXISTS, EXTEND, TAKE, Program
from tests.kit.clients import SLACK, eventually, thread_count
from tests.kit.resp import NIL, OK
from tests.kit.rounds import TOKEN, InBackground, anew, ask, attempt, by_name, causes, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, expect, send, serve, sleep, split, tell, wait

E = 0.15 * SLACK
SILENT = b""  # no answer


def scripted(
    stack: ExitStack, engine_of: Callable[..., Engine], *nodes: object
) -> tuple[list[ScriptedNode], Engine]:
    """An engine for scripted nodes: for each a reply to every SET, or a whole script."""
    made = [
        stack.enter_context(
            ScriptedNode(one)
            if isinstance(one, list)
            else ScriptedNode(answer=by_name(SET=one or None, EVAL=None))  # type: ignore[arg-type]
        )
        for one in nodes
    ]
    return made, engine_of(*(node.url for node in made))


# ---- when a round is over ----


def test_all_nodes_are_written_to_before_any_is_read(engine_of) -> None:
    for late in anew(range(3)):
        written = [threading.Event() for _ in range(3)]
        others = [[wait(written[j]) for j in range(3) if j != i] for i in range(3)]
        scripts = [
            [expect("SET"), tell(written[i]), *(others[i] if i == late else []), send(OK), serve(by_name())]
            for i in range(3)
        ]
        with ExitStack() as stack:
            _, engine = scripted(stack, engine_of, *scripts)
            votes = attempt(engine, quorum=3)
            assert (votes.verdict, votes.yes) == (GRANTED, 3)
            engine.close()


@pytest.mark.parametrize(
    ("replies", "verdict"),
    [
        ([OK, OK, OK, SILENT, SILENT], GRANTED),
        ([SILENT, OK, SILENT, OK, OK], GRANTED),
        ([NIL, NIL, NIL, SILENT, SILENT], REFUSED),
        ([SILENT, NIL, OK, NIL, NIL], REFUSED),
        ([b"-OOM\r\n", b"-OOM\r\n", b"-OOM\r\n", SILENT, SILENT], UNDECIDED),
        ([b"-OOM\r\n", b"-OOM\r\n", b"-OOM\r\n", OK, SILENT], UNDECIDED),
        ([b"-OOM\r\n", b"-OOM\r\n", NIL, NIL, SILENT], None),
        ([b"-OOM\r\n", b"-OOM\r\n", OK, OK, SILENT], None),
        ([OK, OK, NIL, NIL, b"-OOM\r\n"], UNDECIDED),
    ],
)
def test_a_round_ends_with_its_verdict(engine_of, replies: list[bytes], verdict: int | None) -> None:
    """Where the silent nodes can still make it "taken", it goes on; else it waits for nobody."""
    limit = 5.0 if verdict is not None else 0.05
    with ExitStack() as stack:
        _, engine = scripted(stack, engine_of, *replies)
        started = time.monotonic()
        votes = attempt(engine, limit=limit)
        took = time.monotonic() - started
        assert votes.verdict == (UNDECIDED if verdict is None else verdict)
        assert took < 1.0 * SLACK
        if verdict is None:
            assert took >= 0.05 * SLACK
            assert "no answer within" in causes(votes)[4]
        assert votes.yes == said(votes).count(YES)
        assert votes.no == said(votes).count(NO)
        assert votes.started_ns < votes.ended_ns
        silent = {vote for vote, reply in zip(said(votes), replies, strict=True) if reply == SILENT}
        assert silent <= ({OPEN} if verdict is not None else {FAULT})


def test_validity_counts_from_before_the_first_byte(engine_of) -> None:
    with ScriptedNode([expect("SET"), sleep(0.05), send(OK), serve(by_name())]) as node:
        engine = engine_of(node.url)
        votes = attempt(engine, lease=10.0)
        assert votes.ended_ns - votes.started_ns >= 50_000_000
        assert votes.valid_until_ns == votes.started_ns + 10_000_000_000 - 102_000_000
        engine.close()


def test_a_grant_that_comes_after_the_end_of_its_validity_is_none(engine_of) -> None:
    with ScriptedNode(
        [expect("SET"), sleep(0.05), send(OK), expect("EVAL"), send(b":1\r\n"), serve(by_name())]
    ) as node:
        engine = engine_of(node.url)
        votes = attempt(engine, lease=0.05)
        assert votes.verdict == UNDECIDED
        assert said(votes) == [FAULT]
        eventually(lambda: node.received("EVAL"))
        engine.close()


# ---- only its own replies count ----

LATE: dict[str, tuple[Program, bytes, Program, bytes, bytes]] = {
    "an older SET's OK": (TAKE, OK, TAKE, OK, NIL),
    "an older extension's OK": (EXTEND, OK, TAKE, OK, NIL),
    "a delete's :1": (DROP, b":1\r\n", EXISTS, b":1\r\n", b":0\r\n"),
    "an older EXISTS' :1": (EXISTS, b":1\r\n", EXISTS, b":1\r\n", b":0\r\n"),
    "an extension's :1": (EXTEND, b":1\r\n", EXISTS, b":1\r\n", b":0\r\n"),
}


def run(engine: Engine, program: Program, token: bytes, quorum: int = 2) -> Votes:
    if program is TAKE:
        return attempt(engine, token=token, quorum=quorum)
    args = {DROP: (token,), EXTEND: (token, b"10000")}.get(program, ())
    return ask(engine, program, *args, quorum=quorum)


@pytest.mark.parametrize(("first", "late", "second", "yes", "no"), LATE.values(), ids=LATE)
def test_a_late_reply_is_no_vote(
    engine_of, first: Program, late: bytes, second: Program, yes: bytes, no: bytes
) -> None:
    """Two nodes decide the first round; the third answers it in the middle of the second."""
    connect = [expect("EXISTS"), send(b":1\r\n")]
    for position in anew(range(len(late + no))):
        cut = split(late + no, position, pause=0.001) if position else send(late + no)
        with ExitStack() as stack:
            _, engine = scripted(
                stack,
                engine_of,
                [*connect, expect(), send(late), expect(), send(yes), serve(by_name())],
                [*connect, expect(), send(late), expect(), send(no), serve(by_name())],
                [*connect, expect(), expect(), cut, serve(by_name())],
            )
            ask(engine, EXISTS, quorum=3)
            run(engine, first, b"old")
            votes = run(engine, second, b"new")
            assert votes.verdict == REFUSED, f"cut at {position}"
            assert said(votes)[1:] == [NO, NO]
            engine.close()


def test_a_late_delete_is_no_hit(engine_of) -> None:
    with ExitStack() as stack:
        _, engine = scripted(
            stack,
            engine_of,
            [expect(), send(b":0\r\n"), expect(), send(b":0\r\n"), serve(by_name())],
            [expect(), send(b":0\r\n"), expect(), send(b":0\r\n"), serve(by_name())],
            [expect(), expect(), send(b":1\r\n:0\r\n"), serve(by_name())],
        )
        assert ask(engine, DROP, b"old", quorum=2).hits == 0
        votes = ask(engine, DROP, b"new", quorum=3)
        assert (said(votes), votes.hits) == ([YES] * 3, 0)
        engine.close()


def test_the_reply_to_an_undo_is_no_vote(engine_of) -> None:
    """The undo of a try runs into the next round, which asks the same of the same node."""
    with ScriptedNode(
        [expect("SET"), expect("EVAL"), expect("DELIFEQ"), send(OK + b":1\r\n:0\r\n"), serve(by_name())]
    ) as node:
        engine = engine_of(node.url)
        assert attempt(engine, limit=0.02).verdict == UNDECIDED
        votes = ask(engine, DROP, TOKEN)
        assert (said(votes), votes.hits) == ([YES], 0)
        engine.close()


# ---- which nodes may have a token ----


def test_a_try_tells_which_nodes_may_have_executed_it(engine_of) -> None:
    """Those that said yes, nothing, or an error; not those that said no, or that it was not sent to."""
    with ExitStack() as stack:
        replies = [OK, NIL, b"-OOM no room\r\n", SILENT]
        nodes, _ = scripted(stack, engine_of, *replies)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            nobody = listener.getsockname()[1]
        engine = engine_of(*(node.url for node in nodes), f"redis://127.0.0.1:{nobody}")
        votes = attempt(engine, quorum=3)
        assert said(votes) == [YES, NO, FAULT, OPEN, FAULT]
        assert votes.touched == 0b01101
        engine.close()


def test_only_the_touched_nodes_are_asked(engine_of) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=by_name(DELIFEQ=b":1\r\n"))) for _ in range(3)]
        engine = engine_of(*(node.url for node in nodes))
        votes = engine.votes()
        engine.round(votes, DROP, b"name", (TOKEN,), 3, 2_000_000_000, 0b101)
        assert (votes.verdict, votes.hits) == (GRANTED, 2)  # the one that is left out counts as a yes
        engine.discard(b"name", TOKEN, 0b011)
        eventually(lambda: len(nodes[0].received()) == 2 and len(nodes[1].received()) == 1)
        assert [one.name for one in nodes[1].received()] in (["EVAL"], ["DELIFEQ"])
        assert [one.name for one in nodes[2].received()] == ["DELIFEQ"]


# ---- threads ----


def test_another_thread_runs_while_a_reply_is_held_back(engine_of) -> None:
    with ScriptedNode([expect("SET"), sleep(0.2), send(OK), serve(by_name())]) as node:
        engine = engine_of(node.url)
        gaps, stop = [time.monotonic()], threading.Event()

        def count() -> None:
            while not stop.is_set():
                gaps.append(time.monotonic())

        counter = InBackground(count)
        started = time.monotonic()
        votes = attempt(engine)
        ended = time.monotonic()
        stop.set()
        counter.result()
        assert said(votes) == [YES]
        assert ended - started >= 0.2
        inside = [moment for moment in gaps if started < moment < ended]
        assert len(inside) > 1000
        assert max(later - earlier for earlier, later in itertools.pairwise(inside)) < 0.1 * SLACK
        engine.close()


def test_a_round_starts_no_threads(engine_of) -> None:
    during: list[int] = []

    def count(argv: Argv) -> bytes:
        during.append(thread_count())
        return OK

    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=by_name(SET=count))) for _ in range(5)]
        engine = engine_of(*(node.url for node in nodes))
        attempt(engine, quorum=5)  # connects: after this each node has a thread of its own
        eventually(lambda: all(len(node.peers) == 1 for node in nodes))
        before = thread_count()
        during.clear()
        attempt(engine, quorum=5)
        assert max(during) <= before


def test_connections_are_used_again(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        for _ in range(50):
            attempt(engine, token=None)
        assert len(node.peers) == 1


def test_each_thread_that_is_in_a_round_has_connections_of_its_own(engine_of) -> None:
    barrier = threading.Barrier(4)

    def together(argv: Argv) -> bytes:
        barrier.wait(5)
        return OK

    with ScriptedNode(answer=by_name(SET=together)) as node:
        engine = engine_of(node.url)
        for _ in range(3):
            threads = [InBackground(lambda: attempt(engine, token=None)) for _ in range(4)]
            assert all(thread.result().verdict == GRANTED for thread in threads)
        assert len(node.peers) == 4


def test_a_closed_engine_can_be_used_again(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        engine.close()
        assert said(attempt(engine)) == [YES]
        assert [one.connection for one in node.received("SET")] == [0, 1]


def test_a_forked_child_makes_connections_of_its_own(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        parents = attempt(engine, token=None).token
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # the child does nothing that needs other threads
            child = os.fork()
        if child == 0:
            try:
                os._exit(0 if said(attempt(engine, token=None)) == [YES] else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        attempt(engine, token=None)
        received = node.received("SET")
        assert [one.connection for one in received] == [0, 1, 0]
        assert len({parents, *(one.argv[2] for one in received)}) == 3


# ---- connecting ----


def full_backlog(listener: socket.socket, stack: ExitStack) -> None:
    """Fill the queue of a listening socket: further connects hang (or, on a unix socket, get EAGAIN)."""
    for _ in range(3):
        client = stack.enter_context(socket.socket(listener.family))
        client.setblocking(False)
        try:
            client.connect(listener.getsockname())
        except BlockingIOError:
            pass


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_connect_that_hangs_ends_with_the_limit(engine_of, tmp_path: Path, family: int) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "s"))
        listener.listen(0)
        full_backlog(listener, stack)
        name = listener.getsockname()
        engine = engine_of(f"redis://127.0.0.1:{name[1]}" if family == socket.AF_INET else f"unix://{name}")
        started = time.monotonic()
        votes = attempt(engine, limit=0.1)
        assert time.monotonic() - started < 0.1 * SLACK + E
        assert (said(votes), causes(votes)) == ([FAULT], [f"no connection within {round(100 * SLACK)} ms"])
        engine.close()


def test_a_refused_connection_is_told_at_once(engine_of) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    votes = attempt(engine_of(f"redis://127.0.0.1:{port}"), limit=5.0)
    assert (said(votes), causes(votes)) == ([FAULT], ["Connection refused"])
    assert time.monotonic() - started < E


def test_a_missing_unix_socket_is_told_at_once(engine_of, tmp_path: Path) -> None:
    votes = attempt(engine_of(f"unix://{tmp_path}/none"), limit=5.0)
    assert (said(votes), causes(votes)) == ([FAULT], ["No such file or directory"])


def test_a_name_is_looked_up_and_all_its_addresses_are_tried(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        assert said(attempt(engine_of(f"redis://localhost:{node.port}"), limit=5.0)) == [YES]


def test_a_name_that_does_not_exist_costs_no_more_than_the_limit(engine_of) -> None:
    started = time.monotonic()
    votes = attempt(engine_of("redis://no-such-host.invalid:6379"), limit=0.1)
    assert time.monotonic() - started < 0.1 * SLACK + E
    assert said(votes) == [FAULT]
    assert causes(votes)[0]
