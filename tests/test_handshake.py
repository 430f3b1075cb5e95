"""What a new connection says first; and that no lock fails where HELLO, CLIENT or PING are missing."""

from __future__ import annotations

import socket
import threading
import time

import pytest

import redbolt
from redbolt import Lock, Node
from redbolt._judge import lacks_hello
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.resp import OK, error, reply
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Answer, Argv, Step, hang_up

UNKNOWN = "ERR unknown command '{}', with args beginning with: {}"


def answers(**instead: bytes | Step) -> Answer:
    """A server that takes all of a handshake, but for some commands."""

    def answer(argv: Argv) -> bytes | Step | None:
        name = argv[0].decode().upper()
        if name in instead:
            return instead[name]
        if name == "HELLO":
            return reply({"server": "redis", "proto": 3})
        return b":1\r\n" if name in ("EVAL", "EVALSHA", "DELIFEQ", "DELEX") else OK

    return answer


def first_words(node: ScriptedNode) -> list[list[bytes]]:
    """Per connection what it said before its first try or delete."""
    said: list[list[bytes]] = []
    for one in node.received():
        while len(said) <= one.connection:
            said.append([])
        if one.name in ("HELLO", "AUTH", "SELECT", "CLIENT", "PING"):
            said[one.connection].append(b" ".join(one.argv))
    return said


def node_of(server: ScriptedNode, **settings: object) -> Node:
    return Node(server.host, server.port, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"protocol": 2}, []),
        ({"protocol": 3}, [b"HELLO 3"]),
        ({"protocol": 3, "password": "p"}, [b"HELLO 3 AUTH default p"]),
        ({"protocol": 3, "username": "u", "password": "p"}, [b"HELLO 3 AUTH u p"]),
        ({"password": "p", "db": 2}, [b"AUTH p", b"SELECT 2"]),
        ({"username": "u"}, [b"AUTH u "]),
        ({"client_name": "me"}, [b"CLIENT SETNAME me"]),
        (
            {"protocol": 3, "db": 1, "client_name": "me", "username": "u", "password": "p"},
            [b"HELLO 3 AUTH u p", b"SELECT 1", b"CLIENT SETNAME me"],
        ),
    ],
)
def test_what_is_said_first(kind: str, settings: dict[str, object], words: list[bytes]) -> None:
    with ScriptedNode(answer=answers()) as server:
        with Lock(node_of(server, **settings), "name", engine=kind):
            assert first_words(server) == [words]


@pytest.mark.parametrize(
    "missing",
    [
        error(UNKNOWN.format("HELLO", "'3', 'AUTH', 'u', 'sesame'")),
        error("NOPERM this user has no permissions to run the 'hello' command"),
        error("NOPROTO unsupported protocol version"),
        error("NOAUTH Authentication required."),
        error("ERR unsupported command"),
        hang_up(),
    ],
    ids=lambda missing: getattr(missing, "text", None) or str(missing[:12]),
)
def test_a_server_without_hello(kind: str, missing: bytes | Step) -> None:
    """One try must do: it connects again within its round, and later connections know."""
    settings = {"protocol": 3, "username": "u", "password": "sesame", "db": 1, "client_name": "me"}
    plain = [b"AUTH u sesame", b"SELECT 1", b"CLIENT SETNAME me"]
    with ScriptedNode(answer=answers(HELLO=missing)) as server:
        lock, other = (
            Lock(node_of(server, **settings), name, thread_local=False, engine=kind)
            for name in ("name", "other")
        )
        assert lock.acquire(blocking=False)
        together(lock.release, lambda: other.acquire(blocking=False))
        said = first_words(server)
        assert said[0][0] == b"HELLO 3 AUTH u sesame"
        assert said[1:]
        assert all(words == plain for words in said[1:])
        other.release()


def together(*calls: object) -> None:
    threads = [threading.Thread(target=call) for call in calls]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "denied",
    [
        error(UNKNOWN.format("CLIENT", "'SETNAME', 'me'")),
        error("NOPERM this user has no permissions to run the 'client|setname' command"),
        error("ERR Client names cannot contain spaces, newlines or special characters."),
        hang_up(),
    ],
    ids=lambda denied: getattr(denied, "text", None) or str(denied[:16]),
)
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_server_without_names(kind: str, denied: bytes | Step, protocol: int) -> None:
    with ScriptedNode(answer=answers(CLIENT=denied)) as server:
        node = node_of(server, protocol=protocol, client_name="me")
        for name in ("a", "b"):
            lock = Lock(node, name, engine=kind)
            assert lock.acquire(blocking=False)
            lock.release()
        redbolt.close()
        said = first_words(server)
        assert sum(b"CLIENT SETNAME me" in words for words in said) == 1


def test_a_server_that_knows_nothing_but_locks(kind: str) -> None:
    unknown = {name: error(UNKNOWN.format(name, "")) for name in ("HELLO", "CLIENT", "PING")}
    with ScriptedNode(answer=answers(**unknown)) as server:
        with Lock(node_of(server, protocol=3, client_name="me"), "name", engine=kind):
            pass
    with ScriptedNode(answer=answers(HELLO=hang_up(), CLIENT=hang_up(), PING=hang_up())) as server:
        with Lock(node_of(server, protocol=3, client_name="me"), "name", engine=kind):
            assert len(server.peers) == 3


def test_a_wrong_password_in_hello_is_no_missing_hello(kind: str) -> None:
    wrong = error("WRONGPASS invalid username-password pair or user is disabled.")
    with ScriptedNode(answer=answers(HELLO=wrong)) as server:
        lock = Lock(node_of(server, protocol=3, password="sesame"), "name", engine=kind)
        with pytest.raises(redbolt.SetupError, match="WRONGPASS"):
            lock.acquire(blocking=False)
        assert len(server.peers) == 1


