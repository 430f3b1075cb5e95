"""What belongs to one process and must not survive a fork: its generation, and the numbers of lock owners."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import uuid
from collections.abc import Callable, Hashable

__all__ = [
    "client_id",
    "forked",
    "generation",
    "is_subinterpreter",
    "is_unaware",
    "look",
    "number",
    "on_fork",
    "owner",
]

generation = 0
"""Grows by one in every forked child, so that whoever remembers it knows that it was born in another
process.
"""

_pid = os.getpid()
_getpid = os.getpid
_hooks: list[Callable[[], object]] = []
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


def on_fork(hook: Callable[[], object]) -> None:
    """Call ``hook()`` in every forked child, before it uses anything of ours."""
    _hooks.append(hook)


def look() -> None:
    """See whether this is a forked child that does not know it yet: who forks in C calls no hooks of
    Python's.
    """
    if _getpid() != _pid:
        forked()


def is_unaware() -> bool:
    """Whether this is a forked child that does not know it yet, for finalizers: those of what the parent's
    other threads had run first in a child, before any hook.
    """
    return _getpid() != _pid


def forked() -> None:
    """Begin anew, in a child."""
    global _pid, generation, _owner
    _pid = _getpid()
    generation += 1
    _owner = _Owner()
    _client_ids.clear()
    for hook in _hooks:
        hook()


@functools.cache
def is_subinterpreter() -> bool:
    """Whether this is not the main interpreter of the process."""
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    module = sys.modules.get(name)
    if module is None:
        try:
            module = __import__(name)
        except ImportError:
            return False
    main = module.get_main()
    current = module.get_current()
    if isinstance(main, tuple):  # 3.13: with where it comes from
        main, current = main[0], current[0]
    return bool(main != current)


os.register_at_fork(after_in_child=forked)
