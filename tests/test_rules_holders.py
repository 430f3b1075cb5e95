"""While nodes fail, what is somebody else's is never touched, and "taken" is told from "cannot tell"."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

import pytest

from redbolt import LockLost, LockTimeout, NodesUnavailable
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import eventually, raw
from tests.kit.faults import FAULTS, HARMLESS, E, Field, T, absent, values, within
from tests.kit.rounds import InBackground

NAME = "name"
OTHER = b"somebody else's token"
SILENT = [name for name in FAULTS if name not in HARMLESS]
"""Faults under which a node cannot vote."""


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def field(kind: str, fault: str, valkeys: LocalNodes) -> Iterator[Field]:
    """Five nodes, of which two fail."""
    with Field(valkeys, 5, 2, fault, kind) as made:
        made.warm_up()
        yield made


class Foreign:
    """A key of somebody else's on some servers; at the end it must be there as it was."""

    def __init__(self, servers: Sequence[LocalNode], name: str = NAME, ttl_ms: int = 20_000) -> None:
        self.servers, self.name = servers, name
        for server in servers:
            raw(server, "SET", name, OTHER, "PX", ttl_ms)
        self._written = time.monotonic()
        self._ttl_ms = ttl_ms

    def check(self) -> None:
        assert values(self.servers, self.name) == [OTHER] * len(self.servers)
        for server in self.servers:
            before = (time.monotonic() - self._written) * 1000
            assert abs(raw(server, "PTTL", self.name) - (self._ttl_ms - before)) < 1000


def test_taken_by_a_quorum_is_taken(field: Field) -> None:
    """However many of the others are dead."""
    foreign = Foreign(field.good)
    lock = field.lock(NAME)
    field.strike()
    for _ in range(3):
        with within(T + E):
            assert lock.acquire() is False
    with within(0.1 + T + E):
        assert lock.acquire(blocking=True, blocking_timeout=0.1, sleep=0.01) is False
    with pytest.raises(LockTimeout, match="somebody else holds it"), lock:
        raise AssertionError("the block ran")
    foreign.check()
    field.heal()
    eventually(absent([one.server for one in field.bad if one.server], NAME), 1)
    foreign.check()


@pytest.mark.parametrize("fault", SILENT, indirect=True)
def test_taken_by_less_than_a_quorum_is_not_called_taken(field: Field) -> None:
    """Two of five say no, two say nothing: nobody knows."""
    foreign = Foreign(field.good[:2])
    free = field.good[2:]
    lock = field.lock(NAME)
    field.strike()
    with within(T + E), pytest.raises(NodesUnavailable) as caught:
        lock.acquire()
    told = r"(2 of 5 nodes answered, 1|3 of 5 nodes answered, 2) of them that it is taken; it needs 3"
    assert re.search(told, str(caught.value))
    assert set(caught.value.causes) == field.addresses()
    eventually(absent(free, NAME), T + E)
    foreign.check()
    field.heal()
    eventually(absent([one.server for one in field.bad if one.server], NAME), 1)
    foreign.check()


@pytest.mark.parametrize("fault", HARMLESS, indirect=True)
def test_taken_by_less_than_a_quorum_is_granted_by_the_others(field: Field) -> None:
    foreign = Foreign(field.good[:2])
    lock = field.lock(NAME)
    field.strike()
    with within(T + E):
        assert lock.acquire()
    lock.release()
    eventually(absent([*field.good[2:], *(one.server for one in field.bad if one.server)], NAME), 1)
    foreign.check()


@pytest.mark.parametrize("of", [1, 5])
def test_one_holder_and_one_dead_node(kind: str, valkeys: LocalNodes, of: int) -> None:
    for fault in ("paused", "killed", "refused"):
        with Field(valkeys, of, 1 if of > 1 else 0, fault, kind) as field:
            holder, lock = field.lock(NAME), field.lock(NAME)
            assert holder.acquire()
            field.strike()
            with within(T + E):
                assert lock.acquire() is False
            assert holder.held
            holder.release()
            with within(T + E):
                assert lock.acquire()
            lock.release()


