"""Waiting for a lock that a stranger holds: it is got when it is free, by hearing of that, and without work.

The holders are no clients of the library, so that the queue of the process plays no part.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import redbolt
from redbolt import Lock, RedLock, ReentrantLock, SetupError
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.monitor import Monitor
from tests.kit.rounds import InBackground
from tests.kit.waiting import FACES, LIMITS, NAME, Limited, Place, Stranger, calls, take_and_release
from tests.programs import expect, finish, program, tell

E = 0.15 * SLACK
"""Seconds that the machine may add."""
SOON = 1.0 * SLACK
"""Seconds: much more than it takes to hear of something, and much less than any lease or pause here."""


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    """Each kind of lock in turn."""
    name: str = request.param
    return name


@pytest.fixture
def place(face: str, kind: str, nodes: LocalNodes) -> Iterator[Place]:
    """Where it lives, on each kind of server."""
    with Place(face, kind, list(nodes)) as made:
        yield made


only = pytest.mark.parametrize


# ---- the ways ----


def test_a_release_is_heard_of(place: Place) -> None:
    place.take()
    lock = place.lock()
    assert (lock.waiting, lock.waiting.reason) == ("tracking", "not waited yet")
    waiting = place.waiter(lock)
    freed = place.free(publish=False)
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.at - freed < SOON
    assert (lock.waiting, lock.waiting.reason) == ("tracking", "the best that there is")


def test_a_release_is_heard_of_again_and_again(place: Place) -> None:
    lock = place.lock()
    for number in range(20):
        place.take(token=f"token {number}")
        waiting = place.waiter(lock)
        freed = place.free(publish=False)
        outcome = waiting.result()
        assert outcome.granted
        assert outcome.at - freed < SOON


def test_a_lock_that_changes_hands_is_got_in_the_end(place: Place) -> None:
    """Others are faster a few times."""
    place.take()
    waiting = place.waiter()
    for number in range(5):
        looks = place.looks()
        place.take(token=f"token {number}")
        eventually(lambda looks=looks: place.looks() > looks, what="it listens again")  # type: ignore[misc]
    freed = place.free(publish=False)
    assert waiting.result().at - freed < SOON


@only("face", ["ReentrantLock"], indirect=True)
def test_a_release_is_published(place: Place) -> None:
    place.take()
    lock = place.lock(waiting="channel")
    waiting = place.waiter(lock)
    place.renew()  # nobody tells of that here
    freed = place.free()
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.at - freed < SOON
    assert (lock.waiting, lock.waiting.reason) == ("channel", "it was asked for")


@only("face", ["ReentrantLock"], indirect=True)
def test_a_release_that_was_not_published_is_found_at_the_end_of_the_lease(place: Place) -> None:
    place.take(ttl_ms=400)
    waiting = place.waiter(place.lock(waiting="channel"))
    place.free(publish=False)
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.took < 0.4 + E


def test_polling(place: Place) -> None:
    place.take()
    lock = place.lock(waiting="polling", sleep=0.03)
    waiting = InBackground(lambda: take_and_release(lock))
    tries = ("SET", "EVALSHA", "EVAL")
    first = place.in_order()[0]
    before = calls(first, *tries)
    eventually(lambda: calls(first, *tries) >= before + 5)
    assert calls(first, "PTTL", "SUBSCRIBE") == 0
    assert lock.waiting == "polling"
    freed = place.free()
    assert waiting.result().at - freed < 0.03 + SOON


def test_polling_keeps_its_pace(place: Place) -> None:
    place.take()
    started = time.monotonic()
    assert not place.lock(waiting="polling", sleep=0.05).acquire(blocking_timeout=0.5)
    most = 2 * (time.monotonic() - started) / 0.05 + 12  # each pause is drawn from 0 to that
    for server in place.servers:
        assert calls(server, "SET", "EVALSHA") - place.writes <= most
        assert calls(server, "PTTL", "SUBSCRIBE", "CLIENT|TRACKING") == 0


def test_tracking_that_was_asked_for(place: Place) -> None:
    place.take()
    lock = place.lock(waiting="tracking")
    waiting = place.waiter(lock)
    freed = place.free(publish=False)
    assert waiting.result().at - freed < SOON
    assert (lock.waiting, lock.waiting.reason) == ("tracking", "it was asked for")


@only("way", ["", "channels", "TRACKING", "poll", 5, b"polling"])
def test_a_way_that_does_not_exist(kind: str, valkey: LocalNode, way: Any) -> None:
    makers: list[Callable[..., object]] = [
        lambda **options: Lock(valkey.url, NAME, **options),
        lambda **options: RedLock([valkey.url], NAME, **options),
        lambda **options: ReentrantLock(valkey.url, NAME, **options),
    ]
    for make in makers:
        with pytest.raises(
            ValueError, match="waiting must be None or one of tracking, channel, polling, not"
        ):
            make(engine=kind, waiting=way)


def test_a_plain_lock_has_no_channel(kind: str, valkey: LocalNode) -> None:
    for make in (
        lambda: Lock(valkey.url, NAME, engine=kind, waiting="channel"),
        lambda: RedLock([valkey.url], NAME, engine=kind, waiting="channel"),
    ):
        with pytest.raises(ValueError, match="nothing is published"):
            make()


# ---- servers that lack a way ----


@only("limit", LIMITS)
def test_a_plain_lock_polls_where_there_is_no_tracking(kind: str, limit: str) -> None:
    with Limited(LIMITS[limit][0]) as server:
        lock = Lock(server.node.url, NAME, 10, sleep=0.02, engine=kind)
        waiting = InBackground(lambda: take_and_release(lock))
        eventually(lambda: lock.waiting == "polling")
        count = len(server.node.received("SET"))
        eventually(lambda: len(server.node.received("SET")) > count + 2)
        assert redbolt.Node.from_url(server.node.url).address in lock.waiting.reason
        assert "does not know or permit waiting by tracking" in lock.waiting.reason
        server.taken = False
        outcome = waiting.result()
        assert outcome.granted
        connections = len(server.node.peers)
        assert connections <= 4  # it does not try to track again and again
        server.taken = True
        assert not lock.acquire(blocking_timeout=0.1)
        assert len(server.node.peers) <= connections + 2


@only("limit", LIMITS)
def test_a_reentrant_lock_takes_the_channel_or_polls(kind: str, limit: str) -> None:
    background, has_channels = LIMITS[limit]
    with Limited(background) as server:
        lock = ReentrantLock(server.node.url, NAME, 10, sleep=60 if has_channels else 0.02, engine=kind)
        waiting = InBackground(lambda: take_and_release(lock))
        way = "channel" if has_channels else "polling"
        eventually(lambda: lock.waiting == way)
        if has_channels:
            eventually(lambda: server.subscribers and len(server.node.received("PTTL")) > 0)
            assert server.node.received("SUBSCRIBE")[0].argv[1] == b"redisson_lock__channel:{name}"
        server.taken = False
        server.publish("redisson_lock__channel:{name}")
        freed = time.monotonic()
        outcome = waiting.result()
        assert outcome.granted
        assert outcome.at - freed < SOON
        assert lock.waiting == way


@only("limit", LIMITS)
@only("forced", ["tracking", "channel"])
def test_a_way_that_was_asked_for_and_is_not_there(kind: str, limit: str, forced: str) -> None:
    background, has_channels = LIMITS[limit]
    if forced == "channel" and has_channels:
        pytest.skip("it is there")
    with Limited(background) as server:
        lock = ReentrantLock(server.node.url, NAME, 10, sleep=60, engine=kind, waiting=forced)
        for _ in range(2):
            with pytest.raises(SetupError, match=f"does not know or permit waiting by {forced}") as caught:
                InBackground(lock.acquire).result()
            assert set(caught.value.causes) == {redbolt.Node.from_url(server.node.url).address}
        assert lock.acquire(blocking=False) is False  # without waiting it is as good as any


def test_many_nodes_poll_only_if_none_can_track(kind: str, valkeys: LocalNodes) -> None:
    """One node in two does without: the others are listened to."""
    with ExitStack() as stack:
        limited = [stack.enter_context(Limited(LIMITS["no TRACKING"][0])) for _ in range(3)]
        urls = [server.node.url for server in limited]
        lock = RedLock(urls, NAME, 10, sleep=0.02, engine=kind)
        assert not lock.acquire(blocking_timeout=0.2)
        assert lock.waiting == "polling"
        urls[1:] = [node.url for node in valkeys][:2]
        with Stranger(list(valkeys)[:2]) as stranger:
            stranger.ask(["CONFIG", "RESETSTAT"])
            stranger.ask(["SET", NAME, "x", "PX", 20_000])
            lock = RedLock(urls, NAME, 10, sleep=60, engine=kind)
            waiting = InBackground(lambda: take_and_release(lock))
            eventually(lambda: all(calls(node, "PTTL") for node in list(valkeys)[:2]))
            limited[0].taken = False
            freed = time.monotonic()
            stranger.ask(["DEL", NAME])
            assert waiting.result().at - freed < SOON
            assert lock.waiting == "tracking"


ACL = {
    # rights that are missing, and how a plain lock and a reentrant one wait then
    "-client|tracking": ("polling", "channel"),
    "-client": ("polling", "channel"),
    "-client|tracking -subscribe": ("polling", "polling"),
}


@only("rights", ACL)
@only("face", ["Lock", "ReentrantLock"], indirect=True)
def test_a_user_who_may_not(kind: str, face: str, node: LocalNode, rights: str) -> None:
    raw(node, "ACL", "SETUSER", "amy", "reset", "on", ">hers", "~*", "&*", "+@all", *rights.split())
    way = ACL[rights][face == "ReentrantLock"]
    with Place(face, kind, [node], [node.url.replace("//", "//amy:hers@")]) as place:
        place.take()
        lock = place.lock(sleep=0.02 if way == "polling" else 60)
        waiting = InBackground(lambda: take_and_release(lock))
        eventually(lambda: lock.waiting == way)
        if way == "channel":
            eventually(lambda: place.looks() > 0)
        assert "does not know or permit" in lock.waiting.reason
        freed = place.free()
        outcome = waiting.result()
        assert outcome.granted
        assert outcome.at - freed < SOON
        if "client" in rights:
            place.take()
            forced = place.lock("forced", waiting="tracking")
            place.take(name="forced")
            with pytest.raises(SetupError):
                InBackground(forced.acquire).result()


# ---- no work ----


def test_who_waits_does_nothing(place: Place) -> None:
    place.take(ttl_ms=60_000)
    with (
        program("waits", "work", face=place.face, urls=place.urls, kind=place.kind) as process,
        ExitStack() as all_,
    ):
        assert process.stdout is not None
        expect(process, "waiting")
        eventually(lambda: place.looks() > 0, 10)
        time.sleep(0.5)  # the first moments: it looks at all nodes once more, and at the type of the key
        monitors = [all_.enter_context(Monitor(server)) for server in place.servers]
        tell(process)
        before, _ = json.loads(process.stdout.readline())
        time.sleep(2)
        tell(process)
        after, done = json.loads(process.stdout.readline())
        assert not done
        assert [monitor.seen() for monitor in monitors] == [[]] * len(monitors)
        assert after - before < 0.02 * SLACK
        place.free()

        def is_done() -> bool:
            tell(process)
            assert process.stdout is not None
            return bool(json.loads(process.stdout.readline())[1])

        eventually(is_done)
        finish(process)


RENEWALS: dict[str, list[str | int]] = {
    "life": ["PEXPIRE", NAME, 20_000],
    "compare and set": ["SET", NAME, "somebody else's", "IFEQ", "somebody else's", "PX", 20_000],
}


@pytest.mark.slow
@only("renewal", RENEWALS)
def test_renewals_cost_one_look_each(place: Place, renewal: str) -> None:
    place.take()
    if renewal != "life" and (
        place.face == "ReentrantLock" or b"-" in place.stranger.ask(RENEWALS[renewal])[0][:1]
    ):
        pytest.skip("this server or lock has no such renewal")
    with program("waits", "work", face=place.face, urls=place.urls, kind=place.kind) as process:
        assert process.stdout is not None
        expect(process, "waiting")
        eventually(lambda: place.looks() > 0, 10)
        time.sleep(0.2)
        tell(process)
        before, _ = json.loads(process.stdout.readline())
        place.stranger.ask(["CONFIG", "RESETSTAT"])
        count, ends = 0, time.monotonic() + 2
        while time.monotonic() < ends:
            place.stranger.ask(RENEWALS[renewal])
            count += 1
            time.sleep(0.01)
        tell(process)
        after, done = json.loads(process.stdout.readline())
        assert not done
        for server in place.servers:
            sent = calls(server, "PTTL", "SET", "EVALSHA", "EVAL") - count * (renewal != "life")
            assert sent <= count + 12
        assert after - before < 0.4 * SLACK
        freed = place.free()
        tell(process)
        line = process.stdout.readline()
        if not json.loads(line)[1]:

            def is_done() -> bool:
                tell(process)
                assert process.stdout is not None
                return bool(json.loads(process.stdout.readline())[1])

            eventually(is_done)
        assert time.monotonic() - freed < SOON
        finish(process)


@only("renewal", RENEWALS)
def test_a_flood_of_renewals_is_no_flood_of_looks(place: Place, renewal: str) -> None:
    """There is a gap of 2 ms after a change that was no release."""
    place.take()
    if place.face == "ReentrantLock" and renewal != "life":
        pytest.skip("this lock has no such renewal")
    if b"-" in place.stranger.ask(RENEWALS[renewal])[0][:1]:
        pytest.skip("this server has no such renewal")
    waiting = place.waiter()
    time.sleep(0.1)
    place.stranger.ask(["CONFIG", "RESETSTAT"])
    started, count = time.monotonic(), 0
    while time.monotonic() < started + 0.5:
        place.stranger.ask(*[RENEWALS[renewal]] * 20)
        count += 20
    took = time.monotonic() - started
    for server in place.servers:
        sent = calls(server, "PTTL", "SET", "EVALSHA", "EVAL") - count * (renewal != "life")
        assert sent < took / 0.002 * 1.1 + 20
    freed = place.free()
    assert waiting.result().at - freed < SOON


# ---- the arguments of a call, and one deadline ----


def test_the_waiting_time_of_the_call(place: Place) -> None:
    place.take()
    for lock in (
        place.lock(),
        place.lock(blocking_timeout=60),
        place.lock(blocking=False, blocking_timeout=60),
    ):
        outcome = InBackground(
            lambda lock=lock: take_and_release(lock, blocking=True, blocking_timeout=0.3)  # type: ignore[misc]
        ).result()
        assert not outcome.granted
        assert 0.295 < outcome.took < 0.3 + E
    for arguments in ({"blocking": False}, {"blocking_timeout": 0}):
        outcome = InBackground(
            lambda arguments=arguments: take_and_release(place.lock(), **arguments)  # type: ignore[misc]
        ).result()
        assert not outcome.granted
        assert outcome.took < E


def test_the_pause_and_the_token_of_the_call(place: Place) -> None:
    place.take()
    lock = place.lock(waiting="polling", sleep=60)
    tries = ("SET", "EVALSHA")
    first = place.servers[0]

    def use() -> bool:
        assert lock.acquire(sleep=0.02, token="mine")
        assert lock.lease is not None
        same = lock.lease.token == b"mine" and lock.owned()
        lock.release()
        return same

    waiting = InBackground(use)
    before = calls(first, *tries)
    eventually(lambda: calls(first, *tries) > before + 4)
    place.free()
    assert waiting.result()


NOISES: dict[str, Callable[[Place, int], object]] = {
    "renewals": lambda place, number: place.renew(20_000 + number),
    "new holders": lambda place, number: place.take(token=f"token {number}"),
    "quiet": lambda place, number: time.sleep(0.05),
}


@only("noise", NOISES)
def test_wake_ups_move_no_deadline(place: Place, noise: str) -> None:
    place.take()
    waiting = place.waiter(blocking_timeout=0.5)
    number = 0
    while waiting.is_alive() and number < 20_000:
        NOISES[noise](place, number)
        time.sleep(0.001)
        number += 1
    outcome = waiting.result()
    assert not outcome.granted
    assert 0.495 < outcome.took < 0.5 + E


def test_everybody_in_line_has_a_deadline_of_his_own(place: Place) -> None:
    place.take()
    first = place.waiter(blocking_timeout=0.2)
    limits = (0.1, 0.3, 0.15, 0.4)
    others = [
        InBackground(lambda limit=limit: take_and_release(place.lock(), blocking_timeout=limit))  # type: ignore[misc]
        for limit in limits
    ]
    for limit, waiting in zip((0.2, *limits), (first, *others), strict=True):
        outcome = waiting.result()
        assert not outcome.granted
        assert limit - 0.005 < outcome.took < limit + E


def test_a_moved_clock_ends_the_waiting(place: Place, clock: Callable[[float], None]) -> None:
    place.take(ttl_ms=10_000_000)
    waiting = place.waiter(blocking_timeout=3600)
    looks = place.looks()
    clock(1800)
    time.sleep(0.05)
    assert waiting.is_alive()
    clock(1801)
    assert not waiting.result(1).granted
    assert place.looks() < looks + 20


def test_with_a_number_of_tries_it_ends_after_them(place: Place) -> None:
    place.take()
    lock = place.lock(retry=redbolt.Retry(3, 0.05))
    outcome = InBackground(lambda: take_and_release(lock)).result()
    assert not outcome.granted
    assert 0.095 < outcome.took < 0.1 + E


# ---- many who wait ----


def test_without_a_queue_everybody_waits_alone(place: Place) -> None:
    place.take()
    locks = [place.lock(local_queue=False) for _ in range(7)]
    first, tries = place.in_order()[0], ("SET", "EVALSHA", "EVAL")
    before = calls(first, *tries)
    waiting = [InBackground(lambda lock=lock: take_and_release(lock)) for lock in locks]  # type: ignore[misc]
    eventually(lambda: calls(first, *tries) >= before + len(locks), what="each of them has tried")
    assert not any(lock._queue.waiters for lock in locks)
    freed = place.free(publish=False)
    outcomes = [one.result() for one in waiting]
    assert all(outcome.granted for outcome in outcomes)
    assert max(outcome.at for outcome in outcomes) - freed < 2 * SOON


def test_several_threads_are_served_one_after_the_other(place: Place) -> None:
    place.take()
    first = place.waiter()
    others = [InBackground(lambda: take_and_release(place.lock())) for _ in range(20)]
    queue = place.lock()._queue
    eventually(lambda: len(queue.waiters) == 21)
    freed = place.free(publish=False)
    outcomes = [one.result() for one in (first, *others)]
    assert all(outcome.granted for outcome in outcomes)
    assert max(outcome.at for outcome in outcomes) - freed < 2 * SOON
    assert not queue.waiters


@pytest.mark.slow
@only("names", [1, 1000], ids=["one name", "a thousand names"])
def test_a_thousand_threads(kind: str, node: LocalNode, names: int) -> None:
    """They hold a handful of connections, and all are served, or go when their time is over."""

    def clients() -> int:
        return int(raw(node, "INFO", "clients")["connected_clients"])

    with Stranger([node]) as stranger:
        stranger.ask(*(["SET", f"name {number}", "x", "PX", 100_000] for number in range(names)))
        before = clients()
        arguments: dict[str, Any] = {
            "threads": 1000,
            "names": names,
            "impatient": 100,
            "patience": 4.0,
            "few": 20,
        }
        with program("waits", "crowd", urls=[node.url], kind=kind, **arguments) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()
            descriptors, threads, any_granted, done = json.loads(line)
            assert clients() - before <= 20
            assert descriptors <= 20
            assert threads <= 900 + 5
            assert (any_granted, done) == (False, 0)
            stranger.ask(*(["DEL", f"name {number}"] for number in range(names)))
            tell(process)
            line = finish(process)
            descriptors, threads, granted = json.loads(line)
            assert granted == 900
            assert descriptors <= 0
            assert threads <= 0
        assert stranger.ask(["DBSIZE"]) == [b":0\r\n"]


@pytest.mark.slow
def test_processes_with_threads_share_five_nodes(kind: str, nodes: LocalNodes) -> None:
    urls = [node.url for node in nodes]
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = [
            stack.enter_context(
                program("waits", "contend", urls=urls, kind=kind, threads=5, seconds=2 * SLACK)
            )
            for _ in range(4)
        ]
        for process in processes:
            expect(process, "ready")
        for process in processes:
            tell(process)
        results = [json.loads(finish(process)) for process in processes]
    served = [count for result in results for count in result["served"]]
    assert sum(served) == int(raw(nodes[0], "GET", "number"))
    assert min(served) > 0
    tries, grants = (sum(result[name] for result in results) for name in ("tries", "grants"))
    print(f"{sum(served)} served, the least {min(served)}, {tries} tries for {grants} grants")
    assert tries / grants <= 4.5


# ---- interrupts and forks ----


@pytest.mark.slow
@only("count", [1, 5], ids=["Lock", "RedLock"])
def test_interrupts_of_one_who_waits(kind: str, valkeys: LocalNodes, count: int) -> None:
    urls = [node.url for node in valkeys][:count]
    with program("waits", "interrupted", urls=urls, kind=kind, times=500, span=0.004 * count**0.5) as process:
        result = json.loads(finish(process, 60))
    assert result["wrong"] == []
    assert result["inside"] > 100
    assert result["kept"] > 10
    for node in valkeys:
        assert raw(node, "DBSIZE") == 0


def test_a_child_waits_anew(place: Place) -> None:
    place.take()
    with program("waits", "in_a_child", face=place.face, urls=place.urls, kind=place.kind) as process:
        expect(process, "waiting")
        eventually(lambda: place.looks() > 0, 10)
        looks = place.looks()
        tell(process)
        expect(process, "forked")
        eventually(lambda: place.looks() > looks)
        place.free(publish=False)
        finish(process)
