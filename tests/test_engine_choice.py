"""Which engine is used, and that it is the one that was asked for."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import pytest

import redbolt
from redbolt._engine import engine_for
from redbolt.local import LocalNode
from redbolt.node import Node
from tests.kit.clients import eventually, raw

SRC = str(Path(redbolt.__file__).parents[1])
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "redbolt._core":
            raise ImportError("the core is blocked by a test")
sys.meta_path.insert(0, Blocker())
import redbolt
"""


def python(code: str, engine: str | None = None) -> str:
    """The output of a new interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "REDBOLT_ENGINE"}
    environment |= {"PYTHONPATH": SRC} | ({} if engine is None else {"REDBOLT_ENGINE": engine})
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_engine_is_the_one_that_was_asked_for(engine_of, kind: str) -> None:
    engine = engine_of("redis://127.0.0.1:1")
    assert engine.kind == kind
    module = type(engine).__module__
    assert module == "redbolt._core" if kind == "native" else module.startswith("redbolt._pure")
    assert type(engine.votes()).__module__ == module
    assert engine is redbolt.Lock("redis://127.0.0.1:1", "name", engine=kind)._engine


def test_the_native_engine_is_compiled() -> None:
    core = importlib.import_module("redbolt._core")
    assert core.__file__ is not None
    assert core.__file__.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
    with open(core.__file__, "rb") as file:
        head = file.read(4)
    assert head in (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
    assert isinstance(core.__loader__, importlib.machinery.ExtensionFileLoader)
    assert type(core.verdict).__name__ in ("cython_function_or_method", "builtin_function_or_method")


def test_the_pure_engine_does_not_need_the_core() -> None:
    code = "redbolt.Lock('redis://127.0.0.1:1', 'name', engine='pure'); print('redbolt._core' in sys.modules)"
    assert python(BLOCKED + code) == "False"


def test_without_force_the_native_engine_is_the_default() -> None:
    assert python("import redbolt; print(redbolt.engine())") == "native (the default)"


def test_without_force_the_pure_engine_stands_in_and_says_why() -> None:
    said = python(BLOCKED + "print(redbolt.engine())")
    assert said == "pure (the native engine cannot be loaded: the core is blocked by a test)"
    code = "print(redbolt.Lock('redis://127.0.0.1:1', 'name')._engine.kind)"
    assert python(BLOCKED + code) == "pure"


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_forced_engine_never_falls_back(how: str) -> None:
    argument = ", engine='native'" if how == "argument" else ""
    code = f"""
url = 'redis://127.0.0.1:1'
for call in (lambda: redbolt.engine({argument[9:]}), lambda: redbolt.Lock(url, 'name'{argument})):
    try:
        call()
    except ImportError as error:
        print(error)
    else:
        print("it fell back")
"""
    source = "forced by engine=" if how == "argument" else "forced by REDBOLT_ENGINE"
    told = f"the native engine is {source}, but cannot be loaded: the core is blocked by a test"
    assert python(BLOCKED + code, None if how == "argument" else "native").splitlines() == [told, told]


def test_the_environment_forces_an_engine() -> None:
    code = "import redbolt; print(redbolt.engine(), redbolt.Lock('redis://127.0.0.1:1', 'name')._engine.kind)"
    assert python(code, "pure") == "pure (forced by REDBOLT_ENGINE) pure"
    assert python(code, "native") == "native (forced by REDBOLT_ENGINE) native"
    assert python(code, "") == "native (the default) native"


def test_an_argument_wins_over_the_environment() -> None:
    code = "import redbolt; print(redbolt.Lock('redis://127.0.0.1:1', 'name', engine='native')._engine.kind)"
    assert python(code, "pure") == "native"


def test_an_unknown_engine_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no engine 'fast'"):
        redbolt.Lock("redis://127.0.0.1:1", "name", engine="fast")
    monkeypatch.setenv("REDBOLT_ENGINE", "fast")
    with pytest.raises(ValueError, match="no engine 'fast'"):
        redbolt.engine()


def test_one_engine_per_kind_and_nodes(kind: str) -> None:
    nodes = (Node(port=1), Node(port=2))
    engine = engine_for(nodes, kind)
    assert engine_for((Node(port=1), Node(port=2)), kind) is engine
    assert engine_for(nodes[::-1], kind) is not engine
    assert engine_for(nodes[:1], kind) is not engine
    assert engine_for((Node(port=1, db=1), Node(port=2)), kind) is not engine
    redbolt.close()
    assert engine_for(nodes, kind) is not engine


def test_close_also_ends_what_an_older_lock_has_opened_again(kind: str, valkey: LocalNode) -> None:
    def connections() -> int:
        return int(raw(valkey, "INFO", "clients")["connected_clients"])

    lock = redbolt.Lock(valkey.url, "name", engine=kind)
    others = connections()
    for _ in range(2):
        with lock:
            pass
        redbolt.close()
    eventually(lambda: connections() <= others)
