"""A channel: one connection to each node, used by one thread for one round at a time; one poll for all."""

from __future__ import annotations

import itertools
import os
import select
import threading
from collections import deque

from redbolt._engine import CHANGED, LIFE_TOLD, Event
from redbolt._pure.connection import (
    READY,
    Connection,
)
from redbolt._pure.task import Task

__all__ = ["Channel"]

_MOST_EVENTS = 256


class Channel:
    """Whose task is put down as ``owner`` may use it; it is None while the channel is idle."""

    __slots__ = (
        "_ends", "_writer", "by_fd", "conns", "events", "lock", "mail", "owner", "poll", "tracking",
        "unfinished", "used_ns",
    )  # fmt: skip

    def __init__(self, nodes: int, owner: Task | None, now: int, tracking: bool | None = None) -> None:
        self.owner = owner
        self.tracking = tracking  # the kind of watch that it is for; None: it is for rounds
        self.events: deque[Event] | None = None  # what the watch that uses it has not fetched yet
        self._ends: list[tuple[int, int]] = []  # the pipe that ends its wait
        self._writer = -1  # its other end, once it can be used
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

    # ---- for watches ----

    @property
    def held(self) -> bool:
        """Whether a watch has it, for as long as it likes."""
        return self.tracking is not None and self.owner is not None

    def tell(self, what: int, index: int, mark: int = 0, value: int = 0) -> None:
        """Note an event for the watch that has it, if one does."""
        events = self.events
        if events is None:
            return
        if len(events) >= _MOST_EVENTS:
            self._condense(events)
        events.append((what, index, mark, value))

    def _condense(self, events: deque[Event]) -> None:
        """Let a change of any key stand for all that was told of keys."""
        states: dict[int, Event] = {}
        changes: dict[int, Event] = {}
        for event in events:
            what, index, _, _ = event
            if what in (CHANGED, LIFE_TOLD):
                changes[index] = (CHANGED, index, 0, 0)
            else:
                states[index] = event
        events.clear()
        events.extend(states.values())
        events.extend(changes.values())

    def hear(self) -> int:
        """Have `nudge` end the next poll, too. The descriptor that tells of it."""
        if not self._ends:
            self._ends.extend(itertools.starmap(os.pipe, ((),)))  # in one call, which nothing interrupts
        reader, writer = self._ends[0]
        if self._writer == -1:
            os.set_blocking(reader, False)
            os.set_blocking(writer, False)
            self._writer = writer
        self.poll.register(reader, select.POLLIN)
        return reader

    def unhear(self) -> None:
        """The same no more."""
        for reader, _ in self._ends:
            self._forget(reader)

    def nudge(self) -> None:
        """Have whoever waits on it look around. May be called by any thread."""
        if self._writer != -1:
            with self.lock:
                if self._writer != -1:
                    try:
                        os.write(self._writer, b"\0")
                    except OSError:
                        pass  # full, so it is awake already

    def end_nudges(self) -> bool:
        """Let nobody nudge it any more. Whether there is a pipe to `shut`."""
        with self.lock:
            self._writer = -1
        return bool(self._ends)

    def shut(self) -> None:
        """Close the pipe. The agent does it, or a forked child: an interrupt might leave a half of it."""
        while self._ends:
            for end in self._ends.pop():
                os.close(end)

    # ---- what is open on it ----

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
