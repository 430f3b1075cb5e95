"""This process' end of the supervisor (``_supervisor_main.py``) which owns the servers of ``local.py``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from redbolt import _process
from redbolt._server_program import server_environment

_SOCKET_PATH_LIMIT = 100  # bytes; sun_path holds 104 on macOS, 108 on Linux


class Supervisor:
    """This process' end: starts the supervisor, sends it requests, and ends it by closing the stream.

    ``folder`` is its folder for the servers' files; it is removed when the supervisor ends.
    """

    def __init__(self) -> None:
        from tempfile import gettempdir

        name = f"redbolt-{os.urandom(6).hex()}"
        folder = os.path.join(gettempdir(), name)
        if len(os.fsencode(folder)) > _SOCKET_PATH_LIMIT - len("/999.sock"):
            folder = f"/tmp/{name}"
        self.folder = folder
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._sent = 0
        self._received = b""
        self._stream, theirs = socket.socketpair()
        _supervisors.add(self)
        self._stream.settimeout(30)
        script = Path(__file__).with_name("_supervisor_main.py")
        arguments = [str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(script), *arguments],
                    pass_fds=[theirs.fileno()],
                    env=server_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C on the terminal is for the parent, which then closes us
                )
        except BaseException:
            self._stream.close()
            raise
        try:
            self.request("open", folder=self.folder)
        except BaseException:
            self.close()
            raise

    def request(self, action: str, node: int | None = None, **details: object) -> dict[str, Any]:
        """Send one request and return the answer to it."""
        if os.getpid() != self._owner:
            raise RuntimeError("local nodes can be controlled only by the process that started them")
        with self._lock:
            self._sent += 1
            request = {"id": self._sent, "do": action, "node": node, **details}
            try:
                self._stream.sendall(json.dumps(request).encode() + b"\n")
                answer = self._read()
                while answer["id"] != request["id"]:  # left over from a request that a signal interrupted
                    answer = self._read()
            except OSError as error:
                raise RuntimeError(f"these nodes are closed, or their supervisor died: {error}") from error
        if "error" in answer:
            raise RuntimeError(f"cannot {action} {self.folder} (node {node}): {answer['error']}")
        return answer

    def _read(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            data = self._stream.recv(65536)
            if not data:
                raise ConnectionError("end of stream")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self, pids: Iterable[int] = ()) -> None:
        """End the supervisor and so all servers; ``pids`` are theirs, should it have been killed itself."""
        if os.getpid() != self._owner:
            return
        self._stream.close()
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == 0:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.folder, ignore_errors=True)

    def abandon(self) -> None:
        """In a forked child: let go of the stream, or the supervisor would not notice the parent's death."""
        self._stream.close()
        self._process.returncode = 0  # not this process' child: no ResourceWarning about it


_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for supervisor in list(_supervisors):
        supervisor.abandon()


_process.on_fork(_after_fork_in_child)
