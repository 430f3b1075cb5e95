"""Rounds of an engine in one line each, and answers by command name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

import redbolt
from redbolt._engine import Engine, Votes
from redbolt._judge import drift_ns
from redbolt._programs import Program

from .clients import SLACK
from .steps import Answer, Argv, Step

T = TypeVar("T")

KEY = b"name"
TOKEN = b"token"
LIMIT = 2.0  # seconds: for rounds that are answered; long enough never to matter

Reply = bytes | Step | Callable[[Argv], bytes | Step | None] | None


def attempt(
    engine: Engine,
    key: bytes = KEY,
    token: bytes | None = TOKEN,
    *,
    lease: float = 10.0,
    quorum: int | None = None,
    limit: float = LIMIT,
) -> Votes:
    """One try of a lock, with times in seconds (``limit`` x SLACK), and by default a majority."""
    votes = engine.votes()
    lease_ms = round(lease * 1000)
    needed = len(engine.nodes) // 2 + 1 if quorum is None else quorum
    engine.attempt(votes, key, token, lease_ms, needed, drift_ns(lease_ms, 0.01), int(limit * SLACK * 1e9))
    return votes


def ask(
    engine: Engine,
    program: Program,
    *args: bytes,
    key: bytes = KEY,
    quorum: int | None = None,
    limit: float = LIMIT,
) -> Votes:
    """One round of ``program``, likewise."""
    votes = engine.votes()
    needed = len(engine.nodes) // 2 + 1 if quorum is None else quorum
    engine.round(votes, program, key, args, needed, int(limit * SLACK * 1e9))
    return votes


def causes(votes: Votes) -> list[str]:
    """The text that each node's vote came with."""
    return [text for _, text in votes.outcomes()]


def said(votes: Votes) -> list[int]:
    """Each node's vote: OPEN, YES, NO or FAULT."""
    return [vote for vote, _ in votes.outcomes()]


def by_name(**replies: Reply) -> Answer:
    """An ``Answer`` that looks the command's name up; whatever else comes gets ``:0``.

    A reply is bytes, a step, None for silence, or a function of the arguments.
    """

    def answer(argv: Argv) -> bytes | Step | None:
        reply = replies.get(argv[0].decode().upper(), b":0\r\n")
        return reply(argv) if callable(reply) else reply

    return answer


def anew(cases: Iterable[T]) -> Iterator[T]:
    """The cases, each with new engines: a node may get the port that the one before it had."""
    for case in cases:
        redbolt.close()
        yield case


class InBackground(threading.Thread, Generic[T]):
    """A call in another thread: ``InBackground(lambda: ...).result()``."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: Future[T] = Future()
        self.start()

    def run(self) -> None:
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:
            self._outcome.set_exception(error)

    def result(self, timeout: float = 10.0) -> T:
        """What the call returned or raised; a TimeoutError if it does not end within ``timeout`` x SLACK."""
        result = self._outcome.result(timeout * SLACK)
        self.join()
        return result
