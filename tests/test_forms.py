"""A node that does not know a command gets its next form within the same round, and this is remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from redbolt._engine import Engine
from redbolt._judge import FAULT, GRANTED, NO, YES
from redbolt._programs import DROP, EXTEND, OWNED, Program
from tests.kit.clients import SLACK, eventually, raw
from tests.kit.resp import OK, error
from tests.kit.rounds import KEY, TOKEN, anew, ask, attempt, by_name, causes, said
from tests.kit.scripted import ScriptedNode
from tests.kit.steps import Argv, Step, expect, expect_end, hang_up, send, split, tell, unknown_command, wait

UNKNOWN = {
    "Valkey 9, Redis 7": "ERR unknown command 'DELIFEQ', with args beginning with: 'name' 'token' ",
    "Redis 5": "ERR unknown command `DELIFEQ`, with args beginning with: `name`, `token`, ",
    "Redis 3": "ERR unknown command 'DELIFEQ'",
    "a proxy": "ERR unknown command",
    "a user without permission": "NOPERM User worker has no permissions to run the 'delifeq' command",
    "an older user": "NOPERM this user has no permissions to run the 'delifeq' command or its subcommand",
    "other arguments": "ERR wrong number of arguments for 'delifeq' command",
}
NO_SCRIPT = {
    "Valkey": "NOSCRIPT No matching script.",
    "Redis": "NOSCRIPT No matching script. Please use EVAL.",
}
DELETE = "if redis.call('get', KEYS[1]) == ARGV[1] then"


def arguments(argv: Argv) -> tuple[bytes, ...]:
    """Keys and arguments of a script's call, after its text or digest."""
    return argv[2:]


def is_digest(word: bytes) -> bool:
    return len(word) == 40 and set(word) <= set(b"0123456789abcdef")


def names(node: ScriptedNode) -> list[str]:
    return [one.name for one in node.received()]


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("no_script", NO_SCRIPT.values(), ids=NO_SCRIPT)
def test_a_delete_falls_back_step_by_step(engine_of, text: str, no_script: str) -> None:
    refusals = {name: error(text.replace("delifeq", name.lower())) for name in ("DELIFEQ", "DELEX")}
    answer = by_name(**refusals, EVALSHA=error(no_script), EVAL=b":1\r\n")
    with ScriptedNode(answer=answer) as node:
        votes = ask(engine_of(node.url), DROP, TOKEN)
        assert (said(votes), votes.hits) == ([YES], 1)
        first, second, third, fourth = (one.argv for one in node.received())
        assert first == (b"DELIFEQ", KEY, TOKEN)
        assert second == (b"DELEX", KEY, b"IFEQ", TOKEN)
        assert third[0] == b"EVALSHA"
        assert is_digest(third[1])
        assert fourth[0] == b"EVAL"
        assert DELETE in fourth[1].decode()
        assert third[2:] == fourth[2:] == (b"1", KEY, TOKEN)
        assert len(node.peers) == 1


@pytest.mark.parametrize("no_script", NO_SCRIPT.values(), ids=NO_SCRIPT)
@pytest.mark.parametrize(
    "text", ["ERR syntax error", "NOPERM this user has no permissions to run the 'set' command"]
)
def test_an_extension_falls_back_step_by_step(engine_of, text: str, no_script: str) -> None:
    answer = by_name(SET=error(text), EVALSHA=error(no_script), EVAL=b":1\r\n")
    with ScriptedNode(answer=answer) as node:
        votes = ask(engine_of(node.url), EXTEND, TOKEN, b"777")
        assert (said(votes), votes.token) == ([YES], TOKEN)
        native, by_digest, by_text = (one.argv for one in node.received())
        assert native == (b"SET", KEY, TOKEN, b"IFEQ", TOKEN, b"PX", b"777")
        assert by_digest[0] == b"EVALSHA"
        assert is_digest(by_digest[1])
        assert by_text[0] == b"EVAL"
        assert by_digest[2:] == by_text[2:] == (b"1", KEY, TOKEN, b"777")


