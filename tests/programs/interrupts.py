"""Programs that signals hit at any moment of what they do with locks."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import redis

import redbolt
from redbolt import Lock, LockError, LockNotOwned
from tests.kit.clients import SLACK, eventually, fd_count, thread_count
from tests.programs import main
from tests.programs.places import place

FOREIGN = b"somebody else's"


class Bell:
    """Does something at a given time, in a thread of its own."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[tuple[float, Callable[[], object]] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ring(self, at: float, what: Callable[[], object]) -> None:
        self._idle.clear()
        self._orders.put((at, what))

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        self._idle.wait()

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            at, what = order
            while (left := at - time.monotonic()) > 0:
                time.sleep(max(0.0, left - 0.0003))
            what()
            self._idle.set()


class Servers:
    """Looks at the servers past the library, and plays somebody else there."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._clients: list[Any] = [redis.Redis.from_url(url) for url in urls]

    def take(self, name: str) -> None:
        for client in self._clients:
            client.set(name, FOREIGN, px=60_000)

    def free(self, name: str) -> None:
        for client in self._clients:
            client.delete(name)

    def tokens(self) -> set[str]:
        """The names under which some server has a token."""
        found = set()
        for client in self._clients:
            keys = client.keys()
            values = client.mget(keys) if keys else []
            found |= {
                key.decode() for key, value in zip(keys, values, strict=True) if value not in (None, FOREIGN)
            }
        return found

    def close(self) -> None:
        for client in self._clients:
            client.close()


class Strikes:
    """Raises KeyboardInterrupt at a signal, and again half a second later if that came to nothing.

    Python drops an exception that strikes inside the callback of a weak reference, say.
    """

    def __init__(self) -> None:
        self._moments: list[float] = []
        sys.unraisablehook = self._dropped
        signal.signal(signal.SIGALRM, self._strike)
        signal.signal(signal.SIGINT, self._strike)

    def expect(self, when: float) -> None:
        self._moments = [when]

    def latency(self) -> float:
        """How long after its moment the exception has arrived that has just been caught."""
        now = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return now - self._moments[-2]

    def _strike(self, number: int, frame: object) -> None:
        self._moments.append(time.monotonic() + 0.5)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        raise KeyboardInterrupt

    @staticmethod
    def _dropped(what: sys.UnraisableHookArgs) -> None:
        if what.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(what)


def shots(bell: Bell) -> Iterator[Callable[[float], object]]:
    """Ways to send this process an interrupt at a given time, one after the other."""
    main_thread = threading.get_ident()
    return itertools.cycle(
        [
            lambda when: signal.setitimer(signal.ITIMER_REAL, max(1e-6, when - time.monotonic())),
            lambda when: bell.ring(
                when, lambda: os.kill(os.getpid(), signal.SIGINT)
            ),  # any thread may get it
            lambda when: bell.ring(when, lambda: signal.pthread_kill(main_thread, signal.SIGINT)),
        ]
    )


def interrupt_acquires(
    urls: list[str], kind: str, times: int, span: float, contended: bool
) -> dict[str, Any]:
    """Interrupt that many acquires, each at a random moment of ``span`` seconds; tell what came of them."""
    servers, bell, releaser, strikes = Servers(urls), Bell(), Bell(), Strikes()
    assert servers.tokens() == set()
    with place(urls, kind, "warm-up"):
        pass
    redbolt.close()  # starts the agent, which sees to the end of its connections
    shot = shots(bell)
    inside, latencies = 0, []
    wrong: list[str] = []
    kept: list[Lock] = []
    baseline = (0, 0)
    for i in range(-20, 5 * times):
        if i >= times and inside > times / 10:  # the machine decides how many strike inside
            break
        if i == 0:
            baseline = fd_count(), thread_count()
        name = f"name {i}"
        lock = place(urls, kind, name, sleep=0.002)
        if contended:
            servers.take(name)
        returned = False
        when = time.monotonic() + random.uniform(0, span)
        try:
            if contended and i % 2:
                at = random.uniform(time.monotonic(), when + 0.001)
                releaser.ring(at, lambda name=name: servers.free(name))  # type: ignore[misc]
            strikes.expect(when)
            next(shot)(when)
            returned = lock.acquire()
            while True:
                time.sleep(0.0001)
        except KeyboardInterrupt:
            latencies.append(strikes.latency())
        bell.wait()
        releaser.wait()
        inside += not returned
        if lock.held:
            kept.append(lock)
            if not lock.owned():
                wrong.append(f"{name}: it claims what the servers do not have")
        elif returned:
            wrong.append(f"{name}: acquire has returned, but the lock is not held")
    mine = {lock.name for lock in kept}
    try:
        eventually(lambda: servers.tokens() <= mine, 0.3)
    except AssertionError:
        wrong += [f"{name}: a token is left" for name in servers.tokens() - mine]
    for lock in kept:
        lock.release()

    def settled() -> bool:
        now = fd_count(), thread_count()
        grown = now[0] > baseline[0] or now[1] > baseline[1]
        assert not grown, f"{baseline} -> {now}"
        return True

    eventually(settled, 5, "descriptors and threads are back at the baseline")
    bell.close()
    releaser.close()
    servers.close()
    return {"inside": inside, "worst": max(latencies), "held": len(kept), "wrong": wrong}


def interrupt_releases(urls: list[str], kind: str, times: int, span: float) -> dict[str, Any]:
    """Interrupt releases; each can be repeated, and then the key is gone."""
    servers, strikes = Servers(urls), Strikes()
    inside, latencies, wrong = 0, [], []
    for i in range(5 * times):
        if i >= times and inside > times / 10:
            break
        lock = place(urls, kind, f"name {i}")
        lock.acquire()
        begun = returned = False
        when = time.monotonic() + random.uniform(0, span)
        try:
            strikes.expect(when)
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, when - time.monotonic()))
            begun = True
            lock.release()
            returned = True
            while True:
                time.sleep(0.0001)
        except KeyboardInterrupt:
            latencies.append(strikes.latency())
        inside += begun and not returned
        if returned and lock.lease is not None:
            wrong.append(f"{lock.name!r}: released, but still claimed")
        try:
            lock.release()
        except LockNotOwned as error:
            if lock.lease is not None or type(error) is not LockNotOwned:
                wrong.append(f"{lock.name!r}: {error!r}")
        if lock.held:
            wrong.append(f"{lock.name!r}: still claimed")
    try:
        eventually(lambda: not servers.tokens(), 0.3)
    except AssertionError:
        wrong += [f"{name}: a token is left" for name in servers.tokens()]
    servers.close()
    return {"inside": inside, "worst": max(latencies), "wrong": wrong}


def terminate(urls: list[str], kind: str) -> None:
    """Wait for a lock, and end by a handler of SIGTERM that raises."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, leave)
    lock = place(urls, kind, sleep=0.01)
    try:
        lock.acquire()
    finally:
        print(json.dumps({"held": lock.held}), flush=True)
    raise AssertionError("acquire has returned")


