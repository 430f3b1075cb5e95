"""Both engines read the same replies alike, wherever the network cuts them; and they send the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from redbolt._engine import Engine, Votes
from redbolt._judge import FAULT, NO, YES
from redbolt._programs import DROP, EXISTS, EXTEND, OWNED, TAKE, TYPE, Program
from tests.kit.clients import SLACK, eventually
from tests.kit.resp import NIL, OK, command, error, push
from tests.kit.rounds import KEY, TOKEN, anew, ask, attempt, by_name, causes, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, Step, expect, expect_end, ignore_rest, send, split

PAUSE = 0.0003  # seconds between two pieces
RESP3_NIL = b"_\r\n"
BELONGS = "a reply that does not belong to the command"

ARGUMENTS: dict[Program, tuple[bytes, ...]] = {
    DROP: (TOKEN,),
    EXTEND: (TOKEN, b"10000"),
    EXISTS: (),
    OWNED: (TOKEN, b"5"),
    TYPE: (),
}

# What servers say when they cannot or will not do what was asked.
ERRORS = (
    "LOADING server is loading",
    "OOM command not allowed",
    "READONLY You can't write",
    "NOAUTH Authentication required.",
    "MISCONF Errors writing to the AOF file",
    "MOVED 3999 127.0.0.1:6381",
    "ASK 3999 127.0.0.1:6381",
    "CLUSTERDOWN The cluster is down",
    "MASTERDOWN Link with MASTER is down",
    "BUSY Redis is busy running a script",
    "NOREPLICAS Not enough good replicas",
    "TRYAGAIN Multiple keys request",
    "ERR",
)


class Case(NamedTuple):
    """A reply to a program, and what must come of it."""

    program: Program
    reply: bytes
    vote: int
    text: str = ""
    hits: int = 0

    def __str__(self) -> str:
        shown = self.reply.decode(errors="replace").replace("\r\n", " ")
        return f"{self.program.name} {shown[:24]}"


WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
WRAPPED = f"{WRONGTYPE} script: fd758d1589d044dd850a6f05d52f2eefd27f033f, on @user_script:1."

VOTES = [
    Case(TAKE, OK, YES),
    Case(TAKE, NIL, NO),
    Case(TAKE, RESP3_NIL, NO),
    Case(TAKE, b"*-1\r\n", NO),
    Case(TAKE, error(WRONGTYPE), FAULT, WRONGTYPE),
    *(Case(TAKE, error(text), FAULT, text) for text in ERRORS),
    Case(DROP, b":1\r\n", YES, hits=1),
    Case(DROP, b":0\r\n", YES),
    Case(DROP, error(WRONGTYPE), YES),
    Case(DROP, error(WRAPPED), YES),
    *(Case(DROP, error(text), FAULT, text) for text in ERRORS[:3]),
    Case(EXTEND, OK, YES),
    Case(EXTEND, b":1\r\n", YES),
    Case(EXTEND, NIL, NO),
    Case(EXTEND, RESP3_NIL, NO),
    Case(EXTEND, b":0\r\n", NO),
    Case(EXTEND, error(WRONGTYPE), NO),
    Case(EXTEND, error(WRAPPED), NO),
    *(Case(EXTEND, error(text), FAULT, text) for text in ERRORS[:3]),
    Case(EXISTS, b":1\r\n", YES),
    Case(EXISTS, b":0\r\n", NO),
    Case(OWNED, b"$5\r\ntoken\r\n", YES),
    Case(OWNED, b"$5\r\nToken\r\n", NO),
    Case(OWNED, b"$6\r\ntokens\r\n", NO),
    Case(OWNED, b"$4\r\ntoke\r\n", NO),
    Case(OWNED, b"$0\r\n\r\n", NO),
    Case(OWNED, NIL, NO),
    Case(OWNED, error(WRONGTYPE), NO),
    Case(TYPE, b"+string\r\n", YES, "string"),
    Case(TYPE, b"+none\r\n", YES, "none"),
]

# Well-formed, but nothing that the command can be answered with.
WRONG: dict[Program, tuple[bytes, ...]] = {
    TAKE: (
        b":1\r\n", b":0\r\n", b":10000\r\n", b"$2\r\nOK\r\n", b"+QUEUED\r\n", b"+ok\r\n", b"+OK \r\n",
        b"+\r\n",
        b"*0\r\n", b"*1\r\n+OK\r\n", b"%1\r\n+OK\r\n+OK\r\n", b"~1\r\n+OK\r\n",
        b"#t\r\n", b",1.5\r\n", b"(9223372036854775808\r\n", b"=6\r\ntxt:OK\r\n",
    ),
    DROP: (b":2\r\n", b":-1\r\n", b":-2\r\n", b":9999\r\n", OK, NIL, b"$1\r\n1\r\n", b"#t\r\n"),
    EXTEND: (b":9999\r\n", b":-1\r\n", b"+1\r\n", b"$2\r\nOK\r\n", b"#t\r\n"),
    EXISTS: (b":2\r\n", b"$1\r\n1\r\n"),
    OWNED: (b"+token\r\n", b":1\r\n", b"*1\r\n$5\r\ntoken\r\n"),
    TYPE: (b"$6\r\nstring\r\n", b":1\r\n", NIL),
}  # fmt: skip
MISFITS = [Case(program, reply, FAULT, BELONGS) for program, replies in WRONG.items() for reply in replies]

# Two replies in a row, the first to a delete that nobody waits for, the second to the round.
IN_A_ROW = [
    Case(TAKE, b":1\r\n" + OK, YES),
    Case(TAKE, b":0\r\n" + NIL, NO),
    Case(TAKE, error("OOM no room") + NIL, NO),
    Case(TAKE, b":1\r\n" + error("OOM no room"), FAULT, "OOM no room"),
    Case(TAKE, push("invalidate", [KEY]) + b":1\r\n" + push("message", 1, None) + OK, YES),
    Case(DROP, b":1\r\n:0\r\n", YES, hits=0),
    Case(DROP, b":0\r\n:1\r\n", YES, hits=1),
    Case(EXTEND, b":1\r\n:0\r\n", NO),
    Case(OWNED, b":1\r\n$5\r\ntoken\r\n", YES),
]

FIRST = {TAKE: OK, DROP: b":0\r\n", EXTEND: OK, OWNED: NIL}

# What may come before a reply without being one.
BESIDE = [
    Case(TAKE, push("invalidate", [KEY]) + OK, YES),
    Case(TAKE, push("invalidate", None) * 3 + NIL, NO),
    Case(DROP, push("message", "channel", 1) + b":1\r\n", YES, hits=1),
    Case(TAKE, b"|1\r\n$3\r\nttl\r\n:1\r\n" + OK, YES),
    Case(DROP, b"|1\r\n$3\r\nttl\r\n:1\r\n:0\r\n", YES, hits=0),
]


def cuts(reply: bytes) -> list[tuple[int, ...]]:
    """In one piece, cut at each position, and byte by byte."""
    whole: list[tuple[int, ...]] = [()]
    return whole + [(at,) for at in range(1, len(reply))] + [tuple(range(1, len(reply)))]


def run(engine, program: Program) -> Votes:
    return attempt(engine) if program is TAKE else ask(engine, program, *ARGUMENTS[program])


def name_of(program: Program) -> str:
    word = program.forms[0][0]
    assert isinstance(word, bytes)
    return word.decode()


def check(case: Case, votes: Votes, cut: tuple[int, ...]) -> None:
    got = (said(votes), causes(votes), votes.hits)
    assert got == ([case.vote], [case.text], case.hits), f"cut at {cut}"


@pytest.mark.parametrize("case", [*VOTES, *BESIDE], ids=str)
def test_a_reply_is_read_alike_wherever_it_is_cut(engine_of, case: Case) -> None:
    pieces: Iterator[Step] = iter([split(case.reply, *cut, pause=PAUSE) for cut in cuts(case.reply)])
    answer = by_name(**{name_of(case.program): lambda argv: next(pieces)})
    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        for cut in cuts(case.reply):
            check(case, run(engine, case.program), cut)
        assert len(node.peers) == 1, "the connection was given up although the reply was in order"


@pytest.mark.parametrize("case", IN_A_ROW, ids=str)
def test_replies_that_come_together_go_to_their_own_commands(engine_of, case: Case) -> None:
    replies = [send(FIRST[case.program])] + [split(case.reply, *cut, pause=PAUSE) for cut in cuts(case.reply)]
    pieces = iter(replies)
    held_back: list[Argv] = []

    def answer(argv: Argv) -> bytes | Step | None:
        if b"discarded" in argv:
            held_back.append(argv)  # its reply comes with the next one
            return None
        return next(pieces) if argv[0].decode() == name_of(case.program) else b":0\r\n"

    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        run(engine, case.program)  # opens the connection
        done: list[Votes] = []
        for cut in cuts(case.reply):
            engine.discard(b"other", b"discarded")
            eventually(lambda: len(held_back) > len(done))
            done.append(run(engine, case.program))
            check(case, done[-1], cut)
        assert len(node.peers) == 1


@pytest.mark.parametrize("case", MISFITS, ids=str)
def test_a_reply_of_the_wrong_kind_is_a_fault_and_ends_the_connection(engine_of, case: Case) -> None:
    engines: list[Engine] = []
    with ExitStack() as stack:
        for cut in cuts(case.reply):
            script = [expect(name_of(case.program)), split(case.reply, *cut, pause=PAUSE), ignore_rest()]
            # A script only ends when the client has gone. All nodes stay, so that each has its own port.
            node = stack.enter_context(ScriptedNode(script, answer=by_name()))
            engines.append(engine_of(node.url))
            check(case, run(engines[-1], case.program), cut)
        eventually(lambda: not any(engine.pending(TOKEN) for engine in engines), what="it is undone")


def test_a_try_with_an_answer_of_the_wrong_kind_is_undone(engine_of) -> None:
    with ScriptedNode([expect("SET"), send(b":1\r\n"), ignore_rest()], answer=by_name()) as node:
        assert said(attempt(engine_of(node.url))) == [FAULT]
        undo = eventually(lambda: node.received("EVAL"))
        assert undo[0].argv[2:] == (b"1", KEY, TOKEN)
        assert undo[0].connection == 1


AWKWARD = {
    "plain": (b"name", b"token"),
    "nul": (b"a\0b\0", b"\0\0token\0"),
    "line ends": (b"a\r\nb\r\n\r\n", b"\r\n*1\r\n$4\r\nPING\r\n"),
    "emoji": ("lock 🔒é".encode(), "🔑".encode()),
    "no text": (bytes(range(256)), bytes(reversed(range(256)))),
    "percent": (b"%s%d%%", b"%b%n"),
    "long": (b"k" * 65_536, b"t" * 65_536),
}


@pytest.mark.parametrize(("key", "token"), AWKWARD.values(), ids=AWKWARD)
def test_every_command_is_sent_byte_for_byte(engine_of, key: bytes, token: bytes) -> None:
    length = b"%d" % len(token)
    script = [
        expect(command(b"SET", key, token, b"NX", b"PX", b"10000")), send(OK),
        expect(command(b"SET", key, token, b"IFEQ", token, b"PX", b"777")), send(OK),
        expect(command(b"GETRANGE", key, b"0", length)), send(b"$%d\r\n%b\r\n" % (len(token), token)),
        expect(command(b"EXISTS", key)), send(b":1\r\n"),
        expect(command(b"TYPE", key)), send(b"+string\r\n"),
        expect(command(b"DELIFEQ", key, token)), send(b":1\r\n"),
    ]  # fmt: skip
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        rounds = [attempt(engine, key, token)]
        for program, args in (
            (EXTEND, (token, b"777")),
            (OWNED, (token, length)),
            (EXISTS, ()),
            (TYPE, ()),
            (DROP, (token,)),
        ):
            rounds.append(ask(engine, program, *args, key=key))
        assert [said(votes) for votes in rounds] == [[YES]] * 6
        assert [votes.token for votes in (rounds[0], rounds[1], rounds[-1])] == [token] * 3


def test_a_fresh_token_is_128_bits_in_hexadecimal_and_new_each_time(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        tokens = [attempt(engine, token=None).token for _ in range(100)]
        assert [one.argv[2] for one in node.received("SET")] == tokens
        assert len(set(tokens)) == 100
        assert all(len(token) == 32 and int(token, 16) < 2**128 for token in tokens)


# ---- the handshake: nothing is asked of a node before it is over ----

AUTH_AND_SELECT = command("AUTH", "me", "s3cret") + command("SELECT", 3)


def with_login(node: ScriptedNode) -> str:
    return node.url.replace("//", "//me:s3cret@") + "/3"


def test_a_handshake_is_answered_before_anything_else_is_sent(engine_of) -> None:
    replies = OK + OK
    for cut in anew(cuts(replies)):
        script = [
            expect(AUTH_AND_SELECT),
            split(replies, *cut, pause=PAUSE),
            expect("SET"),
            send(OK),
            expect_end(),
        ]
        with ScriptedNode(script) as node:
            engine = engine_of(with_login(node))
            assert said(attempt(engine)) == [YES]
            engine.close()


def test_a_node_that_does_not_answer_the_handshake_is_asked_nothing(engine_of) -> None:
    with ScriptedNode([expect(AUTH_AND_SELECT), send(OK), ignore_rest()], answer=lambda argv: None) as node:
        engine = engine_of(with_login(node))
        votes = attempt(engine, limit=0.05)
        assert said(votes) == [FAULT]
        assert f"within {round(50 * SLACK)} ms" in causes(votes)[0]
        assert [one.name for one in node.received()] == ["AUTH", "SELECT"]
        engine.close()


REFUSALS = {
    "password": (error("WRONGPASS invalid username-password pair or user is disabled."), OK),
    "no user": (
        error("ERR AUTH <password> called without any password configured for the default user."),
        OK,
    ),
    "database": (OK, error("ERR DB index is out of range")),
    "both": (
        error("WRONGPASS invalid username-password pair or user is disabled."),
        error("NOAUTH Authentication required."),
    ),
}


@pytest.mark.parametrize("replies", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_handshake_is_the_nodes_fault_and_nothing_is_sent(
    engine_of, replies: tuple[bytes, bytes]
) -> None:
    told = next(reply for reply in replies if reply != OK)[1:-2].decode()
    together = b"".join(replies)
    for cut in anew([(), (len(replies[0]),), tuple(range(1, len(together)))]):
        script = [expect(AUTH_AND_SELECT), split(together, *cut, pause=PAUSE), ignore_rest()]
        with ScriptedNode(script, answer=by_name(AUTH=replies[0], SELECT=replies[1])) as node:
            votes = attempt(engine_of(with_login(node)))
            assert (said(votes), causes(votes)) == ([FAULT], [told])
            assert {one.name for one in node.received()} <= {"AUTH", "SELECT"}
