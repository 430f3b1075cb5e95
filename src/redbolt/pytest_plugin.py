"""Ready pytest fixtures over ``redbolt.local``; enabled by ``pytest_plugins = ["redbolt.pytest_plugin"]``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from redbolt.local import LocalNode, LocalNodes

__all__ = ["redbolt_node", "redbolt_nodes"]


@pytest.fixture
def redbolt_node() -> Iterator[LocalNode]:
    """One empty throwaway server for one test."""
    with LocalNodes() as nodes:
        yield nodes[0]


@pytest.fixture
def redbolt_nodes() -> Iterator[LocalNodes]:
    """Five empty throwaway servers for one test."""
    with LocalNodes(5) as nodes:
        yield nodes
