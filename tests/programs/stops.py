"""Programs whose time goes another way than they think: they are stopped, or somebody sets the wall clock."""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import threading
import time
from typing import Any

from redbolt._clock import now_ns
from tests.kit.clients import SLACK, eventually
from tests.programs import main
from tests.programs.places import place


def hold(urls: list[str], kind: str, timeout: float) -> None:
    """Take the lock, and keep it renewed."""
    lock = place(urls, kind, timeout=timeout, renew=True, node_timeout=2 * SLACK)
    assert lock.acquire()
    assert lock.lease is not None
    renewal: Any = lock.lease.renewal
    eventually(lambda: renewal.renewed)
    print("held", flush=True)
    input()


def stand_still(urls: list[str], kind: str, lease: float, rounds: int, hog: bool) -> None:
    """Hold the lock until all of the process has stood still for longer than a lease, and tell what the first
    looks after that have shown. ``hog``: it does so by itself, in a call that keeps the GIL.
    """
    usleep = ctypes.PyDLL(None).usleep
    for _ in range(rounds):
        told: dict[str, int] = {}
        called, heard = threading.Event(), threading.Event()

        def on_lost(lease: Any, reason: str, told: Any = told, called: Any = called) -> None:
            told["on_lost"] = now_ns()
            called.set()

        lock = place(urls, kind, timeout=lease, renew=True, node_timeout=2 * SLACK, on_lost=on_lost)
        assert lock.acquire()
        assert lock.lease is not None
        mine, lost = lock.lease, lock.lost

        def wait(lost: Any = lost, told: Any = told, heard: Any = heard) -> None:
            lost.wait()
            told["wait"] = now_ns()
            heard.set()

        threading.Thread(target=wait, daemon=True).start()
        renewal: Any = mine.renewal
        eventually(lambda renewal=renewal: renewal.renewed)  # type: ignore[misc]
        print(mine.token.decode(), flush=True)
        if hog:
            input()
        before = now_ns()
        while True:
            if hog:
                usleep(int(3 * lease * 1e6))
            else:
                time.sleep(0.001)
            first = now_ns()
            if first - before > lease * 1e9:
                break
            before = first
        held, is_set, left, renewed = lock.held, lost.is_set(), lock.left(), renewal.renewed
        assert called.wait(5 * SLACK)
        assert heard.wait(5 * SLACK)
        late = {name: (when - first) / 1e9 for name, when in told.items()}
        print(
            json.dumps({"held": held, "lost": is_set, "left": left, "reason": lost.reason, "late": late}),
            flush=True,
        )
        input()  # until the rival has looked
        assert not lock.held
        assert renewal.renewed == renewed
        assert renewal.valid_until_ns == 0


def at_another_hour(urls: list[str], kind: str, path: str) -> None:
    """Go on while the wall clock is set, by a library that was loaded before."""
    with open(path, "r+b") as file:
        shift = mmap.mmap(file.fileno(), 8)
    lock = place(urls, kind, timeout=1 * SLACK, renew=True, node_timeout=2 * SLACK)
    assert lock.acquire()
    assert lock.lease is not None
    lease, renewal = lock.lease, lock.lease.renewal
    assert renewal is not None
    span = 0.6 * SLACK
    for hours in (1, -1, 0):
        took: dict[str, float] = {}

        def wait(name: str, what: Any, took: Any = took) -> None:
            started = time.monotonic()
            assert what() is False
            took[name] = time.monotonic() - started

        rivals = place(urls, kind, sleep=0.05 * SLACK, node_timeout=2 * SLACK)
        threads = [
            threading.Thread(target=wait, args=("lost", lambda: lease.lost.wait(span))),
            threading.Thread(
                target=wait, args=("acquire", lambda rivals=rivals: rivals.acquire(blocking_timeout=span))
            ),
        ]
        for thread in threads:
            thread.start()
        eventually(lambda rivals=rivals: rivals._queue.waiters)  # type: ignore[misc]
        wall, left, count, before = time.time(), lock.left(), renewal.renewed, time.monotonic()
        shift[:] = struct.pack("=q", hours * 3600)
        moved = abs(time.time() - wall)
        assert moved > 3000
        after = lock.left()
        assert lock.held
        assert renewal.renewed > count or abs(after - left) < 0.05 + time.monotonic() - before
        for thread in threads:
            thread.join(10 * SLACK)
        assert set(took) == {"lost", "acquire"}
        for name, seconds in took.items():
            assert span - 0.05 <= seconds < span + 0.4 * SLACK, (name, seconds)
        so_far = renewal.renewed
        eventually(lambda so_far=so_far: renewal.renewed > so_far, 1)  # type: ignore[misc]
        assert renewal.renewed - count <= 12  # as ever, every third of a second
        assert lock.lease is lease
        assert lease.held
        assert not lease.lost.is_set()
    assert lock.owned()
    lock.release()


if __name__ == "__main__":
    main(globals())
