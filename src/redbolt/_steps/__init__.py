"""The algorithms that wait or loop, once, for threads and asyncio alike: generators that yield steps and
do no I/O.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from redbolt._engine import Votes
from redbolt._programs import Program

__all__ = ["Ask", "Sleep", "Step", "Target", "Try"]


class Target(NamedTuple):
    """What a lock asks for: the part of a try that stays the same."""

    key: bytes
    lease_ms: int
    quorum: int
    drift_ns: int
    limit_ns: int


class Try(NamedTuple):
    """Try once to take the lock; ``votes`` tells what came of it."""

    votes: Votes
    arguments: tuple[bytes, bytes | None, int, int, int, int]


class Ask(NamedTuple):
    """Run a program on all nodes; ``votes`` tells what came of it."""

    votes: Votes
    program: Program
    key: bytes
    args: tuple[bytes, ...]
    quorum: int
    limit_ns: int
    touched: int = -1


class Sleep(NamedTuple):
    """Do nothing until the clock reads ``until_ns``."""

    until_ns: int


Step: TypeAlias = Try | Ask | Sleep
