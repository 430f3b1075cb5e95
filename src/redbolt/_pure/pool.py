"""The channels of one engine and their connections, from the first to the end of the last.

Locks: the pool's is taken before a channel's. Both can be taken off a thread that was interrupted inside.
"""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections import deque

from redbolt import _clock, _engine, _process
from redbolt._clock import now_ns
from redbolt._judge import FAULT
from redbolt._pure.agent import AGENT
from redbolt._pure.care import Care
from redbolt._pure.channel import Channel
from redbolt._pure.connection import (
    BROKEN,
    DEAD,
    HANDSHAKE,
    MOST_BACKLOG,
    RETIRED,
    Connection,
)
from redbolt._pure.keeper import Keeper
from redbolt._pure.site import Site
from redbolt._pure.task import Debt, Task
from redbolt.node import Node

__all__ = ["Pool"]

_RETIRE_NS = 1_000_000_000
_LONGEST_RETIRE_NS = 30_000_000_000
_MOST_RETIRED = 32
_MOST_MAIL = 1024
_PATIENCE = 50  # times 0.2 ms
_QUEUED = (FAULT, 0, "queued behind an unanswered write")

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """See the module. ``care`` is what the agent does for it, ``keeper`` what it does for leases."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.care = Care(self)
        self.sites = [Site(index, node, self._on_news) for index, node in enumerate(nodes)]
        self.keeper = Keeper(self)
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self.idle: list[Channel] = []  # a stack; after an interrupt there may be one with an owner in it
        self.shelves: tuple[list[Channel], list[Channel]] = ([], [])
        """Idle channels of watches, without and with CLIENT TRACKING."""
        self.channels: set[Channel] = set()
        self.connections: set[Connection] = set()  # all that may have a socket
        self.retired: list[Connection] = []
        self.used_ns = 0  # end of the last round
        self.closed_ns = 0  # when it was closed, if nothing was done since

    def after_fork(self) -> None:
        """Nothing of the parent's is ours: descriptors are closed here, and nothing is sent."""
        connections = self.connections
        channels = [*self.channels, *self.care.piped]
        self._begin()
        self.care.reset()
        self.keeper.reset()
        for site in self.sites:
            site.reset()
        for conn in list(connections):
            conn.close()
        for channel in channels:
            channel.shut()

    def wake(self) -> None:
        """Have the agent look after the pool now."""
        AGENT.due(self.care, 0)

    def nudge(self) -> None:
        """Have all watches look around, and all who wait for a loss."""
        for channel in list(self.channels):
            channel.nudge()
        self.keeper.nudge()

    def _on_news(self) -> None:
        """An address was found, or a connection was dialled."""
        self.wake()
        self.nudge()
        self.keeper.poke()

    # ---- for rounds ----

    def check_out(self, task: Task, fresh: bool) -> Channel:
        """Take an idle channel, or make one. ``fresh`` says that no other command can be about its token.

        A later write of a token must follow the earlier ones on the same connection, and so must one that
        puts a new token in its place. So the channel that still waits for one is preferred; on channels that
        other threads use, the command is left to be sent behind it, and nobody waits for the reply.
        """
        now = now_ns()
        with self.lock:
            self.closed_ns = 0
            idle = self.idle
            while idle and idle[-1].owner is not None:
                idle.pop()
            channel = idle[-1] if idle else None
            if not fresh and len(self.channels) > 1:
                channel = self._preferred(task, channel)
            if channel is None:
                channel = Channel(len(self.sites), task, now)
                self.channels.add(channel)
            else:
                if channel.mail:
                    self.care.deliver(channel, now)
                channel.owner = task
                if idle[-1] is channel:
                    idle.pop()
                else:
                    idle.remove(channel)
            if not fresh and len(self.channels) > 1:
                self._queue_behind(task, channel)
        return channel

    def _preferred(self, task: Task, best: Channel | None) -> Channel | None:
        token = task.follows
        assert token is not None
        for channel in reversed(self.idle):
            if (channel.unfinished or channel.mail) and channel.owner is None:
                for index in range(len(self.sites)):
                    if channel.holds(index, token):
                        return channel
        return best

    def _queue_behind(self, task: Task, mine: Channel) -> None:
        token = task.follows
        assert token is not None
        for channel in self.channels:
            owner = channel.owner
            if channel is not mine and (
                channel.unfinished or channel.mail or (owner is not None and owner.token == token)
            ):
                for index in range(len(self.sites)):
                    if task.plan.tries and task.answers[index] is not None:
                        continue  # that node is not to be asked
                    if channel.holds(index, token):
                        self.leave(channel, index, task)
                        task.elsewhere.append((index, channel))
                        task.settle(index, _QUEUED)

    def leave(self, channel: Channel, index: int, task: Task) -> None:
        """Have a command, whose reply nobody waits for, sent on a channel that others may be using."""
        with self.lock:
            conn = channel.conns[index]
            if len(channel.mail) < _MOST_MAIL and (conn is None or conn.backlog <= MOST_BACKLOG):
                channel.mail.append((index, task.unwaited(now_ns())))
        self.wake()

    def put_back(self, channel: Channel, now: int, limit_ns: int) -> None:
        """End the use of a channel. What is open on it will be looked after."""
        unfinished = channel.unfinished = channel.is_unfinished()
        channel.used_ns = self.used_ns = now
        least_used_ns = 0
        with self.lock:
            if channel in self.channels:  # not in a child that was forked meanwhile
                if self.idle:
                    least_used_ns = self.idle[0].used_ns
                self.idle.append(channel)
                channel.owner = None
        if self.closed_ns:
            self.wake()
        elif unfinished:
            due_ns = now if channel.may_fall_back() else now + limit_ns
            if due_ns < self.care.due_ns:
                AGENT.due(self.care, due_ns)
        elif least_used_ns:
            self.care.expect_surplus(least_used_ns)

    # ---- for watches ----

    def take(self, tracking: bool, holder: Task) -> Channel:
        """Give a watch an idle channel of its kind, or a new one; it is the holder's until `shelve`."""
        now = now_ns()
        with self.lock:
            self.closed_ns = 0
            shelf = self.shelves[tracking]
            while shelf and shelf[-1].owner is not None:  # after an interrupt
                shelf.pop()
            if shelf:
                channel = shelf[-1]
                if channel.mail:
                    self.care.deliver(channel, now)
                channel.owner = holder
                shelf.pop()
                channel.used_ns = 0  # see first what it has become
            else:
                channel = Channel(len(self.sites), holder, now, tracking)
                self.channels.add(channel)
            channel.events = deque()
        return channel

    def borrow(self, channel: Channel, task: Task, fresh: bool) -> None:
        """Have a task use the channel of a watch, as `check_out`."""
        with self.lock:
            channel.owner = task
            if not fresh and len(self.channels) > 1:
                self._queue_behind(task, channel)

    def shelve(self, channel: Channel, now: int, limit_ns: int) -> None:
        """Keep a channel that no watch uses any more for the next one, unless something was subscribed to."""
        with self.lock:
            channel.events = None
            channel.unhear()
            if self.closed_ns or any(conn is not None and conn.topics for conn in channel.conns):
                self.dismiss(channel)
                self.wake()
                return
            channel.unfinished = channel.is_unfinished()
            channel.used_ns = now
            shelf = self.shelves[bool(channel.tracking)]
            if channel not in shelf:
                shelf.append(channel)
            channel.owner = None
        if channel.unfinished:
            AGENT.due(self.care, now if channel.may_fall_back() else now + limit_ns)
        else:
            self.care.expect_surplus(now)

    def open(self, channel: Channel, site: Site, now: int, limit_ns: int) -> Connection:
        """Begin to connect a channel to a node."""
        conn = Connection(channel, site, now, limit_ns)
        self.connections.add(conn)
        channel.conns[site.index] = conn
        conn.proceed(now, 0)
        channel.track(conn)
        return conn

    def lose(self, conn: Connection) -> None:
        """Clean up after a connection that is DEAD or BROKEN."""
        channel, site = conn.channel, conn.site
        channel.untrack(conn)
        now = now_ns()
        with self.lock:
            if channel.conns[site.index] is conn:
                channel.conns[site.index] = None
            other_form = conn.state == DEAD and conn.draw_conclusions()
            if conn.heard or other_form or conn.degraded:
                site.cause = conn.cause
            else:
                site.failed(conn.cause, now)
            if not conn.lost or conn.useless:
                channel.tell(_engine.LOST, site.index, 0, int(conn.useless))
            if conn.state == BROKEN:
                self.retire(conn, now)
            elif conn.state == DEAD:
                self.bury(conn)

    def owe_unsent(self, task: Task) -> None:
        """Have a delete sent on the next connection to each node that it could not be sent to."""
        if None not in task.written:
            return
        skipped = task.left_out.union([index for index, _ in task.elsewhere])
        for conn, site in zip(task.written, self.sites, strict=True):
            if conn is None and site.index not in skipped:
                site.add_orphan(task.debt(), task.expires_ns)
                self.wake()

    def pending(self, token: bytes) -> bool:
        """Say whether a write of this token may still be executed."""
        with self.lock:
            indexes = range(len(self.sites))
            found = (
                any(channel.holds(index, token) for channel in self.channels for index in indexes)
                or any(conn.holds(token) for conn in self.retired)
                or any(words[1] == token for site in self.sites for _, words in list(site.orphans))
                or self.care.has(token)
            )
        if found:
            self.wake()  # maybe the reply is there, and only not read yet
        return found

    def close(self) -> None:
        """Retire the connections of all idle channels."""
        with self.lock:
            self.care.send_discarded(now_ns())  # while there are connections to send it on
            self.closed_ns = now_ns()
            for channel in [*self.idle, *self.shelves[0], *self.shelves[1]]:
                if channel.owner is None:
                    self.dismiss(channel)
        self.keeper.close()
        self.wake()

    def hand_over(self, task: Task) -> None:
        """Have the agent clean up after a task whose thread was interrupted. May be repeated."""
        interrupted = self.care.interrupted
        self.unlock()
        if task not in interrupted:
            interrupted.append(task)
        self.wake()
        for _ in range(_PATIENCE):  # so that whoever goes on finds the channel in order
            if task not in interrupted:
                break
            time.sleep(0.0002)

    def unlock(self) -> None:
        """Take all locks off the calling thread, wherever an interrupt has left it."""
        for lock in (self.lock, *[channel.lock for channel in list(self.channels)]):
            try:
                while True:
                    lock.release()
            except RuntimeError:
                pass  # it is not, or no longer, held by this thread

    # ---- ending connections; under the lock ----

    def retire(self, conn: Connection, now: int) -> None:
        """Send no more on a connection, and read it to its end before it is closed."""
        channel = conn.channel
        channel.untrack(conn)
        if channel.conns[conn.site.index] is conn:
            channel.conns[conn.site.index] = None
        if conn.sock is None or conn.state < HANDSHAKE:
            self.bury(conn)
            return
        conn.state = RETIRED
        conn.until_ns = now + _RETIRE_NS
        self.prolong(conn, conn.owed(), now)
        if conn not in self.retired:
            self.retired.append(conn)
        if not conn.out or not conn.sane:
            self.shut(conn)
        while len(self.retired) > _MOST_RETIRED:
            self.bury(self.retired[0])
        self.wake()

    def prolong(self, conn: Connection, owed: dict[Debt, int], now: int) -> None:
        """Read a retired connection for as long as what it owes is of use, within bounds."""
        for expires_ns in owed.values():
            conn.until_ns = max(conn.until_ns, min(expires_ns, now + _LONGEST_RETIRE_NS))

    def shut(self, conn: Connection) -> None:
        """Send the rest on a retired connection, and then the end."""
        assert conn.sock is not None
        try:
            if conn.sane and conn.out:
                with conn.lock:
                    conn.flush()
                if conn.out:
                    return
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def bury(self, conn: Connection) -> None:
        """Close a connection for good; what it owes goes to its node."""
        owed = conn.owed()
        now = now_ns()
        for debt, expires_ns in owed.items():
            if expires_ns > now:
                conn.site.add_orphan(debt, expires_ns)
        if conn in self.retired:
            self.retired.remove(conn)
        conn.close()
        conn.slots.clear()
        conn.carried.clear()
        self.connections.discard(conn)
        if owed:
            self.wake()

    def dismiss(self, channel: Channel) -> None:
        """Retire a channel's connections, and forget it."""
        now = now_ns()
        for conn in list(self.connections):
            if conn.channel is channel and conn not in self.retired:
                self.retire(conn, now)
        self.care.deliver(channel, now)
        for channels in (self.idle, *self.shelves):
            if channel in channels:
                channels.remove(channel)
        if channel.end_nudges():
            self.care.piped.append(channel)
        self.channels.discard(channel)


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


def _on_offset(offset_ns: int) -> None:
    for pool in list(_pools):
        pool.nudge()


_process.on_fork(_after_fork)
_clock.on_offset(_on_offset)
