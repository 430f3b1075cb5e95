"""One connection to one node: opened without blocking, with a first-in-first-out queue of what is unanswered.

A connection lives once: resolving, connecting, handshake, ready; then it is dead (the other side ended it) or broken
(it makes no sense any more), and at last closed. Its owner, the round that has its channel or else the agent, is the
only one to read it; sending is done under the channel's lock.

Interrupts: a ``KeyboardInterrupt`` may stop the main thread between any two steps. So a slot is noted before its bytes
are sent and goes only after its reply was dealt with, and a socket is put into its box by the call that makes it.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from redbolt._clock import now_ns
from redbolt._judge import FAULT, NO, YES, falls_back
from redbolt._programs import PROGRAMS
from redbolt._pure.resolve import Address, Resolver
from redbolt._pure.resp import DROP_PLAN, ERROR, PUSH, STATUS, Answer, Plan, Reader, Reply, decode, pack_command, text_of
from redbolt.node import Node

if TYPE_CHECKING:
    from redbolt._pure.channel import Channel

__all__ = [
    "BROKEN", "CLOSED", "CONNECTING", "DEAD", "HANDSHAKE", "READY", "RESOLVING", "RETIRED",
    "Connection", "Site", "Task", "delete_task", "reason",
]  # fmt: skip

RESOLVING: Final = 0
CONNECTING: Final = 1
HANDSHAKE: Final = 2
READY: Final = 3
DEAD: Final = 4  # nothing more comes
BROKEN: Final = 5  # given up by us: to be retired
RETIRED: Final = 6
CLOSED: Final = 7

MOST_BACKLOG = 262_144
MOST_ORPHANS = 1024
FIRST_BACK_OFF_NS = 10_000_000
LAST_BACK_OFF_NS = 500_000_000
DELETE_LIFE_NS = 60_000_000_000
_LEAST_SILENCE_NS = 1_000_000_000
_READ = 16_384
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
_AGAIN_NS = 1_000_000
_UNDER_WAY = frozenset((errno.EINPROGRESS, errno.EINTR))
_LATER = frozenset((errno.EAGAIN, errno.EWOULDBLOCK))


class Task:
    """One command for all nodes, and what they said; shared by its slots on the connections."""

    __slots__ = (
        "answers", "due_ns", "expires_ns", "hits", "key", "limit_ns", "no", "open", "plan", "token", "waiting", "words",
        "written", "yes",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, key: bytes, args: tuple[bytes, ...], limit_ns: int, expires_ns: int, nodes: int
    ) -> None:
        self.plan = plan
        self.key = key
        self.words = (key, *args)
        self.token = args[0] if args else None
        self.limit_ns = limit_ns
        self.due_ns = 0
        self.expires_ns = expires_ns  # its delete is of no use after this
        self.yes = self.no = self.hits = 0
        self.open = nodes
        self.answers: list[Answer | None] = [None] * nodes
        self.written: list[Connection | None] = [None] * nodes  # where the command may have gone out
        self.waiting: set[int] = set()  # nodes that get it as soon as their connection is ready

    def settle(self, index: int, answer: Answer) -> None:
        """Count the vote of one node, if it has none yet."""
        if self.answers[index] is None:
            self.answers[index] = answer
            self.open -= 1
            vote = answer[0]
            if vote == YES:
                self.yes += 1
                self.hits += answer[1]
            elif vote == NO:
                self.no += 1


Slot = tuple[Task, int, int]
"""A command whose reply is awaited: task, form, size in bytes."""

_HELLO = Task(Plan(PROGRAMS[-1]), b"", (), 0, 0, 0)  # a command of the handshake: an error ends the connection
_PING = Task(Plan(PROGRAMS[-1]), b"", (), 0, 0, 0)  # any reply will do
for _task in (_HELLO, _PING):
    _task.plan.answers = {}


def delete_task(key: bytes, token: bytes, now: int, limit_ns: int, expires_ns: int) -> Task:
    """A delete that nobody waits for."""
    task = Task(DROP_PLAN, key, (token,), limit_ns, expires_ns, 0)
    task.due_ns = now + limit_ns
    return task


class Site:
    """What the engine knows of one node."""

    __slots__ = (
        "away", "back_off_ns", "cause", "forms", "hello", "index", "next_connect_ns", "no_ping", "node", "orphans",
        "proven", "resolver", "suspect",
    )  # fmt: skip

    def __init__(self, index: int, node: Node, on_resolved: Callable[[], None]) -> None:
        self.index = index
        self.node = node
        self.hello = [pack_command(words) for words in node.handshake()]
        self.resolver = Resolver(node, on_resolved)
        self.no_ping = False
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child."""
        self.suspect = False
        self.away = False  # a connect failed since it was last there
        self.cause = ""
        self.next_connect_ns = 0
        self.back_off_ns = 0
        self.forms = [0] * len(PROGRAMS)
        self.proven = 0
        self.orphans: dict[tuple[bytes, bytes], int] = {}
        """Deletes that the next connection has to bring, and the end of their use."""
        self.resolver.after_fork()

    def doubt(self, cause: str) -> None:
        """It does not answer."""
        if not self.suspect:
            self.cause = cause
            self.suspect = True

    def failed(self, cause: str, now: int) -> None:
        """A connect came to nothing: wait longer before the next."""
        self.cause = cause
        self.away = True
        self.back_off_ns = min(LAST_BACK_OFF_NS, max(FIRST_BACK_OFF_NS, 2 * self.back_off_ns))
        self.next_connect_ns = now + int(self.back_off_ns * random.uniform(0.5, 1.0))
        self.resolver.refresh()

    def answered(self) -> None:
        """A connection is ready."""
        self.suspect = False
        self.back_off_ns = self.next_connect_ns = 0
        if self.away:  # it may be another server by now
            self.away = False
            self.forms = [0] * len(PROGRAMS)
            self.proven = 0

    def add_orphan(self, key: bytes, token: bytes, expires_ns: int) -> None:
        """Owe the node a delete."""
        orphans = self.orphans
        orphans[key, token] = max(expires_ns, orphans.get((key, token), 0))
        while len(orphans) > MOST_ORPHANS:
            orphans.pop(next(iter(orphans)), None)

    def expire_orphans(self, now: int) -> None:
        """Forget deletes whose keys have ended by themselves."""
        for name, expires_ns in list(self.orphans.items()):
            if expires_ns <= now:
                self.orphans.pop(name, None)

    def scrubbed(self, text: str) -> str:
        """A server's text without our password, which some servers repeat."""
        password = self.node.password
        return text.replace(password, "***") if password else text


