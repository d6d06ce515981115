"""Weight patches (LoRA) of a MODEL on their way to the shards, and LoRA files as patches of a MODEL."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ..core.errors import UnsupportedError
from ..core.lora.adapters import Adapter
from ..core.lora.patch import Patch
from . import seams

log = logging.getLogger("comfy_tp.nodes")

# Kind of adapter -> what ComfyUI's class keeps in its `weights`, in order. "alpha" and "reshape" are no tensors.
WEIGHTS: dict[str, tuple[str, ...]] = {
    "lora": ("up", "down", "alpha", "mid", "dora_scale", "reshape"),
    "loha": ("w1_a", "w1_b", "alpha", "w2_a", "w2_b", "t1", "t2", "dora_scale"),
    "lokr": ("w1", "w2", "alpha", "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
}
ADVICE = "Remove the node that sets it, or load the model with the stock loader"


def push_patches(patcher: Any) -> None:
    """Make the shards carry exactly the weight patches of `patcher`; does nothing when they already do.

    Called after every load and whenever another clone of the MODEL is used. Raises `UnsupportedError` for patches that
    shards cannot carry and `InputError` for those of another model; the shards then keep what they had.
    """
    remote = patcher.sharded.require()
    wanted = patcher.patches_uuid if patcher.patches else None
    if remote.patches_key == wanted:
        return
    if wanted is not None:
        seams.require(seams.LORA)
    patches = list(patches_of(patcher.patches))
    poll = comfy.model_management.throw_exception_if_processing_interrupted
    report = remote.set_patches(patches, poll=poll)
    remote.patches_key = wanted
    if report.unmatched:
        shown = ", ".join(report.unmatched[:3])
        log.warning("%d LoRA patches fit no weight of the model, first %s", len(report.unmatched), shown)
    log.info(
        "Applied %d LoRA patches to the shards in %.2f s: %d weights merged, %d with a side path",
        report.applied,
        report.seconds,
        report.merged,
        report.side,
    )


def patches_of(patches: Mapping[str, Iterable[tuple]]) -> Iterator[Patch]:
    """What a ModelPatcher's `patches` mean: {key: [(strength, adapter, strength_model, offset, function), ...]}.

    Raises `UnsupportedError`, naming what it is and the weight, for an adapter or function that shards cannot carry.
    """
    for key, lines in patches.items():
        for strength, adapter, strength_model, offset, function in lines:
            yield Patch(
                key,
                adapter_of(adapter, key),
                strength,
                strength_model,
                tuple(offset) if offset is not None else None,
                swaps_halves(function, key),
            )


def adapter_of(value: Any, key: str) -> Adapter:
    """ComfyUI's adapter object or tuple for the weight `key` as an `Adapter`. Raises `UnsupportedError`."""
    import comfy.weight_adapter

    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        names = WEIGHTS.get(value.name)
        if names is None:
            raise UnsupportedError(
                f"'{key}' has a {type(value).__name__} ('{value.name}'), which shards cannot carry. Kinds that they can: "
                f"{', '.join(WEIGHTS)}, with DoRA, and differences. {ADVICE}."
            )
        parts = {name: part for name, part in zip(names, value.weights, strict=True) if part is not None}
        alpha, reshape = parts.pop("alpha", None), parts.pop("reshape", None)
        return Adapter(
            value.name,
            parts,
            float(alpha) if alpha is not None else None,
            tuple(reshape) if reshape is not None else None,
        )
    if isinstance(value, list):
        raise UnsupportedError(
            f"'{key}' is merged with a weight of another model (a ModelMerge node), which shards cannot do. {ADVICE}."
        )
    kind, parts = ("diff", value) if len(value) == 1 else value
    if kind == "diff":
        padded = len(parts) > 1 and parts[1].get("pad_weight")
        return Adapter("diff", {"diff": parts[0]}, reshape=tuple(parts[0].shape) if padded else None)
    if kind == "set":
        return Adapter("set", {"value": parts[0]})
    raise UnsupportedError(f"'{key}' has a patch of the kind '{kind}', which shards cannot carry. {ADVICE}.")


def swaps_halves(function: Any, key: str) -> bool:
    """Whether a patch's `function` exchanges scale and shift; any other one is refused."""
    if function is None:
        return False
    if function is getattr(comfy.utils, "swap_scale_shift", None):
        return True
    name = getattr(function, "__qualname__", type(function).__name__)
    raise UnsupportedError(
        f"'{key}' has a patch with the function '{name}', which shards cannot run. {ADVICE}."
    )


def comfy_patches(patches: Iterable[Patch], prefix: str) -> list[dict[Any, Any]]:
    """`patches` as ComfyUI's `add_patches` takes them, in as many sets as keep every patch (a set has one per key)."""
    sets: list[dict[Any, Any]] = []
    for patch in patches:
        key: Any = prefix + patch.key
        if patch.swapped:
            key = (key, patch.offset, comfy.utils.swap_scale_shift)
        elif patch.offset is not None:
            key = (key, patch.offset)
        held = next((one for one in sets if key not in one), None)
        if held is None:
            held = {}
            sets.append(held)
        held[key] = comfy_adapter(patch.adapter)
    return sets


def comfy_adapter(adapter: Adapter) -> Any:
    """`adapter` as ComfyUI's own object or tuple."""
    import comfy.weight_adapter

    names = WEIGHTS.get(adapter.kind)
    if names is None:
        return adapter.kind, tuple(adapter.tensors.values())
    made = next(one for one in comfy.weight_adapter.adapters if one.name == adapter.kind)
    parts: dict[str, torch.Tensor | float | list[int] | None] = dict(adapter.tensors)
    parts["alpha"] = adapter.alpha
    parts["reshape"] = list(adapter.reshape) if adapter.reshape is not None else None
    return made(set(), tuple(parts.get(name) for name in names))
