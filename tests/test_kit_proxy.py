"""The fault proxy: each fault is exactly what it says, and can be healed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, Client, eventually, fd_count, raw, thread_count
from tests.kit.proxy import Direction, FaultProxy
from tests.kit.resp import OK, PONG, command, push, reply

PING = command("PING")


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNodes() as nodes:
        yield nodes[0]


@pytest.fixture
def proxy(node: LocalNode) -> Iterator[FaultProxy]:
    raw(node, "FLUSHALL")
    with FaultProxy(node) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    with Client(proxy) as client:
        assert client.ask("PING") == PONG
        yield client


def test_healthy_proxy_passes_everything(proxy: FaultProxy, client: Client, node: LocalNode) -> None:
    big = b"x" * 3_000_000
    assert raw(proxy, "SET", "name", big) in (True, b"OK")
    assert raw(proxy, "GET", "name") == big
    assert raw(node, "STRLEN", "name") == len(big)
    assert proxy.connections == 3
    assert min(proxy.bytes_up, proxy.bytes_down) > len(big)
    eventually(lambda: proxy.open_connections == 1)
    client.socket.shutdown(socket.SHUT_WR)
    assert client.read() == b""
    eventually(lambda: proxy.open_connections == 0)


def test_proxy_before_a_unix_socket_and_an_address(node: LocalNode) -> None:
    for upstream in (node.unix_path, (node.host, node.port)):
        with FaultProxy(upstream) as proxy:
            assert raw(proxy, "ECHO", "hello") == b"hello"


def test_proxy_has_the_password_of_its_node() -> None:
    with LocalNodes(password="a:b@c") as nodes, FaultProxy(nodes[0]) as proxy:
        assert raw(proxy, "PING")


def test_proxy_before_something_that_is_not_resp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with FaultProxy(server.getsockname()) as proxy, Client(proxy) as client:
            connection, _ = server.accept()
            with connection:
                client.socket.sendall(b"\x16\x03 hello")
                assert connection.recv(100) == b"\x16\x03 hello"
                connection.sendall(b"\x16\x03 world")
                assert client.read() == b"\x16\x03 world"


def test_delay_in_each_direction(proxy: FaultProxy, client: Client, node: LocalNode) -> None:
    for way in ({"up": 0.05}, {"down": 0.05}):
        proxy.delay(**way)
        start = time.monotonic()
        assert client.ask("PING") == PONG
        assert 0.05 <= time.monotonic() - start < 0.05 + 0.2 * SLACK
    start = time.monotonic()
    for _ in range(20):  # a longer wire, not a slower one
        client.socket.sendall(PING)
        time.sleep(0.001)
    got = b""
    while len(got) < 20 * len(PONG):
        got += client.read()
    assert time.monotonic() - start < 0.07 + 0.3 * SLACK
    proxy.heal()
    start = time.monotonic()
    assert client.ask("PING") == PONG
    assert time.monotonic() - start < 0.05 * SLACK


def test_slices(proxy: FaultProxy, client: Client) -> None:
    proxy.slice(2, 0.02 * SLACK, "down")
    assert client.ask("PING") == b"+P"
    assert [client.read() for _ in range(3)] == [b"ON", b"G\r", b"\n"]
    proxy.slice(3, 0.001, "up")
    client.socket.sendall(command("ECHO", "hello"))
    got = b""
    while not got.endswith(b"hello\r\n"):
        got += client.read()
    proxy.heal()
    assert client.ask("PING") == PONG


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_held_bytes_come_when_healed(
    proxy: FaultProxy, client: Client, node: LocalNode, direction: Direction
) -> None:
    proxy.hold(direction)
    client.socket.sendall(command("SET", "name", "value"))
    assert client.is_silent()
    assert raw(node, "EXISTS", "name") == (direction == "down")
    proxy.heal()
    assert client.read() == OK
    assert client.ask("GET", "name") == reply("value")


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_swallowed_bytes_never_come(
    proxy: FaultProxy, client: Client, node: LocalNode, direction: Direction
) -> None:
    proxy.swallow(direction)
    client.socket.sendall(command("SET", "name", "value"))
    with Client(proxy) as other:
        other.socket.sendall(PING)
        assert client.is_silent()
        assert other.is_silent(0.01)
    assert raw(node, "EXISTS", "name") == (direction == "down")
    assert proxy.open_connections == 2
    proxy.heal()
    assert client.is_reset()
    assert raw(proxy, "PING")
    eventually(lambda: proxy.open_connections == 0)


def test_dropped_reply(proxy: FaultProxy, client: Client, node: LocalNode) -> None:
    proxy.drop_reply("set")
    assert client.ask("PING") == PONG
    client.socket.sendall(command("SET", "name", "value") + PING)
    assert client.is_silent()
    assert raw(proxy, "GET", "name") == b"value"
    assert proxy.replies_lost == 1
    proxy.heal()
    assert client.is_reset()


def test_dropped_reply_and_then(proxy: FaultProxy, client: Client, node: LocalNode) -> None:
    proxy.drop_reply(then="pass")
    client.socket.sendall(command("SET", "name", "value"))
    assert client.ask("GET", "name") == reply("value")
    proxy.drop_reply(then="reset")
    client.socket.sendall(command("SET", "name", "other"))
    assert client.is_reset()
    assert raw(node, "GET", "name") == b"other"


def test_push_is_no_reply_that_could_be_dropped(proxy: FaultProxy, node: LocalNode) -> None:
    with Client(proxy) as client:
        client.ask("HELLO", 3)
        client.ask("CLIENT", "TRACKING", "ON")
        client.ask("GET", "name")
        proxy.drop_reply()
        raw(node, "SET", "name", "value")
        assert client.read() == push("invalidate", ["name"])
        client.socket.sendall(PING)
        assert client.is_silent()


@pytest.mark.parametrize("keep", range(1, len(b"$5\r\nvalue\r\n")))
def test_reset_in_mid_reply(proxy: FaultProxy, client: Client, keep: int) -> None:
    client.ask("SET", "name", "value")
    proxy.cut_reply(keep, "GET")
    assert client.ask("GET", "name") == b"$5\r\nvalue\r\n"[:keep]
    assert client.is_reset()


def test_reset_of_all_connections(proxy: FaultProxy, client: Client, node: LocalNode) -> None:
    proxy.reset_connections()
    assert client.is_reset()
    assert proxy.open_connections == 0
    assert raw(proxy, "PING")


@pytest.mark.parametrize("again", [FaultProxy.accept, FaultProxy.heal])
def test_refused_connections(proxy: FaultProxy, client: Client, again: Callable[[FaultProxy], None]) -> None:
    url = proxy.url
    proxy.refuse()
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)
    assert client.ask("PING") == PONG
    again(proxy)
    assert raw(url, "PING")


def test_killed_server_behind_the_proxy() -> None:
    with LocalNodes() as nodes, FaultProxy(nodes[0]) as proxy:
        with Client(proxy) as client:
            assert client.ask("PING") == PONG
            nodes[0].kill()
            with pytest.raises(OSError), Client(proxy) as other:
                other.socket.sendall(PING)
                assert other.read()
            try:
                assert client.read() == b""
            except ConnectionResetError:
                pass
        nodes[0].start()
        assert raw(proxy, "PING")


def test_proxy_leaves_nothing(node: LocalNode) -> None:
    fds, threads = fd_count(), thread_count()
    with FaultProxy(node) as proxy:
        clients = [Client(proxy) for _ in range(5)]
        assert clients[0].ask("PING") == PONG
        proxy.swallow()
        clients[1].socket.sendall(PING)
        clients[2].socket.close()
        proxy.refuse()
        raw(node, "PING")
    for client in clients:
        client.socket.close()
    with pytest.raises(RuntimeError, match="closed"):
        proxy.heal()
    assert fd_count() == fds
    eventually(lambda: thread_count() <= threads, what="the threads have ended")
