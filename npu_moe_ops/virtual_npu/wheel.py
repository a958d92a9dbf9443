"""Where the torch_npu wheel lies, and how it gets there.

Its home is a folder of its own: beside torch, in site-packages, it breaks every `import torch` without CANN.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .refused import Refused

FOLDER = "NPU_MOE_TORCH_NPU"
HELPERS = {  # what torch_npu imports without asking pip for it: module, distribution
    "attr": "attrs",
    "cloudpickle": "cloudpickle",
    "decorator": "decorator",
    "google.protobuf": "protobuf",
    "numpy": "numpy",
    "psutil": "psutil",
    "scipy": "scipy",
    "yaml": "pyyaml",
}


def home() -> Path:
    """Where install() puts the wheel."""
    return Path(sys.prefix) / "share/npu_moe_ops/torch_npu"


def find() -> Path:
    """The folder that holds the package torch_npu, for sys.path. Imports nothing; raises Refused if it cannot work."""
    folder = _folder()
    wanted, found = torch_release(), _version_in(folder)
    if found is not None and _release(found) != wanted:
        raise Refused(f"torch_npu must be of torch's version {wanted}, got {found} in {folder}; {_remedy()}")
    missing = sorted(name for module, name in HELPERS.items() if not _importable(module))
    if missing:
        raise Refused(f"torch_npu needs {', '.join(missing)}, got none; pip install 'npu-moe-ops[virtual-npu]'")
    return folder


def install() -> Path:
    """Put the torch_npu wheel that belongs to the installed torch into home()."""
    target, requirement = home(), f"torch-npu=={torch_release()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(target), requirement]
    if subprocess.run(command, check=False).returncode:
        raise Refused(f"pip could not install {requirement}; torch_npu must be of torch's version")
    return target


def torch_release() -> str:
    """2.13.0 for torch 2.13.0+cpu."""
    return _release(importlib.metadata.version("torch"))


def _folder() -> Path:
    chosen = os.environ.get(FOLDER)
    if chosen:
        if not _holds_package(Path(chosen)):
            raise Refused(f"{FOLDER} must be a folder with the package torch_npu in it, got {chosen}")
        return Path(chosen).resolve()
    spec = importlib.util.find_spec("torch_npu")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent.parent
    if _holds_package(home()):
        return home()
    raise Refused(f"torch_npu must be installed for a virtual NPU, got none; {_remedy()}")


def _remedy() -> str:
    return "python -m npu_moe_ops.virtual_npu --install"


def _holds_package(folder: Path) -> bool:
    return (folder / "torch_npu/__init__.py").exists()


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def _version_in(folder: Path) -> str | None:
    found = importlib.metadata.distributions(path=[str(folder)], name="torch-npu")
    return next((distribution.version for distribution in found), None)


def _release(version: str) -> str:
    """Three numbers: torch_npu's fixes of a release are 2.13.0.post1."""
    return ".".join(version.split("+")[0].split(".")[:3])
