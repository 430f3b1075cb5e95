"""Puts this process and the servers on chosen cores.

Apart, each message wakes a core; where idle cores are slow to wake (virtual machines), that is most of a
cycle. Together on one core, a cycle is what client and server compute. Left alone, the scheduler mixes both
as it likes, and two rows that differ by a tenth cannot be told apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import redis

__all__ = ["HOW", "Cores"]

HOW = ("apart", "together", "best")


class Cores:
    """The cores of this process and of servers on this machine; they get them back in the end."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not hasattr(os, "sched_setaffinity"):
            raise SystemExit("--pin: this system cannot pin")
        self._all = sorted(os.sched_getaffinity(0))
        if len(self._all) < 2:
            raise SystemExit("--pin: there is only one core")
        self._servers = []
        for url in urls:
            with redis.Redis.from_url(url) as client:
                self._servers.append(client.info("server")["process_id"])

    def pin(self, how: str) -> None:
        """Give this process the first core, and the servers the others ("apart") or the same ("together")."""
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
