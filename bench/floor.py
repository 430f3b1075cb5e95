"""The C floor as a row: builds floor.c, connects its sockets and packs its commands."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import socket
import struct
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns

import redis

from bench.runner import LEASE_MS, Slice
from redbolt._programs import DROP, TAKE, Part

__all__ = ["TOKEN", "Command", "Floor", "build", "connect", "fill", "pack", "packed", "release_form"]

SOURCE = Path(__file__).with_name("floor.c")
BUILD_DIR = SOURCE.parent.parent / "build" / "bench"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
TOKEN = b"0" * 32
CYCLES_PER_SECOND = 200_000
"""More than one connection can do; it sizes the buffer of durations."""


class Command(ctypes.Structure):
    """A packed command, and where its token is; -1 if it has none."""

    _fields_ = (("bytes", ctypes.c_char_p), ("length", ctypes.c_int32), ("token_at", ctypes.c_int32))


class _Node(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int32),
        ("taking_part", ctypes.c_int32),
        ("unanswered", ctypes.c_int32),
        ("reply_at", ctypes.c_int32),
        ("release", Command),
    )


class _Floor(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        ("quorum", ctypes.c_int32),
        ("acquire", Command),
        ("nodes", _Node * 16),
        ("random", ctypes.c_uint8 * 256),
        ("random_left", ctypes.c_int32),
        ("error", ctypes.c_char * 160),
    )


def build(build_dir: Path = BUILD_DIR, source: Path = SOURCE) -> Path:
    """Compile floor.c (or another), unless this source was compiled before, and return the library."""
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS]
    made_from = source.read_bytes() + repr((command, platform.platform())).encode()
    library = build_dir / f"{source.stem}-{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    if not library.exists():
        build_dir.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run([*command, str(source), "-o", str(fresh)], check=True)
        except FileNotFoundError as error:
            error.add_note("the floor needs a C compiler: install cc, or name one in CC")
            raise
        fresh.replace(library)
    return library


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.floor_run.argtypes = (ctypes.POINTER(_Floor), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.floor_run.restype = ctypes.c_int64
    if library.floor_size() != ctypes.sizeof(_Floor):
        raise RuntimeError("floor.c and floor.py disagree about struct floor")
    return library


def pack(words: Sequence[bytes]) -> bytes:
    """A command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def packed(data: bytes, buffers: list[ctypes.Array[ctypes.c_char]]) -> Command:
    """Packed commands for C, which may change their token; the buffers keep them alive."""
    buffer = ctypes.create_string_buffer(data, len(data))
    buffers.append(buffer)
    return Command(ctypes.cast(buffer, ctypes.c_char_p), len(data), data.rfind(TOKEN))


def fill(form: Sequence[Part], *args: bytes) -> list[bytes]:
    """The words of a program's form, with its arguments in their places."""
    return [args[part] if isinstance(part, int) else part for part in form]


def connect(client: redis.Redis) -> socket.socket:
    """A plain blocking socket to the client's node, logged in and on its database."""
    options = client.get_connection_kwargs()
    if options.get("ssl") or client.connection_pool.connection_class is redis.SSLConnection:
        raise ValueError("the floor speaks no TLS: give it redis:// or unix:// URLs")
    if path := options.get("path"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
    else:
        address = (options.get("host", "localhost"), options.get("port", 6379))
        sock = socket.create_connection(address, timeout=5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 2, 0))
    hello: list[list[str]] = []
    if options.get("password"):
        hello.append(["AUTH", *filter(None, (options.get("username"), options["password"]))])
    if options.get("db"):
        hello.append(["SELECT", str(options["db"])])
    for words in hello:
        sock.sendall(pack([word.encode() for word in words]))
        if sock.recv(512) != b"+OK\r\n":
            raise ConnectionError(f"{words[0]} was refused")
    return sock


def release_form(client: redis.Redis, key: bytes) -> Sequence[Part]:
    """The first form of the token-checked delete that this node knows: the one redbolt comes to use there."""
    client.execute_command(*fill(DROP.forms[-1], key, TOKEN))  # brings the script along
    for form in DROP.forms:
        try:
            client.execute_command(*fill(form, key, TOKEN))
        except redis.ResponseError:
            continue
        return form
    raise RuntimeError("the node knows no form of the token-checked delete")


class Floor:
    """Cycles of one lock on one node, or of one RedLock on several, in C."""

    name = "C floor"

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._library = _load()
        self._floor = _Floor(count=len(urls), quorum=len(urls) // 2 + 1)
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        self._sockets: list[socket.socket] = []
        name = key.encode()
        self._floor.acquire = self._command(fill(TAKE.forms[0], name, TOKEN, b"%d" % LEASE_MS))
        self.released_by = ""
        for node, url in zip(self._floor.nodes, urls, strict=False):
            with redis.Redis.from_url(url) as client:
                form = release_form(client, name)
                self._sockets.append(connect(client))
            node.fd = self._sockets[-1].fileno()
            words = fill(form, name, TOKEN)
            node.release = self._command(words)
            self.released_by = self.released_by or words[0].decode()

    def _command(self, words: list[bytes]) -> Command:
        return packed(pack(words), self._buffers)

    def run(self, seconds: float, limit: int) -> Slice:
        """Run cycles for so long, at most so many."""
        room = min(limit, int(seconds * CYCLES_PER_SECOND) + 1)
        took_ns = array("q", bytes(8 * room))
        address, _ = took_ns.buffer_info()
        start = perf_counter_ns()
        done = self._library.floor_run(self._floor, int(seconds * 1e9), room, address)
        elapsed_ns = perf_counter_ns() - start
        if done < 0:
            raise RuntimeError(f"the floor broke off: {self._floor.error.decode(errors='replace')}")
        return Slice(took_ns[:done], done / elapsed_ns * 1e9)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
