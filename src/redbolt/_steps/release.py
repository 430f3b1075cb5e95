"""A release goes on until a quorum of nodes has confirmed that the token is gone, or the node limit is
over.
"""

from __future__ import annotations

from collections.abc import Generator

from redbolt._clock import now_ns
from redbolt._drive import Ask, Sleep, Step, Target
from redbolt._engine import Engine, Votes
from redbolt._judge import GRANTED
from redbolt._programs import Program
from redbolt._steps.acquire import causes
from redbolt.errors import LockLost, ReleaseUnconfirmed
from redbolt.lease import Lease

__all__ = ["conclude", "release"]

_BEHIND = "queued behind"  # an engine's cause for a node whose answer another thread will read
_PAUSE_NS = 1_000_000


def conclude(lease: Lease, votes: Votes, first: bool) -> None:
    """Judge a confirmed release: the token is absent on a quorum.

    Args:
        lease: the lease that ends.
        votes: of the delete.
        first: whether no release of this lease has been tried before. If one was, it may have done the work.

    Raises:
        LockLost: nothing was there to delete, so the lease had ended before.
    """
    was_valid = votes.started_ns < lease.valid_until_ns
    lease.end()
    if votes.hits or (was_valid and not first):
        return
    raise LockLost(
        f"lock {lease.key!r} was lost before it was released: its token is gone from the servers", lease.key
    )


def release(
    engine: Engine,
    target: Target,
    drop: tuple[Program, tuple[bytes, ...]],
    touched: int,
    votes: Votes,
    started_ns: int,
) -> Generator[Step, None, Votes]:
    """Go on after a delete that no quorum confirmed.

    Only nodes where the answer belongs to another thread are worth asking again at once: they will have
    answered it in a moment. All others had their time.

    Returns:
        The votes of the confirmed delete.

    Raises:
        ReleaseUnconfirmed: the node limit is over.
    """
    while True:
        told = causes(engine, votes)
        behind = any(text.startswith(_BEHIND) for text in told.values())
        left_ns = started_ns + target.limit_ns - now_ns()
        if not behind or left_ns <= 0:
            done = f"{votes.yes} of {len(engine.nodes)} nodes confirmed it, {target.quorum} are needed"
            raise ReleaseUnconfirmed(
                f"the release of lock {target.key!r} could not be confirmed ({done}); it can be tried again,"
                " and the key ends by itself with its lease",
                target.key,
                told,
            )
        yield Sleep(now_ns() + min(_PAUSE_NS, left_ns))
        votes = engine.votes()
        program, args = drop
        yield Ask(votes, program, target.key, args, target.quorum, left_ns, touched)
        if votes.verdict == GRANTED:
            return votes
