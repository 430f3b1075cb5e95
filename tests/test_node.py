"""Nodes: URLs, plain clients, credentials, databases, unix sockets; and that no password is ever shown."""

from __future__ import annotations

import copy
import pickle
import ssl
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.cluster
import redis.sentinel
import valkey
import valkey.asyncio
import valkey.cluster
import valkey.sentinel

import redbolt
from redbolt import Lock, LockError, Node, RedLock, SetupError
from redbolt.local import LocalNode, LocalNodes
from tests.kit.clients import raw

SECRET = "p@ss:w/rd?&#%é🔑"


@pytest.fixture(scope="module")
def guarded() -> Iterator[LocalNode]:
    """A server with a password, and a user "ann" with the rights that a lock needs, on some keys."""
    with LocalNodes(password=SECRET) as nodes:
        rights = "~ann:* +set +get +del +eval +evalsha +pexpire +exists +getrange +type +select +delifeq"
        raw(nodes[0], "ACL", "SETUSER", "ann", "on", ">hers", "resetkeys", "-@all", *rights.split())
        yield nodes[0]


def cycle(lock: Lock) -> None:
    """Everything that a lock does."""
    with lock:
        assert lock.owned()
        assert lock.locked()
        lock.extend(1)
        lock.reacquire()
    assert not lock.locked()


# ---- URLs ----


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", Node()),
        ("redis://example.org", Node("example.org")),
        ("redis://example.org:7000", Node("example.org", 7000)),
        ("redis://example.org/3", Node("example.org", db=3)),
        ("redis://example.org?db=3", Node("example.org", db=3)),
        ("redis://[::1]:7000", Node("::1", 7000)),
        ("redis://:secret@example.org", Node("example.org", password="secret")),
        ("redis://ann:se%2Fcret@example.org", Node("example.org", username="ann", password="se/cret")),
        (
            "redis://example.org?username=ann&password=hers",
            Node("example.org", username="ann", password="hers"),
        ),
        ("unix:///run/valkey.sock", Node(path="/run/valkey.sock")),
        ("unix:///run/a%20b.sock?db=2", Node(path="/run/a b.sock", db=2)),
        ("unix://ann:hers@/run/v.sock", Node(path="/run/v.sock", username="ann", password="hers")),
        ("redis://example.org?socket_timeout=0.5", Node("example.org")),
        (
            "redis://example.org?protocol=3&health_check_interval=30&decode_responses=True",
            Node("example.org", protocol=3),
        ),
        (
            "redis://example.org?client_name=me&max_connections=5&socket_connect_timeout=1",
            Node("example.org", client_name="me", connect_timeout=1),
        ),
    ],
)
def test_urls(url: str, expected: Node) -> None:
    node = Node.from_url(url)
    assert node == expected
    assert hash(node) == hash(expected)


