"""How to reach one server: an immutable, hashable `Node`."""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from redbolt._adopt import is_client, refusal, settings_of_client, settings_of_url
from redbolt._dialer import Dialer

if TYPE_CHECKING:
    from redis.client import Redis

__all__ = ["Node", "NodeLike", "as_node", "as_nodes"]

NodeLike: TypeAlias = Union[str, "Node", "Redis", Any]
"""A URL, a `Node`, or a ``redis.Redis`` or ``valkey.Valkey``."""

_LOOPBACK = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}
# Old servers repeat the words of a command that they do not know.
_REPEATED = r"(?i:(unknown command\W+(?:AUTH|HELLO)\b\W?).*)"


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
        client_name: the name of our connections in ``CLIENT LIST``, if the server lets them have one. Default
            none.
        protocol: 3 for RESP3 where the server knows it, 2 or None (the default) for RESP2. It makes no
            difference to a lock.
        connect_timeout: seconds that connecting may take where the lock would wait for longer. Default None:
            as long as for an answer.
        dialer: how to connect by a client's own connection class; made by `from_client` and `from_url`.
            Default none. Such a node is served by the pure engine.

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
    client_name: str | None = None
    protocol: int | None = None
    connect_timeout: float | None = None
    dialer: Dialer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("host", "path", "username", "password", "client_name"):
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
        protocol = self.protocol
        if protocol is not None and (isinstance(protocol, bool) or protocol not in (2, 3)):
            raise ValueError(f"protocol must be 2, 3 or None, not {protocol!r}")
        if self.dialer is not None and not isinstance(self.dialer, Dialer):
            raise TypeError(f"a dialer is made by Node.from_client, it is no {type(self.dialer).__name__}")
        for name in ("socket_timeout", "connect_timeout"):
            timeout = getattr(self, name)
            if timeout is None:
                continue
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, not {type(timeout).__name__}")
            if not (timeout > 0 and math.isfinite(timeout)):
                raise ValueError(f"{name} must be seconds above 0, not {timeout!r}")

    def __repr__(self) -> str:
        dialer = "" if self.dialer is None else f" by {self.dialer.name}"
        return f"<Node {self.address} db={self.db}{dialer}>"

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

    def handshake(
        self, hello: bool = True, name: bool = True, push: bool = False, tracking: bool = False
    ) -> tuple[tuple[bytes, ...], ...]:
        """The commands that a new connection sends before anything else.

        Args:
            hello: False leaves out the ``HELLO`` of protocol 3: the node does not know it.
            name: False leaves out the name of the connection: the node does not let it have one.
            push: True for a connection that is told things: it begins with ``HELLO``, whatever the protocol.
            tracking: True ends it with ``CLIENT TRACKING``.
        """
        follow_keys = ((b"CLIENT", b"TRACKING", b"ON", b"NOLOOP"),) if tracking else ()
        if self.dialer is not None:
            return ((b"HELLO", b"3"), *follow_keys) if push else ()
        commands: list[tuple[bytes, ...]] = []
        login: tuple[bytes, ...] = ()
        if self.password is not None or self.username is not None:
            user = () if self.username is None else (self.username.encode(),)
            login = (b"AUTH", *user, (self.password or "").encode())
        if push or (self.protocol == 3 and hello):
            if len(login) == 2:
                login = (b"AUTH", b"default", login[1])
            login = (b"HELLO", b"3", *login)
        if login:
            commands.append(login)
        if self.db:
            commands.append((b"SELECT", b"%d" % self.db))
        if self.client_name and name:
            commands.append((b"CLIENT", b"SETNAME", self.client_name.encode()))
        return (*commands, *follow_keys)

    def scrubbed(self, text: str) -> str:
        """A server's text without our passwords, which some servers repeat."""
        text = re.sub(_REPEATED, r"\1", text, flags=re.DOTALL)
        secrets = [] if self.dialer is None else self.dialer.secrets()
        for secret in (self.password, *secrets):
            if secret:
                text = text.replace(secret, "***")
        return text

    @classmethod
    def from_url(cls, url: str) -> Node:
        """Read ``redis://[[user]:password@]host[:port][/db]``, the same with ``rediss://`` (TLS), or
        ``unix://[[user]:password@]/path[?db=n]``.

        Args:
            url: the address. ``client_name``, ``protocol``, ``socket_timeout`` and ``socket_connect_timeout``
                (seconds) may stand in the query, and with TLS the ``ssl_...`` options of redis-py; other
                options of redis-py that do not change which server is meant are passed over.

        Raises:
            ValueError: another scheme, or an option that would matter.
        """
        return cls(**settings_of_url(url))

    @classmethod
    def from_client(cls, client: Any) -> Node:
        """Copy the settings of a ``redis.Redis`` or ``valkey.Valkey``; the client and its pool are not used.

        Where plain connections cannot honour them (TLS, its own connection class, a credential provider) the
        node keeps them as its ``dialer``.

        Raises:
            TypeError: a client of another kind (of a cluster, of sentinels, for asyncio), or a mock.
            ValueError: a setting that is no address.
        """
        return cls(**settings_of_client(client))


def as_node(client: NodeLike) -> Node:
    """Make a `Node` of a URL, a ``redis.Redis`` or ``valkey.Valkey``, or a `Node`.

    Raises:
        TypeError: it is none of them.
        ValueError: it is one of them, but no address.
    """
    if isinstance(client, Node):
        return client
    if isinstance(client, str):
        return _node_of_url(client)
    if is_client(client):
        return _node_of_client(client)
    raise TypeError(refusal(client))


# Locks are often made anew for each use, and reading settings takes a good part of a lock's cycle.
_node_of_url = functools.lru_cache(maxsize=256)(Node.from_url)
_known: weakref.WeakKeyDictionary[Any, tuple[type, type, dict[str, Any], Node]] = weakref.WeakKeyDictionary()


def _node_of_client(client: Any) -> Node:
    pool: Any = getattr(client, "connection_pool", None)
    try:
        known = _known.get(pool)
    except TypeError:  # some pool that cannot be a key
        return Node.from_client(client)
    if known is not None:
        kind, connections, settings, node = known
        if (
            kind is type(client)
            and connections is pool.connection_class
            and settings == pool.connection_kwargs
        ):
            return node
    node = Node.from_client(client)
    _known[pool] = type(client), pool.connection_class, dict(pool.connection_kwargs), node
    return node


def as_nodes(clients: Iterable[NodeLike]) -> tuple[Node, ...]:
    """Make a tuple of different nodes, in the given order.

    Raises:
        TypeError: not a sequence of nodes (a single URL, say).
        ValueError: no node at all, or the same server twice.
    """
    if isinstance(clients, (str, bytes, Node)) or is_client(clients):
        raise TypeError(
            f"nodes must be a sequence of URLs, clients or Nodes, not one {type(clients).__name__}"
        )
    nodes = tuple(as_node(client) for client in clients)
    if not nodes:
        raise ValueError("a lock needs at least one node")
    seen: dict[tuple[str, int], Node] = {}
    for node in nodes:
        if (twin := seen.get(node.identity)) is not None:
            raise ValueError(f"the same node twice: {twin.address} and {node.address}")
        seen[node.identity] = node
    return nodes
