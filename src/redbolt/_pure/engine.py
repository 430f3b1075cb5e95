"""Rounds: one command to all nodes at once, counted to a verdict under a deadline, in the calling thread."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Final

from redbolt import _engine, _process
from redbolt._clock import now_ns
from redbolt._engine import LOST
from redbolt._judge import FAULT, GRANTED, NO, OPEN, UNDECIDED, WAITING, YES, validity_end_ns, verdict
from redbolt._programs import DROP, EXTEND, TAKE, Program
from redbolt._pure.agent import NEVER
from redbolt._pure.channel import Channel
from redbolt._pure.connection import (
    HANDSHAKE,
    MOST_BACKLOG,
    READY,
    RESOLVING,
    Connection,
)
from redbolt._pure.gate import Gate
from redbolt._pure.keeper import Renewal
from redbolt._pure.pool import Pool
from redbolt._pure.resp import PLANS, Plan
from redbolt._pure.task import DELETE_LIFE_NS, Task, debt_for, mark_of
from redbolt._pure.watch import Watch
from redbolt.node import Node

__all__ = ["Engine", "Votes"]

_POLLIN: Final = select.POLLIN
_SLICE_MS = 50  # the main thread looks for signals at least this often
_STALE_NS = 2_000_000  # a channel that was idle for longer may have connections that ended meanwhile
_CALM = MOST_BACKLOG - 2 * _engine.MAX_KEY - 1024  # any command may be added to so many unanswered bytes
_POST_LIMIT_NS = 1_000_000_000
_HOLD_NS = 50_000_000  # so long a posted command waits for company
_ENDLESS_NS = 86_400_000_000_000  # so long the undo of a key without an end is remembered


class Votes:
    """What one round came to; see `redbolt._engine.Votes`."""

    __slots__ = (
        "_nodes", "_task", "ended_ns", "hits", "no", "started_ns", "token", "valid_until_ns", "verdict",
        "yes",
    )  # fmt: skip

    def __init__(self, nodes: int) -> None:
        self.verdict = UNDECIDED
        self.yes = self.no = self.hits = 0
        self.token = b""
        self.started_ns = self.ended_ns = self.valid_until_ns = 0
        self._nodes = nodes
        self._task: Task | None = None

    @property
    def touched(self) -> int:
        """A bit for each node that may have executed it."""
        return 0 if self._task is None else self._task.touched()

    def outcomes(self) -> list[tuple[int, str]]:
        """Per node: the vote, and the cause of a fault or the text of a reply."""
        answers = [None] * self._nodes if self._task is None else self._task.answers
        return [(OPEN, "") if answer is None else (answer[0], answer[2]) for answer in answers]


class _Tokens:
    """Fresh tokens of 128 random bits, from a buffer of the operating system's randomness."""

    def __init__(self) -> None:
        self._buffer: list[bytes] = []
        _process.on_fork(self._buffer.clear)

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
        self._order = _engine.common_order(nodes)[::-1]
        self._pool = Pool(nodes)
        self._sites = self._pool.sites

    def votes(self) -> Votes:
        """An empty result."""
        return Votes(self._size)

    def attempt(
        self,
        votes: _engine.Votes,
        key: bytes,
        token: bytes | None,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        program: Program = TAKE,
        extra: tuple[bytes, ...] = (),
        nodes: int = -1,
        watch: Watch | None = None,
    ) -> bool:
        """Try once to take a lock, and undo what was done if it was not granted.

        ``watch``: it is done on the channel of that one, together with a look.
        """
        if TYPE_CHECKING:
            assert isinstance(votes, Votes)  # it was made by our own `votes`
        _process.look()
        fresh = token is None
        votes.verdict = UNDECIDED
        votes.token = token = _fresh_token() if token is None else token
        args = (token, *extra, b"%d" % lease_ms) if lease_ms else (token, *extra)
        plan = PLANS[program.index]
        fresh = fresh and not plan.after
        _check(plan, key, *args)
        votes._task = task = Task(plan, key, args, limit_ns, 0, self._size)
        if nodes != -1:
            self._ask_only(task, nodes)
        try:
            channel = self._pool.check_out(task, fresh) if watch is None else watch.lend(task, fresh)
            self._start(votes, channel, task, lease_ms * 1_000_000 or _ENDLESS_NS)
            self._finish(votes, channel, task, quorum)
            votes.valid_until_ns = (
                validity_end_ns(votes.started_ns, lease_ms, drift_ns) if lease_ms else NEVER
            )
            late = votes.verdict == GRANTED and votes.ended_ns >= votes.valid_until_ns
            if late:
                votes.verdict = UNDECIDED
            if votes.verdict != GRANTED:
                self._undo(channel, task)
                if late:
                    self._tell_late(task)
            if watch is None:
                self._pool.put_back(channel, votes.ended_ns, limit_ns)
            else:
                watch.take_back(channel, votes.ended_ns, limit_ns)
            return votes.verdict == GRANTED
        except BaseException:
            self._give_up(votes, task)
            if watch is not None:
                watch.give_up()
            raise

    def round(
        self,
        votes: _engine.Votes,
        program: Program,
        key: bytes,
        args: tuple[bytes, ...],
        quorum: int,
        limit_ns: int,
        touched: int = -1,
    ) -> None:
        """Ask the ``touched`` nodes to run ``program`` with ``key`` and ``args``."""
        if TYPE_CHECKING:
            assert isinstance(votes, Votes)
        _process.look()
        plan = PLANS[program.index]
        votes.verdict = UNDECIDED
        _check(plan, key, *args)
        votes._task = task = Task(plan, key, args, limit_ns, 0, self._size)
        if touched != -1:
            self._leave_out(task, touched)
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

    def discard(
        self,
        key: bytes,
        token: bytes,
        touched: int = -1,
        program: Program = DROP,
        extra: tuple[bytes, ...] = (),
    ) -> None:
        """Queue a token-checked delete to the ``touched`` nodes, and wait for nobody."""
        _process.look()
        plan, words = PLANS[program.index], (key, token, *extra)
        _check(plan, *words)
        self._pool.care.discarded.append((debt_for(plan, words), touched))
        self._pool.wake()

    def post(self, program: Program, key: bytes, args: tuple[bytes, ...], touched: int = -1) -> None:
        """Have a program go along with the next command to each ready node, or a little later alone."""
        _process.look()
        plan = PLANS[program.index]
        _check(plan, key, *args)
        task = Task(plan, key, args, _POST_LIMIT_NS, 0, self._size)
        if touched != -1:
            self._ask_only(task, touched)
        try:
            now = now_ns()
            task.due_ns = now + _POST_LIMIT_NS
            task.expires_ns = now + DELETE_LIFE_NS
            channel = self._pool.check_out(task, not plan.writes)
            with channel.lock:
                for conn in channel.conns:
                    if conn is not None and conn.state == READY and conn.backlog <= _CALM:
                        conn.busy = True
                        self._post_on(conn, task, now)
                        conn.busy = False
            self._pool.put_back(channel, now, _HOLD_NS)
        except BaseException:
            task.elsewhere.clear()  # it is not undone: the token may be there by an earlier write
            self._give_up(Votes(self._size), task)
            raise

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
        gate: _engine.Gate | None = None,
    ) -> Renewal:
        """Have the agent look after a lease that was just granted."""
        _process.look()
        plan = None if program is None else PLANS[program.index]
        again = None if back is None else PLANS[back.index]
        if plan is not None:
            _check(plan, key, token, b"")  # the length of the life does not matter
        keeper = self._pool.keeper
        renewal = Renewal(
            keeper, key, token, touched, lease_ms, quorum, drift_ns, limit_ns, started_ns, valid_until_ns,
            until_ns, plan, again, gate,
        )  # fmt: skip
        try:
            keeper.keep(renewal)
        except BaseException:  # the traceback of an interrupt refers to it, maybe for long
            renewal.stop()
            raise
        return renewal

    def gate(self) -> Gate:
        """Where a thread of this process waits for another one."""
        return Gate()

    def pending(self, token: bytes) -> bool:
        """Say whether some write of this token may still be executed."""
        _process.look()
        try:
            return self._pool.pending(token)
        except BaseException:
            self._pool.unlock()
            raise

    def absent(self) -> int:
        """A bit for each node that would not be asked now."""
        now = now_ns()
        return sum(1 << site.index for site in self._sites if site.is_absent(now))

    def mark(self, key: bytes) -> int:
        """What the events of a watch call a key."""
        return mark_of(key)

    def watch(self, tracking: bool = True) -> Watch:
        """A channel to wait on."""
        _process.look()
        return Watch(self, self._pool, tracking)

    def close(self) -> None:
        """Retire all connections that no round, and no watch, is using."""
        try:
            self._pool.close()
        except BaseException:
            self._pool.unlock()
            raise

    # ---- a round ----

    def _ask_only(self, task: Task, nodes: int) -> None:
        """Let the other nodes not count."""
        for index in range(self._size):
            if not nodes >> index & 1:
                task.left_out.add(index)
                task.settle(index, (OPEN, 0, ""))
        task.asked = task.open

    def _post_on(self, conn: Connection, task: Task, now: int) -> None:
        plan, site = task.plan, conn.site
        if task.answers[site.index] is not None:
            return
        if plan.writes and not plan.deletes:
            if site.suspect:
                return
            conn.send_orphans(now)
            if conn.doubtful:
                conn.settle_doubts()
        form = plan.safe_form(conn.proven)
        conn.hold(task, form, plan.packers[form](task.words))

    def _leave_out(self, task: Task, touched: int) -> None:
        for index in range(self._size):
            if not touched >> index & 1:
                task.left_out.add(index)
                task.settle(index, (YES, 0, ""))  # the token is not there: the answer is known

    def _start(self, votes: Votes, channel: Channel, task: Task, life_ns: int) -> None:
        """Send the command to every node that can get it now."""
        now = now_ns()
        if now - channel.used_ns > _STALE_NS or (channel.unfinished and channel.is_overdue(now)):
            self.catch_up(channel, now)
            now = now_ns()
        votes.started_ns = now
        task.due_ns = now + task.limit_ns
        task.expires_ns = now + life_ns
        plan, written, answers, look = task.plan, task.written, task.answers, task.look
        if look is not None:
            look.due_ns = task.due_ns
        index, form, data = plan.index, -1, b""
        rest: list[int] | None = None
        conns = channel.conns
        with channel.lock:
            for at in self._order:
                conn = conns[at]
                site = self._sites[at]
                if (
                    conn is None
                    or conn.state != READY
                    or conn.backlog > _CALM
                    or conn.doubtful
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
                    conn.busy = True
                    conn.put(task, form, data, look)
                    conn.busy = False
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
            channel.tell(LOST, index)
        else:
            task.waiting.add(index)
        conn = channel.conns[index]
        if conn is None:
            if lacking := site.lacks(channel.tracking):
                task.waiting.discard(index)
                task.settle(index, (FAULT, 0, f"it does not know or permit {lacking}"))
                channel.tell(LOST, index, 0, 1)
                return
            if now < site.next_connect_ns:
                task.waiting.discard(index)
                task.settle(index, (FAULT, 0, site.cause))
                channel.tell(LOST, index)
                return
            conn = self._pool.open(channel, site, now, task.limit_ns)  # a suspect may be back
        self.follow_up(channel, conn, task)

    def follow_up(self, channel: Channel, conn: Connection, task: Task) -> None:
        """Do what the state of a connection calls for."""
        index = conn.site.index
        if conn.state > READY:
            self._pool.lose(conn)
            if conn.degraded and not conn.useless and index in task.waiting:
                # At once again, without what the node does not know.
                again = self._pool.open(channel, conn.site, now_ns(), task.limit_ns)
                self.follow_up(channel, again, task)
                return
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
            conn.busy = True
            conn.send_orphans(now_ns())
            if conn.doubtful and task.plan.tries:
                conn.settle_doubts()
            form = site.forms[task.plan.index]
            data = task.plan.packers[form](task.words)
            if conn.backlog + len(data) > MOST_BACKLOG and conn.slots:
                task.settle(site.index, (FAULT, 0, "too many unanswered commands"))
            else:
                task.written[site.index] = conn
                conn.put(task, form, data, task.look)
            conn.busy = False
        task.waiting.discard(site.index)

    def _finish(self, votes: Votes, channel: Channel, task: Task, quorum: int) -> None:
        """Count votes until they decide the round or its time is over."""
        size, limit_ns = task.asked, task.limit_ns
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
                        self.follow_up(channel, conn, task)
                else:
                    self.on_events(channel, conn, task, events)
            found = verdict(task.yes, task.no, task.open, size, quorum)
            ended = now_ns()
            if found == WAITING:
                left = task.due_ns - ended
                if left <= 0:
                    self._time_out(task)
                    found = verdict(task.yes, task.no, task.open, size, quorum)
                timeout = min(_SLICE_MS, -(-left // 1_000_000))
        if task.generation != _process.generation:
            raise RuntimeError("the process was forked by a signal handler in the middle of a round")
        votes.ended_ns = ended
        votes.yes = task.yes
        votes.no = task.no
        votes.hits = task.hits
        votes.verdict = found

    def on_events(self, channel: Channel, conn: Connection, task: Task, events: int) -> None:
        """Go on with a connection that is being opened, has to send, or was ended."""
        conn.proceed(now_ns(), events)
        if events & ~select.POLLOUT and conn.open():
            conn.receive(task)
        self.follow_up(channel, conn, task)

    def _tick(self, channel: Channel, task: Task, timeout: int) -> int:
        """Go on with connections that wait for a time or a name; the timeout that suits them."""
        now = now_ns()
        for index in list(task.waiting):
            conn = channel.conns[index]
            if conn is None or conn.state >= HANDSHAKE:
                continue
            if conn.connect_by_ns:
                timeout = max(0, min(timeout, -(-(conn.connect_by_ns - now) // 1_000_000)))
            if conn.connect_by_ns and now >= conn.connect_by_ns:
                conn.end(f"no connection within {conn.site.connect_ns // 1_000_000} ms")
                self.follow_up(channel, conn, task)
            elif conn.state == RESOLVING or conn.again_ns:
                conn.proceed(now, 0)
                self.follow_up(channel, conn, task)
                timeout = min(timeout, 1)
        return timeout if task.open else 0

    def catch_up(self, channel: Channel, now: int) -> None:
        """Read what has come since the channel was used last: what has ended is replaced in this round."""
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
        self._pool.wake()

    def _tell_late(self, task: Task) -> None:
        """A quorum said yes, but so late that nothing is left of the lease."""
        for index, answer in enumerate(task.answers):
            if answer is not None and answer[0] == YES:
                task.answers[index] = (FAULT, 0, "granted, but so late that no validity was left")

    def _undo(self, channel: Channel, task: Task) -> None:
        """Queue the delete behind a try that was not granted, wherever it may have been done."""
        delete: Task | None = None
        for index, conn in enumerate(task.written):
            answer = task.answers[index]
            vote = OPEN if answer is None else answer[0]
            if conn is None or vote == NO:
                continue
            if delete is None:
                delete = task.delete(now_ns())
            if conn.state == READY:
                with channel.lock:
                    conn.busy = True
                    conn.put_safely(delete)
                    conn.busy = False
            elif vote == YES:  # else its slot has left the delete behind, or it was not done
                conn.site.add_orphan(task.debt(), task.expires_ns)
                self._pool.wake()
        for index, other in task.elsewhere:
            self._pool.leave(other, index, task.delete(now_ns()))

    def _give_up(self, votes: Votes, task: Task) -> None:
        """The round was interrupted anywhere: the agent, which nothing interrupts, cleans up."""
        if task.generation != _process.generation:
            votes.verdict = UNDECIDED
            return  # it belongs to the parent, with all that it wrote
        while True:
            try:
                votes.verdict = UNDECIDED
                votes.yes, votes.no, votes.hits = task.yes, task.no, task.hits
                self._pool.hand_over(task)
                return
            except BaseException:  # a second interrupt; the first one is on its way already
                continue


def _check(plan: Plan, *words: bytes) -> None:
    if len(words) < plan.words:
        raise ValueError(f"the program lacks words: it needs {plan.words}, not {len(words)}")
    for word in words:
        if len(word) > _engine.MAX_KEY:
            raise ValueError(f"a key or token has at most {_engine.MAX_KEY} bytes, not {len(word)}")
