"""What went wrong in other lock libraries, as told in their public bug reports, does not go wrong here.

Each comment names the project and the number of its report. A, B and C have connections of their own.
"""

from __future__ import annotations

import itertools
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import redbolt
from redbolt import Lock, LockError, LockLost, LockNotOwned, LockTimeout, NodesUnavailable, RedLock
from redbolt._clock import now_ns
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.proxy import FaultProxy
from tests.kit.resp import OK, error, reply
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, handshake, reset

E = 0.15 * SLACK

Client = Callable[..., Lock]


def client(url: str, kind: str) -> Client:
    """A client: makes locks that share its connections, and nothing else."""

    def lock(timeout: float = 10, name: str = "name", **options: Any) -> Lock:
        return Lock(url, name, timeout, engine=kind, **options)

    return lock


@pytest.fixture
def a(kind: str, node: LocalNode) -> Client:
    return client(node.url, kind)


@pytest.fixture
def b(kind: str, node: LocalNode) -> Client:
    return client(node.unix_url, kind)


@pytest.fixture
def c(kind: str, node: LocalNode) -> Client:
    return client(f"redis://localhost:{node.port}", kind)


@pytest.fixture
def proxy(node: LocalNode) -> Iterator[FaultProxy]:
    """Stands between a client and the server."""
    with FaultProxy(node) as between:
        yield between
        between.heal()
        redbolt.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def value(lock: Lock) -> bytes:
    """The token of the lock's lease."""
    assert lock.lease is not None
    return lock.lease.token


# redis/redis-py PR 1031
def test_a_release_that_read_the_owner_and_then_deleted_freed_the_next_holder(
    kind: str, node: LocalNode, proxy: FaultProxy, b: Client, c: Client, background: ThreadPoolExecutor
) -> None:
    mine = Lock(proxy.url, "name", 10, node_timeout=5, thread_local=False, engine=kind)
    mine.acquire()
    proxy.hold("up")
    before = proxy.bytes_up
    releasing = background.submit(mine.release)
    eventually(lambda: not mine.held, what="the release has begun")
    raw(node, "DEL", "name")  # the lease ends
    theirs = b()
    theirs.acquire()
    assert proxy.bytes_up == before
    proxy.heal()
    with pytest.raises(LockLost):
        releasing.result(5 * SLACK)
    assert raw(node, "GET", "name") == value(theirs)
    assert c().acquire(blocking=False) is False


# redis/redis-py 416
def test_the_first_threads_release_freed_the_second_threads_hold(
    node: LocalNode, a: Client, c: Client
) -> None:
    shared = a()
    shared.acquire()
    raw(node, "DEL", "name")  # the lease ends
    with ThreadPoolExecutor(1) as second:
        assert second.submit(shared.acquire).result() is True
        with pytest.raises(LockNotOwned):
            shared.release()
        assert c().acquire(blocking=False) is False
        assert second.submit(lambda: shared.held).result() is True
        second.submit(shared.release).result()
    assert raw(node, "EXISTS", "name") == 0


# sibson/redbeat 127, CERT-Polska/Artemis PR 2670
@pytest.mark.parametrize("late", [False, True])
def test_the_lease_was_lengthened_without_asking_whose_it_is(
    kind: str, node: LocalNode, proxy: FaultProxy, b: Client, clock: Callable[[float], None], late: bool
) -> None:
    mine = Lock(proxy.url, "name", 1, engine=kind)
    mine.acquire()
    proxy.hold()
    raw(node, "DEL", "name")  # the lease ends there
    if late:
        clock(1)  # and here
    b(5).acquire()
    proxy.heal()
    with pytest.raises(LockLost):
        mine.extend(60)
    assert not mine.held
    assert 4000 < raw(node, "PTTL", "name") <= 5000


