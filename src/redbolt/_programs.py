"""What rounds send: each program is a few forms of one command, best first, and the way to read its reply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

__all__ = [
    "ABANDON", "ABANDON_BOTH", "ADD_TIME", "COUNT", "DROP", "DROP_BOTH", "ENTER",
    "EXISTS", "EXTEND", "FORCE", "FORGET", "HOLDS", "KEEP",
    "LEAVE", "LIFE", "OWNED", "PROGRAMS", "PROLONG", "SET_TIME", "SUCCEED", "SWAP", "TAKE", "TYPE", "Decoder",
    "Part", "Program",
]  # fmt: skip

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
    LIFE = 5  # integer -2: yes (there is no such key); -1 (without an end) or the ms that are left: no


@dataclass(frozen=True, slots=True)
class Program:
    """One thing that a round asks every node to do.

    ``forms`` are tried in order on each node: one that the node does not know or does not permit is
    replaced by the next, and the node is remembered. The last one works everywhere. ``native`` counts the
    leading forms that are plain commands (no scripts): once answered they can be sent without waiting for
    the reply.

    ``writes`` marks those whose argument 1 is the token that they write or delete; ``deletes`` the
    token-checked deletes, which are safe to send at any time, also to a node that does not answer;
    ``tries`` those that take a lock if it is free, or over from another token. ``undo`` is the index of the
    delete that has to follow where it is not known what a write did; its arguments are the first ones of
    the write's. Below 0: none. ``after`` is the argument with another token, whose writes have to be
    executed before; 0: none.
    """

    index: int
    name: str
    decoder: Decoder
    forms: tuple[tuple[Part, ...], ...]
    native: int = 1
    writes: bool = False
    deletes: bool = False
    tries: bool = False
    undo: int = -1
    after: int = 0

    @property
    def words(self) -> int:
        """How many words it is given: the key and its arguments."""
        return 1 + max(part for form in self.forms for part in form if isinstance(part, int))


def _script(name: str, *argv: Part, keys: tuple[Part, ...] = ()) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    text = (_LUA / f"{name}.lua").read_bytes()  # importlib.resources would take 10 ms to import
    body = b"\n".join(line for line in text.splitlines() if not line.startswith(b"--"))
    sha = hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()
    words = (b"%d" % (1 + len(keys)), KEY, *keys, *argv)
    return (b"EVALSHA", sha, *words), (b"EVAL", body, *words)


# ---- a string key with a token: Lock, RedLock ----

# Arguments: 1 token, 2 life in ms. Given as an extra word, with no lease, the life is not judged.
TAKE = Program(0, "take", Decoder.OK, ((b"SET", KEY, 1, b"NX", b"PX", 2),), writes=True, tries=True, undo=1)
# Arguments: 1 token. Valkey 9 has DELIFEQ, Redis 8.4 has DELEX.
DROP = Program(
    1,
    "drop",
    Decoder.GONE,
    ((b"DELIFEQ", KEY, 1), (b"DELEX", KEY, b"IFEQ", 1), *_script("drop", 1)),
    native=2,
    writes=True,
    deletes=True,
    undo=1,
)
# Arguments: 1 token, 2 remaining life in ms. The native form is in Valkey 8.1 and Redis 8.4.
_EXTEND_SCRIPTS = _script("extend", 1, 2)
_EXTEND_NATIVE = (b"SET", KEY, 1, b"IFEQ", 1, b"PX", 2)
EXTEND = Program(2, "extend", Decoder.FLAG, (_EXTEND_NATIVE, *_EXTEND_SCRIPTS), writes=True)
EXISTS = Program(3, "exists", Decoder.FLAG, ((b"EXISTS", KEY),))
# Arguments: 1 token, 2 its length: a byte more than a token is read, so a long foreign value costs nothing.
OWNED = Program(4, "owned", Decoder.SAME, ((b"GETRANGE", KEY, b"0", 2),))
TYPE = Program(5, "type", Decoder.TEXT, ((b"TYPE", KEY),))

# ---- the same key as redis-py treats it ----

# Arguments: 1 token. A key that never ends by itself.
KEEP = Program(6, "keep", Decoder.OK, ((b"SET", KEY, 1, b"NX"),), writes=True, tries=True, undo=1)
# Arguments: 1 token, 2 ms to add (or, with 3 = 1, to set).
ADD_TIME = Program(7, "add time", Decoder.FLAG, _script("add_time", 1, 2, 3), native=0, writes=True)
# Arguments: 1 token, 2 remaining life in ms.
SET_TIME = Program(8, "set time", Decoder.FLAG, _EXTEND_SCRIPTS, native=0, writes=True)

# ---- a hash of one owner and a count: ReentrantLock, in the layout of Redisson's RLock ----

# Arguments: 1 owner, 2 channel, 3 life in ms.
ENTER = Program(9, "enter", Decoder.FLAG, _script("enter", 1, 3), native=0, writes=True, tries=True, undo=12)
# Arguments: 1 owner, 2 life in ms, 3 how often it holds the lock from now on.
COUNT = Program(10, "count", Decoder.FLAG, _script("count", 1, 2, 3), native=0, writes=True)
# Arguments: 1 owner, 2 channel, 3 latch, 4 life of the latch in ms.
LEAVE = Program(
    11,
    "leave",
    Decoder.GONE,
    _script("leave", 1, 4, keys=(2, 3)),
    native=0,
    writes=True,
    deletes=True,
    undo=12,
)
# Arguments: 1 owner, 2 channel.
ABANDON = Program(
    12,
    "abandon",
    Decoder.GONE,
    _script("abandon", 1, keys=(2,)),
    native=0,
    writes=True,
    deletes=True,
    undo=12,
)
# Arguments: 1 owner.
HOLDS = Program(13, "holds", Decoder.FLAG, ((b"HEXISTS", KEY, 1),))
# Arguments: 1 channel.
FORCE = Program(14, "force", Decoder.FLAG, _script("force", keys=(1,)), native=0)
# The key is a latch.
FORGET = Program(15, "forget", Decoder.FLAG, ((b"DEL", KEY),))

# ---- for those who wait ----

# How long a key lives; where CLIENT TRACKING is on, the node then tells of its next change.
LIFE = Program(16, "life", Decoder.LIFE, ((b"PTTL", KEY),))
# A holder hands a plain key on. Arguments: 1 new token, 2 old token, 3 life in ms.
SWAP = Program(
    17,
    "swap",
    Decoder.FLAG,
    ((b"SET", KEY, 1, b"IFEQ", 2, b"PX", 3), *_script("swap", 1, 2, 3)),
    writes=True,
    tries=True,
    undo=19,
    after=2,
)
# The same with a reentrant lock. Arguments: 1 new owner, 2 channel, 3 old owner, 4 life in ms.
SUCCEED = Program(
    18,
    "succeed",
    Decoder.FLAG,
    _script("succeed", 1, 3, 4),
    native=0,
    writes=True,
    tries=True,
    undo=20,
    after=3,
)
# Whether an exchange was executed or not: neither token stays. Arguments: 1 new token, 2 old token.
DROP_BOTH = Program(
    19, "drop both", Decoder.GONE, _script("drop_both", 1, 2), native=0, writes=True, deletes=True, undo=19
)
# The same with a reentrant lock. Arguments: 1 new owner, 2 channel, 3 old owner.
ABANDON_BOTH = Program(
    20,
    "abandon both",
    Decoder.GONE,
    _script("abandon_both", 1, 3, keys=(2,)),
    native=0,
    writes=True,
    deletes=True,
    undo=20,
)
# The agent renews a reentrant lock, however often it is held. Arguments: 1 owner, 2 life in ms.
PROLONG = Program(21, "prolong", Decoder.FLAG, _script("prolong", 1, 2), native=0, writes=True)

PROGRAMS: tuple[Program, ...] = (
    TAKE, DROP, EXTEND, EXISTS, OWNED, TYPE, KEEP, ADD_TIME, SET_TIME, ENTER, COUNT, LEAVE, ABANDON, HOLDS,
    FORCE, FORGET, LIFE, SWAP, SUCCEED, DROP_BOTH, ABANDON_BOTH, PROLONG,
)  # fmt: skip
