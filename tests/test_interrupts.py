"""Ctrl-C and other signals at any moment: they come through at once, and leave nothing on the servers.

The signals hit a program of its own, so that they do not hit the tests.
"""

from __future__ import annotations

import dis
import functools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

import pytest

import redbolt
from redbolt import LockNotOwned
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.proxy import FaultProxy
from tests.programs import finish, program
from tests.programs.places import place


def outcome(scenario: str, **arguments: Any) -> dict[str, Any]:
    """Run a scenario to its end."""
    with program("interrupts", scenario, **arguments) as process:
        result: dict[str, Any] = json.loads(finish(process))
        return result


SCENARIOS = {
    # nodes, times, seconds in which the interrupt comes, whether somebody else is first, delay of three nodes
    "one node": (1, 200, 0.0004, False, 0.0),
    "five nodes": (5, 150, 0.001, False, 0.0),
    "one node, taken": (1, 70, 0.015, True, 0.0),
    "five nodes, taken": (5, 30, 0.02, True, 0.0),
    "five nodes, three of them slow": (5, 50, 0.015, False, 0.005),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_interrupt_at_any_moment_of_acquire(kind: str, valkeys: LocalNodes, scenario: str) -> None:
    count, times, span, contended, delay = SCENARIOS[scenario]
    nodes = list(valkeys)[:count]
    with ExitStack() as stack:
        urls = [node.url for node in nodes]
        if delay:
            for i, node in enumerate(nodes[:3]):
                proxy = stack.enter_context(FaultProxy(node))
                proxy.delay(up=delay / 2, down=delay / 2)
                urls[i] = proxy.url
        result = outcome(
            "interrupt_acquires", urls=urls, kind=kind, times=times, span=span, contended=contended
        )
    assert result["wrong"] == []
    assert result["worst"] < 0.1 * SLACK
    assert result["inside"] > times / 10  # else nothing was tested
    left = [raw(node, "GET", key) for node in nodes for key in raw(node, "KEYS", "*")]
    assert set(left) <= ({b"somebody else's"} if contended else set())


@pytest.mark.parametrize(("count", "span"), [(1, 0.0003), (5, 0.0006)])
def test_an_interrupt_at_any_moment_of_release(
    kind: str, valkeys: LocalNodes, count: int, span: float
) -> None:
    urls = [node.url for node in valkeys][:count]
    result = outcome("interrupt_releases", urls=urls, kind=kind, times=150, span=span)
    assert result["wrong"] == []
    assert result["worst"] < 0.1 * SLACK
    assert result["inside"] > 10


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("how", ["taken", "silent"])
def test_a_handler_that_raises_ends_the_wait(kind: str, valkeys: LocalNodes, count: int, how: str) -> None:
    nodes = list(valkeys)[:count]
    for node in nodes:
        raw(node, "SET", "name", "somebody else's")
        raw(node, "CONFIG", "RESETSTAT")
    with program("interrupts", "terminate", urls=[node.url for node in nodes], kind=kind) as process:
        assert process.stdout is not None
        eventually(lambda: "cmdstat_type" in raw(nodes[0], "INFO", "commandstats"), what="it was refused")
        if how == "silent":
            for node in nodes:
                node.pause()
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.readline()) == {"held": False}
        assert time.monotonic() - started < 0.1 * SLACK
        assert finish(process, 1, code=7) == ""
        assert time.monotonic() - started < 1 * SLACK
    for node in nodes:
        node.resume()
    for node in nodes:
        assert raw(node, "GET", "name") == b"somebody else's"
        assert raw(node, "DBSIZE") == 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_handler_that_returns_changes_nothing(kind: str, valkeys: LocalNodes, count: int) -> None:
    result = outcome("handlers_that_return", urls=[node.url for node in valkeys][:count], kind=kind)
    assert result["granted"] is False
    assert 0.2 <= result["took"] < 0.2 + 0.15 * SLACK
    assert result["count"] > 50


@pytest.mark.parametrize("count", [1, 5])
def test_a_handler_that_takes_a_lock_itself(kind: str, valkeys: LocalNodes, count: int) -> None:
    result = outcome("handlers_that_lock", urls=[node.url for node in valkeys][:count], kind=kind)
    assert result["problems"] == []
    assert result["count"] > 20
    assert result["cycles"] > 20


# ---- at each place, one by one ----

PACKAGE = os.path.dirname(redbolt.__file__)


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """Where the interpreter looks for signals: after a call, at the start of a function, at a loop's end."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        # It looks before a call is over; what follows in the same `try` is as good as that, a return is not.
        if before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and "RETURN" not in instruction.opname:
            found.add(instruction.offset)
        before = instruction.opname
    return frozenset(found)


def finalizing(frame: FrameType | None) -> bool:
    """Whether this is a part of a finalizer: Python lets nothing come out of those."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


