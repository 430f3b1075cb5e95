"""One connection to one node: opened without blocking, with a first-in-first-out queue of what is unanswered.

A connection lives once: resolving, connecting, handshake, ready; then it is dead (the other side ended it) or
broken (given up by us), maybe retired, and at last closed. Its owner, the round that has its channel or else
the agent, is the only one to read it; sending is done under the channel's lock.

A ``KeyboardInterrupt`` may stop the main thread between any two steps. So a slot is noted before its bytes
are sent, and goes only after its reply was dealt with; a socket is put into its box by the very call that
makes it; and ``busy`` tells whether something was going on.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from redbolt import _engine
from redbolt._clock import now_ns
from redbolt._judge import FAULT, falls_back, lacks_hello
from redbolt._programs import TYPE
from redbolt._pure.resolve import Address, LookUp
from redbolt._pure.resp import (
    ERROR,
    PUSH,
    STATUS,
    SUBSCRIBED,
    Answer,
    Plan,
    Reader,
    Reply,
    decode,
    pack_command,
    text_of,
)
from redbolt._pure.site import Site
from redbolt._pure.task import Debt, Look, Subscription, Task, delete_task, mark_of

if TYPE_CHECKING:
    from redbolt._pure.channel import Channel
    from redbolt._pure.dial import Dial, Dialing

__all__ = [
    "BROKEN",
    "CLOSED",
    "CONNECTING",
    "DEAD",
    "HANDSHAKE",
    "MOST_BACKLOG",
    "READY",
    "RESOLVING",
    "RETIRED",
    "Connection",
]  # fmt: skip

RESOLVING: Final = 0
CONNECTING: Final = 1
HANDSHAKE: Final = 2
READY: Final = 3
DEAD: Final = 4  # nothing more comes
BROKEN: Final = 5  # given up by us: to be retired
RETIRED: Final = 6
CLOSED: Final = 7

MOST_BACKLOG: Final = 262_144  # bytes of unanswered commands
_LEAST_SILENCE_NS = 1_000_000_000
_DIAL_NS = 25_000_000_000  # so long a dial may take, which has its own timeouts
_READ = 16_384
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
_AGAIN_NS = 1_000_000
_UNDER_WAY = frozenset((errno.EINPROGRESS, errno.EINTR))
_LATER = frozenset((errno.EAGAIN, errno.EWOULDBLOCK))

Slot: TypeAlias = tuple[Task, int, int]
"""A command whose reply is awaited: task, form, size in bytes."""

# These stand for the commands of the handshake.
_LOGIN = Task(Plan(TYPE), b"", (), 0, 0, 0)  # an error ends the connection
_HELLO = Task(Plan(TYPE), b"", (), 0, 0, 0)  # an error ends it, and the next one goes without
_NAME = Task(Plan(TYPE), b"", (), 0, 0, 0)  # an error is remembered
_PING = Task(Plan(TYPE), b"", (), 0, 0, 0)  # any reply will do
_PUSHES = Task(Plan(TYPE), b"", (), 0, 0, 0)  # HELLO of a watch: an error, and there are no watches
_TRACKING = Task(Plan(TYPE), b"", (), 0, 0, 0)  # an error, and there are no such watches
_OPTIONAL = {b"HELLO": _HELLO, b"SETNAME": _NAME}
_OF_WATCH = {b"HELLO": _PUSHES, b"SETNAME": _NAME, b"TRACKING": _TRACKING}


class Connection:
    """See the module."""

    __slots__ = (
        "_addresses", "_dial", "_look_up", "again_ns", "backlog", "box", "busy", "carried", "cause",
        "channel", "connect_by_ns", "degraded", "doubtful", "fd", "heard", "limit_ns", "lock", "lost",
        "opened_ns", "out", "polled", "proven", "reader", "sane", "site", "slots", "sock", "state", "topics",
        "until_ns", "useless", "wanted",
    )  # fmt: skip

    def __init__(self, channel: Channel, site: Site, now: int, limit_ns: int) -> None:
        self.channel = channel
        self.lock = channel.lock
        self.site = site
        self.state = RESOLVING
        self.cause = ""
        self.opened_ns = now
        self.limit_ns = limit_ns
        self.until_ns = 0  # end of its time in retirement
        self.busy = False  # something is being done to it: after an interrupt, its books may be wrong
        self.sane = True  # they are right
        self.heard = False
        self.box: list[socket.SocketType] = []
        self.sock: socket.SocketType | None = None
        self.fd = -1
        self.polled = (-1, 0)  # descriptor and events that the channel's poll has
        self.slots: deque[Slot] = deque()
        self.carried: dict[Debt, int] = {}  # further deletes that become orphans with its end
        self.out = bytearray()
        self.backlog = 0  # bytes of unanswered commands
        self.proven = 0  # forms that were answered here, see Plan.proofs
        self.doubtful = False  # some write may be unanswered whose form the node may not know
        self.reader = Reader()
        self.again_ns = 0  # connecting is to be tried again then, if not 0
        self.connect_by_ns = now + site.connect_ns if site.connect_ns else 0  # no round waits for longer
        self.degraded = False  # it ended by what the node can do without: the next one goes without
        self.useless = False  # it ended by what a watch cannot do without
        self.lost = False  # its watch knows that the node does not answer
        self.wanted = False  # its watch is to be told when it is ready
        self.topics: set[bytes] = set()  # what it has subscribed to
        self._addresses: Iterator[Address] = iter(())
        self._dial: Dial | None = None  # what makes it, if its node has it dialled
        self._look_up = site.resolver.addresses() if site.dialing is None else LookUp()

    # ---- opening ----

    def interest(self) -> int:
        """The events that it waits for."""
        if self.state == CONNECTING:
            return 0 if self.again_ns else select.POLLOUT
        if self.state in (HANDSHAKE, READY):
            return select.POLLIN | select.POLLOUT if self.out else select.POLLIN
        return 0

    def proceed(self, now: int, events: int) -> None:
        """Go on with opening it, or with sending, as far as that is possible now."""
        self.busy = True
        self._proceed(now, events)
        self.busy = False

    def _proceed(self, now: int, events: int) -> None:
        if self.state == RESOLVING:
            if self.site.dialing is not None:
                self._take_over(self.site.dialing)
            elif self._look_up.done:
                if not self._look_up.addresses:
                    self.end(f"cannot resolve its name: {self._look_up.error}")
                    return
                self._addresses = iter(self._look_up.addresses)
                self._next_address(now, "it has no address")
        elif self.state == CONNECTING:
            if self.again_ns:
                if now >= self.again_ns:
                    self._addresses = iter(self._look_up.addresses)
                    self._next_address(now, "it has no address")
            elif events:
                self._finish_connect(now)
        elif events & select.POLLOUT:
            with self.lock:
                self.flush()

    def _next_address(self, now: int, cause: str) -> None:
        """Try the next address, or end with the cause of the failure of the last one."""
        self.state = CONNECTING
        self.again_ns = 0
        for family, address in self._addresses:
            self._shut_box()
            try:
                self.box.extend(map(socket.SocketType, (family,), (socket.SOCK_STREAM,)))
                sock = self.sock = self.box[0]
                self.fd = sock.fileno()
                sock.setblocking(False)
                if family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                error = sock.connect_ex(address)
            except (OSError, ValueError) as problem:
                cause = reason(problem)
                continue
            if error == 0:
                self._finish_connect(now)
                return
            if error in _UNDER_WAY:
                return
            if error in _LATER and family == socket.AF_UNIX:  # the backlog of the server is full
                self._shut_box()
                self.again_ns = now + _AGAIN_NS
                return
            cause = os.strerror(error)
        self.end(cause)

    def _finish_connect(self, now: int) -> None:
        assert self.sock is not None
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error and self.sock.family != socket.AF_UNIX:
            try:
                if self.sock.getsockname() == self.sock.getpeername():
                    error = errno.ECONNREFUSED  # nobody listens; our own end has just that port
            except OSError as problem:  # it was accepted, and reset at once
                error = problem.errno or errno.ECONNRESET
        if error:
            self._next_address(now, os.strerror(error))
        else:
            self._greet()

    def _take_over(self, dialing: Dialing) -> None:
        """Have it dialled, and go on with its socket; the dial has said all of the handshake."""
        dial = self._dial
        if dial is None:
            dial = self._dial = dialing.begin()
        if dial.done and dial.socket is None:
            self.end(dial.cause)
        elif dial.done:
            self.opened_ns = now_ns()  # a long dial must not be held against what follows it
            self.sock = dial.socket
            self.fd = dial.socket.fileno()
            self._greet()

    def _greet(self) -> None:
        """The socket is open: log in, or be ready at once if there is nothing to say."""
        site, tracking = self.site, self.channel.tracking
        watches = tracking is not None
        stand_ins = _OF_WATCH if watches else _OPTIONAL
        self.state = HANDSHAKE
        with self.lock:
            for words in site.node.handshake(not site.no_hello, not site.no_name, watches, bool(tracking)):
                name = words[1] if words[0] == b"CLIENT" else words[0]
                self.put(stand_ins.get(name, _LOGIN), 0, pack_command(words))
            if not self.slots:
                if site.suspect and not site.no_ping:
                    self.put(_PING, 0, pack_command((b"PING",)))
                else:
                    self._be_ready()

    def _be_ready(self) -> None:
        """The node may vote now; first it gets the deletes that earlier connections owe it."""
        self.state = READY
        self.site.answered()
        self.send_orphans(now_ns())

    # ---- sending; under the lock ----

    def put(self, task: Task, form: int, data: bytes, look: Look | None = None) -> None:
        """Queue a whole command and its slot, maybe with a look behind it, and send what the socket takes.

        A socket that fails here is left to its reader, who sees the same, and maybe a last word of the
        server.
        """
        size = len(data)
        if task.plan.writes and task.plan.proofs[form] & ~self.proven:
            self.doubtful = True
        self.slots.append((task, form, size))
        if look is not None:
            data += look.data
            self.slots.append((look, 0, len(look.data)))
            size = len(data)
            self.lost = False
        self.backlog += size
        if self.out:
            self.out += data
            self.flush()
            return
        try:
            sent = self.sock.send(data, _NO_SIGNAL)  # type: ignore[union-attr]
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return
        if sent < size:
            self.out += data[sent:]
            self.channel.track(self)

    def hold(self, task: Task, form: int, data: bytes) -> None:
        """Queue a command that goes out with the next one, or when the agent looks."""
        if task.plan.writes and task.plan.proofs[form] & ~self.proven:
            self.doubtful = True
        self.slots.append((task, form, len(data)))
        self.backlog += len(data)
        self.out += data
        self.channel.track(self)

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        assert self.sock is not None
        try:
            while self.out:
                del self.out[: self.sock.send(self.out, _NO_SIGNAL)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.out.clear()
        self.channel.track(self)

    def settle_doubts(self) -> None:
        """Have no earlier delete fall back only after a new try, which its token would then refuse.

        Whatever may yet turn out to be unknown to the node is sent in the form that works everywhere, too.
        """
        self.doubtful = False
        for task, form, _ in self.slots.copy():
            plan = task.plan
            if plan.deletes and plan.proofs[form] & ~self.proven:
                self.put(task, plan.last, plan.packers[-1](task.words))

    def look(self, look: Look, topic: bytes) -> None:
        """Ask how long a key lives, and before that subscribe to a channel, if it is a new one."""
        if topic and topic not in self.topics:
            subscription = Subscription(topic, look)
            self.hold(subscription, 0, subscription.data)
            self.topics.add(topic)
        self.lost = False
        self.put(look, 0, look.data)

    def put_safely(self, task: Task) -> None:
        """Queue a command that nobody waits for, in a form that was answered here, or else the last."""
        form = task.plan.safe_form(self.proven)
        self.put(task, form, task.plan.packers[form](task.words))

    def send_orphans(self, now: int) -> None:
        """Bring the node the deletes that it is owed."""
        site = self.site
        if not site.orphans:
            return
        site.expire_orphans(now)
        for debt, expires_ns in list(site.orphans.items()):
            if self.backlog > MOST_BACKLOG:
                return
            task = delete_task(debt, now, self.limit_ns, expires_ns)
            self.put(task, task.plan.last, task.plan.packers[-1](task.words))
            site.orphans.pop(debt, None)

    # ---- reading; by the owner alone ----

    def receive(self, current: Task | None) -> None:
        """Read what has come. Replies to ``current`` are votes, others are late ones.

        Afterwards the state may be DEAD or BROKEN.
        """
        self.busy = True
        self._receive(current)
        self.busy = False

    def _receive(self, current: Task | None) -> None:
        try:
            data = self.sock.recv(_READ)  # type: ignore[union-attr]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(reason(error))
            return
        if not data:
            self.end("the server closed the connection")
            return
        site, slots = self.site, self.slots
        for reply in self.reader.feed(data):
            if reply[0] >= PUSH:
                self._take_push(reply)
                continue
            if not slots:  # a server that is full says so before it hangs up
                self.end(self._unasked(reply), BROKEN)
                return
            task, form, size = slots[0]
            plan = task.plan
            answer = plan.answers.get(reply) or self._rare(task, form, reply, current)
            if answer is not None:
                proof = plan.proofs[form]
                if proof and not proof & self.proven and answer[0] != FAULT:
                    self.proven |= proof
                    site.proven |= proof
                if task is current or task.kept:
                    task.settle(site.index, answer)
            elif self.state == BROKEN:
                return
            slots.popleft()
            self.backlog -= size
            if self.state == READY:
                self.heard = True
                if site.suspect:
                    site.suspect = False
            elif not slots and self.state == HANDSHAKE:
                with self.lock:
                    self._be_ready()
                if self.wanted:
                    self.channel.tell(_engine.READY, site.index)
        if not slots:
            self.backlog = 0  # others may have added to it at the same time
        if self.reader.fault is not None:
            self.end(self.reader.fault, BROKEN)

    def _take_push(self, push: Reply) -> None:
        """Pass on what the node says unasked, or that it has carried out a subscription."""
        kind, subject = push
        if kind == SUBSCRIBED:
            if self.slots and isinstance(self.slots[0][0], Subscription):
                self.backlog -= self.slots[0][2]
                self.slots.popleft()
        elif isinstance(subject, bytes) and self.state == READY:
            mark = mark_of(subject) if subject else 0
            self.channel.tell(_engine.CHANGED, self.site.index, mark)

    def discard_input(self) -> bool:
        """Read and forget; False if there is nothing more for now, or at all (DEAD)."""
        try:
            if self.sock is not None and self.sock.recv(65536):
                return True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        self.state = DEAD
        return False

    def _rare(self, task: Task, form: int, reply: Reply, current: Task | None) -> Answer | None:
        """The answer of an uncommon reply; None if it is none (and the connection maybe BROKEN)."""
        kind, value = reply
        if task is _PING or task is _NAME:
            if kind == ERROR and task is _NAME:
                self.site.no_name = True
            return None
        if task is _PUSHES or task is _TRACKING:
            if kind == ERROR:
                assert isinstance(value, bytes)
                if task is _TRACKING or lacks_hello(value):
                    self._miss(task)
                self.end(self.site.node.scrubbed(text_of(value)), BROKEN)
            return None
        if task is _HELLO or task is _LOGIN:
            if kind == ERROR:
                assert isinstance(value, bytes)
                if task is _HELLO and lacks_hello(value):
                    self.site.no_hello = self.degraded = True
                self.end(self.site.node.scrubbed(text_of(value)), BROKEN)
            return None
        plan = task.plan
        if kind == ERROR and form < plan.last and falls_back(value):  # type: ignore[arg-type]
            assert isinstance(value, bytes)
            if not value.startswith(b"NOSCRIPT"):  # a script that was forgotten is known again after its EVAL
                forms = self.site.forms
                forms[plan.index] = max(forms[plan.index], form + 1)
            with self.lock:
                if task is current or task.kept:  # (what it writes would end what an earlier look has begun)
                    task.repeat(self, form + 1)
                elif plan.after:  # others may have been put in its place by now
                    self.put_safely(task.delete(now_ns()))
                elif plan.deletes or not self._is_outdated(task):
                    self.put(task, plan.last, plan.packers[-1](task.words))
            return None
        answer = decode(plan.decoder, reply, task.token)
        if answer is None or (isinstance(task, Subscription) and kind != ERROR):
            self.end("a reply that does not belong to the command", BROKEN)
            return None
        if isinstance(task, (Look, Subscription)):
            self._tell(task, reply)
        return answer

    def _tell(self, task: Look | Subscription, reply: Reply) -> None:
        """Pass on the answer to what a watch has asked, if it is still there."""
        value = reply[1]
        channel = self.channel
        if isinstance(value, bytes) and isinstance(task, Subscription):
            self.topics.discard(task.key)
        if self.state != READY or task.events is None or task.events is not channel.events:
            return
        if isinstance(value, bytes):
            channel.tell(_engine.LOST, self.site.index, 0, int(falls_back(value)))
        elif isinstance(value, int) and isinstance(task, Look):
            self.lost = False
            channel.tell(_engine.LIFE_TOLD, self.site.index, task.mark, value)

    def _miss(self, task: Task) -> None:
        """The node does not know or permit a part of the handshake that a watch needs."""
        if task is _TRACKING:
            self.site.no_tracking = True
        else:
            self.site.no_push = True
        self.degraded = self.useless = True

    def _is_outdated(self, task: Task) -> bool:
        """Whether it must not be repeated: it writes nothing, or its token was written again since."""
        if not task.plan.writes:
            return True
        return any(other is not task and other.token == task.token for other, _, _ in self.slots.copy())

    def _unasked(self, reply: Reply) -> str:
        kind, value = reply
        if kind in (ERROR, STATUS) and isinstance(value, bytes) and value:
            return self.site.node.scrubbed(text_of(value))
        return "a reply that nobody asked for"

    # ---- ending ----

    def end(self, cause: str, state: int = DEAD) -> None:
        """Note that it is over, and why; the pool does the rest."""
        self.cause = cause
        self.sane = False
        self.state = state

    def give_up(self) -> None:
        """It was silent for too long: stop waiting for it."""
        self.cause = self.overdue_text()
        self.state = DEAD if self.state < HANDSHAKE else BROKEN

    def open(self) -> bool:
        """Whether something can be read."""
        return HANDSHAKE <= self.state <= READY

    def awaits(self) -> bool:
        """Whether a reply, or the connection itself, is still to come."""
        return bool(self.slots) or self.state < READY

    def may_fall_back(self) -> bool:
        """Say whether some unanswered write may have to be repeated in another form, and so wants to be read
        at once.
        """
        for task, form, _ in self.slots.copy():
            if task.plan.writes and task.plan.proofs[form] & ~self.proven:
                return True
        return False

    def oldest_ns(self) -> int:
        """Since when it owes an answer, if `awaits`."""
        if self.state == READY:
            task = self.slots[0][0]
            return task.due_ns - task.limit_ns
        return self.opened_ns

    def due_ns(self) -> int:
        """When its node becomes suspect, if `awaits` still holds."""
        return self.slots[0][0].due_ns if self.state == READY else self.opened_ns + self.limit_ns

    def replace_ns(self) -> int:
        """When it is given up, if `awaits` still holds."""
        if self.state == RESOLVING and self.site.dialing is not None:
            return self.opened_ns + _DIAL_NS
        return self.oldest_ns() + max(_LEAST_SILENCE_NS, 4 * (self.due_ns() - self.oldest_ns()))

    def overdue_text(self) -> str:
        """The cause of a node that is suspect because of this connection."""
        what = "answer" if self.state == READY else "connection"
        return f"no {what} within {(self.due_ns() - self.oldest_ns()) // 1_000_000} ms"

    def draw_conclusions(self) -> bool:
        """The server has ended it: see what that tells about the oldest command.

        Proxies hang up on commands that they do not know. Returns True if the node gets another form of it,
        or can do without it.
        """
        site = self.site
        if not self.slots:
            return False
        task, form, _ = self.slots[0]
        plan = task.plan
        if task is _PING:
            site.no_ping = True
            return False
        if task is _PUSHES or task is _TRACKING:
            self._miss(task)
            return True
        if task is _HELLO or task is _NAME:
            site.no_hello |= task is _HELLO
            site.no_name |= task is _NAME
            self.degraded = True
            return True
        unproven = plan.proofs[form] & ~site.proven
        if unproven and site.forms[plan.index] == form:
            site.forms[plan.index] = form + 1
            return True
        return False

    def owed(self) -> dict[Debt, int]:
        """The deletes that follow from its unanswered writes, and the end of their use."""
        owed = dict(self.carried)
        for task, _, _ in self.slots.copy():
            if task.plan.undone:
                debt = task.debt()
                owed[debt] = max(task.expires_ns, owed.get(debt, 0))
        return owed

    def holds(self, token: bytes) -> bool:
        """Say whether a write of this token is unanswered here."""
        if not self.slots and not self.carried:
            return False
        return any(task.token == token and task.plan.writes for task, _, _ in self.slots.copy()) or any(
            words[1] == token for _, words in list(self.carried)
        )

    def close(self) -> None:
        """Give the descriptor back."""
        self._shut_box()
        self.state = CLOSED

    def _shut_box(self) -> None:
        if self._dial is not None:
            self._dial.drop()
        for sock in self.box:
            sock.close()
        self.box.clear()
        self.sock = None
        self.fd = -1


def reason(problem: Exception) -> str:
    """Why a socket call failed, in the system's words."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
