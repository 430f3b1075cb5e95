"""redis-py's lock to the letter, on an engine of ours: only the way to the server is another.

    client.lock("name", lock_class=redbolt.compat.redis_py.Lock)

It keeps what `redbolt.Lock` does otherwise, such as keys that never end; docs/compat.md lists it all.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import re
import threading
import time as mod_time
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, Self

from redis import exceptions
from redis.client import Redis
from redis.exceptions import LockError, LockNotOwnedError, RedisError

from redbolt._clock import now_ns, sleep_until
from redbolt._engine import Votes, chosen
from redbolt._judge import GRANTED, UNDECIDED
from redbolt._programs import ADD_TIME, DROP, KEEP, OWNED, SET_TIME, TAKE, TYPE, Program
from redbolt.node import Node, as_node

__all__ = ["Lock"]

_log = logging.getLogger("redis.lock")

_LIMIT = 60.0  # seconds a node may take to answer a client without a socket timeout
_LONGEST_LIMIT = 86_400.0
_BEHIND = "queued behind"  # an engine's cause for a node whose answer another thread will read
_PAUSE_NS = 1_000_000
_WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


def _text(program: Program) -> str:
    """The script of a program as text."""
    body = program.forms[-1][1]
    assert isinstance(body, bytes)
    return body.decode()


_RELEASE, _EXTEND, _REACQUIRE = _text(DROP), _text(ADD_TIME), _text(SET_TIME)
_SCRIPTS = (
    ("lua_release", "LUA_RELEASE_SCRIPT", _RELEASE),
    ("lua_extend", "LUA_EXTEND_SCRIPT", _EXTEND),
    ("lua_reacquire", "LUA_REACQUIRE_SCRIPT", _REACQUIRE),
)


class Lock:
    """redis-py's ``redis.lock.Lock``, with its arguments, attributes, errors and override points.

    Commands go to the server that the client names, but through a redbolt engine: the client's own
    connections serve only scripts that a subclass brings along. Its settings that matter are kept: address,
    database, credentials, encoding, retries, and the socket timeout as the limit for each answer.

    Args:
        redis: a ``redis.Redis``, or of a class that is derived from it.
        name: the key.
        timeout: life of the key in seconds. None (the default) or 0: it never ends by itself.
        sleep: seconds between two tries of a waiting acquire. Default 0.1.
        blocking: whether `acquire` waits while the lock is taken. Default True.
        blocking_timeout: how many seconds it waits at most. None (the default) for ever.
        thread_local: True (the default): each thread sees only the token that it acquired itself.
        raise_on_release_error: False makes the end of a ``with`` block log a lock that was lost, instead of
            raising. Default True.
        engine: ``"native"`` or ``"pure"`` force an engine; None (the default) takes the best that is
            installed.

    Every call that asks the server may raise what redis-py raises: ``redis.exceptions.TimeoutError``,
    ``ConnectionError``, ``AuthenticationError``, ``ResponseError`` and their kind.

    Attributes:
        local: its ``token`` is what marks the acquisition on the server; None when there is none. With
            ``thread_local``, a thread that neither made the lock nor acquired it has no such attribute.
        lua_release, lua_extend, lua_reacquire: the registered scripts. They run only where they are not those
            of this class; else the engine does the same with the best command that the server knows.

    Raises:
        TypeError: the client is no ``redis.Redis``, or a pipeline, or one of sentinels.
        ValueError: it has a setting that cannot be kept, or there is no such engine.
        ImportError: the forced engine is not installed.
    """

    lua_release: Any = None
    lua_extend: Any = None
    lua_reacquire: Any = None

    LUA_RELEASE_SCRIPT: str = _RELEASE
    LUA_EXTEND_SCRIPT: str = _EXTEND
    LUA_REACQUIRE_SCRIPT: str = _REACQUIRE

    def __init__(
        self,
        redis: Redis,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        engine: str | None = None,
    ) -> None:
        if not isinstance(redis, Redis):
            raise TypeError(f"this lock needs a redis.Redis, not {type(redis).__name__}")
        node = as_node(redis)
        self.redis = redis
        self.name: Any = name
        self.timeout: Any = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.local: Any = threading.local() if self.thread_local else SimpleNamespace()
        self.local.token = None
        self._engine, self.engine_choice = chosen((node,), engine)
        self._limit_ns = int(min(node.socket_timeout or _LIMIT, _LONGEST_LIMIT) * 1e9)
        self._last_key: tuple[Any, bytes] = (object(), b"")
        self.register_scripts()

    def register_scripts(self) -> None:
        """Give this class the scripts that it has not yet, by ``redis.register_script``."""
        cls = type(self)
        for name, text_name, ours in _SCRIPTS:
            script, text = getattr(cls, name), getattr(cls, text_name)
            # A text of its own also counts where the script of the base class was registered first.
            if script is None or (text != ours and getattr(script, "script", None) == ours):
                setattr(cls, name, self.redis.register_script(text))

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock.

        Args:
            sleep, blocking, blocking_timeout: as in the constructor, for this call.
            token: the value to set. Default: a fresh random one.

        Returns:
            True when it was set; False when the key was there already: at once without ``blocking``, else
            as soon as the next try would come after ``blocking_timeout``.
        """
        if sleep is None:
            sleep = self.sleep
        fresh = token is None
        value = os.urandom(16).hex().encode() if token is None else self._encode(token)
        if blocking is None:
            blocking = self.blocking
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        stop_at = None if blocking_timeout is None else mod_time.monotonic() + blocking_timeout
        if not fresh:
            self._settle(value)
        try:
            while not self.do_acquire(value):
                if not blocking:
                    return False
                if stop_at is not None and mod_time.monotonic() + sleep > stop_at:
                    return False
                mod_time.sleep(sleep)
            self.local.token = value
            return True
        except BaseException as error:
            # An interrupt may come between the server's answer and here; the key might have no end.
            if fresh and not isinstance(error, RedisError):
                self._engine.discard(self._key(), value)
                if getattr(self.local, "token", None) is value:
                    self.local.token = None
            raise

    def do_acquire(self, token: bytes) -> bool:
        """Try once to set the key. A try whose answer is lost is taken back.

        Args:
            token: the value.

        Returns:
            Whether it was set.
        """
        program = KEEP
        extra: tuple[bytes, ...] = ()
        if self.timeout:
            program, extra = TAKE, (b"%d" % int(self.timeout * 1000),)
        votes = self._engine.votes()
        self._try(votes, token, program, extra)
        if votes.verdict == UNDECIDED:

            def again() -> Votes:
                votes = self._engine.votes()
                self._settle(token)
                self._try(votes, token, program, extra)
                return votes

            votes = self._insist(votes, again)
        return votes.verdict == GRANTED

    def release(self) -> None:
        """Give the lock back. The token is forgotten first, whatever comes of it.

        Raises:
            LockError: there is no token.
            LockNotOwnedError: the key holds another token, or is gone.
        """
        token = self.local.token
        if token is None:
            raise self._refusal(LockError, "Cannot release a lock that's not owned or is already unlocked.")
        self.local.token = None
        self.do_release(token)

    def do_release(self, expected_token: bytes) -> None:
        """Delete the key if it holds ``expected_token``.

        Raises:
            LockNotOwnedError: it does not.
        """
        if self._differs(self.lua_release, _RELEASE):
            done = self.lua_release(keys=[self.name], args=[expected_token], client=self.redis)
        else:
            token = self._encode(expected_token)
            votes = self._ask(DROP, token)
            done = votes is None or votes.hits or self._foreign()
        if not done:
            raise self._refusal(LockNotOwnedError, "Cannot release a lock that's no longer owned")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Lengthen the life of the key.

        Args:
            additional_time: seconds to add.
            replace_ttl: True: the seconds are the new life, instead of being added. Default False.

        Raises:
            LockError: there is no token, or the lock has no timeout.
            LockNotOwnedError: the key holds another token, is gone, or never ends.
        """
        self._check("extend")
        return self.do_extend(additional_time, replace_ttl)

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Have the server do what `extend` asks for."""
        ms, replace = int(additional_time * 1000), "1" if replace_ttl else "0"
        token = self.local.token
        if self._differs(self.lua_extend, _EXTEND):
            done = self.lua_extend(keys=[self.name], args=[token, ms, replace], client=self.redis)
        else:
            done = self._renew(ADD_TIME, self._encode(token), b"%d" % ms, replace.encode())
        if not done:
            raise self._refusal(LockNotOwnedError, "Cannot extend a lock that's no longer owned")
        return True

    def reacquire(self) -> Literal[True]:
        """Give the key its full life again, from now on.

        Raises:
            LockError: there is no token, or the lock has no timeout.
            LockNotOwnedError: the key holds another token, or is gone.
        """
        self._check("reacquire")
        return self.do_reacquire()

    def do_reacquire(self) -> Literal[True]:
        """Have the server do what `reacquire` asks for."""
        ms, token = int(self.timeout * 1000), self.local.token
        if self._differs(self.lua_reacquire, _REACQUIRE):
            done = self.lua_reacquire(keys=[self.name], args=[token, ms], client=self.redis)
        else:
            done = self._renew(SET_TIME, self._encode(token), b"%d" % ms)
        if not done:
            raise self._refusal(LockNotOwnedError, "Cannot reacquire a lock that's no longer owned")
        return True

    def locked(self) -> bool:
        """Ask the server whether the key is there, whoever set it."""
        return self._type() != "none"

    def owned(self) -> bool:
        """Ask the server whether the key holds the token."""
        token = self.local.token
        if not isinstance(token, bytes) or not token:
            return self._type() == "string" and token == b"" and self._has(token)
        return self._has(token) or self._foreign()

    def __enter__(self) -> Self:
        if self.acquire():
            return self
        raise self._refusal(LockError, "Unable to acquire lock within the time specified")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error:
                raise
            _log.warning("Lock was unlocked or no longer owned when exiting context manager.")

    # ---- what its methods share ----

    def _check(self, what: str) -> None:
        if self.local.token is None:
            raise self._refusal(LockError, f"Cannot {what} an unlocked lock")
        if self.timeout is None:
            raise self._refusal(LockError, f"Cannot {what} a lock with no timeout")

    def _refusal(self, kind: type[LockError], message: str) -> LockError:
        error = kind(message)  # redis-py 5.0 has no second argument
        error.message, error.lock_name = message, self.name
        return error

    def _encode(self, value: Any) -> bytes:
        if type(value) is bytes:
            return value
        return bytes(self.redis.get_encoder().encode(value))  # type: ignore[no-untyped-call]

    def _key(self) -> bytes:
        last = self._last_key
        if last[0] is not self.name:
            self._last_key = last = (self.name, self._encode(self.name))
        return last[1]

    @staticmethod
    def _differs(script: Any, ours: str) -> bool:
        """Whether somebody else has put a script in the place of ours."""
        return script is not None and getattr(script, "script", None) != ours

    def _try(self, votes: Votes, token: bytes, program: Program, extra: tuple[bytes, ...]) -> None:
        """One try; what an interrupt leaves behind is taken back."""
        key = self._key()
        try:
            self._engine.attempt(votes, key, token, 0, 1, 0, self._limit_ns, program, extra)
        except BaseException:
            if votes.verdict == GRANTED:
                self._engine.discard(key, token)
            raise

    def _ask(self, program: Program, *args: bytes) -> Votes | None:
        """Have the server run a program.

        None where another thread has the answer: it was run behind an unanswered write of the same token.
        """
        votes = self._engine.votes()
        self._engine.round(votes, program, self._key(), args, 1, self._limit_ns)
        if votes.verdict != UNDECIDED:
            return votes
        if program.writes and votes.outcomes()[0][1].startswith(_BEHIND) and self._settle(args[0]):
            return None

        def again() -> Votes:
            votes = self._engine.votes()
            self._engine.round(votes, program, self._key(), args, 1, self._limit_ns)
            return votes

        return self._insist(votes, again)

    def _insist(self, votes: Votes, again: Callable[[], Votes]) -> Votes:
        """Go on after a fault: ask again as often as the client's `Retry` says, or raise."""
        errors = [self._error(votes)]
        retry = self.redis.get_retry()
        if retry is None:
            raise errors[0]

        def once_more() -> Votes:
            if errors:
                raise errors.pop()
            votes = again()
            if votes.verdict == UNDECIDED:
                raise self._error(votes)
            return votes

        # A copy: a back-off may have a state, and other threads their own.
        return copy.deepcopy(retry).call_with_retry(once_more, lambda error: None)

    def _settle(self, token: bytes) -> bool:
        """Wait until every earlier write of this token was answered; False if that takes too long."""
        deadline_ns = now_ns() + self._limit_ns
        while self._engine.pending(token):
            if now_ns() >= deadline_ns:
                return False
            sleep_until(now_ns() + _PAUSE_NS)
        return True

    def _renew(self, program: Program, token: bytes, *args: bytes) -> bool:
        votes = self._ask(program, token, *args)
        if votes is None:
            return self._has(token)
        return votes.verdict == GRANTED or self._foreign()

    def _has(self, token: bytes) -> bool:
        votes = self._ask(OWNED, token, b"%d" % len(token))
        return votes is not None and votes.verdict == GRANTED

    def _type(self) -> str:
        """The type of the key as far as it can be a lock's: "string" or "none"; else the server's error."""
        votes = self._ask(TYPE)
        assert votes is not None  # it writes nothing
        found = votes.outcomes()[0][1]
        if found not in ("string", "none"):
            raise exceptions.ResponseError(_WRONGTYPE)
        return found

    def _foreign(self) -> Literal[False]:
        """Raise as the server does if the key has another type: a round only counts it as a no."""
        self._type()
        return False

    def _error(self, votes: Votes) -> RedisError:
        return _error_of(votes.outcomes()[0][1], self._engine.nodes[0])


