"""An acquisition: what was got, by whom, and for how long it can be relied on."""

from __future__ import annotations

import atexit
import weakref
from functools import partial
from typing import TYPE_CHECKING

from redbolt import _process
from redbolt._clock import now_ns, nudge, sleep_until
from redbolt._engine import GONE, HELD_TOO_LONG, RAN_OUT, UNANSWERED, Renewal, Votes
from redbolt.errors import LockError

if TYPE_CHECKING:
    from redbolt._body import Body

__all__ = ["Anchor", "Lease", "Lost"]

_REASONS = {
    GONE: "its token is gone from the servers",
    UNANSWERED: "no quorum of nodes answered a renewal in time",
    HELD_TOO_LONG: "it was held for as long as max_hold permits",
    RAN_OUT: "it ran out",
}
_LOOK_NS = 100_000_000
_INHERITED = "it belongs to the parent of this process"


class Lease:
    """One acquisition of one lock. It knows by the local clock how long it is valid, and never asks a server.

    Attributes:
        key: the key on the servers.
        token: the value that marks this acquisition there; never used twice.
        owner: the number of the thread that acquired it; 0 while it is handed over.
        count: how often its owner holds the lock; above 1 only if that is reentrant.
        latch: the key under which the server keeps the answer to its release; empty where there is none.
        renewal: what the agent does for it; None if nothing.
        renewed: whether that is to renew it, and not only to watch.
        surely_ns: what a renewal is good for, if a shorter one may yet be executed.
    """

    __slots__ = (
        "__weakref__", "_abandoned", "_awaited", "_generation", "_handed", "_length_ms", "_lock", "_lost",
        "_started_ns", "_touched", "_valid_until_ns", "count", "key", "latch", "owner", "release_unknown",
        "renewal", "renewed", "surely_ns", "token",
    )  # fmt: skip

    def __init__(
        self,
        key: bytes,
        length_ms: int,
        votes: Votes,
        owner: int,
        lock: weakref.ref[Body] | None = None,
    ) -> None:
        self.key = key
        self.token = votes.token
        self._length_ms = length_ms
        self._started_ns = votes.started_ns
        self._valid_until_ns = votes.valid_until_ns
        self.surely_ns: int | None = None
        self.owner = owner
        self.count = 1
        self.latch = b""
        self._touched = votes.touched
        self.release_unknown = False  # a release was begun, and it is not known what it did
        self._generation = _process.generation
        self.renewal: Renewal | None = None
        self.renewed = False
        self._lock = lock  # whose lease it is
        self._lost = 0  # why it was lost, if it is known to be
        self._handed: list[object] | None = None  # where it is nobody's, for whoever takes that out
        self._abandoned = False  # nothing renews it any more
        self._awaited = False  # somebody waits to hear that it is lost, and the agent does not tell

    def __repr__(self) -> str:
        return f"<Lease of {self.key!r}, {self.left():.3f} s left>"

    # ---- how long it is valid ----

    @property
    def valid_until_ns(self) -> int:
        """The end of validity, by the library's clock; 0 when it is over for good."""
        renewal, until_ns = self.renewal, self._valid_until_ns  # another thread may pass it on just now
        return until_ns if renewal is None or until_ns == 0 else renewal.valid_until_ns

    @property
    def held(self) -> bool:
        """Whether the lease is still valid: not released, not lost, not run out, not inherited by a fork."""
        renewal, until_ns = self.renewal, self._valid_until_ns
        if renewal is not None and until_ns:
            until_ns = renewal.valid_until_ns
        return now_ns() < until_ns and not self.release_unknown and not self.inherited

    def is_claimed(self) -> bool:
        """Whether it was neither released nor given on, whatever has become of it."""
        return not self.ended and not self.release_unknown and not self.inherited

    def ends_before(self, until_ns: int) -> bool:
        """Whether it is claimed no more, or is valid for less long."""
        return not self.is_claimed() or self.valid_until_ns < until_ns

    def left(self) -> float:
        """Seconds until the end of validity, or until it has to be renewed; 0.0 when it is not held."""
        until_ns = self.valid_until_ns
        return max(0.0, (until_ns - now_ns()) / 1e9) if self.held else 0.0

    @property
    def started_ns(self) -> int:
        """The clock just before that was sent which gave the key its life."""
        renewal = self.renewal
        return self._started_ns if renewal is None else renewal.started_ns

    @property
    def length_ms(self) -> int:
        """That life, in milliseconds."""
        renewal = self.renewal
        return self._length_ms if renewal is None else renewal.length_ms

    @property
    def touched(self) -> int:
        """A bit for each node that may hold the token."""
        renewal = self.renewal
        return self._touched if renewal is None else self._touched | renewal.touched

    def touch(self, nodes: int) -> None:
        """Note further nodes that may hold the token."""
        self._touched |= nodes

    @property
    def inherited(self) -> bool:
        """Whether it was acquired by another process, of which this one is a fork."""
        _process.look()
        return self._generation != _process.generation

    def shorten(self, valid_until_ns: int) -> None:
        """Make it end at ``valid_until_ns`` if that is earlier."""
        renewal = self.renewal
        if renewal is not None:
            renewal.shorten(valid_until_ns)
        elif valid_until_ns < self._valid_until_ns:
            self._valid_until_ns = valid_until_ns
            self._tell()

    def renew(self, started_ns: int, length_ms: int, valid_until_ns: int) -> None:
        """Note that a quorum gave the key a new life."""
        renewal = self.renewal
        if renewal is not None:
            renewal.note(started_ns, length_ms, valid_until_ns)
            return
        if self.surely_ns is not None:
            valid_until_ns = min(valid_until_ns, started_ns + self.surely_ns)
        self._started_ns = started_ns
        self._length_ms = length_ms
        self._valid_until_ns = valid_until_ns

    def doubt(self, started_ns: int, valid_until_ns: int) -> None:
        """Note that a renewal was not answered: it may be executed at any time from now on, also after a
        later and longer one, and then the key has that life.
        """
        renewal, surely_ns = self.renewal, valid_until_ns - started_ns
        self.surely_ns = surely_ns if self.surely_ns is None else min(surely_ns, self.surely_ns)
        if renewal is not None:
            renewal.doubt(surely_ns)

    # ---- how it ends ----

    @property
    def ended(self) -> bool:
        """Whether it is over for good: released, handed on, or found lost."""
        return self._valid_until_ns == 0

    def end(self) -> None:
        """Note that it is over: released, or handed on. Nothing renews it from now on."""
        self._valid_until_ns = 0
        self.abandon()
        self._tell()

    def _tell(self) -> None:
        if self._awaited:
            nudge()

    def lose(self, reason: int = GONE) -> None:
        """Note that it was found lost."""
        renewal = self.renewal
        if renewal is not None:
            renewal.lose(reason)
        if not self._lost:
            self._lost = reason
        self.end()

    def abandon(self) -> None:
        """Nobody holds it any more: it is not renewed, and runs out."""
        renewal = self.renewal
        # Not by `inherited`: this may be a finalizer, in a child in which nothing works yet.
        if renewal is None or self._abandoned:
            return
        if self._generation == _process.generation and not _process.is_unaware():
            renewal.stop()
            self._abandoned = True

    @property
    def found_lost(self) -> str:
        """Why it was found to be lost before it was over by the clock; empty if it was not."""
        renewal = self.renewal
        reason = (0 if renewal is None else renewal.lost) or self._lost
        return _REASONS[reason] if reason else ""

    @property
    def lost_reason(self) -> str:
        """Why it was lost; empty if it was not."""
        if self.inherited:
            return _INHERITED
        if found := self.found_lost:
            return found
        if self.is_claimed() and now_ns() >= self.valid_until_ns:
            return self.found_lost or _REASONS[RAN_OUT]  # the agent may have found it out just now
        return ""

    @property
    def lost(self) -> Lost:
        """Whether it was lost, to be asked or waited for."""
        return Lost(self)

    def successor(self, owner: int) -> Lease:
        """The same acquisition in the hands of another owner; this one has to end then."""
        heir = Lease.__new__(Lease)
        heir._generation = self._generation
        heir.surely_ns = self.surely_ns
        heir._valid_until_ns = self._valid_until_ns
        heir._length_ms = self._length_ms
        heir._started_ns = self._started_ns
        heir._touched = self._touched
        heir.key = self.key
        heir.token = self.token
        heir.renewal = self.renewal
        heir.renewed = self.renewed
        heir.owner = owner
        heir.count = 1
        heir.latch = b""
        heir.release_unknown = False
        heir._lock = None
        heir._lost = 0
        heir._handed = None
        heir._abandoned = heir._awaited = False
        return heir

    # ---- from hand to hand ----

    def belong(self, lock: weakref.ref[Body]) -> None:
        """It is that lock's from now on."""
        self._lock = lock

    def offer(self, place: object) -> None:
        """It is nobody's, for whoever takes it over at the same place."""
        self.owner = 0
        self._handed = [place]

    @property
    def offered(self) -> object:
        """The place at which it may be taken over; None if it may not be."""
        return self._handed[0] if self._handed and not self.inherited else None

    def take_over(self, owner: int) -> bool:
        """Become its owner; False if somebody else was faster."""
        try:
            (self._handed or []).pop()
        except IndexError:
            return False
        self.owner = owner
        return True

    def pass_on(self) -> None:
        """It is somebody else's now, together with its renewal."""
        self.renewal = None
        self._valid_until_ns = 0
        self._tell()

    def hand_over(self) -> Lease:
        """Give it out of the hands of the thread that holds it, for another one to adopt (`Lock.adopt`).

        Until then it is nobody's: it goes on being valid, and being renewed, as long as somebody refers to
        this object.

        Returns:
            The lease itself.

        Raises:
            LockNotOwned: the calling thread does not hold it.
        """
        lock = None if self._lock is None else self._lock()
        if lock is None:
            raise LockError(
                f"lock {self.key!r} cannot be handed over: there is no lock object any more", self.key
            )
        lock._hand_over(self)
        return self


