"""From a node to socket addresses. A name server that hangs holds up nobody but the node that needs it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from redbolt import _process
from redbolt.node import Node

__all__ = ["Address", "LookUp", "Resolver"]

Address: TypeAlias = tuple[int, Any]
"""Family and socket address."""


class LookUp:
    """One question to the resolver; ``addresses`` stays empty where it failed."""

    __slots__ = ("addresses", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.addresses: list[Address] = []
        self.error = ""


class Resolver:
    """The addresses of one node: known at once, or else asked for by a thread that nobody joins."""

    def __init__(self, node: Node, on_done: Callable[[], None]) -> None:
        self._host = node.host
        self._port = node.port
        self._on_done = on_done
        self._asking: LookUp | None = None
        self._last: LookUp | None = None
        self._fixed = self._known_at_once(node)

    def addresses(self) -> LookUp:
        """What is known now, or a look-up that is under way."""
        if self._fixed is not None:
            return self._fixed
        if self._last is not None and self._last.addresses:
            return self._last
        return self._ask()

    def refresh(self) -> None:
        """Ask again in the background: none of the addresses led to a server."""
        if self._fixed is None:
            self._ask()

    def after_fork(self) -> None:
        """Forget a thread that the child does not have."""
        self._asking = None

    def _known_at_once(self, node: Node) -> LookUp | None:
        found = LookUp()
        found.done = True
        if node.path is not None:
            found.addresses = [(socket.AF_UNIX, node.path)]
            return found
        try:
            found.addresses = _ask_for(self._host, self._port, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
        except (OSError, UnicodeError):
            return None
        return found

    def _ask(self) -> LookUp:
        asking = self._asking
        if asking is None or asking.done:
            asking = LookUp()
            if _process.is_subinterpreter():  # it may have no threads, or must not leave one behind
                self._look_up(asking)
                return asking
            try:
                name = "redbolt-resolver"
                threading.Thread(target=self._look_up, args=(asking,), name=name, daemon=True).start()
                self._asking = asking  # only now: an interrupt before must not leave a question nobody asks
            except RuntimeError as error:  # no thread can be started
                asking.error = str(error)
                asking.done = True
        return asking

    def _look_up(self, asking: LookUp) -> None:
        try:
            asking.addresses = _ask_for(self._host, self._port, 0)
        except (OSError, UnicodeError) as error:
            asking.error = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._finish(asking)

    def _finish(self, asking: LookUp) -> None:
        if asking.addresses:
            self._last = asking
        asking.done = True
        self._on_done()


def _ask_for(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))
