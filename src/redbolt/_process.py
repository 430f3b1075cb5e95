"""What belongs to one process and must not survive a fork: its generation, and the numbers of lock owners."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Hashable

__all__ = ["client_id", "generation", "number", "owner"]

generation = 0
"""Grows by one in every forked child, so that whoever remembers it knows that it was born in another
process.
"""

_numbers = itertools.count(1)
_client_ids: dict[Hashable, bytes] = {}


class _Owner(threading.local):
    def __init__(self) -> None:
        self.number = next(_numbers)


_owner = _Owner()


def owner() -> int:
    """A number for the calling thread that no other thread ever gets (thread ids are used again)."""
    return _owner.number


number: Callable[[], int] = _numbers.__next__
"""Gives numbers that this process never uses again."""


def client_id(nodes: Hashable) -> bytes:
    """The id under which this process holds locks on these nodes: a random UUID, made once."""
    known = _client_ids.get(nodes)
    return known or _client_ids.setdefault(nodes, str(uuid.uuid4()).encode())


def _after_fork() -> None:
    global generation, _owner
    generation += 1
    _owner = _Owner()
    _client_ids.clear()


os.register_at_fork(after_in_child=_after_fork)
