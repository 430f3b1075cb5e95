"""Where a thread waits for another one of its process."""

from __future__ import annotations

import threading

from redbolt._clock import now_ns

__all__ = ["Gate"]


class Gate:
    """See `redbolt._engine.Gate`: a lock that is taken while nobody has woken it."""

    __slots__ = ("_closed",)

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def wait(self, until_ns: int) -> bool:
        """Block until it is woken (True), or until the clock reads ``until_ns`` (False)."""
        left = until_ns - now_ns()
        if left <= 0:
            return self._closed.acquire(blocking=False)
        return self._closed.acquire(timeout=min(left / 1e9, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        """End the wait that runs, or else the next one."""
        try:
            self._closed.release()
        except RuntimeError:
            pass  # somebody else has done it
