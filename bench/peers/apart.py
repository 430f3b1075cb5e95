"""Peers in environments and processes of their own, as rows like all others."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.connection import parse_url

from bench import environments
from bench.environments import Unavailable
from bench.runner import LEASE_MS, Slice

__all__ = ["PEERS", "Peer", "Process", "Worker"]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
START_WITHIN = 30.0
GRACE = 30.0
"""Seconds that a slice may take longer than it was asked to."""


class Process:
    """Another process, spoken to in lines of JSON; the first one is answered with the versions in use.

    It runs on the cores that this process is on at the time, as a row of this process would.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        urls: Sequence[str],
        env: Mapping[str, str] | None = None,
        **begin: Any,
    ) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._cores: set[int] = set()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env={**os.environ, **(env or {})},
                bufsize=0,
            )
        except OSError as error:
            self._said.close()
            raise Unavailable(f"it cannot be started: {error}") from None
        try:
            self.say({"nodes": [{"url": url, **_address(url)} for url in urls], **begin})
            begun = self.hear(START_WITHIN)
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"it does not start: {str(error).splitlines()[-1]}") from None
        except BaseException:
            self.close()
            raise
        if "missing" in begun:
            self.close()
            raise ImportError(begun["missing"])
        self.versions: str = begun["versions"]

    def follow(self) -> None:
        """Put the worker, all its threads, on the cores of this process."""
        if not hasattr(os, "sched_getaffinity"):
            return
        cores = os.sched_getaffinity(0)
        if cores == self._cores:
            return
        for thread in os.listdir(f"/proc/{self._process.pid}/task"):
            try:
                os.sched_setaffinity(int(thread), cores)
            except ProcessLookupError:
                continue  # the thread ended; new ones inherit the cores
        self._cores = cores

    def say(self, words: Mapping[str, Any]) -> None:
        """Say something that is to be answered."""
        assert self._process.stdin
        line = json.dumps(words).encode() + b"\n"
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:
            raise self._broken("has ended") from None

    def hear(self, patience: float) -> Any:
        """The answer, within so many seconds.

        Raises:
            RuntimeError: there is none; with what the process said about it.
        """
        answer = self._answer(patience)
        try:
            return json.loads(answer)
        except ValueError:
            raise self._broken(f"answered {answer[:80]!r}") from None

    @property
    def output(self) -> int:
        """The descriptor from which its answers come."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def _answer(self, patience: float) -> bytes:
        out = self.output
        end = time.monotonic() + patience
        answer = bytearray()
        while not answer.endswith(b"\n"):
            if not select.select([out], [], [], max(end - time.monotonic(), 0))[0]:
                raise self._broken(f"did not answer for {patience:.0f} s")
            part = os.read(out, 1 << 20)
            if not part:
                raise self._broken("has ended")
            answer += part
        return bytes(answer)

    def _broken(self, what: str) -> RuntimeError:
        """What the worker did wrong, and what it said about it."""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").split("\n")
        return RuntimeError("\n".join([f"the worker of {self.name} {what}", *filter(str.strip, said[-12:])]))

    def close(self) -> None:
        """End the worker: by itself, as its input ends, or by force."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()


class Worker(Process):
    """A row whose cycles run in another process; worker.py tells what is said between the two."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        urls: Sequence[str],
        key: str,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE,
    ) -> None:
        self._grace = grace
        super().__init__(name, command, urls, env, key=key, lease_ms=LEASE_MS)

    def run(self, seconds: float, limit: int) -> Slice:
        """Run cycles for so long, at most so many."""
        self.follow()
        self.say({"seconds": seconds, "limit": limit})
        done = self.hear(seconds + self._grace)
        return Slice(array("q", done["took_ns"]), done["rate"])


def _address(url: str) -> dict[str, Any]:
    """The parts of a URL that a client without redis-py needs."""
    parts = parse_url(url)
    names = ("host", "port", "path", "db", "username", "password")
    return {name: parts[name] for name in names if name in parts}


@dataclass(frozen=True)
class Peer:
    """A peer that is not in this process's environment."""

    name: str
    many_nodes: bool
    """Whether it is a peer of RedLock; else of Lock."""
    command: Callable[[], tuple[Sequence[str], Mapping[str, str]]]
    """Installs what is missing, and returns the command and the variables of the worker."""

    def row(self, urls: Sequence[str], key: str) -> Worker:
        """The row; if it cannot be had here, `Unavailable` says why."""
        command, env = self.command()
        return Worker(self.name, command, urls, key, env)


def _python(name: str, package: str, many_nodes: bool) -> Peer:
    def command() -> tuple[Sequence[str], Mapping[str, str]]:
        interpreter = environments.python(package)
        return [str(interpreter), "-P", str(HERE / "worker.py"), package], {"PYTHONPATH": str(ROOT)}

    return Peer(name, many_nodes, command)


def _node() -> tuple[Sequence[str], Mapping[str, str]]:
    modules = environments.node_modules("node-redlock")
    return ["node", str(HERE / "worker.js")], {"NODE_PATH": str(modules)}


PEERS = (
    _python("python-redis-lock", "python-redis-lock", many_nodes=False),
    _python("valkey-glide-sync", "valkey-glide-sync", many_nodes=False),
    _python("redlock-ng", "redlock-ng", many_nodes=True),
    _python("pottery Redlock", "pottery", many_nodes=True),
    Peer("node redlock", True, _node),
)
