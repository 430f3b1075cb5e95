"""What rounds send: each program is a few forms of one command, best first, and the way to read its reply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

__all__ = ["DROP", "EXISTS", "EXTEND", "OWNED", "PROGRAMS", "TAKE", "TYPE", "Decoder", "Part", "Program"]

Part: TypeAlias = bytes | int
"""A word of a command: bytes as they are, or the number of an argument: 0 the key, 1, 2 ... the further
ones.
"""

KEY = 0
_LUA = Path(__file__).parent / "lua"


class Decoder(IntEnum):
    """How a reply becomes a vote. "Yes" is never read from a number that could be a time to live."""

    OK = 0  # status OK: yes; nil: no
    FLAG = 1  # integer 1 or status OK: yes; 0, nil or WRONGTYPE: no
    GONE = 2  # integer 1: yes, and one hit (deleted); 0 or WRONGTYPE: yes (there is no such token)
    SAME = 3  # a string equal to argument 1: yes; another string, nil or WRONGTYPE: no
    TEXT = 4  # a status: yes, with the text


@dataclass(frozen=True, slots=True)
class Program:
    """One thing that a round asks every node to do.

    ``forms`` are tried in order on each node: one that the node does not know or does not permit is
    replaced by the next, and the node is remembered. The last one works everywhere. ``writes`` marks those
    whose argument 1 is the token that they write or delete; ``deletes`` the token-checked delete, which is
    safe to send at any time, also to a node that does not answer. ``native`` counts the leading forms that
    are plain commands (no scripts): once answered they can be sent without waiting for the reply.
    """

    index: int
    name: str
    decoder: Decoder
    forms: tuple[tuple[Part, ...], ...]
    native: int = 1
    writes: bool = False
    deletes: bool = False


def _script(name: str, *argv: Part) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    text = (_LUA / f"{name}.lua").read_bytes()  # importlib.resources would take 10 ms to import
    body = b"\n".join(line for line in text.splitlines() if not line.startswith(b"--"))
    sha = hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()
    return (b"EVALSHA", sha, b"1", KEY, *argv), (b"EVAL", body, b"1", KEY, *argv)


# Arguments: 1 token, 2 lease in ms.
TAKE = Program(0, "take", Decoder.OK, ((b"SET", KEY, 1, b"NX", b"PX", 2),), writes=True)
# Arguments: 1 token. Valkey 9 has DELIFEQ, Redis 8.4 has DELEX.
DROP = Program(
    1,
    "drop",
    Decoder.GONE,
    ((b"DELIFEQ", KEY, 1), (b"DELEX", KEY, b"IFEQ", 1), *_script("drop", 1)),
    native=2,
    writes=True,
    deletes=True,
)
# Arguments: 1 token, 2 remaining life in ms. The native form is in Valkey 8.1 and Redis 8.4.
_EXTEND_SCRIPTS = _script("extend", 1, 2)
_EXTEND_NATIVE = (b"SET", KEY, 1, b"IFEQ", 1, b"PX", 2)
EXTEND = Program(2, "extend", Decoder.FLAG, (_EXTEND_NATIVE, *_EXTEND_SCRIPTS), writes=True)
EXISTS = Program(3, "exists", Decoder.FLAG, ((b"EXISTS", KEY),))
# Arguments: 1 token, 2 its length: a byte more than a token is read, so a long foreign value costs nothing.
OWNED = Program(4, "owned", Decoder.SAME, ((b"GETRANGE", KEY, b"0", 2),))
TYPE = Program(5, "type", Decoder.TEXT, ((b"TYPE", KEY),))

PROGRAMS: tuple[Program, ...] = (TAKE, DROP, EXTEND, EXISTS, OWNED, TYPE)
