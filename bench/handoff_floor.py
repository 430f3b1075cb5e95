"""The floors of a hand-off: builds handoff.c, connects its sockets and packs its commands."""

from __future__ import annotations

import ctypes
import socket
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import redis

from bench.contenders import LEASE
from bench.floor import TOKEN, Command, build, connect, fill, pack, packed, release_form
from bench.handoff_board import CELLS, Board
from redbolt._programs import TAKE

__all__ = ["SOURCE", "TOLD_BY", "Floor"]

SOURCE = Path(__file__).with_name("handoff.c")
TOLD_BY = {"message": "pub/sub + SET", "list": "BLPOP + SET"}
"""How the waiter is told, and what its row is called."""
PATIENCE = 30
"""Seconds in which it must be told."""
WORD = b"1"


class _Node(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int32),
        ("unanswered", ctypes.c_int32),
        ("expected", ctypes.c_int32),
        ("yes", ctypes.c_int32),
        ("line_length", ctypes.c_int32),
        ("line", ctypes.c_char * 32),
        ("drop", Command),
        ("pass_on", Command),
    )


class _Contender(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("quorum", ctypes.c_int32),
        ("told_by", ctypes.c_int32),
        ("take", Command),
        ("arm", Command),
        ("told", Command),
        ("nodes", _Node * 16),
        ("retries", ctypes.c_int64),
        ("error", ctypes.c_char * 160),
    )


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(source=SOURCE)))
    library.handoff_run.argtypes = (ctypes.POINTER(_Contender), ctypes.c_void_p, ctypes.c_void_p)
    library.handoff_run.restype = ctypes.c_int64
    if library.handoff_size() != ctypes.sizeof(_Contender):
        raise RuntimeError("handoff.c and handoff_floor.py disagree about struct contender")
    return library


class Floor:
    """One contender in C. Each has a channel, or a list, of its own, on the first node.

    Args:
        told_by: one of `TOLD_BY`.
    """

    def __init__(self, urls: Sequence[str], key: str, number: int, told_by: str) -> None:
        self._library = _load()
        self._contender = _Contender(number=number, count=len(urls), quorum=len(urls) // 2 + 1)
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        self._sockets: list[socket.socket] = []
        name = key.encode()
        mine, other = (f"{key}:{number}".encode() for number in (number, 1 - number))
        take = fill(TAKE.forms[0], name, TOKEN, b"%d" % (1000 * LEASE))
        self._contender.take = self._packed(pack(take))
        tell = pack([b"PUBLISH" if told_by == "message" else b"RPUSH", other, WORD])
        for index, url in enumerate(urls):
            node = self._contender.nodes[index]
            with redis.Redis.from_url(url) as client:
                drop = pack(fill(release_form(client, name), name, TOKEN))
                self._sockets.append(connect(client))
                node.fd = self._sockets[-1].fileno()
                node.drop = self._packed(drop)
                node.pass_on = self._packed(drop + (b"" if index else tell))
                if index == 0:
                    self._listen(client, told_by, mine)

    def _listen(self, client: redis.Redis, told_by: str, mine: bytes) -> None:
        """Prepare the connection on which we are told."""
        sock = connect(client)
        self._sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", PATIENCE, 0))
        self._contender.told_by = sock.fileno()
        if told_by == "message":
            sock.sendall(pack([b"SUBSCRIBE", mine]))
            answer = b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%s\r\n:1\r\n" % (len(mine), mine)
            if (got := sock.recv(len(answer), socket.MSG_WAITALL)) != answer:
                raise ConnectionError(f"SUBSCRIBE was answered by {got!r}")
            self._contender.told = self._packed(pack([b"message", mine, WORD]))
        else:
            self._contender.arm = self._packed(pack([b"BLPOP", mine, b"0"]))
            self._contender.told = self._packed(pack([mine, WORD]))

    def _packed(self, data: bytes) -> Command:
        return packed(data, self._buffers)

    @property
    def retries(self) -> int:
        """How many tries after being told found no quorum."""
        return int(self._contender.retries)

    def run(self, board: Board) -> array[int]:
        """Take every second turn, and return how long the hand-offs to us took, but for the first."""
        took_ns = array("q", bytes(8 * (board.last + 1)))
        into, _ = took_ns.buffer_info()
        cells = (ctypes.c_int64 * CELLS).from_buffer(board.map)
        try:
            done = self._library.handoff_run(self._contender, ctypes.addressof(cells), into)
        finally:
            del cells
        if done < 0:
            raise RuntimeError(f"the floor broke off: {self._contender.error.decode(errors='replace')}")
        return took_ns[:done]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
