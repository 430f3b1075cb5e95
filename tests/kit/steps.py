"""The steps of a ``ScriptedNode``'s script, and ready answers for commands that a test is not about."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .resp import OK, PONG, error, reply, to_bytes

if TYPE_CHECKING:
    from .scripted import Peer

Argv = tuple[bytes, ...]
Answer = Callable[[Argv], "bytes | Step | None"]
"""From a command to the bytes of its reply, to a step to run instead, or to None for silence."""

PAUSE = 0.002  # seconds between the pieces of a split reply: enough for the reader to take each by itself


class ScriptError(AssertionError):
    """A connection did not go the way its script says."""


@dataclass(frozen=True)
class Step:
    """One step of a script: what it does, and the words for it in error messages."""

    text: str
    run: Callable[[Peer], None]


def expect(what: str | bytes | Sequence[object] | Callable[[Argv], bool] | None = None) -> Step:
    """Wait for the next command and compare it.

    ``what`` is bytes: the command (or several) byte for byte; a list: the arguments, where
    ``unittest.mock.ANY`` matches anything; a str: the name alone; a function: called with the arguments; None
    (default): any command.
    """

    def run(peer: Peer) -> None:
        expected_bytes = what if isinstance(what, bytes) else b""
        got = b""
        argv: Argv = ()
        while not got or len(got) < len(expected_bytes):
            found = peer.read_command(peer.node.timeout)
            if found is None:
                raise ScriptError("the client ended the connection")
            argv, got = found[0], got + found[1]
        if not _matches(what, argv, got):
            raise ScriptError(f"got {got!r}" if expected_bytes else f"got {argv!r}")

    return Step(f"expect({what!r})", run)


def _matches(what: object, argv: Argv, got: bytes) -> bool:
    if what is None:
        return True
    if isinstance(what, bytes):
        return got == what
    if isinstance(what, str):
        return argv[:1] != () and argv[0].upper() == what.upper().encode()
    if callable(what):
        return bool(what(argv))
    assert isinstance(what, Sequence)
    plain = (to_bytes(part) if isinstance(part, str | int) else part for part in what)
    return list(plain) == list(argv)


def expect_end() -> Step:
    """Wait until the client ends the connection, without another command."""

    def run(peer: Peer) -> None:
        try:
            found = peer.read_command(peer.node.timeout)
        except ConnectionResetError:
            return
        if found is not None:
            raise ScriptError(f"got {found[0]!r}")

    return Step("expect_end()", run)


def send(*data: bytes, may_fail: bool = False) -> Step:
    """Send bytes; with ``may_fail`` it is no error if the client is gone."""

    def run(peer: Peer) -> None:
        try:
            peer.send(b"".join(data))
        except ConnectionError:
            if not may_fail:
                raise

    return Step(f"send({b''.join(data)!r})", run)


def split(data: bytes, *positions: int, pause: float = PAUSE) -> Step:
    """Send ``data`` in pieces, cut before each of the ``positions`` (rising), with a pause after each piece.

    TCP_NODELAY is on, so a client that is waiting reads each piece by itself.
    """

    def run(peer: Peer) -> None:
        bounds = [0, *positions, len(data)]
        for start, end in itertools.pairwise(bounds):
            if start:
                time.sleep(pause)
            peer.send(data[start:end])

    return Step(f"split({data!r}, {positions})", run)


def bytewise(data: bytes, pause: float = PAUSE) -> Step:
    """Send ``data`` one byte at a time."""
    return split(data, *range(1, len(data)), pause=pause)


def sleep(seconds: float) -> Step:
    """Do nothing for a while (not scaled by SLACK); where a test can say when to go on, use ``wait``."""
    return Step(f"sleep({seconds})", lambda peer: time.sleep(seconds))


def wait(event: threading.Event) -> Step:
    """Go on when the test sets ``event``; an error after the node's timeout."""

    def run(peer: Peer) -> None:
        deadline = time.monotonic() + peer.node.timeout
        while not event.wait(0.01):
            if peer.node.closing.is_set():
                raise ScriptError("the test ended without setting the event")
            if time.monotonic() > deadline:
                raise ScriptError(f"the event was not set within {peer.node.timeout:g} s")

    return Step("wait(event)", run)


def tell(event: threading.Event) -> Step:
    """Set ``event``: the test may wait for it."""
    return Step("tell(event)", lambda peer: event.set())


def hang_up() -> Step:
    """Close the connection."""
    return Step("hang_up()", lambda peer: peer.hang_up())


def half_close() -> Step:
    """End the stream to the client and go on reading."""
    return Step("half_close()", lambda peer: peer.half_close())


def reset() -> Step:
    """End the connection by RST."""
    return Step("reset()", lambda peer: peer.reset())


def serve(answer: Answer) -> Step:
    """Answer every command by ``answer`` until the client ends the connection."""

    def run(peer: Peer) -> None:
        try:
            while (found := peer.read_command(None)) is not None:
                peer.perform(answer(found[0]))
        except ConnectionError:
            return

    return Step(f"serve({answer!r})", run)


def ignore_rest() -> Step:
    """Read (and record) what still comes, without an answer, until the client ends the connection."""
    return serve(lambda argv: None)


def handshake(argv: Argv) -> bytes | None:
    """An ``Answer`` for what clients say before their first real command; as ``background`` it hides that."""
    name = argv[0].upper()
    if name == b"HELLO":
        protocol = int(argv[1]) if len(argv) > 1 else 2
        facts = {"server": "redis", "version": "7.4.0", "proto": protocol, "mode": "standalone"}
        return reply(facts if protocol == 3 else list(itertools.chain(*facts.items())))
    if name in (b"AUTH", b"SELECT", b"CLIENT"):
        return OK
    return PONG if name == b"PING" else None


def unknown_command(argv: Argv) -> bytes:
    """An ``Answer``: the server does not know the command."""
    return error(f"ERR unknown command '{argv[0].decode(errors='replace')}', with args beginning with: ")
