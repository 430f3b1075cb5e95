"""Leases that the agent renews: when, for how long, and what their holder can do about it."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from redbolt import _clock
from redbolt._engine import GONE, HELD_TOO_LONG, RAN_OUT, Engine
from redbolt._judge import YES, drift_ns, give_up_ns
from redbolt._programs import DROP, SET_TIME, TAKE
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, Client, eventually, fd_count, raw, thread_count
from tests.kit.leases import DUE, LEASE, Kept, keep, life, looked, settled, tokens
from tests.kit.monitor import Monitor
from tests.kit.resp import OK
from tests.kit.rounds import KEY, LIMIT, TOKEN, InBackground, ask, attempt, by_name, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv
from tests.programs import finish, program

Clock = Callable[[float], None]
S = 1_000_000_000
FULL = LEASE - 3  # seconds of life that a key has at least if it was renewed a moment ago
DRIFT = drift_ns(round(LEASE * 1000), 0.01)


@pytest.fixture
def five(engine_of, nodes: LocalNodes) -> Engine:
    """An engine for five servers, of each kind in turn."""
    return engine_of(*[node.url for node in nodes])


@pytest.fixture
def engine(engine_of, valkeys: LocalNodes) -> Engine:
    """An engine for five Valkey servers."""
    return engine_of(*[node.url for node in valkeys])


@pytest.fixture
def one(engine_of, valkey: LocalNode) -> Engine:
    """An engine for one of them."""
    return engine_of(valkey.url)


# ---- when, and for how long ----


def test_a_lease_is_renewed_when_a_third_of_it_is_over(five: Engine, nodes: LocalNodes, clock: Clock) -> None:
    kept = keep(five)
    renewal, started_ns = kept.renewal, kept.votes.started_ns
    assert (renewal.started_ns, renewal.length_ms) == (started_ns, 30_000)
    assert renewal.valid_until_ns == kept.votes.valid_until_ns
    assert (renewal.touched, renewal.lost, renewal.renewed, renewal.failed) == (0b11111, 0, 0, 0)
    for node in nodes:
        raw(node, "PEXPIRE", KEY, 5000)  # as if the time was over there, too
    clock(9)
    looked(five)
    assert (renewal.renewed, renewal.started_ns) == (0, started_ns)
    clock(1.2)
    kept.renewed(1)
    assert renewal.started_ns >= started_ns + 10 * S
    assert renewal.length_ms == 30_000
    assert renewal.valid_until_ns == renewal.started_ns + 30 * S - DRIFT
    assert [life(node) > FULL for node in nodes] == [True] * 5
    clock(9)
    looked(five)
    assert renewal.renewed == 1
    clock(1.2)
    kept.renewed(2)
    assert (renewal.lost, renewal.failed, renewal.touched) == (0, 0, 0b11111)
    assert not kept.is_told()


def test_one_stall_leaves_no_debt(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    """A renewal that comes late gives a whole lease from then on, and there is one of it."""
    kept = keep(engine)
    clock(25)
    kept.renewed(1)
    assert kept.left() > LEASE - 3
    assert [life(node) > FULL for node in valkeys] == [True] * 5
    clock(9)
    looked(engine)
    assert kept.renewal.renewed == 1
    clock(1.2)
    kept.renewed(2)


def test_a_lease_is_renewed_for_ever(engine: Engine, clock: Clock) -> None:
    kept = keep(engine)
    for times in range(1, 30):
        clock(DUE)
        kept.renewed(times)
    assert (kept.renewal.lost, kept.renewal.failed) == (0, 0)
    assert kept.left() > LEASE - 3


def test_what_is_due_soon_goes_along(engine: Engine, clock: Clock) -> None:
    """Whatever is due within a twentieth of its lease, but at most half a second."""
    first, soon, later = [keep(engine, b"%.1f" % -age, None, age=age) for age in (0.0, -0.3, -0.9)]
    now = _clock.now_ns()
    clock((first.votes.started_ns + 10 * S - now) / 1e9)
    first.renewed(1)
    soon.renewed(1)
    assert soon.renewal.started_ns < soon.votes.started_ns + 10 * S + 3 * S // 10, "it did not wait"
    looked(engine)
    assert later.renewal.renewed == 0


def test_in_real_time(engine: Engine, valkeys: LocalNodes) -> None:
    """Nobody moves the clock: the agent wakes by itself."""
    kept = keep(engine, lease=3 * SLACK)
    eventually(lambda: kept.renewal.renewed >= 3, 10)
    assert kept.renewal.started_ns >= kept.votes.started_ns + int(2.5 * SLACK * S)
    assert tokens(valkeys) == [TOKEN] * 5


def test_it_is_not_held_for_longer_than_allowed(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    kept = keep(engine, held=40)
    renewal, until_ns = kept.renewal, kept.votes.started_ns + 40 * S
    clock(15)  # 25 s are left
    kept.renewed(1)
    assert until_ns - 2_000_000 <= renewal.valid_until_ns <= until_ns
    assert 20_000 < renewal.length_ms < 26_000
    assert [FULL - 10 < life(node) < 25.5 for node in valkeys] == [True] * 5
    clock(20)
    looked(engine)
    assert (renewal.renewed, renewal.lost) == (1, 0)
    now = _clock.now_ns()
    clock((give_up_ns(until_ns, 30_000, int(LIMIT * SLACK * S)) - now) / 1e9)
    assert kept.lost() == HELD_TOO_LONG
    assert (renewal.valid_until_ns, renewal.renewed, renewal.failed) == (0, 1, 0)
    assert _clock.now_ns() < until_ns
    assert kept.is_told()
    assert tokens(valkeys) == [TOKEN] * 5  # it ends by itself: the holder may not have stopped yet


def test_another_holder_may_have_more_time(engine: Engine, clock: Clock) -> None:
    kept = keep(engine, held=LEASE - 1)
    clock(DUE)
    looked(engine)
    assert kept.renewal.renewed == 0  # it could not last any longer
    kept.renewal.bound(_clock.now_ns() + 100 * S)
    kept.renewed(1)
    assert kept.left() > LEASE - 3


def test_a_short_lease_may_be_given_up_an_eighth_before_its_end(engine: Engine, clock: Clock) -> None:
    kept = keep(engine, lease=8.0, limit=60.0, held=8.0)
    clock(6.7)
    looked(engine)
    assert kept.renewal.lost == 0
    clock(0.4)
    assert kept.lost() == HELD_TOO_LONG


@pytest.mark.parametrize("back", [TAKE, None])
def test_what_is_only_watched_runs_out(one: Engine, valkey: LocalNode, clock: Clock, back) -> None:
    kept = keep(one, program=None, back=back)
    with Monitor(valkey) as monitor:
        clock(LEASE - 3)
        looked(one)
        assert kept.renewal.lost == 0
        clock(3)
        assert kept.lost() == RAN_OUT
        assert not [argv for argv in monitor.seen() if KEY.decode() in argv]
    assert (kept.renewal.valid_until_ns, kept.renewal.renewed, kept.renewal.failed) == (0, 0, 0)
    assert kept.is_told()


def test_scripts_that_the_servers_have_forgotten(five: Engine, nodes: LocalNodes, clock: Clock) -> None:
    kept = keep(five, program=SET_TIME)
    for times in range(1, 4):
        for node in nodes:
            raw(node, "SCRIPT", "FLUSH")
            raw(node, "PEXPIRE", KEY, 5000)
        clock(DUE)
        kept.renewed(times)
        assert [life(node) > FULL for node in nodes] == [True] * 5
    assert kept.renewal.failed == 0


def test_a_server_without_the_plain_command(engine_of, clock: Clock) -> None:
    def set_(argv: Argv) -> bytes:
        return b"-ERR syntax error\r\n" if b"IFEQ" in argv else OK

    replies = by_name(SET=set_, EVALSHA=b"-NOSCRIPT no\r\n", EVAL=b":1\r\n")
    with ScriptedNode(answer=replies) as node:
        kept = keep(engine_of(node.url))
        for times in range(1, 3):
            clock(DUE)
            kept.renewed(times)
        assert kept.renewal.failed == 0
        names = Counter(received.name for received in node.received() if TOKEN in received.argv)
        assert names == {"SET": 2, "EVALSHA": 2, "EVAL": 2}


# ---- what its holder can do ----


def test_a_stopped_lease_is_not_renewed_and_not_lost(one: Engine, valkey: LocalNode, clock: Clock) -> None:
    kept = keep(one)
    kept.renewal.stop()
    kept.renewal.stop()
    with Monitor(valkey) as monitor:
        clock(DUE)
        looked(one)
        clock(LEASE)
        looked(one)
        assert not [argv for argv in monitor.seen() if KEY.decode() in argv]
    assert (kept.renewal.renewed, kept.renewal.lost) == (0, 0)
    assert not kept.is_told()


def test_nobody_renews_what_nobody_refers_to(one: Engine, valkey: LocalNode, clock: Clock) -> None:
    kept = keep(one)
    clock(DUE)
    kept.renewed(1)
    del kept
    with Monitor(valkey) as monitor:
        clock(DUE)
        looked(one)
        assert not [argv for argv in monitor.seen() if KEY.decode() in argv]


def test_a_pause(one: Engine, clock: Clock) -> None:
    kept = keep(one)
    renewal = kept.renewal
    renewal.pause()
    clock(DUE)
    looked(one)
    assert (renewal.renewed, renewal.busy) == (0, False)
    renewal.resume()
    kept.renewed(1)
    clock(DUE)
    kept.renewed(2)
    renewal.pause()
    clock(LEASE - 1)
    assert kept.lost() == RAN_OUT
    assert kept.is_told()


def test_the_holder_has_extended_it_itself(one: Engine, clock: Clock) -> None:
    kept = keep(one)
    renewal = kept.renewal
    clock(9)
    now = _clock.now_ns()
    renewal.note(now, 60_000, now + 50 * S)
    assert (renewal.started_ns, renewal.length_ms, renewal.valid_until_ns) == (now, 60_000, now + 50 * S)
    clock(DUE)
    looked(one)
    assert renewal.renewed == 0
    clock(30)  # it has 20 s of life left
    kept.renewed(1)
    assert renewal.length_ms == 30_000
    now = _clock.now_ns()
    renewal.note(now, 10_000, now + 9 * S)  # which is less than two thirds of a lease
    kept.renewed(2)
    assert (renewal.length_ms, renewal.lost) == (30_000, 0)


def test_validity_can_be_shortened(one: Engine, clock: Clock) -> None:
    kept = keep(one)
    renewal = kept.renewal
    renewal.pause()
    end_ns = renewal.valid_until_ns
    renewal.shorten(end_ns + S)
    assert renewal.valid_until_ns == end_ns
    renewal.shorten(end_ns - 10 * S)
    assert renewal.valid_until_ns == end_ns - 10 * S
    clock(LEASE - 11)
    assert kept.lost() == RAN_OUT


def test_no_later_renewal_is_good_for_longer_than_the_least_doubt(one: Engine, clock: Clock) -> None:
    kept = keep(one)
    renewal = kept.renewal
    end_ns = renewal.valid_until_ns
    renewal.doubt(15 * S)
    renewal.doubt(25 * S)
    assert renewal.valid_until_ns == end_ns
    clock(20)
    kept.renewed(1)
    assert renewal.valid_until_ns == renewal.started_ns + 15 * S
    now = _clock.now_ns()
    renewal.note(now, 30_000, now + 29 * S)
    assert renewal.valid_until_ns == now + 15 * S
    renewal.doubt(9 * S)
    for _ in range(5):  # it does not die of that, though that is less than a third of a lease
        before = renewal.renewed
        clock(4)
        kept.granted(before + 1)
    assert renewal.lost == 0
    assert kept.left() < 9


def test_the_holder_has_found_out_that_it_is_lost(one: Engine, valkey: LocalNode, clock: Clock) -> None:
    kept = keep(one)
    renewal = kept.renewal
    waiter = InBackground(lambda: renewal.wait(_clock.now_ns() + 60 * S))
    renewal.lose(GONE)
    assert waiter.result()
    assert (renewal.lost, renewal.valid_until_ns, kept.is_told()) == (GONE, 0, True)
    renewal.note(_clock.now_ns(), 30_000, _clock.now_ns() + 29 * S)  # revives nothing
    assert (renewal.lost, renewal.valid_until_ns) == (GONE, 0)
    with Monitor(valkey) as monitor:
        clock(DUE)
        looked(one)
        assert not [argv for argv in monitor.seen() if KEY.decode() in argv]


def test_waiting_for_a_loss(one: Engine, clock: Clock) -> None:
    kept = keep(one, held=LEASE - 1)
    renewal = kept.renewal
    assert not renewal.wait(_clock.now_ns() - 1)
    assert not renewal.wait(_clock.now_ns() + S // 50)
    until_ns = _clock.now_ns() + 5 * S
    waiter = InBackground(lambda: renewal.wait(until_ns))
    clock(6)
    assert not waiter.result()
    waiters = [InBackground(lambda: renewal.wait(_clock.now_ns() + 3600 * S)) for _ in range(3)]
    clock(LEASE - 7)
    assert [waiter.result() for waiter in waiters] == [True] * 3
    assert renewal.lost == HELD_TOO_LONG
    assert renewal.wait(_clock.now_ns() + 3600 * S)


def test_whoever_waits_is_woken_by_a_stop(one: Engine) -> None:
    renewal = keep(one).renewal
    waiter = InBackground(lambda: renewal.wait(_clock.now_ns() + 3600 * S))
    time.sleep(0.02)
    renewal.stop()
    assert waiter.result() is False
    assert renewal.wait(_clock.now_ns() + 3600 * S) is False


def test_it_is_busy_until_the_nodes_have_answered(engine_of, clock: Clock) -> None:
    go = threading.Event()
    arrived = threading.Event()

    def set_(argv: Argv) -> bytes:
        if b"IFEQ" in argv:
            arrived.set()
            assert go.wait(10 * SLACK)
        return OK

    with ScriptedNode(answer=by_name(SET=set_)) as node:
        kept = keep(engine_of(node.url))
        assert not kept.renewal.busy
        clock(DUE)
        assert arrived.wait(5 * SLACK)
        kept.renewal.pause()
        assert kept.renewal.busy
        go.set()
        kept.renewed(1)


# ---- what it leaves behind ----


def test_stop_against_renewals(engine: Engine, valkeys: LocalNodes) -> None:
    """Whenever it comes, nothing that writes the token follows the delete that follows it."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with Client(valkeys[0]) as first, Monitor(valkeys[0]) as here, Monitor(valkeys[1]) as there:
        renewed = 0
        for at in range(300):
            key = b"name:%d" % at
            kept = keep(engine, key, None, age=LEASE / 3)  # it is due at once
            if at % 3:
                assert first.ask("DEL", key) in (b":0\r\n", b":1\r\n")  # so it is put back
            time.sleep(chance.choice((0, 0, 1e-5, 1e-4, 3e-4, 1e-3, 2e-3)))
            kept.renewal.stop()
            ask(engine, DROP, kept.token, key=key)
            renewed += kept.renewal.renewed
            settled(engine, kept.token)
        assert 0 < renewed < 300, f"seed {seed}: {renewed} of 300 were renewed, so there was no race"
        for monitor in (here, there):
            commands: dict[str, list[str]] = {}
            for argv in monitor.seen():
                if len(argv) > 2 and argv[0] in ("SET", "DELIFEQ", "EVAL"):
                    key_word = argv[3] if argv[0] == "EVAL" else argv[1]
                    commands.setdefault(key_word, []).append(argv[0])
            late = {
                key: names
                for key, names in commands.items()
                if "SET" in names[next((i for i, name in enumerate(names) if name != "SET"), 0) :][1:]
            }
            assert len(commands) == 300
            assert not late, f"seed {seed}"
    assert [raw(node, "DBSIZE") for node in valkeys] == [0] * 5, f"seed {seed}"