def test_fallbacks_may_be_cut_anywhere(engine_of) -> None:
    replies = {name: error(f"ERR unknown command '{name}'") for name in ("DELIFEQ", "DELEX")}
    replies |= {"EVALSHA": error("NOSCRIPT No matching script."), "EVAL": b":1\r\n"}
    for position in anew(range(1, 30)):
        pieces: dict[str, bytes | Step] = {
            name: split(text, position, pause=0.0003) if position < len(text) else text
            for name, text in replies.items()
        }
        with ScriptedNode(answer=by_name(**pieces)) as node:
            votes = ask(engine_of(node.url), DROP, TOKEN)
            assert (said(votes), votes.hits) == ([YES], 1), f"cut at {position}"


@pytest.mark.parametrize("known", ["DELIFEQ", "DELEX", "EVALSHA", "EVAL"])
def test_the_form_that_worked_is_remembered(engine_of, known: str) -> None:
    forms = ["DELIFEQ", "DELEX", "EVALSHA", "EVAL"]
    tried = forms[: forms.index(known) + 1]

    def answer(argv: Argv) -> bytes:
        return b":1\r\n" if argv[0].decode() == known else unknown_command(argv)

    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        for _ in range(3):
            assert said(ask(engine, DROP, TOKEN)) == [YES]
        assert names(node) == [*tried, known, known]


def test_a_forgotten_script_is_asked_for_by_its_digest_again(engine_of) -> None:
    scripts: set[bytes] = set()

    def answer(argv: Argv) -> bytes:
        if argv[0] == b"EVAL":
            scripts.add(argv[1])
        if argv[0] == b"EVAL" or (argv[0] == b"EVALSHA" and scripts):
            return b":1\r\n"
        return error("NOSCRIPT No matching script.") if argv[0] == b"EVALSHA" else unknown_command(argv)

    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        for _ in range(2):
            assert said(ask(engine, DROP, TOKEN)) == [YES]
        scripts.clear()
        for _ in range(2):
            assert said(ask(engine, DROP, TOKEN)) == [YES]
        first = ["DELIFEQ", "DELEX", "EVALSHA", "EVAL", "EVALSHA"]
        assert names(node) == [*first, "EVALSHA", "EVAL", "EVALSHA"]


def test_each_node_has_a_form_of_its_own(engine_of) -> None:
    new = by_name(SET=OK, DELIFEQ=b":1\r\n")
    redis = by_name(SET=OK, DELIFEQ=unknown_command, DELEX=b":1\r\n")
    old = by_name(SET=OK, DELIFEQ=unknown_command, DELEX=unknown_command, EVALSHA=b":1\r\n")
    with ScriptedNode(answer=new) as a, ScriptedNode(answer=redis) as b, ScriptedNode(answer=old) as c:
        engine = engine_of(a.url, b.url, c.url)
        for _ in range(2):
            votes = ask(engine, DROP, TOKEN, quorum=3)
            assert (votes.verdict, votes.yes, votes.hits) == (GRANTED, 3, 3)
        assert names(a) == ["DELIFEQ", "DELIFEQ"]
        assert names(b) == ["DELIFEQ", "DELEX", "DELEX"]
        assert names(c) == ["DELIFEQ", "DELEX", "EVALSHA", "EVALSHA"]


def test_a_node_may_forget_its_scripts_at_any_time(engine_of) -> None:
    scripts = iter([b":1\r\n", error("NOSCRIPT No matching script."), b":1\r\n"])
    answer = by_name(
        DELIFEQ=unknown_command, DELEX=unknown_command, EVALSHA=lambda argv: next(scripts), EVAL=b":1\r\n"
    )
    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        assert [said(ask(engine, DROP, TOKEN)) for _ in range(3)] == [[YES]] * 3
        assert names(node)[:5] == ["DELIFEQ", "DELEX", "EVALSHA", "EVALSHA", "EVAL"]


def test_permission_may_be_taken_away_at_any_time(engine_of) -> None:
    answers = iter([b":1\r\n", error("NOPERM User worker has no permissions to run the 'delifeq' command")])
    with ScriptedNode(answer=by_name(DELIFEQ=lambda argv: next(answers), DELEX=b":1\r\n")) as node:
        engine = engine_of(node.url)
        assert [said(ask(engine, DROP, TOKEN)) for _ in range(3)] == [[YES]] * 3
        assert names(node) == ["DELIFEQ", "DELIFEQ", "DELEX", "DELEX"]


