"""Those who wait in one process stand in one line: first come, first served, and only the first one asks."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

import redbolt
from redbolt import LockNotOwned, Retry
from redbolt._clock import now_ns
from redbolt._drive import Target
from redbolt._programs import DROP
from redbolt._queue import Queue, Waiter
from redbolt.lease import Lease
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.line import AnyLock, Holder, Line, Stay, count_writes, nothing_left, token_on
from tests.kit.monitor import Monitor
from tests.kit.rounds import InBackground
from tests.kit.waiting import FACES, NAME, Place, calls, settled
from tests.programs import expect, finish, program, tell

E = 0.15 * SLACK


@pytest.fixture(params=FACES)
def place(request: pytest.FixtureRequest, kind: str, valkeys: LocalNodes) -> Iterator[Place]:
    """Where a lock of each kind lives."""
    with Place(request.param, kind, list(valkeys)) as made:
        yield made


@pytest.fixture
def line(place: Place) -> Iterator[Line]:
    """A line there; in the end nobody stands in it, and no key is left."""
    made = Line(place.lock)
    yield made
    made.end()
    nothing_left(place.servers)


# ---- the order ----


def test_first_come_first_served(place: Place, line: Line) -> None:
    """Thirty of them: some are handed the lock, some get it from the servers, as the limit has it."""
    place.take()
    line.join_all(range(30))
    assert line.size == 30
    place.free()
    assert line.end() == [True] * 30
    assert line.served == list(range(30))


@pytest.mark.parametrize("options", [{"max_handoffs": 0}, {"max_handoffs": 3}])
def test_first_come_first_served_by_way_of_the_servers(place: Place, options: Any) -> None:
    line = Line(lambda: place.lock(**options))
    with place.lock(**options):
        line.join_all(range(12))
    assert line.end() == [True] * 12
    assert line.served == list(range(12))
    nothing_left(place.servers)


def test_who_has_just_released_does_not_overtake(place: Place) -> None:
    """The key is free then, and who waits has yet to wake up."""
    lock = place.lock(max_handoffs=0)
    for number in range(10):
        line = Line(lambda: place.lock(max_handoffs=0))
        lock.acquire()
        line.join(number)
        lock.release()
        lock.acquire()
        assert line.served == [number]
        lock.release()
        line.end()
    nothing_left(place.servers)


def test_who_comes_while_others_wait_stands_behind_them(place: Place, line: Line) -> None:
    """Also the one who has just released, and wants it again."""
    holder = place.lock()
    holder.acquire()
    line.join_all(range(3))
    holder.release()
    holder.acquire()
    line.served.append(99)
    holder.release()
    line.end()
    assert sorted(line.served) == [0, 1, 2, 99]
    assert line.served.index(99) > 0
    assert [number for number in line.served if number != 99] == [0, 1, 2]


def test_only_the_first_talks_to_the_servers(place: Place, line: Line) -> None:
    place.take()
    line.join(0)
    line.listens()
    with Monitor(place.in_order()[0]) as monitor:
        line.join_all(range(1, 20))
        assert threading.Event().wait(0.05) is False  # they would have had time enough
        assert [argv for argv in monitor.seen() if NAME in argv] == []
        place.free()
        line.end()
        # One gets it from the servers; all others are handed it, at most 16 in a row.
        told = count_writes(monitor.seen())
        takes = told.count("take")
        assert takes <= (4 if place.face == "RedLock" else 3)


def test_different_names_have_different_lines(place: Place, line: Line) -> None:
    place.take()
    line.join(0)
    other = place.lock("other")
    assert other.acquire(blocking=False)
    assert other._queue is not line.queue
    other.release()
    place.free()


def test_a_reentrant_lock_stands_not_in_the_line_of_a_plain_one(kind: str, valkey: LocalNode) -> None:
    """The same key, but of another type: neither can hand it to the other."""
    plain, reentrant = (face(valkey.url, NAME, engine=kind) for face in (redbolt.Lock, redbolt.ReentrantLock))
    assert plain._queue is not reentrant._queue
    assert plain._queue is redbolt.Lock(valkey.url, NAME, 1, engine=kind)._queue
    assert reentrant._queue is redbolt.ReentrantLock(valkey.url, NAME, 1, engine=kind)._queue


# ---- who leaves ----


@pytest.mark.parametrize("position", [0, 1, 2, 4])
def test_one_who_has_waited_enough_leaves_the_line(place: Place, line: Line, position: int) -> None:
    """At the head; as the sentinel, who is the second; in the middle; at the end."""
    place.take()
    patience = 0.1 * SLACK
    for number in range(5):
        if number == position:
            impatient = line.join(number, blocking_timeout=patience)
        else:
            line.join(number)
    started = now_ns()
    assert impatient.result() is False
    assert now_ns() - started < (patience + 1 + E) * 1e9
    assert line.size == 4
    line.listens()
    place.free()
    line.end()
    assert line.served == [number for number in range(5) if number != position]


def test_all_leave(place: Place, line: Line) -> None:
    place.take()
    line.join_all(range(5), blocking_timeout=0.1 * SLACK)
    assert line.end() == [False] * 5
    place.free()


def test_who_leaves_while_the_lock_is_handed_on_again_and_again(place: Place, line: Line) -> None:
    """Impatient ones at random; whoever is patient is served, and nobody twice."""
    place.take()
    for number in range(24):
        line.join(number, blocking_timeout=0.003 * (1 + number) if number % 3 == 0 else None)
    place.free()
    results = line.end()
    assert line.served == [number for number in range(24) if results[number]]
    assert all(results[number] for number in range(24) if number % 3)


@pytest.mark.parametrize("sentinel_leaves", [False, True])
def test_an_unaware_first_one_is_woken_when_nothing_moves(
    place: Place, line: Line, sentinel_leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was handed to one who never gives it back, and the next does not know that it is the first."""
    patience = 0.3 * SLACK
    monkeypatch.setattr("redbolt._steps.acquire.PATIENCE_NS", int(patience * 1e9))
    holder, stay = Holder(place.lock()), Stay()
    line.join(0, inside=stay)
    line.join(1, place.lock(timeout=0.5 * SLACK), keep=True)
    line.join(2)
    holder.let_go().result()
    stay.inside()
    line.join(3, blocking_timeout=0.15 * SLACK if sentinel_leaves else None)
    eventually(lambda: line.queue.sentinel is not None, what="somebody watches")
    line.join(4)
    stay.leave()
    eventually(lambda: line.served == [0, 1])
    assert line.queue.aware is not line.queue.waiters[0]
    results = line.end()
    assert results == [True, True, True, not sentinel_leaves, True]
    assert line.served == [number for number in range(5) if results[number]]


