"""How a waiting acquire spaces its tries: full jitter, the pauses of a policy, a number of tries, a time."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import redbolt
import redbolt._steps.acquire
import redbolt.retry
from redbolt import Lock, LockTimeout, NodesUnavailable, RedLock, Retry
from redbolt._drive import Target, Try, Wait
from redbolt._judge import GRANTED, REFUSED
from redbolt._queue import Queue, Waiter
from redbolt._steps.acquire import acquire
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually
from tests.kit.faults import paused
from tests.kit.resp import NIL, OK, reply
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, Step, handshake

E = 0.15 * SLACK


def taken(argv: Argv) -> bytes | None:
    """A node on which the lock is always taken; it would tell of a change, but there is none."""
    told = {b"SET": NIL, b"TYPE": b"+string\r\n", b"PTTL": reply(30_000)}
    return told.get(argv[0]) or handshake(argv) or reply(0)


def tries(node: ScriptedNode) -> list[float]:
    """When each try arrived."""
    return [one.at for one in node.received("SET")]


def gaps(node: ScriptedNode) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(tries(node))]


class Draws:
    """Stands in for the random numbers: notes the bounds, and draws a given part of each."""

    def __init__(self, part: float) -> None:
        self.part = part
        self.bounds: list[float] = []

    def uniform(self, low: float, high: float) -> float:
        assert low == 0
        self.bounds.append(high)
        return self.part * high


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    stand_in = Draws(1.0)
    monkeypatch.setattr(redbolt.retry, "_random", stand_in)
    return stand_in


class Virtual:
    """Runs the steps of a polling acquire in virtual time, over votes that are given beforehand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.tries_s: list[float] = []
        monkeypatch.setattr(redbolt._steps.acquire, "now_ns", lambda: int(self.now_s * 1e9))

    def run(
        self, verdicts: list[int], retry: Retry, deadline_s: float | None, round_s: float, yes: int = 0
    ) -> bool:
        node = redbolt.Node()
        left = iter(verdicts)

        def votes(verdict: int) -> Any:
            end = int(self.now_s * 1e9)
            return SimpleNamespace(
                verdict=verdict, yes=yes, no=5 - yes, started_ns=end - int(round_s * 1e9), ended_ns=end,
                outcomes=lambda: [(2, "")] * 5,
            )  # fmt: skip

        engine: Any = SimpleNamespace(
            nodes=(node,) * 5, votes=lambda: votes(0), pending=lambda token: False, mark=lambda key: 1
        )
        gate: Any = SimpleNamespace(wake=lambda: None)
        target = Target(b"name", 10_000, 3, 0, 50_000_000)
        deadline_ns = None if deadline_s is None else int(deadline_s * 1e9)
        steps = acquire(
            engine, target, Queue(engine), Waiter(target, gate), votes(next(left)), None, retry, "polling", 0,
            deadline_ns, lambda votes: None,
        )  # fmt: skip
        try:
            while True:
                step = next(steps)
                if isinstance(step, Wait):
                    self.now_s = max(self.now_s, step.until_ns / 1e9)
                elif isinstance(step, Try):
                    self.tries_s.append(self.now_s)
                    self.now_s += round_s
                    vars(step.votes).update(vars(votes(next(left))))
        except StopIteration as end:
            result: bool = end.value
            return result


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Virtual:
    return Virtual(monkeypatch)


# ---- the policy by itself ----


def test_a_fixed_pause() -> None:
    assert [Retry().pause(n) for n in (1, 2, 50)] == [0.1] * 3
    assert [Retry(delay=2).pause(n) for n in (1, 2, 50)] == [2] * 3
    assert Retry(delay=0).pause(1) == 0


def test_an_exponential_pause_has_full_jitter(draws: Draws) -> None:
    retry = Retry(delay=0.1, backoff=2, max_delay=1)
    assert [retry.pause(n) for n in range(1, 8)] == draws.bounds
    assert draws.bounds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1, 1, 1])
    draws.part = 0.0
    assert retry.pause(3) == 0