# redis/redis-py 694, 1091
@pytest.mark.parametrize(
    "settings", [{"decode_responses": True}, {}, {"decode_responses": True, "encoding": "utf-16"}]
)
def test_with_decoded_replies_the_token_was_compared_as_text_with_bytes(
    kind: str, node: LocalNode, settings: dict[str, Any]
) -> None:
    with redis.Redis(port=node.port, **settings) as theirs:
        lock = Lock(theirs, "name", 10, engine=kind)
        for token in (None, "ключ", b"\xff\x00"):
            assert lock.acquire(token=token)
            assert lock.owned()
            assert lock.extend(1)
            assert lock.reacquire()
            lock.release()
            assert raw(node, "EXISTS", "name") == 0


# redis/redis-py 818, 554
def test_the_key_was_made_first_and_given_its_expiry_in_a_second_command(
    kind: str, node: LocalNode, b: Client
) -> None:
    program = (
        "import sys, redbolt\n"
        f"lock = redbolt.Lock({node.url!r}, 'name', 0.3, engine={kind!r})\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    lock.acquire(); lock.extend(0.3, replace_ttl=True); lock.release()\n"
    )
    with redis.Redis(port=node.port) as watcher:
        for _ in range(3):
            with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
                assert worker.stdout is not None
                worker.stdout.readline()
                until = time.monotonic() + random.uniform(0.01, 0.05)
                while time.monotonic() < until:
                    assert watcher.pttl("name") != -1
                worker.send_signal(signal.SIGKILL)
                worker.wait()
            assert watcher.pttl("name") != -1
    assert b().acquire(sleep=0.01, blocking_timeout=0.3 + E) is True


# redis/redis-py 370
def test_whole_seconds_cut_short_leases(node: LocalNode, a: Client) -> None:
    with a(0.7) as lock:
        assert 690 - 1000 * E < raw(node, "PTTL", "name") <= 700
        assert 0.6 < lock.left() <= 0.7 - 0.007 - 0.002
        lock.extend(0.7, replace_ttl=True)
        assert 690 - 1000 * E < raw(node, "PTTL", "name") <= 700


# ionelmc/python-redis-lock 73
def test_odd_expiry_values_made_a_lock_without_expiry(node: LocalNode, a: Client) -> None:
    commands = raw(node, "INFO", "commandstats")
    for odd in (0, -1, False, True, 0.0, math.nan, math.inf, -math.inf, "10", b"10"):
        with pytest.raises((ValueError, TypeError)) as caught:
            a(odd).acquire()
        assert not isinstance(caught.value, LockError)
    for untouched in ("cmdstat_set", "cmdstat_eval", "cmdstat_expire"):
        assert (untouched in commands) == (untouched in raw(node, "INFO", "commandstats"))
    assert raw(node, "DBSIZE") == 0


# SPSCommerce/redlock-py PR 3
def test_the_drift_allowance_was_added_to_the_validity(kind: str, nodes: LocalNodes) -> None:
    proxies = [FaultProxy(node) for node in nodes]
    try:
        lock = RedLock([proxy.url for proxy in proxies], "name", 10, node_timeout=2, engine=kind)
        lock.acquire()
        lock.release()
        for proxy in proxies:
            proxy.delay(up=0.05, down=0.05)
        started = time.monotonic()
        lock.acquire()
        left, elapsed = lock.left(), time.monotonic() - started
        assert elapsed >= 0.1
        assert 10 - 0.102 - elapsed - E < left <= 10 - 0.1 - 0.002 - 0.1
        for proxy in proxies:
            proxy.heal()
        lock.release()
    finally:
        redbolt.close()
        for proxy in proxies:
            proxy.close()


# redisson/redisson 1606, joanvila/aioredlock 59
def test_a_failed_acquire_freed_only_the_nodes_that_had_said_yes(
    kind: str, nodes: LocalNodes, proxy: FaultProxy
) -> None:
    lock = RedLock([proxy.url, nodes[1].url, nodes[2].url], "name", 10, engine=kind)
    with lock:
        pass
    raw(nodes[1], "SET", "name", "somebody else's", "PX", 60_000)
    proxy.drop_reply("SET", then="silence")
    with pytest.raises(NodesUnavailable):
        lock.acquire(blocking=False)
    assert proxy.replies_lost == 1
    eventually(lambda: raw(nodes[0], "GET", "name") is None, 2, "the node whose reply was lost is free")
    assert raw(nodes[1], "GET", "name") == b"somebody else's"
    eventually(lambda: raw(nodes[2], "GET", "name") is None, 1, "the node that said yes is free")