def test_the_lease_of_a_holder_ends_while_others_wait(place: Place, line: Line) -> None:
    """Several die in a row, each with the lock."""
    place.take(round(100 * SLACK))
    for number in range(3):
        line.join(number, place.lock(timeout=0.1 * SLACK), keep=True)
    line.join(3)
    assert line.end() == [True] * 4
    assert line.served == [0, 1, 2, 3]


def test_a_moved_clock_wakes_those_whose_time_is_over(place: Place, line: Line, clock) -> None:
    """Nobody else has a reason to wake them."""
    place.take(200_000)
    for number, patience in enumerate([500.0, 100.0, 100.0, 500.0]):
        line.join(number, blocking_timeout=patience)
    line.listens()
    clock(101)
    assert [thread.result(5) for thread in line.threads[1:3]] == [False] * 2
    assert line.size == 2
    place.free()
    assert line.end() == [True, False, False, True]
    nothing_left(place.servers)  # while the clock is still as it is


def test_a_moved_clock_ends_the_time_of_all(place: Place, line: Line, clock) -> None:
    """Also of those who come to the head only then, and have asked nobody themselves."""
    place.take(20_000_000)
    for _ in range(5):
        line.join_all(range(6), blocking_timeout=100.0)
        line.listens()
        clock(101)
        assert line.end() == [False] * 6
    place.free()


# ---- those who are not like the others ----


def tries(place: Place) -> int:
    """How many have reached the servers, when no more are under way."""
    # Servers that are slower than those that decide a round get an undo, too, which is a script.
    names = ("evalsha", "eval") if place.face == "ReentrantLock" else ("set",)
    return settled(lambda: sum(calls(server, *names) for server in place.servers))


def test_a_number_of_tries_counts_pauses_in_line_too(place: Place, line: Line) -> None:
    place.take()
    line.join(0)
    counting = line.join(1, place.lock(retry=Retry(3, 0.05)))
    last = line.join(2)
    line.listens()
    before = tries(place)
    assert counting.result() is False
    assert tries(place) == before
    place.free()
    assert last.result()
    assert line.served == [0, 2]


