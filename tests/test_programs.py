"""The programs of the reentrant lock, and of the plain key as redis-py treats it: both engines send the same
bytes, read replies alike, and take back by the program's own undo.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

import redbolt
from redbolt._clock import now_ns
from redbolt._engine import Engine, Votes
from redbolt._judge import FAULT, GRANTED, NO, REFUSED, UNDECIDED, YES, drift_ns
from redbolt._programs import (
    ABANDON,
    ADD_TIME,
    COUNT,
    DROP,
    ENTER,
    EXISTS,
    FORCE,
    FORGET,
    HOLDS,
    KEEP,
    LEAVE,
    SET_TIME,
    TAKE,
    Program,
)
from redbolt.local import LocalNode
from tests.kit.clients import SLACK, Client, eventually, raw
from tests.kit.resp import NIL, OK, command, error, push
from tests.kit.rounds import KEY, LIMIT, anew, ask, attempt, by_name, causes, said
from tests.kit.scripted import Received, ScriptedNode
from tests.kit.steps import Argv, Step, expect, expect_end, hang_up, ignore_rest, send, serve, split

OWNER = b"client:1"
CHANNEL = b"channel"
LATCH = b"latch"
NO_SCRIPT = error("NOSCRIPT No matching script.")
SOON = 0.1  # seconds: for rounds that are not answered; the command has gone out by then
YEAR_NS = 365 * 86_400_000_000_000


class Use(NamedTuple):
    """A program with arguments, and what a server gets: a plain command, or what follows script or digest."""

    program: Program
    args: tuple[bytes, ...]
    plain: tuple[bytes, ...] = ()
    call: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return self.program.name

    @property
    def script(self) -> bytes:
        """Its text, as a server would see it."""
        text = self.program.forms[-1][1]
        assert isinstance(text, bytes)
        return text

    @property
    def forms(self) -> list[bytes]:
        """The bytes of each form."""
        if self.plain:
            return [command(*self.plain)]
        digest = hashlib.sha1(self.script).hexdigest()
        return [command("EVALSHA", digest, *self.call), command("EVAL", self.script, *self.call)]


def uses(key: bytes = KEY, owner: bytes = OWNER, channel: bytes = CHANNEL, latch: bytes = LATCH) -> list[Use]:
    """All of these programs, with these words."""
    return [
        Use(KEEP, (owner,), plain=(b"SET", key, owner, b"NX")),
        Use(ADD_TIME, (owner, b"-7", b"0"), call=(b"1", key, owner, b"-7", b"0")),
        Use(SET_TIME, (owner, b"777"), call=(b"1", key, owner, b"777")),
        Use(ENTER, (owner, channel, b"10000"), call=(b"1", key, owner, b"10000")),
        Use(COUNT, (owner, b"777", b"3"), call=(b"1", key, owner, b"777", b"3")),
        Use(LEAVE, (owner, channel, latch, b"20000"), call=(b"3", key, channel, latch, owner, b"20000")),
        Use(ABANDON, (owner, channel), call=(b"2", key, channel, owner)),
        Use(HOLDS, (owner,), plain=(b"HEXISTS", key, owner)),
        Use(FORCE, (channel,), call=(b"2", key, channel)),
        Use(FORGET, (), plain=(b"DEL", key)),
    ]


USES = uses()
SCRIPTS = [use for use in USES if use.call]
TRIES = [use for use in USES if use.program.tries]
USED: dict[Program, Use] = {use.program: use for use in USES}


def yes_to(program: Program) -> bytes:
    return OK if program is KEEP else b":1\r\n"


def name_of(program: Program) -> str:
    word = program.forms[0][0]
    assert isinstance(word, bytes)
    return word.decode()


def try_once(
    engine: Engine,
    program: Program,
    token: bytes | None = OWNER,
    *extra: bytes,
    key: bytes = KEY,
    lease_ms: int = 10_000,
    quorum: int | None = None,
    limit: float = LIMIT,
) -> Votes:
    """One try by another program than TAKE."""
    votes = engine.votes()
    needed = len(engine.nodes) // 2 + 1 if quorum is None else quorum
    limit_ns = int(limit * SLACK * 1e9)
    engine.attempt(votes, key, token, lease_ms, needed, drift_ns(lease_ms, 0.01), limit_ns, program, extra)
    return votes


def perform(engine: Engine, use: Use, key: bytes = KEY, limit: float = LIMIT) -> Votes:
    """Run the program the way its lock does."""
    if use.program is KEEP:
        return try_once(engine, KEEP, use.args[0], key=key, lease_ms=0, limit=limit)
    if use.program is ENTER:
        return try_once(engine, ENTER, *use.args[:2], key=key, limit=limit)
    return ask(engine, use.program, *use.args, key=key, limit=limit)


# ---- what is sent ----

AWKWARD = {
    "plain": (KEY, OWNER, CHANNEL, LATCH),
    "nul and line ends": (b"a\0\r\nb", b"\r\n*1\r\n$4\r\nPING\r\n", b"\0", b"\r\n"),
    "no text": (bytes(range(256)), bytes(reversed(range(256))), b"\xff\xfe", b"%s%n"),
    "emoji": ("lock 🔒é".encode(), "🔑".encode(), "📢".encode(), "{🚪}".encode()),
    "long": (b"k" * 65_536, b"t" * 65_536, b"c" * 65_536, b"l" * 65_536),
}


@pytest.mark.parametrize("words", AWKWARD.values(), ids=AWKWARD)
def test_every_program_is_sent_byte_for_byte(engine_of, words: tuple[bytes, bytes, bytes, bytes]) -> None:
    """A script goes by its digest, by its text where that is unknown, and by its digest the next time."""
    script: list[Step] = []
    for use in uses(*words):
        *digest, whole = use.forms
        for form in digest:
            script += [expect(form), send(NO_SCRIPT)]
        script += [expect(whole), send(yes_to(use.program)), expect(use.forms[0]), send(yes_to(use.program))]
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        for use in uses(*words):
            for _ in range(2):
                votes = perform(engine, use, words[0])
                assert said(votes) == [YES], use
                assert not use.program.writes or votes.token == use.args[0], use


@pytest.mark.parametrize("use", SCRIPTS, ids=str)
def test_a_script_begins_with_code(use: Use) -> None:
    """The comments of its file are not sent, and the code is."""
    assert b"--" not in use.script
    assert b"redis.call(" in use.script
    assert use.script.count(b"return") >= 2


def test_a_fresh_token_may_be_set_by_any_program_that_tries(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, EVALSHA=b":1\r\n")) as node:
        engine = engine_of(node.url)
        for program, extra in ((KEEP, ()), (ENTER, (CHANNEL,))) * 3:
            votes = try_once(engine, program, None, *extra)
            assert len(votes.token) == 32
            assert votes.token in node.received()[-1].argv
        assert len({one.argv[2] for one in node.received("SET")}) == 3
        assert len({one.argv[4] for one in node.received("EVALSHA")}) == 3


# ---- what replies come to ----

WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
WRAPPED = f"{WRONGTYPE} script: fd758d1589d044dd850a6f05d52f2eefd27f033f, on @user_script:1."
HIDDEN = f"ERR Error running script (call to f_fd758d15): @user_script:1: {WRONGTYPE}"
BELONGS = "a reply that does not belong to the command"
FLAGS = (ADD_TIME, SET_TIME, ENTER, COUNT, HOLDS, FORCE, FORGET)
GONES = (LEAVE, ABANDON)
FAULTS = (
    "OOM command not allowed",
    "LOADING server is loading",
    "BUSY Redis is busy running a script",
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


VOTES = [
    Case(KEEP, OK, YES),
    Case(KEEP, NIL, NO),
    Case(KEEP, b"_\r\n", NO),
    Case(KEEP, error(WRONGTYPE), FAULT, WRONGTYPE),
    *(Case(KEEP, error(text), FAULT, text) for text in FAULTS),
    *(Case(program, b":1\r\n", YES) for program in FLAGS),
    *(Case(program, b":0\r\n", NO) for program in FLAGS),
    *(Case(program, error(text), NO) for program in FLAGS for text in (WRONGTYPE, WRAPPED, HIDDEN)),
    *(Case(program, error(text), FAULT, text) for program in FLAGS for text in FAULTS[:2]),
    *(Case(program, b":1\r\n", YES, hits=1) for program in GONES),
    *(Case(program, b":0\r\n", YES) for program in GONES),
    *(Case(program, error(text), YES) for program in GONES for text in (WRONGTYPE, WRAPPED, HIDDEN)),
    *(Case(program, error(text), FAULT, text) for program in GONES for text in FAULTS),
    Case(ENTER, push("invalidate", [KEY]) + b":1\r\n", YES),
    Case(LEAVE, push("message", "channel", 0) + b":1\r\n", YES, hits=1),
]
MISFITS = [
    *(Case(KEEP, reply, FAULT, BELONGS) for reply in (b":1\r\n", b"$2\r\nOK\r\n", b"+QUEUED\r\n")),
    *(
        Case(program, reply, FAULT, BELONGS)
        for program in FLAGS
        for reply in (b":9999\r\n", b":-1\r\n", b"$1\r\n1\r\n", b"#t\r\n", b"*1\r\n:1\r\n")
    ),
    *(
        Case(program, reply, FAULT, BELONGS)
        for program in GONES
        for reply in (b":2\r\n", b":-2\r\n", OK, NIL, b"*1\r\n:1\r\n")
    ),
]


def cuts(reply: bytes) -> list[tuple[int, ...]]:
    """In one piece, cut at some positions (at each of a short one), and byte by byte if it is short."""
    step = max(1, len(reply) // 12)
    some: list[tuple[int, ...]] = [(), *((at,) for at in range(1, len(reply), step))]
    return some if len(reply) > 80 else [*some, tuple(range(1, len(reply)))]


def check(case: Case, votes: Votes, cut: tuple[int, ...]) -> None:
    got = (said(votes), causes(votes), votes.hits)
    assert got == ([case.vote], [case.text], case.hits), f"cut at {cut}"


@pytest.mark.parametrize("case", VOTES, ids=str)
def test_a_reply_is_read_alike_wherever_it_is_cut(engine_of, case: Case) -> None:
    pieces: Iterator[Step] = iter([split(case.reply, *cut, pause=0.0003) for cut in cuts(case.reply)])
    answer = by_name(
        **{name_of(case.program): lambda argv: b":0\r\n" if is_undo(argv, case.program) else next(pieces)}
    )
    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        for cut in cuts(case.reply):
            check(case, perform(engine, USED[case.program]), cut)
        assert len(node.peers) == 1, "the connection was given up although the reply was in order"


def is_undo(argv: Argv, program: Program) -> bool:
    """Whether it is a call of another program's script by its digest, once that is known."""
    return argv[0] == b"EVALSHA" and argv[1] != program.forms[0][1]


