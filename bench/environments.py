"""Environments for what must not share redbolt's: made on demand below build/peers, from pinned versions."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Unavailable", "node_modules", "python"]

PINS = Path(__file__).with_name("pins")
BUILD_DIR = PINS.parent.parent / "build" / "peers"
PATIENCE = 600
"""Seconds that one step of an installation may take."""


class Unavailable(Exception):
    """Something cannot be installed or started on this machine; the text says why, in one line."""


def python(name: str, pins: Path = PINS, build_dir: Path = BUILD_DIR) -> Path:
    """The interpreter of a virtual environment with what pins/NAME.txt lists."""
    requirements = pins / f"{name}.txt"
    folder = build_dir / name
    interpreter = folder / "bin" / "python"
    with _fresh(folder, [requirements], sys.version, sys.base_prefix) as stale:
        if stale or not interpreter.exists():
            _clear(folder)
            _run("venv", [sys.executable, "-m", "venv", "--without-pip", str(folder)])
            install = ["--disable-pip-version-check", "install", "--quiet", "--retries", "2"]
            pip = [sys.executable, "-m", "pip", "--python", str(interpreter)]
            _run("pip", [*pip, *install, "--requirement", str(requirements)])
    return interpreter


def node_modules(name: str, pins: Path = PINS, build_dir: Path = BUILD_DIR) -> Path:
    """The node_modules with what pins/NAME/package-lock.json lists."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise Unavailable(f"needs Node, and `{program}` is not on PATH")
    folder = build_dir / name
    modules = folder / "node_modules"
    files = [pins / name / "package.json", pins / name / "package-lock.json"]
    with _fresh(folder, files) as stale:
        if stale or not modules.exists():
            _clear(folder)
            for file in files:
                shutil.copy(file, folder)
            _run(
                "npm",
                ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"],
                folder,
            )
    return modules


@contextmanager
def _fresh(folder: Path, files: Sequence[Path], *made_with: str) -> Iterator[bool]:
    """Whether the folder has to be made anew; it counts as made when the block ends without an exception.

    A second process that wants the same environment waits until the first one has made it.
    """
    key = repr((platform.platform(), made_with, [file.read_bytes() for file in files])).encode()
    digest = hashlib.sha256(key).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder / ".made-from"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not (stamp.exists() and stamp.read_text() == digest)
        stamp.write_text(digest)


def _clear(folder: Path) -> None:
    print(f"bench: installing {folder.name} in {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _run(what: str, command: Sequence[str], folder: Path | None = None) -> None:
    """Run a step of an installation."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what} took longer than {PATIENCE} s") from None
    if done.returncode:
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["without a word"]
        errors = [line for line in said if line.startswith(("ERROR", "npm error"))]
        why = "; ".join(line[:100] for line in errors[:2] or said[-1:])
        raise Unavailable(f"{what} failed: {why}")
