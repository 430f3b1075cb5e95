"""Steps, and the driver for threads: it performs what an algorithm asks for, and hands back the outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

from redbolt._clock import sleep_until
from redbolt._engine import Engine, Votes
from redbolt._programs import PROGRAMS, TAKE, Program

__all__ = ["Ask", "Sleep", "Step", "Target", "Try", "run"]

T = TypeVar("T")
Arguments: TypeAlias = tuple[bytes, bytes | None, int, int, int, int, Program, tuple[bytes, ...]]


class Target(NamedTuple):
    """What a lock asks for: the part of a try that stays the same; see `redbolt._engine.Engine.attempt`.

    ``type`` is what the server calls the type of its key; ``fresh`` makes a token for each try, where the
    engine does not.
    """

    key: bytes
    lease_ms: int
    quorum: int
    drift_ns: int
    limit_ns: int
    program: Program = TAKE
    extra: tuple[bytes, ...] = ()
    type: str = "string"
    fresh: Callable[[], bytes] | None = None

    def arguments(self, token: bytes | None) -> Arguments:
        """The arguments of a try, behind its votes; ``token`` is the caller's own, or None."""
        if token is None and self.fresh is not None:
            token = self.fresh()
        return self.key, token, *self[1:7]

    def take_back(self, engine: Engine, token: bytes, touched: int) -> None:
        """Undo a try that was granted, and wait for nobody."""
        engine.discard(self.key, token, touched, PROGRAMS[self.program.undo], self.extra)


class Try(NamedTuple):
    """Try once to take the lock; ``votes`` tells what came of it."""

    votes: Votes
    arguments: Arguments


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


def run(steps: Generator[Step, None, T], engine: Engine) -> T:
    """Run ``steps`` to their end in this thread.

    Whatever interrupts a step is thrown into the algorithm, so that it can take back what was sent.
    """
    try:
        step = next(steps)
        while True:
            try:
                _perform(step, engine)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _perform(step: Step, engine: Engine) -> None:
    if isinstance(step, Sleep):
        sleep_until(step.until_ns)
    elif isinstance(step, Try):
        engine.attempt(step.votes, *step.arguments)
    elif isinstance(step, Ask):
        engine.round(*step)
