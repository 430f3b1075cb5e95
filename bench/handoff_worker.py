"""One process with one or both contenders of ``python -m bench handoff``: ``python -m bench.handoff_worker``.

What it reads and writes are lines of JSON:

1. It reads ``nodes`` (each with its ``url``), ``key``, ``library``, ``options``, ``packages``, the path of
   the ``board``, and which ``contenders`` it is: 0, 1 or both.
2. It makes a lock for each, warms them up on keys of their own, and writes ``versions``, of the packages; or
   ``missing``, and why, where the library is not there.
3. For each further line its contenders take their turns once, in threads of their own; it writes ``took_ns``,
   for each hand-off to one of them but the first how long it took, and ``gave_up``.

It ends at once when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from bench.contenders import LIBRARIES, Holder, Library, Lines, Unfit, granted, warm_up
from bench.handoff_board import PAUSE, Board

__all__ = ["Tally", "contend"]


@dataclass
class Tally:
    """What one contender measured."""

    took_ns: array[int] = field(default_factory=lambda: array("q"))
    gave_up: int = 0


Contender = Callable[[], Tally]


def contend(lock: Holder, library: Library, board: Board, number: int) -> Tally:
    """Take every second turn of the lock; see `bench.handoff_board`."""
    tally = Tally()
    clock = time.monotonic_ns
    turn = number
    while turn <= board.last:
        if turn:
            board.ask(turn)
        while not granted(lock, library):
            tally.gave_up += 1
        took_ns = board.hold(turn, clock())
        if turn > 1:
            tally.took_ns.append(took_ns)
        board.await_waiter(turn)
        board.release(turn)
        lock.release()
        time.sleep(PAUSE)
        turn += 2
    return tally


def contender(begun: Mapping[str, Any], board: Board, number: int) -> Contender:
    """Make a contender, warmed up."""
    urls = [node["url"] for node in begun["nodes"]]
    key, options = begun["key"], begun["options"]
    if begun["library"] == "floor":
        from bench.handoff_floor import Floor

        floor = Floor(urls, key, number, options["told_by"])
        return lambda: Tally(floor.run(board))
    library = LIBRARIES[begun["library"]](urls, options)
    warm_up(library.lock(f"{key}:{number}"), library)
    lock = library.lock(key)
    return lambda: contend(lock, library, board, number)


def main() -> None:
    lines = Lines()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes where the errors go

    def tell(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    begun = json.loads(lines.next())
    board = Board(begun["board"])
    numbers: list[int] = begun["contenders"]
    try:
        contenders = [contender(begun, board, number) for number in numbers]
    except (ImportError, Unfit) as error:
        tell({"missing": str(error)})
        return
    with ThreadPoolExecutor(len(numbers)) as pool:
        tell({"versions": ", ".join(f"{package} {version(package)}" for package in begun["packages"])})

        def one(turns: Contender) -> Tally:
            try:
                return turns()
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # the other one would wait for ever

        while True:
            lines.next()
            gc.collect()
            gc.disable()
            tallies = list(pool.map(one, contenders))
            gc.enable()
            took_ns = [ns for tally in tallies for ns in tally.took_ns]
            tell({"took_ns": took_ns, "gave_up": sum(tally.gave_up for tally in tallies)})


if __name__ == "__main__":
    main()
