"""The peers from npm and the way to them: they do what their names say, and their trouble is told."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from redbolt.local import LocalNode, LocalNodes
from tests.interop import conftest
from tests.interop.nodejs import NodeRedisson, NodeRedlock
from tests.kit import npm
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.npm import Peer, PeerDied, PeerError, installed

pytestmark = pytest.mark.usefixtures("_npm")

E = 0.15 * SLACK


def subscribers(node: LocalNode, channel: str) -> int:
    """How many listen there."""
    return int(raw(node, "PUBSUB", "NUMSUB", channel)[1])


# ---- the process and its packages ----


@pytest.fixture
def driver(tmp_path: Path) -> Callable[[str], Path]:
    """Write a driver of a test's own."""

    def write(program: str) -> Path:
        path = tmp_path / "mine.mjs"
        wire = (npm.PEERS / "wire.mjs").as_uri()
        path.write_text(f'import {{ Handles, load, log, serve }} from "{wire}";\n{program}')
        return path

    return write


def test_operations_overlap_and_each_answer_finds_its_call(driver: Callable[[str], Path]) -> None:
    program = """
    let open;
    const gate = new Promise((resolve) => (open = resolve));
    serve({ wait: async ({ what }) => (await gate, what), open: () => open(), echo: ({ what }) => what });
    """
    with Peer(driver(program)) as peer:
        waiting = [peer.start("wait", what=number) for number in range(3)]
        assert peer.call("echo", what="Schlüssel 🔒\n") == "Schlüssel 🔒\n"
        assert not any(call.done for call in waiting)
        before = time.monotonic()
        peer.call("open")
        assert [call.result() for call in waiting] == [0, 1, 2]
        assert all(before <= call.ended_at() <= time.monotonic() for call in waiting)


def test_errors_of_the_other_side_are_told(driver: Callable[[str], Path]) -> None:
    with Peer(driver('serve({ fail: () => { throw new RangeError("too far"); } });')) as peer:
        with pytest.raises(PeerError, match=r"fail: RangeError: too far") as caught:
            peer.call("fail")
        assert (caught.value.name, caught.value.text) == ("RangeError", "too far")
        with pytest.raises(PeerError, match="no such operation: constructor"):
            peer.call("constructor")


def test_a_peer_that_dies_fails_its_calls_with_its_last_words(driver: Callable[[str], Path]) -> None:
    program = (
        'serve({ hang: () => new Promise(() => {}), die: () => { console.log("ouch"); process.exit(3); } });'
    )
    with Peer(driver(program)) as peer:
        hanging = peer.start("hang")
        with pytest.raises(PeerDied, match=r"(?s)it ended.*ouch"):
            peer.call("die")
        with pytest.raises(PeerDied, match="ouch"):
            hanging.result()
        with pytest.raises(PeerDied, match="ouch"):
            peer.call("hang")
    with pytest.raises(PeerDied, match="ouch"):
        peer.call("hang")


def test_a_peer_that_cannot_start_says_why(driver: Callable[[str], Path]) -> None:
    with pytest.raises(PeerDied, match="Cannot find module 'no-such-package'"):
        Peer(driver('load("no-such-package");'))


def test_what_is_not_an_answer_is_shown(driver: Callable[[str], Path]) -> None:
    with Peer(driver('serve({ babble: () => { process.stdout.write("[]\\n"); } });')) as peer:
        with pytest.raises(PeerDied, match=r"it wrote b'\[\]\\n', which answers nothing"):
            peer.call("babble")


def test_a_peer_that_hangs_is_waited_for_within_bounds_and_can_be_ended(
    driver: Callable[[str], Path],
) -> None:
    peer = Peer(driver("serve({ hang: () => { for (;;); } });"))
    try:
        started = time.monotonic()
        with pytest.raises(PeerDied, match="no answer to hang within"):
            peer.call("hang", timeout=0.1)
        assert 0.1 * SLACK <= time.monotonic() - started < 0.1 * SLACK + E
    finally:
        peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(peer.pid, 0)


def test_a_peer_ends_with_the_process_that_started_it(driver: Callable[[str], Path]) -> None:
    with Peer(driver("serve({});")) as peer:
        assert peer._process.stdin is not None
        peer._process.stdin.close()  # as the system does for a process that is killed
        assert peer._process.wait(5 * SLACK) == 0


