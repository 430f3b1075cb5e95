"""The decisions that both engines must take alike: when a round is over, and until when a lease is valid.

The core has the same few lines in C (``_core/judge.pxi``); a test compares the two over every case.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "FAULT", "GRANTED", "NO", "OPEN", "REFUSED", "UNDECIDED", "WAITING", "YES",
    "drift_ns", "falls_back", "give_up_ns", "is_wrongtype", "lacks_hello", "renewal_due_ns",
    "renewal_pause_ns", "renewed_life_ms", "validity_end_ns", "verdict",
]  # fmt: skip

# What one node has said in a round.
OPEN: Final = 0  # nothing yet
YES: Final = 1
NO: Final = 2
FAULT: Final = 3  # it cannot say: no connection, no answer in time, or an error

# What a round came to.
WAITING: Final = -1  # it is not over
UNDECIDED: Final = 0  # too many nodes could not say
GRANTED: Final = 1  # a quorum said yes
REFUSED: Final = 2  # so many said no that a quorum is impossible


def verdict(yes: int, no: int, still_open: int, nodes: int, quorum: int) -> int:
    """What the votes counted so far come to, or WAITING while the open ones can still decide it.

    A round goes on while the open nodes could still turn it into "refused", even if "granted" is out of
    reach: a lock that is taken must not look like a lock whose nodes are away.
    """
    if yes >= quorum:
        return GRANTED
    if no > nodes - quorum:
        return REFUSED
    if yes + still_open < quorum and no + still_open <= nodes - quorum:
        return UNDECIDED
    return WAITING


def drift_ns(lease_ms: int, factor: float) -> int:
    """How far the clocks of the nodes may run from ours during a lease: ``factor`` of it, and 2 ms for
    expiry itself.
    """
    return int(lease_ms * 1_000_000 * factor) + 2_000_000


def validity_end_ns(started_ns: int, lease_ms: int, drift: int) -> int:
    """The last moment of a lease whose try began at ``started_ns``, just before its first byte was sent."""
    return started_ns + lease_ms * 1_000_000 - drift


def renewal_due_ns(ends_ns: int, lease_ms: int) -> int:
    """When to renew a key whose life ends at ``ends_ns``: while it has two thirds of a lease left."""
    return ends_ns - lease_ms * 2_000_000 // 3


def renewed_life_ms(now_ns: int, lease_ms: int, drift: int, until_ns: int) -> int:
    """The life that a renewal gives, which must not be valid beyond ``until_ns``; not above 0: none."""
    return min(lease_ms, (until_ns - now_ns + drift) // 1_000_000)


def give_up_ns(valid_until_ns: int, lease_ms: int, limit_ns: int) -> int:
    """When it is too late for a renewal: a node limit before the end, or an eighth of a short lease."""
    return valid_until_ns - min(limit_ns, lease_ms * 125_000)


def renewal_pause_ns(failures: int, lease_ms: int) -> int:
    """Bound of the pause after a renewal that came to nothing, the first of them with ``failures`` 0."""
    return min(10_000_000 << min(failures, 10), 1_000_000_000, lease_ms * 100_000)


_FALL_BACK = (b"NOSCRIPT", b"NOPERM", b"ERR unknown command", b"ERR syntax error", b"ERR wrong number of arg")


def falls_back(error: bytes) -> bool:
    """Say whether a node's error means that it does not know or permit this form of a program."""
    return error.startswith(_FALL_BACK)


_NOT_OF_HELLO = (b"WRONGPASS", b"DENIED", b"ERR max number of clients")


def lacks_hello(error: bytes) -> bool:
    """Say whether a node's answer to HELLO means that it does not know or permit it. Servers and proxies
    have many words for that; where it means something else, the plain commands will tell.
    """
    return not error.startswith(_NOT_OF_HELLO)


def is_wrongtype(error: bytes) -> bool:
    """Say whether the key holds another type, also where a script engine wraps the error or hides its
    word.
    """
    return b"WRONGTYPE" in error
