"""The mutants: what is changed, and which tests have to notice."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTANTS", "Change", "Mutant"]

FAULTS = "tests/test_rules_faults.py"
HOLDERS = "tests/test_rules_holders.py"
ORDER = "tests/test_order_and_undo.py"
REPORTS = "tests/test_reports.py"
VALIDITY = "tests/test_rules_validity.py"

PROGRAMS = "src/redbolt/_programs.py"
ARGUMENTS = "src/redbolt/_arguments.py"
PURE = "src/redbolt/_pure/engine.py"
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
)
