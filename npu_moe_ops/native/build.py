"""Compile the CPU kernel with this machine's C++ compiler, once, into a cache.

One library serves one instruction set and every torch that has the stable ABI. Its name says what it was made from,
so an old one is never taken for a new one. Processes that want it at the same time wait for the one that builds it; it
appears whole or not at all.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unused-parameter", "-Wno-psabi"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
ISAS = {  # best first
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "neon": [],
}
log = logging.getLogger("npu_moe_ops")


class BuildError(RuntimeError):
    """The kernel can't be built here; the message says why and what would help."""


def compiler() -> str | None:
    """$CXX, or the first of the usual names that is there."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else ("c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


def library(isa: str, extra: tuple[str, ...] = ()) -> Path:
    """The path of the built library, from a cache if it is there. BuildError where it can't be had."""
    if sys.platform != "linux":
        raise BuildError(f"the CPU kernel is for Linux, this is {sys.platform}")
    found = cached(isa, extra)
    if found:
        return found
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler was found; install g++ or clang++, or set CXX to one")
    path = _writable_folder() / _name(isa, extra)
    with _alone(path.with_suffix(".lock")):
        if not path.exists():
            log.warning("npu_moe_ops: compiling its CPU kernel for %s, once, into %s", isa, path.parent)
            _build(cxx, isa, extra, path)
    return path


def cached(isa: str, extra: tuple[str, ...] = ()) -> Path | None:
    """The built library, if it is there already."""
    name = _name(isa, extra)
    return next((path for folder in folders() if (path := folder / name).exists() and _trusted(folder)), None)


def folders() -> list[Path]:
    """Where libraries are: $NPU_MOE_CACHE, or the user's cache folder and, if that is read-only, a temporary one."""
    chosen = os.environ.get("NPU_MOE_CACHE")
    if chosen:
        return [Path(chosen)]
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [base / "npu_moe_ops", Path(tempfile.gettempdir()) / f"npu_moe_ops-{os.getuid()}"]


def _writable_folder() -> Path:
    reasons = []
    for folder in folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            reasons.append(str(error))
            continue
        if not _trusted(folder):
            reasons.append(f"{folder} belongs to another user, or anybody may write to it")
        elif not os.access(folder, os.W_OK | os.X_OK):
            reasons.append(f"{folder} is read-only")
        else:
            return folder
    raise BuildError(f"there is no folder to build in: {'; '.join(reasons)}; set NPU_MOE_CACHE to one")


def _trusted(folder: Path) -> bool:
    """Nobody but this user and root can put a library there."""
    owner = folder.stat()
    return owner.st_uid in (0, os.getuid()) and not owner.st_mode & (stat.S_IWOTH | stat.S_IWGRP)


def _name(isa: str, extra: tuple[str, ...]) -> str:
    return f"{isa}-{_digest(isa, extra)}.so"


def _digest(isa: str, extra: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join([platform.machine(), *COMMON, *ISAS[isa], *extra]).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(cxx: str, isa: str, extra: tuple[str, ...], path: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{isa}-") as folder:
        objects, running = [], []
        for source, flags in (
            ("ffn.cpp", ISAS[isa]),
            ("routing.cpp", ISAS[isa]),
            ("library.cpp", [f"-DNPU_MOE_ISA={isa}", "-isystem", str(torch_folder / "include")]),
        ):
            objects.append(f"{folder}/{source}.o")
            what = ["-c", str(SOURCES / source), "-o", objects[-1]]
            command = [cxx, *COMMON, *WARNINGS, *extra, *flags, *what]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running.append((command, process))
        for command, process in running:
            output, _ = process.communicate()
            _succeeded(command, process.returncode, output)
        made = f"{folder}/{path.name}"
        command = [cxx, "-shared", *extra, "-o", made, *objects, f"-L{torch_folder / 'lib'}", "-ltorch_cpu"]
        linked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        _succeeded(command, linked.returncode, linked.stdout)
        os.replace(made, path)


def _succeeded(command: list[str], code: int, output: str) -> None:
    if code:
        lines = "\n".join(output.splitlines()[:20])
        raise BuildError(f"{command[0]} failed with {code}:\n{' '.join(command)}\n{lines}")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; where the file system knows no locks, several build, and the last one's library stays."""
    import fcntl

    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
