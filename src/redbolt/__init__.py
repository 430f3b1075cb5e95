"""Distributed locks on Redis and Valkey: fast, safe under faults, and nice to read."""

from redbolt._engine import EngineChoice, engine
from redbolt._engine import close_engines as close
from redbolt.errors import (
    LockError,
    LockLost,
    LockNotOwned,
    LockTimeout,
    NodesUnavailable,
    RedboltError,
    ReleaseUnconfirmed,
    SetupError,
)
from redbolt.lease import Lease
from redbolt.lock import Lock, RedLock
from redbolt.node import Node
from redbolt.retry import Retry

__version__ = "0.1.0"

__all__ = [
    "EngineChoice",
    "Lease",
    "Lock",
    "LockError",
    "LockLost",
    "LockNotOwned",
    "LockTimeout",
    "Node",
    "NodesUnavailable",
    "RedLock",
    "RedboltError",
    "ReleaseUnconfirmed",
    "Retry",
    "SetupError",
    "close",
    "engine",
]
