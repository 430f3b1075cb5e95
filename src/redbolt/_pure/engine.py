"""Rounds: one command to all nodes at once, counted to a verdict under a deadline, in the calling thread."""

from __future__ import annotations

import os
import select
from typing import Final

from redbolt import _process
from redbolt._clock import now_ns
from redbolt._engine import MAX_KEY
from redbolt._judge import FAULT, GRANTED, NO, OPEN, UNDECIDED, WAITING, YES, validity_end_ns, verdict
from redbolt._programs import TAKE, Program
from redbolt._pure.agent import AGENT
from redbolt._pure.channel import Channel
from redbolt._pure.connection import (
    DELETE_LIFE_NS,
    MOST_BACKLOG,
    READY,
    Connection,
    Task,
    delete_task,
)
from redbolt._pure.pool import Pool
from redbolt._pure.resp import PLANS, Answer
from redbolt.node import Node

__all__ = ["Engine", "Votes"]

_POLLIN: Final = select.POLLIN
_SLICE_MS = 50  # the main thread looks for signals at least this often
_STALE_NS = 2_000_000  # a channel that was idle for longer may have connections that ended meanwhile
_CALM = MOST_BACKLOG - 2 * MAX_KEY - 1024  # any command may be added to so many unanswered bytes
_TAKE_PLAN = PLANS[TAKE.index]


class Votes:
    """What one round came to; see `redbolt._engine.Votes`."""

    __slots__ = (
        "_answers", "ended_ns", "hits", "no", "started_ns", "token", "valid_until_ns", "verdict", "yes",
    )  # fmt: skip

    def __init__(self, nodes: int) -> None:
        self.verdict = UNDECIDED
        self.yes = self.no = self.hits = 0
        self.token = b""
        self.started_ns = self.ended_ns = self.valid_until_ns = 0
        self._answers: list[Answer | None] = [None] * nodes

    def outcomes(self) -> list[tuple[int, str]]:
        """Per node: the vote, and the cause of a fault or the text of a reply."""
        return [(OPEN, "") if answer is None else (answer[0], answer[2]) for answer in self._answers]


class _Tokens:
    """Fresh tokens of 128 random bits, from a buffer of the operating system's randomness."""

    def __init__(self) -> None:
        self._buffer: list[bytes] = []
        os.register_at_fork(after_in_child=self._buffer.clear)

    def take(self) -> bytes:
        while True:
            try:
                return self._buffer.pop()
            except IndexError:
                generation = _process.generation
                text = os.urandom(16 * 64).hex().encode()
                if generation == _process.generation:  # no signal handler has forked meanwhile
                    self._buffer.extend([text[at : at + 32] for at in range(0, len(text), 32)])


_fresh_token = _Tokens().take


