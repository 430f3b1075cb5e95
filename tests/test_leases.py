"""Leases that are renewed: which of them, for how long, and for whom; at the level of the locks.

What the agent does with nodes that fail is tested with the engines; how a loss is told, in `test_lease_loss`.
"""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import redbolt
from redbolt import LockLost
from redbolt._clock import now_ns
from redbolt._programs import ABANDON, DROP, EXTEND, LEAVE, PROGRAMS, PROLONG, SUCCEED, SWAP, TAKE
from redbolt.lease import Lease
from redbolt.local import LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import E
from tests.kit.line import AnyLock, Holder, Line, Stay, _scripts, nothing_left, token_on, writes
from tests.kit.monitor import Monitor
from tests.kit.renewing import (
    LIMIT,
    Witness,
    age,
    count,
    is_young,
    lease_of,
    lives,
    once_more,
    renewed,
    witnesses,
)
from tests.kit.rounds import InBackground
from tests.kit.scripted import ScriptedNode
from tests.kit.waiting import FACES, NAME, OWNER, Place, settled
from tests.test_interrupts import Interrupt, some


@pytest.fixture(params=FACES)
def place(request: pytest.FixtureRequest, kind: str, valkeys: LocalNodes) -> Iterator[Place]:
    """Where a lock of each kind lives."""
    with Place(request.param, kind, list(valkeys)) as made:
        yield made


@pytest.fixture
def witness(place: Place) -> Iterator[Callable[..., Witness]]:
    with witnesses(place) as make:
        yield make


# ---- which leases are renewed, and how ----


def test_without_a_timeout_it_is_renewed_after_a_third(place: Place, clock) -> None:
    with place.lock(timeout=None, node_timeout=LIMIT) as lock:  # type: ignore[arg-type]
        assert lease_of(lock).length_ms == 30_000
        for number in range(1, 5):
            age(place)
            clock(8)
            assert settled(lambda: count(lock)) == number - 1
            clock(2.1)
            once_more(lock, number)
            eventually(lambda: is_young(place))
            assert 29 < lock.left() < 30
            assert lock.held
            assert not lock.lost.is_set()
    nothing_left(place.servers)


@pytest.mark.parametrize(
    ("timeout", "renew", "is_renewed"),
    [(None, None, True), (None, True, True), (None, False, False)]
    + [(30, None, False), (30, True, True), (30, False, False)],
)
def test_the_rule(
    place: Place, witness: Callable[[], Witness], clock, timeout: float, renew: bool, is_renewed: bool
) -> None:
    """A timeout means a fixed lease, unless it is said otherwise."""
    with place.lock(timeout=timeout, renew=renew, node_timeout=LIMIT) as lock:
        age(place)
        second = witness()
        clock(10.6)
        second.sees_a_renewal()
        if is_renewed:
            once_more(lock, 1)
            eventually(lambda: is_young(place))
            assert lock.left() > 29
        else:
            assert max(lives(place)) <= 12_000
            assert lease_of(lock).renewal is None
            assert lock.left() < 20


def test_each_renewal_counts_from_its_own_start(place: Place, clock) -> None:
    """Extensions that are added up drift away after one stall (rueidis 923)."""
    with renewed(place, 15) as lock:
        for number, pause in enumerate([5.1, 9, 5.1, 5.1, 7, 5.1], 1):
            age(place, ttl_ms=5000)
            before = now_ns() + int(pause * 1e9)
            clock(pause)
            once_more(lock, number)
            eventually(lambda: is_young(place, lease=15))
            assert before <= lease_of(lock).started_ns <= now_ns()
            assert lease_of(lock).length_ms == 15_000
            assert 13.5 < lock.left() < 15


def test_a_renewal_is_no_release(place: Place, clock) -> None:
    """Renewing once ran the script that releases (sherlock 66)."""
    with renewed(place) as lock:
        token = lease_of(lock).token
        with Monitor(place.servers[0]) as monitor:
            clock(10.1)
            once_more(lock, 1)
            programs = {program_of(argv) for argv in writes(monitor.seen()) if token.decode() in argv}
        assert programs == {(PROLONG if place.face == "ReentrantLock" else EXTEND).name}
        assert [token_on(server) for server in place.servers] == [token] * len(place.servers)


