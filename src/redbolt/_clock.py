"""The one clock of the library: nanoseconds that also count while the machine is suspended."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from redbolt import _process

__all__ = ["now_ns", "nudge", "on_offset", "set_offset_ns", "sleep_until"]

if hasattr(time, "CLOCK_BOOTTIME"):
    _CLOCK_ID = time.CLOCK_BOOTTIME
elif sys.platform == "darwin":  # CLOCK_MONOTONIC stops with the machine there, CLOCK_MONOTONIC_RAW does not
    _CLOCK_ID = time.CLOCK_MONOTONIC_RAW
else:
    _CLOCK_ID = time.CLOCK_MONOTONIC

_gettime_ns = time.clock_gettime_ns
_offset_ns = 0
_moved = threading.Condition()
_hooks: list[Callable[[int], None]] = []


def now_ns() -> int:
    """The time now, in nanoseconds since some fixed moment before the start of the program."""
    return _gettime_ns(_CLOCK_ID) + _offset_ns


def set_offset_ns(offset_ns: int) -> None:
    """Move the clock for tests: every later reading is ``offset_ns`` after the real one. Wakes all who
    sleep on it.
    """
    global _offset_ns
    with _moved:
        _offset_ns = offset_ns
        for hook in _hooks:
            hook(offset_ns)
        _moved.notify_all()


def on_offset(hook: Callable[[int], None]) -> None:
    """Call ``hook(offset_ns)`` now and whenever the offset changes (an engine that reads the clock itself,
    or has timers).
    """
    with _moved:
        _hooks.append(hook)
        hook(_offset_ns)


def sleep_until(deadline_ns: int, unless: Callable[[], bool] | None = None) -> None:
    """Sleep until the clock reads ``deadline_ns`` or later, or until ``unless()`` after a `nudge`."""
    with _moved:
        while (left := deadline_ns - now_ns()) > 0 and not (unless is not None and unless()):
            _moved.wait(min(left / 1e9, threading.TIMEOUT_MAX))


def nudge() -> None:
    """Have all who sleep look again."""
    with _moved:
        _moved.notify_all()


def _after_fork() -> None:
    global _moved
    _moved = threading.Condition()  # the old one may be held by a thread that the child does not have


_process.on_fork(_after_fork)
