"""Programs that fork while they hold locks that are renewed: by Python, and in C without its knowledge."""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import redis

import redbolt
from redbolt import Lock, LockNotOwned, ReentrantLock, _clock, _process
from tests.kit.clients import SLACK, eventually, fd_count, raw, thread_count
from tests.kit.monitor import Monitor
from tests.programs import main
from tests.programs.forks import clients, fork, result
from tests.programs.places import place

LEASE = 0.4 * SLACK
DELETES = {"DEL", ".DEL", "DELEX", ".DELEX", "DELIFEQ", ".DELIFEQ", ".HDEL", "UNLINK"}


class Address:
    """What a `Monitor` wants to know of a server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host, _, port = url.removeprefix("redis://").partition(":")
        self.port = int(port)


def a_lock(face: str, urls: list[str], kind: str, name: str = "name", **options: Any) -> Any:
    """A lock that is renewed, with a lease of `LEASE`."""
    options = {"timeout": LEASE, "renew": True, "node_timeout": 2 * SLACK, **options}
    if face == "ReentrantLock":
        return ReentrantLock(urls[0], name, engine=kind, **options)
    return place(urls, kind, name, **options)


def descriptors() -> set[str]:
    """What this process has open, each with its number."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            pass  # that of the listing itself
    return found


def renewals(lock: Any) -> int:
    """How often the lease of a lock was renewed."""
    return int(lock.lease.renewal.renewed)


def outlives(lock: Any, leases: int) -> None:
    """See that a lock is renewed for so many leases, and is held then."""
    lease = lock.lease
    ends_ns = _clock.now_ns() + int(leases * LEASE * 1e9)
    eventually(lambda: _clock.now_ns() >= ends_ns or not lease.held, leases * LEASE + 5)
    assert lock.lease is lease
    assert lease.held, lease.lost_reason
    assert renewals(lock) >= leases
    assert lock.owned()


def by_multiprocessing(body: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``body`` in a child of multiprocessing; what is returned waits for its result."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(False)

    def run() -> None:
        signal.alarm(int(20 * SLACK))
        writer.send(body())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
        child = context.Process(target=run)
        child.start()
    writer.close()

    def wait() -> Any:
        sent = reader.recv()
        child.join()
        assert child.exitcode == 0
        return sent

    return wait


def by_fork(body: Callable[[], Any]) -> Callable[[], Any]:
    """The same with os.fork; the child ends as a program does."""
    return functools.partial(result, fork(body))


WAYS = {"os.fork": by_fork, "multiprocessing": by_multiprocessing}


def while_renewed(face: str, urls: list[str], kind: str, way: str, holder: str) -> None:
    """The lock stays the parent's, and is renewed there; the child has nothing of it, and locks on its own.

    The holder is the forking thread, or another one, which the child does not have.
    """
    before = descriptors()
    lost: list[str] = []
    lock = a_lock(face, urls, kind, on_lost=lambda lease, reason: lost.append(reason))
    done, taken = threading.Event(), threading.Event()
    leases: list[Any] = []

    def give_back() -> None:
        count = renewals(lock)
        eventually(lambda: renewals(lock) > count)  # it goes on
        assert lock.owned()
        lock.release()

    def hold() -> None:
        assert lock.acquire()
        leases.append(lock.lease)
        taken.set()
        done.wait()
        give_back()

    if holder == "another thread":
        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(10 * SLACK)
    else:
        assert lock.acquire()
        leases.append(lock.lease)
    lease = leases[0]
    eventually(lambda: lease.renewal.renewed >= 2)
    ours = descriptors() - before
    assert ours
    monitors = [Monitor(Address(url)) for url in urls]
    connections = [clients(url) for url in urls]
    born: list[Any] = []  # what the child holds until its end

    def child() -> list[str]:
        assert not lease.held
        left = descriptors() & ours
        assert not left, left
        assert lease.left() == 0.0
        assert not lock.held
        assert lock.left() == 0.0
        assert lease.lost.is_set()
        assert lease.lost.wait()
        assert "parent" in lease.lost.reason
        if holder != "another thread":
            assert lock.lost.is_set()
        assert not lock.owned()
        for verb in (lock.release, lock.reacquire, lambda: lock.extend(1)):
            try:
                verb()
            except LockNotOwned as error:
                told = type(error)
            else:
                raise AssertionError("the child may do this")
            assert told is LockNotOwned
        assert [clients(url) for url in urls] == connections  # there is nothing to send on
        assert not lost
        assert lock.acquire(blocking=False) is False
        own = a_lock(face, urls, kind, "the child's own")
        assert own.acquire()
        outlives(own, 3)
        again = a_lock(face, urls, kind, "the child's second")
        with again:
            token = again.lease.token.decode()
        born.append(own)
        return [own.lease.token.decode(), token]

    sent = WAYS[way](child)()
    assert lease.held
    assert not lost
    tokens = {*sent, lease.token.decode()}
    assert len(tokens) == 3
    if face == "ReentrantLock":
        assert len({token.rpartition(":")[0] for token in tokens}) == 2  # one client id for each process
    for monitor in monitors:
        deletes = [words for name, *words in monitor.seen() if name in DELETES]
        assert not any("name" in words or lease.token.decode() in words for words in deletes), deletes
        monitor.close()
    if holder == "another thread":
        done.set()
        thread.join()
    else:
        give_back()
    assert lost == []


def at_any_moment(urls: list[str], kind: str, times: int) -> None:
    """Other threads are inside rounds, and leases are renewed that are about to end, when it forks."""
    with a_lock("", urls, kind) as first:  # what is imported now is not half imported in a child
        eventually(lambda: renewals(first))
    redbolt.close()
    eventually(lambda: not any("socket:" in name for name in descriptors()))
    before = fd_count(), thread_count()
    stop = threading.Event()
    problems: list[str] = []
    counts = [0] * 6

    def work(number: int) -> None:
        some = urls if number % 2 else urls[:1]
        try:
            while not stop.is_set():
                with place(some, kind, f"busy {number}", node_timeout=2) as lock:
                    lock.extend(1)
                counts[number] += 1
        except BaseException:
            problems.append(traceback.format_exc())

    def keep(number: int) -> None:
        """Hold a lock for as long as it can be renewed in time, again and again."""
        some = urls if number % 2 else urls[:1]
        lock = place(some, kind, f"kept {number}", 0.09, renew=True, node_timeout=2)
        try:
            while not stop.is_set():
                if not lock.acquire(blocking_timeout=1):
                    continue
                lease = lock.lease
                assert lease is not None
                while not stop.is_set() and not lease.lost.wait(0.02):
                    pass
                assert lease.renewal is not None
                counts[number] += lease.renewal.renewed
                try:
                    lock.release()
                except redbolt.LockError:
                    pass
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=keep if number >= 2 else work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()

    def child() -> bool:
        for some in (urls, urls[:1]):
            with place(some, kind, f"child {os.getpid()}", node_timeout=2, renew=True) as lock:
                assert lock.held
        redbolt.close()
        return True

    for i in range(times):
        time.sleep(random.uniform(0, 0.005))
        end = os._exit if i % 10 else sys.exit  # the first is quicker
        assert result(fork(child, end)) is True  # type: ignore[arg-type]
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
    assert all(count >= 5 for count in counts), counts
    redbolt.close()
    eventually(lambda: fd_count() <= before[0] and thread_count() <= before[1], 5, f"{before} again")


# ---- in C, with the GIL held: nobody tells Python, or us ----


_libc = ctypes.PyDLL(None)


def fork_in_c(body: Callable[[], Any]) -> tuple[int, int]:
    """As `fork`, but Python does not know of it; only the forking thread may be used in such a child."""
    read, write = os.pipe()
    pid = _libc.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 1
    try:
        signal.alarm(int(20 * SLACK))
        os.write(write, json.dumps(body()).encode())
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code)


