"""Steps, and the driver for threads: it performs what an algorithm asks for, and hands back the outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from redbolt._clock import sleep_until
from redbolt._engine import Attempt, Engine, Event, Gate, Votes
from redbolt._programs import PROGRAMS, SWAP, TAKE, Program

__all__ = ["Ask", "Ears", "Listen", "Sleep", "Step", "Target", "Try", "Wait", "run"]

T = TypeVar("T")
Arguments: TypeAlias = tuple[bytes, bytes | None, int, int, int, int, Program, tuple[bytes, ...]]


class Target(NamedTuple):
    """What a lock asks for: the part of a try that stays the same; see `redbolt._engine.Engine.attempt`.

    ``type`` is what the server calls the type of its key; ``fresh`` makes a token for each try, where the
    engine does not; ``swap`` hands the key from one token to the next; ``topic`` is the channel on which a
    release is published, if it is.
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
    swap: Program = SWAP
    topic: bytes = b""

    def arguments(self, token: bytes | None) -> Arguments:
        """The arguments of a try, behind its votes; ``token`` is the caller's own, or None."""
        if token is None and self.fresh is not None:
            token = self.fresh()
        return self.key, token, *self[1:7]

    def take_back(self, engine: Engine, token: bytes, touched: int) -> None:
        """Undo a try that was granted, and wait for nobody."""
        engine.discard(self.key, token, touched, PROGRAMS[self.program.undo], self.extra)


class Ears(Protocol):
    """What somebody who waits listens with, in the way of `redbolt._engine.Watch`."""

    @property
    def attempt(self) -> Callable[..., bool]: ...
    def arm(self, key: bytes, nodes: int, limit_ns: int, topic: bytes = b"") -> None: ...
    def wait(self, until_ns: int, attempt: Attempt | None = None) -> list[Event]: ...
    def poke(self) -> None: ...
    def close(self) -> None: ...


class Try(NamedTuple):
    """Try once to take the lock; ``votes`` tells what came of it. ``nodes`` are those to ask; with ``ears``
    they are also asked to tell of changes.
    """

    votes: Votes
    arguments: Arguments
    nodes: int = -1
    ears: Ears | None = None


class Ask(NamedTuple):
    """Run a program on all nodes; ``votes`` tells what came of it."""

    votes: Votes
    program: Program
    key: bytes
    args: tuple[bytes, ...]
    quorum: int
    limit_ns: int
    touched: int = -1


class Wait(NamedTuple):
    """Wait at a gate until somebody wakes it, or until the clock reads ``until_ns``."""

    gate: Gate
    until_ns: int


class Listen(NamedTuple):
    """Wait for events, until the clock reads ``until_ns``, or somebody pokes; the answer is a list of them.
    With an ``attempt``, that may be made as soon as the key has changed.
    """

    ears: Ears
    until_ns: int
    attempt: Attempt | None = None


class Sleep(NamedTuple):
    """Do nothing until the clock reads ``until_ns``."""

    until_ns: int


Step: TypeAlias = Try | Ask | Wait | Listen | Sleep


def run(steps: Generator[Step, Any, T], engine: Engine) -> T:
    """Run ``steps`` to their end in this thread.

    Whatever interrupts a step is thrown into the algorithm, so that it can take back what was sent.
    """
    try:
        step = next(steps)
        while True:
            try:
                outcome = _perform(step, engine)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _perform(step: Step, engine: Engine) -> object:
    if isinstance(step, Wait):
        return step.gate.wait(step.until_ns)
    if isinstance(step, Try):
        ears = step.ears or engine
        return ears.attempt(step.votes, *step.arguments, step.nodes)
    if isinstance(step, Listen):
        return step.ears.wait(step.until_ns, step.attempt)
    if isinstance(step, Ask):
        return engine.round(*step)  # type: ignore[func-returns-value]
    return sleep_until(step.until_ns)  # type: ignore[func-returns-value]
