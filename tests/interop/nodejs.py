"""The lock libraries of Node as Python objects: each method is one operation of the library behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kit.clients import HasAddress
from tests.kit.npm import Call, Peer, PeerError

__all__ = ["NodeRedisson", "NodeRedlock", "RedissonLock", "RedlockLock"]


class NodeRedlock:
    """A Redlock of npm ``redlock`` 5, with connections of its own.

    Args:
        peer: the process that drives it.
        servers: its nodes.
        settings: its settings, by the library's own names; default ``retryCount=0``: one try.
    """

    def __init__(self, peer: Peer, servers: Sequence[HasAddress], **settings: float) -> None:
        self._peer = peer
        urls = [server.url for server in servers]
        self._client = peer.call("open", urls=urls, settings={"retryCount": 0} | settings)

    def acquire(
        self, *names: str, ttl_ms: int, timeout: float = 5.0, **settings: float
    ) -> RedlockLock | None:
        """Lock all these names; None if it was refused because somebody else has one.

        Args:
            names: the resources.
            ttl_ms: length of the lease in milliseconds.
            timeout: seconds (x SLACK) to wait for its answer; default 5.
            settings: for this call.

        Raises:
            PeerError: it failed for another reason.
        """
        try:
            found = self._peer.call(
                "acquire",
                client=self._client,
                resources=names,
                ttl_ms=ttl_ms,
                settings=settings,
                timeout=timeout,
            )
        except PeerError as error:
            if _refused(error):
                return None
            raise
        return RedlockLock(self._peer, found)

    def close(self) -> None:
        """End its connections."""
        self._peer.call("close", client=self._client)


class RedlockLock:
    """What `NodeRedlock.acquire` got.

    Attributes:
        token: the value of the key.
        valid_ms: how long it was valid, by the library's reckoning.
    """

    def __init__(self, peer: Peer, found: dict[str, Any]) -> None:
        self._peer = peer
        self._take(found)

    def _take(self, found: dict[str, Any]) -> None:
        self._number = found["lock"]
        self.token: bytes = found["value"].encode()
        self.valid_ms: int = found["valid_ms"]

    def release(self) -> bool:
        """Release it; whether a quorum of nodes still had it."""
        return self._ask("release") is not False

    def extend(self, ttl_ms: int) -> bool:
        """Give it a new length; whether a quorum of nodes still had it."""
        found = self._ask("extend", ttl_ms=ttl_ms)
        if found is False:
            return False
        self._take(found)
        return True

    def _ask(self, op: str, **args: Any) -> Any:
        try:
            return self._peer.call(op, lock=self._number, settings={}, **args)
        except PeerError as error:
            if _refused(error):
                return False
            raise


def _refused(error: PeerError) -> bool:
    """Whether nothing but votes of living servers stood against it."""
    said = [cause.partition(":")[0] for cause in error.causes]
    return error.name == "ExecutionError" and bool(said) and set(said) == {"ResourceLockedError"}


class NodeRedisson:
    """A client of npm ``node-redisson``, with connections of its own.

    Args:
        peer: the process that drives it.
        server: its server.
        watchdog_ms: the lease of locks without one, renewed every third of it; default: the library's 30 000.

    Attributes:
        uuid: the first part of its owner ids.
    """

    def __init__(self, peer: Peer, server: HasAddress, watchdog_ms: int | None = None) -> None:
        self.peer = peer
        found = peer.call("open", host=server.host, port=server.port, watchdog_ms=watchdog_ms)
        self.number: int = found["client"]
        self.uuid: str = found["uuid"]

    def lock(self, name: str, client_id: str = "1") -> RedissonLock:
        """The lock of that name for that owner: the same again for the same arguments."""
        return RedissonLock(self, name, client_id)

    def close(self) -> None:
        """End its connections and its watchdog."""
        self.peer.call("close", client=self.number)


class RedissonLock:
    """A reentrant lock of `NodeRedisson`. Times are in milliseconds; without ``lease_ms`` it is renewed.

    Attributes:
        owner: its field in the hash.
        channel: where it hears of an unlock.
    """

    def __init__(self, redisson: NodeRedisson, name: str, client_id: str) -> None:
        self._peer = redisson.peer
        self._which: dict[str, Any] = {"client": redisson.number, "name": name, "id": client_id}
        self.owner = f"{redisson.uuid}:{client_id}".encode()
        self.channel = f"redisson_lock__channel:{name if name.startswith('{') else '{' + name + '}'}"

    def start_lock(self, lease_ms: int | None = None) -> Call:
        """Begin to wait for the lock; the call is done when it is granted, and knows when that was."""
        return self._peer.start("lock", lease_ms=lease_ms, **self._which)

    def lock(self, lease_ms: int | None = None, timeout: float = 5.0) -> None:
        """Wait until it is granted, for ``timeout`` seconds (x SLACK) at most."""
        self.start_lock(lease_ms).result(timeout)

    def start_try_lock(self, wait_ms: int = 0, lease_ms: int | None = None) -> Call:
        """Begin to wait for the lock up to ``wait_ms``; the result is whether it was granted."""
        return self._peer.start("try_lock", wait_ms=wait_ms, lease_ms=lease_ms, **self._which)

    def try_lock(self, wait_ms: int = 0, lease_ms: int | None = None) -> bool:
        """Try for up to ``wait_ms``; whether it was granted."""
        return bool(self.start_try_lock(wait_ms, lease_ms).result(5 + wait_ms / 1000))

    def unlock(self) -> None:
        """Give up one hold.

        Raises:
            PeerError: with the name "RedissonLockError" if this owner does not hold it.
        """
        self._peer.call("unlock", **self._which)

    def force_unlock(self) -> bool:
        """Free it, whoever has it; whether anybody had."""
        return bool(self._peer.call("force_unlock", **self._which))

    def is_locked(self) -> bool:
        """Whether anybody has it."""
        return bool(self._peer.call("is_locked", **self._which))

    def hold_count(self) -> int:
        """How many holds this owner has."""
        return int(self._peer.call("hold_count", **self._which))

    def is_held(self) -> bool:
        """Whether this owner has it."""
        return self.hold_count() > 0
