"""Runs cycles of one peer in the peer's own environment: ``python worker.py NAME``.

`bench.peers.apart` starts it. It is spoken to in lines of JSON. The first one says where the nodes are, and
is answered with the versions in use; each later one asks for a slice, and is answered with the durations of
its cycles. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TextIO

from bench.runner import Holder, cycles, quiet

__all__ = ["serve"]

Node = dict[str, Any]
Make = Callable[[Sequence[Node], str, int], Holder]


def python_redis_lock(nodes: Sequence[Node], key: str, lease_ms: int) -> Holder:
    import redis
    import redis_lock  # type: ignore[import-not-found]

    lock: Holder = redis_lock.Lock(redis.Redis.from_url(nodes[0]["url"]), key, expire=lease_ms // 1000)
    return lock


def pottery(nodes: Sequence[Node], key: str, lease_ms: int) -> Holder:
    import redis
    from pottery import Redlock  # type: ignore[import-not-found]

    masters = {redis.Redis.from_url(node["url"]) for node in nodes}
    lock: Holder = Redlock(key=key, masters=masters, auto_release_time=lease_ms / 1000)
    return lock


class RedlockNg:
    """redlock-ng (the module `redlock`, as redlock-py's is called)."""

    def __init__(self, nodes: Sequence[Node], key: str, lease_ms: int) -> None:
        from redlock import Redlock

        self._manager = Redlock([node["url"] for node in nodes])
        self._key = key
        self._lease_ms = lease_ms

    def acquire(self, *, blocking: bool) -> bool:
        self._held = self._manager.acquire(self._key, self._lease_ms, blocking=blocking)
        return self._held is not None

    def release(self) -> None:
        self._manager.release(self._held)


class Glide:
    """Valkey GLIDE has no lock: its SET NX and its DELIFEQ (a script where that is unknown) make one."""

    script = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"

    def __init__(self, nodes: Sequence[Node], key: str, lease_ms: int) -> None:
        import glide_sync as glide  # type: ignore[import-not-found]

        node = nodes[0]
        where: dict[str, Any] = {name: node[name] for name in ("host", "port") if name in node}
        if "path" in node:
            where = {"unix_socket_path": node["path"]}
        login = None
        if "password" in node:
            login = glide.ServerCredentials(password=node["password"], username=node.get("username"))
        self._client = glide.GlideClient.create(
            glide.GlideClientConfiguration(
                [glide.NodeAddress(**where)], credentials=login, database_id=node.get("db", 0)
            )
        )
        self._key = key
        self._only_new = glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        self._lease = glide.ExpirySet(glide.ExpiryType.MILLSEC, lease_ms)
        self._delete = self._client.delifeq
        try:
            self._delete(key, "nobody's")
        except glide.RequestError:
            script = glide.Script(self.script)
            self._delete = lambda key, token: self._client.invoke_script(script, [key], [token])

    def acquire(self, *, blocking: bool) -> bool:
        self._token = secrets.token_hex(16)
        answer = self._client.set(self._key, self._token, conditional_set=self._only_new, expiry=self._lease)
        return answer == "OK"

    def release(self) -> None:
        if not self._delete(self._key, self._token):
            raise RuntimeError("the lock was gone before it was released")


PEERS: dict[str, tuple[Make, Sequence[str]]] = {
    "python-redis-lock": (python_redis_lock, ("redis", "hiredis")),
    "valkey-glide-sync": (Glide, ()),
    "redlock-ng": (RedlockNg, ("redis", "hiredis")),
    "pottery": (pottery, ("redis", "hiredis")),
}
"""By the name of the distribution: how its lock is made, and what else is worth naming beside it."""


def serve(lock: Holder, asked: TextIO, answers: TextIO) -> None:
    """Run the slices that are asked for."""
    for line in asked:
        want = json.loads(line)
        with quiet():
            done = cycles(lock, want["seconds"], want["limit"])
        print(json.dumps({"took_ns": done.took_ns.tolist(), "rate": done.rate}), file=answers, flush=True)


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peer prints must not end up between the answers
    make, beside = PEERS[name]
    begin = json.loads(sys.stdin.readline())
    lock = make(begin["nodes"], begin["key"], begin["lease_ms"])
    using = ", ".join(f"{package} {version(package)}" for package in beside)
    versions = f"{name} {version(name)}" + (f" ({using})" if using else "")
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    serve(lock, sys.stdin, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
