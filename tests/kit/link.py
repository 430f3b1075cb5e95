"""One connection through a ``FaultProxy``: what waits in it, and which reply belongs to which command."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from .resp import ProtocolError, parse_command, reply_length


class Mark(Enum):
    """Stands in a flow's queue where something happens between the bytes."""

    END = "the sender has finished"
    RESET = "the connection is reset"


@dataclass
class Flow:
    """One direction: what was read and not yet passed on, each part with the time when it is due."""

    direction: Literal["up", "down"]
    source: socket.socket
    sink: socket.socket
    queue: deque[tuple[float, bytes | Mark]] = field(default_factory=deque)
    unparsed: bytes = b""  # an incomplete command or reply
    not_before: float = 0.0
    finished: bool = False


@dataclass
class ReplyFault:
    """What happens to the next reply (to ``command``, if given): ``keep`` bytes pass, and then ..."""

    command: str | None
    keep: int
    then: Literal["silence", "reset", "pass"]


class Link:
    """A client and a server, and the flow in each direction."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.up = Flow("up", client, server)
        self.down = Flow("down", server, client)
        self.open = True
        self.mute = False  # a lost reply silences what comes after it
        self.lossy = False  # bytes from the middle of a stream are missing
        self._awaiting: deque[str] = deque()  # names of the commands without a reply
        self._opaque = False  # not RESP: passed on as it comes

    def note_commands(self, data: bytes) -> None:
        """Remember the names of the commands in what the client sent."""
        if self._opaque:
            return
        self.up.unparsed += data
        try:
            while (found := parse_command(self.up.unparsed)) is not None:
                argv, length = found
                self.up.unparsed = self.up.unparsed[length:]
                self._awaiting.append(argv[0].decode(errors="replace").upper() if argv else "")
        except ProtocolError:
            self._opaque = True

    def take_replies(self, data: bytes) -> list[tuple[str | None, bytes]]:
        """Cut what the server sent into whole replies, each with the name of its command.

        The name is None for a push, and for bytes that are not RESP.
        """
        pending = self.down.unparsed + data
        replies: list[tuple[str | None, bytes]] = []
        try:
            while not self._opaque and (length := reply_length(pending)) is not None:
                reply, pending = pending[:length], pending[length:]
                command = None
                if not reply.startswith(b">"):
                    command = self._awaiting.popleft() if self._awaiting else ""
                replies.append((command, reply))
        except ProtocolError:
            self._opaque = True
        if self._opaque and pending:
            replies.append((None, pending))
            pending = b""
        self.down.unparsed = pending
        return replies
