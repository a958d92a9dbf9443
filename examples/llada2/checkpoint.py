"""Checkpoints as they are published: config.json and safetensors, in shards with an index."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from config import Config
from model import LLaDA2MoeModelLM
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
CONFIG = "config.json"


def save(model: LLaDA2MoeModelLM, folder: Path | str, max_shard_size: int = 5 * 10**9) -> None:
    """Write config.json, shards of at most max_shard_size bytes (but of one tensor at least) and their index.

    Shards of an earlier checkpoint in the folder are removed once the new one is there.

    Raises:
        ValueError: max_shard_size is below 1.
    """
    if max_shard_size < 1:
        raise ValueError(f"save: max_shard_size must be >= 1 byte, got {max_shard_size}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = {*folder.glob("model-*-of-*.safetensors"), folder / WHOLE}
    state, shards, room = model.state_dict(), [[]], max_shard_size
    for key, tensor in state.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_size
        shards[-1].append(key)
        room -= tensor.nbytes
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    for name, keys in zip(names, shards, strict=True):
        # Under another name first: a model may be loaded from the file of that name.
        save_file({key: state[key].contiguous() for key in keys}, folder / f"{name}.new", metadata={"format": "pt"})
    for name in names:
        (folder / f"{name}.new").replace(folder / name)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())},
        "weight_map": {key: name for name, keys in zip(names, shards, strict=True) for key in keys},
    }
    model.config.to_json(folder / CONFIG)
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for path in old - {folder / name for name in names}:
        path.unlink(missing_ok=True)


def load(
    folder: Path | str,
    experts: str = "npu_moe",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LLaDA2MoeModelLM:
    """A model from a folder; it is filled tensor by tensor, so that it is never in memory twice.

    Args:
        folder: with config.json and model.safetensors.index.json, or model.safetensors.
        experts: see LLaDA2MoeModelLM.
        device: where the model goes.
        dtype: of the weights; None: that of the checkpoint's embeddings. The experts' bias stays in fp32.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: keys are missing or too many, or a shape is not what config.json says.
    """
    folder = Path(folder)
    config = Config.from_json(folder / CONFIG)
    with torch.device("meta"):
        model = LLaDA2MoeModelLM(config, experts)
    files = _files(folder)
    _check_keys(folder, set(model.state_dict()), {key for keys in files.values() for key in keys})
    if dtype is None:
        dtype = _dtype_of(folder, files, "model.word_embeddings.weight")
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            model.get_submodule(name.rpartition(".")[0]).expert_bias = buffer.float()
    model.to_empty(device=device)
    places = model.state_dict()  # views of the parameters, also of packed ones
    for name, keys in files.items():
        with safe_open(folder / name, framework="pt") as shard:
            for key in keys:
                tensor = shard.get_tensor(key)
                if tensor.shape != places[key].shape:
                    raise ValueError(
                        f"{folder / name}: {key} must be {list(places[key].shape)}, as config.json says, "
                        f"got {list(tensor.shape)}"
                    )
                places[key].copy_(tensor)
    return model.eval()


def _files(folder: Path) -> dict[str, list[str]]:
    """Keys by the file that has them."""
    files: dict[str, list[str]] = defaultdict(list)
    if (folder / INDEX).exists():
        for key, name in json.loads((folder / INDEX).read_text())["weight_map"].items():
            files[name].append(key)
    elif (folder / WHOLE).exists():
        with safe_open(folder / WHOLE, framework="pt") as shard:
            files[WHOLE] = list(shard.keys())
    else:
        raise FileNotFoundError(f"{folder}: {INDEX} or {WHOLE} must be there, but neither is")
    for name in files:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name}: {INDEX} names it, but it is not there")
        with safe_open(folder / name, framework="pt") as shard:
            lost = set(files[name]) - set(shard.keys())
        if lost:
            raise ValueError(f"{folder / name}: must hold what {INDEX} says, but lacks {_some(lost)}")
    return files


def _check_keys(folder: Path, wanted: set[str], got: set[str]) -> None:
    if wanted - got:
        raise ValueError(f"{folder}: must hold every weight of the model, but lacks {_some(wanted - got)}")
    if got - wanted:
        raise ValueError(f"{folder}: must hold weights of the model only, but has {_some(got - wanted)}")


def _some(keys: set[str]) -> str:
    few = ", ".join(sorted(keys)[:4])
    return few + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _dtype_of(folder: Path, files: dict[str, list[str]], key: str) -> torch.dtype:
    name = next(name for name, keys in files.items() if key in keys)
    with safe_open(folder / name, framework="pt") as shard:
        return shard.get_tensor(key).dtype
