"""A client's settings: each one is honoured, on which engine and why, and none is shown that is secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.connection
import valkey
import valkey.connection

import redbolt
from redbolt import Lock, Node, NodesUnavailable, RedLock, SetupError
from redbolt.compat.redis_py import Lock as RedisPyLock
from redbolt.local import LocalNode, LocalNodes
from redbolt.node import as_node
from tests.kit.clients import eventually, raw
from tests.kit.scripted import ScriptedNode

CLIENTS: tuple[Any, ...] = (redis.Redis, valkey.Valkey)
SECRET = "sésame"


@pytest.fixture(params=CLIENTS, ids=["redis-py", "valkey-py"])
def client_class(request: pytest.FixtureRequest) -> Any:
    """Each library's client in turn."""
    return request.param


@pytest.fixture
def ann(node: LocalNode) -> LocalNode:
    """A server with a user ann."""
    raw(node, "ACL", "SETUSER", "ann", "on", "resetpass", f">{SECRET}", "~*", "+@all")
    return node


def clients(node: LocalNode) -> list[dict[str, str]]:
    text = raw(node, "CLIENT", "LIST").decode()
    return [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines()]


def cycle(lock: Lock) -> None:
    with lock:
        assert lock.owned()
        lock.extend(1)
    assert not lock.locked()


def guard(client: Any) -> Any:
    """A client whose pool must not be used."""

    def used(*args: object, **kwargs: object) -> None:
        raise AssertionError("the client's own pool was used")

    for name in ("get_connection", "make_connection", "release"):
        setattr(client.connection_pool, name, used)
    return client


# ---- settings that both engines honour ----


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_the_server_sees_each_setting(
    kind: str, ann: LocalNode, client_class: Any, protocol: int, where: str
) -> None:
    address = {"host": ann.host, "port": ann.port} if where == "tcp" else {"unix_socket_path": ann.unix_path}
    settings: dict[str, Any] = {
        "username": "ann",
        "password": SECRET,
        "db": 3,
        "client_name": "me",
        "protocol": protocol,
    }
    client = guard(client_class(**address, **settings, decode_responses=protocol == 3))
    lock = Lock(client, "name", engine=kind)
    with lock:
        mine = [one for one in clients(ann) if one["name"] == "me"]
        seen = [(one["db"], one["user"], one.get("resp", str(protocol))) for one in mine]
        assert seen == [("3", "ann", str(protocol))]
        assert (ann.unix_path in mine[0]["addr"] + mine[0]["laddr"]) == (where == "unix")
        assert redbolt.engine(lock).name == kind
    cycle(lock)
    pool = client.connection_pool
    assert not getattr(pool, "_created_connections", 0)
    assert not pool._in_use_connections
    assert not pool._available_connections


@pytest.mark.parametrize("pool_class", ["ConnectionPool", "BlockingConnectionPool", "own"])
def test_pools(kind: str, node: LocalNode, client_class: Any, pool_class: str) -> None:
    module = sys.modules[f"{client_class.__module__.split('.')[0]}.connection"]
    base = module.ConnectionPool if pool_class == "own" else getattr(module, pool_class)

    class Own(base):  # type: ignore[valid-type, misc]
        pass

    pool = (Own if pool_class == "own" else base)(host=node.host, port=node.port, db=2)

    class OwnClient(client_class):  # type: ignore[misc]
        pass

    for client in (client_class(connection_pool=pool), OwnClient(connection_pool=pool)):
        cycle(Lock(guard(client), "name", engine=kind))
        assert Node.from_client(client) == Node(node.host, node.port, db=2)


def test_bytes_and_numbers_as_redis_py_takes_them(client_class: Any) -> None:
    client = client_class("example.org", "7000", "3", SECRET.encode(), username=b"ann", socket_timeout=0.3)
    node = Node.from_client(client)
    assert (node.address, node.db, node.username, node.password) == ("example.org:7000", 3, "ann", SECRET)
    assert node.socket_timeout == 0.3
    path = Path("/run/v.sock")
    assert Node.from_client(client_class(unix_socket_path=path)).path == "/run/v.sock"
    empty = Node.from_client(client_class("example.org", password="", username=""))
    assert (empty.password, empty.username) == (None, None)


def test_a_client_and_a_url_that_mean_the_same_share_connections() -> None:
    for client in (redis.Redis("example.org"), redis.Redis("example.org", health_check_interval=9)):
        assert Node.from_client(client) == Node.from_url("redis://example.org")


def test_a_short_connect_timeout_is_kept(client_class: Any) -> None:
    assert Node.from_client(client_class(socket_connect_timeout=0.2)).connect_timeout == 0.2
    assert Node.from_client(client_class(socket_connect_timeout=7)).connect_timeout is None


