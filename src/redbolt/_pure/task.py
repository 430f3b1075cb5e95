"""One command for all nodes, and what they said to it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from redbolt import _process
from redbolt._engine import Event
from redbolt._judge import NO, YES
from redbolt._programs import LIFE
from redbolt._pure.resp import PLANS, Answer, Plan, pack_command

if TYPE_CHECKING:
    from redbolt._pure.channel import Channel
    from redbolt._pure.connection import Connection

__all__ = ["DELETE_LIFE_NS", "Debt", "Look", "Subscription", "Task", "debt_for", "delete_task", "mark_of"]

Debt: TypeAlias = tuple[int, tuple[bytes, ...]]
"""A delete that a node is owed: the index of its program, and its words (the key, the token ...)."""

DELETE_LIFE_NS = 60_000_000_000


class Task:
    """One command for all nodes, and what they said; shared by its slots on the connections."""

    __slots__ = (
        "answers", "asked", "due_ns", "elsewhere", "expires_ns", "follows", "generation", "hits", "key",
        "left_out", "limit_ns", "look", "no", "open", "plan", "token", "waiting", "words", "written", "yes",
    )  # fmt: skip
    kept = False  # by the agent, for a lease: every answer is for it, see `redbolt._pure.keeper`

    def __init__(
        self, plan: Plan, key: bytes, args: tuple[bytes, ...], limit_ns: int, expires_ns: int, nodes: int
    ) -> None:
        self.plan = plan
        self.key = key
        self.words = (key, *args)
        self.token = args[0] if args else None
        self.follows = self.words[plan.after] if plan.after else self.token  # whose writes have to go before
        self.limit_ns = limit_ns
        self.due_ns = 0
        self.generation = _process.generation
        self.expires_ns = expires_ns  # its delete is of no use after this
        self.yes = self.no = self.hits = 0
        self.open = self.asked = nodes
        self.look: Look | None = None  # goes out behind it
        self.answers: list[Answer | None] = [None] * nodes
        self.written: list[Connection | None] = [None] * nodes  # where the command may have gone out
        self.left_out: set[int] = set()  # nodes that are not asked
        self.waiting: set[int] = set()  # nodes that get it as soon as their connection is ready
        self.elsewhere: list[tuple[int, Channel]] = []  # nodes that get it on a channel that others use

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

    def repeat(self, conn: Connection, form: int) -> None:
        """Send it again in that form, for its node does not know the last one. Under the lock."""
        conn.put(self, form, self.plan.packers[form](self.words), self.look)

    def touched(self) -> int:
        """A bit for each node that may have executed it: it was sent there, and not answered with no."""
        bits = 0
        for index, answer in enumerate(self.answers):
            if self.written[index] is not None and (answer is None or answer[0] != NO):
                bits |= 1 << index
        for index, _ in self.elsewhere:
            bits |= 1 << index
        return bits

    def unwaited(self, now: int) -> Task:
        """The same command without anybody who waits for replies."""
        task = Task(self.plan, self.key, self.words[1:], self.limit_ns, self.expires_ns, 0)
        task.due_ns = now + self.limit_ns
        return task

    def debt(self) -> Debt:
        """The delete that takes it back; only what is ``undone`` has one."""
        return debt_for(self.plan, self.words)

    def delete(self, now: int) -> Task:
        """The same, as a command that nobody waits for."""
        return delete_task(self.debt(), now, self.limit_ns, self.expires_ns or now + DELETE_LIFE_NS)


class Look(Task):
    """How long a key lives, asked for a watch; nobody waits for the reply, which becomes an event."""

    __slots__ = ("data", "events", "mark")

    def __init__(self, key: bytes, limit_ns: int, events: deque[Event] | None) -> None:
        super().__init__(PLANS[LIFE.index], key, (), limit_ns, 0, 0)
        self.data = self.plan.packers[0](self.words)
        self.mark = mark_of(key)
        self.events = events  # of the watch that wants to know


class Subscription(Task):
    """A channel that a watch subscribes to; a push answers it, or an error."""

    __slots__ = ("data", "events")

    def __init__(self, topic: bytes, look: Look) -> None:
        super().__init__(look.plan, topic, (), look.limit_ns, 0, 0)
        self.data = pack_command((b"SUBSCRIBE", topic))
        self.events = look.events
        self.due_ns = look.due_ns


def mark_of(key: bytes) -> int:
    """What the events of a watch call a key."""
    return hash(key) or 1


def debt_for(plan: Plan, words: tuple[bytes, ...]) -> Debt:
    """The delete that takes back what a plan did with these words."""
    return plan.undo, words[: PLANS[plan.undo].words]


def delete_task(debt: Debt, now: int, limit_ns: int, expires_ns: int) -> Task:
    """A delete that nobody waits for."""
    index, (key, *args) = debt
    task = Task(PLANS[index], key, tuple(args), limit_ns, expires_ns, 0)
    task.due_ns = now + limit_ns
    return task
