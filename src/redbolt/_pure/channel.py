"""A channel: one connection to each node, used by one thread for one round at a time, and one poll over all of them."""

from __future__ import annotations

import select
import threading

from redbolt._pure.connection import READY, Connection, Task

__all__ = ["Channel"]


class Channel:
    """Whoever puts itself down as ``owner`` may use it; None while it is idle."""

    __slots__ = ("by_fd", "conns", "lock", "owner", "poll", "unfinished", "used_ns")

    def __init__(self, nodes: int, owner: Task | None, now: int) -> None:
        self.owner = owner
        self.used_ns = now
        self.unfinished = False  # what `is_unfinished` said when it was used last
        self.conns: list[Connection | None] = [None] * nodes
        self.poll = select.poll()
        self.by_fd: dict[int, Connection] = {}
        self.lock = threading.RLock()  # of the sending side; can be taken off a thread that was interrupted

    def track(self, conn: Connection) -> None:
        """Make the poll wait for what the connection waits for."""
        events = conn.interest()
        wanted = (conn.fd, events) if events else (-1, 0)
        known = conn.polled
        if wanted == known:
            return
        if known[0] not in (-1, wanted[0]):
            self._forget(known[0])
        if wanted[0] != -1:
            self.by_fd[wanted[0]] = conn
            self.poll.register(*wanted)
        conn.polled = wanted

    def untrack(self, conn: Connection) -> None:
        """Wait for nothing of this connection any more; to be called before its descriptor is closed."""
        if conn.polled[0] != -1:
            self._forget(conn.polled[0])
            conn.polled = (-1, 0)

    def _forget(self, fd: int) -> None:
        self.by_fd.pop(fd, None)
        try:
            self.poll.unregister(fd)
        except (KeyError, ValueError):
            pass

    def is_unfinished(self) -> bool:
        """Say whether some reply, or a connection, is still to come."""
        for conn in self.conns:
            if conn is not None and (conn.slots or conn.state != READY):
                return True
        return False

    def overdue(self, now: int) -> bool:
        """Say whether a node should have answered by now."""
        for conn in self.conns:
            if conn is not None and (conn.slots or conn.state != READY) and conn.due_ns() <= now:
                return True
        return False
