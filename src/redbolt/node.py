"""How to reach one server: an immutable, hashable `Node`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from redis.client import Redis
from redis.connection import Connection, ConnectionPool, UnixDomainSocketConnection, parse_url

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Node", "NodeLike", "as_node", "as_nodes"]

NodeLike: TypeAlias = Union[str, "Node", "Redis"]

# Settings of a client or URL that say nothing about which server to reach, nor about what a lock does there.
_NEUTRAL = {
    "client_name", "decode_responses", "encoding", "encoding_errors", "health_check_interval",
    "max_connections", "protocol", "retry", "retry_on_error", "retry_on_timeout", "socket_connect_timeout",
    "socket_keepalive", "socket_read_size", "timeout",
}  # fmt: skip
_LOOPBACK = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Node:
    """One Redis or Valkey server, and how to log in there.

    Args:
        host: name or numeric address. Default ``"localhost"``.
        port: TCP port. Default 6379.
        path: path of a unix socket; if given, host and port do not count.
        db: number of the database. Default 0.
        username: ACL user, or None for the default user.
        password: its password, or None.
        socket_timeout: seconds to wait for an answer where the lock has no ``node_timeout`` of its own;
            None for the lock's default. It does not take part in comparisons.

    Raises:
        ValueError, TypeError: something of this cannot be an address.
    """

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    socket_timeout: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("host", "path", "username", "password"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        for name, least, most in (("port", 1, 65535), ("db", 0, 2**31 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, not {value}")
        if self.path is None and not self.host:
            raise ValueError("a node needs a host or the path of a unix socket")
        if self.path is not None and not 0 < len(self.path.encode()) <= 107:
            raise ValueError("the path of a unix socket must have from 1 to 107 bytes")
        timeout = self.socket_timeout
        if timeout is None:
            return
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"socket_timeout must be a number of seconds, not {type(timeout).__name__}")
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"socket_timeout must be seconds above 0, not {timeout!r}")

    def __repr__(self) -> str:
        return f"<Node {self.address} db={self.db}>"

    @property
    def address(self) -> str:
        """The server's address as messages show it: ``host:port`` or ``unix:path``, never with
        credentials.
        """
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def identity(self) -> tuple[str, int]:
        """What two nodes share if they are one server, as far as can be told without asking the network."""
        if self.path is not None:
            return self.path, 0
        host = self.host.lower()
        return _LOOPBACK.get(host, host), self.port

    def handshake(self) -> tuple[tuple[bytes, ...], ...]:
        """The commands that a new connection sends before anything else."""
        commands: list[tuple[bytes, ...]] = []
        if self.password is not None:
            password = self.password.encode()
            user = () if self.username is None else (self.username.encode(),)
            commands.append((b"AUTH", *user, password))
        if self.db:
            commands.append((b"SELECT", b"%d" % self.db))
        return tuple(commands)

    @classmethod
    def from_url(cls, url: str) -> Node:
        """Read ``redis://[[user]:password@]host[:port][/db]`` or ``unix://[[user]:password@]/path[?db=n]``.

        Args:
            url: the address. ``socket_timeout`` (seconds) may stand in the query; other options that do not
                change which server is meant are passed over.

        Raises:
            ValueError: another scheme (TLS, ``rediss://``, is not supported yet), or an option that would
                matter.
        """
        if url.startswith("rediss://"):
            raise ValueError("rediss:// (TLS) is not supported yet; use redis:// or unix://")
        try:
            settings: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ValueError(f"not the URL of a node: {error}") from None
        settings.pop("connection_class", None)
        if url.startswith("unix://") and not settings.get("path"):
            raise ValueError("a unix:// URL needs the path of the socket")
        return cls._from_settings(settings, "URL")

    @classmethod
    def from_client(cls, client: Redis) -> Node:
        """Copy address, database and credentials from a plain ``redis.Redis``; the client itself is not used.

        Raises:
            TypeError: a client of another kind (cluster, sentinel, asyncio, TLS, own connection class or
                pool).
            ValueError: it has a credential provider or another setting that cannot be copied.
        """
        pool = client.connection_pool
        if type(pool).__module__.split(".")[0] != "redis" or not isinstance(pool, ConnectionPool):
            raise TypeError(f"cannot copy the settings of a client with a {type(pool).__name__}")
        if type(pool).__name__ not in ("ConnectionPool", "BlockingConnectionPool"):
            raise TypeError(f"cannot copy the settings of a client with a {type(pool).__name__}")
        if pool.connection_class not in (Connection, UnixDomainSocketConnection):
            raise TypeError(
                f"cannot copy the settings of a client that uses {pool.connection_class.__name__}"
            )
        settings = pool.connection_kwargs
        for name in ("credential_provider", "redis_connect_func"):
            if settings.get(name) is not None:
                raise ValueError(f"cannot copy a client's {name}")
        wanted = ("host", "port", "path", "db", "username", "password", "socket_timeout")
        return cls._from_settings({name: settings[name] for name in wanted if name in settings}, "client")

    @classmethod
    def _from_settings(cls, settings: Mapping[str, Any], source: str) -> Node:
        known = {name: value for name, value in settings.items() if name not in _NEUTRAL}
        unknown = known.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(
                f"the {source} has options that a lock cannot honour: {', '.join(sorted(unknown))}"
            )
        if known.get("db") is None:
            known.pop("db", None)
        return cls(**known)


def as_node(client: NodeLike) -> Node:
    """Make a `Node` of a URL, a plain ``redis.Redis`` or a `Node`.

    Raises:
        TypeError: it is none of them.
        ValueError: it is one of them, but no address.
    """
    if isinstance(client, Node):
        return client
    if isinstance(client, str):
        return Node.from_url(client)
    if type(client) is Redis:
        return Node.from_client(client)
    raise TypeError(f"a node is a URL, a redis.Redis or a redbolt.Node, not {type(client).__name__}")


def as_nodes(clients: Iterable[NodeLike]) -> tuple[Node, ...]:
    """Make a tuple of different nodes, in the given order.

    Raises:
        TypeError: not a sequence of nodes (a single URL, say).
        ValueError: no node at all, or the same server twice.
    """
    if isinstance(clients, (str, bytes, Node, Redis)):
        raise TypeError(
            f"nodes must be a sequence of URLs, clients or Nodes, not one {type(clients).__name__}"
        )
    nodes = tuple(as_node(client) for client in clients)
    if not nodes:
        raise ValueError("a lock needs at least one node")
    seen: dict[tuple[str, int], Node] = {}
    for node in nodes:
        twin = seen.setdefault(node.identity, node)
        if twin is not node:
            raise ValueError(f"the same node twice: {twin.address} and {node.address}")
    return nodes