def test_jitter_is_even_from_nothing_to_the_bound() -> None:
    drawn = [Retry(delay=1, backoff=2, max_delay=8).pause(4) for _ in range(4000)]
    assert 0 <= min(drawn) < 0.1
    assert 7.9 < max(drawn) <= 8
    assert sum(drawn) / len(drawn) == pytest.approx(4, abs=0.3)


def test_a_backoff_without_end_stays_at_its_bound(draws: Draws) -> None:
    for huge in (10_000, 10**9):
        assert Retry(delay=0.1, backoff=10, max_delay=3).pause(huge) == 3
    assert Retry(delay=0.1, backoff=1).pause(10**9) == pytest.approx(0.1)


def test_a_programs_own_seed_does_not_align_its_workers() -> None:
    import random

    retry = Retry(delay=1, backoff=2)
    random.seed(1)
    first = [retry.pause(5) for _ in range(3)]
    random.seed(1)
    assert [retry.pause(5) for _ in range(3)] != first


def test_a_policy_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Retry().count = 2  # type: ignore[misc]
    assert Retry(3, 0.1) == Retry(3)
    assert hash(Retry(3)) == hash(Retry(3, 0.1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"count": 0}, ValueError),
        ({"count": -1}, ValueError),
        ({"count": True}, TypeError),
        ({"count": 2.0}, TypeError),
        ({"count": "2"}, TypeError),
        ({"delay": -0.1}, ValueError),
        ({"delay": math.nan}, ValueError),
        ({"delay": math.inf}, ValueError),
        ({"delay": True}, TypeError),
        ({"delay": "1"}, TypeError),
        ({"delay": None}, TypeError),
        ({"backoff": 0.5}, ValueError),
        ({"backoff": 0}, ValueError),
        ({"backoff": math.nan}, ValueError),
        ({"backoff": math.inf}, ValueError),
        ({"backoff": True}, TypeError),
        ({"max_delay": 0}, ValueError),
        ({"max_delay": -1}, ValueError),
        ({"max_delay": math.inf}, ValueError),
        ({"max_delay": None}, TypeError),
    ],
)
def test_a_policy_that_is_none(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Retry(**options)
    assert caught.type is error
    assert next(iter(options)) in str(caught.value)


# ---- the number of tries ----


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_number_of_tries(kind: str, count: int) -> None:
    with ScriptedNode(answer=taken) as node:
        lock = Lock(node.url, "name", retry=Retry(count, 0.01), engine=kind)
        assert lock.acquire() is False
        assert len(tries(node)) == count
        with pytest.raises(LockTimeout):
            with lock:
                pytest.fail("this block must not run")
        assert len(tries(node)) == 2 * count


def test_a_number_of_tries_at_nodes_that_are_away(kind: str, valkeys: LocalNodes) -> None:
    for node in valkeys:
        node.kill()
    started = time.monotonic()
    with pytest.raises(NodesUnavailable):
        RedLock([node.url for node in valkeys], "name", retry=Retry(3, 0.02), engine=kind).acquire()
    assert 0.04 <= time.monotonic() - started < 0.04 + E


def test_a_number_of_tries_ends_before_the_time_does(kind: str) -> None:
    with ScriptedNode(answer=taken) as node:
        started = time.monotonic()
        lock = Lock(node.url, "name", retry=Retry(2, 0.01), engine=kind)
        assert lock.acquire(blocking_timeout=5) is False
        assert time.monotonic() - started < 0.01 + E
        assert len(tries(node)) == 2


def test_the_time_ends_before_the_number_of_tries_does(kind: str) -> None:
    with ScriptedNode(answer=taken) as node:
        started = time.monotonic()
        lock = Lock(node.url, "name", retry=Retry(1000, 0.02), engine=kind)
        assert lock.acquire(blocking_timeout=0.1) is False
        assert 0.1 <= time.monotonic() - started < 0.1 + E
        assert len(tries(node)) < 10


def test_retry_overrides_sleep_and_an_argument_of_acquire_overrides_both(kind: str, draws: Draws) -> None:
    with ScriptedNode(answer=taken) as node:
        lock = Lock(node.url, "name", sleep=30, retry=Retry(3, 0.02), engine=kind)
        assert lock.acquire() is False
        assert 0.019 <= min(gaps(node)) <= max(gaps(node)) < 0.02 + E
        assert draws.bounds == []  # a policy's pauses are jittered only with a backoff
        assert lock.acquire(sleep=0.06) is False
        assert len(tries(node)) == 6  # the number of tries stays
        assert set(draws.bounds) == {0.06}  # the longest pause; each was drawn as long as it can be
        assert min(gaps(node)[3:]) >= 0.059


# ---- the pauses ----


def test_the_pauses_are_as_the_policy_says(kind: str, draws: Draws) -> None:
    with ScriptedNode(answer=taken) as node:
        lock = Lock(node.url, "name", retry=Retry(5, 0.01, 2, 0.05), engine=kind)
        assert lock.acquire() is False
        for gap, wanted in zip(gaps(node), (0.01, 0.02, 0.04, 0.05), strict=True):
            assert wanted - 0.001 <= gap < wanted + E
    assert draws.bounds[:4] == pytest.approx([0.01, 0.02, 0.04, 0.05])


def test_a_try_that_is_granted_ends_the_waiting(kind: str) -> None:
    answers = iter([NIL, NIL, OK])

    def third_time(argv: Argv) -> bytes | None:
        return next(answers) if argv[0] == b"SET" else taken(argv)

    with ScriptedNode(answer=third_time) as node:
        lock = Lock(node.url, "name", retry=Retry(delay=0.01), engine=kind, waiting="polling")
        assert lock.acquire() is True
        assert len(tries(node)) == 3
        tokens = {one.argv[2] for one in node.received("SET")}
        assert len(tokens) == 3  # each try has its own
        assert lock.lease is not None
        assert lock.lease.token == node.received("SET")[-1].argv[2]
        redbolt.close()


# ---- the time ----


@pytest.mark.parametrize("delay", [0.0, 0.013, 60.0])
@pytest.mark.parametrize("backoff", [None, 3])
@pytest.mark.parametrize("waiting", ["tracking", "polling"])
def test_a_wait_uses_its_whole_time_and_no_more(
    kind: str, delay: float, backoff: float | None, waiting: str
) -> None:
    with ScriptedNode(answer=taken) as node:
        lock = Lock(node.url, "name", retry=Retry(None, delay, backoff), engine=kind, waiting=waiting)
        started = time.monotonic()
        assert lock.acquire(blocking_timeout=0.1) is False
        ended = time.monotonic()
        assert 0.1 <= ended - started < 0.1 + E
        # The last try has started before the end, and has arrived a moment later.
        assert tries(node)[-1] <= started + 0.1 + E
        if waiting == "tracking":  # nothing has changed: the first try and the last one are enough
            assert len(tries(node)) <= 2


def test_the_last_try_comes_just_before_the_end(virtual: Virtual) -> None:
    """A lock that is given back in the middle of a long pause is still got in time."""
    answers = virtual.run([REFUSED] * 9, Retry(delay=60), deadline_s=0.3, round_s=0.001)
    assert answers is False
    assert virtual.tries_s == pytest.approx([0.297])  # two rounds and 1 ms before the end
    assert virtual.now_s == pytest.approx(0.3)


def test_no_try_is_sent_after_the_deadline_by_the_librarys_clock(kind: str, clock: Any) -> None:
    first = threading.Event()

    def tell(argv: Argv) -> bytes | Step | None:
        if argv[0] == b"TYPE":
            first.set()
        return taken(argv)

    with ScriptedNode(answer=tell) as node, ThreadPoolExecutor(1) as pool:
        lock = Lock(node.url, "name", sleep=50, engine=kind)
        waiting = pool.submit(lock.acquire, blocking_timeout=100)
        assert first.wait(5 * SLACK)
        clock(200)  # the machine was suspended meanwhile
        assert waiting.result(2 * SLACK) is False
        assert len(tries(node)) == 1


def test_silent_nodes_do_not_lengthen_the_wait_beyond_their_limit(kind: str, valkeys: LocalNodes) -> None:
    with paused(*valkeys):
        lock = RedLock([node.url for node in valkeys], "name", sleep=0.01, node_timeout=0.05, engine=kind)
        started = time.monotonic()
        with pytest.raises(NodesUnavailable):
            lock.acquire(blocking_timeout=0.2)
        assert 0.2 <= time.monotonic() - started < 0.2 + 0.05 + E


# ---- a split vote ----


@contextmanager
def split(yes: int, no: int, times: int) -> Iterator[list[ScriptedNode]]:
    """Nodes of which a minority grants and a majority refuses each of the first tries; then all grant."""
    lock = threading.Lock()
    counts: dict[int, int] = {}

    def answers(number: int) -> Any:
        def answer(argv: Argv) -> bytes | None:
            if argv[0] != b"SET":
                return taken(argv)
            with lock:
                counts[number] = counts.get(number, 0) + 1
                return OK if number < yes or counts[number] > times else slowly
            return None

        return answer

    def run(peer: Any) -> None:
        time.sleep(0.005)  # so that the yes of the others is there before the verdict is
        peer.send(NIL)

    slowly: Any = Step("a late no", run)
    with ExitStack() as stack:
        yield [stack.enter_context(ScriptedNode(answer=answers(i))) for i in range(yes + no)]


def test_a_split_vote_is_tried_again_sooner_than_a_taken_lock(virtual: Virtual, draws: Draws) -> None:
    """The bound of the pause is four measured rounds; it doubles with each split vote, up to the pause."""
    assert virtual.run([REFUSED] * 9 + [GRANTED], Retry(delay=1), None, round_s=0.01, yes=2) is True
    in_ms = [bound / 1e6 for bound in draws.bounds]
    assert in_ms == pytest.approx([40, 80, 160, 320, 640, 1280, 2560, 5120, 10240])
    pauses = [later - earlier for earlier, later in itertools.pairwise(virtual.tries_s)]
    assert pauses == pytest.approx([0.08, 0.16, 0.32, 0.64, 1, 1, 1, 1], rel=0.2)


def test_before_the_next_try_a_split_vote_is_taken_back(kind: str) -> None:
    with split(yes=2, no=3, times=2) as nodes:
        urls = [node.url for node in nodes]
        lock = RedLock(urls, "name", sleep=60, node_timeout=0.5, engine=kind, waiting="polling")
        assert lock.acquire(blocking_timeout=50) is True
        eventually(lambda: all(len(tries(node)) == 3 for node in nodes))
        for node in nodes[:2]:
            words = [one for one in node.received() if one.name in ("SET", "EVAL", "EVALSHA", "DELIFEQ")]
            names = [one.name for one in words]
            assert names[0::2] == ["SET"] * 3
            assert "SET" not in names[1::2]
            for one, undo in zip(words[0::2], words[1::2], strict=False):
                assert one.argv[2] in undo.argv  # the very token


def test_many_that_start_at_once_all_get_it_one_after_the_other(kind: str, valkeys: LocalNodes) -> None:
    """Each of them often gets a few nodes only; nobody starves, and there is never more than one inside."""
    inside = threading.Lock()
    start = threading.Barrier(6)
    urls = [node.url for node in valkeys]

    def worker() -> None:
        lock = RedLock(urls, "name", sleep=0.02, engine=kind)
        start.wait(5)
        for _ in range(4):
            assert lock.acquire(blocking_timeout=10 * SLACK)
            assert inside.acquire(blocking=False)
            inside.release()
            lock.release()

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(worker) for _ in range(6)]:
            future.result(20 * SLACK)