# leandromoreira/redlock-rb 129
def test_one_unreachable_node_made_the_acquire_fail(kind: str, nodes: LocalNodes) -> None:
    three = list(nodes)[:3]
    three[0].kill()
    lock = RedLock([node.url for node in three], "name", 10, engine=kind)
    assert lock.acquire(blocking=False) is True
    assert lock.held
    lock.release()
    eventually(lambda: [raw(node, "EXISTS", "name") for node in three[1:]] == [0, 0], 1)
    three[1].kill()
    with pytest.raises(NodesUnavailable) as caught:
        lock.acquire(blocking=False)
    assert set(caught.value.causes) == {f"127.0.0.1:{node.port}" for node in three[:2]}


# redisson/redisson 1636
@pytest.mark.parametrize("how", ["swallow", "pause", "kill"])
def test_with_one_node_down_each_acquire_waited_for_its_time_limit(
    kind: str, nodes: LocalNodes, proxy: FaultProxy, how: str
) -> None:
    urls = [proxy.url, *[node.url for node in nodes][1:]]
    lock = RedLock(urls, "name", 10, node_timeout=0.5, engine=kind)
    with lock:
        pass
    if how == "swallow":
        proxy.swallow()
    else:
        getattr(nodes[0], how)()
    took = []
    for _ in range(100):
        started = time.monotonic()
        with lock:
            pass
        took.append(time.monotonic() - started)
    if how == "pause":
        nodes[0].resume()
    assert sorted(took)[50] < 0.02 * SLACK
    assert sum(took) < 0.5 + 100 * 0.01 * SLACK


# leandromoreira/redlock-rb 27, 148
def test_scripts_were_not_loaded_again(kind: str, node: LocalNode, a: Client) -> None:
    lock = a()
    lock.acquire()
    for _ in range(2):
        lock.extend(1)
        raw(node, "SCRIPT", "FLUSH")
    assert lock.extend(1) is True
    assert raw(node, "PTTL", "name") > 12_000
    raw(node, "SCRIPT", "FLUSH")
    lock.release()
    assert raw(node, "EXISTS", "name") == 0


# leandromoreira/redlock-rb 27, 148
def test_scripts_were_not_loaded_again_after_a_restart(kind: str, server: str | None) -> None:
    with LocalNodes(aof=True, server=server) as nodes:
        lock = Lock(nodes[0].url, "name", 10, engine=kind)
        with lock:
            lock.extend(1)
        lock.acquire()
        nodes[0].kill()
        nodes[0].start(empty=False)
        eventually(lambda: _quietly(lambda: lock.extend(1)), what="the node answers again")
        lock.release()
        assert raw(nodes[0], "EXISTS", "name") == 0
        redbolt.close()


def _quietly(verb: Callable[[], bool]) -> bool:
    try:
        return verb()
    except NodesUnavailable:
        return False


# leandromoreira/redlock-rb 27, 148
@pytest.mark.parametrize(
    "text", ["NOSCRIPT No matching script. Please use EVAL.", "NOSCRIPT whatever", "NOSCRIPT"]
)
def test_a_missing_script_was_known_by_its_sentence(kind: str, text: str) -> None:
    def answers(argv: Argv) -> bytes | None:
        name = argv[0]
        if name == b"SET" and b"IFEQ" not in argv:
            return OK
        if name == b"EVAL":
            return reply(1)
        if name == b"EVALSHA":
            return error(text)
        return handshake(argv) or error("ERR unknown command")

    with ScriptedNode(
        answer=lambda argv: error("ERR syntax error") if b"IFEQ" in argv else answers(argv)
    ) as node:
        lock = Lock(node.url, "name", 10, engine=kind)
        lock.acquire()
        assert lock.extend(1) is True
        lock.release()
        assert len(node.received("EVAL")) == 2