class Lost:
    """Tells whether a lease was lost: before it was released it ended, or it was found gone, or it could not
    be renewed.
    """

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease

    def __repr__(self) -> str:
        return f"<Lost: {self.reason or 'no'}>"

    @property
    def reason(self) -> str:
        """Why; empty if it is not lost."""
        return "" if self._lease is None else self._lease.lost_reason

    def is_set(self) -> bool:
        """Whether it is lost, judged by the local clock; nothing is asked."""
        return bool(self.reason)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is lost.

        Args:
            timeout: seconds; None (the default) for as long as it is held.

        Returns:
            Whether it is lost. False also when it was released meanwhile.
        """
        lease = self._lease
        until_ns = 1 << 62 if timeout is None else now_ns() + int(timeout * 1e9)
        while lease is not None and not self.is_set() and lease.is_claimed():
            now = now_ns()
            if now >= until_ns:
                break
            end_ns = min(until_ns, lease.valid_until_ns)
            renewal = lease.renewal
            if renewal is not None:
                look_ns = min(end_ns, now + _LOOK_NS)  # it may be passed on, and that wakes nobody here
                if renewal.wait(look_ns) or now_ns() >= look_ns:
                    continue
                end_ns = look_ns  # it was stopped, though nobody has released
            lease._awaited = True
            sleep_until(end_ns, unless=partial(lease.ends_before, end_ns))
        return self.is_set()


class Anchor:
    """Stands where a lease is kept for its holder: when that place is no more, or the thread that it belongs
    to, nothing renews it from then on.

    Attributes:
        over: the interpreter ends, and whatever is held ends by itself.
    """

    __slots__ = ("lease",)
    over = False

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease

    def __del__(self) -> None:
        lease = getattr(self, "lease", None)  # an interrupt may have hit its making
        if lease is not None and not self.over:
            lease.abandon()


atexit.register(setattr, Anchor, "over", True)
