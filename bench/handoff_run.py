"""A row of ``python -m bench handoff``: two contenders that pass one lock to and fro."""

from __future__ import annotations

import os
import select
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.handoff_board import JITTER, Board
from bench.peers import Process
from bench.runner import Slice

__all__ = ["BETWEEN", "Pair", "Program"]

ROOT = Path(__file__).parent.parent
GRACE = 90.0
"""Seconds that a slice may take longer than it was asked to: a contender waits for the other one for 30."""

BETWEEN: dict[str, list[list[int]]] = {"processes": [[0], [1]], "threads": [[0, 1]]}
"""The contenders of each process."""


def _own() -> tuple[list[str], dict[str, str]]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", "bench.handoff_worker"], {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Program:
    """What contends: a library and its options, and how its program is started; by default as this one.

    If the library ``polls``, its pause, or the middle of it, in seconds: then the lock is held for a random
    part of that. All held for the same short time, it would be released early in a pause every time.
    """

    library: str
    options: Mapping[str, Any] = field(default_factory=dict)
    polls: float = 0
    packages: Sequence[str] = ()
    started: tuple[list[str], dict[str, str]] = field(default_factory=_own)


class Pair:
    """Two contenders for one lock, in two processes or in two threads of one.

    Raises:
        ImportError: the library is not there, or cannot do what is wanted.
        Unavailable: its program does not start.
    """

    def __init__(self, name: str, program: Program, between: str, urls: Sequence[str], key: str) -> None:
        self.name = name
        self.gave_up = 0
        self._jitter = program.polls or JITTER
        command, env = program.started
        with ExitStack() as stack:
            self._board = stack.enter_context(closing(Board.create()))
            with ExitStack() as files:
                files.callback(self._board.remove)
                self._processes = [
                    stack.enter_context(
                        closing(
                            Process(
                                name,
                                command,
                                urls,
                                env,
                                key=key,
                                library=program.library,
                                options=dict(program.options),
                                packages=list(program.packages),
                                board=self._board.path,
                                contenders=numbers,
                            )
                        )
                    )
                    for numbers in BETWEEN[between]
                ]
            self._stack = stack.pop_all()
        self.versions = self._processes[0].versions

    def run(self, seconds: float, limit: int) -> Slice:
        """Pass the lock on so often, or for so long; the first time is not counted."""
        self._board.begin(limit + 1, time.monotonic_ns() + int(seconds * 1e9), self._jitter)
        for process in self._processes:
            process.follow()
        start = time.monotonic()
        for process in self._processes:
            process.say({})
        took_ns = array("q")
        for done in self._answers(start + seconds + GRACE):
            took_ns.extend(done["took_ns"])
            self.gave_up += done["gave_up"]
        if not took_ns:
            raise RuntimeError(f"{self.name}: the lock was not passed on twice in {seconds:g} s")
        return Slice(took_ns, len(took_ns) / (time.monotonic() - start))

    def _answers(self, end: float) -> Iterator[Any]:
        """The answers as they come: when one process breaks off, the other waits in vain."""
        silent = {process.output: process for process in self._processes}
        while silent:
            ready, _, _ = select.select([*silent], [], [], max(end - time.monotonic(), 0))
            for output in ready or [*silent]:
                yield silent.pop(output).hear(max(end - time.monotonic(), 0))

    def close(self) -> None:
        """End its processes."""
        self._stack.close()
