"""A channel for somebody who waits: tries on it, looks that arm it, and a wait for what the nodes tell.

The thread that uses it is the only one to read its connections, as in a round. After an interrupt it does not
go on with them: the agent puts them in order, and the watch begins anew with others.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

from redbolt import _process
from redbolt._clock import now_ns
from redbolt._engine import CHANGED, LOST, MAX_KEY, Attempt, Event, Votes
from redbolt._programs import LIFE, TAKE, Program
from redbolt._pure.agent import NEVER
from redbolt._pure.channel import Channel
from redbolt._pure.connection import HANDSHAKE, MOST_BACKLOG, READY, RESOLVING, Connection
from redbolt._pure.resp import PLANS
from redbolt._pure.site import Site
from redbolt._pure.task import Look, Task, mark_of

if TYPE_CHECKING:
    from redbolt._pure.engine import Engine
    from redbolt._pure.pool import Pool

__all__ = ["Watch"]

_STALE_NS = 2_000_000  # what was not read for longer is read before it is used
_LIMIT_NS = 1_000_000_000  # for what is left when it ends, if it never had a limit
_LONGEST_MS = 1 << 30
_SLICE_MS = 50  # the main thread looks for signals so often: what comes just before a poll does not end it
_MS: Final = 1_000_000


class Watch:
    """See `redbolt._engine.Watch`."""

    __slots__ = (
        "_channel", "_closed", "_engine", "_generation", "_holder", "_interrupted", "_limit_ns", "_poked",
        "_pool", "tracking",
    )  # fmt: skip

    def __init__(self, engine: Engine, pool: Pool, tracking: bool) -> None:
        self.tracking = tracking
        self._engine = engine
        self._pool = pool
        self._generation = _process.generation
        self._channel: Channel | None = None
        self._limit_ns = _LIMIT_NS
        self._poked = False
        self._closed = False
        self._interrupted = False  # and the nodes are not known to be lost yet
        self._holder = self._new_holder()

    def _new_holder(self) -> Task:
        """What owns the channel while no try does."""
        return Task(PLANS[LIFE.index], b"", (), _LIMIT_NS, 0, len(self._pool.sites))

    # ---- for everybody ----

    def poke(self) -> None:
        """End the wait that runs, or else the next one."""
        self._poked = True
        channel = self._channel
        if channel is None or self._generation != _process.generation:
            return
        try:
            channel.nudge()
        except BaseException:
            self._pool.unlock()
            raise

    # ---- for the one who waits ----

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
        """Try once to take a lock, and have the nodes tell of the key's next change."""
        self._check_usable()
        return self._engine.attempt(
            votes, key, token, lease_ms, quorum, drift_ns, limit_ns, program, extra, nodes, self
        )

    def arm(self, key: bytes, nodes: int, limit_ns: int, topic: bytes = b"") -> None:
        """Have nodes tell of a key's next change."""
        self._check_usable()
        for word in (key, topic):
            if len(word) > MAX_KEY:
                raise ValueError(f"a key or channel has at most {MAX_KEY} bytes, not {len(word)}")
        try:
            channel = self._use()
            now = now_ns()
            if now - channel.used_ns > _STALE_NS:
                self._engine.catch_up(channel, now)
                now = now_ns()
            self._limit_ns = limit_ns
            look = Look(key, limit_ns, channel.events)
            look.due_ns = now + limit_ns
            for site in self._pool.sites:
                if nodes >> site.index & 1:
                    self._arm_on(channel, site, look, topic, now)
            channel.used_ns = now
        except BaseException:
            self.give_up()
            raise

    def wait(self, until_ns: int, attempt: Attempt | None = None) -> list[Event]:
        """What has been told, as soon as there is something; nothing at ``until_ns``, or after a `poke`. With
        an ``attempt`` that is made as soon as its key has changed.
        """
        events = self._wait(until_ns)
        if attempt is not None and any(self._is_about(event, attempt) for event in events):
            if len(self._pool.sites) == 1:
                self.attempt(*attempt)
                events += self._told()
            else:
                self._engine.attempt(*attempt)
        return events

    def _is_about(self, event: Event, attempt: Attempt) -> bool:
        what, index, mark, _ = event
        return what == CHANGED and bool(attempt[9] >> index & 1) and mark in (0, mark_of(attempt[1]))

    def _told(self) -> list[Event]:
        """What the try has brought along."""
        channel = self._channel
        events = [] if channel is None or channel.events is None else list(channel.events)
        if channel is not None and channel.events:
            channel.events.clear()
        return events

    def _wait(self, until_ns: int) -> list[Event]:
        self._check_usable()
        try:
            channel = self._use()
            reader = channel.hear()
            self._await(channel, reader, until_ns)
            channel.unhear()
            channel.used_ns = now_ns()
            self._poked = False
            events = [] if channel.events is None else list(channel.events)
            if channel.events:
                channel.events.clear()
            return events
        except BaseException:
            self.give_up()
            raise

    def close(self) -> None:
        """End its use."""
        self._closed = True
        channel = self._channel
        if channel is None or self._generation != _process.generation:
            return
        try:
            if channel.owner is self._holder:  # else in the middle of a try, which then does it
                self._pool.shelve(channel, now_ns(), self._limit_ns)
                self._channel = None
        except BaseException:
            self.give_up()
            raise

    def __del__(self) -> None:
        if getattr(self, "_channel", None) is not None and self._generation == _process.generation:
            self._pool.care.interrupted.append(self._holder)
            self._pool.wake()

    # ---- for the engine ----

    def lend(self, task: Task, fresh: bool) -> Channel:
        """Let a try use the channel."""
        channel = self._use()
        task.look = Look(task.key, task.limit_ns, channel.events)
        self._pool.borrow(channel, task, fresh)
        return channel

    def take_back(self, channel: Channel, now: int, limit_ns: int) -> None:
        """The try is over."""
        self._limit_ns = limit_ns
        channel.unfinished = channel.is_unfinished()
        channel.used_ns = self._pool.used_ns = now
        channel.owner = self._holder
        if self._closed:  # by a signal handler
            self.close()

    def give_up(self) -> None:
        """The thread was interrupted: leave the channel to the agent, and begin anew when used again."""
        if self._generation != _process.generation:
            return  # it is the parent's
        while True:
            try:
                self._channel = None
                self._interrupted = True
                self._pool.hand_over(self._holder)
                self._holder = self._new_holder()
                return
            except BaseException:  # a second interrupt; the first one is on its way already
                continue

    # ---- within ----

    def _check_usable(self) -> None:
        if self._generation != _process.generation:
            raise RuntimeError("the watch belongs to the parent of this process")
        if self._closed:
            raise RuntimeError("the watch is closed")

    def _use(self) -> Channel:
        """Its channel, which is taken from the pool when it is first used."""
        channel = self._channel
        if channel is None:
            channel = self._channel = self._pool.take(self.tracking, self._holder)
            if self._interrupted:
                for site in self._pool.sites:
                    channel.tell(LOST, site.index)
                self._interrupted = False
        return channel

    def _arm_on(self, channel: Channel, site: Site, look: Look, topic: bytes, now: int) -> None:
        conn = channel.conns[site.index]
        if conn is None and site.lacks(self.tracking):
            channel.tell(LOST, site.index, 0, 1)
        elif site.suspect or (conn is None and now < site.next_connect_ns):
            channel.tell(LOST, site.index)
        elif conn is None:
            conn = self._pool.open(channel, site, now, look.limit_ns)
            conn.wanted = True
            self._engine.follow_up(channel, conn, self._holder)
        elif conn.state != READY:
            conn.wanted = True
        else:
            with channel.lock:
                conn.busy = True
                conn.send_orphans(now)
                if conn.backlog + len(look.data) <= MOST_BACKLOG:
                    conn.look(look, topic)
                else:
                    channel.tell(LOST, site.index)
                conn.busy = False

    def _await(self, channel: Channel, reader: int, until_ns: int) -> None:
        """Wait until there is an event, or the end of the wait."""
        engine, holder = self._engine, self._holder
        slice_ms = _SLICE_MS if threading.current_thread() is threading.main_thread() else _LONGEST_MS
        while True:
            now = now_ns()
            due_ns = min(until_ns, self._look_around(channel, now))
            if channel.events or self._poked or channel.owner is not holder:
                return
            left_ms = max(0, min(-((now - due_ns) // _MS), slice_ms))
            happened = channel.poll.poll(None if left_ms == _LONGEST_MS else left_ms)
            if self._generation != _process.generation:
                raise RuntimeError("the process was forked by a signal handler in the middle of a wait")
            for fd, events in happened:
                conn = channel.by_fd.get(fd)
                if fd == reader:
                    _drain(fd)
                elif conn is not None:
                    engine.on_events(channel, conn, holder, events)
            if now >= until_ns:
                return

    def _look_around(self, channel: Channel, now: int) -> int:
        """Go on with connections that are being opened, and give up what is late. When to look again."""
        next_ns = NEVER
        for conn in list(channel.conns):
            if conn is None or not conn.awaits():
                continue
            if conn.state < HANDSHAKE:
                if conn.connect_by_ns and now >= conn.connect_by_ns:
                    conn.end(f"no connection within {conn.site.connect_ns // _MS} ms")
                elif conn.state == RESOLVING or conn.again_ns:
                    conn.proceed(now, 0)
                self._engine.follow_up(channel, conn, self._holder)
                if conn.state < HANDSHAKE:
                    next_ns = min(next_ns, conn.connect_by_ns or NEVER, conn.again_ns or NEVER)
            if conn.state <= READY and conn.awaits():
                next_ns = min(next_ns, self._judge_silence(channel, conn, now))
        return next_ns

    def _judge_silence(self, channel: Channel, conn: Connection, now: int) -> int:
        """A node that is silent for its limit is suspect, and lost. When to look again."""
        due_ns = conn.due_ns()
        if conn.state == READY:  # what waits for the longest is not what may take the longest
            due_ns = min(task.due_ns for task, _, _ in conn.slots.copy())
        if due_ns > now:
            return due_ns
        if conn.open() and _is_readable(conn.fd):
            return now  # what has come is read first
        if not conn.lost:  # else its node may have answered elsewhere meanwhile
            site = conn.site
            site.doubt(f"no {'answer' if conn.state == READY else 'connection'} within {_limit_ms(conn)} ms")
            channel.tell(LOST, site.index)
            conn.lost = True
            self._pool.wake()
        due_ns = conn.replace_ns()
        if due_ns <= now:
            conn.give_up()
            self._pool.lose(conn)
            return NEVER
        return due_ns


def _limit_ms(conn: Connection) -> int:
    """How long its node had, of all that is late the shortest."""
    if conn.state != READY:
        return conn.limit_ns // _MS
    return min(task.limit_ns for task, _, _ in conn.slots.copy()) // _MS


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _drain(fd: int) -> None:
    try:
        os.read(fd, 65536)
    except BlockingIOError:
        pass
