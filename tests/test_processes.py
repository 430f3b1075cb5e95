"""Threads, processes and interpreters at work together: nobody gets what is another's, or hangs."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redbolt.local import LocalNodes
from tests.kit.clients import eventually, raw
from tests.programs import finish, program
from tests.programs.places import place


def gone(urls: list[str]) -> None:
    """Check that nothing is left on the servers, or in a moment."""
    eventually(lambda: [raw(url, "DBSIZE") for url in urls] == [0] * len(urls), 1, "nothing is left")


@pytest.fixture(params=[1, 5], ids=["Lock", "RedLock"])
def urls(request: pytest.FixtureRequest, valkeys: LocalNodes) -> list[str]:
    """Where the lock lives: on one server, or on five."""
    return [node.url for node in valkeys][: request.param]


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


# ---- several interpreters in one process ----


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "not isolated"])
@pytest.mark.parametrize("first", ["main", "another"])
def test_a_sub_interpreter(valkeys: LocalNodes, first: str, isolated: bool) -> None:
    """It has the pure engine, without an agent; the main interpreter has the core, whoever was first."""
    urls = [node.url for node in valkeys]
    with program("interpreters", "several", urls=urls, first=first, isolated=isolated) as process:
        *_, last = finish(process).splitlines()
    found = json.loads(last)
    assert found.pop(0 if first == "main" else -1) == {"main": "native"}
    assert len(found) == 2
    for one in found:
        name, reason = one.pop("engine")
        assert name == "pure"
        assert "main interpreter" in reason
        assert "main interpreter" in one.pop("native")
        assert one.pop("lost") == "it ran out"
        for what in ("no timeout", "renew", "on_lost"):
            assert "no agent in a sub-interpreter" in one.pop(what)
        assert set(one) == {"Lock", "by name", "RedLock", "ReentrantLock"}
    eventually(lambda: [raw(url, "EXISTS", "name", "hash") for url in urls] == [0] * 5, 1)
