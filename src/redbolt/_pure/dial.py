"""Connections that only a client's own class can make: on helper threads, and then handed over.

The class does all of the beginning (name, TLS, credentials, HELLO, SELECT) in its own blocking way, so
threads that nobody joins do it. Afterwards its socket is read and written like any other; the connection
object is only kept alive.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from redbolt import _process
from redbolt._dialer import Dialer
from redbolt._pure.tls import TlsSocket
from redbolt.node import Node

__all__ = ["Dial", "Dialing"]

_MOST_AT_ONCE = 4  # threads per node
_LONGEST = 10.0  # seconds that a client's own timeouts may have
_MOST_TEXT = 200
_OPEN = {"OSError", "RedisError", "ValkeyError"}  # errors whose text may be told
_ELSEWHERE = {"AuthenticationError", "TimeoutError", "MaxConnectionsError"}  # such are not about HELLO

_all: weakref.WeakSet[Dialing] = weakref.WeakSet()
_inherited: list[socket.socket] = []


class Dial:
    """One connection that is being made. ``socket`` is there once it is ``done``, or else ``cause``."""

    __slots__ = ("_unwanted", "cause", "connection", "done", "socket", "thread")

    def __init__(self) -> None:
        self.done = False
        self.cause = ""
        self.connection: Any = None  # lives as long as its socket is used
        self.socket: Any = None
        self.thread = 0  # that makes it
        self._unwanted = False

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._unwanted

    def give(self, sock: Any) -> None:
        """Hand over its socket; it is closed if it comes too late."""
        self.socket = sock
        if self._unwanted:
            self.drop()

    def drop(self) -> None:
        """Close what it has made or will make. May be called by its thread and its owner at once."""
        self._unwanted = True
        if self.socket is not None:
            self.socket.close()
            self.connection = None

    __del__ = drop


class Dialing:
    """The dials of one node."""

    def __init__(self, node: Node, dialer: Dialer, on_done: Callable[[], None]) -> None:
        self._node = node
        self._dialer = dialer
        self._on_done = on_done
        self._speaks_3 = False
        self._says_hello = True
        self.after_fork()
        _all.add(self)

    def after_fork(self) -> None:
        """Forget threads that the child does not have."""
        self._queue: deque[Dial] = deque()
        self.workers: dict[object, Dial | None] = {}
        """The running threads, each with what it is making."""

    def begin(self) -> Dial:
        """Have a connection made, as soon as fewer than four others are under way."""
        dial, workers = Dial(), self.workers
        self._queue.append(dial)
        if len(workers) < _MOST_AT_ONCE:
            me = object()
            try:
                workers[me] = None
                threading.Thread(target=self._work, args=(me,), name="redbolt-dialer", daemon=True).start()
            except BaseException as error:
                workers.pop(me, None)
                if not isinstance(error, RuntimeError):
                    raise
                dial.cause, dial.done = str(error), True  # no thread can be started
        return dial

    def _work(self, me: object) -> None:
        queue, workers = self._queue, self.workers
        while True:
            workers[me] = None
            try:
                dial = queue.popleft()
            except IndexError:
                workers.pop(me, None)
                if not queue:  # whoever came before that line has counted on this thread
                    return
                continue
            if not dial.unwanted:
                dial.thread = threading.get_ident()
                workers[me] = dial
                self._make(dial)
                self._on_done()
            del dial

    def _make(self, dial: Dial) -> None:
        hello = self._says_hello
        try:
            try:
                self._connect(dial, hello)
            except Exception as error:
                names = _names(error)
                maybe = names & {"ConnectionError", "ResponseError"} and not names & _ELSEWHERE
                if not (maybe and hello and self._speaks_3):
                    raise
                self._connect_without(dial, error)
        except BaseException as error:
            dial.cause = self._told(error)
        dial.done = True

    def _connect_without(self, dial: Dial, first: Exception) -> None:
        """Try again without HELLO, which some servers and proxies do not know."""
        try:
            self._connect(dial, False)
            self._says_hello = False
        except Exception as second:
            raise second if "ResponseError" in _names(first) else first from None

    def _connect(self, dial: Dial, hello: bool) -> None:
        connection: Any = None
        try:
            connection = dial.connection = self._dialer.make()
            self._speaks_3 = str(getattr(connection, "protocol", None)) == "3"
            if self._speaks_3 and not hello:
                connection.protocol = 2
            for name in ("socket_timeout", "socket_connect_timeout"):
                own = getattr(connection, name, None)
                if own is None or own > _LONGEST:
                    setattr(connection, name, _LONGEST)
            connection.connect()
            sock = getattr(connection, "_sock", None)
            if not isinstance(sock, socket.socket):
                raise _Unfit(f"{self._dialer.name} has no socket that a lock can use")
            if _has_unread(connection):
                raise _Unfit(f"{self._dialer.name} has left something unread after connecting")
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            dial.give(TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else sock)
        except BaseException:
            dial.connection = None
            _hang_up(connection)
            raise

    def _told(self, error: BaseException) -> str:
        """What may be said of an error: its text only where nobody puts secrets into texts."""
        name, module = type(error).__name__, type(error).__module__.split(".")[0]
        if isinstance(error, _Unfit):
            return str(error)
        if module not in ("builtins", "redis", "socket", "ssl", "valkey") or not _names(error) & _OPEN:
            return f"{name} was raised by {self._dialer.name} while connecting"
        text = " ".join(self._node.scrubbed(str(error)).split())
        return f"{name}: {text[:_MOST_TEXT]}"


class _Unfit(Exception):
    """The connection class makes nothing that can be used."""


def _names(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}


def _has_unread(connection: Any) -> bool:
    """Say whether its parser has bytes that nobody has read, which the socket will not give again."""
    parser = getattr(connection, "_parser", None)
    has_data = getattr(getattr(parser, "_reader", None), "has_data", None)
    unread_bytes = getattr(getattr(parser, "_buffer", None), "unread_bytes", None)
    return bool((has_data is not None and has_data()) or (unread_bytes is not None and unread_bytes()))


def _hang_up(connection: Any) -> None:
    try:
        if connection is not None:
            connection.disconnect()
    except BaseException:
        pass  # it has failed already, and that is told


# ---- fork ----


def _before_fork() -> None:
    """Find the sockets that dials have opened and not handed over: nobody but their threads knows them."""
    dials = [dial for dialing in list(_all) for dial in list(dialing.workers.values()) if dial is not None]
    frames = sys._current_frames() if dials else {}
    for dial in dials:
        frame: FrameType | None = frames.get(dial.thread)
        while frame is not None:
            _inherited.extend(value for value in frame.f_locals.values() if isinstance(value, socket.socket))
            frame = frame.f_back


def _in_child() -> None:
    for sock in _inherited:
        sock.close()
    _inherited.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_inherited.clear)
_process.on_fork(_in_child)
