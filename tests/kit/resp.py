"""As much of RESP as the test kit needs; apart from the library, so that it cannot share its mistakes."""

from __future__ import annotations

OK = b"+OK\r\n"
PONG = b"+PONG\r\n"
NIL = b"$-1\r\n"

_LINE_TYPES = b"+-:_#,("  # replies of one line
_BULK_TYPES = b"$!="  # a length, then that many bytes
_LIST_TYPES = b"*~>"  # a count, then that many replies
_MAP_TYPES = b"%|"  # a count, then twice as many replies


class ProtocolError(Exception):
    """The bytes are not RESP."""


def to_bytes(value: str | bytes | int) -> bytes:
    """An argument as bytes: text is UTF-8, numbers are decimal."""
    return value if isinstance(value, bytes) else str(value).encode()


def command(*argv: str | bytes | int) -> bytes:
    """A command as clients send it: an array of bulk strings."""
    parts = [b"*%d\r\n" % len(argv)]
    for value in map(to_bytes, argv):
        parts.append(b"$%d\r\n%b\r\n" % (len(value), value))
    return b"".join(parts)


def reply(value: object) -> bytes:
    """A Python value as a reply.

    An int, None (nil), str or bytes (bulk), an Exception (error), a list, a dict (RESP3 map).
    """
    if value is None:
        return NIL
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, str | bytes):
        data = to_bytes(value)
        return b"$%d\r\n%b\r\n" % (len(data), data)
    if isinstance(value, Exception):
        return error(str(value))
    if isinstance(value, list | tuple):
        return b"*%d\r\n" % len(value) + b"".join(map(reply, value))
    if isinstance(value, dict):
        pairs = (reply(key) + reply(item) for key, item in value.items())
        return b"%%%d\r\n" % len(value) + b"".join(pairs)
    raise TypeError(f"no reply for {value!r}")


def push(*values: object) -> bytes:
    """A RESP3 push, for example ``push("invalidate", ["name"])``."""
    return b">%d\r\n" % len(values) + b"".join(map(reply, values))


def error(text: str) -> bytes:
    """An error reply; ``text`` starts with its word, for example "LOADING server is loading"."""
    return b"-%b\r\n" % text.encode()


def parse_command(data: bytes | bytearray) -> tuple[tuple[bytes, ...], int] | None:
    """The first command in ``data`` and its length in bytes, or None while it is incomplete."""
    if not data:
        return None
    if data[:1] != b"*":
        raise ProtocolError(f"not a RESP command: {bytes(data[:64])!r}")
    head = _number(data, 0)
    if head is None:
        return None
    count, position = head
    argv = []
    for _ in range(count):
        if position < len(data) and data[position : position + 1] != b"$":
            raise ProtocolError(f"not a bulk string: {bytes(data[position : position + 64])!r}")
        head = _number(data, position)
        if head is None:
            return None
        length, start = head
        position = start + length + 2
        if position > len(data):
            return None
        argv.append(bytes(data[start : start + length]))
    return tuple(argv), position


def reply_length(data: bytes | bytearray, start: int = 0) -> int | None:
    """Where the reply (or push) that begins at ``start`` ends, or None while it is incomplete."""
    if start >= len(data):
        return None
    kind = data[start : start + 1]
    if kind in _LINE_TYPES:
        end = data.find(b"\r\n", start)
        return None if end < 0 else end + 2
    if kind not in _BULK_TYPES + _LIST_TYPES + _MAP_TYPES:
        raise ProtocolError(f"not a RESP reply: {bytes(data[start : start + 64])!r}")
    head = _number(data, start)
    if head is None:
        return None
    count, position = head
    if kind in _BULK_TYPES:
        position += count + 2 if count >= 0 else 0
        return position if position <= len(data) else None
    if kind in _MAP_TYPES:
        count *= 2
    for _ in range(count + (kind == b"|")):  # an attribute comes before the reply it belongs to
        end_of_item = reply_length(data, position)
        if end_of_item is None:
            return None
        position = end_of_item
    return position


def _number(data: bytes | bytearray, start: int) -> tuple[int, int] | None:
    """The number after the type byte at ``start``, and where the next line begins."""
    end = data.find(b"\r\n", start)
    if end < 0:
        return None
    try:
        return int(data[start + 1 : end]), end + 2
    except ValueError:
        raise ProtocolError(f"not a length: {bytes(data[start:end])!r}") from None