def test_one_with_a_number_of_tries_is_handed_the_lock(place: Place, line: Line) -> None:
    with place.lock():
        line.join(0, place.lock(retry=Retry(1000, 0.05)))
        line.join(1, place.lock(retry=Retry(1000, 0.05)))
    assert line.end() == [True, True]
    assert line.served == [0, 1]


def test_one_with_a_number_of_tries_at_the_head(place: Place, line: Line) -> None:
    """It makes as many as it may, and then the next one is the first."""
    place.take()
    counting = line.join(0, place.lock(retry=Retry(3, 0.02)))
    line.join(1)
    assert counting.result() is False
    line.listens()
    place.free()
    line.end()
    assert line.served == [1]


def test_a_token_of_the_callers_own_is_not_handed_on(place: Place, line: Line) -> None:
    """A real release goes before it; and so the servers have that very token, and no other did before."""
    holder = place.lock()
    holder.acquire()
    seen: list[bytes | None] = []
    line.join(0, inside=lambda lock: seen.append(token_on(place.servers[0])), token="my own: 1")
    line.join(1)
    line.join(2, token="my own: 2")
    with Monitor(place.servers[0]) as monitor:
        holder.release()
        line.end()
        told = count_writes(monitor.seen())
    assert line.served == [0, 1, 2]
    assert seen == [b"my own: 1"]
    assert told.count("swap") == 1  # from the first to the second
    assert told.count("drop") >= 3


@pytest.mark.parametrize("arguments", [{"blocking": False}, {"blocking_timeout": 0}])
def test_one_who_does_not_wait_does_not_stand_in_line(place: Place, line: Line, arguments: Any) -> None:
    place.take()
    line.join_all(range(3))
    line.listens()
    before = tries(place)
    assert place.lock().acquire(**arguments) is False
    assert tries(place) == before + len(place.servers)
    assert line.size == 3
    place.free()
    line.end()
    assert line.served == [0, 1, 2]


def test_leases_of_different_lengths(place: Place, line: Line) -> None:
    """Each is handed a lease of the length that it asked for."""
    told: list[tuple[float, int]] = []

    def look(lock: AnyLock) -> None:
        told.append((lock.left(), min(raw(server, "PTTL", NAME) for server in place.servers)))

    lengths = [3, 20, 7, 60]
    with place.lock(timeout=30):
        for number, length in enumerate(lengths):
            line.join(number, place.lock(timeout=length), inside=look)
    line.end()
    for length, (left, pttl) in zip(lengths, told, strict=True):
        assert length - 1 - E < left < length * 0.99
        assert (length - 1 - E) * 1000 < pttl <= length * 1000


@pytest.mark.parametrize("face", ["Lock", "RedLock"])
def test_one_object_for_all_threads(kind: str, valkeys: LocalNodes, face: str) -> None:
    """With ``thread_local=False`` the object has one lease, and it is that of the one who was handed it."""
    with Place(face, kind, list(valkeys)) as place:
        lock = place.lock(thread_local=False)
        line = Line(lambda: lock)
        lock.acquire()
        first = lock.lease
        seen: list[Lease | None] = []
        line.join_all(range(5), inside=lambda lock: seen.append(lock.lease))
        lock.release()
        assert line.end() == [True] * 5
        assert line.served == [0, 1, 2, 3, 4]
        assert len({lease.token for lease in [first, *seen] if lease is not None}) == 6
        assert lock.lease is None
        with pytest.raises(LockNotOwned):
            lock.release()
        nothing_left(place.servers)


def test_one_object_of_which_each_thread_has_a_lease_of_its_own(place: Place) -> None:
    lock = place.lock()
    line = Line(lambda: lock)
    lock.acquire()
    line.join_all(range(5))
    lock.release()
    assert line.end() == [True] * 5
    assert line.served == [0, 1, 2, 3, 4]
    nothing_left(place.servers)


def test_without_the_line_everybody_waits_alone(place: Place) -> None:
    """``local_queue=False``: nobody is handed anything, and the servers see everybody."""
    place.take()
    locks = [place.lock(local_queue=False) for _ in range(4)]
    assert len({id(lock._queue) for lock in locks}) == 4
    granted: list[int] = []

    def use(number: int) -> None:
        with locks[number]:
            granted.append(number)

    with Monitor(place.in_order()[0]) as monitor:
        threads = [InBackground(lambda number=number: use(number)) for number in range(4)]  # type: ignore[misc]
        eventually(lambda: place.looks() >= 4, what="they listen")
        place.free()
        for thread in threads:
            thread.result()
        told = count_writes(monitor.seen())
    assert sorted(granted) == [0, 1, 2, 3]
    assert "swap" not in told
    nothing_left(place.servers)


