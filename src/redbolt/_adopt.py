"""What a URL or a client says about its server, as the arguments of a `Node`.

A client itself is never used, nor is its pool: only what the pool would give to a new connection is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import redis.connection
from redis.client import Pipeline, Redis
from redis.connection import Connection, SSLConnection, parse_url
from redis.exceptions import RedisError

from redbolt._dialer import Dialer

__all__ = ["is_client", "refusal", "settings_of_client", "settings_of_url"]

_ADDRESS = frozenset({"host", "port", "path", "db"})
_KNOWN = _ADDRESS | {
    "client_name", "password", "protocol", "socket_connect_timeout", "socket_timeout", "username",
}  # fmt: skip
# What says nothing about which server to reach, nor about what a lock does there: how a client reads and
# writes, caches, repeats, keeps its pool, and introduces its library.
_NEUTRAL = frozenset({
    "cache_allow_list", "cache_deny_list", "cache_enabled", "cache_max_size", "cache_policy", "cache_ttl",
    "client_cache", "command_packer", "decode_responses", "driver_info", "encoding", "encoding_errors",
    "event_dispatcher", "health_check_interval", "himport_registry", "legacy_responses", "lib_name",
    "lib_version", "maint_notifications_config", "maint_notifications_pool_handler",
    "maintenance_notification_hash", "maintenance_state", "max_connections",
    "orig_host_address", "orig_socket_connect_timeout", "orig_socket_timeout",
    "oss_cluster_maint_notifications_handler", "parser_class", "retry", "retry_on_error", "retry_on_timeout",
    "socket_keepalive", "socket_keepalive_options", "socket_read_size", "timeout",
})  # fmt: skip
# What a connection of its own does better without: redbolt repeats by itself, and reads through no cache.
_NOT_DIALLED = _NEUTRAL - {
    "command_packer", "decode_responses", "driver_info", "encoding", "encoding_errors", "lib_name",
    "lib_version", "parser_class", "socket_keepalive", "socket_keepalive_options", "socket_read_size",
}  # fmt: skip
_LONG = 5.0  # a connect timeout from here on is never the shorter one


# ---- URLs ----


def settings_of_url(url: str) -> dict[str, Any]:
    """Read ``redis://``, ``rediss://`` or ``unix://``.

    Raises:
        ValueError: another scheme, or an option that a lock cannot honour.
    """
    try:
        settings: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ValueError(f"not the URL of a node: {error}") from None
    kind = settings.pop("connection_class", Connection)
    if url.startswith("unix://") and not settings.get("path"):
        raise ValueError("a unix:// URL needs the path of the socket")
    if kind is SSLConnection:
        dialer = _dialer(kind, settings, "TLS")
        try:
            dialer.make()  # sends nothing; only to see whether it takes these options
        except (TypeError, ValueError, RedisError) as error:
            raise ValueError(f"the URL has options that a lock cannot honour: {error}") from None
        return _settings(settings, dialer)
    unknown = settings.keys() - _KNOWN - _NEUTRAL
    if unknown:
        raise ValueError(f"the URL has options that a lock cannot honour: {', '.join(sorted(unknown))}")
    return _settings(settings, None)


# ---- clients ----


def _modules() -> Iterator[Any]:
    """The connection modules of redis-py, and of valkey-py where the program has loaded that."""
    yield redis.connection
    valkey = sys.modules.get("valkey.connection")
    if valkey is not None:
        yield valkey


def is_client(thing: object) -> bool:
    """Say whether it is a ``redis.Redis`` or ``valkey.Valkey``, or of a class that is derived from one."""
    return issubclass(type(thing), _client_classes())  # a mock says what it likes to isinstance()


def _client_classes() -> tuple[type, ...]:
    valkey = sys.modules.get("valkey.client")
    return (Redis,) if valkey is None else (Redis, valkey.Valkey)


def _pipeline_classes() -> tuple[type, ...]:
    valkey = sys.modules.get("valkey.client")
    return (Pipeline,) if valkey is None else (Pipeline, valkey.Pipeline)


def refusal(thing: object) -> str:
    """Why something is no node, and what to pass instead."""
    kind = type(thing)
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    names = [name for name in names if ".commands." not in name]
    for word, instead in (
        (".asyncio.", "the settings of an asyncio client are not read: pass a URL, or a plain client"),
        ("Cluster", "a lock lives on single servers, not on a cluster: pass the URL of one of them"),
        ("entinel", "pass the URL, or a plain client, of the server itself, not of its sentinels"),
        ("Pipeline", "pass the client itself, not its pipeline"),
        ("ConnectionPool", "pass the client itself, not its pool"),
    ):  # fmt: skip
        if any(word in name and name.startswith(("redis.", "valkey.")) for name in names):
            return f"a {kind.__name__} is no node: {instead}"
    return f"a node is a URL, a redis.Redis or valkey.Valkey client, or a redbolt.Node, not {kind.__name__}"


def settings_of_client(client: Any) -> dict[str, Any]:
    """Read what a client's pool would give to a new connection.

    Raises:
        TypeError: a client of another kind: of a cluster, of sentinels, for asyncio, a pipeline, a mock.
    """
    if not is_client(client) or issubclass(type(client), _pipeline_classes()):
        raise TypeError(refusal(client))
    pool = client.connection_pool
    pools = tuple(module.ConnectionPool for module in _modules())
    if not issubclass(type(pool), pools) or any("Sentinel" in base.__name__ for base in type(pool).__mro__):
        raise TypeError(refusal(pool).replace("is no node", "leads to no single server"))
    kind, settings = pool.connection_class, pool.connection_kwargs
    if not isinstance(kind, type) or not isinstance(settings, Mapping):
        raise TypeError(f"a {type(client).__name__} whose pool has no connection class is no node")
    what = _obstacle(kind, settings)
    return _settings(settings, None if what is None else _dialer(kind, settings, what))


def _obstacle(kind: type, settings: Mapping[str, Any]) -> str | None:
    """The setting that only the client's own connection class can honour; None if there is none."""
    modules = list(_modules())
    if kind in [module.SSLConnection for module in modules]:
        return "TLS"
    if kind not in [x for module in modules for x in (module.Connection, module.UnixDomainSocketConnection)]:
        return f"the client's connection class {kind.__name__}"
    if settings.get("credential_provider") is not None:
        return "a credential provider"
    for name, value in settings.items():
        if value is not None and name not in _KNOWN | _NEUTRAL and not _is_usual(name, value):
            return f"the client's {name}"
    return None


