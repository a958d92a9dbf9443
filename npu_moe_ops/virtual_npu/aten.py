"""torch's own ops on 'npu': the CPU's kernels on the memory of the device.

torch_npu sends them to operators of CANN, which are not here. Every op that it has a kernel for is replaced, but
views and allocation, which are right as they are.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import device

KEPT = {  # allocation, geometry, and what waits for the device
    "_local_scalar_dense",
    "_pin_memory",
    "_resize_output_",
    "empty.memory_format",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
}
FROM_HOST = ("index", "_index", "_foreach_copy", "_unsafe_index", "tensor_split")  # take CPU tensors with npu ones
TRACERS = {"FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode", "PreDispatchTorchFunctionMode"}

_libraries: list[torch.library.Library] = []  # kernels live as long as their library


class Kernel:
    """One op of torch on npu tensors."""

    def __init__(self, op: torch._ops.OpOverload, compute: Callable[..., Any] | None = None) -> None:
        self.name = op.name().removeprefix("aten::")
        self.compute = compute or op
        arguments = op._schema.arguments
        self.writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        self.only_writes = self.writes and not op._schema.returns
        self.takes_generator = any(a.name == "generator" for a in arguments)
        self.random = self.takes_generator or torch.Tag.nondeterministic_seeded in op.tags
        self.mixes_devices = self.name.startswith(FROM_HOST)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = list(_leaves((args, kwargs)))
        capturing = device.capturing()
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.dim():
                if capturing:
                    raise device.spoil(f"aten::{self.name} takes a CPU tensor while a graph is being captured")
                if not self.mixes_devices:
                    raise RuntimeError(
                        f"aten::{self.name}: Expected all tensors to be on the same device, but found npu:0 and cpu"
                    )
        tensors = {id(leaf): leaf for leaf in leaves if _on_npu(leaf)}
        return self._record(tensors, args, kwargs) if capturing else self._run(tensors, args, kwargs)

    def _run(self, tensors: dict[int, Tensor], args: Any, kwargs: Any) -> Any:
        views = {key: device.view(tensor) for key, tensor in tensors.items()}
        shapes = {key: view.shape for key, view in views.items()}
        result = self._compute(*_map(lambda leaf: views.get(id(leaf), leaf), (args, kwargs)))
        if self.writes:
            for key, view in views.items():
                if view.shape != shapes[key]:  # an out= that had to grow
                    tensors[key].resize_(view.shape)
                    device.view(tensors[key]).copy_(view)
        originals = {id(view): tensors[key] for key, view in views.items()}
        return _map(lambda leaf: originals[id(leaf)] if id(leaf) in originals else _to_npu(leaf), result)

    def _record(self, tensors: dict[int, Tensor], args: Any, kwargs: Any) -> Any:
        """Results have the geometry that a meta kernel says; their values come with each replay."""
        metas = {key: _like(tensor, "meta") for key, tensor in tensors.items()}
        planned = self._plan(metas, args, kwargs)
        originals = {id(meta): tensors[key] for key, meta in metas.items()}
        fresh: list[device.Memory] = []

        def allocate(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in originals:
                return originals[id(leaf)]
            allocated = _like(leaf, "npu")
            fresh.append(device.Memory.of(allocated))
            return allocated

        result = _map(allocate, planned)
        kept = _map(lambda leaf: device.Memory.of(leaf) if _on_npu(leaf) else _constant(leaf), (args, kwargs))
        device.record(lambda: self._replay(kept, fresh))
        return result

    def _plan(self, metas: dict[int, Tensor], args: Any, kwargs: Any) -> Any:
        shapes = {key: meta.shape for key, meta in metas.items()}
        args, kwargs = _map(lambda leaf: metas[id(leaf)] if id(leaf) in metas else _moved(leaf, "meta"), (args, kwargs))
        try:
            planned = self.compute(*args, **kwargs)
        except Exception as error:
            if not (self.only_writes and isinstance(error, NotImplementedError)):
                raise device.spoil(f"aten::{self.name} cannot be captured: {error}") from error
            planned = None
        if any(metas[key].shape != shape for key, shape in shapes.items()):
            raise device.spoil(f"aten::{self.name} cannot be captured: it resizes an argument")
        return planned

    def _replay(self, kept: Any, fresh: list[device.Memory]) -> None:
        args, kwargs = _map(lambda leaf: leaf.view() if isinstance(leaf, device.Memory) else leaf, kept)
        arguments = {id(leaf) for leaf in _leaves((args, kwargs))}
        results = _leaves(self._compute(args, kwargs))
        new = [leaf for leaf in results if isinstance(leaf, Tensor) and id(leaf) not in arguments]
        for computed, memory in zip(new, fresh, strict=True):
            if computed.dtype != memory.dtype or tuple(computed.shape) != memory.shape:
                raise TypeError(
                    f"aten::{self.name}: captured as {memory.dtype} {list(memory.shape)}, "
                    f"got {computed.dtype} {list(computed.shape)}"
                )
            memory.view().copy_(computed)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        """On the CPU. Random numbers are those of the npu's generator, and leave the CPU's as it was."""
        if not self.random:
            args, kwargs = _map(lambda leaf: _moved(leaf, "cpu"), (args, kwargs))
            return self.compute(*args, **kwargs)
        given = next((leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)
        generator = _drawn_from(given)
        args, kwargs = _map(
            lambda leaf: generator if isinstance(leaf, torch.Generator) else _moved(leaf, "cpu"), (args, kwargs)
        )
        if self.takes_generator:
            return self.compute(*args, **({"generator": generator} | kwargs))
        before = torch.default_generator.get_state()
        try:
            torch.default_generator.set_state(generator.get_state())
            return self.compute(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)


def _leaves(tree: Any) -> Iterator[Any]:
    """Of the lists, tuples and dicts that an op takes and returns; torch's pytree takes longer than the op."""
    if isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _leaves(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _leaves(branch)
    else:
        yield tree


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(_map(function, branch) for branch in tree)
    if isinstance(tree, list):
        return [_map(function, branch) for branch in tree]
    if isinstance(tree, dict):
        return {name: _map(function, branch) for name, branch in tree.items()}
    return function(tree)


def install() -> int:
    """Returns the number of ops replaced."""
    if _libraries:
        return 0
    below = torch.library.Library("aten", "IMPL", "PrivateUse1")
    above = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    _libraries.extend((below, above))
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each op that it is replaced
        for op in _replaceable():
            name = op.name().removeprefix("aten::")
            below.impl(name, SPECIAL.get(name) or Kernel(op), allow_override=True)
            count += 1
            if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutogradPrivateUse1"):
                above.impl(name, _autograd(op), allow_override=True, with_keyset=True)
    return count


def _replaceable() -> list[torch._ops.OpOverload]:
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten" or name in KEPT:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "PrivateUse1"):
            continue
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "CPU"):
            continue
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and (name in SPECIAL or not _is_view(op)):
            found.append(op)
    return found


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def _autograd(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Instead of torch_npu's gradient, which is one of CANN's operators, the one that every other device has.

    While a graph is traced torch_npu's own code runs: it decides of which ops the graph consists.
    """
    original = torch.library.get_kernel(op, "AutogradPrivateUse1")
    usual = torch.library.get_kernel(op, "AutogradCPU")

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _tracing(tensors):
            return original.call_boxed(keys, *args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return usual.call_boxed(keys, *args, **kwargs)
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    return kernel


def _tracing(tensors: list[Tensor]) -> bool:
    """Not 'in any dispatch mode': the runtime of a compiled function has one of its own."""
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    return bool(modes & TRACERS) or any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors)


def _contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if _on_npu(target) and _on_npu(source):
        device.launch(lambda to, values: to.copy_(values), target, source)
    else:
        device.wait("a copy between host and device")
        host_target = device.view(target) if _on_npu(target) else target
        host_target.copy_(device.view(source) if _on_npu(source) else source)
    return target


def _to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    plan = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    plan = torch.empty_like(plan, memory_format=memory_format or torch.preserve_format)
    place = tensor.device if device is None else device
    return _copy(torch.empty_strided(plan.size(), plan.stride(), dtype=plan.dtype, device=place), tensor, non_blocking)


def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """The CPU's counts floats only."""
    counted = values if values.is_floating_point() else values.float()
    counts: Tensor = torch.ops.aten.histc.default(counted, bins, min, max)
    return counts.to(values.dtype)


SPECIAL: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "contiguous": _contiguous,
    "copy_": _copy,
    "histc": Kernel(torch.ops.aten.histc.default, _histc),
}


def _on_npu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "npu"


def _like(tensor: Tensor, place: str) -> Tensor:
    """Of the same geometry; made dense where elements of the tensor share memory."""
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)


def _to_npu(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    result = _like(leaf, "npu")
    if leaf.numel():
        device.view(result).copy_(leaf)
    return result


def _moved(leaf: Any, place: str) -> Any:
    """A device argument names where the stand-in computes."""
    if isinstance(leaf, torch.device) and leaf.type == "npu":
        return torch.device(place)
    return None if isinstance(leaf, torch.Generator) and leaf.device.type != place else leaf


def _constant(leaf: Any) -> Any:
    """A number in a CPU tensor is captured as it is now."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _drawn_from(generator: torch.Generator | None) -> torch.Generator:
    """A generator of the CPU for one op: the CPU's first numbers after a seed; later ones depend on seed and offset."""
    source = generator or device.default_generator()
    if source.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{source.device.type}'")
    seed, offset = source.initial_seed(), source.get_offset()
    source.set_offset(offset + 4)  # the least that torch's generators move by
    return torch.Generator().manual_seed((seed + offset * 0x9E3779B97F4A7C15) % 2**63)
