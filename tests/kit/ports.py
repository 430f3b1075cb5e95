"""Ports that this process uses once: what is still owed to one server must never reach the next."""

from __future__ import annotations

import random

__all__ = ["ports"]

ports = iter(random.sample(range(10_240, 20_000), 9_760))
"""Below those that the system hands out and those of LocalNodes; somebody else may use one all the same."""
