"""What the agent does for the channels of one engine: it looks after all that rounds leave behind.

That is late replies, connections under way, nodes that are away, deletes that are owed, retired connections,
and rounds that were interrupted. It touches only idle channels, but for sending what lies in their mail.
"""

from __future__ import annotations

import select
from collections import deque
from typing import TYPE_CHECKING

from redbolt._clock import now_ns
from redbolt._programs import EXISTS
from redbolt._pure.agent import AGENT, NEVER
from redbolt._pure.channel import Channel
from redbolt._pure.connection import (
    BROKEN,
    CONNECTING,
    DEAD,
    MOST_BACKLOG,
    READY,
    RETIRED,
    Connection,
)
from redbolt._pure.resp import PLANS
from redbolt._pure.site import Site
from redbolt._pure.task import DELETE_LIFE_NS, Debt, Task, delete_task

if TYPE_CHECKING:
    from redbolt._pure.pool import Pool

__all__ = ["Care"]

_SURPLUS_NS = 30_000_000_000
_LIMIT_NS = 1_000_000_000  # for connections and deletes of its own
_CARES_NS = 5_000_000_000  # nodes of an engine that is unused for longer are not reconnected
_AFTERMATH_NS = 1_000_000_000  # so long a closed engine still connects to send deletes that are owed
_LOOK_AGAIN_NS = 50_000_000
_MS = 1_000_000


