"""The engine contract, and which engine a lock uses.

An engine talks to a fixed tuple of nodes. Whoever implements it keeps these rules, which the parity suite
checks:

1.  A round writes to every node before it reads from any, in the calling thread, with one poll over all of
    them. Other Python threads run meanwhile. It ends when the votes have decided it (`_judge.verdict`) or
    ``limit_ns`` after its start.
2.  A channel is one connection to each node, used by one thread for one round at a time; idle ones wait on
    a stack.
3.  A connection has a first-in-first-out queue of reply slots. A slot answers only the round that made it;
    a reply that comes after its round is read by a later one, or by the agent, and never counted.
4.  Order per token: a command for a token goes on the connection that still has an unanswered command for
    that token, whichever channel it belongs to; a program with ``after`` on the one that has an unanswered
    command for the token named there. On a channel that another thread uses it is queued there, with nobody
    waiting for the reply.
5.  A try that is not granted, or is interrupted, queues its undo (the delete that its program names) on the
    same connection to every node that did not say no.
6.  Every unanswered write of a token is remembered with its undo or delete. If the connection dies, that is
    sent on the next connection to the node, before anything else; until its bound (the lease, or a minute
    for a release) is over.
7.  A node that leaves a reply (or a connect) open beyond ``limit_ns`` is suspect: it gets no tries, extends
    or reads, only deletes, until it has answered anything, or was reconnected with an answered handshake.
8.  A delete that nobody waits for is a plain command already answered on that connection, or else a whole
    EVAL.
9.  A connection that is given up while it may have unread replies is retired: its sending side is shut
    down, and it is read to its end, or for a bound, before it is closed.
10. After a fork the child has no connection, no channel, no agent and no buffered token of its parent.
11. What a node sends can never make the client hold more than `MAX_REPLY` bytes for it.
12. Leases are renewed by the agent, on connections of its own that never write a first token; those that are
    due are sent together. A renewal is a round of its own: rules 3, 4 and 7 hold for it. Only nodes that
    still have the token say yes. Once a quorum has, the token is put back on those that said no, with its
    undo by rule 6; that is no vote.
13. After `Renewal.stop` has returned nothing that writes the token is sent for it, on any node, but what
    others ask for. What was sent before is a write of the token by rule 4.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from redbolt import _process
from redbolt._programs import DROP, EXTEND, TAKE, Program
from redbolt.node import Node

__all__ = [
    "CHANGED",
    "GONE",
    "HELD_TOO_LONG",
    "LIFE_TOLD",
    "LOST",
    "MAX_KEY",
    "MAX_REPLY",
    "RAN_OUT",
    "READY",
    "UNANSWERED",
    "Attempt",
    "Engine",
    "EngineChoice",
    "Event",
    "Gate",
    "Renewal",
    "Votes",
    "Watch",
    "choose",
    "chosen",
    "close_engines", "common_order",
    "engine",
    "engine_for",
]  # fmt: skip

MAX_KEY = 65_536
"""Longest key and token that an engine packs, in bytes."""
MAX_REPLY = 1_048_576
"""Most unparsed bytes that a connection may hold; a server that sends more is cut off."""


# What a watch tells; see `Watch.wait`.
CHANGED: Final = 0
"""The node says that a key has changed or has ended. The mark is the key's, or 0: any key."""
LIFE_TOLD: Final = 1
"""The answer to an `arm`, or to the one that went with a try: the value is the life of the key in ms, -1 if
it has no end, -2 if there is no such key.
"""
LOST: Final = 2
"""The node tells nothing more: with value 0 since the connection has ended, or could not be made; with value
1 since the node does not know or permit this way of watching. What was armed there is to be armed again.
"""
READY: Final = 3
"""There is a connection to the node now, so that it can be armed."""

# Why a lease was lost; see `Renewal.lost`.
GONE: Final = 1
"""A quorum of nodes said that they do not have the token."""
UNANSWERED: Final = 2
"""No quorum of nodes could say anything to a renewal, until it was too late."""
HELD_TOO_LONG: Final = 3
"""It was held for as long as was allowed."""
RAN_OUT: Final = 4
"""It ended without a renewal: there was to be none, or this process did not run in time."""

Event: TypeAlias = tuple[int, int, int, int]
"""What, the index of the node, the mark of a key, and a value."""


Attempt: TypeAlias = "tuple[Votes, bytes, bytes | None, int, int, int, int, Program, tuple[bytes, ...], int]"
"""The arguments of a try."""


