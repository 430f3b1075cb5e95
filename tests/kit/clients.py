"""Small helpers: clients past the library, counts for leak checks, and waiting for a condition."""

from __future__ import annotations

import inspect
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from .resp import command

T = TypeVar("T")

# Without its CLIENT SETINFO, a connection of redis-py costs half.
_QUIET: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)

SLACK = float(os.environ.get("REDBOLT_SLACK", "1"))
"""Factor for all time limits of the tests; raise it on slow machines and in sanitizer runs."""


class HasAddress(Protocol):
    """Anything with a TCP address: a LocalNode, a ScriptedNode, a FaultProxy."""

    @property
    def url(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


def raw(target: HasAddress | str, *argv: str | bytes | int | float) -> Any:
    """Run one command by redis-py, on its own connection and without retries; returns redis-py's result."""
    url = target if isinstance(target, str) else target.url
    limit = 5 * SLACK
    client = Redis.from_url(
        url,
        socket_timeout=limit,
        socket_connect_timeout=limit,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        **_QUIET,
    )
    try:
        return client.execute_command(*argv)
    finally:
        client.close()


class Client:
    """A socket to a server, and no library in between: what is sent and read is exactly what a test says."""

    def __init__(self, target: HasAddress) -> None:
        self.socket = socket.create_connection((target.host, target.port), 5 * SLACK)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def ask(self, *argv: str | bytes | int) -> bytes:
        """Send a command, and read once."""
        self.socket.sendall(command(*argv))
        return self.read()

    def read(self, timeout: float = 5.0) -> bytes:
        """What one read returns within ``timeout`` seconds (x SLACK); b"" at the end of the stream."""
        self.socket.settimeout(timeout * SLACK)
        return self.socket.recv(65536)

    def is_silent(self, seconds: float = 0.05) -> bool:
        """Whether nothing comes for that long (x SLACK)."""
        try:
            self.read(seconds)
        except TimeoutError:
            return True
        return False

    def is_reset(self) -> bool:
        """Whether the next read says that the connection was reset."""
        try:
            self.read()
        except ConnectionResetError:
            return True
        return False


def fd_count() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))


def thread_count() -> int:
    """How many threads this process has, also those Python does not know of (where /proc tells).

    The system counts a thread for a moment after ``join``: compare with a baseline by ``<=``, in
    ``eventually``.
    """
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


def eventually(predicate: Callable[[], T], timeout: float = 5.0, what: str = "") -> T:
    """Poll until ``predicate()`` is true and return its value.

    An AssertionError inside the predicate counts as "not yet".

    Args:
        predicate: called at least once, and once more after the time is up.
        timeout: seconds (x SLACK) until it fails, by AssertionError; default 5.
        what: the condition in words, for the message.
    """
    limit = timeout * SLACK
    deadline = time.monotonic() + limit
    pause = 0.002
    while True:
        late = time.monotonic() >= deadline  # looked at first: the last try begins after the limit
        cause: AssertionError | None = None
        value: object = None
        try:
            result = predicate()
            if result:
                return result
            value = result
        except AssertionError as error:
            cause = error
        if late:
            last = f"it raised {cause}" if cause else f"it was {value!r}"
            raise AssertionError(f"not within {limit:g} s: {what or predicate}; at last {last}") from cause
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
