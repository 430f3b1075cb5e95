"""The one tree of errors; both engines and every lock raise from here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from redis import exceptions as _redis

__all__ = [
    "LockError",
    "LockLost",
    "LockNotOwned",
    "LockTimeout",
    "NodesUnavailable",
    "RedboltError",
    "ReleaseUnconfirmed",
    "SetupError",
    "is_setup_fault",
]


class RedboltError(_redis.RedisError):
    """Base of everything this library raises, except ValueError and TypeError for a caller's mistake."""


class LockError(RedboltError, _redis.LockError):
    """Something is wrong with one lock.

    ``lock_name`` is the key of the lock; ``causes`` maps the address of a node to what it answered
    or why it did not answer (empty where no node was asked).
    """

    def __init__(
        self,
        message: str | None = None,
        lock_name: str | bytes | None = None,
        causes: Mapping[str, str] | None = None,
    ) -> None:
        self.causes: dict[str, str] = dict(causes or {})
        if self.causes:
            told = "; ".join(f"{node}: {cause}" for node, cause in self.causes.items())
            message = f"{message} [{told}]"
        if isinstance(lock_name, bytes):
            lock_name = lock_name.decode(errors="backslashreplace")
        super().__init__(message, lock_name)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.message, self.lock_name, self.causes))


def _rebuild(
    kind: type[LockError], args: tuple[object, ...], message: str, lock_name: str, causes: dict[str, str]
) -> LockError:
    error = kind.__new__(kind)
    error.args, error.message, error.lock_name, error.causes = args, message, lock_name, causes
    return error


class LockTimeout(LockError):
    """The lock is taken by somebody else, and the waiting time is over."""


class LockNotOwned(LockError, _redis.LockNotOwnedError):
    """The caller does not hold the lock that it wants to release or extend."""


class LockLost(LockNotOwned):
    """The caller held the lock, and its lease ended before it was released."""


class NodesUnavailable(LockError, _redis.ConnectionError):
    """No quorum of nodes could be reached, so nobody can say whether the lock is free."""


class ReleaseUnconfirmed(LockError):
    """The release was sent, but no quorum of nodes confirmed it. It can be tried again."""


class SetupError(LockError):
    """Waiting cannot help: credentials, permissions, or a server that is not set up for locks."""


# Leading words of server errors that no retry mends. A script engine wraps the error of the command that
# failed inside it, and reports a denied permission as a plain ERR: so the word is looked for anywhere.
_SETUP_WORDS = (
    r"(?:^|[\s:-])(?:NOAUTH|WRONGPASS|NOPERM|NOPROTO|DENIED|MOVED|ASK|CROSSSLOT)\b"
    r"|ACL failure in script|can't run this command"
    r"|(?i:invalid (?:username-)?password|without any password configured)"
    r"|(?i:DB index is out of range|unknown command|syntax error|wrong number of arguments)"
    r"|(?:^|\s)(?:Authentication\w*|Authorization|NoPermission|Data)Error: |has no socket that a lock can use"
    r"|\[SSL: (?!UNEXPECTED_EOF)|(?i:certificate verify failed)"
)


def is_setup_fault(cause: str) -> bool:
    """Say whether a node's ``cause`` names a fault that waiting cannot mend."""
    return re.search(_SETUP_WORDS, cause) is not None  # compiled when first needed, not at import