def test_a_token_of_the_callers_own_is_renewed(place: Place, clock) -> None:
    lock = renewed(place)
    mine = f"{OWNER}mine"
    assert lock.acquire(token=mine)
    age(place)
    clock(10.1)
    once_more(lock, 1)
    eventually(lambda: is_young(place))
    assert {token_on(server) for server in place.servers} == {mine.encode()}
    lock.release()
    nothing_left(place.servers)


@pytest.fixture
def reentrant(kind: str, valkeys: LocalNodes) -> Iterator[Place]:
    with Place("ReentrantLock", kind, list(valkeys)) as made:
        yield made


def test_a_lock_held_three_times_is_renewed_as_such(reentrant: Place, clock) -> None:
    """The count stays what it is, and each change of it begins the lease anew."""
    lock, other = renewed(reentrant), renewed(reentrant)
    lock.acquire()
    token = lease_of(lock).token
    for held in (2, 3):
        clock(9)
        other.acquire()
        assert raw(reentrant.servers[0], "HGETALL", NAME) == {token: b"%d" % held}
        assert lock.left() > 29
    for number, held in enumerate((3, 2, 1), 1):
        age(reentrant)
        clock(10.1)
        once_more(lock, number)
        assert is_young(reentrant)
        assert raw(reentrant.servers[0], "HGETALL", NAME) == {token: b"%d" % held}
        assert other.hold_count == held  # type: ignore[union-attr]
        lock.release()
    nothing_left(reentrant.servers)


def test_counting_while_renewals_run(reentrant: Place) -> None:
    """A lease is so short that one is nearly always under way; the count on the server is always right."""
    wrong: list[Any] = []
    steps = renewals = 0
    ends = time.monotonic() + 30 * SLACK
    while steps < 150 or renewals < 30:
        assert time.monotonic() < ends
        lock = renewed(reentrant, 0.1)
        lock.acquire()
        lease = lease_of(lock)
        try:
            for _ in range(50):
                lock.acquire() if lease.count < 2 or (
                    lease.count < 5 and random.random() < 0.5
                ) else lock.release()
                steps += 1
                time.sleep(random.uniform(0, 0.05))
                told = raw(reentrant.servers[0], "HGETALL", NAME)
                if lock.lost.is_set():
                    break  # the machine stood still for longer than a lease
                if told != {lease.token: b"%d" % lease.count}:
                    wrong.append((told, lease.count))
            renewals += count(lease)
            while lock.lease is not None:
                lock.release()
        except LockLost:
            assert lock.lease is None
    assert not wrong
    nothing_left(reentrant.servers)