class Votes(Protocol):
    """What one round came to. Made by ``Engine.votes()`` and filled by the engine before its call returns."""

    @property
    def verdict(self) -> int:
        """GRANTED, REFUSED or UNDECIDED, of `redbolt._judge`."""

    @property
    def yes(self) -> int:
        """How many nodes said yes."""

    @property
    def no(self) -> int:
        """How many nodes said no."""

    @property
    def hits(self) -> int:
        """How many nodes deleted something."""

    @property
    def token(self) -> bytes:
        """The token of the try."""

    @property
    def started_ns(self) -> int:
        """The clock just before the first byte."""

    @property
    def ended_ns(self) -> int:
        """The clock when the verdict was known."""

    @property
    def valid_until_ns(self) -> int:
        """End of validity of a granted try, by the clock."""

    @property
    def touched(self) -> int:
        """A bit for each node that may have executed it: what was sent there, and not answered with no."""

    def outcomes(self) -> list[tuple[int, str]]:
        """Per node: OPEN, YES, NO or FAULT, and the cause of a fault or the text of a reply."""


class Gate(Protocol):
    """Where a thread of this process waits for another one."""

    def wait(self, until_ns: int) -> bool:
        """Block until somebody wakes it, or has done so since the last wait (True; it may also be True for no
        reason), or until the clock reads ``until_ns`` (False).
        """

    def wake(self) -> None:
        """End the `wait` that runs, or else the next one."""


class Renewal(Protocol):
    """What the agent does for one lease. The lease ends, and nothing more is done, when nobody refers to it.

    The agent renews in rounds of ``limit_ns`` (`redbolt._judge` says when: `renewal_due_ns`, `give_up_ns`,
    `renewal_pause_ns`). A round that a quorum answered with yes gives a new validity, unless the old one is
    over: nothing revives it. After one that a quorum answered with no it is lost (GONE), and what is left
    of the token is deleted. All others are repeated until it is too late. It is also lost at `give_up_ns`
    if it may not be renewed any more; what is only watched is lost at the end of its validity.
    """

    @property
    def valid_until_ns(self) -> int:
        """End of validity by the clock; 0 once it is lost."""

    @property
    def started_ns(self) -> int:
        """The clock just before the first byte of what last gave the key its life."""

    @property
    def length_ms(self) -> int:
        """That life."""

    @property
    def touched(self) -> int:
        """A bit for each node that may have the token."""

    @property
    def lost(self) -> int:
        """0, or why it was lost: GONE, UNANSWERED, HELD_TOO_LONG, RAN_OUT. It is told here, and with the
        gate, no later than the end of validity, if the process runs.
        """

    @property
    def renewed(self) -> int:
        """How many renewals were granted."""

    @property
    def failed(self) -> int:
        """How many were not."""

    @property
    def busy(self) -> bool:
        """Whether a renewal is under way that some node has not answered yet, within its time."""

    def stop(self) -> None:
        """Renew no more, and say no more that it is lost. Whoever waits for that is woken. Idempotent."""

    def pause(self) -> None:
        """Begin no renewal until `resume`. The lease can be lost meanwhile."""

    def resume(self) -> None:
        """Go on; a renewal that is due is made."""

    def note(self, started_ns: int, length_ms: int, valid_until_ns: int) -> None:
        """The holder itself has given the key a new life. The next renewal is due accordingly."""

    def shorten(self, valid_until_ns: int) -> None:
        """Validity ends then, if that is earlier."""

    def doubt(self, surely_ns: int) -> None:
        """A write may yet be executed that gives the key a shorter life: no later renewal, and no `note`, is
        good for longer than ``surely_ns`` from its start. The least of several counts.
        """

    def bound(self, until_ns: int) -> None:
        """The lease may be held until then, from now on (for another holder)."""

    def lose(self, reason: int) -> None:
        """The holder itself has found out that it is lost."""

    def wait(self, until_ns: int) -> bool:
        """Block until it is lost (True), or until it was stopped or the clock reads ``until_ns`` (False)."""


