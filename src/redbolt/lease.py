"""An acquisition: what was got, by whom, and for how long it can be relied on."""

from __future__ import annotations

from redbolt import _process
from redbolt._clock import now_ns
from redbolt._engine import Votes

__all__ = ["Lease"]


class Lease:
    """One acquisition of one lock. It knows by the local clock how long it is valid, and never asks a server.

    Attributes:
        key: the key on the servers.
        token: the value that marks this acquisition there; never used twice.
        length_ms: the life that the key was last given, in milliseconds.
        started_ns: the clock just before that was sent.
        owner: the number of the thread that acquired it.
        count: how often its owner holds the lock; above 1 only if that is reentrant.
        latch: the key under which the server keeps the answer to its release; empty where there is none.
        touched: a bit for each node that may hold the token.
    """

    __slots__ = (
        "__weakref__", "_generation", "_surely_ns", "_valid_until_ns", "count", "key", "latch", "length_ms",
        "owner", "release_unknown", "started_ns", "token", "touched",
    )  # fmt: skip

    def __init__(self, key: bytes, length_ms: int, votes: Votes, owner: int) -> None:
        self.key = key
        self.token = votes.token
        self.length_ms = length_ms
        self.started_ns = votes.started_ns
        self._valid_until_ns = votes.valid_until_ns
        self._surely_ns: int | None = None  # what a renewal is good for, if a shorter one may yet be executed
        self.owner = owner
        self.count = 1
        self.latch = b""
        self.touched = votes.touched
        self.release_unknown = False  # a release was begun, and it is not known what it did
        self._generation = _process.generation

    def __repr__(self) -> str:
        return f"<Lease of {self.key!r}, {self.left():.3f} s left>"

    @property
    def held(self) -> bool:
        """Whether the lease is still valid: not released, not run out, not inherited by a fork."""
        return (
            now_ns() < self._valid_until_ns
            and not self.release_unknown
            and self._generation == _process.generation
        )

    def left(self) -> float:
        """Seconds until the end of validity; 0.0 when it is not held."""
        return max(0.0, (self._valid_until_ns - now_ns()) / 1e9) if self.held else 0.0

    @property
    def valid_until_ns(self) -> int:
        """The end of validity, by the library's clock."""
        return self._valid_until_ns

    @property
    def inherited(self) -> bool:
        """Whether it was acquired by another process, of which this one is a fork."""
        return self._generation != _process.generation

    def shorten(self, valid_until_ns: int) -> None:
        """Make it end at ``valid_until_ns`` if that is earlier."""
        if valid_until_ns < self._valid_until_ns:
            self._valid_until_ns = valid_until_ns

    def renew(self, started_ns: int, length_ms: int, valid_until_ns: int) -> None:
        """Note that a quorum gave the key a new life."""
        if self._surely_ns is not None:
            valid_until_ns = min(valid_until_ns, started_ns + self._surely_ns)
        self.started_ns = started_ns
        self.length_ms = length_ms
        self._valid_until_ns = valid_until_ns

    def doubt(self, started_ns: int, valid_until_ns: int) -> None:
        """Note that a renewal was not answered: it may be executed at any time from now on, also after a
        later and longer one, and then the key has that life.
        """
        surely_ns = valid_until_ns - started_ns
        self._surely_ns = surely_ns if self._surely_ns is None else min(surely_ns, self._surely_ns)

    def successor(self, owner: int) -> Lease:
        """The same acquisition in the hands of another owner; this one has to end then."""
        heir = Lease.__new__(Lease)
        heir._generation = self._generation
        heir._surely_ns = self._surely_ns
        heir._valid_until_ns = self._valid_until_ns
        heir.key = self.key
        heir.token = self.token
        heir.length_ms = self.length_ms
        heir.started_ns = self.started_ns
        heir.touched = self.touched
        heir.owner = owner
        heir.count = 1
        heir.latch = b""
        heir.release_unknown = False
        return heir

    @property
    def ended(self) -> bool:
        """Whether it is over for good: released, handed on, or found lost."""
        return self._valid_until_ns == 0

    def end(self) -> None:
        """Note that it is over: released, handed on, or found lost."""
        self._valid_until_ns = 0
