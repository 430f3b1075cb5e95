"""Programs that wait for a lock: how much work that is, interrupts while it lasts, and forks."""

from __future__ import annotations

import faulthandler
import json
import random
import threading
import time
from typing import Any

import redis

import redbolt
from redbolt import Lock, ReentrantLock, _clock
from tests.kit.clients import SLACK, eventually, fd_count, thread_count
from tests.programs import main
from tests.programs.forks import fork, result
from tests.programs.interrupts import Bell, Servers, Strikes, shots
from tests.programs.places import place


def a_lock(face: str, urls: list[str], kind: str, **options: Any) -> Lock | ReentrantLock:
    """A lock that polls so rarely that whatever it gets it has heard of."""
    if face == "ReentrantLock":
        return ReentrantLock(urls[0], "name", 10, sleep=60, engine=kind, **options)
    return place(urls, kind, timeout=10, sleep=60, **options)


def work(face: str, urls: list[str], kind: str) -> None:
    """Wait; at each line tell the CPU time so far, until the lock is there."""
    lock = a_lock(face, urls, kind)
    done = threading.Event()

    def wait() -> None:
        lock.acquire()
        done.set()
        lock.release()

    waiting = threading.Thread(target=wait)
    waiting.start()
    print("waiting", flush=True)
    over = False
    while not over:
        input()
        over = done.is_set()
        print(json.dumps([time.process_time(), over]), flush=True)
    waiting.join()


def hold(urls: list[str], kind: str, timeout: float) -> None:
    """Take the lock, and never give it back."""
    place(urls, kind, timeout=timeout).acquire()
    print("held", flush=True)
    input()


def interrupted(urls: list[str], kind: str, times: int, span: float) -> dict[str, Any]:
    """Interrupt so many acquires while somebody else holds the lock, and gives it back about then."""
    faulthandler.dump_traceback_later(60 * SLACK, exit=True)
    servers, bell, releaser, strikes = Servers(urls), Bell(), Bell(), Strikes()
    with place(urls, kind, "warm-up"):
        pass
    redbolt.close()
    shot = shots(bell)
    inside = kept = 0
    wrong: list[str] = []
    for i in range(times):
        lock = place(urls, kind, sleep=60)
        servers.take("name")
        returned = False
        when = time.monotonic() + random.uniform(0, span)
        try:
            if i % 4:
                freed = random.uniform(when - span / 4, when + 0.001)
                releaser.ring(freed, lambda: servers.free("name"))
            strikes.expect(when)
            next(shot)(when)
            returned = lock.acquire()
            while True:
                time.sleep(0.0001)
        except KeyboardInterrupt:
            strikes.latency()
        bell.wait()
        releaser.wait()
        inside += not returned
        if lock.held:
            kept += 1
            if not lock.owned():
                wrong.append(f"{i}: it claims what the servers do not have")
            lock.release()
        elif returned:
            wrong.append(f"{i}: acquire has returned, but the lock is not held")
        try:
            eventually(lambda: not servers.tokens(), 0.3)
        except AssertionError:
            wrong.append(f"{i}: a token is left")
        servers.free("name")
        started = time.monotonic()
        if not lock.acquire(blocking_timeout=5 * SLACK):
            wrong.append(f"{i}: the next acquire failed")
        else:
            if (took := time.monotonic() - started) > 1 * SLACK:
                wrong.append(f"{i}: the next acquire took {took:.3f} s")
            lock.release()
    redbolt.close()
    bell.close()
    releaser.close()
    servers.close()
    return {"inside": inside, "kept": kept, "wrong": wrong}


def in_a_child(face: str, urls: list[str], kind: str) -> None:
    """A thread of the parent waits; a child waits on its own, and so does its parent after that."""
    lock, second = (a_lock(face, urls, kind) for _ in range(2))

    def use() -> None:
        lock.acquire()
        lock.release()

    waiting = threading.Thread(target=use)
    waiting.start()
    print("waiting", flush=True)
    input()

    def child() -> bool:
        print("forked", flush=True)
        granted = second.acquire(blocking_timeout=5 * SLACK)
        second.release()
        redbolt.close()
        return granted

    assert result(fork(child)) is True
    waiting.join()


def contend(urls: list[str], kind: str, threads: int, seconds: float) -> dict[str, Any]:
    """Several threads add one to a number on the first server, again and again; tell how often each did."""
    first = place(urls, kind, sleep=0.1)
    served = [0] * threads
    client: Any = redis.Redis.from_url(urls[0])
    print("ready", flush=True)
    input()
    ends = time.monotonic() + seconds

    def add(number: int) -> None:
        lock = place(urls, kind, sleep=0.1)
        while time.monotonic() < ends:
            with lock:
                value = int(client.get("number") or 0)
                client.set("number", value + 1)
            served[number] += 1

    workers = [threading.Thread(target=add, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    client.close()
    return {"served": served, "tries": first._queue.tries, "grants": first._queue.grants}


def crowd(
    urls: list[str], kind: str, threads: int, names: int, impatient: int, patience: float, few: int
) -> None:
    """So many threads wait for so many names, some of them only for a while; tell how things are when these
    have gone, and it has come down to ``few`` descriptors more than before, and at the end.
    """
    threading.stack_size(256 * 1024)
    with place(urls, kind, "warm-up"):
        pass
    redbolt.close()
    time.sleep(0.3 * SLACK)  # until the agent has started
    before = fd_count(), thread_count()
    # A hundred whose time is over at once share one GIL: their last tries may take a while.
    options: dict[str, Any] = {"sleep": 60, "node_timeout": 10 * SLACK}
    locks = [place(urls, kind, f"name {number}", **options) for number in range(names)]
    outcomes: list[list[bool]] = [[], []]

    def wait(number: int) -> None:
        lock = locks[number % names]
        limited = number < impatient
        granted = lock.acquire(blocking_timeout=patience if limited else None)
        outcomes[limited].append(granted)
        if granted:
            lock.release()

    def tell(*facts: object) -> None:
        print(json.dumps([fd_count() - before[0], thread_count() - before[1], *facts]), flush=True)

    workers = [threading.Thread(target=wait, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    eventually(lambda: len(outcomes[True]) == impatient, 20, "the impatient ones have gone")
    _clock.set_offset_ns(31 * 10**9)  # connections that nobody has used for half a minute are closed
    try:
        eventually(lambda: fd_count() - before[0] <= few, 5)
    except AssertionError:
        pass  # the test says so
    tell(any(outcomes[True]), len(outcomes[False]))
    input()
    for worker in workers:
        worker.join()
    locks.clear()
    redbolt.close()

    def settled() -> bool:
        return fd_count() <= before[0] and thread_count() <= before[1]

    try:
        eventually(settled, 5)
    finally:
        tell(sum(outcomes[False]))


if __name__ == "__main__":
    main(globals())
