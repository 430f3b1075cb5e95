"""Programs that have leases renewed, and fork, or end meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
import warnings

import redbolt
from redbolt._clock import now_ns
from redbolt._engine import Engine, engine_for
from redbolt._programs import DROP
from tests.kit.clients import SLACK, fd_count
from tests.kit.leases import LEASE, Kept, keep
from tests.kit.rounds import ask
from tests.programs import main


def engine_of(urls: list[str], kind: str) -> Engine:
    return engine_for(tuple(redbolt.Node.from_url(url) for url in urls), kind)


def in_the_child(engine: Engine, mine: Kept) -> None:
    """What the parent has is dead here, and does no harm; own ones are renewed."""
    renewal = mine.renewal
    assert renewal.valid_until_ns == 0
    assert not renewal.busy
    assert renewal.wait(now_ns() + 10_000_000_000) in (False, True)
    renewal.pause()
    renewal.resume()
    renewal.note(now_ns(), 30_000, now_ns() + 29_000_000_000)
    renewal.stop()
    assert renewal.valid_until_ns == 0
    own = keep(engine, b"the child's", None, age=LEASE)
    own.renewed(1)
    assert own.left() > LEASE / 2
    own.renewal.stop()
    assert ask(engine, DROP, own.token, key=own.key).hits >= 3


def forked(urls: list[str], kind: str) -> None:
    """Fork while a lease is kept whose renewals are frequent."""
    engine = engine_of(urls, kind)
    kept = keep(engine, lease=1.5 * SLACK)
    kept.granted(1)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            signal.alarm(int(20 * SLACK))
            try:
                in_the_child(engine, kept)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        before = kept.renewal.renewed
        kept.granted(before + 2)
    assert (kept.renewal.lost, kept.renewal.failed) == (0, 0)
    count = fd_count()
    kept.granted(8)
    assert fd_count() == count


left: list[object] = []


def ends(urls: list[str], kind: str) -> None:
    """The program ends while leases are kept, and renewed all the time."""
    engine = engine_of(urls, kind)
    left.extend(keep(engine, b"name:%d" % at, None, lease=0.3 * SLACK) for at in range(50))
    time.sleep(0.3)


def ends_in_a_cycle(urls: list[str], kind: str) -> None:
    """The same where only the garbage collector ends them."""
    engine = engine_of(urls, kind)
    for at in range(50):
        cycle: list[object] = [keep(engine, b"cycle:%d" % at, None, lease=0.3 * SLACK)]
        cycle.append(cycle)
    time.sleep(0.2)


if __name__ == "__main__":
    main({"forked": forked, "ends": ends, "ends_in_a_cycle": ends_in_a_cycle})
    if left:
        print(json.dumps(len(left)))
