"""Recipes for connections by a client's own class: equal where that can be told, fixed, and secret."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import redis
import redis.connection
import valkey

import redbolt
from redbolt import Lock, LockError, Node, RedLock, SetupError
from redbolt._engine import engine_for
from redbolt.local import LocalNode
from tests.kit.clients import raw
from tests.kit.resp import error
from tests.kit.rounds import by_name
from tests.kit.scripted import ScriptedNode

SECRET = "sésame"


class Own(redis.connection.Connection):
    """A connection class of somebody's own."""


class Provider(redis.CredentialProvider):
    """A provider of one password."""

    def get_credentials(self) -> tuple[str, str]:
        return "ann", SECRET


def own_client(node: Any, **settings: Any) -> redis.Redis:
    pool = redis.ConnectionPool(connection_class=Own, host=node.host, port=node.port, **settings)
    return redis.Redis(connection_pool=pool)


# ---- recipes ----


def test_equal_clients_share_their_connections() -> None:
    provider = Provider()
    options: dict[str, Any] = {"socket_keepalive_options": (1, 2)}
    for make in (
        lambda: redis.Redis("example.org", ssl=True, password=SECRET),
        lambda: valkey.Valkey("example.org", ssl=True, password=SECRET),
        lambda: redis.Redis("example.org", credential_provider=provider),
        lambda: redis.Redis("example.org", credential_provider=provider, **options),
        lambda: redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Own)),
        lambda: redis.Redis.from_url("rediss://example.org?ssl_cert_reqs=none"),
    ):
        one, other = Node.from_client(make()), Node.from_client(make())
        assert one == other
        assert hash(one) == hash(other)
        assert engine_for((one,)) is engine_for((other,))


def test_different_clients_do_not() -> None:
    nodes = [
        Node.from_client(client)
        for client in (
            redis.Redis("example.org"),
            redis.Redis("example.org", ssl=True),
            redis.Redis("example.org", ssl=True, ssl_cert_reqs="none"),
            redis.Redis("example.org", ssl=True, password="other"),
            redis.Redis("example.org", credential_provider=Provider()),
            redis.Redis("example.org", credential_provider=Provider()),
            redis.Redis("example.org", credential_provider=Provider(), socket_keepalive_options={1: 2}),
            redis.Redis("example.org", redis_connect_func=print),
        )
    ]
    assert len(set(nodes)) == len(nodes)


def test_what_cannot_be_hashed_is_kept_alive() -> None:
    def node() -> Node:
        return Node.from_client(own_client(Node(), socket_keepalive_options={1: 2}))

    nodes = [node() for _ in range(20)]
    gc.collect()
    assert len(set(nodes)) == 20


def test_a_recipe_does_not_change_with_its_client() -> None:
    client = redis.Redis("example.org", ssl=True)
    node = Node.from_client(client)
    before = hash(node)
    client.connection_pool.connection_kwargs["host"] = "elsewhere"
    assert (hash(node), node.host) == (before, "example.org")
    assert Node.from_client(client) != node
    assert node.dialer is not None
    with pytest.raises(AttributeError):
        node.dialer.what = "x"  # type: ignore[misc]
    for twin in (copy.copy(node), copy.deepcopy(node), pickle.loads(pickle.dumps(node))):
        assert twin == node


def test_one_server_is_not_two_nodes_by_its_recipes() -> None:
    for other in (
        "redis://example.org",
        redis.Redis("example.org", ssl=True),
        own_client(Node("example.org")),
    ):
        with pytest.raises(ValueError, match="same node twice"):
            RedLock(["rediss://example.org", other], "name")


# ---- secrets ----


def test_no_secret_is_ever_shown(valkey: LocalNode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    wrong = {"username": "ann", "password": "seesame-seesame"}
    raw(valkey, "ACL", "SETUSER", "ann", "on", f">{SECRET}", "~*", "+@all")
    client = own_client(valkey, **wrong)
    lock = Lock(client, "name")
    texts = [repr(lock), str(redbolt.engine(lock)), repr(lock.nodes), str(lock.nodes[0].dialer)]
    texts += [lock.nodes[0].address, repr(lock._engine), repr(lock.__dict__)]
    with pytest.raises(LockError) as caught:
        lock.acquire(blocking=False)
    texts += [str(caught.value), repr(caught.value), repr(caught.value.causes), caplog.text]
    with pytest.raises(ValueError) as refused:
        Lock(client, "name", engine="native")
    texts.append(str(refused.value))
    assert not [text for text in texts if "seesame" in text]


def test_a_server_that_repeats_the_password_of_a_provider() -> None:
    echo = error(f"ERR unknown command `AUTH`, with args beginning with: `ann`, `{SECRET}`")
    with ScriptedNode(answer=by_name(AUTH=echo)) as server:
        client = redis.Redis(server.host, server.port, credential_provider=Provider())
        with pytest.raises(SetupError, match="unknown command") as caught:
            Lock(client, "name").acquire(blocking=False)
        assert SECRET not in str(caught.value)