# ---- updates ----


@pytest.mark.parametrize("renewed", [False, True])
def test_no_update_is_lost_and_everybody_is_served(place: Place, renewed: bool) -> None:
    """Fifty threads, each again and again; nobody comes a third time before all others came once more."""
    threads, rounds = 50, 6
    counter = 0
    inside: list[int] = []
    order: list[int] = []
    broken: list[str] = []

    def work(number: int) -> None:
        nonlocal counter
        lock = place.lock(timeout=30, renew=renewed)
        for _ in range(rounds):
            with lock:
                inside.append(number)
                value = counter
                if inside != [number] or not lock.held:
                    broken.append(f"{inside}, held: {lock.held}")
                counter = value + 1
                order.append(number)
                inside.remove(number)

    workers = [InBackground(lambda number=number: work(number)) for number in range(threads)]  # type: ignore[misc]
    for worker in workers:
        worker.result(60)
    assert not broken
    assert counter == threads * rounds
    assert Counter(order) == dict.fromkeys(range(threads), rounds)
    last: dict[int, int] = {}
    gaps = []
    for at, number in enumerate(order):
        if number in last:
            gaps.append(at - last[number])
        last[number] = at
    assert max(gaps) <= 3 * threads
    assert max(gaps) <= 4 * median(gaps)
    assert place.lock()._queue.lease is None
    nothing_left(place.servers)


# ---- forks ----


def test_a_child_has_nobody_in_line(place: Place) -> None:
    with program("lines", "in_a_child", face=place.face, urls=place.urls, kind=place.kind) as process:
        place.take()
        expect(process, "in line")
        tell(process)
        expect(process, "forked")
        place.free()
        finish(process)
    nothing_left(place.servers)


# ---- the line itself, step by step ----


class Steps:
    """A line without any server: what is taken back is noted."""

    def __init__(self, valkey: LocalNode, kind: str) -> None:
        self.taken_back: list[bytes] = []
        node = redbolt.Node.from_url(valkey.url)
        gate = redbolt.Lock(valkey.url, NAME, engine=kind)._engine.gate
        self.engine: Any = SimpleNamespace(nodes=(node,), gate=gate, discard=self._discard)
        self.queue = Queue(self.engine)
        self.target = Target(b"name", 10_000, 1, 0, 1_000_000_000)

    def _discard(self, key: bytes, token: bytes, touched: int, program: object, extra: object) -> None:
        assert program is DROP
        self.taken_back.append(token)

    def waiter(self, **options: Any) -> Waiter:
        waiter = Waiter(self.target, self.engine.gate(), **options)
        self.queue.join(waiter)
        return waiter

    def reserve(self) -> Waiter | None:
        return self.queue.reserve([])

    def lease(self, token: bytes = b"token") -> Lease:
        now = now_ns()
        votes: Any = SimpleNamespace(token=token, started_ns=now, valid_until_ns=now + 10**10, touched=1)
        return Lease(b"name", 10_000, votes, 1)

    def woken(self, waiter: Waiter) -> bool:
        """Whether it was told to look around since it was last asked."""
        return waiter.gate.wait(now_ns())

    def in_line(self) -> list[Waiter]:
        return list(self.queue.waiters)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def steps(valkey: LocalNode, kind: str) -> Steps:
    return Steps(valkey, kind)


