"""Put a resolved plan onto a model: planned Linears become sharded ones, in place."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from .collectives import Ranks
from .linear import layer_class
from .plan import LinearStyle, ResolvedPlan


class Architecture(Protocol):
    """What a sharded model's architecture does with it; the rest of it is none of the shards' business."""

    @property
    def layouts(self) -> tuple[Any, ...]: ...

    def bind(self, model: nn.Module, ranks: Ranks) -> None: ...

    def merged(self, model: nn.Module) -> int: ...


class ShardedState:
    """What a sharded model knows of itself, kept on it as `model.tensor_parallel`. `patched`: LoRAs are in place."""

    def __init__(self, architecture: Architecture, plan: ResolvedPlan, ranks: Ranks):
        self.architecture = architecture
        self.plan = plan
        self.ranks = ranks
        self.compute_dtype: torch.dtype | None = None
        self.patched = False

    def all_reduces(self, model: nn.Module) -> int:
        """How many all-reduces one forward of `model` makes, by its plan."""
        return self.plan.all_reduces - self.architecture.merged(model) if self.ranks.degree > 1 else 0


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
