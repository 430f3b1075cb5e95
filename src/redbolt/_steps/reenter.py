"""The holder of a reentrant lock takes it once more, or gives it back once.

The server is told how often the owner holds the lock from now on, and not to add or take away one: then it
does not matter whether an earlier message came through, or came twice.
"""

from __future__ import annotations

from collections.abc import Generator

from redbolt._clock import now_ns
from redbolt._drive import Ask, Sleep, Step, Target
from redbolt._engine import Engine, Votes
from redbolt._judge import GRANTED, UNDECIDED, validity_end_ns
from redbolt._programs import COUNT
from redbolt._steps.acquire import unavailable
from redbolt._steps.settle import settle
from redbolt.errors import SetupError
from redbolt.lease import Lease
from redbolt.retry import Retry

__all__ = ["reenter", "set_count"]


def set_count(engine: Engine, target: Target, lease: Lease) -> Generator[Step, None, Votes]:
    """Set count and life on the server to what the lease counts and the target asks for."""
    renewal = lease.renewal
    try:
        if renewal is not None:
            renewal.pause()
            yield from settle(lease, now_ns() + target.limit_ns)
        lease.shorten(validity_end_ns(now_ns(), target.lease_ms, target.drift_ns))
        votes = engine.votes()
        args = (lease.token, b"%d" % target.lease_ms, b"%d" % lease.count)
        yield Ask(votes, COUNT, target.key, args, target.quorum, target.limit_ns)
        valid_until_ns = validity_end_ns(votes.started_ns, target.lease_ms, target.drift_ns)
        if votes.verdict == GRANTED and votes.ended_ns < valid_until_ns:
            lease.renew(votes.started_ns, target.lease_ms, valid_until_ns)
        elif votes.verdict == UNDECIDED and votes.touched:
            lease.doubt(votes.started_ns, valid_until_ns)
        return votes
    finally:
        if renewal is not None:
            renewal.resume()


def reenter(
    engine: Engine, target: Target, lease: Lease, retry: Retry, deadline_ns: int | None
) -> Generator[Step, None, bool]:
    """Count one hold more. The caller sets the count back if nothing comes of it.

    Returns:
        True when it is counted; False when the lock was not held any more, or not until then.

    Raises:
        NodesUnavailable: the server could not be told until the deadline, or in as many tries as there may
            be.
        SetupError: it does not permit it, and waiting cannot mend that.
    """
    tries = 0
    lease.count += 1
    while lease.held:
        votes = yield from set_count(engine, target, lease)
        if votes.verdict == GRANTED and lease.held:
            return True
        if votes.verdict != UNDECIDED:  # refused, or so late that no validity is left
            break
        tries += 1
        wake_ns = now_ns() + int(retry.pause(tries) * 1e9)
        over = retry.count is not None and tries >= retry.count
        error = unavailable(engine, votes, target, "cannot acquire")
        if isinstance(error, SetupError) or over or (deadline_ns is not None and wake_ns >= deadline_ns):
            raise error
        yield Sleep(wake_ns)
    return False
