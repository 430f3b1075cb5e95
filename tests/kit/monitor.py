"""What a server runs, command by command."""

from __future__ import annotations

import re

from .clients import Client, HasAddress, raw
from .resp import OK


class Monitor:
    """Sees the commands that a server runs, also those inside of scripts."""

    def __init__(self, node: HasAddress) -> None:
        self._node = node
        self._client = Client(node)
        said = self._client.ask("MONITOR")
        assert said.startswith(OK)
        self._buffer = said[len(OK) :]

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def seen(self) -> list[tuple[str, ...]]:
        """The commands since the last look, the name in capitals; before the name of one in a script is a
        dot.
        """
        raw(self._node, "ECHO", "end of this look")
        while b'"end of this look"' not in self._buffer:
            more = self._client.read()
            assert more, "the server has hung up"
            self._buffer += more
        *lines, self._buffer = self._buffer.split(b"\r\n")
        commands = []
        for line in lines:
            inside = b" lua]" in line.partition(b'"')[0]
            name, *words = re.findall(r'"((?:[^"\\]|\\.)*)"', line.decode())
            commands.append(("." * inside + name.upper(), *words))
        return [argv for argv in commands if argv[0] != "ECHO"]

    def close(self) -> None:
        self._client.__exit__()
