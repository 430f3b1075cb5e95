"""A channel: one connection to each node, used by one thread for one round at a time; one poll for all."""

from __future__ import annotations

import select
import threading
from collections import deque

from redbolt._pure.connection import (
    READY,
    Connection,
)
from redbolt._pure.task import Task

__all__ = ["Channel"]


class Channel:
    """Whose task is put down as ``owner`` may use it; it is None while the channel is idle."""

    __slots__ = ("by_fd", "conns", "lock", "mail", "owner", "poll", "unfinished", "used_ns")

    def __init__(self, nodes: int, owner: Task | None, now: int) -> None:
        self.owner = owner
        self.used_ns = now
        self.unfinished = False  # whether `is_unfinished` may hold, while it is idle
        self.conns: list[Connection | None] = [None] * nodes
        self.mail: deque[tuple[int, Task]] = deque()
        """Commands, each with its node, that others want sent behind an unanswered one of their token."""
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
        for conn in self.conns:  # noqa: SIM110 - a generator takes twice as long
            if conn is not None and (conn.slots or conn.state != READY):
                return True
        return False

    def may_fall_back(self) -> bool:
        """Say whether a node that answers may want some unanswered write in another form."""
        for conn in self.conns:
            if conn is not None and conn.doubtful and not conn.site.suspect and conn.may_fall_back():
                return True
        return False

    def is_overdue(self, now: int) -> bool:
        """Say whether a node should have answered by now, or if it is suspect already, be given up by now."""
        for conn in self.conns:
            if conn is not None and conn.awaits():
                due_ns = conn.replace_ns() if conn.site.suspect else conn.due_ns()
                if due_ns <= now:
                    return True
        return False

    def writes(self, index: int, token: bytes) -> bool:
        """Say whether the round that uses the channel has still to write the token on a node."""
        owner = self.owner
        return (
            owner is not None
            and owner.token == token
            and owner.plan.writes
            and owner.answers[index] is None
            and owner.written[index] is None
        )

    def holds(self, index: int, token: bytes) -> bool:
        """Say whether a write of the token on a node is unanswered here, or about to be made."""
        conn = self.conns[index]
        return (
            (conn is not None and conn.holds(token))
            or self.writes(index, token)
            or any(where == index and task.token == token for where, task in self.mail.copy())
        )
