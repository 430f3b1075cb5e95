"""Leases that the agent of an engine looks after, in one line each."""

from __future__ import annotations

from collections.abc import Iterable

from redbolt import _clock
from redbolt._engine import Engine, Gate, Renewal, Votes
from redbolt._judge import GRANTED, drift_ns
from redbolt._programs import EXTEND, TAKE, Program

from .clients import SLACK, eventually, raw
from .rounds import KEY, LIMIT, TOKEN, attempt

NEVER = 1 << 62
LEASE = 30.0  # seconds: so long that only the clock of the tests makes it due
DUE = 11.0  # seconds after which such a lease is due


class Kept:
    """A lease, its renewal, and the gate that tells of its loss."""

    def __init__(self, engine: Engine, key: bytes, votes: Votes, renewal: Renewal, gate: Gate) -> None:
        self.engine = engine
        self.key = key
        self.token = votes.token
        self.votes = votes
        self.renewal = renewal
        self.gate = gate

    def is_told(self) -> bool:
        """Whether the gate was woken."""
        return self.gate.wait(0)

    def left(self) -> float:
        """How many seconds it is valid for."""
        return (self.renewal.valid_until_ns - _clock.now_ns()) / 1e9

    def lost(self) -> int:
        """Why it was lost, as soon as it is."""
        return eventually(lambda: self.renewal.lost, what="it is lost")

    def granted(self, times: int) -> None:
        """Wait until it was renewed so often at least."""
        eventually(lambda: self.renewal.renewed >= times, what=f"{self.key!r} was renewed {times} times")

    def renewed(self, times: int) -> None:
        """Wait until it was renewed so often, and all nodes have answered."""
        eventually(
            lambda: self.renewal.renewed == times and not self.renewal.busy,
            what=f"{self.key!r} was renewed {times} times",
        )


def keep(
    engine: Engine,
    key: bytes = KEY,
    token: bytes | None = TOKEN,
    *,
    lease: float = LEASE,
    limit: float = LIMIT,
    held: float | None = None,
    age: float = 0.0,
    program: Program | None = EXTEND,
    back: Program | None = TAKE,
    answered: bool = True,
) -> Kept:
    """Take a lock, and have it renewed: for ``held`` seconds at most; as if it was taken ``age`` seconds
    ago. ``answered``: by all nodes, before that.
    """
    votes = attempt(engine, key, token, lease=lease, limit=limit)
    assert votes.verdict == GRANTED, votes.outcomes()
    if answered:
        settled(engine, votes.token)  # else a test that moves the clock would make nodes suspect
    gate = engine.gate()
    lease_ms = round(lease * 1000)
    renewal = engine.renew(
        key, votes.token, votes.touched, lease_ms, len(engine.nodes) // 2 + 1, drift_ns(lease_ms, 0.01),
        int(limit * SLACK * 1e9), votes.started_ns - int(age * 1e9), votes.valid_until_ns,
        NEVER if held is None else votes.started_ns + int(held * 1e9), program, back, gate,
    )  # fmt: skip
    return Kept(engine, key, votes, renewal, gate)


def looked(engine: Engine) -> None:
    """Wait until the agent has dealt with all that is due now."""
    # Due now: what is due earlier goes first.
    marker = keep(engine, b"marker:%d" % _clock.now_ns(), None, age=LEASE / 3)
    marker.renewed(1)
    marker.renewal.stop()
    engine.discard(marker.key, marker.token, marker.renewal.touched)
    settled(engine, marker.token)


def settled(engine: Engine, token: bytes = TOKEN) -> None:
    """Wait until all that was written of a token is answered."""
    eventually(lambda: not engine.pending(token), what="all is answered")


def life(target: object, key: bytes = KEY) -> float:
    """How many seconds a key has left on a server; below 0 if it is not there."""
    return int(raw(target, "PTTL", key)) / 1000  # type: ignore[arg-type]


def tokens(targets: Iterable[object], key: bytes = KEY) -> list[bytes | None]:
    """What is at a key, server by server."""
    return [raw(target, "GET", key) for target in targets]  # type: ignore[arg-type]