def test_a_socket_timeout_in_the_url() -> None:
    assert Node.from_url("redis://example.org?socket_timeout=0.5").socket_timeout == 0.5
    assert Node.from_url("redis://example.org").socket_timeout is None


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("rediss://example.org?something=1", "something"),
        ("rediss://example.org?ssl_cert_reqs=some", "Certificate"),
        ("valkeys://example.org", "not the URL"),
        ("http://example.org", "not the URL"),
        ("example.org:6379", "not the URL"),
        ("", "not the URL"),
        ("unix://", "path"),
        ("unix:///" + "x" * 107, "107"),
        ("redis://example.org:65536", "[Pp]ort"),
        ("redis://example.org:port", "[Pp]ort"),
        ("redis://example.org/-1", "db"),
        ("redis://example.org/2147483648", "db"),
        ("redis://example.org?ssl_cert_reqs=none", "ssl_cert_reqs"),
        ("redis://example.org?socket_timeout=0", "socket_timeout"),
        ("redis://example.org?socket_timeout=-1", "socket_timeout"),
        ("redis://example.org?socket_timeout=nan", "socket_timeout"),
        ("redis://example.org?something=1", "something"),
    ],
)
def test_urls_that_name_no_node(url: str, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        Lock(url, "name")
    assert caught.type is ValueError


def test_a_bad_url_does_not_show_its_password() -> None:
    for url in (
        "http://ann:sesame@example.org",
        "redis://ann:sesame@example.org:port",
        "redis://:sesame@example.org?something=1",
        "rediss://:sesame@example.org?something=1",
        "rediss://:sesame@example.org?ssl_cert_reqs=some",
        "redis://example.org?password=sesame&something=1",
        "redis://:sesame@example.org:99999",
    ):
        with pytest.raises(ValueError) as caught:
            Node.from_url(url)
        error: BaseException | None = caught.value
        while error is not None:
            assert "sesame" not in str(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# ---- Node ----


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"host": ""}, ValueError),
        ({"host": None}, ValueError),
        ({"host": b"example.org"}, TypeError),
        ({"port": "6379"}, TypeError),
        ({"port": True}, TypeError),
        ({"port": -1}, ValueError),
        ({"port": 65_536}, ValueError),
        ({"db": "0"}, TypeError),
        ({"db": -1}, ValueError),
        ({"db": 2**31}, ValueError),
        ({"path": ""}, ValueError),
        ({"path": b"/run/v.sock"}, TypeError),
        ({"path": "/run/" + "é" * 60}, ValueError),
        ({"username": 1}, TypeError),
        ({"password": b"secret"}, TypeError),
        ({"socket_timeout": 0}, ValueError),
        ({"socket_timeout": float("inf")}, ValueError),
        ({"socket_timeout": "1"}, TypeError),
        ({"socket_timeout": True}, TypeError),
        ({"connect_timeout": 0}, ValueError),
        ({"connect_timeout": "1"}, TypeError),
        ({"client_name": 1}, TypeError),
        ({"protocol": 4}, ValueError),
        ({"protocol": True}, ValueError),
        ({"dialer": redis.Redis}, TypeError),
    ],
)
def test_a_node_that_is_none(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Node(**arguments)
    assert caught.type is error


def test_a_node_does_not_change() -> None:
    node = Node("example.org")
    with pytest.raises(AttributeError):
        node.port = 1  # type: ignore[misc]
    for twin in (copy.deepcopy(node), pickle.loads(pickle.dumps(node))):
        assert twin == node
        assert hash(twin) == hash(node)


def test_addresses() -> None:
    assert Node("example.org", 7000).address == "example.org:7000"
    assert Node("::1", 7000).address == "[::1]:7000"
    assert Node(path="/run/v.sock").address == "unix:/run/v.sock"


def test_locks_on_equal_nodes_share_their_connections(kind: str, valkey: LocalNode) -> None:
    def connected() -> int:
        return int(raw(valkey, "INFO", "clients")["connected_clients"])

    before = connected()
    for i in range(5):
        with Lock(Node(valkey.host, valkey.port), f"name {i}", engine=kind):
            pass
    assert connected() == before + 1


# ---- real servers ----


def test_a_unix_socket(kind: str, nodes: LocalNodes) -> None:
    with Lock(nodes[0].unix_url, "name", engine=kind):
        assert raw(nodes[0], "EXISTS", "name") == 1
        assert nodes[0].unix_path.encode() in raw(nodes[0].url, "CLIENT", "LIST")
    cycle(Lock(nodes[0].unix_url, "name", engine=kind))
    cycle(RedLock([node.unix_url for node in nodes], "name", engine=kind))
    mixed = [node.unix_url if i % 2 else node.url for i, node in enumerate(nodes)]
    cycle(RedLock(mixed, "name", engine=kind))


def test_databases_are_apart(kind: str, node: LocalNode) -> None:
    with Lock(f"{node.url}/3", "name", engine=kind) as lock:
        assert raw(f"{node.url}/3", "EXISTS", "name") == 1
        assert raw(node, "EXISTS", "name") == 0
        with Lock(node.url, "name", engine=kind):
            assert lock.owned()
    cycle(Lock(redis.Redis(port=node.port, db=5), "name", engine=kind))
    cycle(Lock(f"{node.unix_url}?db=7", "name", engine=kind))


def test_a_name_that_must_be_resolved(kind: str, valkey: LocalNode) -> None:
    cycle(Lock(f"redis://localhost:{valkey.port}", "name", engine=kind))


def test_a_name_that_nobody_knows(kind: str) -> None:
    lock = Lock("redis://no-such-host.invalid", "name", engine=kind, node_timeout=0.5)
    with pytest.raises(redbolt.NodesUnavailable, match=r"no-such-host\.invalid:6379"):
        lock.acquire(blocking=False)


def test_a_password(kind: str, guarded: LocalNode) -> None:
    assert "w%2Frd" in guarded.url
    cycle(Lock(guarded.url, "name", engine=kind))
    cycle(Lock(guarded.unix_url, "name", engine=kind))
    cycle(Lock(Node(guarded.host, guarded.port, password=SECRET), "name", engine=kind))
    cycle(Lock(Node(guarded.host, guarded.port, username="default", password=SECRET), "name", engine=kind))
    with redis.Redis(guarded.host, guarded.port, password=SECRET, db=1) as client:
        cycle(Lock(client, "name", engine=kind))


def test_a_user_with_the_rights_that_a_lock_needs(kind: str, guarded: LocalNode) -> None:
    cycle(Lock(f"redis://ann:hers@{guarded.host}:{guarded.port}", "ann:name", engine=kind))
    cycle(Lock(f"redis://ann:hers@{guarded.host}:{guarded.port}/1", "name", prefix="ann:", engine=kind))


@pytest.mark.parametrize(
    ("credentials", "name"),
    [
        (":wrong@", "name"),
        ("", "name"),
        ("nobody:x@", "name"),
        ("ann:wrong@", "ann:name"),
        ("ann:hers@", "name"),
    ],
)
def test_credentials_that_do_not_suffice(kind: str, guarded: LocalNode, credentials: str, name: str) -> None:
    lock = Lock(f"redis://{credentials}{guarded.host}:{guarded.port}", name, engine=kind)
    for options in ({}, {"blocking": False}, {"blocking_timeout": 5}):
        with pytest.raises(SetupError) as caught:
            lock.acquire(**options)  # at once, also where it could wait: nothing mends that
        text = str(caught.value)
        assert f"127.0.0.1:{guarded.port}" in caught.value.causes
        assert any(word in text for word in ("WRONGPASS", "NOAUTH", "NOPERM"))
        for password in ("wrong@", ":x@", "hers"):
            assert password not in text
    assert raw(guarded, "EXISTS", name) == 0


def test_a_database_that_does_not_exist(kind: str, valkey: LocalNode) -> None:
    with pytest.raises(SetupError, match="DB index is out of range"):
        Lock(f"{valkey.url}/4000", "name", engine=kind).acquire()
    assert raw(valkey, "DBSIZE") == 0


def test_a_password_for_a_server_that_wants_none(kind: str, valkey: LocalNode) -> None:
    with pytest.raises(SetupError) as caught:
        Lock(f"redis://:sesame@{valkey.host}:{valkey.port}", "name", engine=kind).acquire()
    assert "sesame" not in str(caught.value)


def test_no_password_is_ever_shown(kind: str, guarded: LocalNode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    url = guarded.url
    node = Node.from_url(url)
    lock, redlock = Lock(url, "name", engine=kind), RedLock([url], "name", engine=kind)
    texts = [repr(node), str(node), node.address, repr(lock), repr(redlock), repr(lock.nodes)]
    lock.acquire()
    texts += [repr(lock.lease), repr(lock.__dict__)]
    redlock.blocking = False
    for trouble in (lock.acquire, redlock.release, redlock.__enter__):
        with pytest.raises(LockError) as caught:
            trouble()
        texts += [str(caught.value), repr(caught.value), repr(caught.value.__dict__)]
    lock.release()
    for text in [*texts, caplog.text]:
        assert SECRET not in text
        assert "w%2Frd" not in text


def test_the_wrong_password_on_a_minority_does_no_harm(
    kind: str, guarded: LocalNode, valkeys: LocalNodes
) -> None:
    urls = [node.url for node in valkeys][:2]
    cycle(RedLock([f"redis://:wrong@{guarded.host}:{guarded.port}", *urls], "name", engine=kind))


# ---- clients ----


@pytest.mark.parametrize("decode_responses", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_plain_client(kind: str, node: LocalNode, decode_responses: bool, protocol: int) -> None:
    with redis.Redis(port=node.port, decode_responses=decode_responses, protocol=protocol) as client:
        cycle(Lock(client, "name", engine=kind))
        assert client.connection_pool._in_use_connections == set()
        assert client.connection_pool._available_connections == []  # its connections are not used at all
        lock = Lock(client, "name", engine=kind)
        assert lock.acquire(token="mine")
        client.get("name")
        lock.release()


def test_a_plain_client_gives_its_settings(guarded: LocalNode) -> None:
    client = redis.Redis("example.org", 7000, 3, "hers", username="ann", socket_timeout=0.3)
    node = Node.from_client(client)
    assert node == Node("example.org", 7000, db=3, username="ann", password="hers")
    assert node.socket_timeout == 0.3
    client = redis.Redis(unix_socket_path="/run/v.sock", db=1)
    assert Node.from_client(client) == Node(path="/run/v.sock", db=1)
    client = redis.Redis.from_url("redis://example.org:7000/2", encoding="latin-1", health_check_interval=10)
    assert Node.from_client(client) == Node("example.org", 7000, db=2)
    pool = redis.BlockingConnectionPool(host="example.org", port=7000)
    assert Node.from_client(redis.Redis(connection_pool=pool)) == Node("example.org", 7000)


def test_a_client_on_a_unix_socket(kind: str, valkey: LocalNode) -> None:
    with redis.Redis(unix_socket_path=valkey.unix_path) as client:
        cycle(Lock(client, "name", engine=kind))


def test_a_redlock_takes_a_mixture(kind: str, valkeys: LocalNodes) -> None:
    a, b, c = valkeys[0], valkeys[1], valkeys[2]
    with redis.Redis("127.0.0.1", b.port) as client:
        lock = RedLock((a.url, client, Node(path=c.unix_path)), "name", quorum=3, engine=kind)
        cycle(lock)
        assert lock.nodes == (Node(a.host, a.port), Node(b.host, b.port), Node(path=c.unix_path))


def clients_that_cannot_be_copied() -> Iterator[tuple[str, Any]]:
    yield "sentinel", redis.sentinel.Sentinel([("127.0.0.1", 1)]).master_for("name")
    yield "sentinel object", redis.sentinel.Sentinel([("127.0.0.1", 1)])
    yield "valkey's sentinel", valkey.sentinel.Sentinel([("127.0.0.1", 1)]).master_for("name")
    yield "cluster", object.__new__(redis.cluster.RedisCluster)
    yield "valkey's cluster", object.__new__(valkey.cluster.ValkeyCluster)
    yield "asyncio", redis.asyncio.Redis()
    yield "valkey's asyncio", valkey.asyncio.Valkey()
    yield "asyncio cluster", object.__new__(redis.asyncio.RedisCluster)
    yield "pipeline", redis.Redis().pipeline()
    yield "valkey's pipeline", valkey.Valkey().pipeline()
    yield "pool", redis.ConnectionPool()
    yield "mock", unittest.mock.MagicMock()
    yield "mock of a client", unittest.mock.MagicMock(spec=redis.Redis)
    yield "autospec", unittest.mock.create_autospec(redis.Redis, instance=True)
    mocked = redis.Redis()
    mocked.connection_pool = unittest.mock.MagicMock(spec=redis.ConnectionPool)
    yield "client with a mocked pool", mocked
    half = redis.Redis()
    half.connection_pool.connection_class = unittest.mock.MagicMock()
    yield "client with a mocked connection class", half
    yield "tuple", ("127.0.0.1", 6379)
    yield "number", 6379
    yield "context", ssl.create_default_context()


CANNOT = dict(clients_that_cannot_be_copied())
INSTEAD = {
    "asyncio": "plain client",
    "sentinel": "server itself",
    "cluster": "one of them",
    "pipeline": "client itself",
}


@pytest.mark.parametrize("what", CANNOT)
def test_a_client_that_cannot_be_copied_is_refused(what: str) -> None:
    client = CANNOT[what]
    with pytest.raises(TypeError) as caught:
        Lock(client, "name")
    assert caught.type is TypeError
    advice = [text for word, text in INSTEAD.items() if word in what]
    assert all(text in str(caught.value) for text in advice[:1])
    with pytest.raises(TypeError):
        RedLock([client, "redis://example.org"], "name")


def test_one_client_is_no_sequence_of_nodes() -> None:
    for client in (redis.Redis(), valkey.Valkey(), Node(), "redis://example.org"):
        with pytest.raises(TypeError, match="sequence"):
            RedLock(client, "name")  # type: ignore[arg-type]