@pytest.fixture
def fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put an npm first in the path that only runs this script; returns the file that gets a line per run."""

    def write(script: str) -> Path:
        (tmp_path / "bin").mkdir(exist_ok=True)
        path, runs = tmp_path / "bin" / "npm", tmp_path / "runs"
        path.write_text(f'#!/bin/sh\necho "$@" >>"{runs}"\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return runs

    return write


def test_packages_are_installed_once_also_by_two_at_a_time(
    tmp_path: Path, fake_npm: Callable[[str], Path]
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    runs = fake_npm(f'mkdir node_modules; read line <"{gate}"')
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(installed, tmp_path / "store") for _ in range(2)]
        eventually(runs.exists, what="one of them runs npm")
        gate.write_text("go on\n")
        [folder, again] = [future.result(10 * SLACK) for future in both]
    assert folder == again == installed(tmp_path / "store")
    assert len(runs.read_text().splitlines()) == 1
    assert {path.name for path in folder.iterdir()} == {"node_modules", *npm.PINNED}


def test_an_install_that_failed_says_why_and_is_tried_again(
    tmp_path: Path, fake_npm: Callable[[str], Path]
) -> None:
    fake_npm("echo no network; mkdir node_modules; exit 1")
    with pytest.raises(RuntimeError, match=r"(?s)npm ci .* failed in .*no network"):
        installed(tmp_path / "store")
    fake_npm("mkdir node_modules")
    assert (installed(tmp_path / "store") / "node_modules").is_dir()


def test_a_second_install_does_not_wait_for_ever(
    tmp_path: Path, fake_npm: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npm, "INSTALL_LIMIT", 0.2)
    fake_npm("")
    with npm._locked(tmp_path / "lock", time.monotonic() + 1):
        with pytest.raises(TimeoutError, match="another process is still installing"):
            installed(tmp_path)


@pytest.mark.parametrize("variable", ["CI", "REDBOLT_REQUIRE_PEERS"])
def test_without_node_a_test_is_skipped_and_fails_where_peers_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("CI", "REDBOLT_REQUIRE_PEERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="node is not installed"):
        conftest.require_node()
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="node is not installed"):
        conftest.require_node()


def test_an_old_node_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, says in (("node", "v12.22.9"), ("npm", "8.5.1")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert npm.missing() == "node v12.22.9 is too old: the peers need 16 or newer"


# ---- npm redlock ----


def test_redlock_needs_a_quorum_and_tells_trouble_from_refusal(
    nodes: LocalNodes, node_redlock: Callable[..., NodeRedlock]
) -> None:
    mine, theirs = node_redlock(*nodes), node_redlock(*nodes)
    held = mine.acquire("name", ttl_ms=10_000)
    assert held is not None
    assert 9000 < held.valid_ms <= 10_000 - 100 - 2
    assert theirs.acquire("other", "name", ttl_ms=10_000) is None
    assert raw(nodes[0], "KEYS", "*") == [b"name"]
    assert held.release() is True
    assert held.release() is False
    for node in list(nodes)[:3]:
        node.kill()
    with pytest.raises(PeerError, match="unable to achieve a quorum"):
        theirs.acquire("name", ttl_ms=10_000)


def test_redlocks_waiter_keeps_the_minority_that_it_got_until_it_stands_in_its_own_way(
    valkeys: LocalNodes, node_redlock: Callable[..., NodeRedlock]
) -> None:
    """Why no test lets it wait while others contend for the same servers."""
    a, b, c = three = list(valkeys)[:3]
    for taken in (b, c):
        raw(taken, "SET", "name", "mine")
    theirs = node_redlock(*three, retryCount=int(100 * SLACK), retryDelay=10, retryJitter=0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(theirs.acquire, "name", ttl_ms=10_000)
        eventually(lambda: raw(a, "EXISTS", "name"), what="it has one of three")
        raw(b, "DEL", "name")
        eventually(lambda: raw(b, "EXISTS", "name"), what="it has two of three")
        raw(c, "DEL", "name")
        eventually(lambda: raw(c, "EXISTS", "name"), what="it has all three")
        assert raw(a, "GET", "name") == raw(b, "GET", "name") == raw(c, "GET", "name")
        assert waiting.result(10 * SLACK) is None


# ---- npm node-redisson ----


def test_redisson_writes_a_hash_with_a_count_and_a_lease(
    node: LocalNode, node_redisson: Callable[..., NodeRedisson]
) -> None:
    a, b = node_redisson(node), node_redisson(node)
    assert a.uuid != b.uuid
    mine, same, theirs = a.lock("name", "17"), a.lock("name", "18"), b.lock("name", "17")
    assert mine.owner == f"{a.uuid}:17".encode()
    mine.lock(lease_ms=10_000)
    assert raw(node, "KEYS", "*") == [b"name"]
    assert raw(node, "HGETALL", "name") == {mine.owner: b"1"}
    assert 9000 < raw(node, "PTTL", "name") <= 10_000
    mine.lock(lease_ms=20_000)
    assert raw(node, "HGET", "name", mine.owner) == b"2"
    assert 19_000 < raw(node, "PTTL", "name") <= 20_000
    assert mine.is_held()
    assert mine.hold_count() == 2
    for other in (same, theirs):
        assert other.try_lock(0, 1000) is False
        assert other.is_locked()
        assert not other.is_held()
        with pytest.raises(PeerError, match="not locked by current client") as caught:
            other.unlock()
        assert caught.value.name == "RedissonLockError"
    assert raw(node, "HLEN", "name") == 1
    assert 18_000 < raw(node, "PTTL", "name") <= 20_000
    mine.unlock()
    assert raw(node, "HGET", "name", mine.owner) == b"1"
    assert theirs.try_lock() is False
    mine.unlock()
    assert not theirs.is_locked()
    assert theirs.try_lock() is True
    assert same.force_unlock() is True
    assert same.force_unlock() is False
    eventually(lambda: raw(node, "DBSIZE") == 0, what="its latches are gone, too")


@pytest.mark.parametrize("name", ["name", "Schlüssel 🔒", "{tag}:x", "x:{tag}"])
def test_redisson_tells_its_waiters(
    node: LocalNode, node_redisson: Callable[..., NodeRedisson], name: str
) -> None:
    mine, theirs = node_redisson(node).lock(name), node_redisson(node).lock(name)
    mine.lock()
    with redis.Redis(port=node.port) as client, client.pubsub() as listener:
        listener.subscribe(theirs.channel)
        waiting = theirs.start_lock(lease_ms=10_000)
        eventually(lambda: subscribers(node, theirs.channel) == 2, what="it has subscribed")
        assert not waiting.done
        unlocked_at = time.monotonic()
        mine.unlock()
        assert 0 <= waiting.ended_at() - unlocked_at < E  # the lease had 30 s to go
        heard = eventually(lambda: listener.get_message(ignore_subscribe_messages=True))
    assert heard["data"] == b"0"
    assert theirs.is_held()


def test_redisson_waits_until_it_hears_or_the_lease_ends(
    node: LocalNode, node_redisson: Callable[..., NodeRedisson]
) -> None:
    theirs = node_redisson(node).lock("name")
    raw(node, "HSET", "name", "me", "1")
    raw(node, "PEXPIRE", "name", 10_000)
    waiting = theirs.start_lock(lease_ms=1000)
    eventually(lambda: subscribers(node, theirs.channel) == 1, what="it has subscribed")
    raw(node, "DEL", "name")
    assert raw(node, "EXISTS", "name") == 0
    assert not waiting.done
    raw(node, "PUBLISH", theirs.channel, "0")
    waiting.result()
    assert theirs.hold_count() == 1
    third = node_redisson(node).lock("name")
    assert third.try_lock(wait_ms=20) is False
    third.lock(lease_ms=1000)  # nobody says a word: the lease of 1 s ends
    assert not theirs.is_held()
    assert third.is_held()


def test_redissons_watchdog_renews_until_the_unlock(
    node: LocalNode, node_redisson: Callable[..., NodeRedisson]
) -> None:
    mine = node_redisson(node, watchdog_ms=600).lock("name")
    mine.lock()
    seen: list[int] = []

    def renewed_twice() -> bool:
        seen.append(raw(node, "PTTL", "name"))
        return sum(later > earlier for earlier, later in itertools.pairwise(seen)) >= 2

    eventually(renewed_twice, 3, "the lease was renewed twice")
    assert max(seen) <= 600
    mine.unlock()
    assert raw(node, "EXISTS", "name") == 0
    mine.lock(lease_ms=300)  # a lease of its own is not renewed
    eventually(lambda: raw(node, "EXISTS", "name") == 0, 2, "its end")