def test_when_no_form_works_the_last_ones_error_is_the_cause(engine_of) -> None:
    denied = error("NOPERM User worker has no permissions to run the 'eval' command")
    with ScriptedNode(
        answer=by_name(DELIFEQ=unknown_command, DELEX=unknown_command, EVALSHA=denied, EVAL=denied)
    ) as node:
        votes = ask(engine_of(node.url), DROP, TOKEN)
        assert (said(votes), causes(votes)) == ([FAULT], [denied[1:-2].decode()])
        assert len(node.received()) == 4


def test_a_command_with_one_form_does_not_fall_back(engine_of) -> None:
    with ScriptedNode(answer=by_name(SET=unknown_command, GETRANGE=unknown_command)) as node:
        engine = engine_of(node.url)
        for votes in (attempt(engine), ask(engine, OWNED, TOKEN, b"5")):
            assert said(votes) == [FAULT]
            assert "unknown command" in causes(votes)[0]


@pytest.mark.parametrize("known", ["DELEX", "EVALSHA"])
def test_a_proxy_that_hangs_up_on_unknown_commands(engine_of, known: str) -> None:
    """Each form costs one connection, and is not tried again."""

    def answer(argv: Argv) -> bytes | Step:
        name = argv[0].decode()
        if name in ("DELIFEQ", "DELEX") and name != known:
            return hang_up()
        return {"EVAL": b":0\r\n", "SET": OK}.get(name, b":1\r\n")

    with ScriptedNode(answer=answer) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine)) == [YES]
        eventually(lambda: said(ask(engine, DROP, TOKEN)) == [YES])
        assert said(ask(engine, DROP, TOKEN)) == [YES]
        tried = [name for name in names(node) if name in ("DELIFEQ", "DELEX", "EVALSHA")]
        assert tried == [*(["DELIFEQ"] if known == "DELEX" else ["DELIFEQ", "DELEX"]), known, known]


def test_a_proxy_that_hangs_up_on_one_command_still_gets_the_delete(engine_of) -> None:
    """What the hung-up delete was for is sent on the next connection before anything else."""
    first = [expect("SET"), send(OK), expect(["DELIFEQ", KEY, TOKEN]), hang_up()]
    owed = [
        expect(lambda argv: argv[0] == b"EVAL" and argv[2:] == (b"1", KEY, TOKEN)),
        send(b":1\r\n"),
        expect_end(),
    ]
    with ScriptedNode(first, owed) as node:
        engine = engine_of(node.url)
        assert said(attempt(engine)) == [YES]
        votes = ask(engine, DROP, TOKEN)
        assert said(votes) == [FAULT]
        eventually(lambda: "EVAL" in names(node))
        eventually(lambda: not engine.pending(TOKEN))
        engine.close()


@pytest.mark.parametrize(
    ("program", "args"), [(DROP, (TOKEN,)), (EXTEND, (TOKEN, b"9000"))], ids=["drop", "extend"]
)
def test_a_straggler_falls_back_at_once_though_the_round_is_over(
    engine_of, program: Program, args: tuple[bytes, ...]
) -> None:
    """The quorum was faster than one node, which then says that it does not know the command."""
    late, repeated = threading.Event(), threading.Event()
    script = [
        expect("SET"),
        send(OK),
        expect(lambda argv: argv[0] == program.forms[0][0]),
        wait(late),
        send(error("ERR unknown command")),
        expect(lambda argv: argv[-len(args) :] == args),
        tell(repeated),
        send(b":1\r\n"),
        expect_end(),
    ]
    yes = by_name(SET=OK, DELIFEQ=b":1\r\n")
    with ScriptedNode(answer=yes) as one, ScriptedNode(answer=yes) as two, ScriptedNode(script) as slow:
        engine = engine_of(one.url, two.url, slow.url)
        attempt(engine, quorum=3)
        assert ask(engine, program, *args, limit=30).verdict == GRANTED
        late.set()
        assert repeated.wait(5 * SLACK)
        engine.close()


