"""The protocol: packing commands, reading replies (RESP2 and RESP3), and what a reply says in a vote.

Only the outermost value of a reply is kept, and of a push the key that it is about: a lock never asks for
more, and what a hostile server nests inside costs no memory. That is why the reader is our own even where the
hiredis package is there: that one makes room for the list that a server announces (1.6 GB for
``*200000000``), and does not tell a status from a string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from redbolt._engine import MAX_KEY, MAX_REPLY
from redbolt._judge import FAULT, NO, YES, is_wrongtype
from redbolt._programs import PROGRAMS, Decoder, Program

__all__ = [
    "BULK", "COMMON", "ERROR", "INTEGER", "NIL", "OTHER", "PLANS", "PUSH", "STATUS", "SUBSCRIBED",
    "Answer", "Plan", "Reader", "Reply", "decode", "pack_command", "text_of",
]  # fmt: skip

STATUS: Final = 0
ERROR: Final = 1
INTEGER: Final = 2
BULK: Final = 3
NIL: Final = 4
OTHER: Final = 5  # a list, a map, a double ...: nothing that a lock asks for
PUSH: Final = 6  # an out-of-band message, or an attribute: no reply to any command
SUBSCRIBED: Final = 7  # the push that answers SUBSCRIBE
_ATTRIBUTE: Final = 8

Reply: TypeAlias = tuple[int, bytes | int | None]
"""Kind and value: the text of a status, error or string, or an integer. Of a push: the key that has changed,
or the channel that has a message; empty if it may be any; None if it is about something else.
"""
Answer: TypeAlias = tuple[int, int, str]
"""What one node says: the vote, how many keys it deleted, and a text (a type, or the cause of a fault)."""

_MOST_TEXT = 200  # characters of a server's text that are kept
_MOST_ELEMENTS = 65_536
_MOST_PARTS = 3  # of a push that are looked at


# ---- packing ----


def pack_command(words: Sequence[bytes]) -> bytes:
    """One command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _packer(form: Sequence[bytes | int]) -> Callable[[Sequence[bytes]], bytes]:
    template = b"*%d\r\n" % len(form)
    numbers = []
    for part in form:
        if isinstance(part, int):
            template += b"$%d\r\n%b\r\n"
            numbers.append(part)
        else:
            template += b"$%d\r\n%b\r\n" % (len(part), part.replace(b"%", b"%%"))

    def packer(words: Sequence[bytes]) -> bytes:
        fill: list[int | bytes] = []
        for number in numbers:
            word = words[number]
            fill += (len(word), word)
        return template % tuple(fill)

    return packer


# ---- reading ----

_OK: Reply = (STATUS, b"OK")
_NIL: Reply = (NIL, None)
COMMON: Final[dict[bytes, tuple[Reply]]] = {
    b"+OK\r\n": (_OK,),
    b"$-1\r\n": (_NIL,),
    b"*-1\r\n": (_NIL,),
    b"_\r\n": (_NIL,),
    b":0\r\n": ((INTEGER, 0),),
    b":1\r\n": ((INTEGER, 1),),
}
"""The replies that nearly all reads bring, whole."""

_NUMBER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_TYPES = frozenset(b"+-:$=*%~>|,#(_")
_BREAKS = re.compile(rb"[\r\n]")


class _Garbage(Exception):
    pass


class Reader:
    """Cuts what a server sends into replies; remembers what is not whole yet."""

    __slots__ = ("_buffer", "_kind", "_missing", "_parts", "_passed", "_scanned", "fault")

    def __init__(self) -> None:
        self.fault: str | None = None
        self._buffer = b""
        self._scanned = 0  # no line ends before this place
        self._missing = 0  # values that the open list still lacks
        self._passed = 0  # bytes of it that were read and forgotten
        self._kind = OTHER  # what it is
        self._parts: list[bytes | int | None] = []  # if it is a push: its beginning

    def feed(self, data: bytes) -> Sequence[Reply]:
        """The replies that ``data`` completes. Sets ``fault`` where the stream is no RESP, or too long."""
        if not self._buffer and not self._missing:
            common = COMMON.get(data)
            if common is not None:
                return common
        return self._cut(self._buffer + data)

    def _cut(self, buffer: bytes) -> list[Reply]:
        replies: list[Reply] = []
        place, scanned = 0, self._scanned
        try:
            while place < len(buffer):
                if buffer[place] not in _TYPES:
                    raise _Garbage(f"Protocol error, got {chr(buffer[place])!r} as reply type byte")
                end = buffer.find(b"\r\n", max(place + 1, scanned))
                if end < 0:
                    scanned = len(buffer) - 1
                    break
                kind, value, extra, more = _line(buffer[place], buffer[place + 1 : end])
                after = end + 2
                if extra >= 0:
                    after += extra + 2
                    if after > len(buffer):
                        scanned = end
                        break
                    if buffer[after - 2 : after] != b"\r\n":
                        raise _Garbage("Bad bulk string value")
                    value = buffer[end + 2 : after - 2]
                self._count(replies, kind, value, more, after - place)
                place = scanned = after
        except _Garbage as garbage:
            self.fault = str(garbage)
        self._buffer = buffer[place:]
        self._scanned = max(0, scanned - place)
        if self._passed + len(self._buffer) > MAX_REPLY:
            self.fault = "the reply is too long for any lock"
        return replies

    def _count(
        self, replies: list[Reply], kind: int, value: bytes | int | None, more: int, size: int
    ) -> None:
        """Take in one value: a whole reply, a part of the open list, or the head of a list."""
        if self._missing:
            self._missing += more - 1
            self._passed += size
            if self._kind == PUSH and len(self._parts) < _MOST_PARTS:
                self._parts.append(_part(kind, value, more))
        elif more:
            self._missing, self._passed, self._kind = more, size, kind
            self._parts.clear()
        else:
            replies.append((PUSH if kind == _ATTRIBUTE else kind, value))
            return
        if not self._missing:
            replies.append(_message(self._parts) if self._kind in (PUSH, _ATTRIBUTE) else (OTHER, None))
            self._passed = 0


