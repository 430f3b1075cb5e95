"""A program that ends, in one way or another, while it holds locks that are renewed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from typing import Any

from redbolt import Lock
from tests.kit.clients import SLACK, eventually
from tests.programs import main
from tests.programs.places import place

held: list[Any] = []
renewals: list[Any] = []


class Cycle:
    """It refers to itself, and so lives until the end of the interpreter."""

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self.me = self


def a_lock(urls: list[str], kind: str, name: str, **options: Any) -> Lock:
    """A lock that is renewed every half a second."""
    return place(urls, kind, name, 1.5 * SLACK, renew=True, node_timeout=0.2 * SLACK, **options)


def take(lock: Lock) -> Lock:
    """Acquire it, and have its renewal looked at."""
    assert lock.acquire()
    assert lock.lease is not None
    renewals.append(lock.lease.renewal)
    return lock


def complain(*said: object) -> None:
    """Nothing is lost here."""
    print("on_lost was called", *said, file=sys.stderr)


def hold(urls: list[str], kind: str, holding: str) -> None:
    """Hold a lock in that way."""
    name = holding.replace(" ", "-")
    if holding == "in a global":
        held.append(take(a_lock(urls, kind, name)))
    elif holding == "by a thread":
        taken = threading.Event()

        def run() -> None:
            mine = take(a_lock(urls, kind, name))
            taken.set()
            threading.Event().wait()
            mine.release()

        threading.Thread(target=run, daemon=True).start()
        assert taken.wait(10 * SLACK)
    elif holding == "in a cycle":
        Cycle(take(a_lock(urls, kind, name)))
    elif holding == "with on_lost":
        held.append(take(a_lock(urls, kind, name, on_lost=complain)))
    elif holding == "while a thread waits for it":
        held.append(take(a_lock(urls, kind, name)))
        waiting = a_lock(urls, kind, name, sleep=60)
        threading.Thread(target=waiting.acquire, daemon=True).start()
        eventually(lambda: waiting._queue.waiters)
    elif holding == "while a thread waits for its loss":
        lock = take(a_lock(urls, kind, name))
        held.append(lock)
        threading.Thread(target=lock.lost.wait, daemon=True).start()
    else:
        raise ValueError(holding)


def end(urls: list[str], kind: str, holdings: list[str], how: str, busy: bool) -> None:
    """Hold locks, and end; ``busy``: while renewals are under way that nobody answers."""
    gc.disable()  # the cycle is to be there at the end
    for holding in holdings:
        hold(urls, kind, holding)
    eventually(lambda: all(renewal.renewed for renewal in renewals))
    print("held", flush=True)
    sys.stdin.readline()
    if busy:
        eventually(lambda: any(renewal.busy or renewal.failed for renewal in renewals))
    print("ending", flush=True)
    if how == "by sys.exit":
        sys.exit(3)
    elif how == "by an exception":
        raise KeyError("the program itself")
    elif how == "by os._exit":
        os._exit(4)
    elif how == "by SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


if __name__ == "__main__":
    main(globals())
