"""The end of a process: it is not held up, nothing is said, and what it held ends by itself."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import pytest

from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.proxy import FaultProxy
from tests.programs import expect, program, tell


def gone(urls: list[str]) -> None:
    """Check that nothing is left on the servers, or in a moment."""
    eventually(lambda: [raw(url, "DBSIZE") for url in urls] == [0] * len(urls), 1, "nothing is left")


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


# ---- with locks that are renewed ----


HOLDINGS = [
    "in a global",
    "by a thread",
    "in a cycle",
    "with on_lost",
    "while a thread waits for it",
    "while a thread waits for its loss",
]
CODES = {
    "normally": 0,
    "by sys.exit": 3,
    "by an exception": 1,
    "by os._exit": 4,
    "by SIGTERM": -signal.SIGTERM,
}
FAULTS = ["killed", "paused", "half-open"]


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        *[("none", how) for how in CODES],
        *[(fault, how) for fault in FAULTS for how in ("normally", "by an exception")],
    ],
)
def test_a_program_that_ends_while_its_locks_are_renewed(
    kind: str, valkeys: LocalNodes, fault: str, how: str
) -> None:
    """It holds them in all ways at once."""
    with contextlib.ExitStack() as stack:
        urls = [node.url for node in valkeys]
        proxies: list[FaultProxy] = []
        if fault == "half-open":
            proxies = [stack.enter_context(FaultProxy(node)) for node in valkeys]
            urls = [proxy.url for proxy in proxies]
        process = stack.enter_context(
            program("exits", "end", urls=urls, kind=kind, holdings=HOLDINGS, how=how, busy=fault != "none")
        )
        expect(process, "held")
        if fault != "half-open":
            for node in valkeys:
                {"none": lambda: None, "killed": node.kill, "paused": node.pause}[fault]()
        for proxy in proxies:
            proxy.swallow()
        tell(process)
        expect(process, "ending")
        started = time.monotonic()
        output, errors = process.communicate(timeout=10 * SLACK)
        took = time.monotonic() - started
        assert output == ""
        assert process.returncode == CODES[how]
        if how == "by an exception":
            assert errors.endswith("KeyError: 'the program itself'\n")
            assert errors.count("Traceback") == 1
            assert errors.startswith("Traceback (most recent call last):\n")
        else:
            assert errors == ""
        assert took < (0.2 + 0.5) * SLACK
        if fault in ("none", "half-open"):
            left = [raw(node, "PTTL", name.replace(" ", "-")) for node in valkeys for name in HOLDINGS]
            assert all(0 < life <= 1500 * SLACK for life in left), left  # nobody renews them any more


@pytest.mark.parametrize("all_ways", [False, True], ids=["one lock", "in all ways"])
def test_an_end_that_python_looks_at_closely(kind: str, valkeys: LocalNodes, all_ways: bool) -> None:
    """Its development mode would tell of what was not closed, or fails in the last moment."""
    urls = [node.url for node in valkeys]
    with program(
        "exits",
        "end",
        ["-X", "dev", "-W", "error"],
        urls=urls,
        kind=kind,
        holdings=HOLDINGS if all_ways else HOLDINGS[:1],
        how="normally",
        busy=False,
    ) as process:
        expect(process, "held")
        tell(process)
        expect(process, "ending")
        started = time.monotonic()
        output, errors = process.communicate(timeout=10 * SLACK)
        assert (output, errors, process.returncode) == ("", "", 0)
        assert time.monotonic() - started < (0.2 + 0.8) * SLACK  # it has more to do
    eventually(lambda: [raw(url, "DBSIZE") for url in urls] == [0] * 5, 2, "it ends with its lease")
