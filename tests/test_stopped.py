"""Time that a holder does not see: it is stopped, the machine is suspended, the wall clock is set."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from redbolt import LockLost
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.monitor import Monitor
from tests.programs import expect, finish, program, tell
from tests.programs.places import place

LEASE = 0.3 * SLACK
RIVAL = 10_000
"""The life that the rival's key gets, in ms."""


def line(process: subprocess.Popen[str]) -> str:
    """What the program writes next."""
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        output, errors = process.communicate()
        raise AssertionError(f"it has ended:\n{output}{errors}")
    return text.strip()


def stop(process: subprocess.Popen[str]) -> None:
    """Have all of its threads stand still."""
    os.kill(process.pid, signal.SIGSTOP)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT) is not None


class Rival:
    """Takes the lock on all nodes as soon as it is free, and sees what the old holder does to it."""

    def __init__(self, urls: list[str], monitors: list[Monitor]) -> None:
        self._urls = urls
        self._monitors = monitors

    def take(self) -> None:
        """Wait until the lock is free, and take it."""
        eventually(lambda: all(raw(url, "PTTL", "name") == -2 for url in self._urls), 5 * LEASE + 2)
        for monitor in self._monitors:
            monitor.seen()
        self._since = time.monotonic()
        for url in self._urls:
            assert raw(url, "SET", "name", "the rival's", "NX", "PX", RIVAL)

    def check(self, token: str) -> None:
        """See that the key is untouched, and was not even asked for; then give it back."""
        for url in self._urls:
            assert raw(url, "GET", "name") == b"the rival's"
            life = raw(url, "PTTL", "name")
            lived = (time.monotonic() - self._since) * 1000
            assert RIVAL - lived - 5 <= life <= RIVAL
        for monitor in self._monitors:
            for command, *words in monitor.seen():
                if token in words:
                    # A renewal may have been on its way when it was stopped: it has found another token.
                    assert command != "SET" or "NX" not in words, words
        for url in self._urls:
            assert raw(url, "DEL", "name") == 1

    def stays_free(self) -> None:
        """See that nobody has put anything back."""
        assert [raw(url, "EXISTS", "name") for url in self._urls] == [0] * len(self._urls)


def check_first_look(report: dict[str, Any]) -> None:
    """A holder that was away for longer than its lease knows it at once."""
    assert not report["held"]
    assert report["left"] == 0
    assert report["lost"]
    assert report["reason"] in ("it ran out", "no quorum of nodes answered a renewal in time")
    assert set(report["late"]) == {"wait", "on_lost"}
    for name, late in report["late"].items():
        assert late < 0.05 + 0.1 * SLACK, (name, late)


def stand_still(kind: str, nodes: LocalNodes, size: int, rounds: int, hog: bool) -> None:
    """Take the lock off a holder that stands still, several times."""
    urls = [node.url for node in nodes][:size]
    with ExitStack() as stack:
        monitors = [stack.enter_context(Monitor(node)) for node in list(nodes)[:size]]
        rival = Rival(urls, monitors)
        process = stack.enter_context(
            program("stops", "stand_still", urls=urls, kind=kind, lease=LEASE, rounds=rounds, hog=hog)
        )
        for _ in range(rounds):
            token = line(process)
            if hog:
                tell(process)
                rival.take()
            else:
                time.sleep(random.uniform(0, LEASE))  # any moment of a renewal will do
                stop(process)
                stopped = time.monotonic()
                rival.take()
                time.sleep(max(0, stopped + 1.2 * LEASE - time.monotonic()))
                os.kill(process.pid, signal.SIGCONT)
            check_first_look(json.loads(line(process)))
            rival.check(token)
            tell(process)
        finish(process)
        rival.stays_free()


@pytest.mark.parametrize("size", [1, 3], ids=["Lock", "RedLock"])
def test_a_holder_that_was_stopped_for_longer_than_its_lease(
    kind: str, valkeys: LocalNodes, size: int
) -> None:
    stand_still(kind, valkeys, size, 5, hog=False)


def test_a_holder_whose_agent_did_not_get_the_gil(valkeys: LocalNodes) -> None:
    """The pure engine cannot renew then; so it says that the lock is lost, and leaves it to the rival."""
    stand_still("pure", valkeys, 3, 3, hog=True)


