"""Both engines and all locks go by one clock, which tests can move; whoever waits for it is woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

import redbolt
from redbolt import _clock
from redbolt._clock import now_ns
from redbolt._judge import FAULT, GRANTED
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.resp import OK
from tests.kit.rounds import InBackground, attempt, by_name, causes, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import ignore_rest

Move = Callable[[float], None]
HOUR = 3600.0
CENTURIES = 8e18 / 1e9  # seconds: near the end of 64 bits of nanoseconds
E = 0.15 * SLACK


def test_both_engines_read_the_clock_of_the_library(engine_of, clock: Move) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        for jump in (0.0, HOUR, 100 * HOUR, CENTURIES):
            clock(jump)
            before = now_ns()
            votes = attempt(engine, token=None, lease=10.0)
            assert before <= votes.started_ns <= votes.ended_ns <= now_ns()
            assert votes.verdict == GRANTED
            assert votes.valid_until_ns == votes.started_ns + 10_000_000_000 - 102_000_000


@pytest.mark.parametrize("base", [0.0, HOUR, CENTURIES])
def test_validity_follows_the_clock(kind: str, valkey, clock: Move, base: float) -> None:
    clock(base)
    lock = redbolt.Lock(valkey.url, "name", timeout=HOUR, engine=kind)
    assert lock.acquire()
    drift = HOUR * 0.01 + 0.002
    assert HOUR - drift - 1 < lock.left() <= HOUR - drift
    clock(HOUR - drift - 10)
    assert lock.held
    assert 0 < lock.left() <= 10
    assert lock.extend(HOUR, replace_ttl=True)
    assert HOUR - drift - 1 < lock.left() <= HOUR - drift
    clock(HOUR)
    assert not lock.held
    assert lock.left() == 0.0
    with pytest.raises(redbolt.LockLost):
        lock.extend(10)
    assert raw(valkey, "PTTL", "name") > 1000, "the server's clock goes by itself"
    lock.release()  # the token was still there, so nobody else can have had it
    assert raw(valkey, "EXISTS", "name") == 0


@pytest.mark.parametrize("base", [0.0, HOUR, CENTURIES])
def test_a_waiting_acquire_is_woken_by_the_clock(kind: str, valkey, clock: Move, base: float) -> None:
    clock(base)
    raw(valkey, "SET", "name", "somebody else")
    retry = redbolt.Retry(delay=1000.0)
    lock = redbolt.Lock(valkey.url, "name", timeout=10 * HOUR, retry=retry, engine=kind, waiting="polling")
    raw(valkey, "CONFIG", "RESETSTAT")
    waiting = InBackground(lock.acquire)
    eventually(lambda: tries(valkey) == 1)
    raw(valkey, "DEL", "name")
    time.sleep(0.02)
    assert waiting.is_alive()
    for _ in range(5):  # at the first jump it may not be asleep yet
        clock(1001.0)
        waiting.join(0.1 * SLACK + E)
        if not waiting.is_alive():
            break
    assert waiting.result(0.1) is True
    assert 2 <= tries(valkey) <= 6


@pytest.mark.parametrize("base", [0.0, HOUR, CENTURIES])
def test_who_listens_tries_again_when_the_clock_says_that_the_lease_is_over(
    kind: str, valkey, clock: Move, base: float
) -> None:
    clock(base)
    raw(valkey, "SET", "name", "somebody else", "PX", 1_000_000)
    lock = redbolt.Lock(valkey.url, "name", timeout=10 * HOUR, engine=kind, waiting="tracking")
    raw(valkey, "CONFIG", "RESETSTAT")
    waiting = InBackground(lock.acquire)
    eventually(lambda: calls(valkey, "pttl") == 1)
    time.sleep(0.02)
    assert tries(valkey) == 1
    for _ in range(5):  # at the first jump the life may not be known yet
        clock(1001.0)
        try:
            eventually(lambda: tries(valkey) > 1, 0.2)
        except AssertionError:
            continue
        break
    assert 2 <= tries(valkey) <= 3
    assert waiting.is_alive()  # the server's clock goes by itself
    raw(valkey, "DEL", "name")
    assert waiting.result() is True


def calls(node, name: str) -> int:
    return raw(node, "INFO", "commandstats").get(f"cmdstat_{name}", {}).get("calls", 0)


def tries(node) -> int:
    return calls(node, "set")


@pytest.mark.parametrize("way", ["tracking", "polling"])
def test_the_deadline_of_a_waiting_acquire_goes_by_the_clock(
    kind: str, valkey, clock: Move, way: str
) -> None:
    raw(valkey, "SET", "name", "somebody else")
    raw(valkey, "CONFIG", "RESETSTAT")
    lock = redbolt.Lock(
        valkey.url, "name", timeout=10, sleep=0.005, blocking_timeout=HOUR, engine=kind, waiting=way
    )
    waiting = InBackground(lock.acquire)
    eventually(lambda: tries(valkey) > 1 if way == "polling" else calls(valkey, "pttl"))
    started = time.monotonic()
    clock(HOUR + 1)
    try:
        assert waiting.result() is False
    except redbolt.NodesUnavailable:
        pass  # the jump fell into a round, and ended that
    assert time.monotonic() - started < 0.1 * SLACK + E


def test_a_round_that_waits_is_ended_by_the_clock(engine_of, clock: Move) -> None:
    with ScriptedNode([ignore_rest()], answer=lambda argv: None) as node:
        engine = engine_of(node.url)
        waiting = InBackground(lambda: attempt(engine, limit=HOUR))
        eventually(lambda: node.received("SET"))
        started = time.monotonic()
        clock(HOUR * SLACK + 1)
        votes = waiting.result()
        assert time.monotonic() - started < 0.1 * SLACK + E
        assert said(votes) == [FAULT]
        assert causes(votes)[0].startswith("no answer within")
        engine.close()


@pytest.mark.parametrize("base", [0.0, CENTURIES])
def test_a_node_comes_back_also_with_a_huge_clock(kind: str, valkeys, clock: Move, base: float) -> None:
    clock(base)
    lock = redbolt.RedLock([node.url for node in valkeys], "name", timeout=10, engine=kind)
    valkeys[0].pause()
    for _ in range(3):
        assert lock.acquire(blocking=False)
        lock.release()
    valkeys[0].resume()
    engine = lock._engine

    def all_five() -> bool:
        votes = attempt(engine, b"other", None, quorum=5, limit=0.1)
        return votes.verdict == GRANTED

    eventually(all_five)


def test_the_clock_never_goes_back_and_counts_real_time(clock: Move) -> None:
    before, real = now_ns(), time.monotonic_ns()
    time.sleep(0.01)
    after, real_after = now_ns(), time.monotonic_ns()
    assert abs((after - before) - (real_after - real)) < 5_000_000
    clock(HOUR)
    assert now_ns() - after >= HOUR * 1e9


def test_sleepers_are_woken_by_the_clock(clock: Move) -> None:
    done = threading.Event()

    def sleep() -> None:
        _clock.sleep_until(now_ns() + int(HOUR * 1e9))
        done.set()

    sleeper = InBackground(sleep)
    time.sleep(0.01)
    clock(HOUR / 2)
    assert not done.wait(0.02)
    clock(HOUR / 2 + 1)
    assert done.wait(E)
    sleeper.result()