Place = tuple[CodeType, int, int]
"""A function, a place in it, and how many times it was there before."""


class Interrupt:
    """Raises KeyboardInterrupt at one of these places in the library's code, and notes all it comes by."""

    def __init__(self, at: Place | None = None) -> None:
        self._at = at
        self.seen: list[Place] = []
        self._times: Counter[tuple[CodeType, int]] = Counter()

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        code, offset = frame.f_code, frame.f_lasti
        if event == "opcode" and offset in places(code):
            place = code, offset, self._times[code, offset]
            self._times[code, offset] += 1
            self.seen.append(place)
            if place == self._at and not finalizing(frame):
                raise KeyboardInterrupt
        return self._step


def interrupted(at: Place, verb: Callable[[], object]) -> bool:
    """Interrupt this call at this place; False if it did not come there."""
    try:
        with Interrupt(at):
            verb()
    except KeyboardInterrupt:
        return True
    return False


def some(
    prepare: Callable[[], redbolt.Lock], verb: Callable[[redbolt.Lock], object], most: int = 150
) -> list[Place]:
    """All places of this call, but of those inside the pure engine not more than ``most``."""
    for _ in range(2):  # Python 3.12+ begins with the second call of each function
        lock = prepare()
        with Interrupt() as nowhere:
            verb(lock)
        if lock.lease is not None:
            lock.release()
    inside = [place for place in nowhere.seen if "_pure" in place[0].co_filename]
    outside = [place for place in nowhere.seen if "_pure" not in place[0].co_filename]
    assert len(outside) > 5
    return outside + random.sample(inside, min(most, len(inside)))


@pytest.fixture(params=[1, 5], ids=["Lock", "RedLock"])
def urls(request: pytest.FixtureRequest, valkeys: LocalNodes) -> list[str]:
    """Where the lock lives: on one server, or on five."""
    return [node.url for node in valkeys][: request.param]


def no_token_is_left(urls: list[str]) -> None:
    eventually(lambda: [raw(url, "KEYS", "*") for url in urls] == [[]] * len(urls), 0.3, "no token is left")


@pytest.mark.parametrize("verb", [redbolt.Lock.acquire, redbolt.Lock.__enter__])
def test_an_interrupt_at_each_place_of_acquire(
    kind: str, urls: list[str], verb: Callable[[redbolt.Lock], object]
) -> None:
    for number, at in enumerate(some(lambda: place(urls, kind, "first"), verb)):
        lock = place(urls, kind, f"name {number}")
        if interrupted(at, lambda lock=lock: verb(lock)):  # type: ignore[misc]
            assert lock.lease is None, at
        else:
            lock.release()
    no_token_is_left(urls)


def test_an_interrupt_at_each_place_of_a_waiting_acquire(kind: str, urls: list[str]) -> None:
    def waiting(name: str) -> redbolt.Lock:
        for url in urls:
            raw(url, "SET", name, "somebody else's", "PX", 3)
        return place(urls, kind, name, sleep=0.002)

    for number, at in enumerate(some(lambda: waiting("first"), redbolt.Lock.acquire, 70)):
        lock = waiting(f"name {number}")
        if interrupted(at, lock.acquire):
            assert lock.lease is None, at
        else:
            lock.release()
    no_token_is_left(urls)


def test_an_interrupt_at_each_place_of_release(kind: str, urls: list[str]) -> None:
    def taken(name: str) -> redbolt.Lock:
        lock = place(urls, kind, name)
        lock.acquire()
        return lock

    for number, at in enumerate(some(lambda: taken("first"), redbolt.Lock.release)):
        lock = taken(f"name {number}")
        if interrupted(at, lock.release):
            assert not lock.held or lock.owned(), at
            try:
                lock.release()  # it can be repeated
            except LockNotOwned:
                assert lock.lease is None
        assert not lock.held
    no_token_is_left(urls)


def test_an_interrupt_at_each_place_of_extend(kind: str, urls: list[str]) -> None:
    """It may have been lengthened or not; the lock never claims more than the servers have."""

    def taken(name: str) -> redbolt.Lock:
        lock = place(urls, kind, name, timeout=10)
        lock.acquire()
        return lock

    lock = taken("name")
    for at in some(lambda: taken("first"), lambda lock: lock.extend(10, replace_ttl=True)):
        interrupted(at, lambda: lock.extend(random.choice((10, 20)), replace_ttl=True))
        assert lock.held
        assert lock.owned()
        ttls = sorted(raw(url, "PTTL", "name") for url in urls)
        assert ttls[len(urls) // 2] >= lock.left() * 1000
    lock.release()
    no_token_is_left(urls)
