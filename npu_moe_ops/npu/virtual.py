"""pypto without an NPU, in this process: its interpreter computes a kernel's numbers on CPU tensors, after every pass.

Nothing here is a model of ours: the wheel's own compiler, interpreter and calculator run. Three things are put right:
the wheel reads a kernel's tensors through a device (zeros, without one), builds its calculator in every process (20 s
of cmake), and writes folders into the working directory.
"""

import atexit
import ctypes
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from csv import DictReader
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import toolchain
from .tiling import STITCH

ALL_PASSES = ("all",)
LAST_PASS = ("CodegenPreproc",)


@dataclass(frozen=True)
class Passes:
    """What the interpreter found after each compiler pass, against the kernel as written (atol = rtol = 1e-3)."""

    passed: Counter[str]
    failed: Counter[str]


NOTHING = Passes(Counter(), Counter())  # what a launch without rows checks


@cache
def start() -> Path:
    """Import pypto with its files in a temporary folder, which goes when the process ends. Returns the folder.

    Call it before anything else imports pypto, or every simulation draws pictures. Raises toolchain.Missing.
    """
    toolchain.require_pypto("npu simulator")
    folder = Path(tempfile.mkdtemp(prefix="npu_moe_ops-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # pypto asks torch for an NPU backend otherwise
    os.environ["TILE_FWK_OUTPUT_DIR"] = str(folder)
    os.environ["PYPTO_HOME"] = str(folder / "home")
    os.environ["TILEFWK_CONFIG_PATH"] = str(_config(folder))
    toolchain.import_pypto()
    return folder


def interpret(kernel: Callable[..., None], tensors: tuple[Tensor, ...]) -> Passes:
    """Run a kernel that was built with `options()` on CPU tensors; its outputs are written."""
    output = start()
    import pypto

    _load_calculator()
    kernel._setup_verify_data = _set_tensors  # type: ignore[attr-defined]  # of this kernel; not of the class
    before = set(output.glob("output_*/verify_*"))
    kernel(*tensors)
    ctypes.CDLL(None).fflush(None)  # the results are still in a buffer of the library
    passed, failed = Counter[str](), Counter[str]()
    for folder in set(output.glob("output_*/verify_*")) - before:
        with open(folder / "verify_result_brief.csv") as rows:
            for row in DictReader(rows):
                (passed if row["verifyResult"] == "PASS" else failed)[row["passName"]] += 1
        shutil.rmtree(folder)
    pypto.reset_options()
    return Passes(passed, failed)


def options(passes: tuple[str, ...] = LAST_PASS, stitch: int = STITCH) -> dict[str, Any]:
    """Options of pypto.frontend.jit for a kernel to interpret."""
    return cost_options(stitch) | {
        "verify_options": {
            "enable_pass_verify": True,
            "pass_verify_save_tensor": False,
            "pass_verify_pass_filter": list(passes),
        },
        "use_cache": False,
    }


def cost_options(stitch: int = STITCH) -> dict[str, Any]:
    """Options for a kernel to put through the cost model."""
    return {"runtime_options": toolchain.runtime_options(stitch, simulated=True)}


def _config(folder: Path) -> Path:
    """The wheel's configuration without the pictures that it draws after each simulation (most of the time)."""
    original = Path(str(distribution("pypto").locate_file("pypto"))) / "lib/configs/tile_fwk_config.json"
    config = json.loads(original.read_text())
    config["global"]["simulation"]["args"].append("Model.drawPngThresholdCycle=0")
    path = folder / "tile_fwk_config.json"
    path.write_text(json.dumps(config))
    return path


def _set_tensors(pto_tensors: list[Any]) -> None:
    from pypto import pypto_impl
    from pypto.frontend.parser.entry import _pto_to_tensor_data
    from pypto.runtime import _pto_verify_datas

    pypto_impl.SetVerifyData(_pto_to_tensor_data(pto_tensors), [], _pto_verify_datas.get_data())


@cache
def _load_calculator() -> None:
    """The interpreter's arithmetic, a library that the wheel builds against the installed torch: once, then kept."""
    from pypto._utils import BuildOnlineManager

    name = f"calculator-pypto{version('pypto')}-torch{torch.__version__}"
    library = _cache_folder() / name / "lib/libtile_fwk_calculator.so"
    if not library.exists():
        library.parent.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent.parent.parent) as build:
            _build_calculator(Path(build))
            with suppress(OSError):  # another process was faster
                os.rename(Path(build) / "install", library.parent.parent)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    BuildOnlineManager().calculator_loaded = True


def _build_calculator(folder: Path) -> None:
    from pypto._utils import BuildOnlineManager

    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise toolchain.Missing(f"npu simulator: {tool} must be installed to build pypto's calculator, got none")
    manager = BuildOnlineManager()
    context = BuildOnlineManager._CMakeContext.CompileContext(
        src_dir=manager.pkg_lib_dir / "calculator", tmp_dir=folder
    )
    context.cfg_cmd_ext = (
        f"-DPY3_MOD_TORCH_VERSION={torch.__version__} -DPY3_MOD_TORCH_ROOT_PATH={Path(torch.__file__).parent} "
        f"-DPY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    )
    BuildOnlineManager._CMakeContext().compile(ctx=context)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu_moe_ops"
