"""Puts this process and the servers on chosen cores.

Apart, each message wakes a core; where idle cores are slow to wake (virtual machines), that is most of a
cycle. Together on one core, a cycle is what client and server compute. Left alone, the scheduler mixes both
as it likes, and two rows that differ by a tenth cannot be told apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import redis

__all__ = ["HOW", "Cores", "can_pin"]

HOW = ("best", "apart", "together", "free")


def can_pin() -> bool:
    """Whether this system can pin, and has the cores for it."""
    return hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1


class Cores:
    """The cores of this process and of servers on this machine; they get them back in the end."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not can_pin():
            raise SystemExit("--pin: this system cannot pin, or has only one core")
        self._all = sorted(os.sched_getaffinity(0))
        self._servers = []
        for url in urls:
            with redis.Redis.from_url(url) as client:
                self._servers.append(client.info("server")["process_id"])

    def pin(self, how: str) -> None:
        """Give this process the first core, and the servers the others ("apart") or the same ("together").

        "free" lets all run everywhere.
        """
        if how == "free":
            self.close()
            return
        first, *others = self._all
        for pid in self._servers:
            _place(pid, others if how == "apart" else [first])
        _place(os.getpid(), [first])

    def close(self) -> None:
        """Let all run everywhere."""
        for pid in (*self._servers, os.getpid()):
            _place(pid, self._all)


def _place(pid: int, cores: Iterable[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)
