"""Waiting when something goes wrong: messages that come too early or not at all, keys and nodes that vanish.

Whoever waits has the lock when it can be had, or a moment later, and never only at the end of its time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

import redbolt
from redbolt._clock import now_ns
from redbolt._queue import Waiter
from redbolt._steps.acquire import _Turn
from redbolt._steps.hear import Hearing
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, HasAddress, eventually, raw
from tests.kit.faults import T
from tests.kit.link import Flow, Link, Mark
from tests.kit.proxy import FaultProxy
from tests.kit.resp import NIL, OK, push
from tests.kit.rounds import InBackground, by_name
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import handshake
from tests.kit.waiting import FACES, LIMITS, NAME, Limited, Place, Stranger, calls, take_and_release
from tests.programs import expect, program

E = 0.15 * SLACK
SOON = 1.0 * SLACK
"""Seconds: much more than it takes to hear of something, and much less than any lease or pause here."""

only = pytest.mark.parametrize


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


class Turnstile(FaultProxy):
    """A proxy that holds all that clients send from the next command of a certain kind on.

    Attributes:
        mute: whether it swallows what the server sends without being asked.
    """

    _from = b""
    mute = False

    def hold_from(self, word: bytes) -> None:
        """``word`` is in the command; ``heal`` ends it."""
        self._call(lambda: setattr(self, "_from", word))

    @property
    def holds(self) -> bool:
        """Whether that command has come."""
        return "up" in self._held

    def _add(self, link: Link, flow: Flow, item: bytes | Mark, pause: float = 0.0) -> None:
        if self.mute and flow.direction == "down" and isinstance(item, bytes) and item.startswith(b">"):
            return
        if self._from and flow.direction == "up" and isinstance(item, bytes) and self._from in item:
            start = item.rindex(b"*", 0, item.index(self._from))
            self._from = b""
            if start:
                super()._add(link, flow, item[:start])
                self._pass_on(link, flow)
            self._held.add("up")
            item = item[start:]
        super()._add(link, flow, item, pause)


class Front:
    """Turnstiles before all servers of a place."""

    def __init__(self, face: str, kind: str, servers: Sequence[HasAddress]) -> None:
        self._stack = ExitStack()
        self.doors = [self._stack.enter_context(Turnstile(server)) for server in list(servers)[: FACES[face]]]
        self.place = self._stack.enter_context(Place(face, kind, servers, [door.url for door in self.doors]))

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def warm_up(self) -> None:
        """Open the connections for tries."""
        assert take_and_release(self.place.lock()).granted

    def mute(self) -> None:
        """From now on nobody is told of anything."""
        for door in self.doors:
            door.mute = True


@pytest.fixture
def front(face: str, kind: str, nodes: LocalNodes) -> Iterator[Front]:
    with Front(face, kind, list(nodes)) as made:
        yield made


# ---- a release between the refusal and the moment from which one hears ----


@only("word", [b"HELLO", b"TRACKING", b"PTTL"])
def test_a_release_before_it_listens(front: Front, word: bytes) -> None:
    place = front.place
    front.warm_up()
    place.take()
    for door in front.doors:
        door.hold_from(word)
    waiting = InBackground(lambda: take_and_release(place.lock()))
    eventually(lambda: any(door.holds for door in front.doors), what="it is about to listen")
    place.free()
    for door in front.doors:
        door.heal()
        door.hold_from(b"")
    freed = time.monotonic()
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.at - freed < SOON


@only("face", ["ReentrantLock"], indirect=True)
@only("word", [b"HELLO", b"SUBSCRIBE", b"PTTL"])
def test_a_release_before_it_listens_to_a_channel(front: Front, word: bytes) -> None:
    place, (door,) = front.place, front.doors
    front.warm_up()
    place.take()
    door.hold_from(word)
    waiting = InBackground(lambda: take_and_release(place.lock(waiting="channel")))
    eventually(lambda: door.holds, what="it is about to listen")
    place.free()
    door.heal()
    freed = time.monotonic()
    assert waiting.result().at - freed < SOON


def test_a_release_between_a_later_try_and_its_look(front: Front) -> None:
    """They are sent at once, but a server may do something else in between."""
    place = front.place
    place.take()
    waiting = place.waiter()
    time.sleep(0.1)  # until it has looked at all nodes
    for door in front.doors:
        door.hold_from(b"PTTL")
    place.take(token="somebody faster")
    eventually(lambda: any(door.holds for door in front.doors))
    place.free()
    for door in front.doors:
        door.heal()
        door.hold_from(b"")
    freed = time.monotonic()
    assert waiting.result().at - freed < SOON


def test_a_release_while_the_answer_is_on_its_way(front: Front) -> None:
    place = front.place
    front.warm_up()
    place.take()
    looks = place.looks()
    for door in front.doors:
        door.delay(down=0.02)
    waiting = InBackground(lambda: take_and_release(place.lock(node_timeout=2)))
    eventually(lambda: place.looks() > looks)
    freed = place.free()
    assert waiting.result().at - freed < SOON


def test_an_end_that_is_told_together_with_a_refusal(kind: str) -> None:
    """The try has come too early, and the look behind it finds nothing any more."""
    tries = iter([NIL, None])
    looks = iter([b":20000\r\n", NIL + b":-2\r\n"])
    answer = by_name(
        SET=lambda argv: next(tries, OK),
        PTTL=lambda argv: next(looks, b":9000\r\n"),
        TYPE=b"+none\r\n",
        DELIFEQ=b":1\r\n",
    )
    with ScriptedNode(answer=answer, background=handshake) as node:
        lock = redbolt.Lock(node.url, NAME, 10, sleep=60, engine=kind)
        waiting = InBackground(lambda: take_and_release(lock))
        eventually(lambda: node.received("PTTL"))
        number = node.received("PTTL")[0].connection
        node.peers[number].send(push("invalidate", [NAME]))
        changed = time.monotonic()
        outcome = waiting.result()
        assert outcome.granted
        assert outcome.at - changed < SOON


# ---- messages that do not come ----


def test_a_message_that_gets_lost(front: Front) -> None:
    """The lease tells when the key ends at the latest."""
    place = front.place
    place.take(ttl_ms=800)
    waiting = place.waiter()
    front.mute()
    place.free()
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.took < 0.8 + 4 * T + E


def test_a_message_that_gets_lost_about_a_key_without_an_end(
    front: Front, clock: Callable[[float], None]
) -> None:
    """It is looked at every five seconds."""
    place = front.place
    place.take(ttl_ms=None)
    waiting = place.waiter()
    time.sleep(0.15)
    front.mute()
    for _ in range(3):
        looks = place.looks()
        clock(5.1)
        eventually(lambda looks=looks: place.looks() > looks, what="it has looked")  # type: ignore[misc]
        time.sleep(0.05)
        assert waiting.is_alive()
    place.free()
    time.sleep(0.05)
    assert waiting.is_alive()
    clock(5.1)
    assert waiting.result(1).granted


# ---- the end of a lease ----


@pytest.fixture(scope="module")
def lazy(server: str | None) -> Iterator[LocalNodes]:
    """Servers that remove no key before somebody asks for it, and so tell nobody of its end."""
    with LocalNodes(5, server=server, config=["--enable-debug-command", "yes"]) as made:
        for node in made:
            raw(node, "DEBUG", "SET-ACTIVE-EXPIRE", "0")
        yield made


def test_the_end_of_a_lease_needs_no_message(face: str, kind: str, lazy: LocalNodes) -> None:
    for node in lazy:
        raw(node, "FLUSHALL")
    with Place(face, kind, list(lazy)) as place:
        late = []
        for _ in range(3):
            place.take(ttl_ms=300)
            ends = time.monotonic() + 0.3
            outcome = place.waiter(place.lock()).result()
            assert outcome.granted
            late.append(outcome.at - ends)
        assert -0.02 < min(late) < 0.06 * SLACK
        assert max(late) < 0.3 * SLACK


@only("count", [1, 5], ids=["Lock", "RedLock"])
def test_a_holder_that_is_killed(kind: str, nodes: LocalNodes, count: int) -> None:
    urls = [node.url for node in nodes][:count]
    with Place("Lock" if count == 1 else "RedLock", kind, list(nodes)) as place:
        with program("waits", "hold", urls=urls, kind=kind, timeout=1.0 * SLACK) as process:
            expect(process, "held")
            waiting = place.waiter()
            os.kill(process.pid, signal.SIGKILL)
            left = max(raw(node, "PTTL", NAME) for node in place.servers) / 1000
            ends = time.monotonic() + left
        outcome = waiting.result()
        assert outcome.granted
        assert outcome.at - ends < E + T


# ---- what administrators do ----


ENDS: dict[str, list[str]] = {
    "FLUSHALL": ["FLUSHALL"],
    "FLUSHDB": ["FLUSHDB", "ASYNC"],
    "DEL": ["DEL", NAME],
    "UNLINK": ["UNLINK", NAME],
    "PEXPIRE": ["PEXPIRE", NAME, "0"],
    "RENAME": ["RENAME", NAME, "other"],
}


@only("how", ENDS)
def test_the_key_is_removed_by_hand(place: Place, how: str) -> None:
    place.take()
    waiting = place.waiter()
    started = time.monotonic()
    place.stranger.ask(ENDS[how])
    assert waiting.result().at - started < SOON


def test_a_key_without_an_end_is_removed_by_hand(place: Place) -> None:
    place.take(ttl_ms=None)
    waiting = place.waiter()
    time.sleep(0.1)
    assert waiting.is_alive()
    freed = place.free()
    assert waiting.result().at - freed < SOON


def test_a_key_that_gets_another_life(place: Place) -> None:
    """A shorter one than it had, or an end when it had none, or none any more."""
    place.take(ttl_ms=None)
    waiting = place.waiter()
    place.renew(20_000)
    time.sleep(0.05)
    place.stranger.ask(["PERSIST", NAME])
    time.sleep(0.05)
    assert waiting.is_alive()
    place.renew(300)
    ends = time.monotonic() + 0.3
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.at - ends < 0.1 + E


@only("face", ["Lock", "RedLock"], indirect=True)
def test_a_key_of_another_type(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.stranger.ask(["LPUSH", NAME, "item"])
    waiting = place.waiter()
    eventually(lambda: caplog.messages, 2)
    assert "its key holds a list" in caplog.messages[0]
    assert waiting.is_alive()
    started = time.monotonic()
    place.stranger.ask(["DEL", NAME])
    assert waiting.result().at - started < SOON
    assert len(caplog.messages) == 1


@only("face", ["ReentrantLock"], indirect=True)
def test_a_plain_key_where_a_hash_should_be(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.stranger.ask(["SET", NAME, "x"])
    waiting = place.waiter()
    eventually(lambda: caplog.messages, 2)
    assert "its key holds a string" in caplog.messages[0]
    started = time.monotonic()
    place.stranger.ask(["DEL", NAME])
    assert waiting.result().at - started < SOON


# ---- connections and servers ----


def watches(server: HasAddress) -> list[str]:
    """The numbers of the connections that track keys."""
    lines = raw(server, "CLIENT", "LIST").decode().splitlines()
    clients = [dict(part.partition("=")[::2] for part in line.split()) for line in lines]
    return [client["id"] for client in clients if "t" in client["flags"]]


def kill_watches(server: HasAddress) -> int:
    """End these connections; returns how many they were."""
    return sum(raw(server, "CLIENT", "KILL", "ID", number) for number in watches(server))


def test_a_connection_that_is_killed(place: Place) -> None:
    place.take()
    waiting = place.waiter()
    for _ in range(4):
        looks = place.looks()
        time.sleep(0.02)
        assert sum(kill_watches(server) for server in place.servers) >= 1
        eventually(lambda looks=looks: place.looks() > looks, what="it listens again")  # type: ignore[misc]
    freed = place.free()
    assert waiting.result().at - freed < SOON


def test_a_connection_that_is_killed_just_after_the_release(place: Place) -> None:
    for number in range(10):
        place.take(token=f"token {number}")
        waiting = place.waiter()
        freed = time.monotonic()
        for server in place.servers:
            kills = [["CLIENT", "KILL", "ID", number] for number in watches(server)]
            with Stranger([server]) as stranger:
                stranger.ask(["MULTI"], ["DEL", NAME], *kills, ["EXEC"])
        assert waiting.result().at - freed < SOON


def test_connections_that_are_killed_all_the_time(place: Place) -> None:
    """No storm of them, and the time is kept."""
    place.take()
    started = time.monotonic()
    waiting = place.waiter(blocking_timeout=0.7)
    before = [int(raw(server, "INFO", "stats")["total_connections_received"]) for server in place.servers]
    count = 0
    while waiting.is_alive():
        for server in place.servers:
            kill_watches(server)
            count += 2  # connections of this loop
    try:
        outcome = waiting.result()
        assert not outcome.granted
    except redbolt.NodesUnavailable:  # it was the last try that it happened to
        pass
    assert time.monotonic() - started < 0.7 + T + 2 * E
    after = [int(raw(server, "INFO", "stats")["total_connections_received"]) for server in place.servers]
    for old, new in zip(before, after, strict=True):
        killed = count / len(place.servers)
        assert new - old < 2.5 * killed + 400 * SLACK


def test_a_server_that_is_restarted(place: Place, nodes: LocalNodes) -> None:
    """And so is empty: whoever waits finds that out by itself."""
    place.take()
    waiting = place.waiter(place.lock(sleep=0.1))  # where it cannot listen it tries so often
    for node in list(nodes)[: len(place.servers)]:
        node.kill()
        node.start(empty=True)
    started = time.monotonic()
    outcome = waiting.result()
    assert outcome.granted
    assert outcome.at - started < 2 * SOON


@only("face", ["Lock", "ReentrantLock"], indirect=True)
def test_a_server_that_is_stopped_for_a_while(place: Place, nodes: LocalNodes) -> None:
    place.take(ttl_ms=60_000)
    waiting = place.waiter()
    nodes[0].pause()
    time.sleep(0.3)
    assert waiting.is_alive()
    nodes[0].resume()
    time.sleep(0.1)
    assert waiting.is_alive()
    freed = place.free()
    assert waiting.result().at - freed < 2 * SOON


@only("face", ["Lock", "ReentrantLock"], indirect=True)
def test_a_server_that_is_away_keeps_the_deadline(place: Place, nodes: LocalNodes) -> None:
    for how in ("pause", "kill"):
        place.take(ttl_ms=60_000)
        waiting = place.waiter(place.lock(node_timeout=T), blocking_timeout=0.4)
        getattr(nodes[0], how)()
        try:
            outcome = waiting.result()
            took = outcome.took
            assert not outcome.granted
        except redbolt.NodesUnavailable:
            took = 0.4
        assert took < 0.4 + T + E
        if how == "pause":
            nodes[0].resume()


# ---- many nodes ----


@pytest.fixture
def five(kind: str, nodes: LocalNodes) -> Iterator[Place]:
    with Place("RedLock", kind, list(nodes)) as made:
        yield made


def others(place: Place) -> Stranger:
    """A stranger on all nodes but the one that is asked first."""
    return Stranger(place.in_order()[1:])


def first_of(place: Place) -> LocalNode:
    first = place.in_order()[0]
    assert isinstance(first, LocalNode)
    return first


@only("how", ["pause", "kill"])
def test_the_first_node_goes_away(five: Place, how: str) -> None:
    five.take()
    waiting = five.waiter()
    getattr(first_of(five), how)()
    with others(five) as stranger:
        stranger.ask(["DEL", NAME])
        freed = time.monotonic()
        outcome = waiting.result()
    assert outcome.granted
    assert outcome.at - freed < 5 * T + E
    if how == "pause":
        first_of(five).resume()


@only("how", ["pause", "kill"])
def test_the_first_node_was_away_from_the_start(five: Place, how: str) -> None:
    with others(five) as stranger:
        stranger.ask(["SET", NAME, "x", "PX", 20_000])
        getattr(first_of(five), how)()
        waiting = InBackground(lambda: take_and_release(five.lock()))
        eventually(lambda: sum(calls(node, "PTTL") for node in five.in_order()[1:]) >= 2)
        time.sleep(0.2)
        assert waiting.is_alive()
        stranger.ask(["DEL", NAME])
        freed = time.monotonic()
        assert waiting.result().at - freed < 5 * T + E
    if how == "pause":
        first_of(five).resume()


def test_the_two_first_nodes_are_killed(five: Place) -> None:
    five.take()
    waiting = five.waiter()
    first, second, *rest = five.in_order()
    for node in (first, second):
        node.kill()  # type: ignore[attr-defined]
    with Stranger(rest) as stranger:
        stranger.ask(["DEL", NAME])
        freed = time.monotonic()
        assert waiting.result().at - freed < SOON


def test_the_two_first_nodes_are_stopped(five: Place) -> None:
    """Nobody tells of the release; the lease is the bound."""
    five.take(ttl_ms=1200)
    ends = time.monotonic() + 1.2
    waiting = five.waiter()
    first, second, *rest = five.in_order()
    for node in (first, second):
        node.pause()  # type: ignore[attr-defined]
    with Stranger(rest) as stranger:
        stranger.ask(["DEL", NAME])
        assert waiting.result().at - ends < 5 * T + E
    for node in (first, second):
        node.resume()  # type: ignore[attr-defined]


class Behind:
    """Two nodes behind a first one that does not know of tracking."""

    def __init__(self, kind: str, valkeys: LocalNodes) -> None:
        self._stack = ExitStack()
        self.deaf = self._stack.enter_context(Limited(LIMITS["no CLIENT"][0]))
        servers = list(valkeys)[:2]
        self.doors = [self._stack.enter_context(Turnstile(server)) for server in servers]
        urls = [self.deaf.node.url] + [door.url.replace("127.0.0.1", "localhost") for door in self.doors]
        self.place = self._stack.enter_context(Place("RedLock", kind, servers, urls))

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def free(self) -> None:
        self.deaf.taken = False
        self.place.free()


@only("word", [b"HELLO", b"TRACKING", b"PTTL"])
def test_a_release_before_it_listens_behind_a_deaf_node(kind: str, valkeys: LocalNodes, word: bytes) -> None:
    with Behind(kind, valkeys) as behind:
        place = behind.place
        place.take()
        assert not place.lock().acquire(blocking=False)  # opens the connections for tries
        for door in behind.doors:
            door.hold_from(word)
        waiting = InBackground(lambda: take_and_release(place.lock()))
        eventually(lambda: all(door.holds for door in behind.doors), what="it is about to listen")
        behind.free()
        for door in behind.doors:
            door.heal()
        freed = time.monotonic()
        assert waiting.result().at - freed < SOON


def test_a_lost_message_behind_a_deaf_node(kind: str, valkeys: LocalNodes) -> None:
    with Behind(kind, valkeys) as behind:
        behind.place.take(ttl_ms=800)
        waiting = behind.place.waiter()
        for door in behind.doors:
            door.mute = True
        behind.free()
        outcome = waiting.result()
        assert outcome.granted
        assert outcome.took < 0.8 + 4 * T + E


def test_the_first_node_falls_silent_before_it_listens(kind: str, nodes: LocalNodes) -> None:
    """The next one has said already that the key is free there."""
    with Front("RedLock", kind, list(nodes)) as front:
        place = front.place
        front.warm_up()
        place.take()
        first = min(front.doors, key=lambda door: redbolt.Node.from_url(door.url).address)
        for door in front.doors:
            door.hold_from(b"HELLO")
        waiting = InBackground(lambda: take_and_release(place.lock()))
        eventually(lambda: sum(door.holds for door in front.doors) == 2, what="it is about to listen")
        place.free()
        for door in front.doors:
            if door is not first:
                door.heal()
        freed = time.monotonic()
        assert waiting.result().at - freed < 8 * T + E
        first.heal()


def test_the_first_node_keeps_a_token_of_nobody(five: Place) -> None:
    """All are looked at after a while; then the node is passed over until that token has ended."""
    first, keeper = first_of(five), five.lock()
    queue = keeper._queue
    with others(five) as stranger:
        stranger.ask(["SET", NAME, "x", "PX", 20_000])
        with Stranger([first]) as other:
            other.ask(["SET", NAME, "of nobody", "PX", 30_000])
        waiting = five.waiter()
        stranger.ask(["DEL", NAME])
        freed = time.monotonic()
        assert waiting.result().at - freed < SOON
        for number in range(3):
            eventually(lambda: stranger.ask(["EXISTS", NAME]) == [b":0\r\n"] * 4)
            stranger.ask(["SET", NAME, f"token {number}", "PX", 20_000])
            queue.raced_ns = now_ns()  # as with rivals: without them all nodes are asked at once
            waiting = five.waiter()
            time.sleep(0.15)
            stranger.ask(["DEL", NAME])
            freed = time.monotonic()
            assert waiting.result().at - freed < SOON
            assert set(queue.stuck_ns) == {queue.order[0]}
        assert raw(first, "GET", NAME) == b"of nobody"


def test_a_token_of_nobody_and_a_release_in_pieces(five: Place) -> None:
    """A look at all nodes that comes too early is not the last one."""
    first, second, *rest = five.in_order()
    with others(five) as stranger, Stranger([first]) as other, Stranger([second]) as early:
        stranger.ask(["SET", NAME, "x", "PX", 20_000])
        other.ask(["SET", NAME, "of nobody", "PX", 30_000])
        waiting = five.waiter()
        before = calls(rest[-1], "PTTL")
        early.ask(["DEL", NAME])
        eventually(lambda: calls(rest[-1], "PTTL") > before, what="it looks at all nodes")
        stranger.ask(["DEL", NAME])
        freed = time.monotonic()
        assert waiting.result().at - freed < SOON


def test_a_token_of_nobody_and_a_look_at_stopped_nodes(five: Place) -> None:
    """Nor is one that was not answered."""
    first, second, *rest = five.in_order()
    with others(five) as stranger, Stranger([first]) as other, Stranger([second]) as early:
        stranger.ask(["SET", NAME, "x", "PX", 20_000])
        other.ask(["SET", NAME, "of nobody", "PX", 30_000])
        waiting = five.waiter()
        for node in rest:
            node.pause()  # type: ignore[attr-defined]
        early.ask(["DEL", NAME])
        time.sleep(0.1 + 2 * T)  # it has looked, and had no answer
        for node in rest:
            node.resume()  # type: ignore[attr-defined]
        stranger.ask(["DEL", NAME])
        freed = time.monotonic()
        assert waiting.result().at - freed < SOON


def test_a_token_of_nobody_from_the_start(five: Place) -> None:
    """Nobody holds anything else: the first try is granted by the other nodes."""
    with Stranger([first_of(five)]) as other:
        other.ask(["SET", NAME, "of nobody", "PX", 30_000])
        outcome = InBackground(lambda: take_and_release(five.lock())).result()
        assert outcome.granted
        assert outcome.took < SOON


def test_two_nodes_are_empty(five: Place) -> None:
    """The holder has three of five: whoever waits is refused, and does not storm."""
    for free in (five.in_order()[:2], five.in_order()[3:]):
        held = [node for node in five.servers if node not in free]
        with Stranger(held) as holder:
            holder.ask(["SET", NAME, "x", "PX", 20_000])
            waiting = InBackground(lambda: take_and_release(five.lock()))
            time.sleep(1)
            assert waiting.is_alive()
            before = [calls(node, "SET", "PTTL", "EVALSHA", "EVAL") for node in five.servers]
            time.sleep(0.5)
            after = [calls(node, "SET", "PTTL", "EVALSHA", "EVAL") for node in five.servers]
            assert max(new - old for old, new in zip(before, after, strict=True)) <= 20
            assert waiting.is_alive()
            for node in free:  # tries are undone at once
                eventually(lambda node=node: raw(node, "EXISTS", NAME) == 0)  # type: ignore[misc]
            holder.ask(["DEL", NAME])
            freed = time.monotonic()
            outcome = waiting.result()
            assert outcome.granted
            assert outcome.at - freed < 2 * SOON
            eventually(lambda: sum(raw(node, "EXISTS", NAME) for node in five.servers) == 0)


def test_too_few_nodes_are_left_to_listen_to(five: Place) -> None:
    """Three of five go away and come back, and the lock is there."""
    five.take()
    waiting = five.waiter()
    gone = five.in_order()[:3]
    for node in gone:
        node.pause()  # type: ignore[attr-defined]
    time.sleep(0.3)
    assert waiting.is_alive()
    for node in gone:
        node.resume()  # type: ignore[attr-defined]
    freed = five.free()
    assert waiting.result().at - freed < 2 * SOON


def test_who_has_no_time_to_try_again_listens(kind: str, valkey: LocalNode) -> None:
    """After a fault hints are left alone, since there is a time for the next try; but not without one."""
    lock = redbolt.Lock(valkey.url, NAME, engine=kind)
    engine, target, queue = lock._engine, lock._target, lock._queue
    waiter = Waiter(target, engine.gate())
    hearing = Hearing(engine, target, queue, waiter, None)
    turn = _Turn(engine, target, queue, waiter, hearing, None, None, lock.retry, 0, None, lambda got: None)
    turn.eager = False
    turn.rest(now_ns())
    assert turn.due_ns > now_ns() + 10**15
    assert turn.eager
