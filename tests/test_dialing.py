"""Dials that take long, fail, end too late, or meet a fork: nobody waits, and nothing is left."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.connection

import redbolt
from redbolt import Lock, Node, NodesUnavailable, RedLock, SetupError
from redbolt._engine import engine_for
from redbolt._pure.dial import Dialing
from redbolt.errors import is_setup_fault
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import _QUIET, SLACK, eventually, fd_count, raw
from tests.kit.resp import OK, error, push, reply
from tests.kit.rounds import InBackground, by_name
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, Step, hang_up

E = 0.15 * SLACK


class Gate:
    """Where connections wait before they connect, until a test opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = 0
        self.passed = 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.waiting += 1
        assert self.open.wait(30)
        with self._lock:
            self.waiting -= 1
            self.passed += 1


class Gated(redis.connection.Connection):
    def __init__(self, gate: Gate, **settings: Any) -> None:
        self.gate = gate
        super().__init__(**settings)

    def connect(self) -> None:
        self.gate.wait()
        super().connect()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A closed one; open after the test, so that no thread stays behind."""
    gate = Gate()
    yield gate
    gate.open.set()


def own(node: Any, connection_class: type, **settings: Any) -> redis.Redis:
    settings = {"host": node.host, "port": node.port, **settings}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=connection_class, **settings))


def dialers() -> int:
    return sum(thread.name == "redbolt-dialer" for thread in threading.enumerate())


# ---- long ones ----


def test_a_long_dial_holds_nobody_up(valkey: LocalNode, gate: Gate) -> None:
    lock = Lock(own(valkey, Gated, gate=gate), "name", node_timeout=0.2)
    started = time.monotonic()
    with pytest.raises(NodesUnavailable, match="no connection within 200 ms"):
        lock.acquire(blocking=False)
    assert time.monotonic() - started < 0.2 + E
    started = time.monotonic()
    with pytest.raises(NodesUnavailable, match="left out until it answers again"):
        lock.acquire(blocking=False)  # it is known by now
    assert time.monotonic() - started < E
    assert gate.waiting == 1


def test_the_other_nodes_are_not_held_up(valkeys: LocalNodes, gate: Gate) -> None:
    nodes = [valkeys[0].url, valkeys[1].url, own(valkeys[2], Gated, gate=gate)]
    lock = RedLock(nodes, "name", node_timeout=5, timeout=20)
    for _ in range(5):
        started = time.monotonic()
        with lock:
            assert time.monotonic() - started < E
    assert gate.waiting == 1


def test_what_comes_late_is_used_by_the_next_round(valkey: LocalNode, gate: Gate) -> None:
    lock = Lock(own(valkey, Gated, gate=gate), "name", node_timeout=0.1)
    with pytest.raises(NodesUnavailable):
        lock.acquire(blocking=False)
    gate.open.set()
    assert eventually(lambda: acquired(lock))
    lock.release()
    assert gate.passed == 1


def acquired(lock: Lock) -> bool:
    try:
        return lock.acquire(blocking=False)
    except NodesUnavailable:
        return False


def test_an_acquire_waits_for_a_long_dial(valkey: LocalNode, gate: Gate) -> None:
    lock = Lock(own(valkey, Gated, gate=gate), "name", node_timeout=0.1)
    waiting = InBackground(lambda: lock.acquire(blocking_timeout=10))
    eventually(lambda: gate.waiting == 1)
    begun = time.monotonic()
    eventually(lambda: time.monotonic() > begun + 0.3)  # so that several tries have found it closed
    gate.open.set()
    assert waiting.result()
    assert gate.passed == 1


def test_a_dial_may_take_seconds(valkey: LocalNode, gate: Gate, clock: Any) -> None:
    """Longer than a silent connection is borne: it has time limits of its own."""
    lock = Lock(own(valkey, Gated, gate=gate, protocol=2, **_QUIET), "name", node_timeout=0.1)
    with pytest.raises(NodesUnavailable):
        lock.acquire(blocking=False)
    eventually(lambda: gate.waiting == 1)
    for _ in range(4):
        clock(2)
        assert not acquired(lock)
    gate.open.set()
    assert eventually(lambda: acquired(lock))
    lock.release()
    assert gate.passed == 1


def test_a_closed_engine_wants_it_no_more(valkey: LocalNode, gate: Gate) -> None:
    before = fd_count()
    lock = Lock(own(valkey, Gated, gate=gate), "name", node_timeout=0.05)
    with pytest.raises(NodesUnavailable):
        lock.acquire(blocking=False)
    eventually(lambda: gate.waiting == 1)
    redbolt.close()
    gate.open.set()
    eventually(lambda: gate.passed == 1 and fd_count() <= before and dialers() == 0)
    assert b"name=Gated" not in raw(valkey, "CLIENT", "LIST")


def test_few_threads_dial_at_once(valkey: LocalNode, gate: Gate) -> None:
    client = own(valkey, Gated, gate=gate)
    locks = [Lock(client, f"name {i}", node_timeout=5, timeout=20, thread_local=False) for i in range(12)]
    waiting = [InBackground(lock.acquire) for lock in locks]
    eventually(lambda: gate.waiting == 4)
    assert dialers() == 4
    gate.open.set()
    assert all(one.result() for one in waiting)
    for lock in locks:
        lock.release()
    assert gate.passed == 12


def test_a_dial_that_nobody_wants_any_more_is_not_begun(valkey: LocalNode, gate: Gate) -> None:
    node = Node.from_client(own(valkey, Gated, gate=gate))
    assert node.dialer is not None
    dialing = Dialing(node, node.dialer, lambda: None)
    dials = [dialing.begin() for _ in range(6)]
    eventually(lambda: gate.waiting == 4)
    for dial in dials[2:]:
        dial.drop()
    gate.open.set()
    eventually(lambda: not dialing.workers)
    assert gate.passed == 4
    assert [dial.socket is not None for dial in dials[:2]] == [True, True]
    assert [dial.connection for dial in dials[2:]] == [None] * 4
    for dial in dials[:2]:
        dial.drop()


def test_its_own_timeouts_end_it(valkey: LocalNode) -> None:
    """A server that accepts and says nothing, and a client without timeouts."""
    with ScriptedNode(answer=lambda argv: None) as silent:
        client = own(silent, redis.connection.Connection, credential_provider=Provider(), socket_timeout=None)
        node = Node.from_client(client)
        assert node.dialer is not None
        seen: list[Any] = []

        class Seen(redis.connection.Connection):
            def connect(self) -> None:
                seen.append((self.socket_timeout, self.socket_connect_timeout))
                raise redis.TimeoutError("seen")

        for timeouts in ((None, None), (3600, 3600), (2, 1)):
            settings = dict(zip(("socket_timeout", "socket_connect_timeout"), timeouts, strict=True))
            with pytest.raises(NodesUnavailable, match="seen"):
                Lock(own(silent, Seen, **settings), "name").acquire(blocking=False)
    assert seen == [(10, 10), (10, 10), (2, 1)]


class Provider(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str]:
        return ("password",)


# ---- failures ----


class Failing(redis.connection.Connection):
    def __init__(self, problem: BaseException, where: str, **settings: Any) -> None:
        self.problem, self.where = problem, where
        if where == "init":
            raise problem
        super().__init__(**settings)

    def connect(self) -> None:
        if self.where == "before":
            raise self.problem
        super().connect()
        raise self.problem


class OwnError(redis.RedisError):
    pass


PROBLEMS: list[tuple[BaseException, str]] = [
    (RuntimeError("sesame"), "RuntimeError was raised by Failing while connecting"),
    (OwnError("sesame"), "OwnError was raised by Failing while connecting"),
    (SystemExit("sesame"), "SystemExit was raised by Failing"),
    (KeyboardInterrupt("sesame"), "KeyboardInterrupt was raised by Failing"),
    (MemoryError(), "MemoryError was raised by Failing"),
    (BaseException("sesame"), "BaseException was raised by Failing"),
    (OSError(111, "Connection refused"), "ConnectionRefusedError: .*refused"),
    (socket.gaierror(-2, "Name or service not known"), "gaierror: .*not known"),
    (TimeoutError("timed out"), "TimeoutError: timed out"),
    (redis.ConnectionError("p@ssword is wrong"), r"ConnectionError: \*\*\* is wrong"),
    (redis.ResponseError("x" * 1000 + "\n"), "ResponseError: x{180}"),
]


@pytest.mark.parametrize("where", ["init", "before", "after"])
@pytest.mark.parametrize(("problem", "text"), PROBLEMS, ids=lambda value: type(value).__name__)
def test_whatever_it_raises(valkey: LocalNode, problem: BaseException, text: str, where: str) -> None:
    client = own(valkey, Failing, problem=problem, where=where, username="default", password="p@ssword")
    lock = Lock(client, "name")
    with pytest.raises(NodesUnavailable, match=text) as caught:
        lock.acquire(blocking=False)
    assert "sesame" not in str(caught.value)
    assert "p@ssword" not in str(caught.value)
    assert len(str(caught.value)) < 400
    eventually(lambda: dialers() == 0)


SETUP = {
    "AuthenticationError: x": True,
    "AuthenticationWrongNumberOfArgsError: x": True,
    "AuthorizationError: x": True,
    "NoPermissionError: x": True,
    "DataError: x": True,
    "ConnectionError: Error 1. [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed": True,
    "ConnectionError: Error 1. [SSL: WRONG_VERSION_NUMBER] wrong version number": True,
    "ConnectionError: [SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] alert": True,
    "left out until it answers again: AuthenticationError: x": True,
    "ConnectionError: [SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred": False,
    "ConnectionError: Error 111 connecting to x:1. Connection refused.": False,
    "TimeoutError: Timeout connecting to server": False,
    "MyAuthenticationErrors: x": False,
}


@pytest.mark.parametrize("cause", SETUP)
def test_which_causes_no_waiting_mends(cause: str) -> None:
    assert is_setup_fault(cause) is SETUP[cause]


class Pretending:
    """Not a connection of redis-py at all, and without a socket."""

    def __init__(self, **settings: Any) -> None:
        self._sock = None

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        raise RuntimeError("sesame")


def test_a_class_without_a_socket(valkey: LocalNode) -> None:
    with pytest.raises(SetupError, match="Pretending has no socket that a lock can use"):
        Lock(own(valkey, Pretending), "name").acquire()


class Greedy(redis.connection.Connection):
    """It leaves a part of what the server said in its own buffer."""

    _sock: Any

    def connect(self) -> None:
        super().connect()
        self.send_command("PING")
        self.send_command("PING")
        eventually(lambda: b"PONG" in self._sock.recv(100, socket.MSG_PEEK))
        eventually(lambda: self._sock.recv(100, socket.MSG_PEEK).count(b"PONG") == 2)
        self.read_response()


def test_what_was_read_and_not_used_is_noticed(valkey: LocalNode) -> None:
    with pytest.raises(NodesUnavailable, match="Greedy has left something unread"):
        Lock(own(valkey, Greedy), "name").acquire(blocking=False)


# ---- what servers say meanwhile ----


def answers(argv: Argv) -> bytes | Step | None:
    if argv[0] == b"HELLO":
        return reply({"server": "redis", "proto": 3})
    return by_name(SET=push("invalidate", ["x"]) + OK, DELIFEQ=b":1\r\n", CLIENT=OK, PING=OK)(argv)


class Plain(redis.connection.Connection):
    pass


def test_pushes_come_in_between() -> None:
    with ScriptedNode(answer=answers) as server:
        lock = Lock(own(server, Plain, protocol=3), "name")
        with lock:
            server.peers[0].send(push("message", "channel", "text"))
        with lock:
            assert len(server.peers) == 1


@pytest.mark.parametrize("said", [{"protocol": 3}, {}], ids=["RESP3", "not said"])
@pytest.mark.parametrize("missing", [error("ERR unknown command 'HELLO'"), hang_up()], ids=["error", "end"])
def test_a_server_without_hello(missing: bytes | Step, said: dict[str, int]) -> None:
    def answer(argv: Argv) -> bytes | Step | None:
        return missing if argv[0] == b"HELLO" else answers(argv)

    with ScriptedNode(answer=answer) as server:
        lock = Lock(own(server, Plain, **said), "name")
        assert lock.acquire(blocking=False)
        asked = len(server.received("HELLO"))
        assert asked <= 1  # an older redis-py says it only if it is told to
        lock._engine.close()
        lock.release()
        assert lock.acquire(blocking=False)
        assert len(server.received("HELLO")) == asked
        lock.release()


def test_a_stopped_server_is_not_taken_for_one_that_answers(valkey: LocalNode) -> None:
    """The kernel connects for it, and such a handshake asks nothing: so PING has to be answered first."""
    lock = Lock(own(valkey, Plain, protocol=2, **_QUIET), "name", node_timeout=0.2, timeout=5)
    with lock:
        pass
    valkey.pause()
    try:
        with pytest.raises(NodesUnavailable):
            lock.acquire(blocking=False)
        lock._engine.close()
        for _ in range(3):
            with pytest.raises(NodesUnavailable, match="left out"):
                lock.acquire(blocking=False)
    finally:
        valkey.resume()
    assert eventually(lambda: acquired(lock))
    lock.release()


def test_connections_end_as_others_do(valkey: LocalNode) -> None:
    lock = Lock(own(valkey, Plain), "name")
    for _ in range(3):
        with lock:
            pass
        raw(valkey, "CLIENT", "KILL", "TYPE", "normal")
    assert lock.acquire(blocking_timeout=5)
    lock.release()


# ---- objects ----


def test_its_connection_object_lives_as_long_as_the_socket(valkey: LocalNode) -> None:
    ended: list[int] = []

    class Tunnelled(redis.connection.Connection):
        """It ends with a tunnel of its own."""

        def disconnect(self, *args: Any, **kwargs: Any) -> None:
            super().disconnect(*args, **kwargs)
            ended.append(1)

    lock = Lock(own(valkey, Tunnelled), "name")
    for _ in range(5):
        with lock:
            assert not ended
    redbolt.close()
    eventually(lambda: ended)


def test_a_dial_that_is_forgotten_closes_what_it_made(valkey: LocalNode) -> None:
    before = fd_count()
    node = Node.from_client(own(valkey, Plain))
    assert node.dialer is not None
    dialing = Dialing(node, node.dialer, lambda: None)
    dials = [dialing.begin()]
    eventually(lambda: dials[0].done)
    assert fd_count() == before + 1
    dials.clear()
    eventually(lambda: fd_count() <= before)


def test_no_thread_can_be_started(valkey: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lock = Lock(own(valkey, Plain), "name")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(NodesUnavailable, match="can't start new thread"):
            lock.acquire(blocking=False)
    assert eventually(lambda: acquired(lock))
    lock.release()


# ---- forks ----


def in_child(body: Any) -> bool:
    """Run it in a forked child; whether it returned True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_has_none_of_its_parents_connections(valkey: LocalNode) -> None:
    lock = Lock(own(valkey, Plain), "name", timeout=20)
    before = sockets()
    with lock:
        held = sockets() - before
        assert held
        assert in_child(lambda: not held & sockets() and not lock.held)
        assert lock.owned()
    assert in_child(lambda: acquired(lock) and lock.held)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_while_a_dial_is_under_way(valkey: LocalNode) -> None:
    """Its half-made socket is known to nobody but its thread, which the child does not have."""
    with ScriptedNode(answer=by_name(SET=OK, HELLO=None, AUTH=None)) as silent:
        lock = Lock(own(silent, Plain, password="x", socket_timeout=1), "name", node_timeout=0.1)
        before = sockets()
        with pytest.raises(NodesUnavailable):
            lock.acquire(blocking=False)
        eventually(lambda: silent.received("HELLO") or silent.received("AUTH"))
        half_made = sockets() - before
        assert in_child(lambda: not ours(silent, half_made & sockets()))
        eventually(lambda: dialers() == 0)


def ours(server: ScriptedNode, inodes: set[str]) -> set[str]:
    """Those of the sockets that lead to the server."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") in inodes:
                with socket.socket(fileno=os.dup(int(fd))) as twin:
                    if twin.getpeername()[1] == server.port:
                        found.add(fd)
        except OSError:
            continue
    return found


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if name.startswith("socket:"):
            found.add(name)
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_can_dial(valkey: LocalNode, gate: Gate) -> None:
    """Also if its parent has four dials under way."""
    client = own(valkey, Gated, gate=gate)
    engine = engine_for((Node.from_client(client),))
    locks = [Lock(client, f"name {i}", node_timeout=0.05) for i in range(4)]
    for one in [InBackground(functools.partial(acquired, lock)) for lock in locks]:
        assert one.result() is False
    eventually(lambda: gate.waiting)

    def child() -> bool:
        gate.open.set()
        lock = Lock(client, "child", node_timeout=5)
        return lock._engine is engine and lock.acquire(blocking=False)

    assert in_child(child)