class Care:
    """See the module. What must not be interrupted is handed to it by appending to a queue."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child."""
        self.due_ns = NEVER
        self.watched: dict[int, int] = {}
        self.interrupted: deque[Task] = deque()
        self.discarded: deque[tuple[Debt, int]] = deque()
        self.piped: deque[Channel] = deque()  # dismissed ones whose pipe is to be closed

    def has(self, token: bytes) -> bool:
        """Say whether a write of this token is about to be made."""
        return any(task.token == token for task in list(self.interrupted)) or any(
            words[1] == token for (_, words), _ in list(self.discarded)
        )

    def expect_surplus(self, used_ns: int) -> None:
        """More than one channel is idle, one since ``used_ns``: look at it when that has been for long."""
        if used_ns + _SURPLUS_NS < self.due_ns:
            AGENT.due(self, used_ns + _SURPLUS_NS)

    def look_after(self) -> None:
        """Do all that can be done now, and say when there will be more to do."""
        pool = self._pool
        now = now_ns()
        with pool.lock:
            while self.interrupted:
                self._rescue(self.interrupted[0], now)
                self.interrupted.popleft()
            self.send_discarded(now)
            for channel in list(pool.channels):
                if channel.mail:
                    self.deliver(channel, now)
            for conn in list(pool.retired):
                self._see_off(conn, now)
            for channel in [*pool.idle, *pool.shelves[0], *pool.shelves[1]]:
                if channel.owner is None:
                    self._look_after_channel(channel, now)
            for site in pool.sites:
                if site.suspect or site.orphans:
                    self._look_after_site(site, now)
            self._close_surplus(now)
            while self.piped:
                self.piped[0].shut()
                self.piped.popleft()

    def send_discarded(self, now: int) -> None:
        """Send the deletes that were handed over. Under the pool's lock."""
        while self.discarded:
            self._discard(*self.discarded[0], now)
            self.discarded.popleft()

    def _wish(self, when_ns: int) -> None:
        if when_ns < self.due_ns:
            self.due_ns = when_ns

    # ---- commands that belong to no round any more ----

    def _rescue(self, task: Task, now: int) -> None:
        """A round was interrupted: put its channel in order, and take back what it may have written."""
        pool = self._pool
        for channel in list(pool.channels):
            if channel.owner is None:
                self._put_in_order(channel, now)  # it was just about to be taken
            elif channel.owner is task:
                self._put_in_order(channel, now)
                if channel.tracking is not None:
                    pool.shelve(channel, now, _LIMIT_NS)
                    continue
                if channel in pool.idle:
                    pool.idle.remove(channel)
                pool.idle.insert(0, channel)
                channel.used_ns = now - _SURPLUS_NS  # if there is another one by now, this one goes
                channel.unfinished = True
                channel.owner = None
        if not task.plan.undone:
            return
        delete = task.delete(now)
        for site, conn in zip(pool.sites, task.written, strict=True):
            if conn is not None:
                self._take_back(conn, task, now)
            elif task.plan.deletes and site.index not in task.left_out:
                self._discard_on(site, delete, now)
        for index, channel in task.elsewhere:
            pool.leave(channel, index, delete)

    def _put_in_order(self, channel: Channel, now: int) -> None:
        """Give up those of its connections that something was being done to."""
        pool = self._pool
        for conn in list(pool.connections):
            if conn.channel is not channel or conn in pool.retired:
                continue
            if conn.busy or conn.state >= RETIRED or channel.conns[conn.site.index] is not conn:
                conn.sane = False
                pool.retire(conn, now)
            elif conn.state > READY:
                pool.lose(conn)
            else:
                channel.track(conn)

    def _take_back(self, conn: Connection, task: Task, now: int) -> None:
        """Have a delete follow what may have been written on a connection."""
        delete = task.delete(now)
        if conn.state == READY:
            with conn.lock:
                conn.channel.unfinished = True
                conn.put_safely(delete)
        elif conn.state == RETIRED:
            conn.carried[task.debt()] = delete.expires_ns
            self._pool.prolong(conn, conn.carried, now)
        else:
            conn.site.add_orphan(task.debt(), delete.expires_ns)

    def _discard(self, debt: Debt, touched: int, now: int) -> None:
        delete = delete_task(debt, now, _LIMIT_NS, now + DELETE_LIFE_NS)
        for site in self._pool.sites:
            if touched >> site.index & 1:
                self._discard_on(site, delete, now)

    def _discard_on(self, site: Site, delete: Task, now: int) -> None:
        """Send a delete behind the unanswered writes of its token, or else on any connection."""
        token = delete.token
        assert token is not None
        pool = self._pool
        channels = [channel for channel in pool.channels if channel.holds(site.index, token)]
        for channel in channels:
            pool.leave(channel, site.index, delete)
        retired = [conn for conn in pool.retired if conn.site is site and conn.holds(token)]
        for conn in retired:
            self._take_back(conn, delete, now)
        if not channels and not retired:
            ready = self._idle_ready(site)
            if ready is None or ready.backlog > MOST_BACKLOG:
                site.add_orphan(delete.debt(), delete.expires_ns)
            else:
                self._take_back(ready, delete, now)

    def deliver(self, channel: Channel, now: int) -> None:
        """Send what was left in a channel's mail, but nothing before the write that it has to follow."""
        waiting: list[tuple[int, Task]] = []
        while channel.mail:
            index, task = channel.mail[0]
            conn = channel.conns[index]
            before = task.follows
            if before is not None and (
                channel.writes(index, before)
                or any(where == index and earlier.token == before for where, earlier in waiting)
            ):
                waiting.append((index, task))
                self._wish(now + _MS)
            elif conn is not None and conn.state == READY:
                with conn.lock:
                    channel.unfinished = True
                    if channel.owner is None:
                        conn.busy = True
                    conn.put_safely(task)
                    if channel.owner is None:
                        conn.busy = False
                if channel.held:
                    channel.nudge()  # so that it looks when the answer is due
                elif channel is self._pool.keeper.channel:
                    self._pool.keeper.poke()
            elif task.plan.undone:
                self._pool.sites[index].add_orphan(task.debt(), task.expires_ns)
            channel.mail.popleft()
        channel.mail.extend(waiting)

    # ---- connections ----

    def _idle_ready(self, site: Site) -> Connection | None:
        """A connection that nobody uses, and on which can be sent."""
        for channel in reversed(self._pool.idle):
            conn = channel.conns[site.index]
            if channel.owner is None and conn is not None and conn.state == READY:
                return conn
        return None

    def _see_off(self, conn: Connection, now: int) -> None:
        """Read a retired connection to its end. Replies tell what it owes no more, if our books are right."""
        pool = self._pool
        if conn.out and conn.sane:
            pool.shut(conn)
        for _ in range(64):
            left = len(conn.slots)
            if not conn.sane:
                if not conn.discard_input():
                    break
                continue
            conn.receive(None)
            if conn.state == BROKEN:
                conn.state = RETIRED
            elif len(conn.slots) == left:
                break
        if conn.state == DEAD or now >= conn.until_ns:
            pool.bury(conn)
            return
        self._wish(conn.until_ns)
        self.watched[conn.fd] = select.POLLIN | select.POLLOUT if conn.out and conn.sane else select.POLLIN

    def _look_after_channel(self, channel: Channel, now: int) -> None:
        for conn in list(channel.conns):
            if conn is None or not conn.awaits():
                continue
            conn.proceed(now, _events_of(conn))
            if conn.open():
                conn.receive(None)
            channel.track(conn)
            if conn.state > READY:
                self._pool.lose(conn)
            elif conn.awaits():
                self._judge_silence(conn, now)

    def _judge_silence(self, conn: Connection, now: int) -> None:
        """A node that is silent for its limit is suspect; one that is silent for longer is connected anew."""
        due, site = conn.due_ns(), conn.site
        if due <= now:
            site.doubt(conn.overdue_text())
            due = conn.replace_ns()
            if due <= now:
                conn.give_up()
                self._pool.lose(conn)
                return
        self._wish(due)
        if conn.again_ns:
            self._wish(conn.again_ns)
        urgent = site.suspect or conn.state != READY or conn.out or conn.may_fall_back()
        if (urgent or self._pool.closed_ns) and conn.polled[0] != -1:
            self.watched[conn.polled[0]] = conn.polled[1]

    def _look_after_site(self, site: Site, now: int) -> None:
        """See to it that the node gets the deletes it is owed, and that it can say that it is back."""
        pool = self._pool
        site.expire_orphans(now)
        if site.orphans:
            willing = self._idle_ready(site)
            if willing is not None:
                with willing.lock:
                    willing.channel.unfinished = True
                    willing.send_orphans(now)
                self._judge_silence(willing, now)
        if pool.closed_ns and now >= pool.closed_ns + _AFTERMATH_NS:
            return  # what is owed is sent when the engine is used again
        used = now - pool.used_ns < _CARES_NS or any(channel.held for channel in pool.channels)
        used = used or pool.keeper.keeps()
        cares = site.suspect and not pool.closed_ns and used
        if not site.orphans and not cares:
            return
        if any(
            conn.site is site and conn.state <= READY and conn.awaits() and not conn.channel.held
            for conn in pool.connections
        ):
            self._wish(now + _LOOK_AGAIN_NS)  # a connection to it is under way, or to be answered first
            return
        if site.suspect and (quiet := self._idle_ready(site)) is not None:
            self._ask(quiet, now)
            return
        if now < site.next_connect_ns:
            self._wish(site.next_connect_ns)
            return
        channel = self._free_channel(site, now)
        if channel is None:
            self._wish(now + _LOOK_AGAIN_NS)
            return
        channel.unfinished = True
        opened = pool.open(channel, site, now, _LIMIT_NS)
        if opened.state > READY:
            pool.lose(opened)
            self._wish(site.next_connect_ns)
        elif opened.awaits():
            self._judge_silence(opened, now)

    def _ask(self, conn: Connection, now: int) -> None:
        """Ask anything on a connection that has nothing to wait for: its node is suspect because of another
        one, of a watch, and so could never tell that it answers again.
        """
        question = Task(PLANS[EXISTS.index], b"", (), _LIMIT_NS, 0, 0)
        question.due_ns = now + _LIMIT_NS
        with conn.lock:
            conn.channel.unfinished = True
            conn.put_safely(question)
        self._judge_silence(conn, now)

    def _free_channel(self, site: Site, now: int) -> Channel | None:
        """An idle channel without a connection to the node; None while rounds have them all."""
        pool = self._pool
        for channel in reversed(pool.idle):
            if channel.owner is None and channel.conns[site.index] is None:
                return channel
        if any(channel.tracking is None and channel is not pool.keeper.channel for channel in pool.channels):
            return None
        channel = Channel(len(pool.sites), None, now)
        pool.channels.add(channel)
        pool.idle.insert(0, channel)
        return channel

    def _close_surplus(self, now: int) -> None:
        """Close the channels that nobody has used for long, but one for rounds; if closed, all of them
        soon.
        """
        pool = self._pool
        closed = pool.closed_ns
        for channel in [*(pool.idle if closed else pool.idle[:-1]), *pool.shelves[0], *pool.shelves[1]]:
            if channel.owner is not None:
                continue
            end = closed + _AFTERMATH_NS if closed else channel.used_ns + _SURPLUS_NS
            if now >= end or (closed and not channel.is_unfinished()):
                pool.dismiss(channel)
            else:
                self._wish(end)


def _events_of(conn: Connection) -> int:
    """What has happened to a connection, without waiting."""
    if conn.polled[0] == -1 or (conn.state != CONNECTING and not conn.out):
        return 0
    poll = select.poll()
    poll.register(*conn.polled)
    for _, events in poll.poll(0):
        return events
    return 0