@pytest.mark.parametrize("case", MISFITS, ids=str)
def test_a_reply_of_the_wrong_kind_is_a_fault_and_ends_the_connection(engine_of, case: Case) -> None:
    for cut in anew(cuts(case.reply)):
        script = [expect(name_of(case.program)), split(case.reply, *cut, pause=0.0003), ignore_rest()]
        with ScriptedNode(script, answer=by_name()) as node:
            engine = engine_of(node.url)
            check(case, perform(engine, USED[case.program]), cut)
            eventually(lambda engine=engine: not engine.pending(OWNER), what="it is undone")  # type: ignore[misc]


@pytest.mark.parametrize("use", SCRIPTS, ids=str)
def test_a_fallback_may_be_cut_anywhere(engine_of, use: Use) -> None:
    for position in anew(range(1, len(NO_SCRIPT), 4)):
        refusal = split(NO_SCRIPT, position, pause=0.0003)
        with ScriptedNode(answer=by_name(EVALSHA=refusal, EVAL=split(b":1\r\n", 1, 3, pause=0.0003))) as node:
            assert said(perform(engine_of(node.url), use)) == [YES]
            assert [one.name for one in node.received()] == ["EVALSHA", "EVAL"]


@pytest.mark.parametrize("use", SCRIPTS, ids=str)
def test_a_user_who_may_run_whole_scripts_alone(engine_of, use: Use) -> None:
    denied = error("NOPERM User worker has no permissions to run the 'evalsha' command")
    with ScriptedNode(answer=by_name(EVALSHA=denied, EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        for _ in range(3):
            assert said(perform(engine, use)) == [YES]
        assert [one.name for one in node.received()] == ["EVALSHA", "EVAL", "EVAL", "EVAL"]


@pytest.mark.parametrize("use", SCRIPTS, ids=str)
def test_when_no_form_works_the_last_ones_error_is_the_cause(engine_of, use: Use) -> None:
    denied = "NOPERM User worker has no permissions to run the 'eval' command"
    with ScriptedNode(answer=by_name(EVALSHA=error(denied), EVAL=error(denied))) as node:
        votes = perform(engine_of(node.url), use)
        assert (said(votes), causes(votes)) == ([FAULT], [denied])


@pytest.mark.parametrize("use", USES, ids=str)
def test_a_quorum_decides(engine_of, use: Use) -> None:
    """Two of three say yes, or no; the third says nothing at all."""
    no = NIL if use.program is KEEP else b":0\r\n"
    deletes = use.program.deletes
    for reply, verdict in anew([(yes_to(use.program), GRANTED), (no, GRANTED if deletes else REFUSED)]):
        word = name_of(use.program)
        with (
            ScriptedNode(answer=by_name(**{word: reply})) as a,
            ScriptedNode(answer=by_name(**{word: None, "EVAL": None})) as silent,
            ScriptedNode(answer=by_name(**{word: reply})) as b,
        ):
            engine = engine_of(a.url, silent.url, b.url)
            votes = perform(engine, use)
            assert votes.verdict == verdict
            assert votes.hits == (2 if deletes and reply != no else 0)
            engine.close()


# ---- arguments ----


@pytest.fixture
def untouched(engine_of) -> Iterator[Engine]:
    """An engine whose node must not even be connected to."""
    with ScriptedNode() as node:
        yield engine_of(node.url)
        assert node.peers == []


@pytest.mark.parametrize("use", USES, ids=str)
def test_missing_words_are_an_error_before_anything_is_sent(untouched: Engine, use: Use) -> None:
    votes = untouched.votes()
    for given in range(len(use.args)):
        with pytest.raises(ValueError, match="lacks words"):
            untouched.round(votes, use.program, KEY, use.args[:given], 1, 10**9)
        if not use.program.writes:
            with pytest.raises(ValueError, match="lacks words"):
                untouched.post(use.program, KEY, use.args[:given])
        if use.program.deletes and given:
            with pytest.raises(ValueError, match="lacks words"):
                untouched.discard(KEY, use.args[0], -1, use.program, use.args[1:given])
    assert votes.verdict == UNDECIDED
    assert not untouched.pending(OWNER)


def test_a_try_that_lacks_words(untouched: Engine) -> None:
    for program, lease_ms, extra in ((ENTER, 10_000, ()), (ENTER, 0, (CHANNEL,)), (TAKE, 0, ())):
        for token in (OWNER, None):
            with pytest.raises(ValueError, match="lacks words"):
                try_once(untouched, program, token, *extra, lease_ms=lease_ms)
    assert not untouched.pending(OWNER)


@pytest.mark.parametrize("use", USES, ids=str)
def test_words_that_are_too_long(untouched: Engine, use: Use) -> None:
    votes = untouched.votes()
    for position in range(len(use.args) + 1):
        words = [KEY, *use.args]
        words[position] = b"x" * 65_537
        with pytest.raises(ValueError, match="at most 65536 bytes"):
            untouched.round(votes, use.program, words[0], tuple(words[1:]), 1, 10**9)


# ---- a try with no lease ----


@pytest.mark.parametrize("lease", [0, 10_000])
def test_without_a_lease_validity_has_no_end(engine_of, clock, lease: int) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        votes = try_once(engine, KEEP, lease_ms=lease)
        assert votes.verdict == GRANTED
        if lease:
            assert votes.valid_until_ns == votes.started_ns + 10_000_000_000 - 102_000_000
        else:
            assert votes.valid_until_ns > now_ns() + 50 * YEAR_NS
        # The lease is a word only where the program takes one.
        assert node.received("SET")[0].argv == (b"SET", KEY, OWNER, b"NX")


def test_the_life_may_be_an_extra_word_that_is_not_judged(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        votes = try_once(engine_of(node.url), TAKE, OWNER, b"1", lease_ms=0)  # a lease that ends at once
        assert votes.verdict == GRANTED
        assert votes.valid_until_ns > now_ns() + 50 * YEAR_NS
        assert node.received("SET")[0].argv == (b"SET", KEY, OWNER, b"NX", b"PX", b"1")


# ---- undo ----

UNDO: dict[Program, tuple[Program, tuple[bytes, ...]]] = {
    KEEP: (DROP, (b"1", KEY, OWNER)),
    ENTER: (ABANDON, (b"2", KEY, CHANNEL, OWNER)),
    LEAVE: (ABANDON, (b"2", KEY, CHANNEL, OWNER)),
    ABANDON: (ABANDON, (b"2", KEY, CHANNEL, OWNER)),
}
UNDONE = [USED[program] for program in UNDO]


def is_undo_of(use: Use, argv: Argv) -> bool:
    """Whether it is the whole delete that takes this back, with its own arguments."""
    program, call = UNDO[use.program]
    return argv == (b"EVAL", program.forms[-1][1], *call)


def undos(node: ScriptedNode, use: Use) -> list[Received]:
    return [one for one in node.received() if is_undo_of(use, one.argv)]


@pytest.mark.parametrize("use", TRIES, ids=str)
def test_a_try_that_is_not_granted_is_undone_by_its_own_delete(engine_of, use: Use) -> None:
    """On the same connection, where it may have been done; not where the node said no."""
    word, no = name_of(use.program), NIL if use.program is KEEP else b":0\r\n"
    with (
        ScriptedNode(answer=by_name(**{word: yes_to(use.program)})) as agrees,
        ScriptedNode(answer=by_name(**{word: error("OOM no room")})) as fails,
        ScriptedNode(answer=by_name(**{word: no})) as refuses,
    ):
        engine = engine_of(agrees.url, fails.url, refuses.url)
        for _ in range(3):
            assert perform(engine, use).verdict == UNDECIDED
        eventually(lambda: [len(undos(node, use)) for node in (agrees, fails)] == [3, 3])
        for node in (agrees, fails):
            assert [one.name for one in node.received()] == [word, "EVAL"] * 3
            assert len(node.peers) == 1
        assert {one.name for one in refuses.received()} == {word}


@pytest.mark.parametrize("use", TRIES, ids=str)
def test_the_undo_follows_an_unanswered_try_on_its_connection(engine_of, use: Use) -> None:
    script = [
        expect(name_of(use.program)),
        expect(lambda argv: is_undo_of(use, argv)),
        send(yes_to(use.program) + b":1\r\n"),
        serve(by_name()),
    ]
    with ScriptedNode(script) as node:
        engine = engine_of(node.url)
        assert perform(engine, use, limit=SOON).verdict == UNDECIDED
        eventually(lambda: undos(node, use))
        eventually(lambda: not engine.pending(OWNER))
        engine.close()


def test_a_late_noscript_does_not_take_the_lock_again_after_its_undo(engine_of) -> None:
    """The digest was unknown, but that is told after the time is over: only the undo may follow."""
    with ScriptedNode(
        [expect("EVALSHA"), expect("EVAL"), send(NO_SCRIPT + b":0\r\n"), serve(by_name(EVAL=b":0\r\n"))]
    ) as node:
        engine = engine_of(node.url)
        assert perform(engine, USED[ENTER], limit=SOON).verdict == UNDECIDED
        eventually(lambda: not engine.pending(OWNER))
        eventually(lambda: said(ask(engine, EXISTS)) == [NO])
        sent = [one.argv for one in node.received("EVAL")]
        last = max(i for i, argv in enumerate(sent) if is_undo_of(USED[ENTER], argv))
        assert [argv for argv in sent[last + 1 :] if argv[1] == USED[ENTER].script] == []
        engine.close()


@pytest.mark.parametrize("replied", [b"", b"+", b":", b":1\r"], ids=repr)
@pytest.mark.parametrize("use", UNDONE, ids=str)
def test_what_a_dead_connection_leaves_open_is_undone_first_on_the_next(
    engine_of, use: Use, replied: bytes
) -> None:
    dying = [expect(name_of(use.program)), send(replied), hang_up()]
    owed = [expect(lambda argv: is_undo_of(use, argv)), send(b":1\r\n"), serve(by_name())]
    with ScriptedNode(dying, owed) as node:
        engine = engine_of(node.url)
        assert said(perform(engine, use)) == [FAULT]
        eventually(lambda: said(ask(engine, EXISTS)) == [NO])
        assert [one.name for one in node.received()][1:3] == ["EVAL", "EXISTS"]
        eventually(lambda: not engine.pending(OWNER))
        engine.close()


@pytest.mark.parametrize("use", [use for use in USES if use.program.undo < 0], ids=str)
def test_what_has_no_undo_leaves_nothing_to_send(engine_of, use: Use) -> None:
    dying = [expect(name_of(use.program)), hang_up()]
    with ScriptedNode(dying, answer=by_name()) as node:
        engine = engine_of(node.url)
        assert said(perform(engine, use)) == [FAULT]
        assert not engine.pending(OWNER)
        eventually(lambda: said(ask(engine, EXISTS)) == [NO])
        assert [one.name for one in node.received()][1:] == ["EXISTS"] * (len(node.received()) - 1)


@pytest.mark.parametrize("use", [use for use in USES if use.program.writes], ids=str)
def test_an_unanswered_write_is_pending(engine_of, use: Use) -> None:
    """Until it is answered, and the undo that followed it."""
    with ScriptedNode(answer=by_name(**{name_of(use.program): None, "EVAL": None, "EXISTS": None})) as node:
        engine = engine_of(node.url)
        assert not engine.pending(OWNER)
        assert said(perform(engine, use, limit=SOON)) == [FAULT]
        assert engine.pending(OWNER)
        assert not engine.pending(b"another")
        eventually(lambda: len(node.received()) >= (2 if use.program.tries else 1))
        (peer,) = node.peers
        peer.send(yes_to(use.program) + (b":1\r\n" if use.program.tries else b""))
        eventually(lambda: not engine.pending(OWNER))
        engine.close()


@pytest.mark.parametrize("use", [USED[HOLDS], USED[FORCE], USED[FORGET]], ids=str)
def test_what_writes_no_token_is_not_pending(engine_of, use: Use) -> None:
    with ScriptedNode(answer=by_name(**{name_of(use.program): None})) as node:
        engine = engine_of(node.url)
        assert said(perform(engine, use, limit=SOON)) == [FAULT]
        eventually(lambda: node.received())
        assert not engine.pending(OWNER)
        assert not engine.pending(CHANNEL)
        engine.close()


@pytest.mark.parametrize("program", [DROP, ABANDON], ids=lambda program: program.name)
def test_a_discard_runs_the_delete_that_it_names(engine_of, program: Program) -> None:
    with ScriptedNode(answer=by_name(SET=OK, EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        extra = (CHANNEL,) if program is ABANDON else ()
        engine.discard(KEY, OWNER, -1, program, extra)
        use = USED[KEEP if program is DROP else ENTER]
        eventually(lambda: undos(node, use))
        eventually(lambda: not engine.pending(OWNER))
        assert len(node.peers) == 1


def test_a_discard_goes_to_the_touched_nodes_only(engine_of) -> None:
    with (
        ScriptedNode(answer=by_name(EVAL=b":1\r\n")) as a,
        ScriptedNode(answer=by_name(EVAL=b":1\r\n")) as b,
    ):
        engine = engine_of(a.url, b.url)
        engine.discard(KEY, OWNER, 0b10, ABANDON, (CHANNEL,))
        eventually(lambda: undos(b, USED[ENTER]))
        ask(engine, EXISTS)
        eventually(lambda: a.received("EXISTS"))
        assert [one.name for one in a.received()] == ["EXISTS"]


# ---- post ----


def test_what_is_posted_goes_along_with_the_next_command(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DEL=b":1\r\n", EXISTS=b":0\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        engine.post(FORGET, LATCH, ())
        votes = ask(engine, EXISTS)
        assert said(votes) == [NO]  # and not the yes of the other one
        assert [one.argv for one in node.received()][1:] == [(b"DEL", LATCH), (b"EXISTS", KEY)]
        assert len(node.peers) == 1


def test_what_is_posted_goes_out_alone_if_nothing_else_does(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK, DEL=b":1\r\n", EVAL=b":1\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        for _ in range(3):
            before = len(node.received())
            engine.post(FORGET, LATCH, ())
            engine.post(FORCE, KEY, (CHANNEL,))
            eventually(lambda before=before: len(node.received()) == before + 2)  # type: ignore[misc]
            forget, force = (one.argv for one in node.received()[before:])
            assert forget == (b"DEL", LATCH)
            assert force == (b"EVAL", USED[FORCE].script, *USED[FORCE].call)  # it could not fall back


def test_what_is_posted_to_a_node_without_a_connection_is_lost(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=OK)) as node:
        engine = engine_of(node.url)
        engine.post(FORGET, LATCH, ())
        attempt(engine)
        ask(engine, EXISTS)
        assert [one.name for one in node.received()] == ["SET", "EXISTS"]


@pytest.mark.parametrize("reply", [b":0\r\n", error("OOM no room"), error(WRONGTYPE)], ids=repr)
def test_the_reply_to_what_was_posted_is_no_vote(engine_of, reply: bytes) -> None:
    script = [expect("EXISTS"), send(b":1\r\n"), expect("DEL"), expect("EXISTS"), send(reply + b":1\r\n")]
    with ScriptedNode([*script, expect_end()]) as node:
        engine = engine_of(node.url)
        assert said(ask(engine, EXISTS)) == [YES]
        engine.post(FORGET, LATCH, ())
        assert said(ask(engine, EXISTS)) == [YES]
        engine.close()


# ---- on real servers ----


@pytest.fixture
def engine(engine_of: Callable[..., Engine], node: LocalNode) -> Engine:
    """An engine for one real server."""
    return engine_of(node.url)


@pytest.fixture
def heard(node: LocalNode) -> Iterator[Callable[[], bytes]]:
    """What comes on the channel next, or an empty string."""
    with Client(node) as client:
        assert client.ask("SUBSCRIBE", CHANNEL).startswith(b"*3\r\n$9\r\nsubscribe")

        def read() -> bytes:
            return client.read()

        yield read
        assert client.is_silent()


MESSAGE = b"*3\r\n$7\r\nmessage\r\n$7\r\nchannel\r\n$1\r\n0\r\n"


def hash_is(node: LocalNode, count: bytes, least_ms: int, most_ms: int) -> None:
    assert raw(node, "HGETALL", KEY) == {OWNER: count}
    assert least_ms < raw(node, "PTTL", KEY) <= most_ms


def test_enter_takes_only_what_is_free(engine: Engine, node: LocalNode) -> None:
    assert said(try_once(engine, ENTER, OWNER, CHANNEL)) == [YES]
    hash_is(node, b"1", 9_000, 10_000)
    for owner in (OWNER, b"another"):
        assert said(try_once(engine, ENTER, owner, CHANNEL, lease_ms=99_000)) == [NO]
    hash_is(node, b"1", 9_000, 10_000)


def test_count_sets_count_and_life_for_the_owner_alone(engine: Engine, node: LocalNode) -> None:
    assert said(ask(engine, COUNT, OWNER, b"20000", b"1")) == [NO]  # nothing is made
    assert raw(node, "EXISTS", KEY) == 0
    try_once(engine, ENTER, OWNER, CHANNEL)
    assert said(ask(engine, COUNT, b"another", b"99000", b"7")) == [NO]
    hash_is(node, b"1", 9_000, 10_000)
    for count in (b"2", b"2", b"1"):
        assert said(ask(engine, COUNT, OWNER, b"20000", count)) == [YES]
        hash_is(node, count, 19_000, 20_000)


def test_holds_asks_for_the_owner(engine: Engine, node: LocalNode) -> None:
    assert said(ask(engine, HOLDS, OWNER)) == [NO]
    try_once(engine, ENTER, OWNER, CHANNEL)
    assert said(ask(engine, HOLDS, OWNER)) == [YES]
    assert said(ask(engine, HOLDS, b"another")) == [NO]


def test_leave_keeps_its_answer_for_a_repetition(engine: Engine, node: LocalNode, heard) -> None:
    leave = (OWNER, CHANNEL, LATCH, b"20000")
    votes = ask(engine, LEAVE, *leave)
    assert (said(votes), votes.hits) == ([YES], 0)
    assert raw(node, "EXISTS", LATCH) == 0
    try_once(engine, ENTER, OWNER, CHANNEL)
    votes = ask(engine, LEAVE, b"another", *leave[1:])
    assert (said(votes), votes.hits) == ([YES], 0)
    hash_is(node, b"1", 9_000, 10_000)
    for _ in range(3):
        votes = ask(engine, LEAVE, *leave)
        assert (said(votes), votes.hits) == ([YES], 1)
        assert raw(node, "EXISTS", KEY) == 0
    assert 19_000 < raw(node, "PTTL", LATCH) <= 20_000
    assert heard() == MESSAGE  # once
    assert said(ask(engine, FORGET, key=LATCH)) == [YES]
    assert said(ask(engine, FORGET, key=LATCH)) == [NO]
    assert ask(engine, LEAVE, *leave).hits == 0


def test_abandon_deletes_what_is_the_owners(engine: Engine, node: LocalNode, heard) -> None:
    try_once(engine, ENTER, OWNER, CHANNEL)
    ask(engine, COUNT, OWNER, b"20000", b"5")
    assert ask(engine, ABANDON, b"another", CHANNEL).hits == 0
    hash_is(node, b"5", 19_000, 20_000)
    assert ask(engine, ABANDON, OWNER, CHANNEL).hits == 1
    assert raw(node, "EXISTS", KEY) == 0
    assert heard() == MESSAGE
    assert ask(engine, ABANDON, OWNER, CHANNEL).hits == 0


def test_force_deletes_whosever_it_is(engine: Engine, node: LocalNode, heard) -> None:
    assert said(ask(engine, FORCE, CHANNEL)) == [NO]
    try_once(engine, ENTER, b"another", CHANNEL)
    assert said(ask(engine, FORCE, CHANNEL)) == [YES]
    assert raw(node, "EXISTS", KEY) == 0
    assert heard() == MESSAGE


def test_keep_makes_a_key_without_an_end(engine: Engine, node: LocalNode) -> None:
    assert said(try_once(engine, KEEP, lease_ms=0)) == [YES]
    assert (raw(node, "GET", KEY), raw(node, "PTTL", KEY)) == (OWNER, -1)
    for token in (OWNER, b"another"):
        assert said(try_once(engine, KEEP, token, lease_ms=0)) == [NO]
    assert raw(node, "GET", KEY) == OWNER
    assert ask(engine, DROP, OWNER).hits == 1


def test_add_time_and_set_time_lengthen_what_is_the_tokens_and_has_an_end(
    engine: Engine, node: LocalNode
) -> None:
    def ttl_is(least_ms: int, most_ms: int) -> None:
        assert least_ms < raw(node, "PTTL", KEY) <= most_ms

    for program, args in ((ADD_TIME, (b"5000", b"0")), (ADD_TIME, (b"5000", b"1")), (SET_TIME, (b"5000",))):
        assert said(ask(engine, program, OWNER, *args)) == [NO]
        raw(node, "SET", KEY, "another", "PX", 10_000)
        assert said(ask(engine, program, OWNER, *args)) == [NO]
        ttl_is(9_000, 10_000)
        raw(node, "SET", KEY, OWNER, "PX", 10_000)
        assert said(ask(engine, program, OWNER, *args)) == [YES]
        ttl_is(*((14_000, 15_000) if args[-1] == b"0" else (4_000, 5_000)))
        raw(node, "SET", KEY, OWNER)  # with no end
        assert said(ask(engine, program, OWNER, *args)) == ([NO] if program is ADD_TIME else [YES])
        raw(node, "DEL", KEY)
    raw(node, "SET", KEY, OWNER, "PX", 10_000)
    assert said(ask(engine, ADD_TIME, OWNER, b"-4000", b"0")) == [YES]
    ttl_is(5_000, 6_000)
    assert said(ask(engine, ADD_TIME, OWNER, b"-6001", b"0")) == [YES]
    assert raw(node, "EXISTS", KEY) == 0


@pytest.mark.parametrize("use", [use for use in USES if use.program is not FORGET], ids=str)
def test_a_key_of_another_type_is_left_alone(engine: Engine, node: LocalNode, use: Use) -> None:
    raw(node, "RPUSH", KEY, "a", "b")
    for _ in range(2):  # by the text of a script, and by its digest
        votes = perform(engine, use)
        assert said(votes) == ([YES] if use.program.deletes else [NO])
        assert votes.hits == 0
    assert raw(node, "LRANGE", KEY, 0, -1) == [b"a", b"b"]
    assert raw(node, "PTTL", KEY) == -1


@pytest.mark.parametrize("use", TRIES, ids=str)
def test_a_try_of_a_stopped_server_is_undone_when_it_wakes(engine: Engine, node: LocalNode, use: Use) -> None:
    assert said(perform(engine, use, b"another key")) == [YES]
    node.pause()
    try:
        assert perform(engine, use, limit=SOON).verdict == UNDECIDED
        assert engine.pending(OWNER)
    finally:
        node.resume()
    eventually(lambda: not engine.pending(OWNER))
    assert raw(node, "KEYS", "*") == [b"another key"]
    redbolt.close()
