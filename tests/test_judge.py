"""The decisions that both engines take, in Python and in C, are the same for every case."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

from redbolt import _judge
from redbolt._judge import GRANTED, REFUSED, UNDECIDED, WAITING, drift_ns

core: Any = importlib.import_module("redbolt._core")
DECIDERS = {"python": _judge, "core": core}


def cases():
    """All votes of up to 7 nodes: nodes, quorum, yes, no, still open (the rest are faults)."""
    for nodes in range(1, 8):
        for quorum in range(1, nodes + 1):
            for yes, no, still_open in itertools.product(range(nodes + 1), repeat=3):
                if yes + no + still_open <= nodes:
                    yield nodes, quorum, yes, no, still_open


def completions(nodes: int, quorum: int, yes: int, no: int, still_open: int) -> set[int]:
    """What a round can come to once the open nodes have spoken."""
    found = set()
    for more_yes in range(still_open + 1):
        for more_no in range(still_open - more_yes + 1):
            if yes + more_yes >= quorum:
                found.add(GRANTED)
            elif no + more_no > nodes - quorum:
                found.add(REFUSED)
            else:
                found.add(UNDECIDED)
    return found


@pytest.mark.parametrize("decider", DECIDERS.values(), ids=DECIDERS)
def test_a_verdict_is_there_as_soon_as_nothing_can_change_it_and_not_before(decider: Any) -> None:
    checked = 0
    for nodes, quorum, yes, no, still_open in cases():
        found = decider.verdict(yes, no, still_open, nodes, quorum)
        possible = completions(nodes, quorum, yes, no, still_open)
        told = f"{yes} yes, {no} no, {still_open} open of {nodes}, quorum {quorum}"
        if yes >= quorum:
            assert found == GRANTED, told
        elif len(possible) == 1:
            assert found == possible.pop(), told
        else:
            assert found == WAITING, told
        checked += 1
    assert checked == 1848


def test_the_core_decides_as_python_does() -> None:
    for nodes, quorum, yes, no, still_open in cases():
        arguments = (yes, no, still_open, nodes, quorum)
        assert core.verdict(*arguments) == _judge.verdict(*arguments), arguments


HUGE = 9_000_000_000_000_000_000  # a clock that has run for 285 years


def test_the_core_ends_validity_as_python_does() -> None:
    starts = (0, 1, 10**9, 10**15, 10**18, HUGE)
    for started, lease, factor in itertools.product(
        starts, (1, 3, 50, 1000, 30_000, 86_400_000), (0.0, 0.01, 0.5)
    ):
        drift = drift_ns(lease, factor)
        end = _judge.validity_end_ns(started, lease, drift)
        assert core.validity_end_ns(started, lease, drift) == end
        assert end == started + lease * 1_000_000 - int(lease * factor * 1_000_000) - 2_000_000


def test_drift_is_a_hundredth_of_the_lease_and_two_milliseconds() -> None:
    assert drift_ns(10_000, 0.01) == 102_000_000
    assert drift_ns(1, 0.0) == 2_000_000


TEXTS = {
    b"NOSCRIPT No matching script.": (True, False),
    b"NOSCRIPT": (True, False),
    b"NOSCRIP": (False, False),
    b" NOSCRIPT": (False, False),
    b"NOPERM this user has no permissions": (True, False),
    b"ERR unknown command 'DELIFEQ', with args beginning with: ": (True, False),
    b"ERR unknown command": (True, False),
    b"ERR unknown comman": (False, False),
    b"ERR unknown subcommand": (False, False),
    b"ERR syntax error": (True, False),
    b"ERR wrong number of arguments for 'delifeq' command": (True, False),
    b"ERR value is not an integer or out of range": (False, False),
    b"ERR": (False, False),
    b"": (False, False),
    b"LOADING unknown command": (False, False),
    b"WRONGTYPE Operation against a key": (False, True),
    b"WRONGTYPE": (False, True),
    b"WRONGTYP": (False, False),
    b"ERR Error running script: @user_script:1: WRONGTYPE Operation": (False, True),
    b"err user_script:1: -WRONGTYPE": (False, True),
    b"WRONG TYPE": (False, False),
    b"\0WRONGTYPE\0": (False, True),
}


@pytest.mark.parametrize("decider", DECIDERS.values(), ids=DECIDERS)
def test_what_an_error_means(decider: Any) -> None:
    for text, meaning in TEXTS.items():
        assert (decider.falls_back(text), decider.is_wrongtype(text)) == meaning, text


def test_the_core_reads_errors_as_python_does() -> None:
    """At every length of every text."""
    for text in TEXTS:
        for end in range(len(text) + 1):
            cut = text[:end]
            assert core.falls_back(cut) == _judge.falls_back(cut), cut
            assert core.is_wrongtype(cut) == _judge.is_wrongtype(cut), cut


def test_the_core_plans_renewals_as_python_does() -> None:
    times = (0, 1, 999_999, 10**6, 10**9 + 1, 10**15, 10**18, HUGE)
    leases = (1, 3, 50, 1000, 1001, 30_000, 86_400_000)
    for time, lease in itertools.product(times, leases):
        assert core.renewal_due_ns(time, lease) == _judge.renewal_due_ns(time, lease), (time, lease)
        for limit in (1, 10**6, 50_000_000, 10**12):
            arguments = (time, lease, limit)
            assert core.give_up_ns(*arguments) == _judge.give_up_ns(*arguments), arguments
        for left, factor in itertools.product((-(10**10), -1, 0, 1, 999_999, 10**6, 10**10), (0.0, 0.01)):
            life = (time, lease, drift_ns(lease, factor), time + left)
            assert core.renewed_life_ms(*life) == _judge.renewed_life_ms(*life), life
    for failures, lease in itertools.product((*range(15), 100, 2**31 - 1), leases):
        pause = (failures, lease)
        assert core.renewal_pause_ns(*pause) == _judge.renewal_pause_ns(*pause), pause


@pytest.mark.parametrize("decider", DECIDERS.values(), ids=DECIDERS)
def test_when_a_lease_is_renewed(decider: Any) -> None:
    lease, drift = 30_000, drift_ns(30_000, 0.01)
    assert decider.renewal_due_ns(30_000_000_000, lease) == 10_000_000_000
    assert decider.renewed_life_ms(0, lease, drift, 1 << 62) == lease
    assert decider.renewed_life_ms(0, lease, drift, 10_000_000_000) == 10_302
    assert decider.renewed_life_ms(0, lease, drift, -drift) == 0
    assert decider.renewed_life_ms(0, lease, drift, -drift - 1) < 0
    assert decider.give_up_ns(29_698_000_000, lease, 50_000_000) == 29_648_000_000
    assert decider.give_up_ns(1_000_000_000, 800, 200_000_000) == 900_000_000
    pauses = [decider.renewal_pause_ns(failures, lease) // 1_000_000 for failures in range(9)]
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 1000, 1000]
    assert decider.renewal_pause_ns(9, 200) == 20_000_000
