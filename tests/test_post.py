"""A posted command goes along with the next one, or soon after by itself, and nothing depends on it."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from redbolt._engine import MAX_KEY, Engine
from redbolt._judge import FAULT, NO, YES
from redbolt._programs import DROP, EXISTS, FORGET
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.resp import NIL, OK, command, error, push
from tests.kit.rounds import KEY, TOKEN, InBackground, ask, attempt, by_name, causes, said
from tests.kit.scripted import Peer, ScriptedNode
from tests.kit.steps import Argv, Step, expect, hang_up, ignore_rest, reset, send, serve, tell, wait

E = 0.15 * SLACK
LATCH = b"latch"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the packets of a connection")


def post(engine: Engine, key: bytes = LATCH) -> None:
    engine.post(FORGET, key, ())


def packets(peer: Peer) -> int:
    """How many packets with data have come in on a connection: `tcpi_data_segs_in` of its tcp_info."""
    info = peer._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    assert len(info) == 160
    (count,) = struct.unpack_from("I", info, 152)
    return int(count)


def names(node: ScriptedNode) -> list[str]:
    return [one.name for one in node.received()]


# ---- with the next command, or alone ----


@on_linux
def test_it_goes_along_with_the_next_command_in_one_packet(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DEL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        (peer,) = node.peers
        together = 0
        for number in range(20):
            before = packets(peer)
            post(engine, b"latch %d" % number)
            assert said(attempt(engine)) == [YES]
            together += packets(peer) == before + 1  # a busy machine may take longer than it is held
        assert together > 0
        assert names(node) == ["SET"] + ["DEL", "SET"] * 20
        assert [one.argv[1] for one in node.received("DEL")] == [b"latch %d" % i for i in range(20)]
        assert len(node.peers) == 1


@pytest.mark.parametrize("program", [EXISTS, DROP], ids=lambda program: program.name)
def test_it_goes_before_whatever_comes_next(engine_of, program) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DEL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        post(engine, b"another")
        assert len(said(ask(engine, program, TOKEN))) == 1
        assert names(node)[:3] == ["SET", "DEL", "DEL"]
        assert len(names(node)) == 4


def test_it_goes_alone_when_nothing_comes(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        for number in range(1, 4):
            started = time.monotonic()
            post(engine)
            eventually(lambda number=number: len(node.received("DEL")) == number)  # type: ignore[misc]
            assert 0.03 < node.received("DEL")[-1].at - started < 0.05 + E
        assert [one.argv for one in node.received("DEL")] == [(b"DEL", LATCH)] * 3
        assert said(attempt(engine)) == [YES]
        assert len(node.peers) == 1


def test_the_time_that_it_waits_is_by_the_librarys_clock(engine_of, clock) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        clock(0.06)
        eventually(lambda: node.received("DEL"))


def test_each_node_that_is_ready_gets_it(engine_of) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(3)]
        engine = engine_of(*[node.url for node in nodes])
        attempt(engine, quorum=3)
        post(engine)
        attempt(engine, quorum=3)
        assert [names(node) for node in nodes] == [["SET", "DEL", "SET"]] * 3
        post(engine)
        for node in nodes:
            eventually(lambda node=node: names(node) == ["SET", "DEL", "SET", "DEL"])  # type: ignore[misc]


def test_without_a_connection_nothing_is_sent(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        post(engine)
        assert said(attempt(engine)) == [YES]
        assert names(node) == ["SET"]
        post(engine)
        engine.close()
        assert said(attempt(engine)) == [YES]
        assert names(node).count("SET") == 2
        assert set(names(node)) <= {"SET", "DEL"}


def test_the_key_arrives_byte_for_byte(engine_of) -> None:
    keys = [b"a\0b\0", b"\r\n*1\r\n$4\r\nPING\r\n", bytes(range(256)), b"%s%d", b"k" * MAX_KEY]
    script = [expect("SET"), send(OK)]
    for key in keys:
        sent = command(b"DEL", key) + command(b"SET", KEY, TOKEN, b"NX", b"PX", b"10000")
        script += [expect(sent), send(b":1\r\n", OK)]
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        attempt(engine)
        for key in keys:
            post(engine, key)
            assert said(attempt(engine)) == [YES]


def test_a_key_that_is_too_long_is_refused(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        with pytest.raises(ValueError, match="at most"):
            post(engine, b"k" * (MAX_KEY + 1))
        assert said(attempt(engine)) == [YES]
        assert names(node) == ["SET", "SET"]


# ---- its reply is nobody's vote ----

REPLIES = [b":1\r\n", b":0\r\n", error("LOADING server is loading"), error("NOPERM no DEL for you")]


@pytest.mark.parametrize("told", REPLIES, ids=repr)
@pytest.mark.parametrize(("vote", "answer"), [(YES, OK), (NO, NIL), (FAULT, error("OOM no room"))])
def test_its_reply_is_not_a_vote(engine_of, told: bytes, vote: int, answer: bytes) -> None:
    held_back: list[Argv] = []

    def reply(argv: Argv) -> bytes | None:
        if argv[0] == b"DEL":
            held_back.append(argv)  # its reply comes with the next one
            return None
        if argv[0] == b"SET" and held_back:
            return told * len(held_back) + answer
        return OK if argv[0] == b"SET" else b":0\r\n"

    with ScriptedNode(answer=reply) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        post(engine)
        assert said(attempt(engine)) == [vote]
        held_back.clear()
        assert said(attempt(engine)) == [YES]
        assert len(node.peers) == 1


@pytest.mark.parametrize("told", REPLIES, ids=repr)
def test_its_reply_does_not_end_a_round(engine_of, told: bytes) -> None:
    """A round that waits is not over when only the reply to what went along is there."""
    go, here = threading.Event(), threading.Event()
    script = [
        expect("SET"), send(OK),
        expect("DEL"), expect("EXISTS"), send(told), tell(here), wait(go), send(b":0\r\n"),
    ]  # fmt: skip
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        asking = InBackground(lambda: ask(engine, EXISTS))
        assert here.wait(5 * SLACK)
        assert asking.is_alive()
        go.set()
        assert said(asking.result()) == [NO]


@pytest.mark.parametrize("told", [b":7\r\n", b"$2\r\nhi\r\n", b"*1\r\n:1\r\n"], ids=repr)
def test_a_reply_of_the_wrong_kind_ends_the_connection(engine_of, told: bytes) -> None:
    script = [expect("SET"), send(OK), expect("DEL"), expect("SET"), send(told, OK), ignore_rest()]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        votes = attempt(engine)
        assert said(votes) == [FAULT]
        assert causes(votes) == ["a reply that does not belong to the command"]
        eventually(lambda: not engine.pending(TOKEN), what="the try is undone")
        assert said(eventually(lambda: _granted(engine))) == [YES]


def _granted(engine: Engine):
    votes = attempt(engine)
    assert said(votes) == [YES], causes(votes)
    return votes


def test_pushes_between_the_replies_are_passed_over(engine_of) -> None:
    between = push("invalidate", [KEY]) + b":1\r\n" + push("message", 1, None) + OK
    script = [expect("SET"), send(OK), expect("DEL"), expect("SET"), send(between)]
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        assert said(attempt(engine)) == [YES]


def test_it_is_not_a_write_of_any_token(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DEL=None)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        eventually(lambda: node.received("DEL"))  # and never answers
        assert not engine.pending(LATCH)
        assert not engine.pending(TOKEN)
        assert not engine.pending(b"")


# ---- trouble ----


@pytest.mark.parametrize("end", [hang_up, reset])
def test_it_is_lost_with_its_connection(engine_of, end) -> None:
    go = threading.Event()
    script: list[Step] = [expect("SET"), send(OK), wait(go), end()]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        go.set()
        node.check()
        assert said(eventually(lambda: _granted(engine))) == [YES]
        assert [one.argv for one in node.received() if one.connection > 0 and LATCH in one.argv] == []


def test_a_connection_that_ends_with_its_reply_missing(engine_of) -> None:
    script = [expect("SET"), send(OK), expect("DEL"), reset()]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        node.check()
        assert said(eventually(lambda: _granted(engine))) == [YES]
        post(engine)
        assert said(attempt(engine)) == [YES]
        assert len(node.peers) == 2


def test_a_node_that_never_answers_it_is_connected_anew(engine_of) -> None:
    script = [expect("SET"), send(OK), expect("DEL"), ignore_rest()]
    with ScriptedNode(script, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        eventually(lambda: node.received("DEL"))
        assert said(attempt(engine, limit=0.05)) == [FAULT]  # its own answer would come behind the other
        assert said(eventually(lambda: _granted(engine), 10)) == [YES]
        assert [one for one in node.received("DEL") if one.connection] == []


def test_a_server_that_sleeps_cannot_make_it_pile_up(engine_of, valkey) -> None:
    engine = engine_of(valkey.url)
    attempt(engine)
    raw(valkey, "CONFIG", "RESETSTAT")
    valkey.pause()
    for _ in range(200):
        post(engine, b"k" * 60_000)
    valkey.resume()
    assert eventually(lambda: said(attempt(engine, b"another")) == [YES], 10)
    ran = raw(valkey, "INFO", "commandstats").get("cmdstat_del", {"calls": 0})["calls"]
    assert ran < 20


def test_posts_of_many_threads_go_all_right(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DELIFEQ=b":1\r\n", DEL=b":1\r\n")) as node:
        engine = engine_of(node.url)

        def work(number: int) -> int:
            granted = 0
            for i in range(50):
                token = b"%d-%d" % (number, i)
                granted += said(attempt(engine, b"key %d" % number, token)) == [YES]
                post(engine, b"latch of " + token)
                granted += said(ask(engine, DROP, token, key=b"key %d" % number)) == [YES]
            return granted

        threads = [InBackground(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
        assert [thread.result(60) for thread in threads] == [100] * 4
        posted = [one.argv[1] for one in node.received("DEL")]
        assert len(set(posted)) == len(posted)
        assert 0 < len(posted) <= 200


def test_an_engine_that_is_closed_sends_or_forgets_it(engine_of) -> None:
    with ScriptedNode([expect("SET"), send(OK), serve(by_name())], answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        attempt(engine)
        post(engine)
        engine.close()
        node.check()  # the first connection has ended
        assert said(attempt(engine)) == [YES]
        assert [one.connection for one in node.received("DEL")] in ([], [0])
