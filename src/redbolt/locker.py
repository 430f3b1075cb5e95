"""Locks by key: acquire gives a token, and whoever knows that may release or lengthen the lock."""

from __future__ import annotations

from collections.abc import Iterable

from redbolt._arguments import (
    check_quorum,
    check_tries,
    key_bytes,
    lease_ms,
    milliseconds,
    seconds,
    token_bytes,
)
from redbolt._body import DRIFT_FACTOR, REDLOCK_LIMIT, node_limit
from redbolt._by_key import ByKey
from redbolt._engine import Votes, chosen
from redbolt.node import Node, NodeLike, as_node, as_nodes
from redbolt.retry import Retry

__all__ = ["Locker"]


def _token(votes: Votes | None) -> str | None:
    return None if votes is None else votes.token.decode()


class Locker:
    """Takes and releases locks by key, and remembers nothing itself: the token is the proof of ownership.

    The keys are those of `Lock` and `RedLock`, so a token that another library has made is as good here.

    Args:
        client: the node (a URL, a ``redis.Redis``, a `Node`), or a sequence of nodes of which a majority
            must agree, as for `RedLock`.
        prefix: put before each key. Default none.
        node_timeout: seconds that a node may take to answer. Default: as for `Lock`, or with several nodes
            as for `RedLock`.
        engine: ``"native"`` or ``"pure"`` force an engine; None (the default) takes the best that is
            installed.

    Raises:
        ValueError, TypeError: an argument cannot work; nothing is sent.
        ImportError: the forced engine is not installed.
    """

    def __init__(
        self,
        client: NodeLike | Iterable[NodeLike],
        *,
        prefix: str | bytes = "",
        node_timeout: float | None = None,
        engine: str | None = None,
    ) -> None:
        if isinstance(client, Iterable) and not isinstance(client, (str, bytes)):
            nodes = as_nodes(client)
            limit = REDLOCK_LIMIT
        else:
            nodes = (as_node(client),)
            limit = node_limit(nodes[0])
        limit_ns = milliseconds(limit if node_timeout is None else node_timeout, "node_timeout") * 1_000_000
        self._prefix = prefix
        key_bytes(prefix, "key")
        self._engine, self.engine_choice = chosen(nodes, engine)
        self._by_key = ByKey(self._engine, check_quorum(None, len(nodes)), limit_ns, DRIFT_FACTOR)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {', '.join(node.address for node in self.nodes)}>"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The servers that it asks."""
        return self._engine.nodes

    def acquire(
        self, key: str | bytes, timeout: float = 30, retry_times: int = 3, retry_delay: float = 0.1
    ) -> str | None:
        """Take the lock on a key.

        Args:
            key: name of the lock.
            timeout: length of the lease in seconds, default 30; rounded up to whole milliseconds.
            retry_times: how many tries in all, default 3.
            retry_delay: seconds between two tries, default 0.1.

        Returns:
            The token, or None if the lock stayed taken.

        Raises:
            NodesUnavailable, SetupError: no quorum of nodes could be reached by the last try.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        name = key_bytes(self._prefix, key)
        retry = Retry(check_tries(retry_times, "retry_times"), seconds(retry_delay, "retry_delay", zero=True))
        return self._by_key.take(name, lease_ms(timeout, DRIFT_FACTOR), retry, _token)

    def release(self, key: str | bytes, token: str | bytes) -> bool:
        """Give the lock on a key back.

        Args:
            key: name of the lock.
            token: what `acquire` returned, or the value that another library has set.

        Returns:
            Whether the lock was held with this token; somebody else's is left alone.

        Raises:
            ReleaseUnconfirmed: no quorum of nodes confirmed it in time; it can be tried again.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        return self._by_key.give_back(key_bytes(self._prefix, key), token_bytes(token))

    def extend(self, key: str | bytes, token: str | bytes, seconds: float) -> bool:
        """Set the remaining life of the lock on a key.

        Args:
            key: name of the lock.
            token: what `acquire` returned.
            seconds: from now on.

        Returns:
            Whether the lock was still held with this token; an ended lease is not revived.

        Raises:
            NodesUnavailable, SetupError: too few nodes answered.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        length_ms = lease_ms(seconds, DRIFT_FACTOR, "seconds")
        return self._by_key.prolong(key_bytes(self._prefix, key), token_bytes(token), length_ms)
