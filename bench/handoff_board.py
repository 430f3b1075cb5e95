"""Where the two contenders of ``python -m bench handoff`` tell each other whose turn it is.

A lock is passed to and fro in numbered turns: contender 0 holds it in the even ones, contender 1 in the odd
ones. Nobody asks for a turn before the other one holds the turn before it, so a library that lets the last
holder win again cannot do so here; and nobody releases before the other one waits.

The board is a file mapped by both processes: numbers of 64 bits, each written by one contender at a
time, what counts after what it is about. Also C and Node read it: `handoff.c`, `peers/handoff_worker.js`.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["CELLS", "JITTER", "WAITS_NS", "Board", "asleep"]

HELD, ASKED, ASKED_NS, WAITER, RELEASED, RELEASED_NS, LAST, UNTIL_NS, JITTER_NS = range(9)
CELLS = 9

WAITS_NS = 3_000_000
"""So long after it has asked a contender waits, if it also sleeps."""
JITTER = 0.002
"""The longest time for which the lock is held beyond that, if not told otherwise."""
PAUSE = 0.002
"""Seconds after a release in which the other one is left alone."""
PATIENCE = 30.0

_clock = time.monotonic_ns


def asleep(thread: int) -> bool:
    """Whether a thread, of any process, is neither running nor ready to run; True where one cannot see."""
    try:
        stat = Path(f"/proc/{thread}/stat").read_bytes()
    except FileNotFoundError:
        return not os.path.exists("/proc/self/stat")
    return stat[stat.rindex(b")") + 2 :][:1] == b"S"


class Board:
    """The board in a file; every contender opens it."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 8 * CELLS)
        self._cells = memoryview(self.map).cast("q")

    @classmethod
    def create(cls) -> Board:
        """A new one; in memory, where there is a file system for that."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        number, path = tempfile.mkstemp(prefix="redbolt-bench-", dir=folder)
        try:
            os.truncate(number, 8 * CELLS)
        finally:
            os.close(number)
        return cls(path)

    def remove(self) -> None:
        """Remove the file; whoever has opened it keeps it."""
        Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._cells.release()
        self.map.close()

    def begin(self, hand_offs: int, until_ns: int, jitter: float = JITTER) -> None:
        """Clear the board for so many hand-offs, or fewer if it takes longer."""
        for cell in (HELD, ASKED, RELEASED):
            self._cells[cell] = -1
        self._cells[LAST] = hand_offs
        self._cells[UNTIL_NS] = until_ns
        self._cells[JITTER_NS] = int(jitter * 1e9)

    @property
    def last(self) -> int:
        """The turn after whose release nobody asks any more."""
        return self._cells[LAST]

    # ---- of the one who waits ----

    def ask(self, turn: int) -> None:
        """Wait until the other one holds the turn before, and say that we are about to acquire."""
        self._until(lambda: self._cells[HELD] >= turn - 1, 0.001)
        self._cells[WAITER] = threading.get_native_id()
        self._cells[ASKED_NS] = _clock()
        self._cells[ASKED] = turn

    def hold(self, turn: int, now_ns: int) -> int:
        """Say that we hold a turn since then, and return how long ago the other one released.

        Raises:
            RuntimeError: it has not.
        """
        took_ns = 0
        if turn:
            took_ns = now_ns - self._cells[RELEASED_NS]
            if self._cells[RELEASED] != turn - 1 or took_ns < 0:
                raise RuntimeError("two held the lock at once")
            if self._cells[RELEASED_NS] - self._cells[ASKED_NS] < WAITS_NS:
                raise RuntimeError("it was released before the other one waited")
        self._cells[HELD] = turn
        return took_ns

    # ---- of the one who holds ----

    def await_waiter(self, turn: int) -> None:
        """Hold our turn until the other one surely waits, and a little longer."""
        if turn >= self.last:
            return
        self._until(lambda: self._waits(turn + 1), 0.0005)
        if _clock() > self._cells[UNTIL_NS]:
            self._cells[LAST] = turn + 1
        time.sleep(self._cells[JITTER_NS] / 1e9 * random.random())

    def release(self, turn: int) -> None:
        """Say that we are about to release our turn."""
        self._cells[RELEASED_NS] = _clock()
        self._cells[RELEASED] = turn

    def _waits(self, turn: int) -> bool:
        cells = self._cells
        return cells[ASKED] == turn and _clock() - cells[ASKED_NS] >= WAITS_NS and asleep(cells[WAITER])

    def _until(self, condition: Callable[[], bool], look: float) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"the other contender is gone: {[*self._cells]}")
            time.sleep(look)