class Engine(Protocol):
    """One of the two implementations, bound to its nodes."""

    kind: str
    nodes: tuple[Node, ...]

    def votes(self) -> Votes:
        """An empty result for one call of `attempt` or `round`."""

    def attempt(
        self,
        votes: Votes,
        key: bytes,
        token: bytes | None,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        program: Program = TAKE,
        extra: tuple[bytes, ...] = (),
        nodes: int = -1,
    ) -> bool:
        """Try once to take a lock, and undo what was done if it was not granted.

        Args:
            votes: filled with the result, also when an exception leaves the call.
            key: the lock's key.
            token: the value to set; None for a fresh one (128 random bits, in hexadecimal).
            lease_ms: life of the key; 0 for a program that takes none: then validity has no end.
            quorum: how many nodes must say yes.
            drift_ns: taken off the validity.
            limit_ns: how long a node may take to answer.
            program: one that ``tries``. Its words are the key, the token, ``extra``, and the lease.
            extra: what stands between the token and the lease.
            nodes: a bit for each node to ask; the others do not count, and are OPEN in the outcomes: the
                verdict is over those asked. Default: all.

        Returns:
            Whether it was granted: a quorum said yes, and validity is left.
        """

    def round(
        self,
        votes: Votes,
        program: Program,
        key: bytes,
        args: tuple[bytes, ...],
        quorum: int,
        limit_ns: int,
        touched: int = -1,
    ) -> None:
        """Ask the nodes to run a program.

        Args:
            votes: filled with the result, also when an exception leaves the call.
            program: what to run.
            key: the lock's key.
            args: the further words; where the program writes, ``args[0]`` is the token.
            quorum: how many nodes must say yes.
            limit_ns: how long a node may take to answer.
            touched: for a delete, a bit for each node that may have the token; the others are not asked, and
                count as a yes without a hit. Default: all.
        """

    def discard(
        self,
        key: bytes,
        token: bytes,
        touched: int = -1,
        program: Program = DROP,
        extra: tuple[bytes, ...] = (),
    ) -> None:
        """Queue a token-checked delete to the ``touched`` nodes, and wait for nobody. ``extra`` are its words
        behind the token.
        """

    def post(self, program: Program, key: bytes, args: tuple[bytes, ...], touched: int = -1) -> None:
        """Have a program go along with the next command to each of the ``touched`` nodes that is ready, or
        after 50 ms alone; nobody waits for it, and it may be lost. Where it writes, ``args[0]`` is the token,
        and rules 4 and 6 hold for it.
        """

    def pending(self, token: bytes) -> bool:
        """Say whether some write of this token, on any connection, was not answered yet and may still be
        executed.
        """

    def renew(
        self,
        key: bytes,
        token: bytes,
        touched: int,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        started_ns: int,
        valid_until_ns: int,
        until_ns: int,
        program: Program | None = EXTEND,
        back: Program | None = TAKE,
        gate: Gate | None = None,
    ) -> Renewal:
        """Have the agent look after a lease that was just granted. Sends nothing itself.

        Args:
            key, token: what marks it on the nodes.
            touched: a bit for each node that may have the token.
            lease_ms: the life that the key has, and that each renewal gives it.
            quorum: how many nodes must say yes.
            drift_ns: taken off each validity.
            limit_ns: how long a node may take to answer.
            started_ns, valid_until_ns: the clock just before the try, and the end of its validity.
            until_ns: it is not held for longer: no renewal makes it valid beyond this.
            program: what renews it; its words are the key, the token and the life in ms. None: nothing
                does, and it is only watched.
            back: a try with the same words that puts the token back where it is gone; None: nothing does.
            gate: is woken when it is lost.
        """

    def gate(self) -> Gate:
        """A new gate."""

    def absent(self) -> int:
        """A bit for each node that is suspect, or that is not connected to before its back-off is over."""

    def mark(self, key: bytes) -> int:
        """What the events of a watch call a key; never 0."""

    def watch(self, tracking: bool = True) -> Watch:
        """A channel to wait on; nothing is opened yet. ``tracking=False``: without CLIENT TRACKING, for those
        who subscribe to channels.
        """

    def close(self) -> None:
        """Retire all connections, also those of watches that were closed. The engine may be used again
        afterwards, with new ones.
        """


class Watch(Protocol):
    """A channel of its own for somebody who waits: RESP3, with CLIENT TRACKING ON NOLOOP unless told
    otherwise. Only one thread at a time may use it; `poke` is for all.

    Its connections are made when first needed, to the nodes that are asked for. Events are kept until `wait`
    fetches them, also those that come during a try; if far too many come, one CHANGED of mark 0 stands for
    them.
    """

    def attempt(
        self,
        votes: Votes,
        key: bytes,
        token: bytes | None,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        program: Program = TAKE,
        extra: tuple[bytes, ...] = (),
        nodes: int = -1,
    ) -> bool:
        """As `Engine.attempt`, on this channel; and to each node that gets the try, a LIFE of the key goes
        out in the same write, behind it. Its answer comes as an event.
        """

    def arm(self, key: bytes, nodes: int, limit_ns: int, topic: bytes = b"") -> None:
        """Ask nodes how long a key lives, which has them tell of its next change; wait for nobody.

        A node without a connection is connected to, and is READY when it can be asked; one that is suspect,
        or is in its back-off, is LOST at once.

        Args:
            key: the key.
            nodes: a bit for each node to ask.
            limit_ns: a node that has not answered by then is suspect, and LOST.
            topic: a channel to subscribe to, if that was not done on this connection before; what is
                published there is CHANGED, with the mark of the topic.
        """

    def wait(self, until_ns: int, attempt: Attempt | None = None) -> list[Event]:
        """Wait for events.

        Args:
            until_ns: until when.
            attempt: the arguments of an `attempt` that is made at once, without a detour to Python, if a node
                that it asks says that its key has changed. Its votes tell whether it was: ``started_ns``. On
                several nodes it is made as by `Engine.attempt`: a watch is connected to few of them.

        Returns:
            What has come, in order; nothing if the clock reads ``until_ns``, or somebody has poked.
        """

    def poke(self) -> None:
        """Have the `wait` that runs, or else the next one, return at once."""

    def close(self) -> None:
        """End its use: the connections are kept for the next watch for a while, or retired where something
        was subscribed to. Idempotent.
        """


