"""Both engines, real servers, and a look at what each test leaves behind."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import redbolt
from redbolt import _clock, _drive, _losses
from redbolt._engine import Engine, choose, engine_for
from redbolt._steps import acquire
from redbolt.local import LocalNode, LocalNodes, find_server, server_version
from tests.kit.clients import Client, eventually, fd_count, thread_count
from tests.kit.resp import OK

KINDS = ("native", "pure")
SERVERS = {"valkey": None, "redis": "redis-server"}


def _engine_line(kind: str) -> str:
    try:
        return str(choose(kind))
    except ImportError as error:
        return f"{kind} MISSING ({error})"


def pytest_report_header() -> list[str]:
    servers = [
        server_version(find_server(path)) for path in SERVERS.values() if path is None or shutil.which(path)
    ]
    return [f"engines: {', '.join(map(_engine_line, KINDS))}", f"servers: {', '.join(servers)}"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each engine in turn. A missing one is an error, never a skip: its tests would not run."""
    name: str = request.param
    choose(name)
    return name


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest) -> str | None:
    """Each kind of server in turn; None is Valkey from the wheel."""
    path = SERVERS[request.param]
    if path is not None and shutil.which(path) is None:
        pytest.skip(f"{path} is not installed (Debian: apt-get install {path})")
    return path


@pytest.fixture(scope="session")
def _five(server: str | None) -> Iterator[LocalNodes]:
    with LocalNodes(5, server=server) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def _five_valkeys() -> Iterator[LocalNodes]:
    with LocalNodes(5) as nodes:
        yield nodes


def _clean(nodes: LocalNodes) -> LocalNodes:
    """Empty servers, however the test before has left them."""
    for node in nodes:
        if node.alive:
            node.resume()
        else:
            node.start(empty=True)
        with Client(node) as client:
            assert client.ask("FLUSHALL") == OK
            assert client.ask("SCRIPT", "FLUSH") == OK
    return nodes


@pytest.fixture
def nodes(_five: LocalNodes) -> LocalNodes:
    """Five empty servers, of each kind in turn. A test may pause, kill and restart them."""
    return _clean(_five)


@pytest.fixture
def node(nodes: LocalNodes) -> LocalNode:
    """One of them."""
    return nodes[0]


@pytest.fixture
def valkeys(_five_valkeys: LocalNodes) -> LocalNodes:
    """Five empty Valkey servers, for tests in which the kind of server makes no difference."""
    return _clean(_five_valkeys)


@pytest.fixture
def valkey(valkeys: LocalNodes) -> LocalNode:
    """One of them."""
    return valkeys[0]


@pytest.fixture
def engine_of(kind: str) -> Callable[..., Engine]:
    """Make an engine for some URLs: ``engine_of(url, ...)``."""

    def make(*urls: str) -> Engine:
        return engine_for(tuple(redbolt.Node.from_url(url) for url in urls), kind)

    return make


@pytest.fixture
def clock() -> Iterator[Callable[[float], None]]:
    """Move the library's clock: ``clock(seconds)`` adds to its offset. It is set right again after the
    test.
    """
    offset = 0

    def move(seconds: float) -> None:
        nonlocal offset
        offset += int(seconds * 1e9)
        _clock.set_offset_ns(offset)

    yield move
    _clock.set_offset_ns(0)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many seconds each pause of an algorithm was to take: it is over at once, a waiting acquire's too,
    while the engines go by the true clock.
    """
    taken: list[float] = []
    skipped_ns = 0
    perform = _drive._perform

    def now_ns() -> int:
        return _clock.now_ns() + skipped_ns

    def skip(step: _drive.Step, engine: Engine) -> object:
        nonlocal skipped_ns
        if isinstance(step, _drive.Wait):
            left_ns = step.until_ns - now_ns()
            taken.append(left_ns / 1e9)
            skipped_ns += max(0, left_ns)
            return False
        if isinstance(step, _drive.Sleep):
            taken.append((step.until_ns - _clock.now_ns()) / 1e9)
            return None
        return perform(step, engine)

    monkeypatch.setattr(acquire, "now_ns", now_ns)
    monkeypatch.setattr(_drive, "_perform", skip)
    return taken


@pytest.fixture(scope="session", autouse=True)
def _agents_running(_five_valkeys: LocalNodes) -> None:
    """Start both agents, so that their thread and descriptors belong to the baseline. The thread that tells
    of losses ends sooner than usual.
    """
    pytest.MonkeyPatch().setattr(_losses, "_LINGER_NS", 20_000_000)
    for kind in KINDS:
        lock = redbolt.Lock(_five_valkeys[0].url, "warm-up", engine=kind)
        lock.acquire()
        lock.release()
        redbolt.close()  # hands its connections to the agent
    gc.collect()
    gc.freeze()  # what exists by now is not looked through again after every test


@pytest.fixture(autouse=True)
def _leaves_nothing(_agents_running: None) -> Iterator[None]:
    """Descriptors and threads are back at the baseline after every test."""
    gc.collect()
    before = fd_count(), thread_count()
    yield
    redbolt.close()
    gc.collect()

    def settled() -> Any:
        after = fd_count(), thread_count()
        assert after <= before or (after[0] <= before[0] and after[1] <= before[1]), f"{before} -> {after}"
        return True

    eventually(settled, 5, "descriptors and threads are back at the baseline")
    gc.freeze()  # pytest keeps a report of each test; to look through thousands takes longer than a test
