"""Programs whose threads stand in line for a lock: forks, and interrupts while others pass the lock on."""

from __future__ import annotations

import faulthandler
import itertools
import random
import signal
import threading
import time
from typing import Any

import redbolt
from redbolt import Lock, LockNotOwned, ReentrantLock
from tests.kit.clients import SLACK, eventually
from tests.programs import main
from tests.programs.forks import fork, result
from tests.programs.interrupts import Bell, Servers, Strikes, shots
from tests.programs.places import place


def a_lock(face: str, urls: list[str], kind: str, **options: Any) -> Lock | ReentrantLock:
    """A lock that polls so rarely that whatever it gets it has heard of."""
    if face == "ReentrantLock":
        return ReentrantLock(urls[0], "name", 10, sleep=60, engine=kind, **options)
    return place(urls, kind, timeout=10, sleep=60, **options)


def in_a_child(face: str, urls: list[str], kind: str) -> None:
    """Threads of the parent stand in line; its child has its own line, in which the lock is passed on."""
    lock = a_lock(face, urls, kind)
    served: list[int] = []

    def use(number: int) -> None:
        lock.acquire()
        served.append(number)
        lock.release()

    def start(numbers: range) -> list[threading.Thread]:
        started = []
        for number in numbers:
            before = len(lock._queue.waiters)
            thread = threading.Thread(target=use, args=(number,))
            thread.start()
            started.append(thread)
            eventually(lambda before=before: len(lock._queue.waiters) > before)  # type: ignore[misc]
        return started

    threads = start(range(4))
    print("in line", flush=True)
    input()

    def child() -> bool:
        queue = lock._queue
        assert not queue.waiters
        assert queue.lease is None
        assert queue.aware is None
        assert queue.sentinel is None
        print("forked", flush=True)
        assert lock.acquire(blocking_timeout=5 * SLACK)
        served.clear()
        mine = start(range(10, 13))
        assert len(queue.waiters) == 3
        lock.release()
        for thread in mine:
            thread.join()
        assert served == [10, 11, 12]
        redbolt.close()
        return True

    assert result(fork(child)) is True
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]
    assert not lock._queue.waiters
    redbolt.close()


def interrupted(
    face: str, urls: list[str], kind: str, times: int, span: float, renewed: bool, hits: str
) -> dict[str, Any]:
    """Interrupt so many acquires, or releases, of the main thread while others pass the lock on.

    Args:
        hits: what the interrupts are aimed at, "acquire" or "release".
    """
    faulthandler.dump_traceback_later(50 * SLACK, exit=True)  # not where it forks: a child could not end
    servers, bell, strikes = Servers(urls), Bell(), Strikes()
    with place(urls, kind, "warm-up"):
        pass
    stop = threading.Event()
    wrong: list[str] = []
    inside: list[int] = []
    served = [0] * 3

    def use(number: int) -> None:
        mine = a_lock(face, urls, kind, renew=renewed)
        try:
            while not stop.is_set():
                if not mine.acquire(blocking_timeout=5 * SLACK):
                    wrong.append(f"thread {number} was not served within {5 * SLACK} s")
                    return
                inside.append(number)
                if inside != [number]:
                    wrong.append(f"{inside} at once")
                inside.remove(number)
                mine.release()
                served[number] += 1
        except BaseException as error:
            wrong.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(len(served))]
    for thread in threads:
        thread.start()
    shot = shots(bell)
    hit = kept = 0
    lock = a_lock(face, urls, kind, renew=renewed)
    ends = time.monotonic() + 20 * SLACK
    for count in itertools.count():
        if (count >= times and hit > times / 10) or wrong or time.monotonic() > ends:
            break
        returned = False
        when = time.monotonic() + random.uniform(0, span)
        try:
            if hits == "release":
                lock.acquire()
                when += time.monotonic() - when + random.uniform(0, span)
            strikes.expect(when)
            next(shot)(when)
            if hits == "release":
                lock.release()
            else:
                lock.acquire()
            returned = True
            while True:
                time.sleep(0.0001)
        except KeyboardInterrupt:
            strikes.latency()
        bell.wait()
        hit += not returned
        if lock.held:
            kept += 1
            inside.append(-1)
            if inside != [-1]:
                wrong.append(f"{inside} at once")
            if not lock.owned():
                wrong.append(f"{count}: it claims what the servers do not have")
            inside.remove(-1)
        elif returned and hits == "acquire":
            wrong.append(f"{count}: acquire has returned, but the lock is not held")
        if lock.lease is not None:
            try:
                lock.release()
            except LockNotOwned as error:
                if hits == "acquire":
                    wrong.append(f"{count}: {error!r}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    stop.set()
    for thread in threads:
        thread.join()
    queue = lock._queue
    if queue.waiters:
        wrong.append(f"{len(queue.waiters)} are left in line")
    if queue.held_here():
        wrong.append("the line takes the lock for held")
    try:
        eventually(lambda: not servers.tokens(), 0.5)
    except AssertionError:
        wrong.append(f"left: {sorted(servers.tokens())}")
    redbolt.close()
    bell.close()
    servers.close()
    return {"hit": hit, "kept": kept, "served": served, "wrong": wrong}


if __name__ == "__main__":
    main(globals())
