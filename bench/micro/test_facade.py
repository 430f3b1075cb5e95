"""What a lock's own Python costs: acquire and release over an engine that answers at once."""

from __future__ import annotations

from typing import Any

import pytest

import redbolt
from redbolt._clock import now_ns
from redbolt._judge import GRANTED, validity_end_ns

NODE = redbolt.Node.from_url("redis://127.0.0.1:1")
TOKEN = b"0" * 32


class _Votes:
    verdict = GRANTED
    yes = hits = touched = 1
    no = 0
    token = TOKEN
    started_ns = ended_ns = valid_until_ns = 0

    def outcomes(self) -> list[tuple[int, str]]:
        return []


class _Instant:
    """An engine that says yes to everything, and asks nobody."""

    kind = "instant"
    nodes = (NODE,)

    def votes(self) -> _Votes:
        return _Votes()

    def attempt(
        self,
        votes: _Votes,
        key: bytes,
        token: bytes | None,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        *further: Any,
    ) -> bool:
        votes.started_ns = now_ns()
        votes.valid_until_ns = validity_end_ns(votes.started_ns, lease_ms, drift_ns)
        return True

    def round(self, votes: _Votes, *further: Any) -> None:
        pass

    def discard(self, key: bytes, token: bytes, *further: Any) -> None:
        pass

    def pending(self, token: bytes) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.fixture(params=(True, False), ids=("of a thread", "of the object"))
def lock(request: pytest.FixtureRequest) -> redbolt.Lock:
    """A lock over such an engine; its lease is that of a thread, or the object's."""
    lock = redbolt.Lock(NODE, "bench:micro", timeout=10, thread_local=request.param, engine="pure")
    instant: Any = _Instant()
    lock._engine = instant
    return lock


@pytest.mark.benchmark(group="facade over an engine that answers at once")
def test_acquire_and_release(benchmark: Any, lock: redbolt.Lock) -> None:
    def cycle() -> bool:
        granted = lock.acquire(blocking=False)
        lock.release()
        return granted

    assert benchmark(cycle) is True
    assert lock.lease is None


@pytest.mark.benchmark(group="facade over an engine that answers at once")
def test_with_block(benchmark: Any, lock: redbolt.Lock) -> None:
    def cycle() -> bool:
        with lock:
            return lock.held

    assert benchmark(cycle) is True
    assert lock.lease is None
