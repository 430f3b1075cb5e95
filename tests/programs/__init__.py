"""Programs that the tests run as processes of their own, and how they are run.

Each module is one program; its functions are scenarios, and its argument says which of them to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.kit.clients import SLACK

__all__ = ["expect", "finish", "main", "program", "tell"]


def main(scenarios: Mapping[str, Any]) -> None:
    """The program: run one of the scenarios, and write what it returns, if anything, as JSON."""
    scenario, arguments = json.loads(sys.argv[1])
    result = scenarios[scenario](**arguments)
    if result is not None:
        print(json.dumps(result), flush=True)


@contextlib.contextmanager
def program(
    name: str,
    scenario: str,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[subprocess.Popen[str]]:
    """Start a program; at the end of the block it is killed, with everything that it has forked.

    Args:
        name, scenario: which one.
        flags: for the interpreter.
        environment: variables to add.
        arguments: of the scenario.
    """
    with subprocess.Popen(
        [sys.executable, *flags, "-m", f"tests.programs.{name}", json.dumps([scenario, arguments])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # a process group of its own
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def expect(process: subprocess.Popen[str], line: str) -> None:
    """Wait until the program writes this line."""
    assert process.stdout is not None
    if process.stdout.readline() != f"{line}\n":
        output, errors = process.communicate()
        raise AssertionError(f"not {line!r}, but:\n{output}{errors}")


def tell(process: subprocess.Popen[str]) -> None:
    """Let a program go on that waits for a line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str], limit: float = 30, code: int = 0) -> str:
    """Wait at most ``limit`` seconds (x SLACK) for the end, with this code and without an error message.

    Returns:
        What it has written.
    """
    output, errors = process.communicate(timeout=limit * SLACK)
    if (process.returncode, errors) != (code, ""):
        raise AssertionError(f"it ended with {process.returncode}:\n{output}{errors}")
    return output
