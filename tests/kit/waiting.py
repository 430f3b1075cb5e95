"""A lock that somebody else holds, who is no client of the library, and those who wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import redbolt
from redbolt import Lock, RedLock, ReentrantLock

from .clients import SLACK, Client, HasAddress, eventually, raw
from .resp import NIL, OK, command, error, push, reply_length
from .rounds import InBackground
from .scripted import Peer, ScriptedNode
from .steps import Argv, Step, handshake, hang_up, unknown_command

__all__ = [
    "FACES",
    "LIMITS",
    "NAME",
    "Limited",
    "Outcome",
    "Place",
    "Stranger",
    "calls",
    "settled",
    "take_and_release",
]

NAME = "name"
FOREIGN = "somebody else's"
FACES = {"Lock": 1, "RedLock": 5, "ReentrantLock": 1}
"""Each kind of lock, and on how many servers it lives here."""
OWNER = "8743c9c0-0795-4907-87fd-6c719a6b4586:1"


class Stranger:
    """A client of several servers that the library knows nothing of; its connections stay open."""

    def __init__(self, servers: Sequence[HasAddress]) -> None:
        self._stack = ExitStack()
        self._clients = [self._stack.enter_context(Client(server)) for server in servers]

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(self, *commands: Sequence[Any]) -> list[bytes]:
        """Send commands to all servers in one write; returns the replies of each."""
        for client in self._clients:
            client.socket.sendall(b"".join(command(*argv) for argv in commands))
        return [self._replies(client, len(commands)) for client in self._clients]

    @staticmethod
    def _replies(client: Client, count: int) -> bytes:
        data, end = b"", 0
        while count:
            found = reply_length(data, end)
            if found is None:
                more = client.read()
                assert more, "the server has hung up"
                data += more
            else:
                end, count = found, count - 1
        return data


class Outcome(NamedTuple):
    """What an acquire came to."""

    granted: bool
    took: float
    """Seconds."""
    at: float
    """When it was over, by ``time.monotonic()``."""


def take_and_release(lock: Lock | ReentrantLock, **arguments: Any) -> Outcome:
    """Acquire, and give it back at once if it was granted."""
    started = time.monotonic()
    granted = lock.acquire(**arguments)
    at = time.monotonic()
    if granted:
        assert lock.held
        lock.release()
    assert lock.lease is None
    return Outcome(granted, at - started, at)


def calls(server: HasAddress, *names: str) -> int:
    """How often a server has run these commands since its statistics were last reset."""
    stats = raw(server, "INFO", "commandstats")
    return sum(int(stats.get(f"cmdstat_{name.lower()}", {"calls": 0})["calls"]) for name in names)


def settled(count: Callable[[], int]) -> int:
    """What a count comes to when nothing is under way any more: a round ends with its quorum, and the other
    servers are still at it.
    """
    last = -1
    while last != (last := count()):
        time.sleep(0.03 * SLACK)
    return last


class Place:
    """Where a lock of one kind lives, seen by one kind of engine; and a stranger who holds it there.

    Args:
        face: the kind of lock, out of `FACES`.
        kind: of engine.
        servers: real ones; the first few of them are used.
        urls: where the library shall find them, if not there.
    """

    def __init__(
        self, face: str, kind: str, servers: Sequence[HasAddress], urls: Sequence[str] | None = None
    ) -> None:
        self.face, self.kind = face, kind
        self.servers = list(servers)[: FACES[face]]
        self.urls = [server.url for server in self.servers] if urls is None else list(urls)
        self.stranger = Stranger(self.servers)
        self.stranger.ask(["CONFIG", "RESETSTAT"])
        self.writes = 0
        """How many commands the stranger has sent that take the lock, or renew it."""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.stranger.__exit__()

    def in_order(self) -> list[HasAddress]:
        """The servers in the order in which those who wait ask them."""
        address = [redbolt.Node.from_url(url).address for url in self.urls]
        return [self.servers[index] for index in sorted(range(len(address)), key=address.__getitem__)]

    # ---- the library's side ----

    def lock(self, name: str = NAME, timeout: float = 10, **options: Any) -> Lock | ReentrantLock:
        """A lock, which polls so rarely that whatever it gets it has heard of."""
        options = {"sleep": 60.0, "engine": self.kind, **options}
        if self.face == "RedLock":
            return RedLock(self.urls, name, timeout, **options)
        face = Lock if self.face == "Lock" else ReentrantLock
        return face(self.urls[0], name, timeout, **options)

    def looks(self) -> int:
        """How often somebody has asked how long the key lives, on the server that is asked most."""
        return max(calls(server, "PTTL") for server in self.servers)

    def waiter(self, lock: Lock | ReentrantLock | None = None, **arguments: Any) -> InBackground[Outcome]:
        """Somebody who acquires the lock in another thread; it has been refused, and listens."""
        before = self.looks()
        acquiring = lock or self.lock()
        waiting = InBackground(lambda: take_and_release(acquiring, **arguments))
        eventually(lambda: self.looks() > before, what="it listens")
        return waiting

    # ---- the stranger's side ----

    def take(self, ttl_ms: int | None = 20_000, name: str = NAME, token: str = FOREIGN) -> None:
        """Take the lock, also from somebody else, in one step."""
        life = () if ttl_ms is None else ("PX", ttl_ms)
        self.writes += 1
        if self.face != "ReentrantLock":
            self.stranger.ask(["SET", name, token, *life])
            return
        expire = [] if ttl_ms is None else [["PEXPIRE", name, ttl_ms]]
        owner = OWNER if token == FOREIGN else f"{OWNER}{token}"
        self.stranger.ask(["MULTI"], ["DEL", name], ["HSET", name, owner, 1], *expire, ["EXEC"])

    def renew(self, ttl_ms: int = 20_000, name: str = NAME) -> None:
        """Give the key a new life."""
        self.writes += 1
        self.stranger.ask(["PEXPIRE", name, ttl_ms])

    def free(self, name: str = NAME, publish: bool = True) -> float:
        """Give the lock back, as a client of another library would; returns when that began."""
        started = time.monotonic()
        if self.face == "ReentrantLock" and publish:
            channel = f"redisson_lock__channel:{{{name}}}"
            self.stranger.ask(["MULTI"], ["DEL", name], ["PUBLISH", channel, 0], ["EXEC"])
        else:
            self.stranger.ask(["DEL", name])
        return started


class Limited:
    """A server that keeps one lock, and lacks something.

    Args:
        background: what it answers to a handshake.

    Attributes:
        taken: whether the lock is taken; at first it is.
    """

    def __init__(self, background: Callable[[Argv], bytes | Step | None]) -> None:
        self.taken = True
        self.subscribers: list[Peer] = []
        self.node = ScriptedNode(answer=self._answer, background=background)

    def _answer(self, argv: Argv) -> bytes | Step:
        name = argv[0].upper()
        if name in (b"SET", b"EVALSHA", b"EVAL"):
            if b"NX" not in argv and not any(b"hset" in word for word in argv) and name != b"EVALSHA":
                self.taken = False
                return b":1\r\n"
            if name == b"EVALSHA":
                return error("NOSCRIPT none")
            if self.taken:
                return NIL if name == b"SET" else b":0\r\n"
            self.taken = True
            return OK if name == b"SET" else b":1\r\n"
        if name == b"PTTL":
            return b":20000\r\n" if self.taken else b":-2\r\n"
        if name == b"SUBSCRIBE":
            return Step("subscribe", lambda peer: self._subscribe(peer, argv[1]))
        if name == b"TYPE":
            return b"+none\r\n"
        return unknown_command(argv)

    def _subscribe(self, peer: Peer, channel: bytes) -> None:
        self.subscribers.append(peer)
        peer.send(push("subscribe", channel, 1))

    def publish(self, channel: str) -> None:
        for peer in self.subscribers:
            peer.send(push("message", channel, 0))

    def __enter__(self) -> Limited:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.close()


def is_tracking(argv: Argv) -> bool:
    return [word.upper() for word in argv[:2]] == [b"CLIENT", b"TRACKING"]


LIMITS: dict[str, tuple[Callable[[Argv], bytes | Step | None], bool]] = {
    # what it answers to a handshake, and whether one can subscribe to channels by RESP3
    "no HELLO": (lambda argv: unknown_command(argv) if argv[0] == b"HELLO" else handshake(argv), False),
    "no RESP3": (
        lambda argv: error("NOPROTO no") if argv[0] == b"HELLO" else handshake(argv),
        False,
    ),
    "no CLIENT": (lambda argv: unknown_command(argv) if argv[0] == b"CLIENT" else handshake(argv), True),
    "no TRACKING": (
        lambda argv: error("ERR unknown subcommand") if is_tracking(argv) else handshake(argv),
        True,
    ),
    "hangs up on HELLO": (lambda argv: hang_up() if argv[0] == b"HELLO" else handshake(argv), False),
    "hangs up on TRACKING": (lambda argv: hang_up() if is_tracking(argv) else handshake(argv), True),
}