@pytest.mark.parametrize("size", [1, 5], ids=["Lock", "RedLock"])
def test_a_holder_that_is_killed(kind: str, valkeys: LocalNodes, size: int) -> None:
    """Nobody renews its lock any more: whoever waits has it when it ends."""
    urls = [node.url for node in valkeys][:size]
    ttl = 0.6 * SLACK
    with program("stops", "hold", urls=urls, kind=kind, timeout=ttl) as process:
        expect(process, "held")
        lock = place(urls, kind, timeout=5, node_timeout=2 * SLACK)
        assert not lock.acquire(blocking=False)
        got: list[float] = []

        def wait() -> None:
            with lock:
                got.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: lock._queue.waiters)
        process.kill()
        killed = time.monotonic()
        waiting.join(10 * SLACK)
        assert got[0] - killed <= ttl + 0.3 * SLACK


# ---- a suspend, as the clock of the library sees it ----


@pytest.mark.parametrize("size", [1, 3], ids=["Lock", "RedLock"])
def test_a_suspend_for_longer_than_the_lease(
    kind: str, valkeys: LocalNodes, clock: Callable[[float], None], size: int
) -> None:
    urls = [node.url for node in valkeys][:size]
    lost_ones: list[str] = []
    lock = place(
        urls,
        kind,
        timeout=30,
        renew=True,
        node_timeout=2 * SLACK,
        on_lost=lambda lease, reason: lost_ones.append(reason),
    )
    assert lock.acquire()
    lost, heard = lock.lost, threading.Event()
    assert lock.lease is not None
    token, renewal = lock.lease.token.decode(), lock.lease.renewal
    assert renewal is not None

    def wait() -> None:
        if lost.wait():
            heard.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    with Monitor(valkeys[0]) as monitor:
        clock(31)
        assert not lock.held
        assert lost.is_set()
        assert lock.left() == 0
        assert heard.wait(0.5 * SLACK)
        waiting.join()
        eventually(lambda: lost_ones == [lost.reason])
        assert lost.reason == "it ran out"
        eventually(lambda: renewal.lost)
        clock(-31)  # not even if the clock is wrong: what is lost is lost
        assert not lock.held
        assert lost.is_set()
        with pytest.raises(LockLost):
            lock.release()
        seen = [words for words in monitor.seen() if token in words]
        assert not [words for words in seen if words[0] == "SET"], seen  # not renewed, nor put back
    eventually(lambda: raw(urls[0], "EXISTS", "name") == 0)  # the release has deleted it


@pytest.mark.parametrize("size", [1, 3], ids=["Lock", "RedLock"])
def test_a_suspend_for_less_than_the_lease(
    kind: str, valkeys: LocalNodes, clock: Callable[[float], None], size: int
) -> None:
    """The renewal that was due meanwhile is made at once."""
    urls = [node.url for node in valkeys][:size]
    with place(urls, kind, timeout=30, renew=True, node_timeout=2 * SLACK) as lock:
        lease = lock.lease
        assert lease is not None
        renewal: Any = lease.renewal
        assert renewal.renewed == 0
        for times in (1, 2, 3):
            clock(21)
            assert lease.held
            eventually(lambda times=times: renewal.renewed == times, 2)  # type: ignore[misc]
            assert lease.left() > 29
            assert not lease.lost.wait(0)
        assert 29_000 < raw(urls[0], "PTTL", "name") <= 30_000
        assert lock.owned()


def test_whoever_waits_for_a_loss_has_the_clock_of_the_library(
    kind: str, valkeys: LocalNodes, clock: Callable[[float], None]
) -> None:
    """Its time is over when that says so, also if nothing is lost."""
    with place([valkeys[0].url], kind, timeout=30, renew=True) as lock:
        lost = lock.lost
        waiting = threading.Thread(target=lost.wait, args=(10,))
        waiting.start()
        time.sleep(0.05)  # so that it waits, mostly
        clock(11)
        waiting.join(0.5 * SLACK)
        assert not waiting.is_alive()
        assert not lost.is_set()


# ---- the wall clock ----


SHIM = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none, *shift = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("WALL_CLOCK_SHIFT");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED) shift = found;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, id, now);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that, when it is loaded first, sets the wall clock of a program by so many seconds as are in
    a file.
    """
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    source = folder / "shim.c"
    source.write_text(SHIM)
    library = str(folder / "shim.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, str(source)], check=True)
    return library


def test_the_wall_clock_is_set(kind: str, valkeys: LocalNodes, shim: str, tmp_path: Path) -> None:
    """By an hour forward, and two back: no lease, wait or renewal notices."""
    shift = tmp_path / "shift"
    shift.write_bytes(bytes(8))
    environment = {
        "LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), shim])),
        "WALL_CLOCK_SHIFT": str(shift),
    }
    urls = [node.url for node in valkeys][:3]
    with program(
        "stops", "at_another_hour", environment=environment, urls=urls, kind=kind, path=str(shift)
    ) as process:
        finish(process)
