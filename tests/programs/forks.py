"""Programs that fork: while they hold a lock, in the middle of rounds, and in a signal handler."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from redbolt import LockNotOwned
from redbolt._clock import now_ns
from tests.kit.clients import SLACK, raw
from tests.programs import main
from tests.programs.places import place


def fork(body: Callable[[], object], end: Callable[[int], NoReturn] = sys.exit) -> tuple[int, int]:
    """Fork; the child runs ``body``, sends what it returns, and ends as a program does, or by ``end``.

    Returns:
        The child's pid, and the pipe.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
        pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    signal.alarm(int(8 * SLACK))  # ends a child that hangs
    os.close(read)
    os.write(write, json.dumps(body()).encode())
    os.close(write)
    end(0)


def result(child: tuple[int, int]) -> Any:
    """What the child has sent; it must have ended well."""
    pid, read = child
    data = b""
    while chunk := os.read(read, 65536):
        data += chunk
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(data)


def while_holding(urls: list[str], kind: str, thread_local: bool) -> None:
    """The lock stays the parent's, whatever the child does with the object."""
    lock = place(urls, kind, thread_local=thread_local)
    lock.acquire()
    assert lock.owned()
    for url in urls:
        raw(url, "CONFIG", "RESETSTAT")
    connections = [clients(url) for url in urls]

    def child() -> bool:
        assert not lock.held
        assert lock.left() == 0.0
        assert not lock.owned()
        for verb in (lock.release, lock.reacquire, lambda: lock.extend(1)):
            try:
                verb()
            except LockNotOwned as error:
                told = type(error), "parent" in str(error)
            else:
                raise AssertionError("the child may do this")
            assert told == (LockNotOwned, True)
        for url in urls:
            commands = raw(url, "INFO", "commandstats")
            assert not {
                f"cmdstat_{name}" for name in ("set", "eval", "evalsha", "delifeq", "getrange")
            } & set(commands)
        assert lock.acquire(blocking=False) is False
        assert lock.locked()
        with place(urls, kind, "the child's own") as own:
            assert own.owned()
            own.extend(1)
        return True

    assert result(fork(child)) is True
    assert lock.held
    assert lock.owned()
    assert lock.extend(1)
    for url, before in zip(urls, connections, strict=True):
        assert before <= clients(url)  # the parent's connection is the same, and still good
    lock.release()
    assert lock.acquire(blocking=False)
    lock.release()


def clients(url: str) -> set[str]:
    """The connections that have sent something else than the commands of this very look."""
    clients = raw(url, "CLIENT", "LIST")
    text = clients.decode() if isinstance(clients, bytes) else str(clients)
    return {line.split("addr=")[1].split()[0] for line in text.splitlines() if "cmd=client" not in line}


def then_take_over(urls: list[str], kind: str) -> None:
    """The child takes the lock with the very object, once the parent has given it back."""
    lock = place(urls, kind, sleep=0.005)
    lock.acquire()

    def child() -> str:
        with lock:
            assert lock.lease is not None
            return lock.lease.token.decode()

    started = fork(child)
    assert lock.lease is not None
    token = lock.lease.token.decode()
    assert not select.select([started[1]], [], [], 0.05)[0]  # it waits
    lock.release()
    assert result(started) != token
    with lock:
        pass


def twice(urls: list[str], kind: str) -> None:
    """A grandchild is a process of its own, too."""
    lock = place(urls, kind)
    lock.acquire()

    def grandchild() -> bool:
        assert not lock.held
        with place(urls, kind, "grandchild"):
            return True

    def child() -> bool:
        own = place(urls, kind, "child")
        own.acquire()
        assert result(fork(grandchild))
        assert own.owned()
        own.release()
        return True

    assert result(fork(child))
    assert lock.owned()
    lock.release()


def tokens(urls: list[str], kind: str, children: int) -> None:
    """Random bytes that were drawn before a fork are used by one side only."""

    def draw(name: str) -> list[str]:
        drawn = []
        for i in range(20):
            with place(urls, kind, f"{name} {i}") as lock:
                assert lock.lease is not None
                drawn.append(lock.lease.token.decode())
        return drawn

    with place(urls, kind, "first"):
        pass
    started = [fork(functools.partial(draw, f"child {i}")) for i in range(children)]
    everything = draw("parent")
    for child in started:
        everything += result(child)
    assert len(set(everything)) == len(everything) == 20 * (children + 1)


def in_a_handler(urls: list[str], kind: str, waiting: bool) -> None:
    """A signal handler forks: in the middle of a round, which is the parent's alone then, or between two."""
    parent = os.getpid()
    children: list[int] = []
    born: list[int] = []

    def handler(number: int, frame: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if pid := os.fork():
                children.append(pid)
                print("forked", flush=True)
            else:
                born.append(now_ns())
                faulthandler.dump_traceback_later(5 * SLACK, exit=True)

    lock = place(urls, kind, sleep=0.3, node_timeout=5)
    with lock:  # its connections are there
        pass
    signal.signal(signal.SIGALRM, handler)
    print("ready", flush=True)
    sys.stdin.readline()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        lock.acquire()
    except BaseException:
        if os.getpid() == parent or waiting:
            raise
        os._exit(0)  # that round is the parent's
    assert lock.held
    assert lock.owned()
    assert lock.lease is not None
    own = lock.lease.started_ns > max(born, default=0)
    lock.release()
    if os.getpid() != parent:
        os._exit(0 if own else 1)  # it may have got it later, by a try of its own
    (pid,) = children
    assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    main(globals())
