"""A program that has several interpreters."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

from tests.programs import main


def apart(code: str, isolated: bool) -> None:
    """Run some code in another interpreter, and end that."""
    if sys.version_info >= (3, 13):
        interpreters = import_module("_interpreters")
        other = interpreters.create("isolated" if isolated else "legacy")
        failed = interpreters.exec(other, code)
        assert failed is None, failed
    else:
        interpreters = import_module("_xxsubinterpreters")
        other = interpreters.create(isolated=isolated)
        interpreters.run_string(other, code)
    interpreters.destroy(other)


def inside(urls: list[str]) -> dict[str, Any]:
    """What works in a sub-interpreter, and what does not."""
    import redbolt
    from tests.kit.clients import SLACK, raw

    found: dict[str, Any] = {"engine": redbolt.engine()}
    options: dict[str, Any] = {"timeout": 20, "node_timeout": 2 * SLACK}
    pairs: dict[str, list[Any]] = {
        "Lock": [redbolt.Lock(urls[0], "name", **options) for _ in range(2)],
        "by name": [redbolt.Lock(urls[0].replace("127.0.0.1", "localhost"), "name", **options)] * 2,
        "RedLock": [redbolt.RedLock(urls, "name", **options) for _ in range(2)],
        "ReentrantLock": [redbolt.ReentrantLock(urls[0], "hash", **options) for _ in range(2)],
    }
    for name, (one, another) in pairs.items():
        assert one.acquire(blocking=False), name
        assert one.held
        assert one.extend(5)
        assert one.owned()
        if another is not one and name != "ReentrantLock":
            assert not another.acquire(blocking=False)
            assert not another.acquire(blocking_timeout=0.1)
        one.release()
        with another:
            assert another.held
        found[name] = "works"
    before = raw(urls[0], "INFO", "stats")["total_connections_received"]
    wrong = {
        "no timeout": {},
        "renew": {"timeout": 5, "renew": True},
        "on_lost": {"timeout": 5, "on_lost": print},
    }
    for name, arguments in wrong.items():
        try:
            redbolt.Lock(urls[0], "never", **arguments)  # type: ignore[arg-type]
        except RuntimeError as error:
            found[name] = str(error)
    try:
        redbolt.Lock(urls[0], "never", 5, engine="native")
    except ImportError as error:
        found["native"] = str(error)
    assert raw(urls[0], "INFO", "stats")["total_connections_received"] == before + 1  # that of the look
    lease = redbolt.Lock(urls[0], "short", 0.1)
    assert lease.acquire()
    assert lease.lost.wait(5)
    found["lost"] = lease.lost.reason
    redbolt.close()
    return found


def several(urls: list[str], first: str, isolated: bool) -> list[dict[str, Any]]:
    """Use locks in two sub-interpreters, one after the other, and in the main one before or after that."""

    def use() -> str:
        import redbolt

        with redbolt.Lock(urls[0], "the main interpreter's") as lock:
            assert lock.held
        return redbolt.engine().name

    found: list[dict[str, Any]] = []
    if first == "main":
        found.append({"main": use()})
    for _ in range(2):
        reader, writer = os.pipe()
        apart(
            f"import sys\nsys.path[:] = {sys.path!r}\nimport json, os\n"
            "from tests.programs.interpreters import inside\n"
            f"os.write({writer}, json.dumps(inside({urls!r})).encode())\n",
            isolated,
        )
        os.close(writer)
        with os.fdopen(reader) as stream:
            found.append(json.load(stream))
    if first != "main":
        found.append({"main": use()})
    return found


if __name__ == "__main__":
    main(globals())
