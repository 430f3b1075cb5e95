"""A refused or failed acquire goes on: try, pause, try again, until it is granted or the waiting is over.

The try is the algorithm of https://redis.io/docs/latest/develop/use/patterns/distributed-locks/
("Redlock"), with one node or many; the pauses follow
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/ ("full jitter").
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from redbolt._clock import now_ns
from redbolt._drive import Ask, Sleep, Step, Target, Try
from redbolt._engine import Engine, Votes
from redbolt._judge import FAULT, GRANTED, REFUSED, YES
from redbolt._programs import TYPE
from redbolt.errors import NodesUnavailable, SetupError, is_setup_fault
from redbolt.retry import Retry, jitter

__all__ = ["acquire", "causes", "foreign_type", "unavailable"]

_log = logging.getLogger("redbolt")
_PENDING_PAUSE = 0.001
_SPLIT_ROUNDS = 4  # bound of the first pause after a split vote, in measured rounds; doubles with each


def causes(engine: Engine, votes: Votes) -> dict[str, str]:
    """What each node that could not vote gave as its cause."""
    told = zip(engine.nodes, votes.outcomes(), strict=True)
    return {node.address: node.scrubbed(text) for node, (vote, text) in told if vote == FAULT}


def unavailable(
    engine: Engine, votes: Votes | None, target: Target, what: str
) -> NodesUnavailable | SetupError:
    """The error for a round without a quorum; without votes, for one that could not even begin."""
    what = f"{what} {target.key!r}"
    if votes is None:
        return NodesUnavailable(f"{what}: an earlier write of this token was not answered yet", target.key)
    told = causes(engine, votes)
    total = len(engine.nodes)
    if sum(map(is_setup_fault, told.values())) > total - target.quorum:
        return SetupError(f"{what}: the servers are not set up for it", target.key, told)
    taken = f", {votes.no} of them that it is taken" if votes.no else ""
    reached = f"{votes.yes + votes.no} of {total} nodes answered{taken}; it needs {target.quorum}"
    return NodesUnavailable(f"{what}: {reached}", target.key, told)


def acquire(
    engine: Engine,
    target: Target,
    first: Votes | None,
    token: bytes | None,
    retry: Retry,
    started_ns: int,
    deadline_ns: int | None,
    granted: Callable[[Votes], None],
) -> Generator[Step, None, bool]:
    """Go on after a first try that was not granted.

    Args:
        engine: where the tries go.
        target: what is wanted.
        first: the result of the first try; None if there was none yet.
        token: the caller's own token, or None for a fresh one per try.
        retry: how many tries, and the pauses between them.
        started_ns: when the acquire began.
        deadline_ns: when the waiting ends; None for never.
        granted: called with the votes of the granted try, before anything else can happen.

    Returns:
        True when granted, False when it stayed taken.

    Raises:
        NodesUnavailable: no quorum could be reached until the end, or without a deadline or number of tries
            for one lease length.
        SetupError: a quorum is impossible, and waiting cannot mend it.
    """
    votes, tries, splits, type_known, last_chance = first, int(first is not None), 0, False, False
    reached_ns = started_ns  # when a quorum could last say anything
    while True:
        if votes is None:
            pause = _PENDING_PAUSE
        elif votes.verdict == REFUSED:
            reached_ns = votes.ended_ns
            pause = retry.pause(tries)
            if votes.yes:  # a split vote: somebody else tries right now, too
                pause = min(pause, jitter(_SPLIT_ROUNDS * _round_s(votes) * 2 ** min(splits, 20)))
                splits += 1
        else:
            error = unavailable(engine, votes, target, "cannot acquire")
            silent_ns = votes.ended_ns - reached_ns
            unbounded = deadline_ns is None and retry.count is None
            if isinstance(error, SetupError) or (unbounded and silent_ns >= target.lease_ms * 1_000_000):
                raise error
            pause = retry.pause(tries)
        now = now_ns()
        wake_ns = now + int(pause * 1e9)
        over = retry.count is not None and tries >= retry.count
        if deadline_ns is not None and not over:
            last_ns = deadline_ns - _reserve_ns(votes)
            if last_chance or now >= last_ns:  # another try might not end in time; the whole budget is waited
                yield Sleep(deadline_ns)
                over = True
            last_chance = wake_ns >= last_ns
            wake_ns = min(wake_ns, last_ns)
        if over:
            if votes is not None and votes.verdict == REFUSED:
                return False
            raise unavailable(engine, votes, target, "cannot acquire")
        if not type_known and votes is not None and votes.verdict == REFUSED:
            type_known = True
            if found := (yield from foreign_type(engine, target)):
                _log.warning(
                    "waiting for lock %r, but its key holds a %s; no lock put that there", target.key, found
                )
        yield Sleep(wake_ns)
        if deadline_ns is not None and now_ns() >= deadline_ns:
            continue  # it overslept, and no try starts after the deadline
        if token is not None and engine.pending(token):
            continue
        votes = engine.votes()
        try:
            yield Try(votes, target.arguments(token))
            tries += 1
            if votes.verdict == GRANTED:
                granted(votes)
                return True
        except BaseException:
            if votes.verdict == GRANTED:
                target.take_back(engine, votes.token, votes.touched)
            raise


def _reserve_ns(votes: Votes | None) -> int:
    """How long before the deadline the last try begins: about the time that it takes, but little."""
    return 1_000_000 + (0 if votes is None else min(2 * (votes.ended_ns - votes.started_ns), 5_000_000))


def _round_s(votes: Votes) -> float:
    return (votes.ended_ns - votes.started_ns) / 1e9


def foreign_type(engine: Engine, target: Target) -> Generator[Step, None, str]:
    """Ask once what type the key has; its name if it is none that a lock makes, else an empty string."""
    votes = engine.votes()
    yield Ask(votes, TYPE, target.key, (), target.quorum, target.limit_ns)
    types = {text for vote, text in votes.outcomes() if vote == YES}
    return ", ".join(sorted(types - {target.type, "none", ""}))
