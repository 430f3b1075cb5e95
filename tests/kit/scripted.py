"""A server that does exactly what a test says: a script per connection, or a function that answers.

    with ScriptedNode([expect(["SET", "name", ANY, "NX", "PX", ANY]), split(OK, 3), hang_up()]) as node:
        ...  # let the code under test connect to node.url

    with ScriptedNode(answer=lambda argv: error("LOADING server is loading")) as node: ...

The steps are in ``steps.py``. A script that did not go as written fails the test: when the ``with`` block is
left, or in ``node.check()``.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from .clients import SLACK
from .ports import ports
from .resp import ProtocolError, parse_command
from .steps import Answer, Argv, ScriptError, Step, serve


@dataclass(frozen=True)
class Received:
    """One command that arrived: its arguments, ``time.monotonic()``, and the connection (0, 1, ...)."""

    argv: Argv
    at: float
    connection: int

    @property
    def name(self) -> str:
        """The command's name in capitals."""
        return self.argv[0].decode().upper() if self.argv else ""


class Peer:
    """The server's side of one connection; a test may also send on it, or end it, itself."""

    def __init__(self, node: ScriptedNode, number: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.node = node
        self.number = number
        self.open = True
        self._socket = connection
        self._buffer = bytearray()

    def send(self, data: bytes) -> None:
        """Send bytes to the client."""
        self._socket.settimeout(self.node.timeout)
        self._socket.sendall(data)

    def hang_up(self) -> None:
        """Close the connection: the client reads to the end of the stream."""
        self.open = False
        self._shut(socket.SHUT_RDWR)

    def half_close(self) -> None:
        """End the stream to the client, but go on reading from it."""
        self._shut(socket.SHUT_WR)

    def reset(self) -> None:
        """End the connection by RST: the client gets "connection reset"."""
        self.open = False
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._shut(socket.SHUT_RD)  # wakes its thread, which closes it; nobody else may while it reads

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:
            pass  # the client was faster

    def _close(self) -> None:
        self.open = False
        self._socket.close()

    def read_command(self, timeout: float | None) -> tuple[Argv, bytes] | None:
        """The next command that ``background`` leaves, parsed and raw; None at the end of the stream."""
        while True:
            found = parse_command(self._buffer)
            if found is None:
                if not self._fill(timeout):
                    return None
                continue
            argv, length = found
            data = bytes(self._buffer[:length])
            del self._buffer[:length]
            self.node._record(Received(argv, time.monotonic(), self.number))
            done = self.node.background(argv) if self.node.background else None
            if done is None:
                return argv, data
            self.perform(done)

    def perform(self, answer: bytes | Step | None) -> None:
        """Do what an ``Answer`` returned."""
        if isinstance(answer, Step):
            answer.run(self)
        elif answer is not None:
            self.send(answer)

    def _fill(self, timeout: float | None) -> bool:
        if not self.open:
            return False
        self._socket.settimeout(timeout)
        data = self._socket.recv(65536)
        self._buffer += data
        return bool(data)


class ScriptedNode:
    """A TCP server on loopback that follows scripts; a context manager that checks them at its end.

    Args:
        scripts: the steps of connection 0, of connection 1, and so on.
        answer: answers the commands on all further connections; default None: another connection is an error.
        background: answers some commands (where it does not return None) so that no script sees them, for
            example ``handshake``; default None. They are recorded all the same.
        timeout: seconds (x SLACK) that a step waits for its command or event; default 5.

    Attributes:
        url: its address. ``host`` and ``port``: the same in parts.
        peers: the server's side of each connection so far.
    """

    def __init__(
        self,
        *scripts: Iterable[Step],
        answer: Answer | None = None,
        background: Answer | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.background = background
        self.timeout = timeout * SLACK
        self.closing = threading.Event()
        self.peers: list[Peer] = []
        self._scripts = [list(script) for script in scripts]
        self._answer = answer
        self._received: list[Received] = []
        self._errors: list[str] = []
        self._finished = 0
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._listener = self._listen()
        self.host, self.port = self._listener.getsockname()
        self.url = f"redis://{self.host}:{self.port}"
        self._acceptor = threading.Thread(target=self._accept, name=f"scripted node {self.port}", daemon=True)
        self._acceptor.start()

    @staticmethod
    def _listen() -> socket.socket:
        for port in ports:
            try:
                return socket.create_server(("127.0.0.1", port), backlog=128)
            except OSError:  # somebody else has it
                continue
        raise OSError("no port is left")

    def received(self, name: str | None = None) -> list[Received]:
        """The commands so far in the order of their arrival, all or those of one name (any case)."""
        with self._changed:
            return [one for one in self._received if name is None or one.name == name.upper()]

    def check(self) -> None:
        """Wait until all scripts have ended; ScriptError if one did not, or not as written."""
        with self._changed:
            patience = self.timeout + SLACK  # a step that is overdue shall say so itself
            self._changed.wait_for(lambda: self._errors or self._finished == len(self._scripts), patience)
            errors = list(self._errors)
            if not errors and self._finished < len(self._scripts):
                ended, all_of_them = self._finished, len(self._scripts)
                errors = [f"{ended} of {all_of_them} scripts ended; connections so far: {len(self.peers)}"]
        if errors:
            raise ScriptError("\n".join(errors))

    def close(self) -> None:
        """End all connections and threads; does not check."""
        if self.closing.is_set():
            return
        self.closing.set()
        socket.create_connection((self.host, self.port)).close()  # wakes the acceptor
        self._acceptor.join()
        self._listener.close()
        for peer in self.peers:
            peer.hang_up()  # wakes its thread
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} does not end: is an answer function still waiting?"

    def __enter__(self) -> ScriptedNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def _record(self, received: Received) -> None:
        with self._changed:
            self._received.append(received)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self.closing.is_set():
                connection.close()
                return
            peer = Peer(self, len(self.peers), connection)
            self.peers.append(peer)
            name = f"{self._acceptor.name}, connection {peer.number}"
            thread = threading.Thread(target=self._converse, args=(peer,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _converse(self, peer: Peer) -> None:
        scripted = peer.number < len(self._scripts)
        error = None
        try:
            if scripted:
                self._follow(peer, self._scripts[peer.number])
            elif self._answer is not None:
                serve(self._answer).run(peer)
            else:
                raise ScriptError(f"unexpected: there are scripts for {len(self._scripts)} connections")
        except Exception as problem:
            error = f"connection {peer.number}: {problem}"
            if not isinstance(problem, ScriptError):
                error = f"connection {peer.number}: {type(problem).__name__}: {problem}"
        with self._changed:
            if error is not None and not self.closing.is_set():
                self._errors.append(error)
            self._finished += scripted
            self._changed.notify_all()
        if error is not None:
            peer.reset()
        elif scripted:
            self._await_end(peer)
        peer._close()

    def _follow(self, peer: Peer, script: list[Step]) -> None:
        for number, step in enumerate(script, 1):
            try:
                step.run(peer)
            except (ScriptError, ProtocolError, OSError) as problem:
                what = str(problem) or type(problem).__name__
                raise ScriptError(f"step {number} of {len(script)}, {step.text}: {what}") from problem

    def _await_end(self, peer: Peer) -> None:
        """After its script a connection stays open until the client ends it, and nothing more may come."""
        try:
            found = peer.read_command(None)
        except OSError:
            return
        if found is not None:
            with self._changed:
                self._errors.append(f"connection {peer.number}: after the end of its script: {found[0]!r}")
            peer.reset()