class Connection:
    """See the module."""

    __slots__ = (
        "_addresses", "_again_ns", "_look_up", "backlog", "box", "carried", "cause", "channel", "fd", "heard", "limit_ns",
        "lock", "mail", "opened_ns", "out", "polled", "proven", "reader", "sane", "site", "slots", "sock", "state",
        "until_ns",
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
        self.sane = True  # our books about it are right: no interrupt came in between
        self.heard = False
        self.box: list[socket.SocketType] = []
        self.sock: socket.SocketType | None = None
        self.fd = -1
        self.polled = (-1, 0)  # descriptor and events that the channel's poll has
        self.slots: deque[Slot] = deque()
        self.mail: deque[tuple[Task, int]] = deque()
        """Tasks and forms that other threads want to have sent here, behind an unanswered write of the same token."""
        self.carried: dict[tuple[bytes, bytes], int] = {}  # further deletes that become orphans with its end
        self.out = bytearray()
        self.backlog = 0  # bytes of unanswered commands
        self.proven = 0  # forms that were answered here, see Plan.proofs
        self.reader = Reader()
        self._again_ns = 0
        self._addresses: Iterator[Address] = iter(())
        self._look_up = site.resolver.addresses()

    # ---- opening ----

    def interest(self) -> int:
        """The events that it waits for."""
        if self.state == CONNECTING:
            return 0 if self._again_ns else select.POLLOUT
        if self.state in (HANDSHAKE, READY):
            return select.POLLIN | select.POLLOUT if self.out else select.POLLIN
        return 0

    @property
    def ticks(self) -> bool:
        """Whether it goes on without an event, so that it has to be looked at again soon."""
        return self.state == RESOLVING or self._again_ns > 0

    def proceed(self, now: int, events: int) -> None:
        """Go on with opening it, or with sending, as far as that is possible now."""
        if self.state == RESOLVING:
            if self._look_up.done:
                if not self._look_up.addresses:
                    self.end(f"cannot resolve its name: {self._look_up.error}")
                    return
                self._addresses = iter(self._look_up.addresses)
                self._next_address(now, "it has no address")
        elif self.state == CONNECTING:
            if self._again_ns:
                if now >= self._again_ns:
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
        self._again_ns = 0
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
                self._again_ns = now + _AGAIN_NS
                return
            cause = os.strerror(error)
        self.end(cause)

    def _finish_connect(self, now: int) -> None:
        assert self.sock is not None
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._next_address(now, os.strerror(error))
        elif self.sock.family != socket.AF_UNIX and self.sock.getsockname() == self.sock.getpeername():
            # Nobody listens, and the kernel has chosen just that port for our own end.
            self._next_address(now, os.strerror(errno.ECONNREFUSED))
        else:
            self._greet()

    def _greet(self) -> None:
        """The socket is open: log in, or be ready at once if there is nothing to say."""
        site = self.site
        self.state = HANDSHAKE
        with self.lock:
            for words in site.hello:
                self.put(_HELLO, 0, words)
            if not site.hello:
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

    def put(self, task: Task, form: int, data: bytes) -> None:
        """Queue a whole command and its slot, and send what the socket takes.

        A socket that fails here is left to its reader, who sees the same, and maybe a last word of the server.
        """
        size = len(data)
        self.slots.append((task, form, size))
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

    def put_delete(self, task: Task) -> None:
        """Queue a delete that nobody waits for: in a form that was answered here before, or else a whole EVAL."""
        form = DROP_PLAN.safe_form(self.proven)
        self.put(task, form, DROP_PLAN.packers[form](task.words))

    def send_orphans(self, now: int) -> None:
        """Bring the node the deletes that it is owed."""
        site = self.site
        if not site.orphans:
            return
        site.expire_orphans(now)
        for (key, token), expires_ns in list(site.orphans.items()):
            if self.backlog > MOST_BACKLOG:
                return
            task = delete_task(key, token, now, self.limit_ns, expires_ns)
            self.put(task, DROP_PLAN.last, DROP_PLAN.packers[-1](task.words))
            site.orphans.pop((key, token), None)

    def take_mail(self) -> None:
        """Send what other threads have left here."""
        while self.mail:
            task, form = self.mail[0]
            self.put(task, form, task.plan.packers[form](task.words))
            self.mail.popleft()

    # ---- reading; by the owner alone ----

    def receive(self, current: Task | None) -> None:
        """Read what has come. Replies to ``current`` are votes, others are late ones.

        Afterwards the state may be DEAD or BROKEN.
        """
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
            if reply[0] == PUSH:
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
                if task is current:
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
        if self.reader.fault is not None:
            self.end(self.reader.fault, BROKEN)

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
        if task is _PING:
            return None
        if task is _HELLO:
            if kind == ERROR:
                assert isinstance(value, bytes)
                self.end(self.site.scrubbed(text_of(value)), BROKEN)
            return None
        plan = task.plan
        if kind == ERROR and form < plan.last and falls_back(value):  # type: ignore[arg-type]
            forms = self.site.forms
            forms[plan.index] = max(forms[plan.index], form + 1)
            with self.lock:
                if task is current:
                    self.put(task, form + 1, plan.packers[form + 1](task.words))
                elif plan.deletes:
                    self.put(task, plan.last, plan.packers[-1](task.words))
            return None
        answer = decode(plan.decoder, reply, task.token)
        if answer is None:
            self.end("a reply that does not belong to the command", BROKEN)
        return answer

    def _unasked(self, reply: Reply) -> str:
        kind, value = reply
        if kind in (ERROR, STATUS) and isinstance(value, bytes) and value:
            return self.site.scrubbed(text_of(value))
        return "a reply that nobody asked for"

    # ---- ending ----

    def end(self, cause: str, state: int = DEAD) -> None:
        """Note that it is over, and why; the pool does the rest."""
        self.cause = cause
        self.state = state

    def give_up(self) -> None:
        """It was silent for too long: stop waiting for it."""
        self.end(self.overdue_text(), DEAD if self.state < HANDSHAKE else BROKEN)

    def open(self) -> bool:
        """Whether something can be read."""
        return HANDSHAKE <= self.state <= READY

    def awaits(self) -> bool:
        """Whether a reply, or the connection itself, is still to come."""
        return bool(self.slots) or self.state < READY

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
        return self.oldest_ns() + max(_LEAST_SILENCE_NS, 4 * (self.due_ns() - self.oldest_ns()))

    def overdue_text(self) -> str:
        """The cause of a node that is suspect because of this connection."""
        what = "answer" if self.state == READY else "connection"
        return f"no {what} within {(self.due_ns() - self.oldest_ns()) // 1_000_000} ms"

    def draw_conclusions(self) -> bool:
        """The server has ended it: see what that tells about the oldest command. True if it gets another form.

        Proxies hang up on commands that they do not know.
        """
        site = self.site
        if not self.slots:
            return False
        task, form, _ = self.slots[0]
        plan = task.plan
        if task is _PING:
            site.no_ping = True
        elif task is not _HELLO and plan.proofs[form] and not plan.proofs[form] & site.proven:
            if site.forms[plan.index] == form:
                site.forms[plan.index] = form + 1
                return True
        return False

    def owed(self) -> dict[tuple[bytes, bytes], int]:
        """The deletes that follow from its unanswered writes, and the end of their use."""
        owed = dict(self.carried)
        for task in [slot[0] for slot in self.slots.copy()] + [task for task, _ in self.mail.copy()]:
            if task.plan.undone and task.token is not None:
                name = (task.key, task.token)
                owed[name] = max(task.expires_ns, owed.get(name, 0))
        return owed

    def holds(self, token: bytes) -> bool:
        """Say whether a write of this token is unanswered here."""
        if not self.slots and not self.mail and not self.carried:
            return False
        return (
            any(slot[0].token == token and slot[0].plan.writes for slot in self.slots.copy())
            or any(task.token == token for task, _ in self.mail.copy())
            or any(held == token for _, held in list(self.carried))
        )

    def close(self) -> None:
        """Give the descriptor back."""
        self.state = CLOSED
        self._shut_box()

    def _shut_box(self) -> None:
        for sock in self.box:
            sock.close()
        self.box.clear()
        self.sock = None
        self.fd = -1


def reason(problem: Exception) -> str:
    """Why a socket call failed, in the system's words."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