def behind_pythons_back(face: str, urls: list[str], kind: str, times: int) -> None:
    """Such a child owns nothing of its parent's, and is a client of its own, as others are."""
    before = descriptors()
    lock = a_lock(face, urls, kind, timeout=1 * SLACK)
    assert lock.acquire()
    lease = lock.lease
    eventually(lambda: lease.renewal.renewed >= 2)
    ours = descriptors() - before
    parent = _process.owner(), _process.generation
    assert ours

    def child() -> str:
        assert not lock.held
        assert not descriptors() & ours, descriptors() & ours
        assert lease.lost.is_set()
        assert lock.left() == 0.0
        assert _process.owner() != parent[0]
        assert _process.generation != parent[1]
        for verb in (lock.release, lock.reacquire, lambda: lock.extend(1)):
            try:
                verb()
            except LockNotOwned as error:
                told = type(error)
            else:
                raise AssertionError("the child may do this")
            assert told is LockNotOwned
        assert lock.acquire(blocking=False) is False
        own = a_lock(face, urls, kind, f"child {os.getpid()}", timeout=0.1 * SLACK)
        assert own.acquire()
        eventually(lambda: renewals(own))  # by an agent of its own
        token = own.lease.token.decode()
        own.release()
        return str(token)

    tokens = [lease.token.decode()]
    for _ in range(times):
        tokens.append(result(fork_in_c(child)))
        assert lease.held
    assert len(set(tokens)) == times + 1
    if face == "ReentrantLock":
        assert len({token.rpartition(":")[0] for token in tokens}) == times + 1
    count = renewals(lock)
    eventually(lambda: renewals(lock) > count)
    assert lock.owned()
    lock.release()


def without_a_lease(urls: list[str], kind: str) -> None:
    """What needs no lock object that was acquired does not use the parent's connections either."""
    with redbolt.RedLock(urls, "name", engine=kind, node_timeout=2 * SLACK) as lock:
        before = [clients(url) for url in urls]

        def child() -> list[bool]:
            locked = lock.locked()
            grant = lock.lock("by key", 5000)
            assert grant["token"] is not None
            # By connections of its own:
            eventually(lambda: all(clients(url) - old for url, old in zip(urls, before, strict=True)))
            return [locked, grant["validity"], lock.unlock("by key", grant["token"])]

        for _ in range(3):
            assert all(result(fork_in_c(child)))
        assert lock.owned()


# ---- a server that is loaded before it forks its workers ----


def preload(urls: list[str], kind: str, workers: int, times: int) -> None:
    """Locks are made, and some used, before the workers are forked; the master keeps one."""
    shared = a_lock("", urls, kind, "shared", timeout=2 * SLACK, sleep=0.05)
    mine: Lock = a_lock("", urls, kind, "the master's", timeout=2 * SLACK)
    for _ in range(3):
        with shared:
            pass
    assert mine.acquire()
    lease = mine.lease
    assert lease is not None

    def work() -> bool:
        assert not mine.held
        assert mine.acquire(blocking=False) is False
        with redis.Redis.from_url(urls[0]) as client:
            for _ in range(times):
                with shared:
                    assert shared.lease is not None
                    assert shared.lease.renewal is not None
                    before: Any = client.get("number")
                    client.set("number", int(before or 0) + 1)
        return True

    for _ in range(2):
        running = [fork(work) for _ in range(workers)]
        for worker in running:
            assert result(worker) is True
    assert mine.lease is lease
    assert mine.held
    assert mine.owned()
    with shared:
        assert int(raw(urls[0], "GET", "number")) == 2 * workers * times
    mine.release()


if __name__ == "__main__":
    main(globals())