class Meddling(list[Any]):
    """A list in which something else happens right after an element was appended, or taken out."""

    def __init__(
        self,
        *items: Any,
        after_append: Callable[[], object] | None = None,
        after_pop: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(items)
        self._after_append = after_append
        self._after_pop = after_pop

    def append(self, item: Any) -> None:
        super().append(item)
        meddle, self._after_append = self._after_append, None
        if meddle is not None:
            meddle()

    def pop(self, *at: Any) -> Any:
        item = super().pop(*at)
        meddle, self._after_pop = self._after_pop, None
        if meddle is not None:
            meddle()
        return item


def accept(waiter: Waiter) -> None:
    """What `acquire` does with a lease that was handed over."""
    assert waiter.gift
    waiter.accepted = True


def test_the_first_in_line_is_reserved_and_given_the_lease(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    assert steps.queue.is_first(first)
    assert not steps.queue.is_first(second)
    assert steps.reserve() is first
    assert first.reserved
    assert steps.in_line() == [second]
    lease = steps.lease()
    steps.queue.give(first, lease)
    assert first.gift == [lease]
    assert steps.woken(first)
    assert steps.queue.lease is lease
    assert steps.queue.handoffs == 1
    accept(first)
    steps.queue.leave(first)
    steps.queue.leave(first)
    assert steps.taken_back == []
    assert lease.held
    assert steps.in_line() == [second]


def test_nobody_in_line(steps: Steps) -> None:
    assert steps.reserve() is None
    waiter = steps.waiter()
    steps.queue.leave(waiter)
    assert steps.reserve() is None


def test_one_who_is_not_willing_is_not_passed_over(steps: Steps) -> None:
    unwilling, other = steps.waiter(willing=False), steps.waiter()
    assert steps.reserve() is None
    assert steps.in_line() == [unwilling, other]
    assert not unwilling.reserved


def test_the_next_is_told_when_the_first_leaves(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    steps.queue.leave(first)
    assert steps.in_line() == [second]
    assert steps.woken(second)


def test_the_sentinel_leaves(steps: Steps) -> None:
    """It would have woken the first one."""
    first, second = steps.waiter(), steps.waiter()
    steps.queue.sentinel = second
    steps.queue.leave(second)
    assert steps.queue.sentinel is None
    assert steps.woken(first)


def test_the_sentinel_is_given_the_lease(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    steps.queue.sentinel = first
    assert steps.reserve() is first
    steps.queue.give(first, steps.lease())
    assert steps.queue.sentinel is None
    assert steps.woken(second)


def test_leaving_while_it_is_reserved(steps: Steps) -> None:
    """Whoever hands on finds out, and gives it back to the servers; the next one is told."""
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first
    steps.queue.leave(first)
    steps.woken(second)
    lease = steps.lease()
    steps.queue.give(first, lease)
    assert steps.taken_back == [b"token"]
    assert not lease.held
    assert steps.queue.lease is None
    assert steps.woken(second)
    assert steps.in_line() == [second]


def test_leaving_while_it_is_reserved_in_vain(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first
    steps.queue.leave(first)
    steps.woken(second)
    steps.queue.put_back(first)
    assert steps.in_line() == [second]
    assert steps.woken(second)


def test_put_back_and_reserved_again(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first
    steps.queue.put_back(first)
    assert steps.in_line() == [first, second]
    assert steps.woken(first)
    assert not first.reserved
    assert steps.reserve() is first
    steps.queue.give(first, steps.lease())
    assert first.gift


def test_leaving_after_it_was_put_back(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first
    steps.queue.put_back(first)
    steps.queue.leave(first)
    assert steps.in_line() == [second]
    assert steps.woken(second)


def test_leaving_without_having_taken_what_was_given(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first
    lease = steps.lease()
    steps.queue.give(first, lease)
    steps.queue.leave(first)
    steps.queue.leave(first)
    assert set(steps.taken_back) == {b"token"}
    assert not lease.held
    assert steps.queue.lease is None
    assert steps.woken(second)


def test_accepting_and_leaving_while_it_is_given(steps: Steps) -> None:
    """It has the lease already, and is not robbed of it."""
    first = steps.waiter()
    assert steps.reserve() is first
    lease = steps.lease()

    def meddle() -> None:
        accept(first)
        steps.queue.leave(first)

    first.gift = Meddling(after_append=meddle)
    steps.queue.give(first, lease)
    assert steps.taken_back == []
    assert lease.held
    assert steps.queue.lease is lease


def test_leaving_without_it_while_it_is_given(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first
    lease = steps.lease()
    first.gift = Meddling(after_append=lambda: steps.queue.leave(first))
    steps.queue.give(first, lease)
    assert set(steps.taken_back) == {b"token"}
    assert not lease.held
    assert steps.queue.lease is None
    assert steps.woken(second)


@pytest.mark.parametrize("how_often", [1, 2])
def test_leaving_while_it_is_put_back(steps: Steps, how_often: int) -> None:
    """It does not stay in line as a ghost, behind which everybody would wait for ever."""
    first, second = steps.waiter(), steps.waiter()
    assert steps.reserve() is first

    def meddle() -> None:
        for _ in range(how_often):
            steps.queue.leave(first)

    first._open = Meddling(after_append=meddle)
    steps.queue.put_back(first)
    assert steps.in_line() == [second]
    assert steps.woken(second)


def test_leaving_while_it_is_reserved_half(steps: Steps) -> None:
    """Between the claim and the removal."""
    first, second = steps.waiter(), steps.waiter()
    first._open = Meddling(True, after_pop=lambda: steps.queue.leave(first))
    assert steps.reserve() is first
    assert steps.in_line() == [second]
    steps.queue.give(first, steps.lease())
    assert steps.taken_back == [b"token"]
    assert steps.woken(second)


def test_one_who_is_about_to_leave_is_not_reserved(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()
    reserved: list[Waiter | None] = []
    first._open = Meddling(True, after_pop=lambda: reserved.append(steps.reserve()))
    steps.queue.leave(first)
    assert reserved == [second]
    assert steps.in_line() == []


def test_leaving_is_interrupted_and_done_again(steps: Steps) -> None:
    first, second = steps.waiter(), steps.waiter()

    def interrupt() -> None:
        raise KeyboardInterrupt

    first._open = Meddling(True, after_pop=interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps.queue.leave(first)
    steps.queue.leave(first)
    assert steps.in_line() == [second]
    assert steps.woken(second)
    assert steps.reserve() is second


def test_reserving_is_interrupted(steps: Steps) -> None:
    """The one that was meant can still be handed the lock, and leave."""
    first, second = steps.waiter(), steps.waiter()

    def interrupt() -> None:
        raise KeyboardInterrupt

    first._open = Meddling(True, after_pop=interrupt)
    meant: list[Waiter] = []
    with pytest.raises(KeyboardInterrupt):
        steps.queue.reserve(meant)
    assert meant == [first]
    steps.queue.put_back(first)
    assert steps.in_line() == [first, second]
    assert steps.reserve() is first
    steps.queue.put_back(first)
    steps.queue.leave(first)
    assert steps.in_line() == [second]


def test_a_release_wakes_the_first(steps: Steps) -> None:
    first = steps.waiter()
    lease = steps.lease()
    steps.queue.lease = lease
    steps.queue.handoffs = 5
    steps.queue.set_free(lease)
    assert steps.queue.lease is None
    assert steps.queue.handoffs == 0
    assert steps.queue.freed == 1
    assert steps.woken(first)


def test_a_late_release_does_not_forget_the_next_lease(steps: Steps) -> None:
    old, new = steps.lease(b"old"), steps.lease(b"new")
    steps.queue.lease = new
    steps.queue.set_free(old)
    assert steps.queue.lease is new
    assert steps.queue.held_here()


@pytest.mark.parametrize("seed", range(3))
def test_many_who_come_and_go_while_others_hand_on(steps: Steps, seed: int, quick_switches: None) -> None:
    """Threads join and leave at random, and one hands on, puts back and gives: everybody gets out in the end,
    and each lease that was given was accepted or taken back, and never both.
    """
    queue = steps.queue
    stop = threading.Event()
    accepted: list[bytes] = []
    given: list[bytes] = []

    def wait(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        for _ in range(150):
            waiter = steps.waiter()
            until = now_ns() + int(chance.uniform(0, 3e5))
            while now_ns() < until and not waiter.gift:
                waiter.gate.wait(until)
            if waiter.gift:
                accepted.append(waiter.gift[0].token)
                waiter.accepted = True
            queue.leave(waiter)

    def hand_on() -> None:
        chance = random.Random(seed)
        count = 0
        while not stop.is_set():
            waiter = steps.reserve()
            if waiter is None:
                stop.wait(1e-5)
                continue
            if chance.random() < 0.3:
                queue.put_back(waiter)
                continue
            count += 1
            token = b"%d" % count
            given.append(token)
            queue.give(waiter, steps.lease(token))

    handing = InBackground(hand_on)
    for thread in [InBackground(lambda number=number: wait(number)) for number in range(4)]:  # type: ignore[misc]
        thread.result(30)
    stop.set()
    handing.result()
    assert steps.in_line() == []
    assert len(given) > 20
    back = set(steps.taken_back)
    assert back.isdisjoint(accepted)
    assert sorted([*back, *accepted]) == sorted(given)
