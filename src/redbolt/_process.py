"""What belongs to one process and must not survive a fork: its generation, and the numbers of lock owners."""

from __future__ import annotations

import itertools
import os
import threading

__all__ = ["generation", "owner"]

generation = 0
"""Grows by one in every forked child, so that whoever remembers it knows that it was born in another
process.
"""

_numbers = itertools.count(1)


class _Owner(threading.local):
    def __init__(self) -> None:
        self.number = next(_numbers)


_owner = _Owner()


def owner() -> int:
    """A number for the calling thread that no other thread ever gets (thread ids are used again)."""
    return _owner.number


def _after_fork() -> None:
    global generation, _owner
    generation += 1
    _owner = _Owner()


os.register_at_fork(after_in_child=_after_fork)