# ---- arguments ----


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"timeout": 10, "max_hold": 20}, ValueError, "max_hold is for leases that are renewed"),
        ({"renew": False, "max_hold": 60}, ValueError, "max_hold is for leases that are renewed"),
        ({"max_hold": 29.9}, ValueError, "max_hold must not be shorter than a lease, 30 s"),
        ({"timeout": 1, "renew": True, "max_hold": 0.9}, ValueError, "must not be shorter than a lease, 1 s"),
        ({"max_hold": 0}, ValueError, "max_hold"),
        ({"max_hold": -1}, ValueError, "max_hold"),
        ({"max_hold": float("nan")}, ValueError, "max_hold"),
        ({"max_hold": "60"}, TypeError, "max_hold"),
        ({"max_hold": True}, TypeError, "max_hold"),
        ({"renew": 1}, TypeError, "renew must be a bool"),
        ({"renew": "yes"}, TypeError, "renew must be a bool"),
        ({"on_lost": "print"}, TypeError, "on_lost must be callable or None, not str"),
        ({"on_lost": True}, TypeError, "on_lost must be callable or None, not bool"),
    ],
)
@pytest.mark.parametrize("face", FACES)
def test_what_cannot_work_is_refused_and_nothing_is_sent(
    kind: str, face: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with ScriptedNode() as node:
        make: Any = getattr(redbolt, face)
        with pytest.raises(error, match=says):
            make([node.url] if face == "RedLock" else node.url, NAME, engine=kind, **options)
        assert node.received() == []


# ---- held for too long ----


def test_it_is_not_held_for_longer_than_max_hold(place: Place, clock) -> None:
    told: list[tuple[Lease, str, int]] = []
    lock = renewed(
        place, 12, max_hold=24, on_lost=lambda lease, reason: told.append((lease, reason, now_ns()))
    )
    started = now_ns()
    lock.acquire()
    lease = lease_of(lock)
    for number in (1, 2):
        clock(5)
        once_more(lock, number)
    assert lock.left() > 11
    clock(5)
    once_more(lock, 3)
    assert max(lives(place)) <= 24_000 - 15_000 + 200
    assert lock.left() <= 9
    until = lease.valid_until_ns
    with Monitor(place.servers[0]) as monitor:
        clock(8.2 - min(1.0, LIMIT - 1))
        assert lock.lost.wait(5 * SLACK) or lock.lost.is_set()
        eventually(lambda: told, what="it is told")
        assert settled(lambda: len(writes(monitor.seen()))) == 0
    assert count(lease) == 3
    assert until <= started + (24 + E) * 1e9
    assert [one[:2] for one in told] == [(lease, "it was held for as long as max_hold permits")]
    assert told[0][2] < until
    assert not lock.held
    assert lock.left() == 0
    with pytest.raises(LockLost, match="held for as long as max_hold permits"):
        lock.release()
    nothing_left(place.servers)


def test_a_stuck_holder_makes_room_in_time(place: Place) -> None:
    """By the clock of the servers: no key is there when it may not be held any longer."""
    stuck = renewed(place, 0.4, max_hold=1.0)
    started = time.monotonic()
    stuck.acquire()
    token = lease_of(stuck).token
    assert stuck.lost.wait(5 * SLACK)
    assert time.monotonic() - started < 1.0 + E
    eventually(lambda: token not in [token_on(server) for server in place.servers], 1)
    assert time.monotonic() - started < 1.1 + 2 * E
    assert place.lock().acquire(blocking_timeout=2 * SLACK)


def test_max_hold_begins_anew_for_the_next_holder(place: Place, clock) -> None:
    line, stay = Line(lambda: renewed(place, 12, max_hold=24)), Stay()
    holder = Holder(renewed(place, 12, max_hold=24))
    line.join(0, inside=stay)
    for number in (1, 2, 3):
        clock(5)
        once_more(holder.lease, number)
    holder.let_go().result()
    lease = stay.inside()
    assert lease.token == holder.token
    assert lease.left() < 10
    eventually(lambda: lease.held and lease.left() > 8)
    clock(5)
    once_more(lease, 4)
    assert lease.left() > 11  # at 20 s, and 24 would be the end of it for the first one
    clock(5)
    once_more(lease, 5)
    assert lease.held
    stay.leave()
    line.end()
    nothing_left(place.servers)


# ---- from holder to holder, in line ----


def test_a_renewal_changes_hands(place: Place, clock) -> None:
    """Nothing is sent; the old lease is dead; the new one is renewed, and its lock hears of a loss."""
    told: list[str] = []
    line, stay = Line(lambda: renewed(place, on_lost=lambda *_: told.append("heir"))), Stay()
    holder = Holder(renewed(place))
    line.join(0, inside=stay)
    eventually(lambda: [token_on(server) for server in place.servers] == [holder.token] * len(place.servers))
    line.listens()
    with Monitor(place.servers[0]) as monitor:
        old = holder.lease
        holder.let_go().result()
        lease = stay.inside()
        assert writes(monitor.seen()) == []
    assert lease.token == old.token
    assert (old.held, old.ended, old.left(), old.renewal) == (False, True, 0, None)
    assert not old.lost.is_set()
    age(place)
    clock(10.1)
    once_more(lease, 1)
    eventually(lambda: is_young(place))
    for server in place.servers:
        raw(server, "DEL", NAME)
    clock(10.1)
    eventually(lambda: told, what="the heir's lock is told")
    assert lease.lost.is_set()
    assert not old.lost.is_set()
    stay.leave()
    with pytest.raises(LockLost):
        line.end()
    assert told == ["heir"]
    assert line.size == 0


def test_the_holder_before_is_not_told(place: Place, clock) -> None:
    told: list[str] = []
    line, stay = Line(lambda: renewed(place)), Stay()
    holder = Holder(renewed(place, on_lost=lambda *_: told.append("the one before")))
    line.join(0, inside=stay)
    holder.let_go().result()
    lease = stay.inside()
    for server in place.servers:
        raw(server, "DEL", NAME)
    clock(10.1)
    assert lease.lost.wait(5 * SLACK)
    stay.leave()
    with pytest.raises(LockLost):
        line.end()
    assert settled(lambda: len(told)) == 0


@pytest.mark.parametrize("holder_is", ["renewed", "fixed", "shorter"])
def test_the_renewal_is_that_of_the_new_holder(place: Place, clock, holder_is: str) -> None:
    """By a compare-and-set where the two do not ask for the same."""
    makers: dict[str, Callable[[], AnyLock]] = {
        "renewed": lambda: renewed(place),
        "fixed": lambda: place.lock(timeout=20, node_timeout=LIMIT),
        "shorter": lambda: renewed(place, 15),
    }
    heir_is = "fixed" if holder_is == "renewed" else "renewed"
    line, stay = Line(makers[heir_is]), Stay()
    holder = Holder(makers[holder_is]())
    line.join(0, inside=stay)
    holder.let_go().result()
    lease = stay.inside()
    assert lease.token != holder.token
    assert lease.left() > (19 if heir_is == "fixed" else 29) - E
    eventually(lambda: [token_on(server) for server in place.servers] == [lease.token] * len(place.servers))
    second = Witness(place)
    age(place)
    clock(10.6)
    second.sees_a_renewal()
    if heir_is == "renewed":
        once_more(lease, 1)
        eventually(lambda: is_young(place))
    else:
        assert lease.renewal is None
        assert max(lives(place)) <= 12_000
    assert holder.lease.ended
    stay.leave()
    line.end()
    second.close()
    nothing_left(place.servers)


# ---- a release while a renewal is under way ----

_BY_SCRIPT = {text: program for program in PROGRAMS for text in _scripts(program)}
_ENDS = (DROP.name, LEAVE.name, ABANDON.name, "drop both", "abandon both")
_GIVES = (SWAP.name, SUCCEED.name)


def program_of(argv: tuple[str, ...]) -> str:
    """The name of the program that a `Monitor` has seen."""
    if argv[0] == "SET":
        return TAKE.name if "NX" in argv else EXTEND.name if argv[2] == argv[4] else SWAP.name
    if argv[0] in ("EVAL", "EVALSHA"):
        return _BY_SCRIPT[argv[1]].name
    return DROP.name if argv[0] in ("DELIFEQ", "DELEX") else argv[0]


def ends_of(argv: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """The tokens that a command writes, and those that nothing may write after it."""
    name = program_of(argv)
    if argv[0] == "SET":
        return {argv[2]}, {argv[4]} if name in _GIVES else set()
    if argv[0] in ("EVAL", "EVALSHA"):
        words = list(argv[3 + int(argv[2]) :])
        if name in _ENDS:
            return set(), set(words[:2] if "both" in name else words[:1])
        return {words[0]}, {words[1]} if name in _GIVES else set()
    return set(), {argv[2]} if name in _ENDS else set()


def late_writes(seen: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Commands that write a token which was released, or exchanged, before."""
    over: set[str] = set()
    late = []
    for argv in writes(seen):
        if argv[0] not in ("SET", "EVAL", "EVALSHA", "DELIFEQ", "DELEX"):
            continue
        written, ended = ends_of(argv)
        if written & over:
            late.append(argv)
        over |= ended
    return late


def test_nothing_writes_a_token_after_its_release(place: Place) -> None:
    """Renewals, and on five servers also the writes that put back what was deleted there, are under way."""
    threads, rounds = 9, 38
    stop = threading.Event()
    wrong: list[BaseException] = []
    done = [0] * threads
    renewals = [0] * threads

    def use(number: int) -> None:
        """Two of three share their name with another one, to whom they hand the lock on."""
        try:
            for at in range(rounds):
                length = random.uniform(0.06, 0.2)
                lock = renewed(
                    place, length, name=f"name {number // 3 * 3 + number % 3 // 2}", node_timeout=0.05 * SLACK
                )
                if not lock.acquire(blocking_timeout=20 * SLACK):
                    raise AssertionError(f"{number} was not served in round {at}")
                lease = lease_of(lock)
                time.sleep(random.uniform(0, length * random.choice((0.3, 0.5, 1.2))))
                renewals[number] += 0 if lease.renewal is None else lease.renewal.renewed
                try:
                    lock.release()
                except LockLost:
                    pass  # by somebody who deletes; or the machine stood still for a lease
                done[number] += 1
        except BaseException as error:
            wrong.append(error)

    def delete() -> None:
        """On a minority, so that it is put back."""
        while not stop.is_set():
            for server in place.servers[:2]:
                for key in raw(server, "KEYS", "*"):
                    raw(server, "DEL", key)
            time.sleep(0.01)

    with place.lock(name="warm-up"):
        pass
    workers = [threading.Thread(target=use, args=(number,)) for number in range(threads)]
    if place.face == "RedLock":
        workers.append(threading.Thread(target=delete))
    with ExitStack() as stack:
        monitors = [stack.enter_context(Monitor(server)) for server in place.servers]
        for worker in workers:
            worker.start()
        for worker in workers[:threads]:
            worker.join()
        stop.set()
        workers[-1].join()
        nothing_left(place.servers)
        assert not wrong
        assert done == [rounds] * threads
        assert sum(renewals) > threads * rounds / 10
        time.sleep(0.25)  # longer than a lease: what is renewed by mistake would be so by now
        for monitor in monitors:
            seen = monitor.seen()
            told = {program_of(argv) for argv in writes(seen) if argv[0] in ("SET", "EVAL", "EVALSHA")}
            assert told & {EXTEND.name, PROLONG.name}
            assert late_writes(seen) == []
    nothing_left(place.servers)


# ---- acquisitions that are interrupted ----


def test_what_was_interrupted_is_never_renewed(place: Place, clock) -> None:
    """Also while somebody keeps the exception, and with it all that its frames refer to."""
    if place.face == "ReentrantLock":
        pytest.skip("its acquire is the same code")
    errors: list[KeyboardInterrupt] = []
    kept: list[AnyLock] = []
    for number, at in enumerate(some(lambda: renewed(place, name="first"), redbolt.Lock.acquire)):  # type: ignore[arg-type,return-value]
        lock = renewed(place, name=f"name {number}")
        try:
            with Interrupt(at):
                lock.acquire()
        except KeyboardInterrupt as error:
            assert lock.lease is None, at
            errors.append(error)
            kept.append(lock)
        else:
            lock.release()
    assert len(errors) > 20
    nothing_left(place.servers)
    only_the_witness_is_renewed(place, clock)


def test_a_waiter_that_is_interrupted_keeps_nothing(place: Place, clock) -> None:
    """Whether it comes before the lease that is handed to it, or after."""
    if place.face == "ReentrantLock":
        pytest.skip("its acquire is the same code")

    def prepare() -> AnyLock:
        """Somebody has the lock, and lets go when the waiter stands in line."""
        nothing_left(place.servers)
        holder = Holder(renewed(place))
        queue = holder.lock._queue

        def let_go() -> None:
            eventually(lambda: queue.waiters)
            holder.let_go().result()

        helpers.append(InBackground(let_go))
        return renewed(place)

    errors: list[KeyboardInterrupt] = []
    helpers: list[InBackground[None]] = []

    def finish() -> None:
        """A waiter that came too early to wait: another one takes what is handed on."""
        with renewed(place):
            pass
        helpers.pop().result()

    lock = prepare()
    queue = lock._queue
    for _ in range(2):
        with Interrupt() as nowhere:
            lock.acquire()
        lock.release()
        helpers.pop().result()
        lock = prepare()
    finish()
    outside = [at for at in nowhere.seen if "_pure" not in at[0].co_filename]
    for at in random.sample(outside, min(60, len(outside))):
        lock = prepare()
        try:
            with Interrupt(at):
                lock.acquire()
            lock.release()
        except KeyboardInterrupt as error:
            assert lock.lease is None, at
            errors.append(error)
        if helpers[-1].is_alive():
            finish()
        else:
            helpers.pop().result()
        eventually(lambda: not queue.waiters)
    assert len(errors) > 20
    nothing_left(place.servers)
    only_the_witness_is_renewed(place, clock)


def only_the_witness_is_renewed(place: Place, clock: Callable[[float], None]) -> None:
    witness = Witness(place)
    with Monitor(place.servers[0]) as monitor:
        clock(10.6)
        witness.sees_a_renewal()
        keys = {argv[1] for argv in writes(monitor.seen()) if argv[0] == "SET"}
    assert keys == {"witness"}
    witness.close()


# ---- holders that are no more ----


@pytest.mark.parametrize("how", ["dropped", "in a cycle", "another of the name"])
@pytest.mark.parametrize("thread_local", [True, False])
def test_a_forgotten_lock_is_not_renewed(
    place: Place, witness: Callable[[], Witness], clock, how: str, thread_local: bool
) -> None:
    """It was renewed for ever by its own thread (python-redis-lock 33)."""
    if place.face == "ReentrantLock":
        pytest.skip("its lease is the thread's, whatever object it was acquired with")
    lock: Any = renewed(place, thread_local=thread_local)
    other = renewed(place, thread_local=thread_local) if how == "another of the name" else None
    lock.acquire()
    age(place)
    if how == "in a cycle":
        lock.itself = [lock]
        del lock
        gc.collect()
    else:
        del lock
    second = witness()
    clock(10.6)
    second.sees_a_renewal()
    assert max(lives(place)) <= 12_000
    if other is not None:
        assert not other.held
        assert not other.acquire(blocking=False)


def test_a_forgotten_object_of_a_reentrant_lock_leaves_it_to_its_thread(reentrant: Place, clock) -> None:
    """With Redisson, too, it is held by the thread; any object of that name releases it."""
    renewed(reentrant).acquire()
    gc.collect()
    age(reentrant)
    clock(10.6)
    lock = renewed(reentrant)
    once_more(lock, 1)
    assert is_young(reentrant)
    lock.release()
    nothing_left(reentrant.servers)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("thread_local", [True, False])
def test_a_thread_that_has_ended_holds_nothing(
    place: Place, witness: Callable[[], Witness], clock, kept: bool, thread_local: bool
) -> None:
    """Also where somebody still refers to its lease; but a lease may belong to the object instead."""
    if place.face == "ReentrantLock" and not thread_local:
        return
    lock = renewed(place, thread_local=thread_local)

    def work() -> Lease | None:
        lock.acquire()
        return lease_of(lock) if kept else None

    lease = InBackground(work).result()
    age(place)
    second = witness()
    clock(10.6)
    second.sees_a_renewal()
    if thread_local:
        assert max(lives(place)) <= 12_000
        if lease is not None:
            assert count(lease) == 0
            assert 0 < lease.left() < 20
            waiting = InBackground(lambda: lease.lost.wait())
            clock(20)
            assert waiting.result() is True
            assert lease.lost.reason == "it ran out"
    else:
        eventually(lambda: is_young(place))
        lock.release()
        eventually(lambda: [token_on(server) for server in place.servers] == [None] * len(place.servers), 1)


# ---- holders that compute ----


def test_a_holder_that_computes_is_renewed(place: Place) -> None:
    """Renewal ran in the same loop as the work (rq 1354). Here it is a thread of its own."""
    with renewed(place, 0.4 * SLACK) as lock:
        lease = lease_of(lock)
        ends = time.monotonic() + 1.2 * SLACK
        while time.monotonic() < ends:
            sum(range(10_000))
        assert lock.held
        assert count(lease) >= 4
        eventually(lambda: {token_on(server) for server in place.servers} == {lease.token})
    nothing_left(place.servers)


def test_a_native_thread_needs_no_interpreter(valkeys: LocalNodes) -> None:
    """The holder calls into C for longer than a lease, and no other thread of Python runs meanwhile."""
    sleep = ctypes.PyDLL(None).usleep  # it keeps the interpreter to itself
    for face in FACES:
        with Place(face, "native", list(valkeys)) as place, renewed(place, 0.4 * SLACK) as lock:
            lease = lease_of(lock)
            for _ in range(3):
                sleep(int(400_000 * SLACK))
                assert lock.held
            assert count(lease) >= 4
            assert not lock.lost.is_set()
