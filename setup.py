"""Build `redbolt._core`: the Cython sources in `_core/`, compiled together with hiredis' C sources.

The metadata is in pyproject.toml. These environment variables are switches; "1" turns one on:

  REDBOLT_PURE            no extension: the pure engine alone
  REDBOLT_REQUIRE_CORE    without the extension the build fails (else: a warning and a pure install)
  REDBOLT_SYSTEM_HIREDIS  link the system's hiredis, found by pkg-config; download nothing
  REDBOLT_SANITIZE        for tests: AddressSanitizer and UndefinedBehaviorSanitizer
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# hiredis' C sources come from the sdist of the Python package of that name, checked by its hash.
HIREDIS = "hiredis==3.5.0 --hash=sha256:c227592cc56b7df247abe4755c26723965be68972be2149fa441ac33d82131ba"
HIREDIS_DIR = Path("_core/hiredis")  # git-ignored, but part of our own sdist
HIREDIS_PARTS = ["alloc", "async", "hiredis", "net", "read", "sds", "sockcompat"]
PIP_DOWNLOAD = "pip download --quiet --no-input --disable-pip-version-check --require-hashes --no-deps"
PIP_DOWNLOAD += " --no-binary :all: --no-build-isolation"

CFLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread"]
OPTIMIZE = ["-O3"]
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
DIRECTIVES = {"language_level": 3, "boundscheck": False, "wraparound": False}


def switch(name: str) -> bool:
    return os.environ.get(f"REDBOLT_{name}", "") not in ("", "0")


def fetch_hiredis() -> None:
    """Fill HIREDIS_DIR with hiredis' C sources, unless it already holds the pinned ones."""
    pinned = HIREDIS_DIR / "PINNED"
    if pinned.is_file() and pinned.read_text() == HIREDIS:
        return
    with tempfile.TemporaryDirectory() as tmp:
        Path(tmp, "pinned.txt").write_text(HIREDIS)
        download = [*PIP_DOWNLOAD.split(), "--dest", tmp, "--requirement", f"{tmp}/pinned.txt"]
        subprocess.run([sys.executable, "-m", *download], check=True)
        HIREDIS_DIR.mkdir(exist_ok=True)
        with tarfile.open(next(Path(tmp).glob("hiredis-*.tar.gz"))) as sdist:
            for member in sdist.getmembers():
                path = Path(member.name)
                if member.isfile() and path.parts[1:-1] == ("vendor", "hiredis"):
                    (HIREDIS_DIR / path.name).write_bytes(sdist.extractfile(member).read())
    # read.c compiles ffc.h in, whose licence is its first comment.
    (HIREDIS_DIR / "COPYING.ffc").write_bytes((HIREDIS_DIR / "ffc.h").read_bytes().split(b"\n\n")[0])
    pinned.write_text(HIREDIS)  # last, so that an interrupted run starts again


def system_hiredis(what: str) -> list[str]:
    asked = ["pkg-config", what, "hiredis >= 1.0"]
    return subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def core_extension() -> Extension:
    core = Extension(
        "redbolt._core",
        ["_core/core.pyx"],
        include_dirs=["_core"],
        depends=[path for end in ("pyx", "pxi", "pxd", "h") for path in sorted(glob(f"_core/*.{end}"))],
        extra_compile_args=CFLAGS + (SANITIZE if switch("SANITIZE") else OPTIMIZE),
        extra_link_args=["-pthread"] + (SANITIZE if switch("SANITIZE") else []),
        optional=not switch("REQUIRE_CORE"),
    )
    if switch("SYSTEM_HIREDIS"):
        core.extra_compile_args += system_hiredis("--cflags")
        core.extra_link_args += system_hiredis("--libs")
    else:
        fetch_hiredis()
        core.include_dirs.append(str(HIREDIS_DIR))
        core.sources += [str(HIREDIS_DIR / f"{part}.c") for part in HIREDIS_PARTS]
    return core


class BuildExt(build_ext):
    def run(self) -> None:
        # Here and not at import, so that only a command that compiles needs Cython, and so that the
        # sdist lists the .pyx. Cython follows .pxi and .pxd files by itself; `optional` is lost on its copy.
        if self.extensions:
            from Cython.Build import cythonize

            done = cythonize(
                self.extensions, build_dir="build", include_path=["_core"], compiler_directives=DIRECTIVES
            )
            for ext, cythonized in zip(self.extensions, done, strict=True):
                ext.sources = cythonized.sources
        super().run()


supported = os.name == "posix" and sys.implementation.name == "cpython"
extensions: list[Extension] = []
if "sdist" in sys.argv:
    fetch_hiredis()  # whatever the switches say: an sdist builds without network
if supported and not switch("PURE"):
    try:
        extensions = [core_extension()]
    except (OSError, subprocess.CalledProcessError) as error:
        if switch("REQUIRE_CORE"):
            raise
        print(f"warning: redbolt is built without its extension: no hiredis ({error})", file=sys.stderr)

licenses = ["LICENSE"]
if "sdist" in sys.argv or (extensions and not switch("SYSTEM_HIREDIS")):
    licenses += sorted(glob(f"{HIREDIS_DIR}/COPYING*"))
setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt}, license_files=licenses)