# ---- commands whose reply nobody waits for ----


def test_a_delete_that_nobody_waits_for_needs_no_fallback(engine_of) -> None:
    """On a new connection only EVAL is sure to work; a plain command is, once it was answered there."""
    with ScriptedNode(answer=by_name(SET=OK, DELIFEQ=b":0\r\n")) as node:
        engine = engine_of(node.url)
        attempt(engine)
        engine.discard(KEY, TOKEN)
        eventually(lambda: len(node.received()) == 2)
        assert node.received()[1].argv[0] == b"EVAL"
        assert node.received()[1].argv[2:] == (b"1", KEY, TOKEN)
        ask(engine, DROP, TOKEN)
        engine.discard(KEY, TOKEN)
        eventually(lambda: len(node.received()) == 4)
        assert node.received()[3].name in ("EVAL", "DELIFEQ")


def test_what_was_proven_on_one_connection_is_not_relied_on_on_another(engine_of) -> None:
    with ScriptedNode(
        [expect("SET"), send(OK), expect("DELIFEQ"), send(b":0\r\n"), hang_up()], answer=by_name(SET=OK)
    ) as node:
        engine = engine_of(node.url)
        attempt(engine)
        ask(engine, DROP, TOKEN)
        eventually(lambda: said(attempt(engine)) == [YES] and len(node.peers) == 2)
        engine.discard(KEY, TOKEN)
        discarded = eventually(
            lambda: [one for one in node.received() if one.connection == 1 and one.name != "SET"]
        )
        assert discarded[0].name == "EVAL"


# ---- on real servers ----


def test_every_program_works_on_every_kind_of_server(engine_of: Callable[..., Engine], node) -> None:
    engine = engine_of(node.url)
    for token in (b"plain", b"\0\r\n\xf0\x9f\x94\x92"):
        assert said(attempt(engine, b"key", token)) == [YES]
        assert said(attempt(engine, b"key", token)) == [NO]  # the token's own key is taken like any other
        assert said(ask(engine, EXTEND, token, b"20000", key=b"key")) == [YES]
        assert 10_000 < raw(node, "PTTL", "key") <= 20_000
        assert said(ask(engine, EXTEND, b"other", b"1", key=b"key")) == [NO]
        assert said(ask(engine, OWNED, token, b"%d" % len(token), key=b"key")) == [YES]
        assert said(ask(engine, OWNED, b"other", b"5", key=b"key")) == [NO]
        assert [ask(engine, DROP, which, key=b"key").hits for which in (b"other", token, token)] == [0, 1, 0]
        assert raw(node, "EXISTS", "key") == 0


def test_a_key_of_another_type_is_refused_and_left_alone(engine_of: Callable[..., Engine], node) -> None:
    engine = engine_of(node.url)
    raw(node, "LPUSH", "key", "item")
    assert said(attempt(engine, b"key")) == [NO]
    votes = ask(engine, DROP, TOKEN, key=b"key")
    assert (said(votes), votes.hits) == ([YES], 0)
    assert said(ask(engine, OWNED, TOKEN, b"5", key=b"key")) == [NO]
    assert raw(node, "LRANGE", "key", 0, -1) == [b"item"]


def test_the_texts_of_the_servers_lead_to_a_fallback(engine_of: Callable[..., Engine], node) -> None:
    """A user who may run scripts only."""
    raw(node, "ACL", "SETUSER", "scripts", "on", ">pw", "~*", "+eval", "+evalsha", "+get", "+del", "+pexpire")
    raw(node, "ACL", "SETUSER", "scripts", "+set")
    try:
        engine = engine_of(node.url.replace("//", "//scripts:pw@"))
        assert said(attempt(engine, b"key")) == [YES]
        raw(node, "SCRIPT", "FLUSH")
        votes = ask(engine, DROP, TOKEN, key=b"key")
        assert (said(votes), votes.hits) == ([YES], 1)
    finally:
        raw(node, "ACL", "DELUSER", "scripts")
