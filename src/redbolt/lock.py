"""The plain lock: a key with a token and a time to live, on one node (`Lock`) or a quorum of nodes
(`RedLock`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict, overload

from redbolt._arguments import check_tries, key_bytes, lease_ms, seconds, token_bytes
from redbolt._body import DRIFT_FACTOR, MAX_HANDOFFS, REDLOCK_LIMIT, Command, OneNode
from redbolt._by_key import ByKey
from redbolt._clock import now_ns
from redbolt._engine import Votes
from redbolt._losses import OnLost
from redbolt._programs import DROP, EXTEND, OWNED
from redbolt.lease import Lease
from redbolt.node import NodeLike, as_nodes
from redbolt.retry import Retry

__all__ = ["Grant", "Lock", "RedLock"]


class Lock(OneNode):
    """A mutual exclusion lock on one Redis or Valkey server, with a lease.

    The key is exactly ``prefix + name``, its value a random token: the layout of redis-py, redlock-py,
    redsync and node-redlock, so they and this lock exclude one another.

    Args:
        client: the node: a URL (``redis://``, ``rediss://``, ``unix://``), a ``redis.Redis`` or
            ``valkey.Valkey`` whose settings are copied, or a `Node`.
        name: name of the lock.
        timeout: length of the lease in seconds; rounded up to whole milliseconds. None (the default) for 30
            seconds, renewed every third of that while its holder lives.
        sleep: longest pause between two tries of a waiting acquire, in seconds, where the server cannot tell
            of a release. Default 0.1.
        blocking: whether `acquire` waits while the lock is taken. Default True.
        blocking_timeout: how many seconds it waits at most. None (the default) for ever; 0 tries once.
        thread_local: True (the default): a lease belongs to the thread that acquired it, and no other can
            release it. False: the object has one current lease, which any thread may release.
        raise_on_release_error: False makes the end of a ``with`` block log a failed release instead of
            raising it.
        prefix: put before the name to make the key, to keep locks apart from data. Default none.
        retry: a `Retry`; overrides ``sleep``. With a ``count`` that many tries are made, at its pauses.
        node_timeout: seconds that a node may take to answer. Default: the client's socket timeout, at most 1.
        engine: ``"native"`` or ``"pure"`` force an engine; None (the default) takes the best that is
            installed.
        max_handoffs: how often in a row the lock goes from one waiter of this process to the next, default
            16; then it is released, so that others have a chance. 0: never.
        local_queue: True (the default): the waiters of this process stand in one line, and only the first of
            them talks to the servers. False: each waits for itself, and nothing is handed on.
        waiting: ``"tracking"``, ``"channel"`` or ``"polling"`` force a way of waiting; None (the default)
            takes the first of them that the server has. See the property `waiting`.
        renew: whether the lease is renewed while it is held. None (the default): only without a ``timeout``.
            Renewal ends with the release, with the lock object, with the thread that holds the lock (if
            ``thread_local``), and with the process.
        max_hold: seconds after which a lease is not renewed any more and so is lost, for a holder that is
            stuck. At least one lease. None (the default): never.
        on_lost: called once as ``on_lost(lease, reason)`` when a lease is lost while it is held, in a thread
            of its own, before the end of its validity if it is renewed, else at the end. Default none.

    Raises:
        ValueError, TypeError: an argument cannot work; nothing is sent.
        ImportError: the forced engine is not installed.
    """

    def _drop(self, lease: Lease) -> Command:
        return DROP, (lease.token,)

    def _prolong(self, lease: Lease, length_ms: int) -> Command:
        return EXTEND, (lease.token, b"%d" % length_ms)

    def _owns(self, lease: Lease) -> Command:
        return OWNED, (lease.token, b"%d" % len(lease.token))


class Grant(TypedDict):
    """What `RedLock.lock` came to."""

    validity: bool
    """Whether the lock was granted."""
    token: str | None
    """What `RedLock.unlock` and `RedLock.extend` want; None if it was not granted."""
    validity_ms: int
    """Milliseconds for which the lock can be relied on, drift taken off; 0 if it was not granted."""
    servers: int
    """How many servers had granted it when the quorum was reached; 0 if it was not granted."""


def _grant(votes: Votes | None) -> Grant:
    if votes is None:
        return Grant(validity=False, token=None, validity_ms=0, servers=0)
    left_ms = max(0, votes.valid_until_ns - now_ns()) // 1_000_000
    return Grant(validity=True, token=votes.token.decode(), validity_ms=left_ms, servers=votes.yes)


class RedLock(Lock):
    """A mutual exclusion lock on a quorum of independent Redis or Valkey servers.

    It is granted by a majority, so it survives the loss of a minority. The source of the algorithm is
    https://redis.io/docs/latest/develop/use/patterns/distributed-locks/; all nodes are asked at once, and
    the answer is there with the fastest quorum.

    With a name it is used like `Lock`. In the manager style, `lock`, `unlock` and `extend` take the name of a
    resource with each call, and the object needs none.

    Args:
        clients: the nodes: a sequence of URLs, ``redis.Redis`` clients or `Node` objects; an odd number is
            best.
        name: name of the lock; None (the default) for the manager style alone.
        timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error, prefix, retry,
            engine, max_handoffs, local_queue, waiting, renew, max_hold, on_lost: as for `Lock`.
        node_timeout: seconds that a node may take to answer. Default 0.05. One that takes longer is left
            out until it answers.
        quorum: how many nodes must agree; default and least: a majority.
        retry_count: how many tries in all `lock` makes, default 3.
        retry_delay: seconds between two of them, default 0.2.
        clock_drift_factor: how far clocks may run apart, as a part of the lease. Default 0.01.

    Raises:
        ValueError, TypeError: an argument cannot work; nothing is sent.
        ImportError: the forced engine is not installed.
    """

    def __init__(
        self,
        clients: Iterable[NodeLike],
        name: str | bytes | None = None,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        prefix: str | bytes = "",
        retry: Retry | None = None,
        node_timeout: float = REDLOCK_LIMIT,
        engine: str | None = None,
        quorum: int | None = None,
        retry_count: int = 3,
        retry_delay: float = 0.2,
        clock_drift_factor: float = DRIFT_FACTOR,
        max_handoffs: int = MAX_HANDOFFS,
        local_queue: bool = True,
        waiting: str | None = None,
        renew: bool | None = None,
        max_hold: float | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        key = b"" if name is None else key_bytes(prefix, name)
        self._set_up(
            as_nodes(clients), name, key, timeout, sleep, blocking, blocking_timeout, thread_local,
            raise_on_release_error, retry, node_timeout, engine, quorum, clock_drift_factor, max_handoffs,
            local_queue, waiting, renew, max_hold, on_lost,
        )  # fmt: skip
        key_bytes(prefix, "resource")
        self._prefix = prefix
        self._manager_retry = Retry(
            check_tries(retry_count, "retry_count"), seconds(retry_delay, "retry_delay", zero=True)
        )
        self._by_key = ByKey(self._engine, self._quorum, self._limit_ns, clock_drift_factor)

    def lock(self, resource: str | bytes, ttl_ms: int) -> Grant:
        """Take the lock on a resource. Nothing of it is remembered here: keep the token.

        Args:
            resource: name of the lock.
            ttl_ms: length of the lease in milliseconds.

        Returns:
            A mapping that says in ``validity`` whether it was granted; see `Grant`.

        Raises:
            NodesUnavailable, SetupError: no quorum of nodes could be reached by the last try.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        key, length_ms = key_bytes(self._prefix, resource), self._ttl(ttl_ms)
        return self._by_key.take(key, length_ms, self._manager_retry, _grant)

    def unlock(self, resource: str | bytes, token: str | bytes) -> bool:
        """Give the lock on a resource back.

        Args:
            resource: name of the lock.
            token: the one that `lock` returned, or the value that another library has set.

        Returns:
            Whether it was held with this token; somebody else's is left alone.

        Raises:
            ReleaseUnconfirmed: no quorum of nodes confirmed it in time; it can be tried again.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        return self._by_key.give_back(key_bytes(self._prefix, resource), token_bytes(token))

    @overload
    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool: ...

    @overload
    def extend(self, resource: str | bytes, token: str | bytes, ttl_ms: int) -> bool: ...

    def extend(self, *args: Any, **kwargs: Any) -> bool:
        """Lengthen the lease: this object's, as `Lock.extend`, or in the manager style one by its token.

        Args:
            additional_time, replace_ttl: as for `Lock.extend`.
            resource: instead of them, the name of a lock.
            token: the one that `lock` returned.
            ttl_ms: milliseconds that the lock shall live from now on.

        Returns:
            True; in the manager style False if it was no longer held with this token.

        Raises:
            NodesUnavailable, SetupError: too few nodes answered.
            LockNotOwned, LockLost: as for `Lock.extend`; not in the manager style.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        if "resource" in kwargs or (args and isinstance(args[0], (str, bytes))):
            return self._extend_resource(*args, **kwargs)
        return super().extend(*args, **kwargs)

    def _extend_resource(self, resource: str | bytes, token: str | bytes, ttl_ms: int) -> bool:
        key, length_ms = key_bytes(self._prefix, resource), self._ttl(ttl_ms)
        return self._by_key.prolong(key, token_bytes(token), length_ms)

    def _ttl(self, ttl_ms: int) -> int:
        if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int):
            raise TypeError(f"ttl_ms must be an int, not {type(ttl_ms).__name__}")
        return lease_ms(min(ttl_ms, 1 << 60) / 1000, self._drift_factor, "ttl_ms")
