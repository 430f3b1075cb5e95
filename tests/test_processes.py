"""Threads, forks and the end of the process: what is whose, what is left, and that nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.programs import expect, finish, program, tell
from tests.programs.places import place


def gone(urls: list[str]) -> None:
    """Check that nothing is left on the servers, or in a moment."""
    eventually(lambda: [raw(url, "DBSIZE") for url in urls] == [0] * len(urls), 1, "nothing is left")


@pytest.fixture(params=[1, 5], ids=["Lock", "RedLock"])
def urls(request: pytest.FixtureRequest, valkeys: LocalNodes) -> list[str]:
    """Where the lock lives: on one server, or on five."""
    return [node.url for node in valkeys][: request.param]


# ---- forks ----


@pytest.mark.parametrize("thread_local", [True, False])
def test_a_lock_stays_the_parents(kind: str, urls: list[str], thread_local: bool) -> None:
    with program("forks", "while_holding", urls=urls, kind=kind, thread_local=thread_local) as process:
        finish(process)
    gone(urls)


def test_a_child_takes_the_lock_when_its_parent_gave_it_back(kind: str, urls: list[str]) -> None:
    with program("forks", "then_take_over", urls=urls, kind=kind) as process:
        finish(process)
    gone(urls)


def test_a_grandchild(kind: str, valkey: LocalNode) -> None:
    with program("forks", "twice", urls=[valkey.url], kind=kind) as process:
        finish(process)
    gone([valkey.url])


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer's allocator stays locked in a child if another thread was inside at the fork",
)
def test_a_fork_while_other_threads_are_in_the_middle_of_rounds(kind: str, valkeys: LocalNodes) -> None:
    urls = [node.url for node in valkeys]
    with program("forks", "in_the_middle_of_rounds", urls=urls, kind=kind, times=50) as process:
        finish(process)


def test_tokens_are_different_after_a_fork(kind: str, valkey: LocalNode) -> None:
    with program("forks", "tokens", urls=[valkey.url], kind=kind, children=3) as process:
        finish(process)


def test_a_fork_by_a_signal_handler_in_the_middle_of_a_round(
    kind: str, valkeys: LocalNodes, urls: list[str]
) -> None:
    with program("forks", "in_a_handler", urls=urls, kind=kind, waiting=False) as process:
        expect(process, "ready")
        for node in valkeys:
            node.pause()
        tell(process)
        expect(process, "forked")
        for node in valkeys:
            node.resume()
        finish(process)
    gone(urls)


def test_a_fork_by_a_signal_handler_between_two_rounds(kind: str, urls: list[str]) -> None:
    with program("forks", "in_a_handler", urls=urls, kind=kind, waiting=True) as process:
        expect(process, "ready")
        for url in urls:
            raw(url, "SET", "name", "somebody else's", "PX", 200)
        tell(process)
        expect(process, "forked")
        finish(process)
    gone(urls)


# ---- exec ----


DESCRIPTORS = """
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        if int(fd) > 2:
            print(os.readlink(f"/proc/self/fd/{fd}"))
    except FileNotFoundError:
        pass  # that of the listing itself
"""


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="only Linux shows the descriptors of a process"
)
def test_an_executed_child_inherits_no_connection(kind: str, valkeys: LocalNodes) -> None:
    def inherited() -> list[str]:
        child = subprocess.run(
            [sys.executable, "-c", DESCRIPTORS],
            close_fds=False,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        return sorted(
            name for name in child.stdout.split() if name.startswith(("socket", "anon_inode", "pipe"))
        )

    before = inherited()
    urls = [node.url if i % 2 else node.unix_url for i, node in enumerate(valkeys)]
    local = [f"redis://localhost:{valkeys[0].port}"]
    with place(urls, kind, "a"), place(urls[:1], kind, "b"), place(local, kind, "c"):
        assert inherited() == before
        valkeys[4].kill()  # so that the agent has something to do, too
        with place(urls, kind, "d"):
            assert inherited() == before


# ---- the end ----


def end(
    urls: list[str], kind: str, how: str, meanwhile: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Have a program take a lock and end; returns its exit code, and what it wrote to standard error."""
    with program("ends", "end", urls=urls, kind=kind, how=how) as process:
        expect(process, "held")
        meanwhile()
        started = time.monotonic()
        tell(process)
        output, errors = process.communicate(timeout=10 * SLACK)
        assert time.monotonic() - started < 1 * SLACK
        assert output == ""
        return process.returncode, errors


@pytest.mark.parametrize(
    "how",
    [
        "normally",
        "by sys.exit",
        "by sys.exit in a thread",
        "by an exception",
        "after close",
        "while daemon threads wait",
        "while daemon threads take locks",
    ],
)
def test_a_program_that_ends_with_a_lock(kind: str, valkeys: LocalNodes, how: str) -> None:
    urls = [node.url for node in valkeys]
    code, errors = end(urls, kind, how)
    if how == "by an exception":
        assert code == 1
        assert errors.endswith("KeyError: 'the program itself'\n")
        assert errors.count("Traceback") == 1
    else:
        assert (code, errors) == (3 if how == "by sys.exit" else 0, "")
    assert 28_000 < raw(urls[0], "PTTL", "name") <= 30_000  # it ends with its lease


@pytest.mark.parametrize("how", ["normally", "by sys.exit in a thread", "after an extend without an answer"])
def test_a_program_that_ends_while_nodes_are_silent(kind: str, valkeys: LocalNodes, how: str) -> None:
    def pause() -> None:
        for node in valkeys:
            node.pause()

    assert end([node.url for node in valkeys], kind, how, pause) == (0, "")
    for node in valkeys:
        node.resume()


@pytest.mark.parametrize("how", ["by an atexit handler", "by an atexit handler older than the library"])
def test_a_program_that_releases_its_lock_at_its_end(kind: str, valkeys: LocalNodes, how: str) -> None:
    urls = [node.url for node in valkeys]
    assert end(urls, kind, how) == (0, "")
    gone(urls)


# ---- threads and processes at work ----


def test_eight_threads_on_eight_keys(kind: str, urls: list[str]) -> None:
    """They do not hold each other up, and nobody gets the answer of another."""

    def work(number: int) -> int:
        lock = place(urls, kind, f"name {number}")
        for _ in range(30):
            assert lock.acquire(blocking=False) is True
            assert lock.owned()
            assert lock.extend(1)
            assert lock.locked()
            lock.release()
            assert not lock.held
        return number

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))
    gone(urls)


@pytest.mark.parametrize("objects", ["one each", "one for all", "one for all, with one lease"])
def test_eight_threads_on_one_key(kind: str, urls: list[str], objects: str) -> None:
    """A counter that nothing else guards loses no update."""
    number = 0
    shared = place(urls, kind, timeout=3, sleep=0.001, thread_local="one lease" not in objects)

    def work(_: int) -> None:
        nonlocal number
        lock = place(urls, kind, timeout=3, sleep=0.001) if objects == "one each" else shared
        for _ in range(15):
            with lock:
                before = number
                time.sleep(0)  # let the others have the interpreter
                number = before + 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert number == 8 * 15


def test_processes_on_one_key(kind: str, valkeys: LocalNodes) -> None:
    urls = [node.url for node in valkeys]
    with (
        program("counts", "count", urls=urls, kind=kind, times=20) as one,
        program("counts", "count", urls=urls, kind=kind, times=20) as another,
        program("counts", "count", urls=urls, kind=kind, times=20) as third,
    ):
        for process in (one, another, third):
            finish(process)
    assert raw(urls[0], "GET", "number") == b"60"
