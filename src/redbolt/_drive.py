"""The driver of steps for threads: it performs what an algorithm asks for, and hands back what came of it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from redbolt._clock import sleep_until
from redbolt._engine import Engine
from redbolt._steps import Ask, Sleep, Step, Try

__all__ = ["run"]

T = TypeVar("T")


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
