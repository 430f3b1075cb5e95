"""A pytest plugin that puts a class of ours in the place of redis-py's lock, and counts what came of it.

The runner loads it by name and reads the counts from the file that ``REDBOLT_PEER_REPORT`` names.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.client
import redis.lock

from redbolt._engine import choose
from redbolt.compat import redis_py

ORIGINAL = redis.lock.Lock
made = theirs = 0
outcomes: Counter[str] = Counter()


class Counted(redis_py.Lock):
    """Ours, with a count of how many there were."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        global made
        made += 1
        super().__init__(*arguments, **options)


def _counted_original(self: Any, *arguments: Any, **options: Any) -> None:
    global theirs
    theirs += 1
    _original_init(self, *arguments, **options)


_original_init = ORIGINAL.__init__
ORIGINAL.__init__ = _counted_original  # type: ignore[method-assign]
for module in [one for name, one in sys.modules.items() if name.split(".")[0] == "redis"]:
    for attribute, value in list(vars(module).items()):
        if value is ORIGINAL:
            setattr(module, attribute, Counted)


@pytest.fixture(autouse=True)
def _our_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test replaces the clock of redis-py's lock, ours gets the same."""
    if "fake_lock_time" in request.fixturenames:
        monkeypatch.setattr(redis_py, "mod_time", request.getfixturevalue("fake_lock_time"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count each test once: by its call, or by the phase that kept it from being called."""
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.outcome if report.when == "call" else f"{report.outcome} at {report.when}"] += 1


def pytest_sessionfinish() -> None:
    """Write down what was seen."""
    report = {
        "outcomes": outcomes,
        "made": made,
        "theirs": theirs,
        "engine": choose().name,
        "redis": redis.__version__,
        "redis_path": redis.__file__,
    }
    Path(os.environ["REDBOLT_PEER_REPORT"]).write_text(json.dumps(report))
