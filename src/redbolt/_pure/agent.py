"""The agent: the one background thread of a process, which looks after what no round is there for.

It sleeps until the earliest moment that some ward has named, or until something happens; with nothing
outstanding it sleeps for good. It is a daemon: it never keeps the interpreter from ending.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Final, Protocol

from redbolt import _clock, _process

__all__ = ["AGENT", "NEVER", "Agent", "Ward"]

NEVER: Final = 1 << 62
_LONGEST_MS = 1 << 30
_PAUSE_S = 0.1  # after an error, which must not come back at once

_log = logging.getLogger("redbolt")


class Ward(Protocol):
    """What the agent looks after."""

    due_ns: int
    """When it wants to be looked after next; NEVER if nothing is outstanding."""
    watched: dict[int, int]
    """Descriptors and events for which it wants to be looked after earlier."""

    def look_after(self) -> None:
        """Do what can be done now, and name the next moment and the descriptors."""


class Agent:
    """There is one, `AGENT`."""

    def __init__(self) -> None:
        self._on_offset_set = False
        self.reset()

    def reset(self) -> None:
        """Begin without a thread."""
        self.wake_ns = NEVER  # when it will look around by itself: 0 while it does
        self._pipe: list[tuple[int, int]] = []
        self._only_one = threading.Lock()  # held by the thread as long as it lives
        self._wards: dict[Ward, None] = {}
        self.ident = 0  # the thread, once it runs
        self._ready: set[int] = set()  # descriptors that something has happened to

    def after_fork(self) -> None:
        """The child has none of it."""
        for ends in self._pipe:
            for fd in ends:
                os.close(fd)
        self.reset()

    def due(self, ward: Ward, when_ns: int) -> None:
        """See to it that the ward is looked after at that moment, or earlier."""
        if when_ns < ward.due_ns:
            ward.due_ns = when_ns
        self._wards[ward] = None
        if when_ns < self.wake_ns:
            self.wake()

    def wake(self) -> None:
        """Make it look around now."""
        if not self._only_one.locked() and not self._start():
            return
        for _, writer in self._pipe:
            try:
                os.write(writer, b"\0")
            except OSError:
                pass  # full, so it is awake already

    def _start(self) -> bool:
        if _process.is_subinterpreter():
            return False  # its end would be fatal to the whole process if this thread still ran
        if not self._on_offset_set:
            self._on_offset_set = True
            _clock.on_offset(self._on_offset)
        try:
            threading.Thread(target=self._run, name="redbolt-agent", daemon=True).start()
        except RuntimeError:  # at the end of the interpreter, or where it allows no such thread
            return False
        return True

    def _on_offset(self, offset_ns: int) -> None:
        if self._only_one.locked():
            self.wake()

    def _run(self) -> None:
        if not self._only_one.acquire(blocking=False):
            return
        self.ident = threading.get_ident()
        reader, writer = ends = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._pipe.append(ends)
        generation = _process.generation
        while generation == _process.generation:
            try:
                self._look_around()
                self._sleep(reader)
            except BaseException:
                _log.exception("the agent goes on after an error")
                time.sleep(_PAUSE_S)

    def _look_around(self) -> None:
        self.wake_ns = 0
        now = _clock.now_ns()
        for ward in list(self._wards):
            if ward.due_ns > now and self._ready.isdisjoint(ward.watched):
                continue  # it may have been named to set the alarm for later
            ward.due_ns = NEVER
            ward.watched = {}
            try:
                ward.look_after()
            except BaseException:
                _log.exception("the agent goes on after an error")
                ward.due_ns = min(ward.due_ns, _clock.now_ns() + int(_PAUSE_S * 1e9))
            if ward.due_ns == NEVER and not ward.watched:
                self._wards.pop(ward, None)
                if ward.due_ns != NEVER:  # somebody came in between
                    self._wards[ward] = None

    def _sleep(self, reader: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        for ward in list(self._wards):
            for fd, events in ward.watched.items():
                poll.register(fd, events)
        self.wake_ns = self._next_due()
        next_ns = self._next_due()  # whoever named a moment before that line did not wake us
        timeout: int | None = None
        if next_ns < NEVER:
            timeout = min(max(0, -((_clock.now_ns() - next_ns) // 1_000_000)), _LONGEST_MS)
        self._ready = {fd for fd, _ in poll.poll(timeout)}
        if reader in self._ready:
            try:
                os.read(reader, 4096)
            except BlockingIOError:
                pass

    def _next_due(self) -> int:
        return min([ward.due_ns for ward in list(self._wards)], default=NEVER)


AGENT = Agent()
_process.on_fork(AGENT.after_fork)
