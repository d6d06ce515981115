"""What a sharded model answers differently: saving gathers its shards, and what it cannot honour is refused by name.

Bound onto the one model, not its class, so that unsharded models of the class stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .errors import ConfigError, UnsupportedError
from .tp.agreement import guard_inputs
from .tp.collectives import Ranks
from .tp.shard import ShardSpec

# Method of a diffusers model -> why a sharded one cannot honour it, and what to do.
REFUSED = {
    "enable_group_offload": "be offloaded: each rank holds its shards on its own device alone. Raise `tp_degree` to "
    "hold less per rank",
    "enable_layerwise_casting": "be cast layer by layer. Load it in the dtype it shall be stored in; fp8 checkpoints "
    "are sharded as they are",
    "fuse_qkv_projections": "fuse its projections: the shards of q, k and v are laid out apart. Leave them unfused",
    "load_lora_adapter": "take a PEFT adapter. Apply the LoRA to the shards (comfy_tp.core.lora), or fuse it into the "
    "weights and unload it before sharding",
    "add_adapter": "take a PEFT adapter. Apply the LoRA to the shards (comfy_tp.core.lora), or fuse it into the "
    "weights and unload it before sharding",
    "enable_parallelism": "be sharded again. Load it again to shard it at another degree",
}
SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*$", re.IGNORECASE)


def guard(model: nn.Module, ranks: Ranks) -> None:
    """Bind the saving, the refusals (R17-R20) and the check of the inputs onto a freshly sharded `model`."""
    bound: Any = model
    if ranks.degree == 1:
        if any(getattr(module, "scales", None) is not None for module in model.modules()):
            # The model's own would leave the scales of its fp8 weights out; ours refuses.
            bound.save_pretrained = types.MethodType(_save, model)
        return
    name = type(model).__name__
    for method, reason in REFUSED.items():
        if hasattr(model, method):
            setattr(model, method, _refusal(name, reason))
    bound.save_pretrained = types.MethodType(_save, model)
    # diffusers' pipelines and loaders recognise a tensor-parallel model by this attribute and refuse to offload it.
    bound._parallel_config = SimpleNamespace(
        tensor_parallel_config=SimpleNamespace(tp_degree=ranks.degree, mesh=None),
        context_parallel_config=None,
    )
    guard_inputs(model, ranks)


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike, *, max_shard_size: int | str = "10GB"
) -> None:
    """Write the full model of a sharded one into `folder`, as plain diffusers reads it back. Every rank calls it.

    Shards are gathered one tensor at a time, and rank 0 writes. `max_shard_size` is the largest file, in bytes or
    like "5GB".
    """
    from .checkpoint.writer import save_pretrained as write

    shards, specs, config = saved_state(model)
    quantised = [name for name, tensor in shards.items() if tensor.element_size() == 1]
    if quantised:
        raise UnsupportedError(
            f"A {type(model).__name__} that holds fp8 weights cannot be saved as a plain checkpoint "
            f"('{quantised[0]}'). Keep the file that it was loaded from, or save the shards with save_shards."
        )
    ranks: Ranks = model.tensor_parallel.ranks
    with ranks.on_device():
        write(
            folder,
            shards,
            specs,
            rank=ranks.rank,
            degree=ranks.degree,
            group=ranks.group,
            config=config,
            max_shard_bytes=byte_count(max_shard_size),
        )


def saved_state(
    model: nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, ShardSpec], dict[str, Any]]:
    """What a save of a sharded `model` is made of: this rank's tensors, their layouts, and the configuration.

    Raises `UnsupportedError` while LoRA patches are on the shards, or when the model has no configuration.
    """
    name = type(model).__name__
    state = model.tensor_parallel
    if state.patched:
        raise UnsupportedError(
            f"'{name}' has LoRA patches on its shards, some of them merged into the weights, so it cannot be saved. "
            f"Remove them (`WeightPatches.set([])`), save, and apply them again."
        )
    if not hasattr(model, "to_json_string"):
        raise UnsupportedError(
            f"'{name}' has no configuration to save beside its weights: it is no diffusers model. Save its tensors "
            f"with `ShardSpec.gather`."
        )
    shards = dict(model.state_dict())
    specs = dict(state.plan.specs)
    for buffer, tensor in model.named_buffers():
        if buffer in shards:
            specs.setdefault(buffer, ShardSpec.replicated(tensor.shape, state.ranks.degree))
    return shards, {tensor: specs[tensor] for tensor in shards}, json.loads(model.to_json_string())


def byte_count(size: int | str) -> int:
    """Bytes from a number of them or a text like "5GB" (powers of 1000) or "5GiB" (powers of 1024)."""
    if isinstance(size, int):
        return size
    found = SIZE.match(size)
    if found is None:
        raise ConfigError(f"`max_shard_size` must be a number of bytes or a text like '5GB', got {size!r}.")
    number, unit, binary = found.groups()
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def _refusal(name: str, reason: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"'{name}' is sharded with tensor parallelism, so it cannot {reason}.")

    return refuse


def _save(model: nn.Module, save_directory: str | os.PathLike, **options: Any) -> None:
    """`save_pretrained` as a method of the model. A bound one, so that a copy of the model saves its own weights."""
    size = options.pop("max_shard_size", "10GB")
    # Rank 0 alone writes, and only safetensors: these say what happens anyway.
    options.pop("is_main_process", None)
    if options.pop("safe_serialization", True) is not True or options:
        raise ConfigError(
            f"A sharded model is saved as safetensors, all ranks calling `save_pretrained(folder, "
            f"max_shard_size=...)`. Remove: {', '.join(sorted(options)) or 'safe_serialization=False'}."
        )
    save_pretrained(model, save_directory, max_shard_size=size)
