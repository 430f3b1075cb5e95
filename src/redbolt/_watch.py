"""With what those listen who are first in line: a few have a watch of their own, all others share one, which
a thread of its own reads for them. So a thousand waiting threads hold a handful of connections.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from typing import Final

from redbolt import _process
from redbolt._drive import Ears
from redbolt._engine import LOST, Attempt, Engine, Event, Gate, Votes, Watch
from redbolt._programs import TAKE, Program

__all__ = ["MOST_OWN", "ears_for"]

MOST_OWN: Final = 4
"""How many watches of their own the waiters of one engine have."""
_NEVER: Final = (1 << 63) - 1

_log = logging.getLogger("redbolt")


class _Own:
    """A watch that one waiter has for itself. They are counted by who still refers to one."""

    __slots__ = ("__weakref__", "arm", "attempt", "close", "poke", "wait")

    def __init__(self, watch: Watch) -> None:
        self.attempt = watch.attempt
        self.arm = watch.arm
        self.wait = watch.wait
        self.poke = watch.poke
        self.close = watch.close


class _Shared:
    """One waiter's part in a watch that several share: its tries go out on ordinary channels, and the thread
    that reads the watch brings it its events.
    """

    __slots__ = ("__weakref__", "_board", "_gate", "_marks", "_news")

    def __init__(self, board: _Board, gate: Gate) -> None:
        self._board = board
        self._gate = gate
        self._news: deque[Event] = deque()
        self._marks: set[int] = set()

    def attempt(
        self,
        votes: Votes,
        key: bytes,
        token: bytes | None,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        program: Program = TAKE,
        extra: tuple[bytes, ...] = (),
        nodes: int = -1,
    ) -> bool:
        engine = self._board.engine
        if engine.attempt(votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra, nodes):
            return True
        self.arm(key, nodes, limit_ns)
        return False

    def arm(self, key: bytes, nodes: int, limit_ns: int, topic: bytes = b"") -> None:
        engine = self._board.engine
        for name in (key, topic):
            if name and (mark := engine.mark(name)) not in self._marks:
                self._marks.add(mark)
                self._board.enter(mark, self)
        self._board.ask(key, nodes & (1 << len(engine.nodes)) - 1, limit_ns, topic)

    def wait(self, until_ns: int, attempt: Attempt | None = None) -> list[Event]:
        if not self._news:
            self._gate.wait(until_ns)
        events = []
        while self._news:
            events.append(self._news.popleft())
        return events

    def tell(self, event: Event) -> None:
        self._news.append(event)
        self._gate.wake()

    def poke(self) -> None:
        self._gate.wake()

    def close(self) -> None:
        for mark in self._marks:
            self._board.exit(mark, self)


class _Board:
    """All ears of one engine, of one kind."""

    def __init__(self, engine: Engine, tracking: bool) -> None:
        self._engine = weakref.ref(engine)
        self._tracking = tracking
        self.own: weakref.WeakSet[_Own] = weakref.WeakSet()
        self._members: dict[int, list[_Shared]] = {}
        self._wishes: deque[tuple[bytes, int, int, bytes]] = deque()
        self._lock = threading.RLock()
        self._watch: Watch | None = None  # of the thread, while it runs

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None  # whoever waits holds it
        return engine

    def ears(self, gate: Gate) -> Ears:
        """Something to listen with, for the owner of a gate."""
        if len(self.own) < MOST_OWN:
            own = _Own(self.engine.watch(self._tracking))
            self.own.add(own)
            return own
        return _Shared(self, gate)

    def enter(self, mark: int, member: _Shared) -> None:
        """Bring a member the events of that mark, from now on."""
        with self._lock:
            self._members.setdefault(mark, []).append(member)
            if self._watch is None:
                self._watch = watch = self.engine.watch(self._tracking)
                thread = threading.Thread(target=self._run, args=(watch,), name="redbolt-watch", daemon=True)
                try:
                    thread.start()
                except BaseException:
                    self._watch = None
                    raise

    def exit(self, mark: int, member: _Shared) -> None:
        """And no more. The last one ends the thread."""
        with self._lock:
            members = self._members.get(mark, [])
            if member in members:
                members.remove(member)
            if not members:
                self._members.pop(mark, None)
            watch = self._watch
        if watch is not None and not self._members:
            watch.poke()

    def ask(self, key: bytes, nodes: int, limit_ns: int, topic: bytes) -> None:
        """Have nodes asked how long a key lives, and told to tell of its changes."""
        self._wishes.append((key, nodes, limit_ns, topic))
        watch = self._watch
        if watch is not None:
            watch.poke()

    def _run(self, watch: Watch) -> None:
        try:
            while True:
                with self._lock:
                    if not self._members or self._watch is not watch:
                        if self._watch is watch:
                            self._watch = None
                            self._wishes.clear()
                        return
                while self._wishes:
                    watch.arm(*self._wishes.popleft())
                for event in watch.wait(_NEVER):
                    self._deliver(event)
        except BaseException:
            _log.exception("nobody listens for those who wait; they poll")
            with self._lock:
                if self._watch is watch:
                    self._watch = None
            for index in range(len(self.engine.nodes)):
                self._deliver((LOST, index, 0, 1))
        finally:
            watch.close()

    def _deliver(self, event: Event) -> None:
        mark = event[2]
        if mark:
            members = list(self._members.get(mark, ()))
        else:
            members = list({member for several in list(self._members.values()) for member in several})
        for member in members:
            member.tell(event)


_boards: weakref.WeakKeyDictionary[Engine, dict[bool, _Board]] = weakref.WeakKeyDictionary()


def ears_for(engine: Engine, tracking: bool, gate: Gate) -> Ears:
    """Something to listen with on the nodes of an engine.

    Args:
        engine: whose nodes.
        tracking: by CLIENT TRACKING; else by channels.
        gate: where the listener waits.
    """
    boards = _boards.setdefault(engine, {})
    board = boards.get(tracking) or boards.setdefault(tracking, _Board(engine, tracking))
    return board.ears(gate)


def _after_fork() -> None:
    _boards.clear()


_process.on_fork(_after_fork)
