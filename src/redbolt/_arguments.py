"""Checks of what callers give us: each returns the value in the form that is used inside, or says what is
wrong.
"""

from __future__ import annotations

import math

from redbolt._engine import MAX_KEY

__all__ = [
    "check_bool", "check_drift", "check_handoffs", "check_quorum", "check_tries", "key_bytes", "lease_ms",
    "milliseconds", "seconds", "token_bytes",
]  # fmt: skip

_LONGEST_MS = 100 * 365 * 86_400_000  # a century; more would overflow the expiry of a server


def seconds(value: float, what: str, *, zero: bool = False) -> float:
    """A finite number of seconds above 0 (or from 0, with ``zero``)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} must be a number of seconds, not {type(value).__name__}")
    if value > _LONGEST_MS / 1000 and value != math.inf:
        raise ValueError(f"{what} must be less than a hundred years")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(
            f"{what} must be a finite number of seconds {'from' if zero else 'above'} 0, not {value!r}"
        )
    return value


def milliseconds(value: float, what: str) -> int:
    """A number of seconds above 0 as whole milliseconds, rounded up."""
    ms = seconds(value, what) * 1000
    return max(1, math.ceil(round(ms, 6)))  # 0.7 * 1000 is a hair above 700


def lease_ms(value: float, drift_factor: float, what: str = "timeout") -> int:
    """A lease in milliseconds that leaves some validity after drift is taken off."""
    ms = milliseconds(value, what)
    if ms * (1 - drift_factor) <= 2:
        raise ValueError(f"{what} of {value!r} seconds leaves no validity: clock drift alone takes more")
    return ms


def check_bool(value: bool, what: str) -> bool:
    """A real bool: a number given for one is a slip in the order of arguments."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be a bool, not {type(value).__name__}")
    return value


def check_drift(factor: float) -> float:
    """How far clocks may run apart, as a part of the lease."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"clock_drift_factor must be a number, not {type(factor).__name__}")
    if not 0 <= factor < 1:
        raise ValueError(f"clock_drift_factor must be from 0 to below 1, not {factor!r}")
    return factor


def check_quorum(quorum: int | None, nodes: int) -> int:
    """How many of the nodes must agree: a majority, or what the caller wants if that is no less."""
    majority = nodes // 2 + 1
    if quorum is None:
        return majority
    if isinstance(quorum, bool) or not isinstance(quorum, int):
        raise TypeError(f"quorum must be an int or None, not {type(quorum).__name__}")
    if not majority <= quorum <= nodes:
        raise ValueError(f"quorum must be from {majority} (a majority) to {nodes}, not {quorum}")
    return quorum


def check_tries(tries: int, what: str) -> int:
    """How many tries in all."""
    if isinstance(tries, bool) or not isinstance(tries, int):
        raise TypeError(f"{what} must be an int, not {type(tries).__name__}")
    if tries < 1:
        raise ValueError(f"{what} must be at least 1, not {tries}")
    return tries


def check_handoffs(handoffs: int) -> int:
    """How often a lock may be handed on in a row."""
    if isinstance(handoffs, bool) or not isinstance(handoffs, int):
        raise TypeError(f"max_handoffs must be an int, not {type(handoffs).__name__}")
    if handoffs < 0:
        raise ValueError(f"max_handoffs must be at least 0, not {handoffs}")
    return handoffs


def _encoded(value: str | bytes, what: str) -> bytes:
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{what} has a lone surrogate, which has no bytes in UTF-8: {value!r}") from None
    elif not isinstance(value, bytes):
        raise TypeError(f"{what} must be str or bytes, not {type(value).__name__}")
    if len(value) > MAX_KEY:
        raise ValueError(f"{what} must have at most {MAX_KEY} bytes, not {len(value)}")
    return value


def key_bytes(prefix: str | bytes, name: str | bytes) -> bytes:
    """The key of a lock: the prefix and the name, byte for byte."""
    encoded = _encoded(name, "name")
    if not encoded:
        raise ValueError("name must not be empty")
    return _encoded(_encoded(prefix, "prefix") + encoded, "prefix and name")


def token_bytes(token: str | bytes) -> bytes:
    """A caller's own token."""
    encoded = _encoded(token, "token")
    if not encoded:
        raise ValueError("token must not be empty")
    return encoded
