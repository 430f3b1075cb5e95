"""``python -m tests.mutants``: apply each mutant to a copy of the repository; the suite has to go red."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Change

ROOT = Path(__file__).parents[2]
NEEDED = ("src", "_core", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
KINDS = ("native", "pure")


def copy_repository(to: Path) -> None:
    """Everything that building and testing needs, without what was built."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "mutants")
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignore)
        else:
            shutil.copy2(source, to / name)


def build(copy: Path) -> None:
    """Compile the copy's native engine in place; hiredis' sources are in the copy already."""
    env = {**os.environ, "REDBOLT_REQUIRE_CORE": "1"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the copy does not compile:\n{done.stdout}{done.stderr}")


def apply(copy: Path, changes: Sequence[Change]) -> None:
    for file, old, new in changes:
        path = copy / file
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{file} has this {text.count(old)} times, instead of once:\n{old}")
        path.write_text(text.replace(old, new))


def revert(copy: Path, changes: Sequence[Change]) -> None:
    for file in {change.file for change in changes}:
        shutil.copyfile(ROOT / file, copy / file)


def run_tests(copy: Path, kind: str, tests: Sequence[str]) -> tuple[bool, str]:
    """Run these tests on one engine until the first fails; whether all passed, and what ended it."""
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-o", "timeout=60",
        "-k", kind, *tests,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=copy, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest did not run (exit {done.returncode}):\n{done.stdout}{done.stderr}")
    ended = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 0, ended[1] if ended else done.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("only", nargs="*", help="words of the names of the mutants to run; default: all")
    words = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="redbolt-mutants-") as folder:
        copy = Path(folder)
        copy_repository(copy)
        build(copy)
        everything = sorted({test for mutant in chosen for test in mutant.tests})
        for kind in KINDS:
            green, ended = run_tests(copy, kind, everything)
            if not green:
                raise SystemExit(f"without any change the suite is red on {kind}: {ended}")
            print(f"unchanged, {kind}: green ({ended})", flush=True)
        built_from: tuple[Change, ...] = ()
        for mutant in chosen:
            for kind in KINDS:
                changes = mutant.native if kind == "native" else mutant.pure
                started = time.monotonic()
                apply(copy, changes)
                core = tuple(change for change in changes if change.file.startswith("_core/"))
                if kind == "native" and core != built_from:
                    build(copy)
                    built_from = core
                green, ended = run_tests(copy, kind, mutant.tests)
                revert(copy, changes)
                survived += green
                outcome = "SURVIVED" if green else f"red by {ended}"
                print(f"{mutant.name}, {kind}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{survived} of {2 * len(chosen)} mutants survived" if survived else "every mutant was noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
