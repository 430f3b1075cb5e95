"""Leases that the agent renews while servers fail: what is lost, what is not, and what is put back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from redbolt import _clock
from redbolt._engine import GONE, RAN_OUT, UNANSWERED, Engine
from redbolt._judge import give_up_ns
from redbolt._programs import DROP
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.faults import paused
from tests.kit.leases import DUE, LEASE, keep, life, looked, settled, tokens
from tests.kit.monitor import Monitor
from tests.kit.proxy import FaultProxy
from tests.kit.resp import NIL, OK, error
from tests.kit.rounds import KEY, LIMIT, TOKEN, InBackground, ask, by_name
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, Step, hang_up

Clock = Callable[[float], None]
S = 1_000_000_000
FULL = LEASE - 3


@pytest.fixture
def engine(engine_of, valkeys: LocalNodes) -> Engine:
    """An engine for five servers."""
    return engine_of(*[node.url for node in valkeys])


@pytest.fixture
def one(engine_of, valkey: LocalNode) -> Engine:
    """An engine for one of them."""
    return engine_of(valkey.url)


@pytest.fixture
def proxies(valkeys: LocalNodes) -> Iterator[list[FaultProxy]]:
    """A proxy in front of each server."""
    with ExitStack() as stack:
        yield [stack.enter_context(FaultProxy(node)) for node in valkeys]


def whole(valkeys: LocalNodes, token: bytes = TOKEN, key: bytes = KEY) -> None:
    """Check that all servers have the token, for a whole lease, or in a moment."""
    eventually(lambda: tokens(valkeys, key) == [token] * 5, what="the token is everywhere")
    assert [life(node, key) > FULL for node in valkeys] == [True] * 5


# ---- a minority ----


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_token_is_put_back_where_it_is_gone(
    engine: Engine, valkeys: LocalNodes, clock: Clock, how: str
) -> None:
    """One node after the other loses it: more than a quorum in all, and never one at a time."""
    kept = keep(engine)
    clock(DUE)
    kept.renewed(1)
    for index, node in enumerate(valkeys):
        if how == "deleted":
            raw(node, "DEL", KEY)
        else:
            node.kill()
            node.start(empty=True)
        clock(DUE)
        kept.renewed(2 + index)
        whole(valkeys)
    assert (kept.renewal.lost, kept.renewal.failed, kept.renewal.touched) == (0, 0, 0b11111)
    kept.renewal.stop()
    assert ask(engine, DROP, TOKEN).hits >= 3
    settled(engine)
    assert tokens(valkeys) == [None] * 5


def test_nodes_that_never_had_it_get_it_too(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    for node in valkeys[0], valkeys[1]:
        raw(node, "SET", KEY, "foreign", "PX", 60_000)
    kept = keep(engine)
    settled(engine)
    had = kept.renewal.touched
    for node in valkeys[0], valkeys[1]:
        raw(node, "DEL", KEY)
    clock(DUE)
    kept.renewed(1)
    whole(valkeys)
    assert had & 0b11100 == 0b11100
    assert kept.renewal.touched == 0b11111


def test_a_foreign_token_is_never_overwritten(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    kept = keep(engine)
    for node in valkeys[1], valkeys[3]:
        raw(node, "SET", KEY, "foreign", "PX", 600_000)
    for times in range(1, 3):
        clock(DUE)
        kept.renewed(times)
    settled(engine)
    assert tokens(valkeys) == [TOKEN, b"foreign", TOKEN, b"foreign", TOKEN]
    assert life(valkeys[1]) > 500
    kept.renewal.stop()
    ask(engine, DROP, TOKEN)
    settled(engine)
    assert tokens(valkeys) == [None, b"foreign", None, b"foreign", None]


def test_nothing_is_put_back_where_nothing_does_it(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    kept = keep(engine, back=None)
    raw(valkeys[2], "DEL", KEY)
    clock(DUE)
    kept.renewed(1)
    looked(engine)
    assert tokens(valkeys) == [TOKEN, TOKEN, None, TOKEN, TOKEN]


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_minority_that_fails_costs_nothing(
    engine: Engine, valkeys: LocalNodes, clock: Clock, how: str
) -> None:
    kept = keep(engine, limit=0.3)
    clock(DUE)
    kept.renewed(1)
    bad = valkeys[1], valkeys[4]
    for node in bad:
        node.kill() if how == "killed" else node.pause()
    for times in range(2, 6):
        clock(DUE)
        kept.granted(times)
    assert (kept.renewal.lost, kept.renewal.failed) == (0, 0)
    for node in bad:
        node.start(empty=True) if how == "killed" else node.resume()
    eventually(lambda: engine.absent() == 0, what="they are looked for while leases are kept")
    clock(DUE)
    kept.renewed(6)
    whole(valkeys)


def test_a_node_that_came_back_is_seen_though_nobody_uses_it(
    engine: Engine, valkeys: LocalNodes, clock: Clock
) -> None:
    """It is asked because there is a lease to renew, however long ago the last round was."""
    kept = keep(engine, limit=0.3)
    valkeys[2].pause()
    clock(DUE)
    eventually(lambda: kept.renewal.renewed == 1 and not kept.renewal.busy)
    assert engine.absent() == 0b00100
    clock(9)  # longer than nodes are looked after for rounds
    looked(engine)
    valkeys[2].resume()
    eventually(lambda: engine.absent() == 0)
    clock(DUE)
    eventually(lambda: kept.renewal.renewed == 2)
    whole(valkeys)


# ---- a quorum ----


@pytest.mark.parametrize("how", ["deleted", "foreign"])
def test_it_is_lost_when_a_quorum_does_not_have_it(
    engine: Engine, valkeys: LocalNodes, clock: Clock, how: str
) -> None:
    kept = keep(engine)
    waiter = InBackground(lambda: kept.renewal.wait(_clock.now_ns() + 3600 * S))
    for node in valkeys[0], valkeys[2], valkeys[4]:
        raw(node, "DEL", KEY)
        if how == "foreign":
            raw(node, "SET", KEY, "foreign", "PX", 600_000)
    clock(DUE)
    assert kept.lost() == GONE
    assert waiter.result() is True
    assert (kept.renewal.valid_until_ns, kept.renewal.renewed, kept.is_told()) == (0, 0, True)
    rest = b"foreign" if how == "foreign" else None
    eventually(lambda: tokens(valkeys) == [rest, None, rest, None, rest], what="what was left is deleted")
    settled(engine)
    clock(DUE)
    looked(engine)
    assert tokens(valkeys) == [rest, None, rest, None, rest]
    if how == "foreign":
        assert life(valkeys[0]) > 500


def test_what_is_lost_is_left_alone_where_nothing_puts_it_back(
    engine: Engine, valkeys: LocalNodes, clock: Clock
) -> None:
    kept = keep(engine, back=None)
    for node in valkeys[0], valkeys[2], valkeys[4]:
        raw(node, "DEL", KEY)
    clock(DUE)
    assert kept.lost() == GONE
    looked(engine)
    assert tokens(valkeys) == [None, TOKEN, None, TOKEN, None]


def test_putting_back_is_no_vote(engine_of, proxies: list[FaultProxy], valkeys: LocalNodes, clock) -> None:
    """Two of five have it, and two can say nothing: that is no quorum, and nothing is put back."""
    engine = engine_of(*[proxy.url for proxy in proxies])
    kept = keep(engine, limit=0.5)
    clock(DUE)
    kept.renewed(1)
    raw(valkeys[0], "DEL", KEY)
    for proxy in proxies[1:3]:
        proxy.refuse()
        proxy.reset_connections()
    with Monitor(valkeys[0]) as monitor:
        clock(DUE)
        eventually(lambda: kept.renewal.failed >= 2)
        assert "NX" not in [word for argv in monitor.seen() for word in argv]
    assert kept.renewal.renewed == 1
    for proxy in proxies[1:3]:
        proxy.accept()
    kept.renewed(2)
    assert kept.renewal.lost == 0
    clock(DUE)
    kept.renewed(3)
    whole(valkeys)


def test_a_new_lease_of_the_same_name_after_a_loss(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    for token in b"first", b"second", b"third":
        kept = keep(engine, token=token)
        clock(DUE)
        kept.renewed(1)
        whole(valkeys, token)
        for node in valkeys:
            raw(node, "DEL", KEY)
        clock(DUE)
        assert kept.lost() == GONE
    last = keep(engine, token=b"last")
    for times in range(1, 4):
        clock(DUE)
        last.renewed(times)
    whole(valkeys, b"last")
    assert kept.renewal.lost == GONE


# ---- nobody answers ----


def test_it_is_lost_in_time_when_all_nodes_are_cut(
    engine_of, proxies: list[FaultProxy], valkeys: LocalNodes, clock: Clock
) -> None:
    engine = engine_of(*[proxy.url for proxy in proxies])
    kept = keep(engine)
    renewal, end_ns = kept.renewal, kept.votes.valid_until_ns
    waiter = InBackground(lambda: renewal.wait(_clock.now_ns() + 3600 * S))
    for proxy in proxies:
        proxy.refuse()
        proxy.reset_connections()
    clock(DUE)
    eventually(lambda: renewal.failed >= 3)
    assert (renewal.lost, renewal.renewed, renewal.valid_until_ns) == (0, 0, end_ns)
    too_late_ns = give_up_ns(end_ns, round(LEASE * 1000), int(LIMIT * SLACK * S))
    clock((too_late_ns - _clock.now_ns()) / 1e9)
    assert kept.lost() == UNANSWERED
    assert waiter.result() is True
    assert _clock.now_ns() < end_ns, "it is told before validity ends"
    assert (renewal.valid_until_ns, kept.is_told()) == (0, True)
    failed = renewal.failed
    for proxy in proxies:
        proxy.accept()
    looked(engine_of(*[node.url for node in valkeys]))
    assert (renewal.lost, renewal.renewed, renewal.failed) == (UNANSWERED, 0, failed)


def test_a_round_that_is_open_when_it_is_too_late(one: Engine, valkey: LocalNode, clock: Clock) -> None:
    """The node answers when validity is over: nothing is revived by that."""
    kept = keep(one, limit=60.0)
    clock(DUE)
    kept.renewed(1)
    with paused(valkey):
        clock(DUE)
        eventually(lambda: kept.renewal.busy)
        clock(DUE)
        assert (kept.renewal.lost, kept.renewal.failed) == (0, 0)
        clock(LEASE - DUE)
    assert kept.lost() == UNANSWERED
    settled(one)
    assert (kept.renewal.renewed, kept.renewal.valid_until_ns) == (1, 0)


def test_renewals_go_on_after_a_cut(engine_of, proxies: list[FaultProxy], valkeys, clock: Clock) -> None:
    engine = engine_of(*[proxy.url for proxy in proxies])
    kept = keep(engine)
    clock(DUE)
    kept.renewed(1)
    for proxy in proxies:
        proxy.refuse()
        proxy.reset_connections()
    clock(DUE)
    time.sleep(0.5)
    for proxy in proxies:
        proxy.accept()
    eventually(lambda: kept.renewal.renewed == 2)
    assert kept.renewal.failed >= 1
    eventually(lambda: engine.absent() == 0)
    for times in range(3, 5):
        clock(DUE)
        kept.renewed(times)
    whole(valkeys)


ERRORS: dict[str, bytes | Step] = {
    "loading": error("LOADING Redis is loading the dataset in memory"),
    "readonly": error("READONLY You can't write against a read only replica."),
    "misconf": error("MISCONF Redis is configured to save RDB snapshots"),
    "reset": hang_up(),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_are_retried_and_counted(engine_of, clock: Clock, what: str) -> None:
    bad = 3

    def set_(argv: Argv) -> bytes | Step:
        nonlocal bad
        if b"IFEQ" in argv and bad:
            bad -= 1
            return ERRORS[what]
        return OK

    replies = by_name(SET=set_, EVALSHA=lambda _: set_((b"IFEQ",)), EVAL=lambda _: set_((b"IFEQ",)))
    with ScriptedNode(answer=replies) as node:
        kept = keep(engine_of(node.url))
        clock(DUE)
        kept.renewed(1)
        assert (kept.renewal.failed, kept.renewal.lost) == (3, 0)
        clock(DUE)
        kept.renewed(2)
        assert kept.renewal.failed == 3


def test_a_renewal_that_may_have_a_shorter_life(engine_of, clock: Clock) -> None:
    """It got no answer, so it may be executed after any later one."""
    silent = True

    def set_(argv: Argv) -> bytes | None:
        return None if b"IFEQ" in argv and silent else OK

    with ScriptedNode(answer=by_name(SET=set_, EVALSHA=OK, EVAL=OK)) as node:
        kept = keep(engine_of(node.url), limit=0.2, held=32)
        clock(15)  # 17 s are left
        eventually(lambda: kept.renewal.failed >= 1)
        silent = False
        node.peers[-1].hang_up()
        kept.renewal.bound(_clock.now_ns() + 3600 * S)
        eventually(lambda: kept.renewal.renewed >= 1)
        now = _clock.now_ns()
        assert now + 10 * S < kept.renewal.valid_until_ns < now + 18 * S


def test_a_silent_node_is_sent_no_more(engine_of, clock: Clock) -> None:
    """It is suspect, until it answers something; what it was sent is unanswered long enough."""

    def set_(argv: Argv) -> bytes | None:
        return None if b"IFEQ" in argv else OK

    with ScriptedNode(answer=by_name(SET=set_, EXISTS=None, PING=None)) as silent, ExitStack() as stack:
        others = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(2)]
        engine = engine_of(*[other.url for other in others], silent.url)
        kept = keep(engine, limit=0.2)
        clock(DUE)
        kept.granted(1)
        eventually(lambda: engine.absent() == 0b100)
        for times in range(2, 6):
            now = _clock.now_ns()
            kept.renewal.note(now - 10 * S, 30_000, now + 19 * S)  # so it is due
            kept.granted(times)
        assert len([one for one in silent.received("SET") if b"IFEQ" in one.argv]) == 1
        assert (kept.renewal.lost, kept.renewal.failed) == (0, 0)


def test_what_is_put_back_late_has_the_life_that_is_left(engine_of, clock: Clock) -> None:
    """The node says no after the others said yes; and then after its time."""
    go = threading.Event()

    def set_(argv: Argv) -> bytes | Step:
        if b"IFEQ" not in argv:
            return OK
        assert go.wait(10 * SLACK)
        return NIL

    with ScriptedNode(answer=by_name(SET=set_)) as late, ExitStack() as stack:
        others = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(2)]
        engine = engine_of(*[other.url for other in others], late.url)
        kept = keep(engine, limit=3.0)
        clock(DUE)
        kept.granted(1)
        assert kept.renewal.busy
        clock(2)
        go.set()
        kept.renewed(1)
        eventually(lambda: len(late.received("SET")) == 3)
        assert late.received("SET")[2].argv[3] == b"NX"
        assert 20_000 < int(late.received("SET")[2].argv[5]) <= 28_000
        settled(engine)
        go.clear()
        clock(DUE)
        kept.granted(2)
        clock(3.5 * SLACK)
        eventually(lambda: not kept.renewal.busy, what="its time is over")
        go.set()
        settled(engine)
        assert len(late.received("SET")) == 4


def test_a_renewal_does_not_overtake_the_try(engine_of) -> None:
    """A node that has not answered the try gets no renewal on another connection."""
    go = threading.Event()

    def set_(argv: Argv) -> bytes:
        if b"NX" in argv:
            assert go.wait(10 * SLACK)
        return OK

    with ScriptedNode(answer=by_name(SET=set_)) as slow, ExitStack() as stack:
        others = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(2)]
        engine = engine_of(*[other.url for other in others], slow.url)
        kept = keep(engine, age=LEASE / 3, answered=False)
        kept.granted(1)
        eventually(lambda: len(slow.peers) == 2, what="there is a connection for renewals")
        renewals = [one.connection for one in slow.received("SET") if b"IFEQ" in one.argv]
        assert renewals in ([], [0])
        go.set()
        eventually(lambda: not engine.pending(TOKEN) and not kept.renewal.busy)
        before = [one.connection for one in slow.received("SET") if b"IFEQ" in one.argv]
        assert before in ([], [0])


# ---- a process that did not run ----


@pytest.mark.parametrize("kind", ["pure"])
def test_a_grant_that_is_read_too_late_revives_nothing(engine_of, clock: Clock, kind: str) -> None:
    """The process stood still between the answer and the look at it."""
    go, arrived = threading.Event(), threading.Event()

    def set_(argv: Argv) -> bytes:
        if b"IFEQ" in argv:
            arrived.set()
            assert go.wait(10 * SLACK)
        return OK

    with ScriptedNode(answer=by_name(SET=set_)) as node:
        kept = keep(engine_of(node.url), limit=60.0)
        clock(DUE)
        assert arrived.wait(5 * SLACK)
        _clock._offset_ns += int(LEASE * 1e9)  # nobody is woken by that
        go.set()
        assert kept.lost() == UNANSWERED
        assert (kept.renewal.renewed, kept.renewal.valid_until_ns) == (0, 0)


def test_a_process_that_stood_still_for_too_long(engine: Engine, valkeys: LocalNodes, clock: Clock) -> None:
    """It is lost, and nothing more is sent for it: somebody else may have it by now."""
    kept = keep(engine)
    clock(DUE)
    kept.renewed(1)
    for node in valkeys:
        raw(node, "SET", KEY, "rival", "PX", 600_000)
    with Monitor(valkeys[0]) as monitor:
        clock(LEASE + 1)
        assert kept.lost() == RAN_OUT
        assert (kept.renewal.valid_until_ns, kept.is_told()) == (0, True)
        clock(DUE)
        looked(engine)
        assert not [argv for argv in monitor.seen() if KEY.decode() in argv]
    assert tokens(valkeys) == [b"rival"] * 5
    assert (kept.renewal.renewed, kept.renewal.failed) == (1, 0)


def test_what_is_late_but_valid_is_renewed(one: Engine, clock: Clock) -> None:
    kept = keep(one)
    clock(LEASE - 5)
    kept.renewed(1)
    assert kept.left() > FULL


# ---- order ----


def test_a_put_back_that_was_not_answered_is_undone(engine_of, clock: Clock, kind: str) -> None:
    """Its connection dies: the node is owed a delete, and after that it can have the token again."""
    lost = True

    def set_(argv: Argv) -> bytes | Step | None:
        nonlocal lost
        if b"IFEQ" in argv:
            return NIL
        if lost and len(node.received("SET")) > 1:
            lost = False
            return hang_up()
        return OK

    with ScriptedNode(answer=by_name(SET=set_)) as node, ExitStack() as stack:
        others = [stack.enter_context(ScriptedNode(answer=by_name(SET=OK))) for _ in range(2)]
        engine = engine_of(node.url, *[other.url for other in others])
        kept = keep(engine)
        clock(DUE)
        kept.renewed(1)
        eventually(lambda: not lost)
        clock(DUE)
        kept.renewed(2)
        eventually(lambda: [one for one in node.received("SET") if b"NX" in one.argv][2:])
        names = [one.name for one in node.received() if TOKEN in one.argv]
        assert names[:4] == ["SET", "SET", "SET", "EVAL"]
        settled(engine)
        assert (kept.renewal.lost, kept.renewal.failed) == (0, 0)


def test_nothing_is_put_back_after_a_stop(engine_of, clock: Clock) -> None:
    """Also where the node wants another form of a renewal only then."""
    answered: list[Argv] = []

    def set_(argv: Argv) -> bytes | Step:
        if b"IFEQ" not in argv:
            return OK
        eventually(lambda: kept.renewal.busy)
        kept.renewal.stop()
        answered.append(argv)
        return error("ERR syntax error")

    with ScriptedNode(answer=by_name(SET=set_, EVAL=b":1\r\n", EVALSHA=b":1\r\n")) as node:
        kept = keep(engine_of(node.url))
        clock(DUE)
        eventually(lambda: answered)
        settled(kept.engine)
        assert [one.name for one in node.received() if TOKEN in one.argv] == ["SET", "SET"]
        assert (kept.renewal.renewed, kept.renewal.lost) == (0, 0)
