"""What only the native engine has: its gates, and an agent that looks after a node that only watches use."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import redbolt
from redbolt._clock import now_ns
from redbolt._engine import LIFE_TOLD, LOST, READY, Engine, Watch, engine_for
from redbolt._judge import FAULT, YES
from redbolt._programs import DROP
from redbolt.local import LocalNode
from tests.kit.clients import SLACK, eventually
from tests.kit.resp import NIL, OK, error, push
from tests.kit.rounds import KEY, TOKEN, InBackground, ask, attempt, by_name, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import expect, handshake, hang_up, ignore_rest, send, serve

_core: Any = importlib.import_module("redbolt._core")
E = 0.15 * SLACK
S = 1_000_000_000
FAR = 1 << 62
LIMIT = int(2 * SLACK * S)
SHORT = int(0.05 * SLACK * S)


def engine_of(*urls: str) -> Engine:
    return engine_for(tuple(map(redbolt.Node.from_url, urls)), "native")


def heard(watch: Watch, count: int = 1) -> list[tuple[int, int, int, int]]:
    """At least so many events."""
    events: list[tuple[int, int, int, int]] = []
    until = now_ns() + int(5 * SLACK * S)
    while len(events) < count:
        events += watch.wait(until)
        assert now_ns() < until, events
    return events


def armed(watch: Watch, limit_ns: int = LIMIT) -> None:
    watch.arm(KEY, 1, limit_ns)
    if heard(watch)[0][0] == READY:
        watch.arm(KEY, 1, limit_ns)
        assert heard(watch)[0][0] == LIFE_TOLD


def take(engine: Engine, watch: Watch, limit_ns: int = LIMIT, token: bytes | None = TOKEN) -> list[int]:
    votes = engine.votes()
    watch.attempt(votes, KEY, token, 10_000, 1, 0, limit_ns)
    return said(votes)


# ---- gates ----


def test_a_wake_is_kept_until_somebody_waits_and_several_are_one() -> None:
    gate = engine_of("redis://127.0.0.1:1").gate()
    assert gate.wait(0) is False
    gate.wake()
    gate.wake()
    assert gate.wait(0) is True
    assert gate.wait(0) is False


@pytest.mark.parametrize("seconds", [0.0005, 0.02, 0.12])
def test_a_gate_opens_at_its_time(seconds: float) -> None:
    started = time.monotonic()
    assert _core.Gate().wait(now_ns() + int(seconds * S)) is False
    assert seconds <= time.monotonic() - started < seconds + E


@pytest.mark.parametrize("on_main", [True, False])
def test_a_wake_ends_the_wait(on_main: bool) -> None:
    gate = _core.Gate()
    for _ in range(20):
        if on_main:
            waker = threading.Timer(0.002, gate.wake)
            waker.start()
            assert gate.wait(FAR) is True
            waker.join()
        else:
            waiter = InBackground(lambda: gate.wait(FAR))
            time.sleep(0.002)
            gate.wake()
            assert waiter.result() is True


def test_no_wake_is_missed() -> None:
    """A baton goes round among many threads, each of which may be on its way to sleep."""
    gates = [_core.Gate() for _ in range(50)]
    seen: list[int] = []

    def pass_on(number: int) -> None:
        for _ in range(100):
            assert gates[number].wait(now_ns() + int(20 * SLACK * S))
            seen.append(number)
            gates[(number + 1) % len(gates)].wake()

    threads = [InBackground(lambda number=number: pass_on(number)) for number in range(len(gates))]  # type: ignore[misc]
    gates[0].wake()
    for thread in threads:
        thread.result(30)
    assert seen == 100 * list(range(len(gates)))


def test_several_may_wait_at_one_gate() -> None:
    gate = _core.Gate()
    waiters = [InBackground(lambda: gate.wait(FAR)) for _ in range(3)]
    for left in (3, 2, 1):
        time.sleep(0.01)
        gate.wake()
        eventually(lambda left=left: sum(one.is_alive() for one in waiters) == left - 1)  # type: ignore[misc]


@pytest.mark.parametrize("on_main", [True, False])
def test_a_moved_clock_ends_the_waits_that_are_over(clock: Callable[[float], None], on_main: bool) -> None:
    gates = [_core.Gate(), _core.Gate()]
    until, later = now_ns() + 100 * S, now_ns() + 1000 * S
    longest = InBackground(lambda: gates[1].wait(later))
    if on_main:
        mover = threading.Timer(0.05, clock, (200,))
        mover.start()
        assert gates[0].wait(until) is False
        mover.join()
    else:
        waiter = InBackground(lambda: gates[0].wait(until))
        time.sleep(0.05)
        clock(200)
        assert waiter.result() is False
    assert longest.is_alive()
    gates[1].wake()
    assert longest.result() is True


def test_a_gate_costs_no_time_while_nobody_wakes_it() -> None:
    gate = _core.Gate()
    waiter = InBackground(lambda: (gate.wait(FAR), time.thread_time())[1])
    time.sleep(0.5)
    gate.wake()
    assert waiter.result() < 0.005 * SLACK


@contextmanager
def alarm(handler: Callable[..., object], seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_runs_while_the_main_thread_waits() -> None:
    class Ring(Exception):
        pass

    def ring(*_: object) -> None:
        raise Ring

    gate = _core.Gate()
    started = time.monotonic()
    with alarm(ring, 0.05), pytest.raises(Ring):
        gate.wait(FAR)
    assert time.monotonic() - started < 0.1 + E
    with alarm(lambda *_: gate.wake(), 0.05):
        assert gate.wait(FAR) is True


def test_a_gate_in_a_forked_child() -> None:
    gate = _core.Gate()
    waiter = InBackground(lambda: gate.wait(FAR))
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        try:
            gate.wake()
            kept = gate.wait(0)
            threading.Timer(0.02, gate.wake).start()
            os._exit(0 if kept and gate.wait(now_ns() + 5 * S) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert waiter.is_alive()
    gate.wake()
    assert waiter.result() is True


# ---- one thread at a time ----


def test_a_watch_that_is_closed_by_another_thread_ends_its_wait(valkey: LocalNode) -> None:
    engine = engine_of(valkey.url)
    watch = engine.watch()
    armed(watch)
    waiter = InBackground(lambda: watch.wait(FAR))
    time.sleep(0.05)
    for use in (lambda: watch.wait(0), lambda: watch.arm(KEY, 1, LIMIT), lambda: take(engine, watch)):
        with pytest.raises(RuntimeError, match="somebody else"):
            use()
    watch.close()
    assert waiter.result() == []
    with pytest.raises(RuntimeError, match="closed"):
        watch.wait(0)
    watch.poke()
    watch.close()
    again = engine.watch()
    again.arm(KEY, 1, LIMIT)
    assert heard(again)[0][0] == LIFE_TOLD, "its connection was not used again"
    again.close()


# ---- an engine of which only watches are used ----


def test_an_undo_that_a_watch_owes_is_sent_by_the_agent() -> None:
    """Its connection has died, and there is no other channel."""
    script = [expect("SET"), expect("PTTL"), hang_up()]
    with ScriptedNode(script, answer=by_name(), background=handshake) as node:
        engine = engine_of(node.url)
        watch = engine.watch()
        assert take(engine, watch) == [FAULT]
        eventually(lambda: node.received("EVAL"))
        assert TOKEN in node.received("EVAL")[0].argv
        eventually(lambda: not engine.pending(TOKEN))
        watch.close()
        engine.close()


@pytest.mark.parametrize("others", [False, True], ids=["no other channel", "an idle channel"])
@pytest.mark.parametrize("ping", [b"+PONG\r\n", error("ERR unknown command 'PING'"), hang_up()], ids=repr)
def test_a_node_that_is_silent_to_a_watch_is_asked_on_another_connection(others: bool, ping: object) -> None:
    """Nothing is open there that it could answer, and so it would never cease to be a suspect."""
    silent = [expect("HELLO"), send(b"%0\r\n"), expect("CLIENT"), send(OK), expect("PTTL"), ignore_rest()]
    busy = [expect("SET"), send(OK), serve(by_name(PING=ping))]  # type: ignore[arg-type]
    with ScriptedNode(*([busy] if others else []), silent, answer=by_name(PING=ping)) as node:  # type: ignore[arg-type]
        engine = engine_of(node.url)
        if others:
            assert said(attempt(engine)) == [YES]
        watch = engine.watch()
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch)[0][0] == READY
        watch.arm(KEY, 1, SHORT)
        assert heard(watch) == [(LOST, 0, 0, 0)]
        eventually(lambda: not engine.absent())
        watch.close()
        redbolt.close()


def test_what_comes_for_a_watch_that_is_closed_is_read_away() -> None:
    """The agent waits for the answer to its undo there; the rest is nobody's, and no event for the next."""
    late = [push("invalidate", [KEY]), NIL, push("invalidate", None), b":5\r\n", push("message", "a", "b")]
    script = [
        expect("SET"), expect("PTTL"), expect("EVAL"), send(*late, b":0\r\n"),
        expect("PTTL"), send(b":-2\r\n"), ignore_rest(),
    ]  # fmt: skip
    with ScriptedNode(script, answer=by_name(), background=handshake) as node:
        engine = engine_of(node.url)
        watch = engine.watch()
        assert take(engine, watch, SHORT) == [FAULT]
        watch.close()
        eventually(lambda: not engine.pending(TOKEN) and not engine.absent())
        watch = engine.watch()
        watch.arm(KEY, 1, LIMIT)
        assert heard(watch) == [(LIFE_TOLD, 0, engine.mark(KEY), -2)]
        watch.close()
        redbolt.close()