def _is_usual(name: str, value: object) -> bool:
    """Say whether every client has such an option: what a later redis-py adds by itself is no obstacle."""
    usual = Redis().connection_pool.connection_kwargs.get(name)
    return usual is not None and type(usual) is type(value) and (usual == value or not callable(value))


def _dialer(kind: type, settings: Mapping[str, Any], what: str) -> Dialer:
    arguments = {
        name: value
        for name, value in settings.items()
        if name not in _NOT_DIALLED and type(value) is not object  # a bare object says "not given"
    }
    for name in ("driver_info", "lib_name", "lib_version"):  # saves two round trips; and one hangs up on them
        if name in arguments:
            arguments[name] = None
    if kind is SSLConnection or arguments.get("protocol", 0) is None:
        arguments["protocol"] = arguments.get("protocol") or 2  # where it is not said, no HELLO is needed
    return Dialer(kind, tuple(arguments.items()), what)


# ---- both ----


def _settings(settings: Mapping[str, Any], dialer: Dialer | None) -> dict[str, Any]:
    """The arguments of a `Node`, in the types that it wants."""
    found: dict[str, Any] = {"dialer": dialer}
    for name in ("host", "username", "password", "client_name"):
        if settings.get(name):  # to clients, an empty one is none
            found[name] = _text(settings[name])
    if settings.get("path") is not None:
        found["path"] = os.fsdecode(settings["path"])
    for name in ("port", "db"):
        if settings.get(name) is not None:
            found[name] = int(settings[name])
    protocol = int(settings.get("protocol") or 2)
    if protocol != 2:  # that is spoken where nothing is said, so the two are one
        found["protocol"] = protocol
    if settings.get("socket_timeout") is not None:
        found["socket_timeout"] = settings["socket_timeout"]
    connect_timeout = settings.get("socket_connect_timeout")
    if connect_timeout is not None and connect_timeout < _LONG:
        found["connect_timeout"] = connect_timeout
    return found


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