def test_a_release_follows_a_renewal_that_a_stopped_node_has_not_answered(
    engine: Engine, valkeys: LocalNodes, clock: Clock
) -> None:
    kept = keep(engine, limit=0.2)
    clock(DUE)
    kept.renewed(1)
    valkeys[4].pause()
    try:
        clock(DUE)
        kept.renewed(2)
        kept.renewal.stop()
        votes = ask(engine, DROP, TOKEN)
        assert said(votes)[:4].count(YES) >= 3
        assert engine.pending(TOKEN)
    finally:
        valkeys[4].resume()
    settled(engine)
    assert tokens(valkeys) == [None] * 5


def test_a_closed_engine_renews_on_new_connections(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    before = fd_count()
    kept = keep(engine)
    clock(DUE)
    kept.renewed(1)
    for times in range(2, 5):
        engine.close()
        eventually(lambda: fd_count() <= before, what="all connections are closed")
        clock(DUE)
        kept.renewed(times)
        assert fd_count() > before
    assert kept.renewal.failed == 0


def test_connections_that_nobody_has_used_for_long_are_given_back(engine: Engine, clock: Clock) -> None:
    kept = keep(engine)
    engine.close()
    before = fd_count()
    clock(DUE)
    kept.renewed(1)
    kept.renewal.stop()
    clock(25)
    looked(engine)  # which uses them, and rounds use others
    clock(31)
    eventually(lambda: fd_count() <= before + 5, what="one connection per node is left")


@pytest.mark.parametrize("kind", ["pure"])
def test_a_stop_waits_for_what_is_in_hand(one: Engine, clock: Clock, monkeypatch, kind: str) -> None:
    """The agent has looked whether it was stopped, but has not sent yet."""
    in_hand, go = threading.Event(), threading.Event()

    def look(*_: object) -> bool:
        in_hand.set()
        assert go.wait(10 * SLACK)
        return False

    kept = keep(one)
    monkeypatch.setattr("redbolt._pure.keeper.Keeper._is_written_elsewhere", look)
    clock(DUE)
    assert in_hand.wait(5 * SLACK)
    calls = [InBackground(kept.renewal.stop), InBackground(kept.renewal.pause)]
    time.sleep(0.05)
    assert [call.is_alive() for call in calls] == [True, True]
    go.set()
    for call in calls:
        call.result()
    assert kept.renewal.busy or not one.pending(TOKEN)
    settled(one)


@pytest.mark.parametrize("leases", [2000])
def test_many_leases(kind: str, engine: Engine, valkeys: LocalNodes, clock: Clock, leases: int) -> None:
    attempt(engine, b"warm up")
    first = keep(engine, b"first", age=LEASE)
    first.renewed(1)
    before = fd_count(), thread_count()
    kept = [keep(engine, b"name:%d" % at, None) for at in range(leases)]
    assert (fd_count(), thread_count()) <= before
    reads = [raw(node, "INFO", "stats")["total_reads_processed"] for node in valkeys]
    used = time.process_time()
    for times in range(1, 3):
        clock(DUE)
        for a_lease in kept:
            a_lease.granted(times)
    used = time.process_time() - used
    print(f"{kind}: {used / 2 / leases * 1e6:.0f} us per lease and renewal")
    assert (fd_count(), thread_count()) <= before
    done = [
        raw(node, "INFO", "stats")["total_reads_processed"] - count
        for node, count in zip(valkeys, reads, strict=True)
    ]
    assert max(done) < 2 * leases / 4, done
    assert sum(one.renewal.failed for one in kept) == 0
    assert Counter(one.renewal.renewed for one in kept) == {2: leases}
    assert not any(one.renewal.lost for one in kept)
    renewal_type = type(first.renewal)
    del kept[:], first, a_lease

    def kept_ones() -> int:
        gc.collect()
        return sum(type(one) is renewal_type for one in gc.get_objects())

    eventually(lambda: kept_ones() == 0)
    if kind == "pure":
        keeper = engine._pool.keeper  # type: ignore[attr-defined]
        eventually(lambda: len(keeper._heap) + len(keeper._rounds) + len(keeper._kept) < 100)


class Interrupt(Exception):
    pass


@pytest.mark.parametrize("how", ["called", "interrupted"])
def test_signal_handlers(engine: Engine, valkeys: LocalNodes, how: str) -> None:
    """A handler may do what it likes to a lease, or end any call: nothing hangs, and all can be used on."""
    current: list[Kept] = []

    def handler(*_: object) -> None:
        if how == "interrupted":
            if armed:
                armed.clear()
                raise Interrupt
            return
        for one in current[:]:
            one.renewal.pause()
            one.renewal.resume()
            one.renewal.stop()
        current.clear()

    armed: list[bool] = []
    interrupts = 0
    done = threading.Event()
    main_thread = threading.get_ident()

    def send() -> None:
        while not done.wait(random.uniform(0.0002, 0.004)):
            signal.pthread_kill(main_thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    sender = InBackground(send)
    try:
        end = time.monotonic() + 2
        number = 0
        while time.monotonic() < end:
            number += 1
            key = b"name:%d" % number
            try:
                try:
                    armed.append(True)
                    kept = keep(engine, key, None, age=LEASE / 3)
                    current.append(kept)
                    kept.renewal.pause()
                    kept.renewal.note(_clock.now_ns(), 30_000, _clock.now_ns() + 29 * S)
                    kept.renewal.resume()
                    kept.renewal.wait(_clock.now_ns() + S // 1000)
                    kept.renewal.stop()
                    ask(engine, DROP, kept.token, key=key)
                finally:
                    armed.clear()
                    current.clear()
            except Interrupt:
                interrupts += 1
    finally:
        done.set()
        sender.result()
        signal.signal(signal.SIGUSR1, before)
    assert (interrupts > 20) == (how == "interrupted")
    kept = keep(engine, age=LEASE / 3)
    kept.renewed(1)
    assert tokens(valkeys) == [TOKEN] * 5


def test_a_fork(kind: str, valkeys: LocalNodes) -> None:
    """The child's are dead; the parent's go on."""
    urls = [node.url for node in valkeys]
    with program("renewals", "forked", urls=urls, kind=kind) as process:
        finish(process)


def test_the_end_of_the_program_is_silent(kind: str, valkeys: LocalNodes) -> None:
    urls = [node.url for node in valkeys]
    for scenario in ("ends", "ends_in_a_cycle"):
        with program("renewals", scenario, urls=urls, kind=kind) as process:
            finish(process)
