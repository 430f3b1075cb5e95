"""The process that owns the servers of ``redbolt.local`` and removes them when nobody is left to do it.

It is run by path, in a session of its own, and imports only what starts fast. It reads one JSON request per
line from a socket and answers each with one line. The end of that stream means that the parent has closed its
nodes or has died, in whatever way: all servers are killed and the folder is removed. The servers are its
children, so no moment exists in which a server runs that nobody would clean up.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

PARENT_CHECK = 1.0  # seconds between looks at the parent's pid: a fork made in C may hold the stream open


class Server:
    """One server process: a child of this process and the leader of a process group."""

    def __init__(self, argv: list[str], log: str) -> None:
        output = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.pid = os.posix_spawn(
            argv[0],
            argv,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, output, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setpgroup=0,
            setsigmask=(),
            setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE),
        )
        self.alive = True
        self.paused = False

    def observe(self, options: int) -> bool:
        """Take in one state change; False if there was none to report."""
        if not self.alive:
            return False
        pid, status = os.waitpid(self.pid, options)
        if pid == 0:
            return False
        if os.WIFSTOPPED(status):
            self.paused = True
        elif os.WIFCONTINUED(status):
            self.paused = False
        else:
            self.alive = False
        return self.alive

    def refresh(self) -> None:
        """Take in all state changes so far."""
        while self.observe(os.WNOHANG | os.WUNTRACED | os.WCONTINUED):
            pass

    def pause(self) -> None:
        self.refresh()
        if self.alive and not self.paused:
            os.kill(self.pid, signal.SIGSTOP)
            self.observe(os.WUNTRACED)

    def resume(self) -> None:
        self.refresh()
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.refresh()
        if self.alive:
            # The group: a server that rewrites its AOF has a child which writes into the folder.
            os.killpg(self.pid, signal.SIGKILL)
        while self.alive:
            self.observe(0)


class Supervisor:
    """Carries out the requests of one parent."""

    def __init__(self, stream: int, parent: int) -> None:
        self.stream = stream
        self.parent = parent
        self.folder = ""
        self.servers: dict[int, Server] = {}

    def serve(self) -> None:
        """Answer requests until the stream ends or the parent is gone."""
        pending = b""
        while True:
            readable, _, _ = select.select([self.stream], [], [], PARENT_CHECK)
            if os.getppid() != self.parent:
                return
            if not readable:
                continue
            data = os.read(self.stream, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self.reply(json.loads(line))

    def reply(self, request: dict[str, Any]) -> None:
        try:
            answer = self.carry_out(request)
        except OSError as error:
            answer = {"error": str(error)}
        os.write(self.stream, json.dumps({"id": request["id"], **answer}).encode() + b"\n")

    def carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        action, index = request["do"], request["node"]
        if action == "open":
            os.mkdir(request["folder"], 0o700)
            self.folder = request["folder"]
            return {}
        if action == "start":
            if index in self.servers and self.servers[index].alive:
                raise OSError(f"process {self.servers[index].pid} still runs")
            self.servers[index] = Server(request["argv"], request["log"])
        server = self.servers[index]
        if action == "pause":
            server.pause()
        elif action == "resume":
            server.resume()
        elif action == "kill":
            server.kill()
        server.refresh()
        return {"pid": server.pid, "alive": server.alive}

    def clean_up(self) -> None:
        for server in self.servers.values():
            server.kill()
        if self.folder:
            remove(self.folder)


def remove(folder: str) -> None:
    """Remove the folder, again if a child of a server was still writing into it."""
    for attempt in range(10):
        try:
            for path, folders, files in os.walk(folder, topdown=False):
                for name in files:
                    os.unlink(os.path.join(path, name))
                for name in folders:
                    os.rmdir(os.path.join(path, name))
            os.rmdir(folder)
            return
        except OSError:
            time.sleep(0.01 * attempt)


def leave(signum: int, frame: object) -> None:
    raise SystemExit(0)


def main(stream: int, parent: int) -> None:
    """Serve, and clean up whatever ends the service."""
    os.set_inheritable(stream, False)
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for signum in ending:
        signal.signal(signum, leave)
    supervisor = Supervisor(stream, parent)
    try:
        supervisor.serve()
    finally:
        for signum in ending:
            signal.signal(signum, signal.SIG_IGN)
        supervisor.clean_up()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
