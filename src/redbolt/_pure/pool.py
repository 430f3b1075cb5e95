"""The channels of one engine, and the care for what rounds leave behind: late replies, ended connections, deletes that are owed.

Locks: the pool's lock is taken before a channel's. Both can be taken off a thread that was interrupted inside.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections import deque

from redbolt._clock import now_ns
from redbolt._judge import FAULT
from redbolt._pure.agent import AGENT, NEVER
from redbolt._pure.channel import Channel
from redbolt._pure.connection import (
    BROKEN,
    CLOSED,
    DEAD,
    DELETE_LIFE_NS,
    HANDSHAKE,
    MOST_BACKLOG,
    READY,
    RETIRED,
    Connection,
    Site,
    Task,
    delete_task,
)
from redbolt.node import Node

__all__ = ["Pool"]

_RETIRE_NS = 1_000_000_000
_LONGEST_RETIRE_NS = 30_000_000_000
_MOST_RETIRED = 32
_SURPLUS_NS = 30_000_000_000
_AGENT_LIMIT_NS = 1_000_000_000
_CARES_NS = 5_000_000_000  # nodes of an engine that is unused for longer are not reconnected
_LOOK_AGAIN_NS = 50_000_000

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """See the module."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.sites = [Site(index, node, self._resolved) for index, node in enumerate(nodes)]
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self.due_ns = NEVER
        self.watched: dict[int, int] = {}
        self.idle: list[Channel] = []  # a stack; who has an owner there was interrupted, and is not idle
        self.channels: set[Channel] = set()
        self.connections: set[Connection] = set()  # all that may have a socket
        self.retired: list[Connection] = []
        self.interrupted: deque[Task] = deque()
        self.discarded: deque[tuple[bytes, bytes]] = deque()
        self._used_ns = 0
        self._closed = False
        self._mailed = False

    def after_fork(self) -> None:
        """Nothing of the parent's is ours: descriptors are closed here, and nothing is sent."""
        connections = self.connections
        self._begin()
        for site in self.sites:
            site.reset()
        for conn in list(connections):
            conn.close()

    def _resolved(self) -> None:
        AGENT.due(self, 0)

    # ---- for rounds ----

    def check_out(self, task: Task, fresh: bool) -> Channel:
        """Take an idle channel, or make one. ``fresh`` says that the token cannot have been used before.

        A later write of a token must follow the earlier ones on the same connection. So the channel that still waits
        for one is preferred; on channels that other threads use, the command is left to be queued behind it, and nobody
        waits for its reply.
        """
        now = now_ns()
        with self.lock:
            self._closed = False
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
                channel.owner = task
                if idle[-1] is channel:
                    idle.pop()
                else:
                    idle.remove(channel)
            if not fresh and len(self.channels) > 1:
                self._queue_behind(task, channel)
        return channel

    def _preferred(self, task: Task, best: Channel | None) -> Channel | None:
        token = task.token
        assert token is not None
        for channel in reversed(self.idle):
            if channel.owner is None:
                for conn in channel.conns:
                    if conn is not None and conn.holds(token):
                        return channel
        return best

    def _queue_behind(self, task: Task, mine: Channel) -> None:
        token = task.token
        assert token is not None
        for conn in list(self.connections):
            if conn.channel is not mine and conn.state == READY and conn.holds(token):
                index = conn.site.index
                if conn.backlog <= MOST_BACKLOG:
                    self._mail(conn, task)
                    task.written[index] = conn
                task.settle(index, (FAULT, 0, "queued behind an unanswered write"))

    def _mail(self, conn: Connection, task: Task) -> None:
        """Have a task, that nobody waits for, sent on a connection that maybe another thread uses."""
        other = Task(task.plan, task.key, task.words[1:], task.limit_ns, task.expires_ns, 0)
        other.due_ns = now_ns() + task.limit_ns
        conn.mail.append((other, task.plan.safe_form(conn.proven)))
        self._mailed = True
        AGENT.due(self, 0)

    def put_back(self, channel: Channel, now: int, limit_ns: int) -> None:
        """End the use of a channel. What is open on it will be looked after."""
        unfinished = channel.unfinished = channel.is_unfinished()
        channel.used_ns = self._used_ns = now
        with self.lock:
            if channel in self.channels:  # not in a child that was forked meanwhile
                self.idle.append(channel)
                channel.owner = None
        when = now + (limit_ns if unfinished else _SURPLUS_NS)
        if when < self.due_ns and (unfinished or len(self.idle) > 1):
            AGENT.due(self, when)

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
            if conn.heard or other_form:
                site.cause = conn.cause
            else:
                site.failed(conn.cause, now)
            if conn.state == BROKEN:
                self._retire(conn, now)
            elif conn.state == DEAD:
                self._bury(conn)

    def owe_unsent(self, task: Task) -> None:
        """Have a delete sent on the next connection to each node that it could not be sent to."""
        if None not in task.written:
            return
        assert task.token is not None
        for conn, site in zip(task.written, self.sites, strict=True):
            if conn is None:
                site.add_orphan(task.key, task.token, task.expires_ns)
        AGENT.due(self, 0)

    def undo_elsewhere(self, conn: Connection, delete: Task) -> None:
        """Have a delete follow a write on a connection that is not, or no longer, the caller's."""
        with self.lock:
            self.take_back(conn, delete, now_ns())
        AGENT.due(self, 0)

    def pending(self, token: bytes) -> bool:
        """Say whether a write of this token may still be executed."""
        with self.lock:
            return (
                any(conn.holds(token) for conn in list(self.connections))
                or any(held == token for site in self.sites for _, held in list(site.orphans))
                or any(task.token == token for task in list(self.interrupted))
                or any(held == token for _, held in list(self.discarded))
            )

    def close(self) -> None:
        """Retire the connections of all idle channels."""
        with self.lock:
            self._closed = True
            for channel in list(self.idle):
                if channel.owner is None:
                    self._dismiss(channel)
        AGENT.due(self, 0)

    # ---- ending connections; under the lock ----

    def _retire(self, conn: Connection, now: int) -> None:
        """Stop to send on a connection, and read it to its end before it is closed."""
        channel = conn.channel
        channel.untrack(conn)
        if channel.conns[conn.site.index] is conn:
            channel.conns[conn.site.index] = None
        if conn.sock is None or conn.state < HANDSHAKE:
            self._bury(conn)
            return
        if conn.state == BROKEN:
            conn.sane = False
        conn.state = RETIRED
        bound = now + _RETIRE_NS
        for expires_ns in conn.owed().values():
            bound = max(bound, min(expires_ns, now + _LONGEST_RETIRE_NS))
        conn.until_ns = bound
        if conn not in self.retired:
            self.retired.append(conn)
        self._shut(conn)
        while len(self.retired) > _MOST_RETIRED:
            self._bury(self.retired[0])
        AGENT.due(self, 0)

    def _shut(self, conn: Connection) -> None:
        """Send the rest, and then the end."""
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

    def _bury(self, conn: Connection) -> None:
        """Close a connection for good; what it owes goes to its node."""
        owed = conn.owed()
        now = now_ns()
        for (key, token), expires_ns in owed.items():
            if expires_ns > now:
                conn.site.add_orphan(key, token, expires_ns)
        if conn in self.retired:
            self.retired.remove(conn)
        conn.close()
        conn.slots.clear()
        conn.mail.clear()
        conn.carried.clear()
        self.connections.discard(conn)
        if owed:
            AGENT.due(self, 0)

    def _dismiss(self, channel: Channel) -> None:
        """Retire a channel's connections, and forget it."""
        now = now_ns()
        self.channels.discard(channel)
        if channel in self.idle:
            self.idle.remove(channel)
        for conn in list(self.connections):
            if conn.channel is channel and conn.state < RETIRED:
                self._retire(conn, now)

    # ---- for the agent ----

    def look_after(self) -> None:
        """Everything that is to be done without a round; what is left to wait for goes into ``watched`` and ``due_ns``."""
        now = now_ns()
        with self.lock:
            while self.interrupted:
                self._rescue(self.interrupted[0], now)
                self.interrupted.popleft()
            while self.discarded:
                self._discard(*self.discarded[0], now)
                self.discarded.popleft()
            if self._mailed:
                self._mailed = False
                self._deliver()
            for conn in list(self.retired):
                self._look_after_retired(conn, now)
            for channel in list(self.idle):
                if channel.owner is None:
                    self._look_after_channel(channel, now)
            for site in self.sites:
                if site.suspect or site.orphans:
                    self._look_after_site(site, now)
            self._look_after_surplus(now)

    def _wish(self, when_ns: int) -> None:
        if when_ns < self.due_ns:
            self.due_ns = when_ns

    def _rescue(self, task: Task, now: int) -> None:
        """A round was interrupted anywhere: its channel is given up, and what it may have written is taken back."""
        for channel in list(self.channels):
            if channel.owner is task:
                for conn in list(self.connections):
                    if conn.channel is channel:
                        conn.sane = False
                self._dismiss(channel)
        if task.plan.deletes and task.token is not None:
            self._discard(task.key, task.token, now)
        elif task.plan.undone:
            for wrote in task.written:
                if wrote is not None:
                    self.take_back(wrote, task, now)

    def take_back(self, conn: Connection, task: Task, now: int) -> None:
        """Have a delete for the key and token of ``task`` follow what it may have written on a connection."""
        assert task.token is not None
        if conn.state == CLOSED:
            conn.site.add_orphan(task.key, task.token, task.expires_ns)
        elif conn.state == RETIRED:
            conn.carried[task.key, task.token] = task.expires_ns
            conn.until_ns = max(conn.until_ns, min(task.expires_ns, now + _LONGEST_RETIRE_NS))
        else:
            self._mail(conn, delete_task(task.key, task.token, now, task.limit_ns, task.expires_ns))

    def _discard(self, key: bytes, token: bytes, now: int) -> None:
        task = delete_task(key, token, now, _AGENT_LIMIT_NS, now + DELETE_LIFE_NS)
        for site in self.sites:
            held = [conn for conn in self.connections if conn.site is site and conn.holds(token)]
            for conn in held:
                self.take_back(conn, task, now)
            if held:
                continue
            ready = self._idle_ready(site)
            if ready is not None and ready.backlog <= MOST_BACKLOG:
                self._mail(ready, task)
            else:
                site.add_orphan(key, token, task.expires_ns)

    def _idle_ready(self, site: Site) -> Connection | None:
        """A connection that nobody uses and that can be sent on."""
        for channel in reversed(self.idle):
            conn = channel.conns[site.index]
            if channel.owner is None and conn is not None and conn.state == READY:
                return conn
        return None

    def _deliver(self) -> None:
        for conn in list(self.connections):
            if conn.mail and conn.state == READY:
                with conn.lock:
                    conn.take_mail()

    def _look_after_retired(self, conn: Connection, now: int) -> None:
        """Read a connection to its end. Replies tell what need not be owed, if our books about it are right."""
        if conn.out and conn.sane:
            self._shut(conn)
        for _ in range(64):
            left = len(conn.slots)
            if conn.sane:
                conn.receive(None)
                if conn.state == BROKEN:
                    conn.sane, conn.state = False, RETIRED
                elif len(conn.slots) == left:
                    break
            elif not conn.discard_input():
                break
        if conn.state == DEAD or now >= conn.until_ns:
            self._bury(conn)
            return
        self._wish(conn.until_ns)
        self.watched[conn.fd] = select.POLLIN | select.POLLOUT if conn.out and conn.sane else select.POLLIN

    def _look_after_channel(self, channel: Channel, now: int) -> None:
        for conn in list(channel.conns):
            if conn is None or not conn.awaits():
                continue
            conn.proceed(now, _ready_events(conn))
            if conn.open():
                conn.receive(None)
            channel.track(conn)
            if conn.state > READY:
                self.lose(conn)
            elif conn.awaits():
                self._judge_silence(conn, conn.site, now)

    def _judge_silence(self, conn: Connection, site: Site, now: int) -> None:
        due = conn.due_ns()
        if due <= now:
            site.doubt(conn.overdue_text())
            if conn.replace_ns() <= now:
                conn.give_up()
                self.lose(conn)
                return
            due = conn.replace_ns()
        self._wish(due)
        if conn.ticks:
            self._wish(now + 1_000_000)
        if (site.suspect or conn.state != READY or conn.out) and conn.polled[0] != -1:
            self.watched[conn.polled[0]] = conn.polled[1]

    def _look_after_site(self, site: Site, now: int) -> None:
        """See to it that the node gets the deletes it is owed, and that it can say that it is back."""
        site.expire_orphans(now)
        if site.orphans:
            willing = self._idle_ready(site)
            if willing is not None:
                with willing.lock:
                    willing.send_orphans(now)
                self._judge_silence(willing, site, now)
        if not site.orphans and not (site.suspect and now - self._used_ns < _CARES_NS):
            return
        if any(conn.site is site and conn.state <= READY and conn.awaits() for conn in self.connections):
            self._wish(now + _LOOK_AGAIN_NS)  # some connection to it is under way, or has to be answered first
            return
        if now < site.next_connect_ns:
            self._wish(site.next_connect_ns)
            return
        opened = self.open(self._free_channel(site, now), site, now, _AGENT_LIMIT_NS)
        if opened.state > READY:
            self.lose(opened)
            self._wish(site.next_connect_ns)
        elif opened.awaits():
            self._judge_silence(opened, site, now)

    def _free_channel(self, site: Site, now: int) -> Channel:
        """An idle channel without a connection to the node."""
        for channel in reversed(self.idle):
            if channel.owner is None and channel.conns[site.index] is None:
                return channel
        channel = Channel(len(self.sites), None, now)
        self.channels.add(channel)
        self.idle.insert(0, channel)
        return channel

    def _look_after_surplus(self, now: int) -> None:
        if self._closed:
            for channel in list(self.idle):
                if channel.owner is None and not channel.is_unfinished():
                    self._dismiss(channel)
            return
        for channel in self.idle[:-1]:
            if channel.owner is None and not channel.is_unfinished():
                if now - channel.used_ns >= _SURPLUS_NS:
                    self._dismiss(channel)
                else:
                    self._wish(channel.used_ns + _SURPLUS_NS)


def _ready_events(conn: Connection) -> int:
    """What has happened to a connection, without waiting."""
    if conn.polled[0] == -1:
        return 0
    poll = select.poll()
    poll.register(*conn.polled)
    for _, events in poll.poll(0):
        return events
    return 0


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


os.register_at_fork(after_in_child=_after_fork)