# What was given, and what comes of it: redis/redis-py 498 is about arguments that were ignored.
SEEN: dict[str, tuple[dict[str, Any], Callable[[Node], object], object]] = {
    "host": ({"host": "example.org"}, lambda node: node.host, "example.org"),
    "port": ({"port": 7000}, lambda node: node.port, 7000),
    "path": ({"unix_socket_path": "/run/v"}, lambda node: node.path, "/run/v"),
    "db": ({"db": 3}, lambda node: node.handshake()[-1], (b"SELECT", b"3")),
    "username": ({"username": "ann"}, lambda node: node.handshake()[-1], (b"AUTH", b"ann", b"")),
    "password": ({"password": "p"}, lambda node: node.handshake()[-1], (b"AUTH", b"p")),
    "client_name": ({"client_name": "me"}, lambda node: node.handshake()[-1], (b"CLIENT", b"SETNAME", b"me")),
    "protocol": ({"protocol": 3}, lambda node: node.handshake()[0], (b"HELLO", b"3")),
    "socket_timeout": ({"socket_timeout": 0.2}, lambda node: Lock(node, "x")._limit_ns, 200_000_000),
    "connect timeout": ({"socket_connect_timeout": 0.1}, lambda node: node.connect_timeout, 0.1),
    "ssl": ({"ssl": True}, lambda node: redbolt.engine(Lock(node, "x")).reason[:3], "TLS"),
}


@pytest.mark.parametrize("setting", SEEN)
def test_no_setting_of_a_client_is_ignored(client_class: Any, setting: str) -> None:
    given, seen, expected = SEEN[setting]
    assert seen(Node.from_client(client_class(**given))) == expected


def test_valkey_py_is_not_imported() -> None:
    code = """
import sys, redis, redbolt
lock = redbolt.Lock(redis.Redis(port=1), "name")
try:
    redbolt.Lock(object(), "name")
except TypeError:
    print("valkey" in sys.modules, "ssl" in sys.modules and "redbolt._pure.tls" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["False", "False"]


# ---- settings that only the client's own connection class honours ----


class Own(redis.connection.Connection):
    """A connection class of somebody's own: it introduces itself."""

    def on_connect(self) -> None:
        super().on_connect()
        self.send_command("CLIENT", "SETNAME", f"own-{self.label()}")
        self.read_response()

    def on_connect_check_health(self, check_health: bool = True) -> None:  # what newer redis-py calls
        super().on_connect_check_health(check_health=check_health)
        self.send_command("CLIENT", "SETNAME", f"own-{self.label()}")
        self.read_response()

    def label(self) -> str:
        return "redis"


class OwnValkey(valkey.connection.Connection):
    def on_connect(self) -> None:
        super().on_connect()
        self.send_command("CLIENT", "SETNAME", "own-valkey")
        self.read_response()


class Rotating(redis.CredentialProvider):
    """A password that changes."""

    def __init__(self, password: str) -> None:
        self.password = password
        self.asked = 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        return "ann", self.password


def own_client(node: Any, connection_class: Any = Own, **settings: Any) -> redis.Redis:
    pool = redis.ConnectionPool(connection_class=connection_class, host=node.host, port=node.port, **settings)
    return redis.Redis(connection_pool=pool)


@pytest.mark.parametrize("protocol", [2, 3])
def test_an_own_connection_class(node: LocalNode, protocol: int) -> None:
    lock = Lock(guard(own_client(node, db=4, protocol=protocol)), "name")
    reason = "the client's connection class Own is honoured by the pure engine only"
    assert redbolt.engine(lock) == ("pure", reason)
    with lock:
        mine = [one for one in clients(node) if one["name"] == "own-redis"]
        assert [(one["db"], one.get("resp", str(protocol))) for one in mine] == [("4", str(protocol))]
    cycle(lock)


def test_an_own_connection_class_of_valkey_py(node: LocalNode) -> None:
    pool = valkey.ConnectionPool(connection_class=OwnValkey, host=node.host, port=node.port)
    with Lock(guard(valkey.Valkey(connection_pool=pool)), "name") as lock:
        assert "OwnValkey" in redbolt.engine(lock).reason
        assert [one["name"] for one in clients(node) if one["name"]] == ["own-valkey"]


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_credential_provider_is_asked_for_each_connection(ann: LocalNode, protocol: int) -> None:
    provider = Rotating(SECRET)
    client = guard(redis.Redis(ann.host, ann.port, credential_provider=provider, protocol=protocol))
    lock = Lock(client, "name")
    assert "a credential provider" in redbolt.engine(lock).reason
    cycle(lock)
    assert provider.asked == 1
    raw(ann, "ACL", "SETUSER", "ann", "resetpass", ">changed")
    provider.password = "changed"
    raw(ann, "CLIENT", "KILL", "USER", "ann")
    eventually(lambda: lock.acquire(blocking_timeout=2))
    lock.release()
    assert provider.asked >= 2
    provider.password = "wrong-again"
    raw(ann, "CLIENT", "KILL", "USER", "ann")
    with pytest.raises(SetupError, match="AuthenticationError") as caught:
        lock.acquire(blocking_timeout=5)
    assert "wrong-again" not in str(caught.value)


