"""Both engines, real nodes, and a lock on one or five of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import redbolt
from redbolt._engine import choose
from redbolt.local import LocalNodes

KINDS = ("native", "pure")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each engine in turn; a missing one is an error."""
    name: str = request.param
    choose(name)
    return name


@pytest.fixture(scope="session")
def _urls() -> Iterator[list[str]]:
    with LocalNodes(5) as nodes:
        yield [node.url for node in nodes]


@pytest.fixture(params=(1, 5), ids=lambda count: f"{count} node{'s' if count > 1 else ''}")
def urls(request: pytest.FixtureRequest, _urls: list[str]) -> list[str]:
    """One node, and five."""
    return _urls[: request.param]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    """Each benchmark makes its own connections."""
    yield
    redbolt.close()
