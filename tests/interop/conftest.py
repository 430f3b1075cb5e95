"""Other people's lock libraries, alive, beside ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.nodejs import NodeRedisson, NodeRedlock
from tests.kit.clients import HasAddress
from tests.kit.npm import Peer, installed, missing


def _required() -> bool:
    """Whether a peer that is not there is a failure: under CI, and where it is asked for."""
    return bool(os.environ.get("CI") or os.environ.get("REDBOLT_REQUIRE_PEERS"))


def require_node() -> None:
    """Skip the test without Node; fail it where peers are required."""
    reason = missing()
    if reason is not None and _required():
        pytest.fail(f"{reason}; REDBOLT_REQUIRE_PEERS or CI is set, so it must be there")
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def _npm() -> None:
    """The packages from npm are installed."""
    require_node()
    installed()


@pytest.fixture(scope="session")
def redlock_peer(_npm: None) -> Iterator[Peer]:
    """The process that drives npm ``redlock``."""
    with Peer("redlock") as peer:
        yield peer


@pytest.fixture(scope="session")
def redisson_peer(_npm: None) -> Iterator[Peer]:
    """The process that drives npm ``node-redisson``."""
    with Peer("redisson") as peer:
        yield peer


@pytest.fixture
def node_redlock(redlock_peer: Peer) -> Iterator[Callable[..., NodeRedlock]]:
    """Make a Redlock of npm ``redlock`` over some servers: ``node_redlock(server, ..., retryCount=3)``."""
    made: list[NodeRedlock] = []

    def make(*servers: HasAddress, **settings: float) -> NodeRedlock:
        made.append(NodeRedlock(redlock_peer, servers, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def node_redisson(redisson_peer: Peer) -> Iterator[Callable[..., NodeRedisson]]:
    """Make a client of npm ``node-redisson``, with a uuid of its own: ``node_redisson(server)``, or
    ``node_redisson(server, watchdog_ms=300)``.
    """
    made: list[NodeRedisson] = []

    def make(server: HasAddress, **options: Any) -> NodeRedisson:
        made.append(NodeRedisson(redisson_peer, server, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
