"""What can go wrong with a server or the way to it, in one shape: a test strikes, looks, and heals.

with Field(nodes, of=5, bad=2, fault="paused", kind="native") as field:
    lock = field.lock("name", timeout=10)
    field.strike()
    ...
    field.heal()
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import redbolt
from redbolt.local import LocalNode, LocalNodes

from .clients import SLACK
from .proxy import FaultProxy
from .resp import NIL, OK, command, reply_length
from .scripted import ScriptedNode
from .steps import Argv

T = 0.05 * SLACK
"""Seconds: the time limit per node that `Field.lock` sets."""
E = 0.15 * SLACK
"""Seconds that the machine may add."""


@contextmanager
def paused(*nodes: LocalNode) -> Iterator[None]:
    """Stop these servers for a while."""
    for node in nodes:
        node.pause()
    try:
        yield
    finally:
        for node in nodes:
            node.resume()


class Bad:
    """A node that will fail; ``server`` is None where there is no real one behind it."""

    server: LocalNode | None
    url: str
    reachable = True  # whether its server runs commands while it fails

    def __init__(self, server: LocalNode) -> None: ...

    def strike(self) -> None: ...

    def heal(self) -> None: ...

    def close(self) -> None: ...


class BadServer(Bad):
    def __init__(self, server: LocalNode) -> None:
        self.server = server
        self.url = server.url


class Paused(BadServer):
    """The process is stopped: it accepts all, answers nothing, and goes on with it when it wakes."""

    reachable = False

    def strike(self) -> None:
        self.server.pause()  # type: ignore[union-attr]

    def heal(self) -> None:
        self.server.resume()  # type: ignore[union-attr]


class Killed(BadServer):
    """The process is gone, and comes back without memory."""

    reachable = False

    def strike(self) -> None:
        self.server.kill()  # type: ignore[union-attr]

    def heal(self) -> None:
        if not self.server.alive:  # type: ignore[union-attr]
            self.server.start(empty=True)  # type: ignore[union-attr]


class Emptied(Killed):
    """The process was restarted, and is back already, without memory."""

    reachable = True

    def strike(self) -> None:
        super().strike()
        super().heal()


class BadLink(Bad):
    def __init__(self, server: LocalNode) -> None:
        self.server = server
        self.proxy = FaultProxy(server)
        self.url = self.proxy.url

    def heal(self) -> None:
        self.proxy.heal()

    def close(self) -> None:
        self.proxy.close()


class Sliced(BadLink):
    """Everything arrives a few bytes at a time."""

    def strike(self) -> None:
        self.proxy.slice(16, 0.0002, "up")
        self.proxy.slice(1, 0.0005, "down")


class Cut(BadLink):
    """The connection is reset in the middle of the next reply: the command was run."""

    def strike(self) -> None:
        self.proxy.cut_reply(2)


class Lost(BadLink):
    """The next reply gets lost, and with it all that come after it on that connection."""

    def strike(self) -> None:
        self.proxy.drop_reply()


class Partitioned(BadLink):
    """Nothing passes; when the network is mended, all of it does."""

    reachable = False

    def strike(self) -> None:
        self.proxy.hold()


class Refused(BadLink):
    """Connections end, and new ones are refused."""

    reachable = False

    def strike(self) -> None:
        self.proxy.refuse()
        self.proxy.reset_connections()


class Garbage(Bad):
    """Says yes to everything, and when it fails, nothing that makes sense."""

    server = None

    def __init__(self, server: LocalNode) -> None:
        self._struck = False
        self._node = ScriptedNode(answer=self._answer)
        self.url = self._node.url

    def _answer(self, argv: Argv) -> bytes:
        if self._struck:
            return b"\x15\x03\x01\0\x02\x02\r\n"
        return OK if argv[0] == b"SET" else b":1\r\n"

    def strike(self) -> None:
        self._struck = True

    def heal(self) -> None:
        self._struck = False

    def close(self) -> None:
        self._node.close()


FAULTS: dict[str, type[Bad]] = {
    "paused": Paused,
    "killed": Killed,
    "emptied": Emptied,
    "sliced": Sliced,
    "cut": Cut,
    "lost": Lost,
    "partitioned": Partitioned,
    "refused": Refused,
    "garbage": Garbage,
}
HARMLESS = ("sliced", "emptied")
"""Faults under which a node can still vote (what it votes is another matter)."""


class Field:
    """So many nodes, of which the first so many will fail.

    Args:
        servers: the real servers; the first ``of`` of them are used.
        of: how many nodes a lock has; one makes it a `Lock`, more a `RedLock`.
        bad: how many of them fail.
        fault: a name out of `FAULTS`.
        kind: of engine.
    """

    def __init__(
        self, servers: LocalNodes | Sequence[LocalNode], of: int, bad: int, fault: str, kind: str
    ) -> None:
        self.of, self.fault, self.kind = of, fault, kind
        self._stack = ExitStack()
        self.bad = [FAULTS[fault](servers[i]) for i in range(bad)]
        for one in self.bad:
            self._stack.callback(one.close)
        self.good = [servers[i] for i in range(bad, of)]
        self.urls = [one.url for one in self.bad] + [server.url for server in self.good]
        self.quorum = of // 2 + 1

    @property
    def decided(self) -> bool:
        """Whether a quorum can still vote while the fault lasts."""
        return len(self.good) >= self.quorum or self.fault in HARMLESS

    def lock(self, name: str, timeout: float = 10.0, **options: Any) -> redbolt.Lock:
        """A lock on these nodes, with the limit `T` per node."""
        options.setdefault("node_timeout", T)
        options.setdefault("engine", self.kind)
        options.setdefault("blocking", False)
        if self.of == 1:
            return redbolt.Lock(self.urls[0], name, timeout, **options)
        return redbolt.RedLock(self.urls, name, timeout, **options)

    def warm_up(self) -> None:
        """Open connections to all nodes."""
        lock = self.lock("warm up", quorum=self.of) if self.of > 1 else self.lock("warm up")
        assert lock.acquire()
        lock.release()

    def strike(self) -> None:
        """Let the bad nodes fail."""
        for one in self.bad:
            one.strike()

    def heal(self) -> None:
        """Make all nodes well again."""
        for one in self.bad:
            one.heal()

    def addresses(self) -> set[str]:
        """The bad nodes as errors name them."""
        return {redbolt.Node.from_url(one.url).address for one in self.bad}

    def reachable(self) -> list[LocalNode]:
        """The real servers that run commands also while the fault lasts."""
        return self.good + [one.server for one in self.bad if one.server is not None and one.reachable]

    def servers(self) -> list[LocalNode]:
        """All real servers."""
        return self.good + [one.server for one in self.bad if one.server is not None]

    def __enter__(self) -> Field:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.heal()
        finally:
            self._stack.close()


def _look(server: LocalNode, *argv: str) -> bytes:
    """The reply of one server, as it is; a test asks often, and a client would take ten times as long."""
    with socket.create_connection((server.host, server.port), 5 * SLACK) as connection:
        connection.sendall(command(*argv))
        data = b""
        while reply_length(data) is None:
            more = connection.recv(4096)
            assert more, f"{server} has hung up"
            data += more
        return data


def values(servers: Sequence[LocalNode], name: str) -> list[bytes | None]:
    """What a key holds on each server."""
    replies = [_look(server, "GET", name) for server in servers]
    return [None if reply == NIL else reply.partition(b"\r\n")[2][:-2] for reply in replies]


def absent(servers: Sequence[LocalNode], name: str) -> Callable[[], bool]:
    """A condition for ``eventually``: no server has the key."""
    return lambda: all(_look(server, "EXISTS", name) == b":0\r\n" for server in servers)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer, however it ends."""
    started = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - started
        assert took <= seconds, f"it took {took:.3f} s, at most {seconds:.3f} s are allowed"