def test_connect_functions(node: LocalNode, client_class: Any) -> None:
    def introduce(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("CLIENT", "SETNAME", "by-function")
        connection.read_response()

    library = client_class.__module__.split(".")[0]
    option = f"{library}_connect_func"
    client = guard(client_class(node.host, node.port, **{option: introduce}))
    with Lock(client, "name") as lock:
        assert redbolt.engine(lock).reason == f"the client's {option} is honoured by the pure engine only"
        assert [one["name"] for one in clients(node) if one["name"]] == ["by-function"]


def test_a_redlock_of_plain_and_own_connections(valkeys: LocalNodes) -> None:
    lock = RedLock([valkeys[0].url, own_client(valkeys[1]), valkeys[2].unix_url], "name", node_timeout=2)
    assert redbolt.engine(lock).name == "pure"
    cycle(lock)


# ---- which engine, and why ----


def demanding() -> list[tuple[str, Any]]:
    pool = redis.ConnectionPool(connection_class=Own)
    return [
        ("TLS", redis.Redis(ssl=True)),
        ("TLS", valkey.Valkey(ssl=True)),
        ("TLS", "rediss://example.org"),
        ("connection class Own", redis.Redis(connection_pool=pool)),
        ("a credential provider", redis.Redis(credential_provider=Rotating(SECRET))),
        ("redis_connect_func", redis.Redis(redis_connect_func=print)),
        ("socket_type", redis.Redis(connection_pool=redis.ConnectionPool(socket_type=7))),
    ]


@pytest.mark.parametrize(("why", "client"), demanding())
def test_a_forced_native_engine_refuses(why: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = redbolt.engine(Lock(client, "name"))
    assert choice.name == "pure"
    assert choice.reason.endswith(f"{why} is honoured by the pure engine only")
    assert redbolt.engine(Lock(client, "name", engine="pure")) == ("pure", "forced by engine=")
    with pytest.raises(ValueError, match=f"forced by engine=, but .*{why}"):
        Lock(client, "name", engine="native")
    with pytest.raises(ValueError, match=f"forced by engine=, but .*{why}"):
        RedLock(["redis://127.0.0.1:1", client], "name", engine="native")
    monkeypatch.setenv("REDBOLT_ENGINE", "native")
    with pytest.raises(ValueError, match=f"forced by REDBOLT_ENGINE, but .*{why}"):
        Lock(client, "name")


def test_a_refusal_sends_nothing() -> None:
    with ScriptedNode() as server:
        with pytest.raises(ValueError, match="native"):
            Lock(own_client(server), "name", engine="native")
        assert not server.peers


def test_the_engine_of_a_lock(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock("redis://127.0.0.1:1", "name", engine=kind)
    assert redbolt.engine(lock) == (kind, "forced by engine=")
    monkeypatch.setenv("REDBOLT_ENGINE", kind)
    by_environment = Lock("redis://127.0.0.1:1", "name")
    monkeypatch.delenv("REDBOLT_ENGINE")
    assert redbolt.engine(by_environment) == (kind, "forced by REDBOLT_ENGINE")  # as it was when it was made
    assert redbolt.engine(kind) == redbolt.engine(kind=kind) == (kind, "forced by engine=")
    for other in (
        redbolt.ReentrantLock(Node(port=1), "name", engine=kind),
        redbolt.Locker(Node(port=1), engine=kind),
    ):
        assert redbolt.engine(other) == (kind, "forced by engine=")
    assert redbolt.engine(RedisPyLock(redis.Redis(), "name", engine=kind)).name == kind
    with pytest.raises(TypeError, match="a lock"):
        redbolt.engine(object())  # type: ignore[arg-type]


def test_nobody_listens(kind: str) -> None:
    client = own_client(Node(port=1)) if kind == "pure" else redis.Redis(port=1)
    with pytest.raises(NodesUnavailable, match=os.strerror(111) if kind == "native" else "ConnectionError"):
        Lock(client, "name").acquire(blocking=False)


def test_a_client_is_read_once_and_again_when_its_settings_have_changed() -> None:
    client = redis.Redis(port=7001)
    assert as_node(client) is as_node(client)
    client.connection_pool.connection_kwargs["port"] = 7002
    assert as_node(client) == Node(port=7002, socket_timeout=5)
    client.connection_pool.connection_class = redis.connection.SSLConnection
    assert as_node(client).dialer is not None
    with pytest.raises(TypeError, match="pipeline"):
        as_node(client.pipeline())
