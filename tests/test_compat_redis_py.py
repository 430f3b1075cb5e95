"""redis-py's lock on our engines. Where its behaviour is the measure, each scenario is played on redis-py's
own lock and on ours, and both have to report the same.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import redis
import redis.lock
from redis.backoff import NoBackoff
from redis.retry import Retry

import redbolt
from redbolt import compat
from redbolt.compat import redis_py
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import SLACK, HasAddress, eventually, raw
from tests.kit.faults import paused, within
from tests.kit.proxy import FaultProxy
from tests.kit.resp import OK, error
from tests.kit.scripted import ScriptedNode

LIMIT = 0.2 * SLACK
"""Socket timeout of clients whose servers fail."""
LOGGER = "redis.lock"

Make: TypeAlias = Callable[..., Any]
Connect: TypeAlias = Callable[..., redis.Redis]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Clients that are closed at the end; without retries unless told otherwise."""
    made: list[redis.Redis] = []

    def make(node: HasAddress | str, **options: Any) -> redis.Redis:
        options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 5 * SLACK, **options}
        client = redis.Redis.from_url(node if isinstance(node, str) else node.url, **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def ours(kind: str) -> Make:
    return functools.partial(redis_py.Lock, engine=kind)


@pytest.fixture
def client(connect: Connect, valkey: LocalNode) -> redis.Redis:
    return connect(valkey)


class Look:
    """One implementation on one server, and what it showed."""

    def __init__(self, make: Make, client: redis.Redis) -> None:
        self.make, self.client = make, client
        self.seen: list[object] = []

    def lock(self, name: Any = "name", *arguments: Any, **options: Any) -> Any:
        return self.make(self.client, name, *arguments, **options)

    def see(self, call: Callable[..., object], *arguments: Any, **options: Any) -> Any:
        """Note what a call returns, or what it raises."""
        try:
            result = call(*arguments, **options)
        except Exception as problem:
            text = str(problem).partition(" script: ")[0]  # a server names the script that failed
            if isinstance(problem, redis.exceptions.DataError):
                text = ""  # it depends on whether hiredis packs the command
            self.seen.append((type(problem), text, getattr(problem, "lock_name", None)))
            return None
        self.seen.append(result if isinstance(result, bool | str | bytes | int | float | None) else "")
        return result

    def key(self, name: Any = "name") -> None:
        """Note the life of the key, to the second."""
        pttl = raw(self.node_url, "PTTL", name)
        self.seen.append(pttl if pttl < 0 else round(pttl / 1000))

    def token(self, lock: Any) -> None:
        """Note the form of the token, and whether the server has it."""
        token = lock.local.token
        value = raw(self.node_url, "GET", "name")
        self.seen.append((type(token), len(token) if token else None, value == token))

    @property
    def node_url(self) -> str:
        settings = self.client.connection_pool.connection_kwargs
        return f"redis://{settings['host']}:{settings['port']}"


def attributes(look: Look) -> None:
    names = ("name", "timeout", "sleep", "blocking", "blocking_timeout", "thread_local")
    for lock in (look.lock(), look.lock(b"x", 1, 2, False, 3, 0, None), look.lock("x", thread_local=False)):
        for name in (*names, "raise_on_release_error"):
            look.see(getattr, lock, name)
        look.seen.append((type(lock.local), lock.local.token, lock.redis is look.client))


def one_hold(look: Look) -> None:
    lock = look.lock()
    look.see(lock.locked)
    look.see(lock.owned)
    look.see(lock.release)
    look.see(lock.acquire)
    look.token(lock)
    look.key()
    look.see(lock.locked)
    look.see(lock.owned)
    look.see(lock.acquire, blocking=False)  # not reentrant, and the hold goes on
    look.token(lock)
    other = look.lock()
    look.see(other.acquire, blocking=False)
    look.see(other.locked)
    look.see(other.owned)
    look.see(other.release)
    look.see(lock.release)
    look.see(lock.release)
    look.see(lock.locked)
    look.key()


def timeouts(look: Look) -> None:
    for timeout in (None, 0, 7, 7.8, 0.0009, -1, "7", float("nan"), float("inf"), 10**16):
        lock = look.lock(timeout=timeout)
        look.see(lock.acquire, blocking=False)
        look.seen.append(lock.local.token is None)
        look.key()
        raw(look.node_url, "DEL", "name")


def changed_attributes(look: Look) -> None:
    lock = look.lock()
    lock.name, lock.timeout, lock.blocking = "other", 9, False
    look.see(lock.acquire)
    look.key("other")
    look.see(lock.acquire)
    look.see(lock.release)
    lock.name, lock.timeout = "name", None
    look.see(lock.acquire)
    look.key()


def tokens(look: Look) -> None:
    lock = look.lock(timeout=9)
    for token in ("text", b"bytes", "ü", "", b"", 17, 1.5, memoryview(b"view"), b"\0\r\n"):
        look.see(lock.acquire, blocking=False, token=token)
        look.seen.append(lock.local.token)
        look.see(lock.owned)
        look.see(lock.extend, 9)
        look.key()
        look.see(lock.release)
    for bad in (True, [1], object):
        look.see(lock.acquire, blocking=False, token=bad)
    look.see(lock.acquire, blocking=False, token="first")
    look.see(lock.acquire, blocking=False, token="second")
    look.seen.append(lock.local.token)
    lock.local.token = "first"
    look.see(lock.owned)
    look.see(lock.reacquire)
    look.see(lock.release)
    look.see(lock.acquire, blocking=False, token=b"")
    raw(look.node_url, "DEL", "name")
    look.see(lock.owned)


def names(look: Look) -> None:
    for name in ("ü", b"\xff", "", 17, 1.5, None, True, object):
        lock = look.lock(name)
        look.see(lock.acquire, blocking=False)
        look.see(lock.locked)
        look.see(lock.release)
        look.see(lock.release)


def extends(look: Look) -> None:
    lock = look.lock(timeout=20)
    look.see(lock.extend, 5)
    lock.acquire()
    for arguments in ((5,), (5, False), (5, True), (0.5, True), (2.5,), (0,), (-1,)):
        look.see(lock.extend, *arguments)
        look.key()
    look.see(lock.extend, 5, replace_ttl=True)
    look.see(lock.extend, 10**16)
    look.see(lock.extend, "5")
    look.see(lock.extend, float("nan"))
    look.key()
    look.see(lock.extend, -50)
    look.key()
    look.see(lock.extend, 5)
    look.seen.append(lock.local.token is None)
    look.see(lock.release)
    endless = look.lock()
    endless.acquire()
    look.see(endless.extend, 5)
    endless.timeout = 5
    look.see(endless.extend, 5)
    look.see(endless.extend, 5, True)
    raw(look.node_url, "SET", "name", "foreign", "PX", "50000")
    look.see(endless.extend, 5)
    look.key()


def reacquires(look: Look) -> None:
    lock = look.lock(timeout=20)
    look.see(lock.reacquire)
    lock.acquire()
    raw(look.node_url, "PEXPIRE", "name", 5000)
    look.see(lock.reacquire)
    look.key()
    raw(look.node_url, "PERSIST", "name")
    look.see(lock.reacquire)
    look.key()
    lock.timeout = None
    look.see(lock.reacquire)
    lock.timeout = 0
    look.see(lock.reacquire)
    look.key()
    lock.timeout = 20
    look.see(lock.reacquire)
    raw(look.node_url, "SET", "name", "foreign", "PX", "50000")
    look.see(lock.reacquire)
    look.key()


def lost_holds(look: Look) -> None:
    for thief in (("DEL", "name"), ("SET", "name", "foreign")):
        lock = look.lock(timeout=20)
        look.see(lock.acquire)
        raw(look.node_url, *thief)
        look.see(lock.owned)
        look.see(lock.locked)
        look.see(lock.release)
        look.seen.append(lock.local.token)
        look.key()


def other_types(look: Look) -> None:
    lock, fresh = look.lock(timeout=20), look.lock(timeout=20)
    lock.acquire()
    raw(look.node_url, "DEL", "name")
    raw(look.node_url, "LPUSH", "name", "element")
    look.see(fresh.acquire, blocking=False)
    look.see(fresh.owned)
    for call in (lock.locked, lock.owned, functools.partial(lock.extend, 5), lock.reacquire, lock.release):
        look.see(call)
    look.seen.append(lock.local.token)
    look.seen.append(raw(look.node_url, "TYPE", "name"))


def blocks(look: Look) -> None:
    def body(lock: Any, act: Callable[[], object]) -> None:
        with lock as given:
            look.seen.append(given is lock)
            look.key()
            act()

    def fail() -> None:
        raise KeyError("the body's own")

    for raising in (True, False):
        options = {"blocking_timeout": 0, "raise_on_release_error": raising}
        look.see(body, look.lock(**options), lambda: None)
        look.see(body, look.lock(**options), fail)
        released = look.lock(**options)
        look.see(body, released, released.release)
        look.see(body, look.lock(**options), lambda: raw(look.node_url, "DEL", "name"))

        def lose_and_fail() -> None:
            raw(look.node_url, "DEL", "name")
            fail()

        try:
            body(look.lock(**options), lose_and_fail)
        except Exception as problem:
            look.seen.append((type(problem), type(problem.__context__)))
        raw(look.node_url, "SET", "name", "foreign")
        look.see(body, look.lock(**options), lambda: None)
        raw(look.node_url, "DEL", "name")


def threads(look: Look) -> None:
    def elsewhere(*calls: Callable[[], object]) -> None:
        thread = threading.Thread(target=lambda: [look.see(call) for call in calls])
        thread.start()
        thread.join()

    lock = look.lock(timeout=20)
    take = functools.partial(lock.acquire, blocking=False)
    elsewhere(lock.release, lock.owned, lock.reacquire, lambda: lock.extend(1), lock.locked)
    elsewhere(take, lock.owned, lock.owned)
    look.see(lock.owned)
    look.see(lock.release)
    raw(look.node_url, "DEL", "name")
    lock = look.lock(timeout=20, thread_local=False)
    take = functools.partial(lock.acquire, blocking=False)
    elsewhere(take, lock.owned)
    look.see(lock.owned)
    look.see(lock.release)
    elsewhere(lock.release)


SCENARIOS = (
    attributes, one_hold, timeouts, changed_attributes, tokens, names, extends, reacquires, lost_holds,
    other_types, blocks, threads,
)  # fmt: skip


def _compare(scenario: Callable[[Look], None], ours: Make, clients: Callable[[], redis.Redis]) -> Look:
    mine, reference = Look(ours, clients()), Look(redis.lock.Lock, clients())
    for look in (reference, mine):
        raw(look.node_url, "FLUSHALL")
        scenario(look)
    assert mine.seen == reference.seen
    assert reference.seen
    return mine


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_reports_what_redis_py_reports(
    scenario: Callable[[Look], None], ours: Make, connect: Connect, node: LocalNode
) -> None:
    _compare(scenario, ours, lambda: connect(node))


@pytest.mark.parametrize(
    ("options", "scenario"),
    [
        (options, scenario)
        for options in ({"decode_responses": True}, {"encoding": "latin-1"}, {"protocol": 2}, {"protocol": 3})
        for scenario in (one_hold, tokens, names, lost_holds)
        # Where it decodes, redis-py does not know an empty token as its own; that is not worth copying.
        if not (scenario is tokens and "decode_responses" in options)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_it_follows_the_clients_settings(
    scenario: Callable[[Look], None],
    options: dict[str, Any],
    ours: Make,
    connect: Connect,
    valkey: LocalNode,
) -> None:
    if options.get("encoding") and scenario is names:
        raw(valkey, "SET", "ü".encode("latin-1"), "taken")
        assert not ours(connect(valkey, **options), "ü").acquire(blocking=False)
    _compare(scenario, ours, lambda: connect(valkey, **options))


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        if len(self.sleeps) > 50:
            raise RuntimeError("it would wait for ever")


@pytest.mark.parametrize("in_constructor", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"sleep": 0.1, "blocking_timeout": 0.25},
        {"sleep": 0.05, "blocking_timeout": 0.4},
        {"sleep": 0.125, "blocking_timeout": 0.25},
        {"sleep": 60, "blocking_timeout": 1},
        {"sleep": 0.1, "blocking_timeout": 0},
        {"sleep": 0.1, "blocking_timeout": -1},
        {"sleep": 0, "blocking_timeout": 0.5},
        {"blocking": False, "blocking_timeout": 5},
        {"blocking": False},
        {"blocking_timeout": 0.35},
        {},
    ],
    ids=str,
)
def test_it_waits_as_redis_py_does(
    options: dict[str, Any],
    in_constructor: bool,
    ours: Make,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.set("name", "taken")
    told = []
    for make, module in ((redis.lock.Lock, redis.lock), (ours, redis_py)):
        fake = FakeTime()
        monkeypatch.setattr(module, "mod_time", fake)
        lock = make(client, "name", **(options if in_constructor else {}))
        result: object
        try:
            result = lock.acquire(**({} if in_constructor else options))
        except RuntimeError as problem:
            result = str(problem)
        told.append((result, fake.sleeps, fake.now))
    assert told[0] == told[1]


def test_a_waiting_acquire_gets_a_lock_that_becomes_free(ours: Make, client: redis.Redis) -> None:
    holder, waiter = ours(client, "name"), ours(client, "name", sleep=0.01)
    assert holder.acquire()
    waiting = threading.Event()
    got: list[bool] = []

    class Waiter(redis_py.Lock):
        def do_acquire(self, token: bytes) -> bool:
            done = super().do_acquire(token)
            waiting.set()
            return done

    waiter.__class__ = Waiter
    thread = threading.Thread(target=lambda: got.append(waiter.acquire()))
    thread.start()
    assert waiting.wait(5 * SLACK)
    holder.release()
    thread.join(5 * SLACK)
    assert got == [True]


def test_logging(ours: Make, client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for make in (redis.lock.Lock, ours):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, LOGGER):
            with make(client, "name", raise_on_release_error=False):
                client.delete("name")
        told.append([(one.name, one.levelno, one.getMessage()) for one in caplog.records])
    assert told[0] == told[1]
    assert told[0]


# ---- beside and instead of redis-py's ----


def test_both_exclude_each_other(ours: Make, client: redis.Redis) -> None:
    mine, reference = ours(client, "name", timeout=9), redis.lock.Lock(client, "name", timeout=9)
    for holder, other in ((mine, reference), (reference, mine)):
        assert holder.acquire(blocking=False)
        assert not other.acquire(blocking=False)
        assert other.locked()
        assert not other.owned()
        other.local.token = holder.local.token  # the same hold, in the hands of the other
        assert other.owned()
        assert other.extend(9)
        assert other.reacquire()
        other.release()
        assert client.get("name") is None
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            holder.release()


def test_a_client_makes_it(kind: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDBOLT_ENGINE", kind)
    lock = client.lock("name", timeout=5, sleep=0.2, blocking=False, lock_class=compat.redis_py.Lock)
    assert isinstance(lock, redis_py.Lock)
    assert (lock.timeout, lock.sleep, lock.blocking) == (5, 0.2, False)
    with lock:
        assert client.get("name") == lock.local.token
    assert client.get("name") is None


def test_a_client_makes_a_lock_of_redbolt(
    kind: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDBOLT_ENGINE", kind)
    lock: Any = client.lock("name", blocking_timeout=0, lock_class=redbolt.Lock)
    assert isinstance(lock, redbolt.Lock)
    with lock:
        assert lock.held
        assert client.pttl("name") > 0
    assert client.get("name") is None


@pytest.mark.parametrize("lock_class", [redis_py.Lock, redbolt.Lock])
def test_the_call_of_valkey_py(lock_class: Any, client: redis.Redis) -> None:
    """Its ``lock()`` knows no ``raise_on_release_error``."""
    lock = lock_class(
        client,
        "name",
        timeout=None,
        sleep=0.1,
        blocking=True,
        blocking_timeout=None,
        thread_local=True,
    )
    with lock:
        assert client.exists("name")
    assert not client.exists("name")


@pytest.mark.parametrize("what", ["redis://localhost", redbolt.Node(), None, object()], ids=str)
def test_it_needs_a_client(what: Any) -> None:
    with pytest.raises(TypeError, match=r"redis\.Redis"):
        redis_py.Lock(what, "name")


def test_a_client_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="Pipeline"):
        redis_py.Lock(redis.Redis().pipeline(), "name")


def test_a_client_of_a_derived_class(kind: str, valkey: LocalNode) -> None:
    class Special(redis.Redis):
        pass

    with Special(valkey.host, valkey.port) as special:
        with redis_py.Lock(special, "name", timeout=5, engine=kind):
            assert special.exists("name")


# ---- override points ----


def test_overridden_steps(kind: str, client: redis.Redis) -> None:
    class Named(redis_py.Lock):
        calls: list[tuple[Any, ...]]

        def do_acquire(self, token: bytes) -> bool:
            self.calls = [("acquire", token)]
            return bool(self.redis.set(f"own:{self.name}", token, nx=True))

        def do_release(self, expected_token: bytes) -> None:
            self.calls.append(("release", expected_token, self.local.token))
            self.redis.delete(f"own:{self.name}")

        def do_extend(self, additional_time: float, replace_ttl: bool) -> Any:
            self.calls.append(("extend", additional_time, replace_ttl))
            return True

        def do_reacquire(self) -> Any:
            self.calls.append(("reacquire",))
            return True

    lock = Named(client, "name", timeout=3, engine=kind)
    assert lock.acquire(token="t")
    assert client.get("own:name") == b"t"
    assert not client.exists("name")
    assert lock.extend(2, True)
    assert lock.reacquire()
    lock.release()
    assert lock.calls == [("acquire", b"t"), ("extend", 2, True), ("reacquire",), ("release", b"t", None)]
    assert not client.exists("own:name")


SPY = "redis.call('rpush', 'spy', KEYS[1], unpack(ARGV)) return %d"


def _spied(client: redis.Redis) -> Any:
    return client.lrange("spy", 0, -1)


@pytest.mark.parametrize("base_first", [True, False])
def test_scripts_of_a_subclass_run_by_the_client(base_first: bool, kind: str, client: redis.Redis) -> None:
    class Base(redis_py.Lock):
        pass

    class Scripted(Base):
        LUA_RELEASE_SCRIPT = SPY % 1
        LUA_EXTEND_SCRIPT = SPY % 1
        LUA_REACQUIRE_SCRIPT = SPY % 1

    if base_first:  # its scripts are inherited, then
        Base(client, "name")
    lock = Scripted(client, "name", timeout=9, engine=kind)
    assert lock.acquire(token="t")
    assert lock.extend(1.5)
    assert lock.extend(1.5, replace_ttl=True)
    assert lock.reacquire()
    lock.release()
    assert _spied(client) == [
        *(b"name", b"t", b"1500", b"0"),
        *(b"name", b"t", b"1500", b"1"),
        *(b"name", b"t", b"9000"),
        *(b"name", b"t"),
    ]
    assert client.exists("name")  # its script deletes nothing
    plain = Base(client, "other", timeout=9, engine=kind)
    with plain:
        plain.extend(1)
    assert len(_spied(client)) == 13


def test_a_script_that_says_no(kind: str, client: redis.Redis) -> None:
    class Denied(redis_py.Lock):
        LUA_RELEASE_SCRIPT = LUA_EXTEND_SCRIPT = LUA_REACQUIRE_SCRIPT = SPY % 0

    lock = Denied(client, "name", timeout=9, engine=kind)
    lock.acquire()
    for call in (lambda: lock.extend(1), lock.reacquire, lock.release):
        with pytest.raises(redis.exceptions.LockNotOwnedError) as caught:
            call()
        assert caught.value.lock_name == "name"


def test_registered_scripts_of_ones_own(kind: str, client: redis.Redis) -> None:
    calls: list[dict[str, Any]] = []

    def script(**call: Any) -> int:
        calls.append(call)
        return 1

    class Own(redis_py.Lock):
        lua_release = lua_extend = lua_reacquire = staticmethod(script)

    lock = Own(client, "name", timeout=9, engine=kind)
    lock.acquire(token="t")
    lock.extend(1)
    lock.reacquire()
    lock.release()
    assert calls == [
        {"keys": ["name"], "args": [b"t", 1000, "0"], "client": client},
        {"keys": ["name"], "args": [b"t", 9000], "client": client},
        {"keys": ["name"], "args": [b"t"], "client": client},
    ]


def test_scripts_are_registered_once_per_class(kind: str, client: redis.Redis) -> None:
    class Mine(redis_py.Lock):
        lua_release: Any = None
        lua_extend: Any = None
        lua_reacquire: Any = None
        registered = 0

        def register_scripts(self) -> None:
            Mine.registered += 1
            super().register_scripts()

    first = Mine(client, "name", engine=kind)
    scripts: tuple[Any, ...] = (first.lua_release, first.lua_extend, first.lua_reacquire)
    second = Mine(client, "name", engine=kind)
    assert Mine.registered == 2
    assert (Mine.lua_release, Mine.lua_extend, Mine.lua_reacquire) == scripts
    assert [one.script for one in scripts] == [
        Mine.LUA_RELEASE_SCRIPT,
        Mine.LUA_EXTEND_SCRIPT,
        Mine.LUA_REACQUIRE_SCRIPT,
    ]
    assert second.lua_release is first.lua_release


def test_its_script_texts_work_as_scripts(ours: Make, client: redis.Redis) -> None:
    """Whoever runs the texts by hand, as subclasses do, gets what the methods do."""
    lock = ours(client, "name", timeout=20)
    lock.acquire(token="t")
    for script, arguments, result in (
        (lock.lua_extend, ["foreign", 1000, "1"], 0),
        (lock.lua_extend, ["t", 50_000, "1"], 1),
        (lock.lua_extend, ["t", 50_000, "0"], 1),
        (lock.lua_reacquire, ["foreign", 1000], 0),
        (lock.lua_reacquire, ["t", 90_000], 1),
        (lock.lua_release, ["foreign"], 0),
        (lock.lua_release, ["t"], 1),
        (lock.lua_release, ["t"], 0),
    ):
        assert script(keys=["name"], args=arguments, client=client) == result
        if result and script is lock.lua_reacquire:
            assert 80_000 < client.pttl("name") <= 90_000


# ---- servers and networks that fail ----


def _errors(make: Make, client: redis.Redis) -> list[tuple[type, str]]:
    """What each call raises where the server fails."""
    lock = make(client, "name", timeout=9, thread_local=False)
    told = []

    def holding(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            lock.local.token = b"t"
            return call()

        return run

    calls = (
        functools.partial(lock.acquire, blocking=False), lock.locked, lock.owned,
        holding(lambda: lock.extend(1)), holding(lock.reacquire), holding(lock.release), holding(lock.owned),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(redis.exceptions.RedisError) as caught:
            call()
        told.append((caught.type, str(caught.value).partition(" script: ")[0]))
        client.connection_pool.disconnect()
    assert lock.local.token == b"t"  # of the last one
    return told


def test_no_server_there(ours: Make, connect: Connect, nodes: LocalNodes) -> None:
    nodes[0].kill()
    told = _errors(ours, connect(nodes[0]))
    assert told == _errors(redis.lock.Lock, connect(nodes[0]))
    assert {kind for kind, _ in told} == {redis.exceptions.ConnectionError}


def test_a_silent_server(ours: Make, connect: Connect, valkey: LocalNode) -> None:
    with paused(valkey):
        told = _errors(ours, connect(valkey, socket_timeout=LIMIT))
    assert {kind for kind, _ in told} == {redis.exceptions.TimeoutError}


def _taken(lock: Any) -> bool:
    try:
        return bool(lock.acquire(blocking=False))
    except redis.exceptions.TimeoutError:  # it is left out until its late answers were read
        return False


def test_a_server_that_falls_silent_at_work(ours: Make, connect: Connect, valkey: LocalNode) -> None:
    """Its message is redis-py's; nothing is left when it wakes, though the key would have no end."""
    told = []
    for make in (redis.lock.Lock, ours):
        client = connect(valkey, socket_timeout=LIMIT)
        lock = make(client, "name")
        lock.acquire()
        lock.release()
        with paused(valkey):
            with within(LIMIT + 0.15 * SLACK):
                with pytest.raises(redis.exceptions.TimeoutError) as caught:
                    lock.acquire(blocking_timeout=1)
        told.append(str(caught.value))
        assert lock.local.token is None
        if make is ours:
            eventually(lambda: not raw(valkey, "EXISTS", "name"), 5, "the try was taken back")
            eventually(functools.partial(_taken, lock), 5, "it can be taken again")
            lock.release()
        raw(valkey, "DEL", "name")
    assert told[0] == told[1]


@pytest.mark.parametrize("password", ["", ":wrong@", "user:wrong@"])
def test_the_password_is_wrong(password: str, ours: Make, connect: Connect) -> None:
    with LocalNodes(1, password="secret") as (node,):
        client = connect(f"redis://{password}{node.host}:{node.port}", protocol=2)
        told = _errors(ours, client)
        assert told == _errors(redis.lock.Lock, client)
        redbolt.close()
    assert {kind for kind, _ in told} == {redis.exceptions.AuthenticationError}


def test_no_permission(ours: Make, connect: Connect, valkey: LocalNode) -> None:
    raw(valkey, "ACL", "SETUSER", "reader", "on", "nopass", "~*", "+ping", "+client", "+hello")
    try:
        url = f"redis://reader:any@{valkey.host}:{valkey.port}"
        told, reference = _errors(ours, connect(url)), _errors(redis.lock.Lock, connect(url))
        redbolt.close()
    finally:
        raw(valkey, "ACL", "DELUSER", "reader")
    assert told[0] == reference[0]  # the others are other commands
    assert {kind for kind, _ in told} == {kind for kind, _ in reference}
    assert {kind for kind, _ in told} == {redis.exceptions.NoPermissionError}


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "CLUSTERDOWN The cluster is down",
        "MOVED 3999 127.0.0.1:6381",
        "NOREPLICAS Not enough good replicas to write.",
        "ERR something of its own",
        "BUSY Valkey is busy running a script.",
    ],
)
def test_errors_of_the_server(text: str, ours: Make, connect: Connect) -> None:
    def answer(argv: Any) -> bytes:
        quiet = argv[0].upper() in (b"CLIENT", b"HELLO", b"PING")
        return OK if quiet else error(text)

    with ScriptedNode(answer=answer) as server:
        told = []
        for make in (redis.lock.Lock, ours):
            client = connect(server, protocol=2)
            with pytest.raises(redis.exceptions.RedisError) as caught:
                make(client, "name").acquire(blocking=False)
            told.append((caught.type, str(caught.value)))
            client.close()
        redbolt.close()
    assert told[0] == told[1]


@pytest.mark.parametrize("then", ["silence", "reset"])
def test_a_lost_reply_leaves_no_key_without_end(
    then: Any, ours: Make, connect: Connect, valkey: LocalNode
) -> None:
    with FaultProxy(valkey) as proxy:
        client = connect(proxy, socket_timeout=LIMIT)
        lock = ours(client, "name")
        with lock:
            pass
        proxy.drop_reply("SET", then)
        with pytest.raises((redis.exceptions.TimeoutError, redis.exceptions.ConnectionError)):
            lock.acquire()
        assert proxy.replies_lost == 1
        assert lock.local.token is None
        proxy.heal()
        eventually(lambda: not raw(valkey, "EXISTS", "name"), 5, "the try was taken back")
        redbolt.close()


def test_a_reset_is_told_as_redis_py_tells_it(ours: Make, connect: Connect, valkey: LocalNode) -> None:
    with FaultProxy(valkey) as proxy:
        told = []
        for make in (redis.lock.Lock, ours):
            lock = make(connect(proxy), "name")
            with lock:
                pass
            proxy.drop_reply("SET", "reset")
            with pytest.raises(redis.exceptions.ConnectionError) as caught:
                lock.acquire()
            told.append(str(caught.value))
            proxy.heal()
            raw(valkey, "DEL", "name")
        assert told[0] == told[1]
        redbolt.close()


def test_an_own_token_is_set_again_only_after_its_late_answers(
    ours: Make, connect: Connect, valkey: LocalNode
) -> None:
    lock = ours(connect(valkey, socket_timeout=LIMIT), "name")
    with lock:
        pass
    with paused(valkey):
        with pytest.raises(redis.exceptions.TimeoutError):
            lock.acquire(token="own")
    assert lock.acquire(token="own")
    assert lock.owned()
    lock.release()


class Counting(NoBackoff):
    """A back-off with a state."""

    computed = 0

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def compute(self, failures: int) -> float:
        Counting.computed += 1
        self.failures = failures
        return 0.0


def test_retries_are_those_of_the_client(
    ours: Make, connect: Connect, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes[0].kill()
    backoff = Counting()
    monkeypatch.setattr(Counting, "computed", 0)
    with pytest.raises(redis.exceptions.ConnectionError):
        ours(connect(nodes[0], retry=Retry(backoff, 3)), "name").acquire()
    assert Counting.computed == 3
    assert backoff.failures == 0  # the client's own is for its own


@pytest.mark.parametrize("call", ["acquire", "locked"])
def test_errors_of_the_server_are_not_repeated(
    call: str, ours: Make, connect: Connect, valkey: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(valkey, retry=Retry(Counting(), 3))
    client.lpush("name", "element")
    monkeypatch.setattr(Counting, "computed", 0)
    with pytest.raises(redis.exceptions.ResponseError):
        getattr(ours(client, "name", timeout=-1), call)()
    assert Counting.computed == 0


@pytest.mark.parametrize("token", [None, "own"])
@pytest.mark.parametrize("then", ["silence", "reset"])
def test_a_lost_reply_is_mended_by_the_clients_retries(
    then: Any, token: str | None, ours: Make, connect: Connect, valkey: LocalNode
) -> None:
    """redis-py would find its own key, and wait for itself."""
    with FaultProxy(valkey) as proxy:
        client = connect(proxy, socket_timeout=LIMIT, retry=Retry(NoBackoff(), 100))
        lock = ours(client, "name", sleep=0.01)
        with lock:
            pass
        proxy.drop_reply("SET", then)
        thread = threading.Timer(2 * LIMIT, proxy.heal)
        thread.start()
        assert lock.acquire(blocking_timeout=5 * SLACK, token=token)
        thread.join()
        assert proxy.replies_lost == 1
        assert raw(valkey, "GET", "name") == lock.local.token
        lock.release()
        assert not raw(valkey, "EXISTS", "name")
        redbolt.close()


def test_a_release_whose_reply_is_lost(ours: Make, connect: Connect, valkey: LocalNode) -> None:
    with FaultProxy(valkey) as proxy:
        lock = ours(connect(proxy, socket_timeout=LIMIT), "name")
        lock.acquire()
        proxy.drop_reply()
        with pytest.raises(redis.exceptions.TimeoutError):
            lock.release()
        assert lock.local.token is None
        with pytest.raises(redis.exceptions.LockError, match="not owned or is already unlocked"):
            lock.release()
        proxy.heal()
        assert not raw(valkey, "EXISTS", "name")
        redbolt.close()


def test_a_server_that_comes_back_is_found_by_the_clients_retries(
    ours: Make, connect: Connect, nodes: LocalNodes
) -> None:
    lock = ours(connect(nodes[0], retry=Retry(NoBackoff(), -1)), "name")
    with lock:
        pass
    nodes[0].kill()
    starter = threading.Timer(0.1, nodes[0].start, kwargs={"empty": True})
    starter.start()
    assert lock.acquire()
    starter.join()
    lock.release()


def test_a_client_without_time_limit(ours: Make, connect: Connect, valkey: LocalNode) -> None:
    """It waits where `redbolt.Lock` would long have given up."""
    lock = ours(connect(valkey, socket_timeout=None), "name")
    with lock:
        pass
    valkey.pause()
    waker = threading.Timer(1.2, valkey.resume)
    waker.start()
    assert lock.acquire()
    waker.join()
    lock.release()


class Interrupted(BaseException):
    pass


def test_an_interrupt_after_the_grant_leaves_no_key(kind: str, client: redis.Redis) -> None:
    class Late(redis_py.Lock):
        def do_acquire(self, token: bytes) -> bool:
            assert super().do_acquire(token)
            raise Interrupted

    lock = Late(client, "name", engine=kind)
    with pytest.raises(Interrupted):
        lock.acquire()
    assert lock.local.token is None
    eventually(lambda: not client.exists("name"), 5, "the key is gone")


def test_an_interrupt_spares_an_earlier_hold_with_the_same_token(kind: str, client: redis.Redis) -> None:
    holder = redis_py.Lock(client, "name", engine=kind)
    assert holder.acquire(token="own")

    class Late(redis_py.Lock):
        def do_acquire(self, token: bytes) -> bool:
            assert not super().do_acquire(token)
            raise Interrupted

    with pytest.raises(Interrupted):
        Late(client, "name", engine=kind).acquire(token="own")
    client.set("marker", "token")
    holder._engine.discard(b"marker", b"token")  # goes behind whatever the interrupt has queued
    eventually(lambda: not client.exists("marker"), 5, "the queue was worked off")
    assert holder.owned()
    holder.release()


@pytest.mark.parametrize("call", ["extend", "release"])
def test_another_thread_waits_for_the_answer_of_the_same_token(
    call: str, kind: str, ours: Make, connect: Connect, valkey: LocalNode
) -> None:
    """A write of the same token on another thread's connection goes first; the outcome is told rightly."""
    lock = ours(connect(valkey), "name", timeout=20, thread_local=False)
    lock.acquire()
    lock.extend(0)  # from now on the server knows the script
    token = lock.local.token
    with paused(valkey):
        problems: list[BaseException] = []

        def extend() -> None:
            try:
                lock.do_extend(5, False)
            except BaseException as problem:
                problems.append(problem)

        first = threading.Thread(target=extend)
        first.start()
        eventually(lambda: lock._engine.pending(token), 5, "the extend is under way")
        second: list[object] = []

        def other() -> None:
            try:
                second.append(lock.extend(5) if call == "extend" else lock.release())
            except BaseException as problem:
                second.append(problem)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
    thread.join(10 * SLACK)
    first.join(10 * SLACK)
    assert problems == []
    assert second == [True if call == "extend" else None]
    if call == "extend":
        assert 20_000 < raw(valkey, "PTTL", "name") <= 30_000
    else:
        assert not raw(valkey, "EXISTS", "name")


def test_local_is_shared_or_not() -> None:
    client = redis.Redis()
    assert isinstance(redis_py.Lock(client, "name").local, threading.local)
    assert isinstance(redis_py.Lock(client, "name", thread_local=False).local, SimpleNamespace)
