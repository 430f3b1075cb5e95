"""A release while others of the process wait: the lock goes to the next of them, and not back to the servers.

A lease that is renewed while somebody holds it goes on as it is, if both ask for the same of it: same token,
new owner, nothing is sent. Any other is exchanged for a full one with a token of its own, in a single
compare-and-set: where it succeeds, the old token is gone and the new one is there, and nobody else could come
in between.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from redbolt._clock import now_ns
from redbolt._drive import Step, Target, Try
from redbolt._engine import Engine, Votes
from redbolt._judge import GRANTED, NO, OPEN, YES
from redbolt._queue import Queue, Waiter
from redbolt._steps.settle import settle
from redbolt.lease import Lease

__all__ = ["hand_on"]

_OFTEN: Final = 4
_SETTLE_NS: Final = 5_000_000


def hand_on(
    engine: Engine, target: Target, queue: Queue, lease: Lease, renewed: bool
) -> Generator[Step, Any, bool | Votes]:
    """Hand a valid lease to the first waiter of the queue.

    Args:
        engine: where it is held.
        target: what its holder asked for.
        queue: who waits.
        lease: what is handed on; it ends with that.
        renewed: whether it may go on as it is.

    Returns:
        True: it is done, and the old token is gone from a quorum. False: nobody takes it, nothing was sent.
        Else the votes of a compare-and-set that found no quorum; it was taken back.
    """
    heir: Lease | None = None
    votes: Votes | None = None
    meant: list[Waiter] = []
    try:
        waiter = queue.reserve(meant)
        if waiter is None:
            return False
        if renewed and waiter.renewed and _is_fresh(lease) and waiter.target[1:5] == target[1:5]:
            heir = lease.successor(waiter.owner)
            lease.pass_on()
        else:
            lease.abandon()
            yield from settle(lease, now_ns() + _SETTLE_NS)
            votes = engine.votes()
            wish = waiter.target
            token = None if wish.fresh is None else wish.fresh()
            arguments = (
                wish.key, token, wish.lease_ms, max(wish.quorum, target.quorum), wish.drift_ns,
                target.limit_ns, wish.swap, (*wish.extra, lease.token),
            )  # fmt: skip
            yield Try(votes, arguments)
            if votes.verdict != GRANTED:
                queue.put_back(waiter)
                meant.clear()
                return votes
            heir = _heir(votes, waiter, lease)
            if votes.yes < len(engine.nodes):
                yield from _mend(engine, queue, wish, target, lease, heir, votes)
        queue.give(waiter, heir)
    except BaseException:
        for waiter in meant:
            if heir is None and votes is not None and votes.verdict == GRANTED:
                heir = _heir(votes, waiter, lease)
            if heir is None:
                queue.put_back(waiter)
            else:  # it is done; the interrupt goes on
                lease.pass_on()  # its renewal may be the heir's
                queue.give(waiter, heir)
        raise
    return True


def _is_fresh(lease: Lease) -> bool:
    """Less than half of its life is over: later it is given a new one."""
    return now_ns() < lease.started_ns + lease.length_ms * 500_000


def _heir(votes: Votes, waiter: Waiter, lease: Lease) -> Lease:
    lease.end()
    return Lease(waiter.target.key, waiter.target.lease_ms, votes, waiter.owner)


def _mend(
    engine: Engine, queue: Queue, wish: Target, target: Target, old: Lease, heir: Lease, votes: Votes
) -> Generator[Step, Any, None]:
    """Put the key back on nodes that had lost it, or the quorum has no margin any more.

    A node that is slower than the quorum is not waited for. It may say no later on, so if nothing was heard
    of it several times in a row the key is put there, too: where it is, that does nothing. What they may
    still have of the old token goes first. The heir does not know of its lease yet, so that it cannot end
    that before.
    """
    lost = late = unknown = 0
    unheard = queue.unheard
    for index, (vote, _) in enumerate(votes.outcomes()):
        if vote == YES:
            unheard[index] = 0
        elif vote == NO:
            lost |= 1 << index
        elif vote == OPEN:
            unheard[index] += 1
            if unheard[index] >= _OFTEN:
                unheard[index] = 0
                late |= 1 << index
        else:
            unknown |= 1 << index
    if lost | unknown:
        wish.take_back(engine, old.token, lost | unknown)
    if late:
        args = (heir.token, *wish.extra, b"%d" % wish.lease_ms)
        engine.post(wish.program, wish.key, args, late)
    limit_ns = votes.started_ns + target.limit_ns - now_ns()
    if lost and limit_ns > 0:
        back = engine.votes()
        heir.touch(lost)  # before it is there
        enough = wish._replace(quorum=lost.bit_count(), limit_ns=limit_ns)
        yield Try(back, enough.arguments(heir.token), lost)
