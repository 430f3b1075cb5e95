"""The mutants: what is changed, and which tests have to notice."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "Change", "Mutant"]

CLOCK = "tests/test_clock.py"
FAULTS = "tests/test_rules_faults.py"
HAND_ON = "tests/test_hand_on.py"
HOLDERS = "tests/test_rules_holders.py"
LEASES = "tests/test_leases.py"
LOSSES = "tests/test_lease_loss.py"
RENEWALS = "tests/test_renewal_engine.py"
RENEWAL_FAULTS = "tests/test_renewal_faults.py"
INTERRUPTS = "tests/test_interrupts.py"
ORDER = "tests/test_order_and_undo.py"
QUEUE = "tests/test_queue.py"
REPORTS = "tests/test_reports.py"
VALIDITY = "tests/test_rules_validity.py"
WAITING = "tests/test_waiting.py"
WATCH = "tests/test_watch.py"

PROGRAMS = "src/redbolt/_programs.py"
ARGUMENTS = "src/redbolt/_arguments.py"
BODY = "src/redbolt/_body.py"
KEEP = "_core/keep.pxi"
LEASE = "src/redbolt/lease.py"
LINE = "src/redbolt/_queue.py"
ACQUIRE = "src/redbolt/_steps/acquire.py"
HANDING_ON = "src/redbolt/_steps/hand_on.py"
HEARING = "src/redbolt/_steps/hear.py"
PURE = "src/redbolt/_pure/engine.py"
PURE_KEEPER = "src/redbolt/_pure/keeper.py"
PURE_CONNECTION = "src/redbolt/_pure/connection.py"
ENGINE = "_core/engine.pxi"
ROUND = "_core/round.pxi"


class Change(NamedTuple):
    """One replacement of text, which must occur exactly once in the file."""

    file: str
    old: str
    new: str


class Mutant(NamedTuple):
    """One rule broken, for each engine."""

    name: str
    native: tuple[Change, ...]
    pure: tuple[Change, ...]
    tests: tuple[str, ...]  # the likeliest to notice first


def _both(name: str, *changes: Change, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name, changes, changes, tests)


MUTANTS = (
    _both(
        "blind delete: a release deletes whatever is there",
        Change(
            PROGRAMS,
            '((b"DELIFEQ", KEY, 1), (b"DELEX", KEY, b"IFEQ", 1), *_script("drop", 1)),\n    native=2,',
            '((b"DEL", KEY),),\n    native=1,',
        ),
        tests=(REPORTS, HOLDERS),
    ),
    _both(
        "quorum N/2: half of the nodes are enough",
        Change(ARGUMENTS, "majority = nodes // 2 + 1", "majority = max(1, nodes // 2)"),
        tests=(FAULTS, HOLDERS),
    ),
    Mutant(
        "validity counted from the end of the try",
        native=(
            Change(
                ENGINE,
                "votes.valid_until_ns = r.started_ns + r.valid_ns",
                "votes.valid_until_ns = r.ended_ns + r.valid_ns",
            ),
            Change(ROUND, "r.ended_ns >= r.started_ns + r.valid_ns", "r.ended_ns >= r.ended_ns + r.valid_ns"),
        ),
        pure=(
            Change(
                PURE,
                "validity_end_ns(votes.started_ns, lease_ms, drift_ns) if",
                "validity_end_ns(votes.ended_ns, lease_ms, drift_ns) if",
            ),
        ),
        tests=(VALIDITY, REPORTS),
    ),
    Mutant(
        "no undo: a try that was not granted is left behind",
        native=(
            Change(
                ROUND,
                "    if conn.state == READY and r.spare != NULL and not conn_put_spare(",
                "    if False and r.spare != NULL and not conn_put_spare(",
            ),
        ),
        pure=(
            Change(
                PURE,
                "enumerate(task.written):\n            answer = task.answers[index]\n            vote = OPEN",
                "enumerate(task.written[:0]):\n            answer = None\n            vote = OPEN",
            ),
        ),
        tests=(ORDER, FAULTS),
    ),
    Mutant(
        "undo on another connection: it may overtake the try",
        native=(
            Change(
                ROUND,
                "    if conn.state == READY and r.spare != NULL and not conn_put_spare(",
                '    conn_fail(r.engine, r.channel, conn, b"given up", True)\n'
                "    if conn.state == READY and r.spare != NULL and not conn_put_spare(",
            ),
        ),
        pure=(
            Change(
                PURE,
                "            if conn.state == READY:\n                with channel.lock:\n"
                "                    conn.busy = True\n                    conn.put_safely(delete)\n"
                "                    conn.busy = False\n",
                "            if conn.state == READY:\n"
                "                conn.site.add_orphan(task.debt(), task.expires_ns)\n"
                "                conn.slots.clear()\n                conn.close()\n"
                "                channel.conns[index] = None\n                self._pool.wake()\n",
            ),
        ),
        tests=(ORDER, VALIDITY),
    ),
    _both(
        "a lease that was handed on does not end",
        Change(HANDING_ON, "    lease.end()\n    return Lease(", "    return Lease("),
        tests=(
            f"{HAND_ON}::test_it_is_one_write",
            f"{HAND_ON}::test_a_second_release_of_the_old_holder_frees_nobody",
        ),
    ),
    _both(
        "validity of a lease that was handed on counted from the end of the exchange",
        Change(
            HANDING_ON,
            "    return Lease(waiter.target.key, waiter.target.lease_ms, votes, waiter.owner)\n",
            "    heir = Lease(waiter.target.key, waiter.target.lease_ms, votes, waiter.owner)\n"
            "    heir.renew(now_ns(), heir.length_ms, now_ns() + votes.valid_until_ns - votes.started_ns)\n"
            "    return heir\n",
        ),
        tests=(f"{HAND_ON}::test_the_new_lease_counts_from_before_the_write",),
    ),
    _both(
        "an exchange without a quorum counts as done",
        Change(BODY, "                if swapped is True:", "                if swapped:"),
        tests=(f"{HAND_ON}::test_without_a_quorum_nothing_is_handed_on",),
    ),
    _both(
        "an exchange without a quorum is not taken back",
        Change(PROGRAMS, "    undo=19,\n    after=2,", "    undo=3,\n    after=2,"),
        tests=(f"{HAND_ON}::test_without_a_quorum_nothing_is_handed_on",),
    ),
    _both(
        "an exchange does not look at the old token",
        Change(
            PROGRAMS,
            '((b"SET", KEY, 1, b"IFEQ", 2, b"PX", 3), *_script("swap", 1, 2, 3))',
            '((b"SET", KEY, 1, b"PX", 3),)',
        ),
        tests=(f"{HAND_ON}::test_somebody_elses_key_is_not_handed_on",),
    ),
    _both(
        "what was put back on a node is not released there",
        Change(HANDING_ON, "        heir.touch(lost)  # before it is there\n", ""),
        tests=(f"{ORDER}::test_what_is_put_back_on_a_node_is_released_there",),
    ),
    _both(
        "what was given to a waiter that then goes stays on the servers",
        Change(
            LINE,
            "        if waiter.gift and not waiter.accepted:\n            self.take_back_gift(waiter)\n",
            "",
        ),
        tests=(f"{QUEUE}::test_leaving_without_having_taken_what_was_given",),
    ),
    _both(
        "what is given to a waiter that has gone stays on the servers",
        Change(
            LINE,
            "        if waiter.gone and not waiter.accepted:\n            self.take_back_gift(waiter)\n",
            "        if waiter.gone and not waiter.accepted:\n",
        ),
        tests=(f"{QUEUE}::test_leaving_while_it_is_reserved",),
    ),
    _both(
        "last come, first served",
        Change(LINE, "        self.waiters.append(waiter)\n", "        self.waiters.appendleft(waiter)\n"),
        tests=(f"{QUEUE}::test_first_come_first_served",),
    ),
    _both(
        "handed on without an end, while others starve",
        Change(BODY, "queue.handoffs < self._max_handoffs", "queue.handoffs >= 0"),
        tests=(f"{HAND_ON}::test_so_many_in_a_row_and_then_a_real_release",),
    ),
    _both(
        "a hint is taken for a grant",
        Change(
            ACQUIRE,
            "            if both.verdict == GRANTED:\n                self.granted(both)",
            "            if both.verdict == GRANTED or self.hearing._hinted:\n"
            "                self.granted(both)",
        ),
        tests=(f"{WAITING}::test_renewals_cost_one_look_each",),
    ),
    _both(
        "the end of a life is not waited for",
        Change(HEARING, "        life_ns = self._life_ns(wanted)\n", "        life_ns = _NEVER\n"),
        tests=(CLOCK,),
    ),
    Mutant(
        "no arming: a try asks for no life, and so hears of no change",
        native=(Change(ROUND, "    elif done and r.mark:\n", "    elif done and r.mark and False:\n"),),
        pure=(
            Change(
                PURE_CONNECTION,
                "        if look is not None:\n            data += look.data\n",
                "        if False:\n            data += look.data\n",
            ),
        ),
        tests=(f"{WATCH}::test_a_refused_try_is_armed",),
    ),
    _both(
        "half a grant: what the others have given is left behind by an interrupt",
        Change(
            ACQUIRE,
            "            if others is not None and others.verdict == GRANTED:\n",
            "            if False and others is not None:\n",
        ),
        tests=(f"{INTERRUPTS}::test_an_interrupt_at_each_place_of_a_waiting_acquire",),
    ),
    Mutant(
        "who has lost the token votes for its renewal",
        native=(Change(KEEP, "    if vote == YES:\n", "    if vote == YES or vote == NO:\n"),),
        pure=(
            Change(
                PURE_KEEPER,
                "verdict(task.yes, task.no, task.open,",
                "verdict(task.yes + task.no, 0, task.open,",
            ),
        ),
        tests=(f"{RENEWAL_FAULTS}::test_putting_back_is_no_vote",),
    ),
    Mutant(
        "nothing is put back on a node that has lost the token",
        native=(Change(KEEP, "and k.no & ~k.restored:\n", "and False:\n"),),
        pure=(
            Change(
                PURE_KEEPER,
                "                    self._put_back(renewal, renewal.back, task, site.index)\n",
                "                    pass\n",
            ),
        ),
        tests=(f"{RENEWAL_FAULTS}::test_a_token_is_put_back_where_it_is_gone",),
    ),
    Mutant(
        "what was stopped is renewed",
        native=(Change(KEEP, "change_now(self.k, STOP)", "change_now(self.k, LOOK)"),),
        pure=(Change(PURE_KEEPER, "        if self.stopped and not self.in_hand:\n", "        if True:\n"),),
        tests=(f"{RENEWALS}::test_a_stopped_lease_is_not_renewed_and_not_lost",),
    ),
    _both(
        "a lock that everybody has forgotten is renewed for ever",
        Change(
            LEASE,
            "        if lease is not None and not self.over:\n",
            "        if False and lease is not None:\n",
        ),
        tests=(f"{LEASES}::test_a_thread_that_has_ended_holds_nothing",),
    ),
    _both(
        "a release says nothing of the loss",
        Change(BODY, "        lost = lease.found_lost\n", '        lost = ""\n'),
        tests=(f"{LOSSES}::test_a_loss_is_told_in_time_by_every_way",),
    ),
)
