"""Packing commands, reading replies and counting votes.

The native engine packs and parses inside a round, out of reach by itself; so its reading is measured by whole
rounds with a scripted node, where the pure engine's stand beside them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import redbolt
from redbolt import _judge
from redbolt._engine import engine_for
from redbolt._judge import FAULT, GRANTED, NO, REFUSED, UNDECIDED, WAITING, YES
from redbolt._programs import DROP, EXISTS, OWNED, TAKE, Program
from redbolt._pure.resp import PLANS, Answer, Reader, decode, pack_command
from tests.kit.resp import NIL, OK, error, reply
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import handshake

KEY, TOKEN, LEASE_MS = b"bench:micro", b"0" * 32, b"10000"
LONG = b"x" * 60_000
SECOND_NS = 1_000_000_000

COMMANDS = {
    "take": (TAKE, 0, (KEY, TOKEN, LEASE_MS)),
    "drop, DELIFEQ": (DROP, 0, (KEY, TOKEN)),
    "drop, EVALSHA": (DROP, DROP.native, (KEY, TOKEN)),
    "drop, EVAL": (DROP, len(DROP.forms) - 1, (KEY, TOKEN)),
}

REPLIES: dict[str, tuple[Program, bytes, int]] = {
    "take, granted": (TAKE, OK, YES),
    "take, refused": (TAKE, NIL, NO),
    "drop, gone": (DROP, reply(1), YES),
    "exists, yes": (EXISTS, reply(1), YES),
    "exists, an error": (EXISTS, error("LOADING server is loading the dataset in memory"), FAULT),
    "owned, a token": (OWNED, reply(TOKEN), YES),
    "owned, 60 kB": (OWNED, reply(LONG), NO),
}
READS = {name: what for name, what in REPLIES.items() if not what[0].writes}
VERDICT_OF = {YES: GRANTED, NO: REFUSED, FAULT: UNDECIDED}


@pytest.mark.benchmark(group="pack a command, pure engine")
@pytest.mark.parametrize(("program", "form", "words"), COMMANDS.values(), ids=COMMANDS)
def test_pack(benchmark: Any, program: Program, form: int, words: Sequence[bytes]) -> None:
    packer = PLANS[program.index].packers[form]
    packed = benchmark(packer, words)
    parts = (words[part] if isinstance(part, int) else part for part in program.forms[form])
    assert packed == pack_command(list(parts))


@pytest.mark.benchmark(group="pack a command, word by word")
def test_pack_word_by_word(benchmark: Any) -> None:
    """What the templates of the packers save."""
    packed = benchmark(pack_command, [b"SET", KEY, TOKEN, b"NX", b"PX", LEASE_MS])
    assert packed == PLANS[TAKE.index].packers[0]((KEY, TOKEN, LEASE_MS))


@pytest.mark.benchmark(group="read a reply and find its vote, pure engine")
@pytest.mark.parametrize(("program", "data", "vote"), REPLIES.values(), ids=REPLIES)
def test_read(benchmark: Any, program: Program, data: bytes, vote: int) -> None:
    reader, plan = Reader(), PLANS[program.index]

    def read() -> Answer | None:
        [found] = reader.feed(data)
        return plan.answers.get(found) or decode(plan.decoder, found, TOKEN)

    answer = benchmark(read)
    assert answer is not None
    assert answer[0] == vote


@pytest.mark.benchmark(group="read a reply in a whole round with a scripted node")
@pytest.mark.parametrize(("program", "data", "vote"), READS.values(), ids=READS)
def test_round(benchmark: Any, kind: str, program: Program, data: bytes, vote: int) -> None:
    args = (TOKEN, b"%d" % len(TOKEN)) if program is OWNED else ()
    with ScriptedNode(background=handshake, answer=lambda argv: data) as node:
        engine = engine_for((redbolt.Node.from_url(node.url),), kind)

        def ask() -> int:
            votes = engine.votes()
            engine.round(votes, program, KEY, args, 1, SECOND_NS)
            return votes.verdict

        assert benchmark(ask) == VERDICT_OF[vote]
        redbolt.close()


def _deciders() -> dict[str, Callable[[int, int, int, int, int], int]]:
    core: Any = importlib.import_module("redbolt._core")
    return {"native": core.verdict, "pure": _judge.verdict}


@pytest.mark.benchmark(group="decide all 56 counts of five nodes")
def test_count(benchmark: Any, kind: str) -> None:
    verdict = _deciders()[kind]
    cases = [
        (yes, no, still_open)
        for yes, no, still_open in itertools.product(range(6), repeat=3)
        if yes + no + still_open <= 5
    ]

    def count() -> list[int]:
        return [verdict(yes, no, still_open, 5, 3) for yes, no, still_open in cases]

    found = benchmark(count)
    assert len(found) == 56
    assert {*found} == {WAITING, UNDECIDED, GRANTED, REFUSED}
