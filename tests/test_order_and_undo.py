"""What is written for a token is executed in that order; and a try that was not granted is undone."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

import redbolt
from redbolt._engine import Engine
from redbolt._judge import FAULT, GRANTED, REFUSED, UNDECIDED, YES
from redbolt._programs import DROP, EXTEND
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.proxy import FaultProxy
from tests.kit.resp import NIL, OK, PONG, error
from tests.kit.rounds import KEY, TOKEN, InBackground, ask, attempt, by_name, causes, said
from tests.kit.scripted import Peer, Received, ScriptedNode
from tests.kit.steps import Argv, Step, expect, expect_end, handshake, hang_up, send, serve, tell, wait

BEHIND = "queued behind"
E = 0.15 * SLACK


def granted(engine: Engine, key: bytes) -> bool:
    return said(attempt(engine, key)) == [YES]


def is_delete(argv: Argv, key: bytes = KEY, token: bytes = TOKEN) -> bool:
    """Whether it is a whole, token-checked delete that needs no fallback."""
    return argv[0] == b"EVAL" and b"get" in argv[1] and argv[2:] == (b"1", key, token)


def deletes(node: ScriptedNode, token: bytes = TOKEN) -> list[Received]:
    return [one for one in node.received() if is_delete(one.argv, token=token)]


# ---- order ----


@pytest.mark.parametrize("program", [DROP, EXTEND], ids=lambda program: program.name)
def test_a_later_write_follows_an_unanswered_one_of_another_thread(engine_of, program) -> None:
    """The thread that issues it does not wait: the answer will be read by the other one."""
    arrived, go = threading.Event(), threading.Event()
    first = [expect("SET"), tell(arrived), wait(go), send(OK), serve(by_name(EVAL=b":1\r\n"))]
    with ScriptedNode(first, answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        holder = InBackground(lambda: attempt(engine))
        assert arrived.wait(5)
        args = (TOKEN,) if program is DROP else (TOKEN, b"5000")
        started = time.monotonic()
        votes = ask(engine, program, *args)
        assert time.monotonic() - started < E
        assert said(votes) == [FAULT]
        assert causes(votes)[0].startswith(BEHIND)
        assert said(attempt(engine, token=b"another")) == [YES]  # which has nothing to wait for
        assert engine.pending(TOKEN)
        go.set()
        assert said(holder.result()) == [YES]
        eventually(lambda: len(node.received()) == 3)
        of_token = [(one.name, one.connection) for one in node.received() if TOKEN in one.argv]
        assert of_token == [("SET", 0), ("EVAL", 0)]
        assert [one.connection for one in node.received() if b"another" in one.argv] == [1]
        engine.close()


@pytest.mark.parametrize("last", [0, 1])
def test_a_later_write_finds_the_connection_of_an_unanswered_one(engine_of, last: int) -> None:
    """Two connections are idle: the write goes to the one where the same token is open, and is waited for."""
    gates = [threading.Event(), threading.Event()]
    opened = [threading.Event(), threading.Event()]

    def second(argv: Argv) -> Step | bytes:
        if argv[2] == b"busy":
            opened[1].set()
            return wait(gates[1])
        return b":0\r\n"

    first = [
        expect("SET"),
        send(OK),
        expect("SET"),
        tell(opened[0]),
        expect("EVAL"),
        expect("DELIFEQ"),  # only now it answers
        send(OK, b":1\r\n", b":0\r\n"),
        expect_end(),
    ]
    with ScriptedNode(first, answer=serve_set(second)) as node:
        engine = engine_of(node.url)
        attempt(engine, token=b"warm up")
        tries = [InBackground(lambda: attempt(engine, limit=0.15))]
        assert opened[0].wait(5)
        tries.append(InBackground(lambda: attempt(engine, key=b"other", token=b"busy", limit=2.0)))
        assert opened[1].wait(5)
        if last == 0:  # the connection with the open write comes back last, and so lies on top
            gates[1].set()
            tries[1].result()
            assert tries[0].result().verdict == UNDECIDED
        else:
            assert tries[0].result().verdict == UNDECIDED
            gates[1].set()
            tries[1].result()
        votes = ask(engine, DROP, TOKEN)
        assert (said(votes), votes.hits) == ([YES], 0)
        of_token = [one for one in node.received() if TOKEN in one.argv]
        assert [one.connection for one in of_token] == [0, 0, 0]
        assert [one.name for one in of_token] == ["SET", "EVAL", "DELIFEQ"]
        engine.close()


def serve_set(answer: Callable[[Argv], Step | bytes]) -> Callable[[Argv], Step | bytes]:
    """Answer SET by ``answer``, with OK after a step."""

    def both(argv: Argv) -> Step | bytes:
        if argv[0] != b"SET":
            return b":0\r\n"
        found = answer(argv)
        if isinstance(found, bytes):
            return found

        def run(peer: Peer) -> None:
            found.run(peer)
            peer.send(OK)

        return Step(found.text, run)

    return both


def test_order_holds_for_many_threads_and_tokens(engine_of) -> None:
    """A delete comes on the connection of the SET before it, as long as that is unanswered."""
    stalled: dict[bytes, int] = {}  # SETs without an answer, and their connections
    broken: list[str] = []
    names: dict[bytes, list[str]] = {}
    chance = random.Random(5)

    def answer(argv: Argv) -> Step:
        name = argv[0].decode()
        if name == "PING":
            return send(PONG)
        token = argv[4] if name == "EVAL" else argv[2]

        def run(peer: Peer) -> None:
            names.setdefault(token, []).append(name)
            if name == "SET":
                stalled[token] = peer.number
                time.sleep(0.006 if chance.random() < 0.3 else 0.0)
                del stalled[token]
            elif stalled.get(token, peer.number) != peer.number:
                broken.append(
                    f"{name} of {token!r} came on {peer.number}, its SET is open on {stalled[token]}"
                )
            peer.send(OK if name == "SET" else b":1\r\n")

        return Step("answer", run)

    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        tried: list[bytes] = []

        def work(number: int) -> None:
            for count in range(40):
                token = b"%d-%d" % (number, count)
                attempt(engine, key=token, token=token, limit=0.003)
                tried.append(token)
                ask(engine, DROP, token, key=token, limit=1.0)
                for other in tried[-5:]:
                    engine.discard(other, other)

        threads = [InBackground(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
        for thread in threads:
            thread.result()
        eventually(lambda: not any(map(engine.pending, tried)))
        assert not broken
        assert len(names) == 160
        assert all("SET" not in of_one[1:] for of_one in names.values())
        engine.close()


# ---- undo ----


def test_a_try_that_is_not_granted_is_undone_where_it_may_have_been_done(engine_of) -> None:
    """On the connection on which it was sent; not where the node said no."""
    replies = [OK, error("OOM no room"), NIL, NIL, NIL]
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=by_name(SET=reply))) for reply in replies]
        engine = engine_of(*(node.url for node in nodes))
        for _ in range(3):
            assert attempt(engine, quorum=4).verdict in (REFUSED, UNDECIDED)
        eventually(lambda: [len(deletes(node)) for node in nodes[:2]] == [3, 3])
        for node in nodes[:2]:
            assert [one.name for one in node.received()] == ["SET", "EVAL"] * 3
            assert len(node.peers) == 1
        asked = attempt(engine, quorum=5)  # every node that says no has done so
        for node, vote in zip(nodes[2:], said(asked)[2:], strict=True):
            if vote != 0:
                assert [one.name for one in node.received()].count("EVAL") <= 3


def test_a_node_that_said_no_is_left_alone(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=NIL)) as node:
        engine = engine_of(node.url)
        for _ in range(5):
            assert attempt(engine).verdict == REFUSED
        assert [one.name for one in node.received()] == ["SET"] * 5


def test_a_granted_try_is_not_undone(engine_of) -> None:
    """Also not on the nodes that were too late to be counted, or could not say."""
    with ExitStack() as stack:
        replies = [OK, OK, error("OOM no room"), NIL, None]
        nodes = [stack.enter_context(ScriptedNode(answer=by_name(SET=reply))) for reply in replies]
        engine = engine_of(*(node.url for node in nodes))
        assert attempt(engine, quorum=2).verdict == GRANTED
        attempt(engine, key=b"other", token=b"other", quorum=2)
        assert not any(deletes(node) for node in nodes)


def test_the_undo_follows_an_unanswered_try_on_its_connection(engine_of) -> None:
    with ScriptedNode(
        [expect("SET"), expect(is_delete), send(OK + b":1\r\n"), serve(by_name(SET=OK))]
    ) as node:
        engine = engine_of(node.url)
        votes = attempt(engine, limit=0.02)
        assert (votes.verdict, causes(votes)) == (UNDECIDED, [f"no answer within {round(20 * SLACK)} ms"])
        eventually(lambda: deletes(node))
        eventually(lambda: said(attempt(engine, token=b"next")) == [YES])
        engine.close()


def test_the_undo_follows_also_when_other_connections_are_idle(engine_of) -> None:
    barrier = threading.Barrier(3)

    def together(argv: Argv) -> bytes | None:
        if argv[2] == TOKEN:
            return None
        barrier.wait(5)
        return OK

    with ScriptedNode(answer=by_name(SET=together, EVAL=OK + b":1\r\n")) as node:
        engine = engine_of(node.url)
        for thread in [InBackground(lambda: attempt(engine, token=None)) for _ in range(3)]:
            thread.result()
        attempt(engine, limit=0.02)
        eventually(lambda: deletes(node))
        connections = [one.connection for one in node.received() if TOKEN in one.argv]
        assert len(connections) == 2
        assert len(set(connections)) == 1


def test_an_interrupted_try_is_undone(engine_of) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ScriptedNode([expect("SET"), serve(by_name())], answer=by_name(SET=OK)) as node:
            engine = engine_of(node.url)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            started = time.monotonic()
            with pytest.raises(Interrupt):
                attempt(engine, limit=1.0)
            assert time.monotonic() - started < 0.02 + 0.1 * SLACK
            eventually(lambda: deletes(node), E)
            engine.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- deletes that are owed ----


@pytest.mark.parametrize("replied", [b"", b"+", b"+OK\r"], ids=repr)
def test_what_a_dead_connection_leaves_open_is_undone_first_on_the_next(engine_of, replied: bytes) -> None:
    dying = [expect("SET"), send(replied), hang_up()]
    with ScriptedNode(dying, [expect(is_delete), send(b":1\r\n"), serve(by_name(SET=OK))]) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine)) == [FAULT]
        assert said(eventually(lambda: tried(engine))) == [YES]
        assert [one.name for one in node.received()] == ["SET", "EVAL", "SET"]
        engine.close()


def tried(engine: Engine):
    votes = attempt(engine, token=b"next")
    return votes if votes.verdict == GRANTED else None


def test_an_owed_delete_does_not_wait_for_the_next_round(engine_of) -> None:
    with ScriptedNode([expect("SET"), hang_up()], answer=by_name(EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        eventually(lambda: deletes(node), 1)
        eventually(lambda: not engine.pending(TOKEN))


@pytest.mark.parametrize(("later", "owed"), [(5, True), (11, False)])
def test_an_undo_is_owed_until_its_key_has_ended_by_itself(
    engine_of, clock, later: float, owed: bool
) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node, FaultProxy(node) as proxy:
        engine = engine_of(proxy.url)
        attempt_while_refusing(engine, proxy)
        assert engine.pending(TOKEN)
        clock(later)
        eventually(lambda: engine.pending(TOKEN) is owed)
        proxy.heal()
        assert said(eventually(lambda: tried(engine))) == [YES]
        assert [one.name for one in node.received()] == (["SET", "EVAL", "SET"] if owed else ["SET", "SET"])


def attempt_while_refusing(engine: Engine, proxy: FaultProxy) -> None:
    """Lose the connection in the middle of a try, with no way to make another."""
    proxy.hold("down")
    lost = InBackground(lambda: attempt(engine))
    eventually(lambda: proxy.bytes_up > 0)
    proxy.refuse()
    proxy.reset_connections()
    assert said(lost.result()) == [FAULT]


@pytest.mark.parametrize(("later", "owed"), [(50, True), (61, False)])
def test_a_release_is_owed_for_a_minute(engine_of, clock, later: float, owed: bool) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node, FaultProxy(node) as proxy:
        engine = engine_of(proxy.url)
        proxy.refuse()
        assert said(ask(engine, DROP, TOKEN)) == [FAULT]
        clock(later)
        proxy.accept()
        assert said(eventually(lambda: tried(engine))) == [YES]
        assert [one.name for one in node.received()] == (["EVAL", "SET"] if owed else ["SET"])


def test_a_delete_that_nobody_waits_for_reaches_nodes_without_a_connection(engine_of) -> None:
    with ScriptedNode(answer=by_name()) as node:
        engine = engine_of(node.url)
        engine.discard(KEY, TOKEN)
        eventually(lambda: deletes(node), 2)
        eventually(lambda: not engine.pending(TOKEN))


# ---- on a real server ----


def test_the_try_of_a_paused_server_is_undone_when_it_wakes(engine_of, valkey) -> None:
    engine = engine_of(valkey.url)
    for number in range(20):
        eventually(partial(granted, engine, b"%d" % number), what="it is no longer suspect")
        raw(valkey, "CONFIG", "RESETSTAT")
        valkey.pause()
        assert attempt(engine, lease=30.0, limit=0.01).verdict == UNDECIDED
        valkey.resume()
        eventually(lambda: raw(valkey, "INFO", "commandstats").get("cmdstat_set", {}).get("calls") == 1)
        eventually(lambda: raw(valkey, "EXISTS", KEY) == 0, 1)


class Keeper:
    """A node with one key; ``forgetful``: it has lost it when it is to be handed on, and says so first."""

    def __init__(self, forgetful: bool) -> None:
        self.forgetful = forgetful
        self.token = b""

    def __call__(self, argv: Argv) -> bytes | Step | None:
        if argv[0] == b"SET" and b"IFEQ" in argv:
            self.token = b"" if self.forgetful else argv[2]
            return NIL if self.forgetful else Step("OK, later", self._late)
        if argv[0] == b"SET":
            if self.token:
                return NIL
            self.token = argv[2]
            return OK
        if argv[0] in (b"DELIFEQ", b"EVAL"):
            same = self.token == argv[-1]
            self.token = b"" if same else self.token
            return b":%d\r\n" % same
        return {b"TYPE": b"+string\r\n", b"PTTL": b":30000\r\n"}.get(argv[0]) or handshake(argv)

    @staticmethod
    def _late(peer: Peer) -> None:
        time.sleep(0.02)
        peer.send(OK)


def test_what_is_put_back_on_a_node_is_released_there(kind: str) -> None:
    """It had lost the key when the lock was handed on, and gets it again for a margin, but for no longer."""
    keepers = [Keeper(False), Keeper(False), Keeper(True)]
    with ExitStack() as stack:
        nodes = [stack.enter_context(ScriptedNode(answer=keeper)) for keeper in keepers]
        lock = redbolt.RedLock([node.url for node in nodes], "name", node_timeout=SLACK, engine=kind)

        def take_and_release() -> bytes:
            with lock:
                assert lock.lease is not None
                return lock.lease.token

        assert lock.acquire()
        waiting = InBackground(take_and_release)
        eventually(lambda: lock._queue.waiters, what="it stands in line")
        lock.release()
        token = waiting.result()
        put_back = [b"SET", b"name", token, b"NX", b"PX", b"30000"]
        eventually(lambda: put_back in [list(one.argv) for one in nodes[2].received("SET")])
        eventually(lambda: [keeper.token for keeper in keepers] == [b""] * 3, what="nothing is left")
        redbolt.close()