@pytest.mark.parametrize("of", [1, 5])
@pytest.mark.parametrize(
    "fault", ["paused", "cut", "lost", "sliced", "refused", "partitioned"], indirect=True
)
def test_a_lease_that_was_taken_over_is_left_alone(
    kind: str, fault: str, valkeys: LocalNodes, of: int
) -> None:
    """Our key has ended, somebody else's is there: neither extend nor release touches it."""
    with Field(valkeys, of, 1 if of > 1 else 0, fault, kind) as field:
        field.warm_up()
        lock, late = field.lock(NAME), field.lock("late")
        assert lock.acquire()
        assert late.acquire()
        eventually(lambda: None not in values(field.servers(), NAME) + values(field.servers(), "late"))
        foreign = [Foreign(field.servers(), name) for name in (NAME, "late")]
        field.strike()
        with within(T + E), pytest.raises(LockLost):
            lock.release()
        with within(T + E), pytest.raises(LockLost):
            late.extend(30)
        assert not late.held
        with within(T + E), pytest.raises(LockLost):
            late.release()
        field.heal()
        for one in foreign:
            one.check()


@pytest.mark.parametrize("of", [1, 5])
def test_a_key_of_another_type_is_taken_and_left_alone(kind: str, nodes: LocalNodes, of: int) -> None:
    with Field(nodes, of, 0, "paused", kind) as field:
        for server in field.good:
            raw(server, "LPUSH", NAME, "item")
        lock = field.lock(NAME)
        assert lock.acquire() is False
        with pytest.raises(LockTimeout, match="list"), lock:
            raise AssertionError("the block ran")
        held = field.lock("held")
        assert held.acquire()
        for server in field.good:
            raw(server, "DEL", "held")
            raw(server, "LPUSH", "held", "item")
        with pytest.raises(LockLost):
            held.extend(20)
        with pytest.raises(LockLost):
            held.release()
        for server in field.good:
            assert raw(server, "LRANGE", NAME, 0, -1) == raw(server, "LRANGE", "held", 0, -1) == [b"item"]


def test_nodes_that_never_had_the_token_count_for_the_release(kind: str, valkeys: LocalNodes) -> None:
    """It is absent on a quorum: two nodes that were away when it was set, and two that deleted it."""
    with Field(valkeys, 5, 2, "refused", kind) as field:
        lock = field.lock(NAME)
        field.strike()
        assert lock.acquire()
        field.heal()
        field.good[0].kill()
        with within(T + E):
            lock.release()
        eventually(absent([*field.good[1:], *(one.server for one in field.bad if one.server)], NAME), T + E)


@pytest.mark.parametrize(("of", "dead"), [(4, 2), (5, 3), (3, 2), (2, 1)])
def test_half_of_the_nodes_is_no_quorum(kind: str, valkeys: LocalNodes, of: int, dead: int) -> None:
    with Field(valkeys, of, dead, "refused", kind) as field:
        lock = field.lock(NAME)
        field.warm_up()
        field.strike()
        with within(T + E), pytest.raises(NodesUnavailable):
            lock.acquire()
        assert not lock.held
        eventually(absent(field.good, NAME), T + E)


def test_two_clients_never_hold_at_once_while_nodes_come_and_go(kind: str, valkeys: LocalNodes) -> None:
    """One node after the other is stopped and woken; whoever holds looks whether somebody else does."""
    with Field(valkeys, 5, 0, "paused", kind) as field:
        inside: list[int] = []
        broken: list[str] = []
        done: list[int] = []
        ends = time.monotonic() + 0.6

        def work(number: int) -> None:
            lock = field.lock(NAME, timeout=5, blocking=True, blocking_timeout=5, sleep=0.002)
            while time.monotonic() < ends:
                if not lock.acquire():
                    continue
                inside.append(number)
                if inside != [number]:
                    broken.append(f"{inside} at once")
                time.sleep(0.001)
                inside.remove(number)
                lock.release()
                done.append(number)

        workers = [InBackground(lambda number=number: work(number)) for number in range(3)]  # type: ignore[misc]
        count = 0
        while time.monotonic() < ends:
            server = valkeys[count % 5]
            server.pause()
            time.sleep(0.03)
            server.resume()
            count += 1
        for worker in workers:
            worker.result()
        assert not broken
        assert len(done) > 20
        assert len(set(done)) == 3
        eventually(absent(list(valkeys), NAME), 1)
