"""Shard a model that is whole in memory, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .errors import ConfigError, UnsupportedError
from .guards import guard
from .models import Architecture, architecture_of
from .tp.agreement import check_weights
from .tp.apply import apply_plan, is_sharded
from .tp.collectives import Ranks
from .tp.config import TensorParallelConfig
from .tp.plan import ResolvedPlan, check_heads, resolve_plan


def resolve(
    model: nn.Module, config: TensorParallelConfig, architecture: Architecture | None = None
) -> ResolvedPlan:
    """Check heads and blocks of `model` for `config` and resolve its plan. Nothing is changed (R3, R32, R33).

    `model` may be on the meta device. Raises `PlanError`.
    """
    architecture = architecture or architecture_of(type(model))
    check_heads(architecture.heads(getattr(model, "config", {})), config.tp_degree, type(model).__name__)
    return resolve_plan(model, architecture.plan_of(model), config.tp_degree)


def enable_parallelism(
    model: nn.Module, *, config: Any, device: torch.device | str | None = None
) -> nn.Module:
    """Shard a `model` that is whole in memory on every rank, in place, and move it to this rank's device (R2).

    `config` is our `TensorParallelConfig` or diffusers'. Every check runs before anything is changed. Raises
    `PlanError` for a degree or plan that does not fit, `ConfigError` for a missing process group or an unusable
    device, `UnsupportedError` for a quantised, offloaded, adapter-wrapped or already sharded model (R17-R19).
    """
    config = TensorParallelConfig.of(config)
    check_model_state(model)
    architecture = architecture_of(type(model))
    plan = resolve(model, config, architecture)
    ranks = Ranks.of(config, device)
    if ranks.degree > 1:
        check_weights(ranks, model)
    apply_plan(model, plan, ranks, architecture)
    guard(model, ranks)
    return model.to(ranks.device)


def check_model_state(model: nn.Module) -> None:
    """Refuse a model in memory whose parameters are not plain and its own (R17-R19)."""
    name = type(model).__name__
    if is_sharded(model):
        raise UnsupportedError(f"'{name}' is already sharded. Load it again to shard it at another degree.")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedError(
            f"'{name}' is quantised in memory and cannot be sharded. Load it without `quantization_config`; fp8 "
            f"checkpoints are sharded while they are read."
        )
    if any(hasattr(module, "_hf_hook") for module in model.modules()) or getattr(
        model, "hf_device_map", None
    ):
        raise UnsupportedError(
            f"'{name}' has offloading hooks and cannot be sharded. Load it without device_map and CPU offload."
        )
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hooks = list(getattr(registry, "hooks", {})) if registry is not None else []
        if any("offload" in hook for hook in hooks):
            raise UnsupportedError(
                f"'{name}' uses group offloading and cannot be sharded. Turn the offloading off."
            )
        if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):
            raise UnsupportedError(
                f"'{name}' carries LoRA adapters. Fuse and unload them first, or shard the plain model and apply the "
                f"LoRA to the shards."
            )
    meta = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ConfigError(
            f"Parameter '{meta}' of '{name}' has no data (meta device). Load the weights first."
        )
