"""Forks and exec: a lock stays its parent's, and a child neither uses nor keeps open what is its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.programs import expect, finish, program, tell
from tests.programs.places import place

no_proc = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="only Linux shows the descriptors of a process"
)
no_asan = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer's allocator stays locked in a child if another thread was inside at the fork",
)

FACES = ["Lock", "RedLock", "ReentrantLock"]


def gone(urls: list[str], within: float = 2) -> None:
    """Check that no lock is left on the servers, or in a moment."""

    def keys() -> set[bytes]:
        found: set[bytes] = set().union(*[raw(url, "KEYS", "*") for url in urls])
        return {key for key in found if not key.startswith(b"redisson_unlock_latch")}

    eventually(lambda: not keys(), within, "nothing is left")


@pytest.fixture(params=[1, 5], ids=["Lock", "RedLock"])
def urls(request: pytest.FixtureRequest, valkeys: LocalNodes) -> list[str]:
    """Where the lock lives: on one server, or on five."""
    return [node.url for node in valkeys][: request.param]


def urls_for(face: str, nodes: LocalNodes) -> list[str]:
    """Where such a lock lives."""
    return [node.url for node in nodes][: 5 if face == "RedLock" else 1]


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


# ---- forks while leases are renewed ----


@no_proc
@pytest.mark.parametrize(
    ("face", "way", "holder"),
    [
        ("Lock", "os.fork", "the forking thread"),
        ("RedLock", "os.fork", "another thread"),
        ("RedLock", "multiprocessing", "the forking thread"),
        ("ReentrantLock", "os.fork", "the forking thread"),
        ("ReentrantLock", "os.fork", "another thread"),
    ],
)
def test_a_renewed_lock_stays_the_parents(
    kind: str, valkeys: LocalNodes, face: str, way: str, holder: str
) -> None:
    where = urls_for(face, valkeys)
    with program(
        "children", "while_renewed", face=face, urls=where, kind=kind, way=way, holder=holder
    ) as process:
        finish(process)
    gone(where)


@no_proc
@no_asan
def test_a_fork_at_any_moment_of_rounds_and_renewals(kind: str, valkeys: LocalNodes) -> None:
    where = urls_for("RedLock", valkeys)
    with program("children", "at_any_moment", urls=where, kind=kind, times=200) as process:
        finish(process, 60)


@no_proc
@pytest.mark.parametrize("face", ["RedLock", "ReentrantLock"])
def test_a_fork_in_c_that_nobody_tells_of(kind: str, valkeys: LocalNodes, face: str) -> None:
    where = urls_for(face, valkeys)
    with program("children", "behind_pythons_back", face=face, urls=where, kind=kind, times=25) as process:
        finish(process)
    gone(where)


def test_a_child_of_a_fork_in_c_that_never_had_a_lease(kind: str, valkeys: LocalNodes) -> None:
    where = urls_for("RedLock", valkeys)
    with program("children", "without_a_lease", urls=where, kind=kind) as process:
        finish(process)


def test_workers_of_a_server_that_has_used_locks_before(kind: str, valkeys: LocalNodes) -> None:
    """They are forked by a master that goes on holding one, and restarted once."""
    where = urls_for("RedLock", valkeys)
    with program("children", "preload", urls=where, kind=kind, workers=4, times=5) as process:
        finish(process)


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


def inherited() -> list[str]:
    """The connections and such that a program has which is executed now."""
    child = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS],
        close_fds=False,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return sorted(name for name in child.stdout.split() if name.startswith(("socket", "anon_inode", "pipe")))


@no_proc
def test_an_executed_child_inherits_no_connection(kind: str, valkeys: LocalNodes) -> None:
    before = inherited()
    urls = [node.url if i % 2 else node.unix_url for i, node in enumerate(valkeys)]
    local = [f"redis://localhost:{valkeys[0].port}"]
    with place(urls, kind, "a"), place(urls[:1], kind, "b"), place(local, kind, "c"):
        assert inherited() == before
        valkeys[4].kill()  # so that the agent has something to do, too
        with place(urls, kind, "d"):
            assert inherited() == before


@no_proc
def test_an_executed_child_inherits_nothing_of_the_agent(kind: str, valkeys: LocalNodes) -> None:
    """Also while leases are renewed all the time, and one is waited for."""
    before = inherited()
    urls = [node.url for node in valkeys]
    options = {"timeout": 0.5 * SLACK, "renew": True, "node_timeout": 2 * SLACK}
    with place(urls, kind, "a", **options) as lock, place(urls[:1], kind, "b", **options):
        assert lock.lease is not None
        renewal: Any = lock.lease.renewal
        lost = lock.lost
        waiting = threading.Thread(target=lost.wait)
        waiting.start()
        eventually(lambda: renewal.renewed)
        for _ in range(5):
            assert inherited() == before
    waiting.join()
    assert not lost.is_set()
