"""Before its holder writes a token itself, the renewal that is under way is answered, or has had its time.

What is written meanwhile would be queued behind the renewal, and the agent would get the answer.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from redbolt._clock import now_ns
from redbolt._drive import Sleep, Step
from redbolt.lease import Lease

__all__ = ["settle"]

_PAUSE_NS: Final = 100_000


def settle(lease: Lease, until_ns: int) -> Generator[Step, None, None]:
    """Wait until no renewal of a lease is under way, but no longer than until then. It was stopped, or
    paused, before.
    """
    renewal = lease.renewal
    while renewal is not None and renewal.busy and (now := now_ns()) < until_ns:
        yield Sleep(now + _PAUSE_NS)
