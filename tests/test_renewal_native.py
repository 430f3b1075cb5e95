"""What only the native engine promises of renewals: its agent is C, and needs neither the GIL nor Python."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import redbolt
from redbolt import _clock
from redbolt._engine import RAN_OUT, Engine, engine_for
from redbolt._judge import YES
from redbolt._programs import COUNT, DROP, EXTEND, SUCCEED, SWAP
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.leases import DUE, LEASE, NEVER, Kept, keep, tokens
from tests.kit.monitor import Monitor
from tests.kit.resp import OK
from tests.kit.rounds import KEY, TOKEN, InBackground, ask, by_name, said
from tests.kit.scripted import Received, ScriptedNode
from tests.kit.steps import Argv, handshake

_core: Any = importlib.import_module("redbolt._core")
Clock = Callable[[float], None]
S = 1_000_000_000
only_linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux tells")


def engine_of(*targets: Any) -> Engine:
    return engine_for(tuple(redbolt.Node.from_url(target.url) for target in targets), "native")


@contextmanager
def program(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this, with these arguments in ``given``; killed at the end of the block."""
    head = "import json, sys\ngiven = json.loads(sys.argv[1])\n"
    command = [sys.executable, "-c", head + text, json.dumps(arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> Any:
    """What it has written, as JSON, at its end without a complaint."""
    output, errors = process.communicate(timeout=60 * SLACK)
    assert (process.returncode, errors) == (0, ""), errors
    return json.loads(output)


# ---- without the GIL ----

HOLDS_THE_GIL = """
import ctypes, time
import redbolt
from redbolt._engine import engine_for
from tests.kit.leases import keep

urls, lease, seconds = given
kept = keep(engine_for(tuple(map(redbolt.Node.from_url, urls)), "native"), lease=lease)
sys.stdout.write("holding\\n")
sys.stdout.flush()
sleep = ctypes.PyDLL(None).poll  # PyDLL keeps the GIL while it calls
started = time.monotonic()
sleep(None, 0, int(seconds * 1000))
over = time.monotonic() - started
renewal = kept.renewal
print(json.dumps([over, renewal.lost, renewal.renewed, kept.left() > 0]))
"""


def test_a_program_that_holds_the_gil_keeps_its_lock(valkeys: LocalNodes) -> None:
    lease, seconds = 0.8 * SLACK, 2.8 * SLACK
    rival = engine_of(*valkeys)
    votes = rival.votes()
    with program(HOLDS_THE_GIL, [node.url for node in valkeys], lease, seconds) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        tries = 0
        while not select.select([process.stdout], [], [], 0.01)[0]:
            assert not rival.attempt(votes, KEY, None, 1000, 3, 0, int(2 * SLACK * S))
            tries += 1
        over, lost, renewed, is_valid = told(process)
    assert tries > 20
    assert over >= 3 * lease
    assert (lost, is_valid) == (0, True)
    assert renewed >= 6


def test_no_thread_of_python_renews(valkeys: LocalNodes, clock: Clock) -> None:
    before = set(sys._current_frames())
    kept = keep(engine_of(*valkeys))
    clock(DUE)
    kept.renewed(1)
    assert set(sys._current_frames()) <= before
    assert {thread.ident for thread in threading.enumerate()} <= before


# ---- when the agent wakes ----


def agents() -> list[str]:
    """The threads that Python does not know."""
    known = {str(thread.native_id) for thread in threading.enumerate()}
    return [thread for thread in os.listdir("/proc/self/task") if thread not in known]


def switches(thread: str) -> int:
    """How often a thread has gone to sleep."""
    with open(f"/proc/self/task/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))


@only_linux
def test_the_agent_is_woken_only_for_what_is_due_first(valkeys: LocalNodes) -> None:
    engine = engine_of(*valkeys)
    first = keep(engine)
    last = keep(engine, b"another")
    (agent,) = agents()
    started = switches(agent)
    now, arguments = _clock.now_ns(), (b"key", b"token", 31, 30_000, 3, 0, S)
    for _ in range(30_000):
        engine.renew(*arguments, now, now + 30 * S, NEVER).stop()
        last.renewal.pause()
        last.renewal.resume()
    assert switches(agent) - started < 20  # it may have replies to read, and connections to look after
    hurry = engine.renew(*arguments, now - 29 * S, now + S, NEVER)
    eventually(lambda: hurry.failed or hurry.lost, what="one that is due now is seen to at once")
    assert (first.renewal.lost, last.renewal.lost) == (0, 0)


def timers() -> list[tuple[str, float]]:
    """Clock and seconds left of each timer that this process has armed."""
    found = []
    for fd in os.listdir("/proc/self/fdinfo"):
        try:
            with open(f"/proc/self/fdinfo/{fd}") as info:
                fields = dict(line.strip().split(": ", 1) for line in info if ": " in line)
        except FileNotFoundError:  # that of the listing
            continue
        if "it_value" in fields:
            seconds, nanoseconds = map(int, fields["it_value"].strip("()").split(","))
            found.append((fields["clockid"].strip(), seconds + nanoseconds / 1e9))
    return found


@only_linux
def test_its_timer_counts_while_the_machine_is_suspended(valkeys: LocalNodes, clock: Clock) -> None:
    """It is set to what is due first, by the clock that the library goes by."""
    boottime = str(time.CLOCK_BOOTTIME)
    is_set = [0.0, 0.0]

    def is_between() -> bool:
        [(clock_id, left)] = timers()
        return clock_id == boottime and is_set[0] < left < is_set[1]

    kept = keep(engine_of(*valkeys), limit=0.1)
    is_set[:] = 7, 10.001
    eventually(is_between)
    clock(4)
    is_set[:] = 3, 6.001
    eventually(is_between)
    clock(-4)
    is_set[:] = 7, 10.001
    eventually(is_between)
    hurry = keep(engine_of(*valkeys), b"hurry", lease=15.0, limit=0.1)
    is_set[:] = 2, 5.001
    eventually(is_between)
    hurry.renewal.stop()
    kept.renewal.stop()
    redbolt.close()
    clock(0)  # wakes it
    is_set[:] = -1, 0.001  # not set
    eventually(is_between)


# ---- forks ----

FORKS = """
import os, subprocess
import redbolt
from redbolt._engine import engine_for
from tests.kit.clients import eventually
from tests.kit.leases import keep

def descriptors():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[::2])
        except FileNotFoundError:
            pass  # that of the listing
    kinds = [kind if kind != "anon_inode" else name.rstrip("]") for kind, name in found]
    return kinds.count("timerfd"), kinds.count("socket")

url, look = given
kept = keep(engine_for((redbolt.Node.from_url(url),), "native"), lease=1.0)
eventually(lambda: kept.renewal.renewed)
parents = descriptors()
reader, writer = os.pipe()
pid = os.fork()
if not pid:
    mine = descriptors()
    renewal = kept.renewal
    for _ in range(3):
        renewal.pause(), renewal.resume(), renewal.shorten(0), renewal.doubt(0), renewal.bound(0)
        renewal.lose(1), renewal.note(1, 1, 1), renewal.stop()
    state = [renewal.valid_until_ns, renewal.busy, renewal.wait(1 << 62), renewal.lost]
    del kept, renewal
    os.write(writer, json.dumps([mine, state]).encode())
    os._exit(0)
childs = json.loads(os.read(reader, 4096))
assert os.waitpid(pid, 0)[1] == 0
executed = subprocess.check_output([sys.executable, "-c", look], close_fds=False, text=True)
before = kept.renewal.renewed
eventually(lambda: kept.renewal.renewed > before)
print(json.dumps([parents, childs, executed, kept.renewal.failed]))
"""
LOOK = """
import os
fds = os.listdir("/proc/self/fd")
print(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds if int(fd) > 2))
print([os.readlink(f"/proc/self/fd/{fd}") for fd in fds if os.path.lexists(f"/proc/self/fd/{fd}")])
"""


@only_linux
@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer's allocator stays locked in a child if another thread was inside at the fork",
)
def test_a_child_has_neither_timer_nor_connections(valkey: LocalNode) -> None:
    with program(FORKS, valkey.url, LOOK) as process:
        parents, (childs, state), executed, failed = told(process)
    assert parents[0] == 1
    assert parents[1] >= 2  # the holder's connection, and the keeper's
    assert childs == [0, 0]
    assert state == [0, False, False, 0]
    assert "timerfd" not in executed
    assert "socket" not in executed
    assert failed == 0


# ---- memory ----


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@only_linux
def test_the_memory_of_many_leases(valkey: LocalNode) -> None:
    engine = engine_of(valkey)
    many = 10_000

    def fill() -> list[object]:
        now = _clock.now_ns()
        order = list(range(many))
        random.shuffle(order)  # so that the heap has work
        return [
            engine.renew(b"key:%d" % at, TOKEN, 1, 30_000, 1, 0, S, now + at * 1000, now + 30 * S, NEVER)
            for at in order
        ]

    def turn() -> None:
        leases = fill()
        random.shuffle(leases)
        leases.clear()
        gc.collect()

    start = resident()
    leases = fill()
    assert (resident() - start) / many < 1500 * SLACK
    leases.clear()
    gc.collect()
    turn()
    before = resident()
    for _ in range(10):
        turn()
    assert resident() - before < 10 * many * 100  # a quarter of what they have had


def test_the_gate_lives_as_long_as_what_may_wake_it(valkey: LocalNode, clock: Clock) -> None:
    engine = engine_of(valkey)
    kept = keep(engine, program=None)
    renewal = kept.renewal
    del kept
    gc.collect()
    clock(LEASE)
    assert renewal.wait(_clock.now_ns() + 5 * S)
    assert renewal.lost == RAN_OUT


def test_an_engine_that_only_its_lease_refers_to(valkeys: LocalNodes, clock: Clock) -> None:
    """It renews, and takes its connections along when it ends: the end of this test looks."""
    engine = _core.Engine(tuple(redbolt.Node.from_url(node.url) for node in valkeys))
    kept = keep(engine)
    renewal = kept.renewal
    del engine, kept
    gc.collect()
    clock(DUE)
    eventually(lambda: renewal.renewed == 1 and not renewal.busy)
    assert tokens(valkeys) == [TOKEN] * 5


def is_renewal(argv: Argv) -> bool:
    return argv[0] == b"SET" and b"IFEQ" in argv


def renewals(node: ScriptedNode) -> list[Received]:
    return [received for received in node.received("SET") if is_renewal(received.argv)]


@pytest.mark.parametrize("how", ["answers", "hangs up"])
def test_an_answer_for_a_lease_that_is_no_more(clock: Clock, how: str) -> None:
    """What it was for is not freed before; and it is no answer for the next."""
    silent = threading.Event()

    def set_(argv: Argv) -> bytes | None:
        return None if is_renewal(argv) and silent.is_set() else OK

    with ScriptedNode(answer=by_name(SET=set_), background=handshake) as node:
        engine = engine_of(node)
        kept = [keep(engine, b"key:%d" % at, b"token:%d" % at, limit=5.0) for at in range(50)]
        clock(DUE)
        for one in kept:
            one.renewed(1)
        silent.set()
        clock(DUE)
        eventually(lambda: len(renewals(node)) == 100)
        number = renewals(node)[-1].connection
        stays = kept[7]
        del kept, one
        gc.collect()
        silent.clear()
        if how == "answers":
            node.peers[number].send(OK * 50)
            stays.renewed(2)
        else:
            node.peers[number].hang_up()
            eventually(lambda: stays.renewal.failed == 1)
            clock(1)
            stays.renewed(2)
        assert stays.renewal.lost == 0
        after = [received.argv[1] for received in renewals(node)[100:]]
        assert after == ([] if how == "answers" else [b"key:7"])


# ---- under load ----


def test_stops_while_a_thousand_leases_are_renewed(valkeys: LocalNodes) -> None:
    """After a stop and a release, no write of the token reaches a server: neither a renewal nor one that puts
    it back, of which there are many since one server forgets them all the time.
    """
    nodes = [valkeys[0], valkeys[1], valkeys[2]]
    engine = engine_of(*nodes)
    leases = [keep(engine, b"key:%d" % at, None, lease=3.0 * SLACK) for at in range(1000)]
    random.shuffle(leases)
    quarters = [leases[at * 70 : at * 70 + 70] for at in range(4)]
    others = leases[280:]
    ends = time.monotonic() + 3 * SLACK

    def stop_some(mine: list[Kept]) -> list[bytes]:
        for kept in mine:
            time.sleep(random.random() * max(0.0, ends - time.monotonic()) / 20)
            kept.renewal.stop()
            ask(engine, DROP, kept.token, key=kept.key)  # may be queued behind a renewal, without a vote
        return [kept.token for kept in mine]

    with Monitor(nodes[2]) as monitor:
        threads = [InBackground(partial(stop_some, mine)) for mine in quarters]
        seen = []
        while any(thread.is_alive() for thread in threads):
            raw(nodes[2], "FLUSHALL")
            seen += monitor.seen()
            time.sleep(0.02)
        stopped = {token.decode() for thread in threads for token in thread.result(60)}
        more = max(kept.renewal.renewed for kept in others) + 1
        eventually(lambda: max(kept.renewal.renewed for kept in others) >= more, 10)
        keys = [kept.key for mine in quarters for kept in mine]
        eventually(lambda: not any(any(raw(node, "MGET", *keys)) for node in nodes))
        seen += monitor.seen()
    dropped: set[str] = set()
    backs = renewals = 0
    for name, *words in seen:
        token = words[1] if len(words) > 1 else ""
        if name == "DELIFEQ":
            dropped.add(token)
        elif name == "EVAL":  # a delete, behind a renewal
            dropped.add(words[-1])
        elif name == "SET":
            assert token not in dropped, "a write of the token behind its release"
            backs += "NX" in words
            renewals += "IFEQ" in words
    assert dropped >= stopped
    assert backs > 1000 < renewals  # the first is more than the tries
    assert [kept.renewal.lost for kept in others] == [0] * len(others)
    for kept in others:
        kept.renewal.stop()


def test_more_than_may_be_unanswered_at_once(valkeys: LocalNodes, clock: Clock) -> None:
    """What is due together would be too much for a connection: the rest waits, and does not fail."""
    engine = engine_of(valkeys[0], valkeys[1], valkeys[2])
    leases = [keep(engine, b"%04d" % at + bytes(4000), None) for at in range(250)]  # a megabyte
    clock(DUE)
    for kept in leases:
        kept.renewed(1)
    assert [kept.renewal.failed for kept in leases] == [0] * 250


def test_methods_from_many_threads(valkeys: LocalNodes) -> None:
    """Nobody waits for the GIL with what the agent needs, or the other way round."""
    engine = engine_of(*valkeys)
    leases = [keep(engine, b"key:%d" % at, None, lease=2.0 * SLACK) for at in range(200)]
    until_ns = _clock.now_ns() + int(1.5 * SLACK * S)

    def use() -> int:
        calls = 0
        while (now := _clock.now_ns()) < until_ns:
            renewal = random.choice(leases).renewal
            renewal.pause()
            renewal.bound(now + 1000 * S)
            renewal.doubt(1000 * S)
            renewal.resume()
            renewal.wait(now + 100_000)
            assert (renewal.lost, renewal.valid_until_ns > now) == (0, True)
            engine.renew(b"key", TOKEN, 0, 30_000, 3, 0, S, now, now + 30 * S, NEVER)
            calls += 1
        return calls

    threads = [InBackground(use) for _ in range(6)]
    assert min(thread.result(20) for thread in threads) > 10
    assert min(kept.renewal.renewed for kept in leases) >= 1


# ---- connections ----


def test_a_connection_that_has_ended_between_two_renewals(valkeys: LocalNodes, clock: Clock) -> None:
    engine = engine_of(*valkeys)
    kept = keep(engine)
    for times in range(1, 4):
        clock(DUE)
        kept.renewed(times)
        for node in valkeys:
            raw(node, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert (kept.renewal.failed, kept.renewal.lost) == (0, 0)


def test_all_leases_share_one_connection_to_each_node(valkeys: LocalNodes, clock: Clock) -> None:
    engine = engine_of(*valkeys)
    leases = [keep(engine, b"key:%d" % at, None) for at in range(50)]

    def connections() -> list[int]:
        return [str(raw(node, "CLIENT", "LIST")).count(" fd=") for node in valkeys]

    before = connections()
    clock(DUE)
    for kept in leases:
        kept.renewed(1)
    assert connections() == [count + 1 for count in before]


def test_a_node_that_was_silent_is_looked_for_while_a_lease_is_kept(
    valkeys: LocalNodes, clock: Clock
) -> None:
    """Also where there is no other connection, and nobody has used the engine for long."""
    engine = engine_of(*valkeys)
    kept = keep(engine, limit=0.3)
    engine.close()
    valkeys[1].pause()
    clock(DUE)
    kept.renewed(1)
    eventually(lambda: engine.absent() == 0b10, what="it is suspect")
    clock(8)
    valkeys[1].resume()
    eventually(lambda: engine.absent() == 0, what="it is back")
    assert kept.renewal.lost == 0


def test_a_renewal_follows_what_its_holder_has_written(clock: Clock) -> None:
    """On the holder's connection, as long as that is not answered: a later one must not be overtaken."""
    late: list[Argv] = []

    def answer(argv: Argv) -> bytes | None:
        if late or b"12345" in argv:
            late.append(argv)
            return None
        return OK

    with ScriptedNode(answer=answer, background=handshake) as node:
        engine = engine_of(node)
        kept = keep(engine)
        extend = InBackground(lambda: ask(engine, EXTEND, TOKEN, b"12345", limit=5.0))
        eventually(lambda: late)
        clock(DUE)
        eventually(lambda: len(late) == 2)
        extension, renewal = [one for one in node.received() if one.argv in late]
        assert (extension.name, extension.argv[-1]) == ("SET", b"12345")
        assert (renewal.name, renewal.argv[-1]) == ("EVAL", b"30000")
        assert renewal.connection == extension.connection
        node.peers[extension.connection].send(OK + b":1\r\n")
        assert said(extend.result()) == [YES]
        kept.renewal.stop()


# ---- arguments, and signals ----


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        (ValueError, {"key": b"x" * 65537}),
        (ValueError, {"token": b"x" * 65537}),
        (ValueError, {"program": COUNT}),  # needs a word more
        (ValueError, {"back": SUCCEED}),
        (ValueError, {"back": SWAP}),
        (ValueError, {"back": EXTEND}),  # no try: nothing would undo it
        (TypeError, {"key": None}),
        (TypeError, {"token": "text"}),
        (TypeError, {"gate": object()}),
        (OverflowError, {"until_ns": 1 << 63}),
    ],
)
def test_arguments(valkey: LocalNode, what: type[Exception], arguments: dict[str, Any]) -> None:
    now = _clock.now_ns()
    given: dict[str, Any] = {
        "key": KEY, "token": TOKEN, "touched": 1, "lease_ms": 30_000, "quorum": 1, "drift_ns": 0,
        "limit_ns": S, "started_ns": now, "valid_until_ns": now + 30 * S, "until_ns": NEVER,
    }  # fmt: skip
    engine = engine_of(valkey)
    engine.renew(**given).stop()
    with pytest.raises(what):
        engine.renew(**(given | arguments))


def test_a_signal_ends_the_wait_for_a_loss(valkey: LocalNode) -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    kept = keep(engine_of(valkey))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        started = time.monotonic()
        with pytest.raises(Alarm):
            kept.renewal.wait(_clock.now_ns() + 20 * S)
        assert time.monotonic() - started < 5 * SLACK
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert kept.renewal.lost == 0
