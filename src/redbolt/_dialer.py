"""A recipe for connections that only a client's own connection class can make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Dialer"]


class _Same:
    """Stands in a comparison for a value that cannot be hashed: equal to itself alone, and kept alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _comparable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dialer:
    """``connection_class(**arguments)``, not yet called. Immutable; equal to another with equal parts.

    Args:
        connection_class: makes a connection object with the methods and the socket of redis-py's.
        arguments: for it, by name. What cannot be hashed is equal only to itself.
        what: the setting that asks for it, in words: "TLS", say.
    """

    connection_class: type
    arguments: tuple[tuple[str, Any], ...]
    what: str

    def _parts(self) -> tuple[object, ...]:
        items = frozenset((name, _comparable(value)) for name, value in self.arguments)
        return self.connection_class, items, self.what

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dialer):
            return NotImplemented
        return self is other or self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        return f"<Dialer {self.name}>"

    def __deepcopy__(self, memo: object) -> Dialer:
        return self

    @property
    def name(self) -> str:
        """The name of the class: all that is ever shown of it."""
        return self.connection_class.__name__

    @property
    def why(self) -> str:
        """Why a node with it needs the pure engine, as `redbolt.engine` tells it."""
        return f"{self.what} is honoured by the pure engine only"

    def make(self) -> Any:
        """A new connection object, not connected yet."""
        return self.connection_class(**dict(self.arguments))

    def secrets(self) -> list[str]:
        """What of it must not be shown even if a server repeats it."""
        values = [value for name, value in self.arguments if "password" in name and value]
        return [
            value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values
        ]
