"""A lock on one server or on many, by the number of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redbolt import Lock, RedLock

__all__ = ["place"]


def place(urls: Sequence[str], kind: str, name: str = "name", timeout: float = 30, **options: Any) -> Lock:
    """A `Lock` for one address, a `RedLock` for several."""
    if len(urls) == 1:
        return Lock(urls[0], name, timeout, engine=kind, **options)
    return RedLock(urls, name, timeout, engine=kind, **options)