def handlers_that_return(urls: list[str], kind: str) -> dict[str, Any]:
    """A thousand signals a second whose handler does nothing."""
    count = 0

    def handler(number: int, frame: object) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGALRM, handler)
    Servers(urls).take("taken")
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for i in range(100):
        with place(urls, kind, f"name {i}") as lock:
            assert lock.owned()
    started = time.monotonic()
    granted = place(urls, kind, "taken", sleep=0.01).acquire(blocking_timeout=0.2)
    took = time.monotonic() - started
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"granted": granted, "took": took, "count": count}


def handlers_that_lock(urls: list[str], kind: str) -> dict[str, Any]:
    """A handler that takes a lock of its own on the same servers, whatever the program does just then."""
    count, problems, inside = 0, [], False

    def handler(number: int, frame: object) -> None:
        nonlocal count, inside
        if inside:  # this very handler was interrupted, and holds the lock
            return
        inside = True
        try:
            with place(urls, kind, "the handler's", blocking=False) as inner:
                inner.extend(1)
            count += 1
        except LockError as error:
            problems.append(repr(error))
        inside = False

    with place(urls, kind, "the handler's"):
        pass  # everything is imported by now
    signal.signal(signal.SIGALRM, handler)
    end = time.monotonic() + 0.7
    cycles = 0
    while time.monotonic() < end:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 5e-4))
        with place(urls, kind, "name") as lock:
            lock.extend(1)
        cycles += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"count": count, "cycles": cycles, "problems": problems}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(15 * SLACK, exit=True)
    main(globals())