def common_order(nodes: tuple[Node, ...]) -> tuple[int, ...]:
    """The indexes of nodes in an order that all processes have in common. Rounds write to them from the last
    to the first: who waits listens to the first, and when that tells of a release the others know of it, too.
    """
    return tuple(sorted(range(len(nodes)), key=lambda index: nodes[index].address))


class EngineChoice(NamedTuple):
    """Which engine is used, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


_KINDS = {"native": "redbolt._core", "pure": "redbolt._pure"}
_lock = threading.RLock()  # a signal handler may take a lock while its thread makes one
_engines: dict[tuple[str, tuple[Node, ...]], Engine] = {}
_all: weakref.WeakSet[Engine] = weakref.WeakSet()  # also those that were closed, and only older locks use


def choose(kind: str | None = None, nodes: tuple[Node, ...] = ()) -> EngineChoice:
    """Say which engine a lock with ``engine=kind`` would use on some nodes.

    Args:
        kind: ``"native"`` or ``"pure"`` force one; None leaves it to the environment variable
            ``REDBOLT_ENGINE``, and without it to the nodes and to what is installed.
        nodes: those of the lock; default none that need an engine of their own.

    Raises:
        ValueError: no engine has that name, or the native one is forced for a node that needs the pure one.
        ImportError: the native engine is forced, and cannot be loaded.
    """
    source = "forced by engine="
    needs_pure = next((node.dialer.why for node in nodes if node.dialer is not None), None)
    if kind is None and (kind := os.environ.get("REDBOLT_ENGINE") or None):
        source = "forced by REDBOLT_ENGINE"
    if kind is not None:
        if kind not in _KINDS:
            raise ValueError(f"there is no engine {kind!r}; there are {' and '.join(map(repr, _KINDS))}")
        try:
            _load(kind)
        except ImportError as error:
            raise ImportError(f"the {kind} engine is {source}, but cannot be loaded: {error}") from error
        if kind == "native" and needs_pure is not None:
            raise ValueError(f"the native engine is {source}, but {needs_pure}")
        return EngineChoice(kind, source)
    if needs_pure is not None:
        return EngineChoice("pure", needs_pure)
    try:
        _load("native")
    except ImportError as error:
        return EngineChoice("pure", f"the native engine cannot be loaded: {error}")
    return EngineChoice("native", "the default")


def engine_for(nodes: tuple[Node, ...], kind: str | None = None) -> Engine:
    """The process's one engine of a kind for these nodes; made if there is none yet. Sends nothing."""
    return chosen(nodes, kind)[0]


def chosen(nodes: tuple[Node, ...], kind: str | None = None) -> tuple[Engine, EngineChoice]:
    """The engine for these nodes as `engine_for` has it, and why it is that one."""
    choice = choose(kind, nodes)
    name = choice.name
    with _lock:
        engine = _engines.get((name, nodes))
        if engine is None:
            engine = _engines[name, nodes] = _load(name).Engine(nodes)
            _all.add(engine)
        return engine, choice


def _load(kind: str) -> Any:
    """The module of an engine."""
    module = sys.modules.get(_KINDS[kind])
    if not hasattr(module, "Engine"):  # also while another thread loads it
        if kind == "native" and _process.is_subinterpreter():
            raise ImportError("it is for the main interpreter, and this is another one")  # it loads only once
        module = import_module(_KINDS[kind])
    return module


class Choosing(Protocol):
    """A lock that knows which engine it uses, and why."""

    @property
    def engine_choice(self) -> EngineChoice: ...


def engine(lock: Choosing | str | None = None, kind: str | None = None) -> EngineChoice:
    """Say which engine is used, and why.

    Args:
        lock: a lock, to ask for its own. Default None: what a lock on plain nodes would use. A str is taken
            for ``kind``.
        kind: as the ``engine=`` of a lock.

    Raises:
        ValueError, ImportError: as the constructor of such a lock.
        TypeError: it is no lock.
    """
    if lock is None or isinstance(lock, str):
        return choose(lock or kind)
    choice = getattr(lock, "engine_choice", None)
    if not isinstance(choice, EngineChoice):
        raise TypeError(f"a lock is wanted, not {type(lock).__name__}")
    return choice


def close_engines() -> None:
    """Retire the connections of all engines of this process; locks that are held end by their lease."""
    with _lock:
        engines = list(_all)
        _engines.clear()
    for engine in engines:
        engine.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


_process.on_fork(_after_fork)
