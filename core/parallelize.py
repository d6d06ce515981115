"""Put a resolved plan onto a model: planned Linears become sharded ones, in place. Also shards a model in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .agreement import check_weights
from .config import TensorParallelConfig
from .errors import ConfigError, PlanError, UnsupportedError
from .guards import guard
from .linear import layer_class
from .models import Architecture, architecture_of
from .plan import LinearStyle, ResolvedPlan, check_heads, resolve_plan
from .ranks import Ranks


class ShardedState:
    """What a sharded model knows of itself, kept on it as `model.tensor_parallel`. `patched`: LoRAs are in place."""

    def __init__(self, architecture: Architecture, plan: ResolvedPlan, ranks: Ranks):
        self.architecture = architecture
        self.plan = plan
        self.ranks = ranks
        self.compute_dtype: torch.dtype | None = None
        self.patched = False


def resolve(
    model: nn.Module, config: TensorParallelConfig, architecture: Architecture | None = None
) -> ResolvedPlan:
    """Check heads and blocks of `model` for `config` and resolve its plan. Nothing is changed (R3, R32, R33).

    `model` may be on the meta device. Raises `PlanError`.
    """
    architecture = architecture or architecture_of(type(model))
    check_heads(architecture.heads(getattr(model, "config", {})), config.tp_degree, type(model).__name__)
    return resolve_plan(model, architecture.plan_of(model), config.tp_degree)


def apply_plan(model: nn.Module, plan: ResolvedPlan, ranks: Ranks, architecture: Architecture) -> nn.Module:
    """Replace the planned modules of `model` by this rank's sharded ones and bind the architecture's forwards.

    Meta parameters stay on meta with their local shapes; parameters in memory are sliced. Degree 1 changes nothing.
    """
    if ranks.degree > 1:
        layers: dict[int, nn.Module] = {}
        for path, style in plan.styles.items():
            module = model.get_submodule(path)
            names = [name for name, _ in module.named_parameters(recurse=False)]
            specs = {name: plan.specs[f"{path}.{name}" if path else name] for name in names}
            if isinstance(style, LinearStyle):
                layers[id(module)] = layer_class(style)(module, specs, ranks)
            else:
                layers[id(module)] = style.local(module, specs, ranks)
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if id(child) in layers:
                    parent._modules[name] = layers[id(child)]
        architecture.bind(model, ranks)
    model.tensor_parallel = ShardedState(architecture, plan, ranks)
    return model


def is_sharded(model: Any) -> bool:
    """Whether `model` has been sharded by us or by diffusers."""
    config = getattr(model, "_parallel_config", None)
    by_diffusers = config is not None and getattr(config, "tensor_parallel_config", None) is not None
    return getattr(model, "tensor_parallel", None) is not None or by_diffusers


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


__all__ = [
    "PlanError",
    "ShardedState",
    "apply_plan",
    "check_model_state",
    "enable_parallelism",
    "is_sharded",
    "resolve",
]