def test_marks_are_told_apart_by_the_channel_of_a_push() -> None:
    """Pieces of a push decide nothing by their text where they do not stand where it counts."""
    odd = [
        push("invalidate", ["a", "b"]),
        push("message", KEY, "invalidate"),
        push("pmessage", KEY, KEY, KEY),
        push("invalidate", None),
        push("invalidate", [KEY]),
        push("tracking-redir-broken", [KEY]),
        push("invalidate", [KEY], [b"another"]),
    ]
    with ScriptedNode(
        [expect("PTTL"), send(b":-2\r\n"), expect("PTTL"), send(*odd, b":7\r\n"), ignore_rest()],
        background=handshake,
    ) as node:
        engine = engine_of(node.url)
        watch = engine.watch()
        armed(watch)
        watch.arm(KEY, 1, LIMIT)
        mark = engine.mark(KEY)
        told = heard(watch, 6)
        assert [event[:3] for event in told[:-1]] == [(0, 0, one) for one in (0, mark, 0, mark, mark)]
        assert told[-1] == (LIFE_TOLD, 0, mark, 7)
        watch.close()
        redbolt.close()


def test_tries_on_watches_and_rounds_at_once(valkey: LocalNode) -> None:
    """Threads that try on watches, and others that delete by rounds, under each other's feet."""
    engine = engine_of(valkey.url)
    stop = now_ns() + S
    counter = itertools.count()

    def run() -> int:
        watch = engine.watch()
        held = 0
        while now_ns() < stop:
            token = b"t%d" % next(counter)
            if take(engine, watch, token=token) == [YES]:
                held += 1
                ask(engine, DROP, token)
            else:
                watch.wait(now_ns() + S // 10)
        watch.close()
        return held

    threads = [InBackground(run) for _ in range(6)]
    assert sum(thread.result() for thread in threads) > 10
    engine.close()