# Leading words of server errors that redis-py has a class for. It leaves these words out of the message.
_CLASSES: dict[str, type[RedisError]] = {
    "ERR": exceptions.ResponseError,
    "ASK": exceptions.AskError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
    "LOADING": exceptions.BusyLoadingError,
    "MASTERDOWN": exceptions.MasterDownError,
    "MOVED": exceptions.MovedError,
    "NOAUTH": exceptions.AuthenticationError,
    "NOPERM": exceptions.NoPermissionError,
    "NOSCRIPT": exceptions.NoScriptError,
    "OOM": exceptions.OutOfMemoryError,
    "READONLY": exceptions.ReadOnlyError,
    "TRYAGAIN": exceptions.TryAgainError,
    "WRONGPASS": exceptions.AuthenticationError,
}
# Messages behind ERR that it has another class for.
_MESSAGES: dict[str, type[RedisError]] = {
    "max number of clients reached": exceptions.ConnectionError,
    "invalid password": exceptions.AuthenticationError,
    "AUTH <password> called without any password": exceptions.AuthenticationError,
    "Client sent AUTH, but no password is set": exceptions.AuthenticationError,
}


def _error_of(cause: str, node: Node) -> RedisError:
    """The error that redis-py would raise for an engine's ``cause``."""
    cause = cause.removeprefix("left out until it answers again: ")
    if re.match(r"[A-Z][A-Z]+ ", cause):
        word, _, rest = cause.partition(" ")
        if word not in _CLASSES:
            return exceptions.ResponseError(cause)
        if word == "ERR":
            for message, kind in _MESSAGES.items():
                if rest.startswith(message):
                    return kind(rest)
        return _CLASSES[word](rest)
    where = node.path or f"{node.host}:{node.port}"
    if cause.startswith("no answer"):
        return exceptions.TimeoutError("Timeout reading from socket")
    if cause.startswith("no connection"):
        return exceptions.TimeoutError("Timeout connecting to server")
    if cause == "the server closed the connection":
        return exceptions.ConnectionError("Connection closed by server.")
    for code in errno.errorcode:
        if os.strerror(code) == cause:
            if code in (errno.ECONNRESET, errno.EPIPE):
                return exceptions.ConnectionError(f"Error while reading from {where} : {(code, cause)}")
            return exceptions.ConnectionError(f"Error {code} connecting to {where}. {cause}.")
    return exceptions.ConnectionError(f"Error connecting to {where}. {cause}.")