# redis/redis 4850
def test_a_connection_cut_in_the_middle_of_an_acquire_left_the_lock_for_ever(
    kind: str, node: LocalNode, proxy: FaultProxy, b: Client
) -> None:
    names = [f"name {i}" for i in range(100)]
    other = Lock(proxy.url, "other", engine=kind)
    for name in names:
        eventually(lambda: _quietly(lambda: not other.locked()), what="there is a connection")
        proxy.drop_reply("SET", then="reset")
        with pytest.raises(NodesUnavailable):
            Lock(proxy.url, name, 60, engine=kind).acquire(blocking=False)
    assert proxy.replies_lost == 100
    eventually(lambda: raw(node, "DBSIZE") == 0, 1, "every token is taken back")
    for name in names:
        with b(10, name, blocking_timeout=0):
            pass


# redis/redis-py 621
@pytest.mark.parametrize(
    "options",
    [
        {"blocking": False},
        {"blocking_timeout": 0},
        {"blocking_timeout": 0.1},
        {"retry": redbolt.Retry(2, 0.01)},
    ],
)
def test_a_with_block_ran_although_the_lock_was_not_obtained(
    a: Client, b: Client, options: dict[str, Any]
) -> None:
    b().acquire()
    with pytest.raises(LockTimeout):
        with a(**options):
            pytest.fail("this block must not run")


# sibson/redbeat 208, 238
@pytest.mark.parametrize("blocking", [False, True])
def test_an_exception_in_acquire_was_swallowed(kind: str, blocking: bool) -> None:
    with ScriptedNode(answer=lambda argv: reset()) as node:
        lock = Lock(node.url, "name", 0.2, sleep=0.01, engine=kind)
        with pytest.raises(NodesUnavailable):
            try:
                lock.acquire(blocking=blocking)
            except BaseException:
                assert not lock.held
                assert lock.lease is None
                raise
        with pytest.raises(NodesUnavailable):
            with lock:
                pytest.fail("this block must not run")


# brainix/pottery PR 272
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("thread = threading.Thread(target=sys.exit); thread.start(); thread.join()", 0),
        ("raise SystemExit(4)", 4),
        ("raise KeyError('the program itself')", 1),
    ],
)
def test_a_lock_held_at_the_end_of_the_program_made_noise(
    kind: str, valkey: LocalNode, end: str, code: int
) -> None:
    program = (
        "import sys, threading, redbolt\n"
        f"lock = redbolt.Lock({valkey.url!r}, 'name', 5, engine={kind!r})\n"
        "assert lock.acquire()\n"
        "print('held', flush=True)\n" + end
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.readline()
        started = time.monotonic()
        stderr = worker.stderr.read()
        assert worker.wait() == code
        assert time.monotonic() - started < 1 * SLACK
    if "KeyError" in end:
        assert stderr.endswith("KeyError: 'the program itself'\n")
        assert stderr.count("Traceback") == 1
    else:
        assert stderr == ""
    assert 0 < raw(valkey, "PTTL", "name") <= 5000  # it ends with its lease


# redis/redis-py 415
def test_a_time_as_the_stored_value_let_an_old_holder_pass(
    node: LocalNode, a: Client, b: Client, c: Client, clock: Callable[[float], None]
) -> None:
    mine, theirs = a(5), b(10)
    mine.acquire()
    raw(node, "DEL", "name")  # the lease ends
    clock(5)
    theirs.acquire()
    assert value(mine) != value(theirs)
    with pytest.raises(LockNotOwned):
        mine.release()
    assert raw(node, "GET", "name") == value(theirs)
    assert c().acquire(blocking=False) is False


# py-sherlock/sherlock 66
def test_renewing_released_the_lock(node: LocalNode, a: Client, clock: Callable[[float], None]) -> None:
    lock = a(5)
    lock.acquire()
    raw(node, "PEXPIRE", "name", 3000)
    clock(2)
    for verb in (lock.reacquire, lambda: lock.extend(5, replace_ttl=True)):
        verb()
        assert raw(node, "GET", "name") == value(lock)
        assert 4500 < raw(node, "PTTL", "name") <= 5000
        assert lock.held
    lock.release()
    assert raw(node, "GET", "name") is None


# redisson/redisson 624
def test_a_lease_shorter_than_the_waiting_time_let_several_in(kind: str, valkeys: LocalNodes) -> None:
    spans: list[tuple[int, int]] = []
    end = time.monotonic() + 1.2
    places = [[node.url for node in valkeys], [node.unix_url for node in valkeys]]

    def loop(urls: list[str]) -> None:
        mine = RedLock(urls, "name", 0.2, sleep=0.01, engine=kind)
        while time.monotonic() < end:
            if not mine.acquire(blocking_timeout=1):
                continue
            started = now_ns()
            lease = mine.lease
            assert lease is not None
            until = lease.valid_until_ns
            assert 0 < until - started < 200_000_000
            if random.random() < 0.3:
                while lease.held:  # as one that is slow, and is overtaken by the end of its lease
                    time.sleep(0.01)
            spans.append((started, min(now_ns(), until)))
            try:
                mine.release()
            except LockLost:
                pass

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(loop, urls) for urls in places * 2]:
            future.result(10 * SLACK)
    assert len(spans) > 5
    for (_, earlier_end), (later_start, _) in itertools.pairwise(sorted(spans)):
        assert earlier_end <= later_start


