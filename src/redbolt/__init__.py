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
from redbolt.lease import Lease, Lost
from redbolt.lock import Grant, Lock, RedLock
from redbolt.locker import Locker
from redbolt.node import Node
from redbolt.reentrant import ReentrantLock
from redbolt.retry import Retry

__version__ = "0.1.0"

__all__ = [
    "EngineChoice",
    "Grant",
    "Lease",
    "Lock",
    "LockError",
    "LockLost",
    "LockNotOwned",
    "LockTimeout",
    "Locker",
    "Lost",
    "Node",
    "NodesUnavailable",
    "RedLock",
    "RedboltError",
    "ReentrantLock",
    "ReleaseUnconfirmed",
    "Retry",
    "SetupError",
    "close",
    "engine",
]
