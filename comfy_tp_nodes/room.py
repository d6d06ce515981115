"""The room on the devices, where ComfyUI's view and that of the ranks differ: they are other processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import comfy.model_management
import torch

from .sharded import ShardedModel

NEAR = 12  # frames between a patcher and the load that it gives way for


def free_for_ranks(sharded: ShardedModel, device: Any) -> float:
    """Bytes that every rank of `sharded` can still take: the least over the ranks, of which those on one device share it.

    What ranks on other machines have is not known here; for them ComfyUI's own `device` speaks.
    """
    placement = sharded.placement
    if placement.address is not None:
        return comfy.model_management.get_free_memory(device)
    free = {name: _free_on(name) for name in set(placement.devices)}
    shares = [free[name] // placement.devices.count(name) for name in placement.devices]
    return min(map(sum, zip(shares, sharded.reserves, strict=True)))


def _free_on(name: str) -> int:
    if name == "cpu":
        return comfy.model_management.get_free_memory(torch.device(name))
    # Not by ComfyUI's own measure: what this process's torch keeps in reserve there is no room for the ranks.
    return torch.cuda.mem_get_info(name)[0]


def return_reserve(sharded: ShardedModel) -> None:
    """Give the devices back what ComfyUI's own process keeps in reserve there, before ranks load or compute on them.

    ComfyUI counts it as free when it makes room, which it is for itself alone.
    """
    if sharded.placement.address is None and set(sharded.placement.devices) != {"cpu"}:
        comfy.model_management.soft_empty_cache()


def needed_by_streaming() -> float | None:
    """Bytes that ComfyUI cannot do without while it makes room for models that stream their weights (DynamicVRAM).

    It asks for the room of all their weights, and says to models that are no such ones neither whom it asks for nor what
    would do. So its load is looked at where it stands on the stack. None where it makes room for anything else, or where
    its load no longer looks as it does today: then what it asks for is needed.
    """
    for frame in _callers():
        code = frame.f_code
        if code.co_name == "load_models_gpu" and frame.f_globals is vars(comfy.model_management):
            if not frame.f_locals.get("free_for_dynamic") or comfy.model_management.DISABLE_SMART_MEMORY:
                return None
            return frame.f_locals.get("minimum_memory_required")
    return None


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(NEAR):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
