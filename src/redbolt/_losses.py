"""Calls ``on_lost``: one thread of Python for all locks of an engine, there while some of them have one.

The agent that finds a lease lost may be a thread of C that knows nothing of Python. It opens a gate.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final

from redbolt import _process
from redbolt._clock import now_ns, on_offset
from redbolt._engine import Engine, Gate
from redbolt.lease import Lease

__all__ = ["Losses", "OnLost", "losses_of"]

OnLost = Callable[[Lease, str], object]

_LINGER_NS: Final = 1_000_000_000  # so often the thread looks whether there is anything to look after
_JOIN_S: Final = 0.2  # the end of the interpreter waits no longer for a callback

_log = logging.getLogger("redbolt")


class Losses:
    """See the module.

    Attributes:
        gate: what the agent opens when it has found a lease lost.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._lock = threading.RLock()  # a signal handler may acquire a lock, too
        self._known: dict[weakref.ref[Lease], tuple[OnLost, Lease | None]] = {}
        self._thread: threading.Thread | None = None
        self._over = False

    def listen(self, lease: Lease, on_lost: OnLost) -> None:
        """Call ``on_lost(lease, reason)`` once, when its renewal says that it is lost."""
        self._known[weakref.ref(lease)] = on_lost, None
        if lease.lost_reason:  # since it was handed on, and nobody listened then
            self.gate.wake()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._over:
                    thread = threading.Thread(target=self._run, name="redbolt-lost", daemon=True)
                    self._thread = thread
                    try:
                        thread.start()
                    except BaseException:
                        self._thread = None
                        raise

    def forget(self, lease: Lease) -> None:
        """It was given back, or is another lock's. What was found lost before is told all the same, also
        when nobody else refers to it any more.
        """
        known = weakref.ref(lease)
        found = self._known.pop(known, None)
        if found is not None and lease.lost_reason:
            self._known[known] = found[0], lease
            self.gate.wake()

    def _run(self) -> None:
        while not self._over:
            woken = self.gate.wait(now_ns() + _LINGER_NS)
            self._tell()
            if not woken and not self._known:
                with self._lock:
                    self._thread = None  # first: whoever listens from now on sees that, or is seen here
                    if not self._known:
                        return
                    self._thread = threading.current_thread()

    def _tell(self) -> None:
        for known, (on_lost, kept) in list(self._known.items()):
            lease = kept or known()
            reason = "" if lease is None else lease.lost_reason
            if lease is None or (not reason and not lease.is_claimed()):
                self._known.pop(known, None)
                continue
            if not reason or self._known.pop(known, None) is None:
                continue
            try:
                on_lost(lease, reason)
            except BaseException:
                _log.exception("on_lost of lock %r has failed", lease.key)

    def end(self) -> None:
        """The interpreter ends: so does the thread."""
        self._over = True
        thread = self._thread
        if thread is not None:
            self.gate.wake()
            thread.join(_JOIN_S)


_all: dict[str, Losses] = {}


def losses_of(engine: Engine) -> Losses:
    """The one for all engines of a kind."""
    return _all.get(engine.kind) or _all.setdefault(engine.kind, Losses(engine.gate()))


def _end() -> None:
    for losses in list(_all.values()):
        losses.end()


def _on_offset(offset_ns: int) -> None:
    for losses in list(_all.values()):
        losses.gate.wake()  # it waits by the clock


on_offset(_on_offset)
atexit.register(_end)
_process.on_fork(_all.clear)
