"""One command for all nodes, and what they said to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from redbolt import _process
from redbolt._judge import NO, YES
from redbolt._pure.resp import PLANS, Answer, Plan

if TYPE_CHECKING:
    from redbolt._pure.channel import Channel
    from redbolt._pure.connection import Connection

__all__ = ["DELETE_LIFE_NS", "Debt", "Task", "debt_for", "delete_task"]

Debt: TypeAlias = tuple[int, tuple[bytes, ...]]
"""A delete that a node is owed: the index of its program, and its words (the key, the token ...)."""

DELETE_LIFE_NS = 60_000_000_000


class Task:
    """One command for all nodes, and what they said; shared by its slots on the connections."""

    __slots__ = (
        "answers", "due_ns", "elsewhere", "expires_ns", "generation", "hits", "key", "left_out", "limit_ns",
        "no", "open", "plan", "token", "waiting", "words", "written", "yes",
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
        self.generation = _process.generation
        self.expires_ns = expires_ns  # its delete is of no use after this
        self.yes = self.no = self.hits = 0
        self.open = nodes
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


def debt_for(plan: Plan, words: tuple[bytes, ...]) -> Debt:
    """The delete that takes back what a plan did with these words."""
    return plan.undo, words[: PLANS[plan.undo].words]


def delete_task(debt: Debt, now: int, limit_ns: int, expires_ns: int) -> Task:
    """A delete that nobody waits for."""
    index, (key, *args) = debt
    task = Task(PLANS[index], key, tuple(args), limit_ns, expires_ns, 0)
    task.due_ns = now + limit_ns
    return task