# go-redsync/redsync PR 71
def test_an_extension_did_not_look_at_its_own_elapsed_time(
    kind: str,
    proxy: FaultProxy,
    node: LocalNode,
    clock: Callable[[float], None],
    background: ThreadPoolExecutor,
) -> None:
    lock = Lock(proxy.url, "name", 1, thread_local=False, node_timeout=5, engine=kind)
    lock.acquire()
    assert lock.extend(1, replace_ttl=True)
    assert 0.9 - E < lock.left() <= 1 - 0.01 - 0.002
    up = proxy.bytes_up
    proxy.hold("down")
    extending = background.submit(lock.extend, 1, True)
    eventually(lambda: proxy.bytes_up > up, what="the extension has been sent")
    clock(1.2)  # that long its reply takes
    proxy.heal()
    with pytest.raises(LockLost):
        extending.result(5 * SLACK)
    assert not lock.held
    assert lock.left() == 0.0
    eventually(lambda: raw(node, "GET", "name") is None, 1, "what it had done is taken back")


# glasslion/redlock 38
@pytest.mark.parametrize("options", [{}, {"blocking": False}, {"blocking_timeout": 0.1}, {"token": "mine"}])
def test_a_second_acquire_overwrote_the_first_token(
    node: LocalNode, a: Client, options: dict[str, Any]
) -> None:
    lock = a()
    lock.acquire()
    token = value(lock)
    with pytest.raises(LockError):
        lock.acquire(**options)
    assert value(lock) == token == raw(node, "GET", "name")
    lock.release()
    assert raw(node, "GET", "name") is None


# mike-marcacci/node-redlock 313, 65, 168
@pytest.mark.parametrize("count", [1, 5])
def test_releasing_an_expired_lock_was_retried_for_ever(
    kind: str, nodes: LocalNodes, clock: Callable[[float], None], count: int
) -> None:
    lock = RedLock([node.url for node in nodes][:count], "name", 0.5, engine=kind)
    lock.acquire()
    eventually(lambda: all(raw(node, "EXISTS", "name") for node in list(nodes)[:count]), 0.3)
    for node in nodes:
        raw(node, "DEL", "name")
    clock(1)
    with redis.Redis(port=nodes[0].port) as watcher, watcher.monitor() as monitor:
        started = time.monotonic()
        with pytest.raises(LockLost):
            lock.release()
        assert time.monotonic() - started < 0.05 + E
        assert lock.lease is None
        raw(nodes[0], "PING", "the end")
        seen = []
        for event in monitor.listen():
            if "the end" in event["command"]:
                break
            seen.append(event["command"].split()[0])
    assert len([name for name in seen if name in ("DELIFEQ", "EVAL", "EVALSHA")]) <= 2  # EVALSHA, then EVAL
