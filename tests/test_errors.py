"""The tree of errors: what each one is, what it carries, and which one a caller gets."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import time
from typing import Any

import pytest
import redis

import redbolt
from redbolt import (
    Lock,
    LockError,
    LockLost,
    LockNotOwned,
    LockTimeout,
    NodesUnavailable,
    RedboltError,
    RedLock,
    ReleaseUnconfirmed,
    SetupError,
)
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, raw
from tests.kit.resp import NIL, OK, error
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, handshake, hang_up

E = 0.15 * SLACK
LEAVES = (LockLost, LockTimeout, NodesUnavailable, ReleaseUnconfirmed, SetupError)

# ---- the tree ----


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (RedboltError, (redis.exceptions.RedisError,)),
        (LockError, (RedboltError, redis.exceptions.LockError)),
        (LockTimeout, (LockError,)),
        (LockNotOwned, (LockError, redis.exceptions.LockNotOwnedError)),
        (LockLost, (LockNotOwned,)),
        (NodesUnavailable, (LockError, redis.exceptions.ConnectionError)),
        (ReleaseUnconfirmed, (LockError,)),
        (SetupError, (LockError,)),
    ],
)
def test_the_tree(kind: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    for base in bases:
        assert issubclass(kind, base)


def test_no_leaf_is_caught_by_another() -> None:
    for one in LEAVES:
        assert [other for other in LEAVES if issubclass(one, other)] == [one]


@pytest.mark.parametrize("kind", [LockError, LockNotOwned, *LEAVES])
def test_an_error_carries_facts_and_survives_pickling(kind: type[LockError]) -> None:
    original = kind("cannot do it", b"na\xffme", {"127.0.0.1:1": "away", "unix:/run/v": "full"})
    for one in (original, pickle.loads(pickle.dumps(original)), copy.copy(original), copy.deepcopy(original)):
        assert type(one) is kind
        assert one.lock_name == r"na\xffme"
        assert one.causes == {"127.0.0.1:1": "away", "unix:/run/v": "full"}
        assert str(one) == "cannot do it [127.0.0.1:1: away; unix:/run/v: full]"


def test_an_error_without_facts() -> None:
    one = LockError("no")
    assert (str(one), one.lock_name, one.causes) == ("no", None, {})
    assert str(pickle.loads(pickle.dumps(one))) == "no"


# ---- which one ----


def test_no_quorum_says_how_many_answered_and_what_they_said(kind: str, valkeys: LocalNodes) -> None:
    urls = [node.url for node in valkeys]
    for node in list(valkeys)[:2]:
        raw(node, "SET", "name", "somebody else's", "PX", 60_000)
    lock = RedLock(urls, "name", engine=kind)
    for node in list(valkeys)[2:]:
        node.pause()
    with pytest.raises(NodesUnavailable) as caught:
        lock.acquire(blocking=False)  # not "taken": the three that are silent may grant it
    for node in list(valkeys)[2:]:
        node.resume()
    text = str(caught.value)
    assert "2 of 5 nodes answered" in text
    assert "2 of them that it is taken" in text
    assert "needs 3" in text
    assert caught.value.lock_name == "name"
    assert set(caught.value.causes) == {f"127.0.0.1:{node.port}" for node in list(valkeys)[2:]}
    assert set(caught.value.causes.values()) == {"no answer within 50 ms"}


def test_taken_by_a_majority_is_taken_whatever_the_rest_says(kind: str, valkeys: LocalNodes) -> None:
    for node in list(valkeys)[:3]:
        raw(node, "SET", "name", "somebody else's", "PX", 60_000)
    for node in list(valkeys)[3:]:
        node.kill()
    lock = RedLock([node.url for node in valkeys], "name", engine=kind)
    assert lock.acquire(blocking=False) is False
    assert lock.acquire(sleep=0.01, blocking_timeout=0.05) is False
    assert lock.locked() is True


def test_locked_and_owned_cannot_tell_without_a_quorum(kind: str, valkeys: LocalNodes) -> None:
    lock = RedLock([node.url for node in valkeys], "name", 10, engine=kind)
    lock.acquire()
    for node in list(valkeys)[:4]:
        node.kill()
    for verb in (lock.locked, lock.owned):
        with pytest.raises(NodesUnavailable, match="cannot tell"):
            verb()
    assert lock.held


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("LOADING server is loading the dataset in memory", NodesUnavailable),
        ("BUSY server is busy running a script", NodesUnavailable),
        ("MASTERDOWN Link with MASTER is down", NodesUnavailable),
        ("READONLY You can't write against a read only replica.", NodesUnavailable),
        ("MISCONF errors writing to disk", NodesUnavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", NodesUnavailable),
        ("ERR something else", NodesUnavailable),
        ("NOAUTH Authentication required.", SetupError),
        ("NOPERM User default has no permissions to run the 'set' command", SetupError),
        ("MOVED 12182 10.0.0.1:6379", SetupError),
        ("ASK 12182 10.0.0.1:6379", SetupError),
        ("CROSSSLOT Keys in request don't hash to the same slot", SetupError),
        ("ERR unknown command 'SET', with args beginning with: ", SetupError),
        ("ERR syntax error", SetupError),
        ("ERR DB index is out of range", SetupError),
    ],
)
def test_what_the_node_answers_decides(kind: str, answer: str, expected: type[LockError]) -> None:
    def answers(argv: Argv) -> bytes | None:
        return error(answer) if argv[0] == b"SET" else handshake(argv)

    with ScriptedNode(answer=answers) as node:
        lock = Lock(node.url, "name", engine=kind)
        with pytest.raises(expected) as caught:
            lock.acquire(blocking=False)
        assert caught.type is expected
        assert answer.strip() in caught.value.causes[f"127.0.0.1:{node.port}"].strip()
        assert not lock.held


def test_what_waiting_can_mend_is_waited_for(kind: str) -> None:
    answers = iter([error("LOADING server is loading the dataset"), error("READONLY replica"), OK])
    with ScriptedNode(
        answer=lambda argv: next(answers) if argv[0] == b"SET" else handshake(argv) or b":1\r\n"
    ) as node:
        lock = Lock(node.url, "name", sleep=0.01, engine=kind)
        assert lock.acquire(blocking_timeout=5) is True
        lock.release()
        assert len(node.received("SET")) == 3


def test_what_waiting_cannot_mend_is_raised_at_once(kind: str) -> None:
    with ScriptedNode(
        answer=lambda argv: error("NOPERM no") if argv[0] == b"SET" else handshake(argv)
    ) as node:
        started = time.monotonic()
        with pytest.raises(SetupError):
            Lock(node.url, "name", engine=kind).acquire()
        assert time.monotonic() - started < E
        assert len(node.received("SET")) == 1


def test_a_minority_that_is_not_set_up_is_no_setup_error(kind: str, valkeys: LocalNodes) -> None:
    with ScriptedNode(answer=lambda argv: handshake(argv) or error("NOPERM no")) as node:
        lock = RedLock([node.url, valkeys[0].url, valkeys[1].url], "name", engine=kind)
        assert lock.acquire() is True
        lock.release()
        valkeys[0].kill()
        with pytest.raises(NodesUnavailable) as caught:
            lock.acquire(blocking=False)
        assert "NOPERM no" in caught.value.causes[f"127.0.0.1:{node.port}"]


def test_a_server_that_is_full_is_unavailable_and_says_so(kind: str) -> None:
    with LocalNodes(config=("--maxclients", "1")) as nodes:
        with redis.Redis.from_url(nodes[0].url) as guest:
            guest.ping()
            with pytest.raises(NodesUnavailable, match="max number of clients") as caught:
                Lock(nodes[0].url, "name", engine=kind).acquire(blocking=False)
            assert caught.type is NodesUnavailable
        redbolt.close()


def test_a_node_that_hangs_up_is_unavailable(kind: str) -> None:
    with ScriptedNode(answer=lambda argv: hang_up()) as node:
        with pytest.raises(NodesUnavailable, match=r"closed the connection|reset"):
            Lock(node.url, "name", engine=kind).acquire(blocking=False)


def test_a_refused_write_leaves_an_extend_unconfirmed(kind: str) -> None:
    with LocalNodes() as nodes:
        lock = Lock(nodes[0].url, "name", 10, engine=kind)
        lock.acquire()
        raw(nodes[0], "CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(NodesUnavailable, match="OOM"):
            lock.extend(10)
        assert lock.held
        raw(nodes[0], "CONFIG", "SET", "maxmemory", "0")
        lock.extend(10)
        lock.release()
        redbolt.close()


# ---- what stands in the texts ----


def test_names_in_messages_are_quoted(kind: str, valkey: LocalNode, caplog: pytest.LogCaptureFixture) -> None:
    name = "a\r\nERROR forged line\x1b[31m\x00"
    lock, other = Lock(valkey.url, name, engine=kind), Lock(valkey.url, name, engine=kind)
    texts = []

    def note(trouble: Any) -> None:
        with pytest.raises(LockError) as caught:
            trouble()
        texts.append(str(caught.value))

    lock.acquire()
    note(lock.acquire)
    note(other.release)
    note(lambda: other.extend(1))
    other.blocking = False
    note(other.__enter__)
    raw(valkey, "DEL", name)
    note(lambda: lock.extend(1))
    note(lock.release)
    valkey.kill()
    note(lambda: lock.acquire(blocking=False))
    note(lock.locked)
    with caplog.at_level(logging.DEBUG):
        valkey.start()
        assert lock.acquire(sleep=0.01, blocking_timeout=2 * SLACK)
        lock.raise_on_release_error = False
        raw(valkey, "DEL", name)
        lock.__exit__(None, None, None)
    texts += [record.getMessage() for record in caplog.records]
    assert len(texts) >= 9
    for text in texts:
        assert r"a\r\nERROR forged line\x1b[31m\x00" in text
        assert text.isprintable()


def test_what_a_server_says_cannot_forge_lines(kind: str) -> None:
    with ScriptedNode(answer=lambda argv: b"-ERR \x1b[31m\x07\x00" + b"x" * 10_000 + b"\r\n") as node:
        with pytest.raises(LockError) as caught:
            Lock(node.url, "name", engine=kind).acquire(blocking=False)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_wait_behind_a_foreign_type_is_told_once(
    kind: str, valkey: LocalNode, caplog: pytest.LogCaptureFixture
) -> None:
    raw(valkey, "RPUSH", "name", "a")
    with caplog.at_level(logging.WARNING, "redbolt"):
        assert Lock(valkey.url, "name", engine=kind).acquire(sleep=0.01, blocking_timeout=0.1) is False
    (record,) = caplog.records
    assert "holds a list" in record.getMessage()


def test_a_wait_behind_a_lock_is_not_worth_a_word(
    kind: str, valkey: LocalNode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        with Lock(valkey.url, "name", engine=kind):
            assert Lock(valkey.url, "name", engine=kind).acquire(sleep=0.01, blocking_timeout=0.1) is False
    assert caplog.records == []


def test_the_type_of_the_key_is_asked_once(kind: str) -> None:
    def answers(argv: Argv) -> bytes | None:
        return {b"SET": NIL, b"TYPE": b"+string\r\n"}.get(argv[0]) or handshake(argv)

    with ScriptedNode(answer=answers) as node:
        lock = Lock(node.url, "name", engine=kind, waiting="polling")
        assert lock.acquire(sleep=0.01, blocking_timeout=0.1) is False
        assert len(node.received("SET")) > 3
        assert len(node.received("TYPE")) == 1
        assert lock.acquire(blocking=False) is False
        assert len(node.received("TYPE")) == 1  # who does not wait does not ask


def test_an_error_is_raised_in_the_thread_that_asked(kind: str, valkey: LocalNode) -> None:
    """Two threads on one engine, one with a node error and one without, do not get each other's outcome."""
    stop = threading.Event()
    problems: list[BaseException] = []

    def healthy() -> None:
        try:
            while not stop.is_set():
                with Lock(valkey.url, "mine", engine=kind):
                    pass
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=healthy)
    thread.start()
    raw(valkey, "RPUSH", "name", "a")
    for _ in range(100):
        assert Lock(valkey.url, "name", engine=kind).acquire(blocking=False) is False
    stop.set()
    thread.join()
    assert problems == []
