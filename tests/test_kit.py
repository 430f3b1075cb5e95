"""The test kit itself: RESP, scripted nodes and the helpers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from unittest.mock import ANY

import pytest
import redis

from tests.kit import resp
from tests.kit.clients import SLACK, Client, eventually, fd_count, raw, thread_count
from tests.kit.resp import NIL, OK, PONG, ProtocolError, command, parse_command, push, reply, reply_length
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import (
    ScriptError,
    Step,
    bytewise,
    expect,
    expect_end,
    half_close,
    handshake,
    hang_up,
    ignore_rest,
    reset,
    send,
    serve,
    sleep,
    split,
    tell,
    unknown_command,
    wait,
)

PING = command("PING")
ERROR = resp.error("ERR no")


# RESP


@pytest.mark.parametrize(
    "data",
    [OK, PONG, NIL, ERROR, b":5\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n"]
    + [reply(x) for x in (b"a\r\nb", [], [1, [b"x", None], "y"], {"a": {"b": 1}}, ["", {}])]
    + [push("invalidate", ["name"]), b"=7\r\ntxt:abc\r\n", b"~1\r\n:1\r\n", b"|1\r\n+a\r\n:1\r\n+OK\r\n"],
)
def test_reply_has_its_length_only_when_it_is_whole(data: bytes) -> None:
    assert [reply_length(data[:end]) for end in range(len(data))] == [None] * len(data)
    assert reply_length(data) == reply_length(data + b":1\r\n") == len(data)
    assert reply_length(b"xx" + data, 2) == len(data) + 2


def test_command_is_parsed_only_when_it_is_whole() -> None:
    data = command("SET", "näme", b"\r\n\0", 7)
    assert [parse_command(data[:end]) for end in range(len(data))] == [None] * len(data)
    assert parse_command(data + PING) == ((b"SET", "näme".encode(), b"\r\n\0", b"7"), len(data))


@pytest.mark.parametrize("data", [b"PING\r\n", b"*1\r\n:1\r\n", b"*x\r\n", b"\0"])
def test_what_is_not_a_command_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_command(data)


@pytest.mark.parametrize("data", [b"\x16\x03\x01", b"$x\r\n", b"*1\r\nhello"])
def test_what_is_not_a_reply_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        reply_length(data)


# ScriptedNode


def test_script_expects_and_sends() -> None:
    script = [
        expect(["SET", "name", ANY, "PX", 1000]),
        send(OK),
        expect("get"),
        send(reply("value")),
        expect(lambda argv: argv[0] == b"DEL" and len(argv) == 2),
        send(reply(1)),
        expect(PING + PING),
        send(PONG, PONG),
        expect(),
        send(NIL),
    ]
    with ScriptedNode(script) as node, Client(node) as client:
        start = time.monotonic()
        assert client.ask("SET", "name", b"token", "PX", 1000) == OK
        assert client.ask("GET", "name") == b"$5\r\nvalue\r\n"
        assert client.ask("DEL", "name") == b":1\r\n"
        client.socket.sendall(PING)
        assert client.ask("PING") == PONG + PONG
        assert client.ask("ANY", "thing") == NIL
        assert [one.name for one in node.received()] == ["SET", "GET", "DEL", "PING", "PING", "ANY"]
        (only,) = node.received("get")
        assert only.argv == (b"GET", b"name")
        assert only.connection == 0
        assert start <= only.at <= time.monotonic()


@pytest.mark.parametrize("position", range(1, len(OK)))
def test_split_reply_arrives_in_two_reads(position: int) -> None:
    with ScriptedNode([expect(), split(OK, position, pause=0.02 * SLACK)]) as node, Client(node) as client:
        assert client.ask("PING") == OK[:position]
        assert client.read() == OK[position:]


def test_bytewise_reply_arrives_byte_by_byte() -> None:
    with ScriptedNode([bytewise(OK, pause=0.02 * SLACK)]) as node, Client(node) as client:
        assert [client.read() for _ in OK] == [b"+", b"O", b"K", b"\r", b"\n"]


def test_script_waits_for_the_test_and_tells_it() -> None:
    asked, go = threading.Event(), threading.Event()
    with ScriptedNode([expect(), tell(asked), wait(go), sleep(0.001), send(OK)]) as node:
        with Client(node) as client:
            client.socket.sendall(PING)
            assert asked.wait(5 * SLACK)
            assert client.is_silent(0.02)
            go.set()
            assert client.read() == OK


def test_connection_ends_in_three_ways() -> None:
    scripts = (
        [expect(), hang_up()],
        [expect(), reset()],
        [expect(), half_close(), expect("LATE"), expect_end()],
    )
    with ScriptedNode(*scripts) as node:
        with Client(node) as closed:
            assert closed.ask("PING") == b""
        with Client(node) as broken:
            broken.socket.sendall(PING)
            assert broken.is_reset()
        with Client(node) as half:
            assert half.ask("PING") == b""
            half.socket.sendall(command("LATE"))


def test_test_can_act_on_a_connection_itself() -> None:
    with ScriptedNode([expect(), ignore_rest()]) as node, Client(node) as client:
        client.socket.sendall(PING)
        eventually(lambda: node.received("PING"))
        node.peers[0].send(push("invalidate", ["name"]))
        assert client.read() == b">2\r\n$10\r\ninvalidate\r\n*1\r\n$4\r\nname\r\n"
        client.socket.sendall(command("REST"))
        eventually(lambda: node.received("REST"))
        node.peers[0].reset()
        assert client.is_reset()


def test_answer_function_serves_many_connections_at_once() -> None:
    go = threading.Event()

    def answer(argv: tuple[bytes, ...]) -> bytes | Step | None:
        match argv:
            case (b"SET", b"late", *_):
                return wait(go)
            case (b"SET", *_):
                return OK
            case (b"EVIL",):
                return hang_up()
            case (b"SILENT",):
                return None
        return unknown_command(argv)

    with ScriptedNode(answer=answer) as node:
        with Client(node) as first, Client(node) as second:
            first.socket.sendall(command("SET", "late", "x"))
            assert second.ask("SET", "name", "x") == OK
            assert second.ask("FOO").startswith(b"-ERR unknown command 'FOO'")
            second.socket.sendall(command("SILENT"))
            assert second.is_silent(0.02)
            assert second.ask("EVIL") == b""
            go.set()
            assert first.ask("SET", "name", "x") == OK
            assert {one.connection for one in node.received()} == {0, 1}


def test_redis_py_can_talk_to_it() -> None:
    with ScriptedNode([expect(["GET", "name"]), send(reply("value"))], background=handshake) as node:
        assert raw(node, "GET", "name") == b"value"
    for protocol in (2, 3):
        with ScriptedNode(answer=lambda argv: reply(7), background=handshake) as node:
            client = redis.Redis(port=node.port, protocol=protocol)
            assert client.incr("name") == 7
            client.close()


def fails(*scripts: list[Step], talk: Callable[[Client], object], match: str) -> None:
    with pytest.raises(ScriptError, match=match):
        with ScriptedNode(*scripts, timeout=0.1) as node, Client(node) as client:
            talk(client)
            node.check()


def test_script_that_goes_wrong_fails_the_test() -> None:
    def ask(*argv: str) -> Callable[[Client], object]:
        return lambda client: client.socket.sendall(command(*argv))

    script = [expect("SET"), send(OK), expect("GET")]
    fails(script, talk=ask("DEL"), match=r"step 1 of 3, expect\('SET'\): got \(b'DEL',\)")
    fails(script, talk=ask("SET"), match=r"step 3 of 3, expect\('GET'\): timed out")
    fails(script, talk=lambda client: client.socket.shutdown(socket.SHUT_WR), match="client ended the conn")
    fails([expect(PING)], talk=ask("PONG"), match="got b'.*PONG")
    fails([expect(["A", ANY])], talk=ask("A"), match="got")
    fails([expect(lambda argv: False)], talk=ask("A"), match="got")
    fails([expect_end()], talk=ask("A"), match="got")
    fails([expect()], talk=lambda client: client.socket.sendall(b"garbage"), match="not a RESP command")
    fails([wait(threading.Event())], talk=ask("A"), match="not set within")
    fails([expect()], [expect()], talk=ask("A"), match="1 of 2 scripts ended")
    fails(talk=Client.is_reset, match="scripts for 0 connections")
    fails([serve(lambda argv: [][0])], talk=ask("A"), match="IndexError")


def test_command_after_the_script_fails_the_test() -> None:
    with ScriptedNode([expect(), send(OK)]) as node, Client(node) as client:
        client.ask("PING")
        node.check()
        client.socket.sendall(PING)
        assert client.is_reset()
        with pytest.raises(ScriptError, match="after the end of its script"):
            node.check()
        node._errors.clear()


def test_error_of_the_test_goes_before_that_of_the_script() -> None:
    with pytest.raises(ZeroDivisionError), ScriptedNode([expect()]):
        raise ZeroDivisionError


def test_scripted_node_leaves_nothing() -> None:
    fds, threads = fd_count(), thread_count()
    node = ScriptedNode([expect()], answer=lambda argv: None)
    clients = [Client(node) for _ in range(5)]
    clients[3].socket.close()
    eventually(lambda: len(node.peers) == 5)
    node.close()
    for client in clients:
        client.socket.close()
    assert fd_count() == fds
    eventually(lambda: thread_count() <= threads, what="the threads have ended")


# Helpers


def test_eventually() -> None:
    values = iter([0, "", None, "yes"])
    assert eventually(lambda: next(values)) == "yes"
    with pytest.raises(AssertionError, match=r"not within .* s: the thing; at last it was \[\]"):
        eventually(lambda: [], 0.01, "the thing")

    def never() -> bool:
        raise AssertionError("not yet")

    with pytest.raises(AssertionError, match="at last it raised not yet"):
        eventually(never, 0.01)


def test_counts_see_what_is_open() -> None:
    fds = fd_count()
    with socket.socket():
        assert fd_count() == fds + 1
    go = threading.Event()
    many = [threading.Thread(target=go.wait) for _ in range(20)]
    threads = thread_count()  # some of an earlier test may still be counted
    for thread in many:
        thread.start()
    assert thread_count() > threads + 10
    go.set()
    for thread in many:
        thread.join()
    eventually(lambda: thread_count() <= threads)
