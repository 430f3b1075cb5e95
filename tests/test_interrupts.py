"""Ctrl-C and other signals at any moment: they come through at once, and leave nothing on the servers.

The signals hit a program of its own, so that they do not hit the tests.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from typing import Any

import pytest

from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.proxy import FaultProxy
from tests.programs import finish, program


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
    assert 0.3 <= result["took"] < 0.3 + 0.15 * SLACK
    assert result["count"] > 50


@pytest.mark.parametrize("count", [1, 5])
def test_a_handler_that_takes_a_lock_itself(kind: str, valkeys: LocalNodes, count: int) -> None:
    result = outcome("handlers_that_lock", urls=[node.url for node in valkeys][:count], kind=kind)
    assert result["problems"] == []
    assert result["count"] > 20
    assert result["cycles"] > 20
