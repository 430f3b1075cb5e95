"""A TCP proxy in front of a server, with faults that a test switches on and off while connections are open.

    with FaultProxy(nodes[0]) as proxy:
        proxy.drop_reply("SET")  # the server runs the next SET, its reply never arrives
        ...
        proxy.heal()

One thread does everything; a call that sets a fault returns when the fault is in force.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Literal, Self

from .clients import HasAddress
from .link import Flow, Link, Mark, ReplyFault
from .ports import ports

Direction = Literal["up", "down", "both"]
"""Up is from the client to the server, down is from the server to the client."""

_RETRY = 0.001  # seconds until a full socket is tried again
_CUT_PAUSE = 0.005  # seconds from the last byte of a cut reply to the reset: the client shall read that byte


class FaultProxy:
    """A TCP proxy on loopback; healthy until told otherwise.

    Args:
        upstream: where the server is: a LocalNode or ScriptedNode, ``(host, port)``, or the path of a unix
            socket.

    Attributes:
        url: its address, with the credentials of the node it stands for. ``host`` and ``port``: in parts.
        connections: how many connections it has accepted so far.
        bytes_up, bytes_down: bytes passed on so far, to the server and to the client.
        replies_lost: replies that ``drop_reply`` and ``cut_reply`` have hit so far.
    """

    def __init__(self, upstream: HasAddress | tuple[str, int] | str) -> None:
        credentials = ""
        if isinstance(upstream, str | tuple):
            self._upstream: str | tuple[str, int] = upstream
        else:
            self._upstream = (upstream.host, upstream.port)
            head, at, _ = upstream.url.removeprefix("redis://").rpartition("@")
            credentials = head + at
        self.connections = self.bytes_up = self.bytes_down = self.replies_lost = 0
        self.host = "127.0.0.1"
        self._clear_faults()
        self._links: list[Link] = []
        self._calls: deque[tuple[Callable[[], object], Future[None]]] = deque()
        self._running = True
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        self._selector.register(self._ear, selectors.EVENT_READ, self._hear)
        self._listener: socket.socket | None = None
        self.port = self._listen_on_free_port()
        self.url = f"redis://{credentials}{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._run, name=f"fault proxy {self.port}", daemon=True)
        self._thread.start()

    # Faults. All of them last until ``heal()``, for connections old and new; those of a reply happen once.

    def delay(self, up: float = 0.0, down: float = 0.0) -> None:
        """Pass bytes on that many seconds after they came (as a longer wire would; nothing is reordered)."""
        self._call(lambda: self._delay.update(up=up, down=down))

    def slice(self, size: int, seconds: float, direction: Direction = "both") -> None:
        """Pass at most ``size`` bytes on at a time, and the next ones ``seconds`` later."""
        self._call(lambda: self._slice.update(dict.fromkeys(_each(direction), (size, seconds))))

    def hold(self, direction: Direction = "both") -> None:
        """Pass nothing on, but keep it for ``heal()``: a network that is cut for a while."""
        self._call(lambda: self._held.update(_each(direction)))

    def swallow(self, direction: Direction = "both") -> None:
        """Read everything and pass nothing on, not even the end: connections look open and stay silent."""
        self._call(lambda: self._swallowed.update(_each(direction)))

    def drop_reply(
        self, command: str | None = None, then: Literal["silence", "reset", "pass"] = "silence"
    ) -> None:
        """Lose the next reply of the server, which has run the command.

        Args:
            command: only a reply to this command (any case); default None: whatever the next reply is for.
            then: what the connection does after it: "silence" (default) loses everything that follows, too;
                "reset" ends it; "pass" goes on as if nothing were missing, which TCP never does.
        """
        fault = ReplyFault(command and command.upper(), 0, then)
        self._call(lambda: self._reply_faults.append(fault))

    def cut_reply(self, keep: int, command: str | None = None) -> None:
        """Pass on only the first ``keep`` bytes of the next reply (to ``command``, if given), then reset."""
        fault = ReplyFault(command and command.upper(), keep, "reset")
        self._call(lambda: self._reply_faults.append(fault))

    def reset_connections(self) -> None:
        """End all connections that are open now by RST, to both sides."""

        def reset() -> None:
            for link in list(self._links):
                self._reset(link)

        self._call(reset)

    def refuse(self) -> None:
        """Refuse new connections (the port is closed); those that are open stay."""
        self._call(self._stop_listening)

    def accept(self) -> None:
        """Take new connections again, on the same port."""
        self._call(self._listen)

    def heal(self) -> None:
        """End all faults and pass on what was held or delayed.

        A connection that has lost bytes is reset: no TCP connection goes on with a hole in it.
        """

        def heal() -> None:
            self._clear_faults()
            self._listen()
            for link in list(self._links):
                if link.lossy:
                    self._reset(link)
                for flow in (link.up, link.down):
                    flow.queue = deque((0.0, item) for _, item in flow.queue)
                    flow.not_before = 0.0

        self._call(heal)

    @property
    def open_connections(self) -> int:
        """How many connections are open now."""
        return len(self._links)

    def close(self) -> None:
        """End all connections and the thread, and free the port."""
        if self._running:
            self._running = False
            self._bell.send(b"!")
            self._thread.join()
            self._bell.close()
            self._ear.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The rest is called in the proxy's thread (and before it starts).

    def _clear_faults(self) -> None:
        self._delay: dict[str, float] = {"up": 0.0, "down": 0.0}
        self._slice: dict[str, tuple[int, float]] = {}
        self._held: set[str] = set()
        self._swallowed: set[str] = set()
        self._reply_faults: list[ReplyFault] = []

    def _call(self, change: Callable[[], object]) -> None:
        """Have the proxy's thread do ``change``, and wait for it."""
        if not self._thread.is_alive():
            raise RuntimeError("the proxy is closed, or its thread died")
        done: Future[None] = Future()
        self._calls.append((change, done))
        self._bell.send(b"!")
        done.result(10)

    def _run(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(self._idle_time()):
                    if self._selector.get_map().get(key.fd) == key:  # it may have been closed a moment ago
                        key.data()
                for link in list(self._links):
                    self._pass_on(link, link.up)
                    self._pass_on(link, link.down)
        finally:
            self._stop_listening()
            for link in list(self._links):
                self._close(link)
            self._selector.close()

    def _idle_time(self) -> float | None:
        """Seconds until the next bytes are due; None if there are none."""
        due = [
            max(flow.queue[0][0], flow.not_before)
            for link in self._links
            for flow in (link.up, link.down)
            if flow.queue and flow.direction not in self._held
        ]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _hear(self) -> None:
        self._ear.recv(4096)
        while self._calls:
            call, done = self._calls.popleft()
            try:
                call()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _listen_on_free_port(self) -> int:
        for port in ports:
            try:
                self.port = port
                self._listen()
            except OSError:
                continue
            return port
        raise OSError("no free port")

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server((self.host, self.port), backlog=128)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._connect)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _connect(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # the client has given up meanwhile
        self.connections += 1
        kind = socket.AF_UNIX if isinstance(self._upstream, str) else socket.AF_INET
        server = socket.socket(kind)
        server.settimeout(1)
        try:
            server.connect(self._upstream)
        except OSError:
            server.close()
            _close_with_reset(client)
            return
        for end in (client, server):
            end.setblocking(False)
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(client, server)
        self._links.append(link)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._read(link, link.up))
        self._selector.register(server, selectors.EVENT_READ, lambda: self._read(link, link.down))

    def _read(self, link: Link, flow: Flow) -> None:
        try:
            data = flow.source.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            self._add(link, flow, Mark.RESET)
            self._selector.unregister(flow.source)
            return
        if not data:
            self._selector.unregister(flow.source)
            if flow is link.down and flow.unparsed:
                self._add(link, flow, flow.unparsed)
            self._add(link, flow, Mark.END)
        elif flow is link.up:
            link.note_commands(data)
            self._add(link, flow, data)
        else:
            for command, part in link.take_replies(data):
                self._take_reply(link, command, part)

    def _take_reply(self, link: Link, command: str | None, reply: bytes) -> None:
        """Pass a reply on, unless it is to be lost; ``command`` is None for what is no reply (a push)."""
        faults = self._reply_faults if command is not None else []
        fault = next((one for one in faults if one.command in (None, command)), None)
        if fault is None:
            self._add(link, link.down, reply)
            return
        self._reply_faults.remove(fault)
        self.replies_lost += 1
        if fault.keep:
            self._add(link, link.down, reply[: fault.keep])
        if fault.then == "reset":
            self._add(link, link.down, Mark.RESET, _CUT_PAUSE if fault.keep else 0.0)
        link.lossy = True
        link.mute = fault.then != "pass"

    def _add(self, link: Link, flow: Flow, item: bytes | Mark, pause: float = 0.0) -> None:
        if flow.direction in self._swallowed or (link.mute and flow is link.down):
            link.lossy = True
            return
        due = time.monotonic() + self._delay[flow.direction] + pause
        if flow.queue:
            due = max(due, flow.queue[-1][0] + pause)
        flow.queue.append((due, item))

    def _pass_on(self, link: Link, flow: Flow) -> None:
        """Pass on what is due."""
        while link.open and flow.queue and flow.direction not in self._held:
            due, item = flow.queue[0]
            now = time.monotonic()
            if now < max(due, flow.not_before):
                return
            if item is Mark.RESET:
                self._reset(link)
            elif item is Mark.END:
                flow.queue.popleft()
                self._finish(link, flow)
            else:
                assert isinstance(item, bytes)
                size, seconds = self._slice.get(flow.direction, (len(item), 0.0))
                try:
                    sent = flow.sink.send(item[:size])
                except BlockingIOError:
                    flow.not_before = now + _RETRY
                    return
                except OSError:
                    self._reset(link)
                    return
                self._count(flow, sent)
                flow.queue.popleft()
                if sent < len(item):
                    flow.queue.appendleft((due, item[sent:]))
                flow.not_before = now + seconds

    def _count(self, flow: Flow, sent: int) -> None:
        if flow.direction == "up":
            self.bytes_up += sent
        else:
            self.bytes_down += sent

    def _finish(self, link: Link, flow: Flow) -> None:
        flow.finished = True
        if link.up.finished and link.down.finished:
            self._close(link)
            return
        try:
            flow.sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._reset(link)

    def _reset(self, link: Link) -> None:
        for end in (link.client, link.server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(link)

    def _close(self, link: Link) -> None:
        if link.open:
            link.open = False
            self._links.remove(link)
            for end in (link.client, link.server):
                if end in self._selector.get_map():
                    self._selector.unregister(end)
                end.close()


def _each(direction: Direction) -> tuple[str, ...]:
    return ("up", "down") if direction == "both" else (direction,)


def _close_with_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