def _part(kind: int, value: bytes | int | None, more: int) -> bytes | int | None:
    """What is kept of a part of a push: a string if it may be a key, or the length of a list."""
    if kind in (BULK, STATUS) and isinstance(value, bytes) and len(value) <= MAX_KEY:
        return value
    return more or None


def _message(parts: list[bytes | int | None]) -> Reply:
    """A push, by its first parts in the order in which they came; see `Reply`."""
    subject: bytes | int | None = None
    if parts[:1] == [b"subscribe"]:
        return SUBSCRIBED, None
    if parts[:1] == [b"invalidate"]:
        if parts[1:2] == [1] and len(parts) == 3:  # a list of one
            subject = parts[2]
    elif parts[:1] == [b"message"]:
        if len(parts) > 1:
            subject = parts[1]
    else:
        return PUSH, None
    return PUSH, subject if isinstance(subject, bytes) else b""


def _line(mark: int, line: bytes) -> tuple[int, bytes | int | None, int, int]:
    """Read a line: kind, value, bytes that must follow (or -1), values that must follow."""
    if mark in b"+-":
        if _BREAKS.search(line):
            raise _Garbage("Bad simple string value")
        return (STATUS if mark == 0x2B else ERROR), line, -1, 0
    if mark in b",#(":
        return OTHER, None, -1, 0
    if mark == 0x5F:
        if line:
            raise _Garbage("Bad nil value")
        return NIL, None, -1, 0
    number = int(line) if _NUMBER.fullmatch(line) else 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise _Garbage("Bad integer value")
    if mark == 0x3A:
        return INTEGER, number, -1, 0
    if number == -1:
        return NIL, None, -1, 0
    if mark in b"$=":
        if number < 0:
            raise _Garbage("Bulk string length out of range")
        return (BULK if mark == 0x24 else OTHER), None, number, 0
    if not 0 <= number <= _MOST_ELEMENTS:
        raise _Garbage("Multi-bulk length out of range")
    kind = PUSH if mark == 0x3E else _ATTRIBUTE if mark == 0x7C else OTHER
    return kind, None, -1, number * 2 if mark in b"%|" else number


# ---- votes ----

_YES: Answer = (YES, 0, "")
_NO: Answer = (NO, 0, "")
_ANSWERS: dict[Decoder, dict[Reply, Answer]] = {
    Decoder.OK: {_OK: _YES, _NIL: _NO},
    Decoder.FLAG: {_OK: _YES, (INTEGER, 1): _YES, (INTEGER, 0): _NO, _NIL: _NO},
    Decoder.GONE: {(INTEGER, 1): (YES, 1, ""), (INTEGER, 0): _YES},
    Decoder.SAME: {_NIL: _NO},
    Decoder.TEXT: {},
    Decoder.LIFE: {},
}


class Plan:
    """A program made ready for use."""

    __slots__ = (
        "after", "answers", "decoder", "deletes", "index", "last", "native", "packers", "proofs", "tries",
        "undo", "undone", "words", "writes",
    )  # fmt: skip

    def __init__(self, program: Program) -> None:
        self.index = program.index
        self.decoder = program.decoder
        self.words = program.words
        self.writes = program.writes
        self.deletes = program.deletes
        self.tries = program.tries
        self.undo = program.undo
        self.after = program.after
        self.undone = program.undo >= 0  # what is unanswered of it is followed by a delete
        self.last = len(program.forms) - 1
        self.packers = tuple(map(_packer, program.forms))
        self.answers = _ANSWERS[program.decoder]
        self.native = program.native
        self.proofs = tuple(
            1 << (4 * program.index + form) if form < self.last else 0 for form in range(len(program.forms))
        )  # per form the bit that says it was answered; 0 for the last, which needs no proof

    def safe_form(self, proven: int) -> int:
        """A form that needs no fallback where those in ``proven`` were answered."""
        for form in range(self.native):
            if self.proofs[form] & proven:
                return form
        return self.last


PLANS: Final = tuple(map(Plan, PROGRAMS))


def decode(decoder: Decoder, reply: Reply, token: bytes | None) -> Answer | None:
    """The answer of a reply that is in no table; None where the program cannot have such a reply."""
    kind, value = reply
    if kind == ERROR:
        assert isinstance(value, bytes)
        text = text_of(value)
        if is_wrongtype(value):
            if decoder == Decoder.GONE:
                return _YES
            if decoder in (Decoder.SAME, Decoder.FLAG):
                return _NO
        return FAULT, 0, text
    if kind == BULK and decoder == Decoder.SAME:
        return _YES if value == token else _NO
    if kind == STATUS and decoder == Decoder.TEXT:
        assert isinstance(value, bytes)
        return YES, 0, text_of(value)
    if kind == INTEGER and decoder == Decoder.LIFE:
        assert isinstance(value, int)
        return _YES if value == -2 else _NO if value >= -1 else None
    return None


def text_of(value: bytes) -> str:
    """A server's text as messages show it: its beginning, in one line."""
    text = value[: 4 * _MOST_TEXT].decode("utf-8", "replace")[:_MOST_TEXT]
    return "".join([" " if char < " " else char for char in text])