class Engine:
    """See `redbolt._engine.Engine`."""

    kind = "pure"

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        self._size = len(nodes)
        self._pool = Pool(nodes)
        self._sites = self._pool.sites

    def votes(self) -> Votes:
        """An empty result."""
        return Votes(self._size)

    def attempt(
        self,
        votes: Votes,
        key: bytes,
        token: bytes | None,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
    ) -> bool:
        """Try once to take a lock, and undo what was done if it was not granted."""
        fresh = token is None
        votes.verdict = UNDECIDED
        votes.token = token = _fresh_token() if token is None else token
        _check(key, token)
        task = Task(_TAKE_PLAN, key, (token, b"%d" % lease_ms), limit_ns, 0, self._size)
        try:
            channel = self._pool.check_out(task, fresh)
            self._start(votes, channel, task, lease_ms * 1_000_000)
            self._finish(votes, channel, task, quorum)
            votes.valid_until_ns = validity_end_ns(votes.started_ns, lease_ms, drift_ns)
            late = votes.verdict == GRANTED and votes.ended_ns >= votes.valid_until_ns
            if late:
                votes.verdict = UNDECIDED
            if votes.verdict != GRANTED:
                self._undo(channel, task)
                if late:
                    self._tell_late(task)
            self._pool.put_back(channel, votes.ended_ns, limit_ns)
            return votes.verdict == GRANTED
        except BaseException:
            self._give_up(votes, task)
            raise

    def round(
        self,
        votes: Votes,
        program: Program,
        key: bytes,
        args: tuple[bytes, ...],
        quorum: int,
        limit_ns: int,
    ) -> None:
        """Ask all nodes to run ``program`` with ``key`` and ``args``."""
        plan = PLANS[program.index]
        votes.verdict = UNDECIDED
        _check(key, *args)
        task = Task(plan, key, args, limit_ns, 0, self._size)
        try:
            if plan.writes:
                votes.token = args[0]
            channel = self._pool.check_out(task, not plan.writes)
            self._start(votes, channel, task, DELETE_LIFE_NS)
            self._finish(votes, channel, task, quorum)
            if plan.deletes:
                self._pool.owe_unsent(task)
            self._pool.put_back(channel, votes.ended_ns, limit_ns)
        except BaseException:
            self._give_up(votes, task)
            raise

    def discard(self, key: bytes, token: bytes) -> None:
        """Queue a token-checked delete to every node, and wait for nobody."""
        _check(key, token)
        self._pool.discarded.append((key, token))
        AGENT.due(self._pool, 0)

    def pending(self, token: bytes) -> bool:
        """Say whether some write of this token may still be executed."""
        return self._pool.pending(token)

    def close(self) -> None:
        """Retire all connections that no round is using."""
        self._pool.close()

    # ---- a round ----

    def _start(self, votes: Votes, channel: Channel, task: Task, life_ns: int) -> None:
        """Send the command to every node that can get it now."""
        now = now_ns()
        if now - channel.used_ns > _STALE_NS or (channel.unfinished and channel.overdue(now)):
            self._catch_up(channel, now)
            now = now_ns()
        votes.started_ns = now
        task.due_ns = now + task.limit_ns
        task.expires_ns = now + life_ns
        plan, written, answers = task.plan, task.written, task.answers
        index, form, data = plan.index, -1, b""
        rest: list[int] | None = None
        at = 0
        with channel.lock:
            for conn in channel.conns:
                site = self._sites[at]
                if (
                    conn is None
                    or conn.state != READY
                    or (conn.backlog and (conn.mail or conn.backlog > _CALM))
                    or site.suspect
                    or site.orphans
                    or answers[at] is not None
                ):
                    rest = [at] if rest is None else [*rest, at]
                else:
                    if form != site.forms[index]:
                        form = site.forms[index]
                        data = plan.packers[form](task.words)
                    written[at] = conn
                    conn.put(task, form, data)
                at += 1
        if rest is not None:
            for at in rest:
                self._start_on(channel, task, at, now)

    def _start_on(self, channel: Channel, task: Task, index: int, now: int) -> None:
        """Send the command to a node with which something is not as usual."""
        site = self._sites[index]
        if task.answers[index] is not None:
            return
        if site.suspect and not task.plan.deletes:
            task.settle(index, (FAULT, 0, f"left out until it answers again: {site.cause}"))
            return
        conn = channel.conns[index]
        if conn is None:
            if now < site.next_connect_ns:
                task.settle(index, (FAULT, 0, site.cause))
                return
            conn = self._pool.open(channel, site, now, task.limit_ns)
        task.waiting.add(index)
        self._follow_up(channel, conn, task)

    def _follow_up(self, channel: Channel, conn: Connection, task: Task) -> None:
        """Do what the state of a connection calls for."""
        index = conn.site.index
        if conn.state > READY:
            self._pool.lose(conn)
            if index in task.waiting or task.written[index] is conn:
                task.waiting.discard(index)
                task.settle(index, (FAULT, 0, conn.cause))
        elif conn.state == READY and index in task.waiting:
            self._send(channel, conn, task)
        channel.track(conn)

    def _send(self, channel: Channel, conn: Connection, task: Task) -> None:
        """Send the command on a connection that is ready, after what has to go first."""
        site = conn.site
        with channel.lock:
            conn.take_mail()
            conn.send_orphans(now_ns())
            form = site.forms[task.plan.index]
            data = task.plan.packers[form](task.words)
            if conn.backlog + len(data) > MOST_BACKLOG and conn.slots:
                task.settle(site.index, (FAULT, 0, "too many unanswered commands"))
            else:
                task.written[site.index] = conn
                conn.put(task, form, data)
        task.waiting.discard(site.index)

    def _finish(self, votes: Votes, channel: Channel, task: Task, quorum: int) -> None:
        """Count votes until they decide the round or its time is over."""
        size, limit_ns = self._size, task.limit_ns
        found = verdict(task.yes, task.no, task.open, size, quorum)
        ended = votes.started_ns
        timeout = min(_SLICE_MS, -(-limit_ns // 1_000_000))
        poll, by_fd = channel.poll.poll, channel.by_fd
        while found == WAITING:
            if task.waiting:
                timeout = self._tick(channel, task, timeout)
            for fd, events in poll(timeout):
                conn = by_fd.get(fd)
                if conn is None:
                    continue
                if conn.state == READY and events == _POLLIN:
                    conn.receive(task)
                    if conn.state != READY:
                        self._follow_up(channel, conn, task)
                else:
                    self._on_events(channel, conn, task, events)
            found = verdict(task.yes, task.no, task.open, size, quorum)
            ended = now_ns()
            if found == WAITING:
                left = task.due_ns - ended
                if left <= 0:
                    self._time_out(task)
                    found = verdict(task.yes, task.no, task.open, size, quorum)
                timeout = min(_SLICE_MS, -(-left // 1_000_000))
        votes.ended_ns = ended
        votes.yes = task.yes
        votes.no = task.no
        votes.hits = task.hits
        votes._answers = task.answers
        votes.verdict = found

    def _on_events(self, channel: Channel, conn: Connection, task: Task, events: int) -> None:
        """Go on with a connection that is being opened, has to send, or was ended."""
        conn.proceed(now_ns(), events)
        if events & ~select.POLLOUT and conn.open():
            conn.receive(task)
        self._follow_up(channel, conn, task)

    def _tick(self, channel: Channel, task: Task, timeout: int) -> int:
        """Go on with connections that wait for a time or a name; the timeout that suits them."""
        now = now_ns()
        for index in list(task.waiting):
            conn = channel.conns[index]
            if conn is not None and conn.ticks:
                conn.proceed(now, 0)
                self._follow_up(channel, conn, task)
                if conn.ticks:
                    timeout = 1
        return timeout if task.open else 0

    def _catch_up(self, channel: Channel, now: int) -> None:
        """Read what has come since the channel was used last, so that an ended connection is replaced in this round."""
        for fd, events in channel.poll.poll(0):
            conn = channel.by_fd.get(fd)
            if conn is not None:
                conn.proceed(now, events)
                if events & ~select.POLLOUT and conn.open():
                    conn.receive(None)
                if conn.state > READY:
                    self._pool.lose(conn)
                else:
                    channel.track(conn)
        for conn in channel.conns:
            if conn is not None and conn.awaits() and conn.due_ns() <= now:
                conn.site.doubt(conn.overdue_text())
                if conn.replace_ns() <= now:
                    conn.give_up()
                    self._pool.lose(conn)

    def _time_out(self, task: Task) -> None:
        """Whoever has not answered by now is suspect."""
        for index, answer in enumerate(task.answers):
            if answer is None:
                what = "answer" if task.written[index] is not None else "connection"
                cause = f"no {what} within {task.limit_ns // 1_000_000} ms"
                task.settle(index, (FAULT, 0, cause))
                self._sites[index].doubt(cause)
        task.waiting.clear()
        AGENT.due(self._pool, 0)

    def _tell_late(self, task: Task) -> None:
        """A quorum said yes, but so late that nothing is left of the lease."""
        for index, answer in enumerate(task.answers):
            if answer is not None and answer[0] == YES:
                task.answers[index] = (FAULT, 0, "granted, but so late that no validity was left")

    def _undo(self, channel: Channel, task: Task) -> None:
        """Queue the delete behind a try that was not granted, wherever it may have been done."""
        assert task.token is not None
        delete: Task | None = None
        for index, conn in enumerate(task.written):
            answer = task.answers[index]
            vote = OPEN if answer is None else answer[0]
            if conn is None or vote == NO:
                continue
            if delete is None:
                delete = delete_task(task.key, task.token, now_ns(), task.limit_ns, task.expires_ns)
            if conn.channel is channel and conn.state == READY:
                with channel.lock:
                    conn.put_delete(delete)
            elif conn.channel is not channel or vote == YES:  # else its slot has left an orphan, or it is an error
                self._pool.undo_elsewhere(conn, delete)

    def _give_up(self, votes: Votes, task: Task) -> None:
        """The round was interrupted anywhere: the agent, which nothing interrupts, cleans up."""
        votes.verdict = UNDECIDED
        pool = self._pool
        pool.interrupted.append(task)
        for lock in (pool.lock, *[channel.lock for channel in list(pool.channels)]):
            try:
                while True:
                    lock.release()
            except RuntimeError:
                pass  # it was not, or is no longer, held by this thread
        AGENT.due(pool, 0)


def _check(*words: bytes) -> None:
    for word in words:
        if len(word) > MAX_KEY:
            raise ValueError(f"a key or token has at most {MAX_KEY} bytes, not {len(word)}")
