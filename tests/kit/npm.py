"""Lock libraries from npm as peers: their pinned packages, and a Node process that drives one of them."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .clients import SLACK

__all__ = ["Call", "Peer", "PeerDied", "PeerError", "installed", "missing"]

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "tests" / "peers"
PINNED = ("package.json", "package-lock.json")
OLDEST_NODE = 16
INSTALL_LIMIT = 100.0  # below the limit of a test, so that the reason is told


class PeerError(Exception):
    """An operation of a peer failed.

    ``name`` and ``text`` are those of the JavaScript error; ``causes`` are what single servers answered.
    """

    def __init__(self, op: str, name: str, text: str, causes: list[str]) -> None:
        super().__init__(f"{op}: {name}: {text} {causes or ''}".rstrip())
        self.name, self.text, self.causes = name, text, causes


class PeerDied(AssertionError):
    """A peer ended, hangs, or does not keep to the protocol."""


def missing() -> str | None:
    """Why there can be no peers on this machine; None where there can."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install nodejs npm)"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, env=_environment()).stdout
    if int(version.strip().lstrip("v").partition(".")[0] or 0) < OLDEST_NODE:
        return f"node {version.strip()} is too old: the peers need {OLDEST_NODE} or newer"
    return None


def installed(store: Path = ROOT / "build" / "npm") -> Path:
    """The folder with the pinned packages in ``node_modules``; only the first call needs the network.

    Args:
        store: where such folders are, each named after the hash of what is pinned. Several processes may
            call at once.

    Raises:
        RuntimeError: npm failed; with what it said.
        TimeoutError: npm, or another process that is installing, took longer than 100 s.
    """
    pinned = [(PEERS / name).read_bytes() for name in PINNED]
    folder = store / hashlib.sha256(b"\0".join(pinned)).hexdigest()[:16]
    if folder.exists():
        return folder
    store.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + INSTALL_LIMIT
    with _locked(store / "lock", deadline):
        if not folder.exists():
            _install(folder, dict(zip(PINNED, pinned, strict=True)), deadline)
    return folder


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """Be the only process that has locked this file; the system unlocks it for a process that is killed."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process is still installing: {path} is locked") from None
                time.sleep(0.05)
        yield


def _install(folder: Path, pinned: dict[str, bytes], deadline: float) -> None:
    """Make ``folder``. It gets its name when it is complete."""
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
    draft.mkdir()
    for name, data in pinned.items():
        (draft / name).write_bytes(data)
    # node-redisson's peer dependency is a compiler, which it does not use at run time.
    argv = ["npm", "ci", "--omit=peer", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    try:
        result = subprocess.run(
            argv,
            cwd=draft,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, deadline - time.monotonic()),
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{' '.join(argv)} took too long in {draft}") from error
    if result.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed in {draft}:\n{result.stdout}")
    draft.rename(folder)


def _environment() -> dict[str, str]:
    """Ours, without what is meant for this Python alone: sanitizers."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS", "NODE_OPTIONS")
    }


class Call:
    """An operation that was sent to a peer."""

    def __init__(self, peer: Peer, op: str) -> None:
        self._peer = peer
        self._op = op
        self._answer: Future[dict[str, Any]] = Future()

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self._answer.done()

    def result(self, timeout: float = 5.0) -> Any:
        """What it returned, waiting for it that many seconds (x SLACK) at most.

        Raises:
            PeerError: it failed.
            PeerDied: there is no answer, and none will come; or none in time.
        """
        answer = self._wait(timeout)
        if "error" in answer:
            raise PeerError(self._op, **_renamed(answer["error"]))
        return answer["result"]

    def ended_at(self, timeout: float = 5.0) -> float:
        """When it ended there, by ``time.monotonic()`` of this machine (which must be a Linux)."""
        return float(self._wait(timeout)["at"])

    def _wait(self, timeout: float) -> dict[str, Any]:
        try:
            return self._answer.result(timeout * SLACK)
        except TimeoutError:
            raise self._peer.trouble(f"no answer to {self._op} within {timeout * SLACK:g} s") from None


def _renamed(error: dict[str, Any]) -> dict[str, Any]:
    return {"name": error["name"], "text": error["message"], "causes": error["causes"]}


class Peer:
    """A Node process that runs ``tests/peers/<driver>.mjs``; a context manager that ends it.

    Operations are lines of JSON on its standard input and output, and any thread may ask.

    Args:
        driver: name of the driver, or the path of one.
        modules: the folder that holds ``node_modules``; default: `installed`.
    """

    def __init__(self, driver: str | Path, modules: Path | None = None) -> None:
        script = driver if isinstance(driver, Path) else PEERS / f"{driver}.mjs"
        self._name = script.stem
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._end = ""  # why no more answers will come
        self._last_words: str | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            ["node", str(script), str(modules or installed())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
            start_new_session=True,  # an interrupt from the keyboard is for pytest alone
        )
        self._reader = threading.Thread(target=self._read, name=f"peer {self._name}", daemon=True)
        self._reader.start()
        try:
            self.version: str = self.call("hello", timeout=20)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, op: str, **args: Any) -> Call:
        """Begin an operation; others may be asked meanwhile."""
        call = Call(self, op)
        with self._lock:
            if self._end:
                raise self.trouble(self._end)
            number = next(self._numbers)
            self._calls[number] = call
            line = json.dumps({"id": number, "op": op, "args": args})
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                raise self.trouble(f"cannot ask for {op}: {error}") from error
        return call

    def call(self, op: str, *, timeout: float = 5.0, **args: Any) -> Any:
        """Ask for an operation and return its result; raises as `Call.result` does."""
        return self.start(op, **args).result(timeout)

    def trouble(self, what: str) -> PeerDied:
        """An error with what the process wrote to standard error."""
        tail = self._tail() if self._last_words is None else self._last_words
        return PeerDied(f"peer {self._name} (pid {self.pid}): {what}\n{tail or '(no error output)'}")

    def _tail(self) -> str:
        file = self._stderr.fileno()
        return os.pread(file, 4000, max(0, os.fstat(file).st_size - 4000)).decode(errors="replace")

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        with self._lock:
            self._end = self._end or "it was closed"
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()  # the drivers end with their input
            except OSError:
                pass  # it was gone already
        for hasten in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(0.5 * SLACK)
                break
            except subprocess.TimeoutExpired:
                hasten()
        self._process.wait(5 * SLACK)
        self._reader.join(5 * SLACK)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._last_words = self._tail()
        self._stderr.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> None:
        """Hand each answer to its call, until the output ends."""
        assert self._process.stdout is not None
        why = "it ended"
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
                call = self._calls.pop(answer["id"])
            except (ValueError, TypeError, KeyError):
                why = f"it wrote {line!r}, which answers nothing"
                break
            call._answer.set_result(answer)
        with self._lock:
            self._end = self._end or why
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call._answer.set_exception(self.trouble(self._end))
