"""python -m npu_moe_ops.virtual_npu script.py ...: run a program for an Ascend NPU on a machine without one."""

import argparse
import runpy
import sys
from pathlib import Path
from types import TracebackType

from . import start, wheel
from .refused import Refused

PROGRAM = "python -m npu_moe_ops.virtual_npu"
NOT_THE_USERS = (__file__, runpy.__file__, "<frozen runpy>")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    command = arguments.module or arguments.script
    if not arguments.install and not command:
        parser.error("a script or -m module must be given")
    try:
        if arguments.install:
            print(f"torch_npu is in {wheel.install()}")
            return 0
        start()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _run(command, is_module=bool(arguments.module))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, usage=f"{PROGRAM} [--install | script.py ... | -m module ...]"
    )
    parser.add_argument("--install", action="store_true", help="put the torch_npu wheel where it is looked for")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script to run, and its arguments")
    return parser


def _run(command: list[str], is_module: bool) -> int:
    """As python would: its arguments, its first place to look for modules, its traceback."""
    sys.argv = command
    if not is_module:
        sys.path[0] = str(Path(command[0]).resolve().parent)
    try:
        if is_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except Exception as error:
        trace = _from_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that are ours or runpy's; all of them if there are no others."""
    step = trace
    while step is not None and step.tb_frame.f_code.co_filename in NOT_THE_USERS:
        step = step.tb_next
    return step or trace


if __name__ == "__main__":
    sys.exit(main())