def test_a_server_that_is_gone_after_hello_is_not_asked_in_a_circle(kind: str) -> None:
    with ScriptedNode(answer=answers(HELLO=hang_up(), AUTH=hang_up())) as server:
        lock = Lock(node_of(server, protocol=3, password="sesame"), "name", engine=kind)
        with pytest.raises(redbolt.NodesUnavailable, match="closed the connection"):
            lock.acquire(blocking=False)
        assert len(server.peers) == 2


def test_a_server_may_learn_hello(kind: str) -> None:
    """What was remembered of a server is forgotten when another one may have taken its place."""
    with LocalNodes(config=("--rename-command", "HELLO", "")) as nodes:
        server = nodes[0]
        lock = Lock(Node(server.host, server.port, protocol=3, client_name="me"), "name", engine=kind)

        def spoken() -> list[str]:
            return [one["resp"] for one in clients(server) if one["name"] == "me"]

        with lock:
            assert spoken() == ["2"]
        server.kill()

        def refused() -> bool:
            with pytest.raises(redbolt.NodesUnavailable) as caught:
                lock.acquire(blocking=False)
            return "refused" in str(caught.value)

        eventually(refused)  # the first one may only find the end of its connection
        server._config = ()
        server.start()
        with lock:
            pass
        lock._engine.close()
        with lock:
            assert "3" in spoken()
        redbolt.close()


@pytest.mark.parametrize("text", ["UNKNOWN `AUTH`", "unknown command 'AUTH', with args beginning with: "])
def test_a_server_that_repeats_the_password(kind: str, text: str) -> None:
    answer = answers(AUTH=error(f"ERR {text} 'sesame'"), HELLO=error(f"ERR {text} 'sesame'"))
    for protocol in (2, 3):
        with ScriptedNode(answer=answer) as server:
            lock = Lock(node_of(server, protocol=protocol, password="sesame"), "name", engine=kind)
            with pytest.raises(redbolt.LockError, match="AUTH") as caught:
                lock.acquire(blocking=False)
            assert "sesame" not in str(caught.value) + repr(caught.value.causes)


def test_every_error_but_a_few_may_mean_a_missing_hello() -> None:
    core = pytest.importorskip("redbolt._core")
    for text in (
        b"ERR unknown command",
        b"NOPERM x",
        b"NOAUTH",
        b"",
        b"WRONGPASS x",
        b"DENIED Redis",
        b"ERR",
    ):
        assert core.lacks_hello(text) == lacks_hello(text)
    assert not lacks_hello(b"ERR max number of clients reached")
    assert not core.lacks_hello(b"ERR max number of clients reached")


# ---- real servers ----


@pytest.mark.parametrize("protocol", [None, 2, 3])
def test_a_real_server_sees_it(kind: str, node: LocalNode, protocol: int | None) -> None:
    raw(node, "ACL", "SETUSER", "ann", "on", ">hers", "~*", "+@all")
    settings = {"db": 3, "username": "ann", "password": "hers", "client_name": "me", "protocol": protocol}
    for where in (Node(node.host, node.port, **settings), Node(path=node.unix_path, **settings)):  # type: ignore[arg-type]
        with Lock(where, "name", engine=kind) as lock:
            lock.extend(1)
            assert lock.owned()
            assert lock.locked()
            assert not Lock(where, "name", engine=kind).acquire(blocking=False)
            mine = [line for line in clients(node) if line["name"] == "me"]
            assert [(one["db"], one["user"]) for one in mine] == [("3", "ann")]
            assert mine[0].get("resp", str(protocol or 2)) == str(protocol or 2)
        redbolt.close()
        eventually(lambda: not [line for line in clients(node) if line["name"] == "me"])


def clients(node: LocalNode) -> list[dict[str, str]]:
    """The server's CLIENT LIST."""
    lines = raw(node.url, "CLIENT", "LIST")
    text = lines.decode() if isinstance(lines, bytes) else ""
    found = (
        lines
        if not text
        else [dict(w.partition("=")[::2] for w in line.split()) for line in text.splitlines()]
    )
    return [{str(k): str(v) for k, v in one.items()} for one in found]


def test_a_user_who_may_not_name_connections(kind: str, node: LocalNode) -> None:
    raw(node, "ACL", "SETUSER", "bob", "on", "nopass", "~*", "+@all", "-client")
    where = Node(node.host, node.port, username="bob", protocol=3, client_name="me")
    with Lock(where, "name", engine=kind):
        assert [one["name"] for one in clients(node) if one["user"] == "bob"] == [""]


# ---- how long connecting may take ----


def test_a_connect_timeout_that_is_shorter_than_the_round(kind: str) -> None:
    """Nobody accepts, and the backlog is full: the kernel leaves the connect without an answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            lock = Lock(Node(port=port, connect_timeout=0.1), "name", engine=kind, node_timeout=5)
            started = time.monotonic()
            with pytest.raises(redbolt.NodesUnavailable, match="no connection within 100 ms"):
                lock.acquire(blocking=False)
            assert 0.1 <= time.monotonic() - started < 0.1 + 0.15 * SLACK
        finally:
            for filler in fillers:
                filler.close()


def test_a_connect_timeout_does_not_count_for_answers(kind: str) -> None:
    def late(argv: Argv) -> bytes | Step | None:
        time.sleep(0.1)
        return answers()(argv)

    with ScriptedNode(answer=late) as server:
        with Lock(node_of(server, connect_timeout=0.05), "name", engine=kind, node_timeout=5):
            pass
