"""The way onto the NPU: dispatch key PrivateUse1. No kernel is there yet, and no slow stand-in takes its place."""

from collections.abc import Callable
from typing import NoReturn


def missing(op: str, piece: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"{op}: npu_moe_ops has no {piece} yet; tensors on 'npu' cannot be used here. "
            f"Move them to the CPU, where every op of npu_moe_ops runs"
        )

    return refuse
