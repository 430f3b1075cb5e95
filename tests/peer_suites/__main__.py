"""Run the test suites of other libraries with redbolt's classes in the place of theirs.

    python -m tests.peer_suites [arguments for pytest]

Each suite is taken from the library's own sdist, pinned by its hash, and unpacked with the library beside it
into ``build/peer_suites``; it runs on a throwaway server, once per engine. It is a failure if a test fails,
if another number of tests ran than the suite has, or if the class that was tested is not ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from redbolt.local import LocalNodes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "peer_suites"
ENGINES = ("native", "pure")
PIP_DOWNLOAD = "pip download --quiet --no-input --disable-pip-version-check --require-hashes --no-deps"


@dataclass(frozen=True)
class Suite:
    """One library's tests of its lock: ``tests`` is their file in the sdist, ``cases`` how many there are."""

    library: str
    version: str
    sha256: str
    tests: str
    cases: int

    @property
    def folder(self) -> Path:
        """Where its sdist is unpacked."""
        return BUILD / f"{self.library}-{self.version}"


REDIS_PY = Suite(
    library="redis",
    version="8.1.0",
    sha256="6e1a19beef9225c83efd689c7e6b7da2d5215b1f42cd13b7fc3714d0a09c7b25",
    tests="tests/test_lock.py",
    cases=32,
)


def fetch(suite: Suite) -> None:
    """Download the sdist by pip and unpack it, unless it is there."""
    if (suite.folder / suite.tests).exists():
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    archive = BUILD / f"{suite.library}-{suite.version}.tar.gz"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as folder:
            pinned = Path(folder) / "pinned.txt"
            pinned.write_text(f"{suite.library}=={suite.version} --hash=sha256:{suite.sha256}\n")
            command = [*PIP_DOWNLOAD.split(), "--no-binary", ":all:", "--dest", str(BUILD), "-r", str(pinned)]
            subprocess.run([sys.executable, "-m", *command], check=True)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != suite.sha256:
        raise SystemExit(f"{archive} has the hash {found}, not {suite.sha256}; remove it")
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        with tarfile.open(archive) as sdist:
            sdist.extractall(folder, filter="data")
        (Path(folder) / suite.folder.name).rename(suite.folder)


def run(suite: Suite, engine: str, arguments: list[str]) -> list[str]:
    """Run a suite on one engine; returns what is wrong."""
    report_file = suite.folder / "redbolt-report.json"
    report_file.unlink(missing_ok=True)
    # The library and its tests come from the sdist, whatever version is installed.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(suite.folder), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "REDBOLT_ENGINE": engine,
        "REDBOLT_PEER_REPORT": str(report_file),
    }
    command = [
        *(sys.executable, "-m", "pytest", "--rootdir", str(suite.folder), "-c", str(HERE / "pytest.ini")),
        *("-p", "redbolt_substitute", "-p", "no:cacheprovider", "-q"),
    ]
    with LocalNodes(1) as (node,):
        command += ["--redis-url", f"{node.url}/0", *arguments, suite.tests]
        code = subprocess.run(command, cwd=suite.folder, env=environment, check=False).returncode
    if not report_file.exists():
        return [f"pytest ended with {code} before any test"]
    report = json.loads(report_file.read_text())
    outcomes: dict[str, int] = report["outcomes"]
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(
        f"{suite.library} {report['redis']}, {report['engine']} engine: {told or 'nothing'} of {suite.cases};"
        f" {report['made']} locks of ours, {report['theirs']} of theirs",
        flush=True,
    )
    wrong = []
    if code:
        wrong.append(f"pytest ended with {code}")
    if outcomes != {"passed": suite.cases}:
        wrong.append(f"{told or 'nothing'}, where all {suite.cases} cases have to pass")
    if report["redis"] != suite.version or not Path(report["redis_path"]).is_relative_to(suite.folder):
        wrong.append(f"the library was {report['redis']} from {report['redis_path']}")
    if report["engine"] != engine:
        wrong.append(f"the engine was {report['engine']}")
    if not report["made"] or report["theirs"]:
        wrong.append(f"{report['made']} locks were ours, {report['theirs']} theirs")
    return wrong


def main(arguments: list[str]) -> int:
    """Run all suites; 0 if all is well."""
    fetch(REDIS_PY)
    wrong = [
        f"{REDIS_PY.library} on the {engine} engine: {what}"
        for engine in ENGINES
        for what in run(REDIS_PY, engine, arguments)
    ]
    for line in wrong:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
