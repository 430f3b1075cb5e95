"""What the engine knows of one node: whether it answers, what it understands, and what it is owed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from redbolt._programs import PROGRAMS
from redbolt._pure.resolve import Resolver
from redbolt._pure.task import Debt
from redbolt.node import Node

if TYPE_CHECKING:
    from redbolt._pure.dial import Dialing

__all__ = ["Site"]

_MOST_ORPHANS = 1024
_FIRST_BACK_OFF_NS = 10_000_000
_LAST_BACK_OFF_NS = 500_000_000


class Site:
    """What the engine knows of one node."""

    __slots__ = (
        "away", "back_off_ns", "cause", "connect_ns", "dialing", "forms", "index", "next_connect_ns",
        "no_hello", "no_name", "no_ping", "no_push", "no_tracking", "node", "orphans", "proven", "resolver",
        "suspect",
    )  # fmt: skip

    def __init__(self, index: int, node: Node, on_resolved: Callable[[], None]) -> None:
        self.index = index
        self.node = node
        self.connect_ns = int((node.connect_timeout or 0) * 1e9)  # most that a round waits for it; 0: its own
        self.resolver = Resolver(node, on_resolved)
        self.dialing: Dialing | None = None  # what makes its connections, if they are not plain ones
        if node.dialer is not None:
            from redbolt._pure.dial import Dialing  # here: few programs need it, and it loads ssl

            self.connect_ns = 0
            self.dialing = Dialing(node, node.dialer, on_resolved)
        self.no_ping = False
        self.no_hello = False
        self.no_name = False  # it does not let connections have a name
        self.no_push = self.no_tracking = False  # ways of watching that it lacks
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child."""
        self.suspect = False
        self.away = False  # a connect failed since it was last there
        self.cause = ""
        self.next_connect_ns = 0
        self.back_off_ns = 0
        self.forms = [0] * len(PROGRAMS)
        self.proven = 0
        self.orphans: dict[Debt, int] = {}
        """Deletes that the next connection has to bring, and the end of their use."""
        self.resolver.after_fork()
        if self.dialing is not None:
            self.dialing.after_fork()

    def doubt(self, cause: str) -> None:
        """It does not answer."""
        if not self.suspect:
            self.cause = cause
            self.suspect = True

    def failed(self, cause: str, now: int) -> None:
        """A connect came to nothing: wait longer before the next."""
        self.cause = cause
        self.away = True
        self.back_off_ns = min(_LAST_BACK_OFF_NS, max(_FIRST_BACK_OFF_NS, 2 * self.back_off_ns))
        self.next_connect_ns = now + int(self.back_off_ns * random.uniform(0.5, 1.0))
        if self.dialing is None:
            self.resolver.refresh()

    def answered(self) -> None:
        """A connection is ready."""
        self.suspect = False
        self.back_off_ns = self.next_connect_ns = 0
        if self.away:  # it may be another server by now
            self.away = False
            self.forms = [0] * len(PROGRAMS)
            self.proven = 0
            self.no_hello = self.no_name = self.no_push = self.no_tracking = False

    def lacks(self, tracking: bool | None) -> str:
        """What a connection for a kind of watch would need, and the node does not know or permit; empty if
        nothing.
        """
        if tracking is None:
            return ""
        if self.no_push:
            return "HELLO 3"
        return "CLIENT TRACKING" if tracking and self.no_tracking else ""

    def is_absent(self, now: int) -> bool:
        """Whether it is suspect, or is not connected to yet."""
        return self.suspect or now < self.next_connect_ns

    def add_orphan(self, debt: Debt, expires_ns: int) -> None:
        """Owe the node a delete."""
        orphans = self.orphans
        orphans[debt] = max(expires_ns, orphans.get(debt, 0))
        while len(orphans) > _MOST_ORPHANS:
            orphans.pop(next(iter(orphans)), None)

    def expire_orphans(self, now: int) -> None:
        """Forget deletes whose keys have ended by themselves."""
        for debt, expires_ns in list(self.orphans.items()):
            if expires_ns <= now:
                self.orphans.pop(debt, None)
