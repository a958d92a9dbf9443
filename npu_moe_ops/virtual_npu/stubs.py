"""Stand-ins for the CANN libraries that torch_npu is linked with, built once for each wheel and kept.

acl.c has the calls that do something. Which others must exist is read from the wheel itself: its undefined symbols,
and the names that it looks up while it runs. Those refuse: a zero from a call that did nothing is how wrong numbers
come about. The few listed here as harmless return 0.
"""

import atexit
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from . import elf
from .refused import Refused

SOURCE = Path(__file__).with_name("acl.c")
MAIN = "libascendcl.so"
ON_DEMAND = "libop_plugin_atb.so"  # loaded by operators of a library that has no stand-in
# aclnn operators are not among them on purpose: without libopapi.so torch_npu says that they do not exist.
LOOKED_UP = re.compile(r"acl(?!nn)[a-zA-Z0-9]+|Hccl[A-Za-z0-9]+|rt[A-Z]\w+|aoe\w+|Msprof\w+|mspti\w+")
PREFIXES = ("acl", "Hccl", "rt", "aoe", "Msprof", "mspti")
HARMLESS = re.compile(
    r"aclInit|aclFinalize\w*|acl(rt)?Set\w+|aclopSet\w+|HcclSetConfig|aclDestroy\w+|aclrtDestroy\w+|aclrtReset\w+"
    r"|aclrtCtxSet\w+|aclrtGetSysParamOpt|aclrtGetStreamResLimit|aclrtUseStreamRes\w*|aclrtUnuseStreamRes\w*"
    r"|aclrtDeviceEnablePeerAccess|aclrtCheckArchCompatibility|aclrtSubscribe\w+|aclrtUnSubscribe\w+"
    r"|aclrtProcessReport|acldump\w+|aclmdl\w*Dump\w*|aclprof\w+|Msprof\w+"
)
RETURNS_POINTER = re.compile(
    r"aclCreate\w+|aclop(Create|Get)\w*Attr|aclGet(DataBufferAddr\w*|TensorDesc\w*|OpName\w*)|acltdt(Create|Get)\w+"
    r"|rtGet\w+"
)
SYSTEM_FOLDERS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
PROLOGUE = """#include <stdio.h>
#include <stdlib.h>
int vnpu_refuse(const char *name);
static long stop(const char *name) {
    fprintf(stderr, "virtual NPU: torch_npu called %s of CANN, which has no stand-in\\n", name);
    abort();
}
"""


def build(wheel: Path) -> list[Path]:
    """The stand-ins for the torch_npu in this folder, in the order in which to load them."""
    libraries = sorted(path for path in (wheel / "torch_npu").rglob("*.so*") if path.name != ON_DEMAND)
    name = f"cann-{_key(libraries)}"
    folder = _cache_folder() / name
    if not folder.exists():
        compiler = _compiler()
        scratch = Path(tempfile.mkdtemp(prefix=name, dir=folder.parent))
        try:
            _build(libraries, scratch, compiler)
            with suppress(OSError):  # another process was faster
                os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return sorted(folder.glob("*.so"), key=lambda path: (path.name != MAIN, path.name))


def _build(libraries: list[Path], folder: Path, compiler: list[str]) -> None:
    sonames, symbols = wanted(libraries)
    generated, empty = folder / "refusals.c", folder / "empty.c"
    generated.write_text(PROLOGUE + "".join(_stub(index, name) for index, name in enumerate(sorted(symbols))))
    empty.write_text("")
    base = [*compiler, "-shared", "-fPIC", "-O1", "-w"]
    _run([*base, f"-Wl,-soname,{MAIN}", "-o", str(folder / MAIN), str(generated), str(SOURCE), "-lpthread"])
    # torch_npu looks names up in each library on its own: all must depend on the one that has them.
    depends = ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{MAIN}", "-Wl,-rpath,$ORIGIN"]
    for soname in sorted(sonames - {MAIN}):
        _run([*base, f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(empty), *depends])


def wanted(paths: list[Path]) -> tuple[set[str], set[str]]:
    """Names of the libraries that are not on this machine, and of the functions that must exist."""
    wheel = [library for path in paths if (library := elf.read(path))]
    needed = {name for library in wheel for name in library.needed}
    absent = needed - {library.soname for library in wheel} - {path.name for path in paths}
    present = set((_torch_folder() / "lib").glob("*.so*"))
    for name in sorted(absent):
        found = [path for folder in SYSTEM_FOLDERS if (path := Path(folder) / name).exists()]
        present.update(found[:1])
        if found or (_torch_folder() / "lib" / name).exists():
            absent.discard(name)
    others = [library for path in {path.resolve() for path in present} if (library := elf.read(path))]
    defined = {symbol for library in (*wheel, *others) for symbol in library.defined}
    undefined = {symbol for library in wheel for symbol in library.undefined} - defined
    of_python = ("Py", "_Py", "_ZTH")
    symbols = {symbol for symbol in undefined if not symbol.startswith(of_python)}
    for library in wheel:
        symbols |= elf.texts(library.path, PREFIXES, LOOKED_UP)
    return absent - {"libatb.so"}, symbols


def _stub(index: int, name: str) -> str:
    """Weak, so that a definition in acl.c wins."""
    if name.startswith("_Z"):
        body = f'return stop("{name}");'  # the caller may expect an object: no number is safe
    elif HARMLESS.fullmatch(name):
        body = "return 0;"
    elif RETURNS_POINTER.fullmatch(name):
        body = f'vnpu_refuse("{name}"); return 0;'
    else:
        body = f'return vnpu_refuse("{name}");'
    return f'long f{index}(void) __asm__("{name}") __attribute__((weak));\nlong f{index}(void) {{ {body} }}\n'


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"the stand-ins for CANN could not be built: {' '.join(command)}\n{done.stderr}")


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(command[0]) is None:
        raise Refused(
            f"a C compiler must be installed to build the stand-ins for CANN, got none called {command[0]!r}; "
            f"install gcc, or set CC"
        )
    return command


def _key(libraries: list[Path]) -> str:
    key = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes() + Path(elf.__file__).read_bytes())
    key.update(f"{platform.machine()} {importlib.metadata.version('torch')}".encode())
    for path in libraries:
        about = path.stat()
        key.update(f"{path} {about.st_size} {about.st_mtime_ns}".encode())
    return key.hexdigest()[:16]


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu_moe_ops"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    temporary = tempfile.mkdtemp(prefix="npu_moe_ops-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
