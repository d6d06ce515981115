"""A model without weights: built on the meta device from its configuration, then filled with a rank's tensors."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, TPError
from ..wording import cause
from . import fp8
from .collectives import Ranks
from .linear import ReplicatedLinear, ShardedLinear
from .plan import ResolvedPlan

# What torch says when the host has no memory, and how many times the bytes of a stored tensor (F4) it has in float32.
ALLOCATION = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
WIDEST = 8
DAMAGED = "The file is damaged or of another model; download it again."

_REGISTERING = threading.Lock()  # one thread at a time replaces nn.Module.register_parameter


def build_skeleton(model_class: type, config: Mapping[str, Any]) -> nn.Module:
    """The model of `config` with every parameter on the meta device; buffers are real, on the CPU."""
    with meta_parameters():
        return model_class.from_config(dict(config)).eval()  # type: ignore[attr-defined]


@contextlib.contextmanager
def building(name: str, source: str | Path, nbytes: int, remedy: str = DAMAGED) -> Iterator[None]:
    """Inside, what building the model class `name` from the settings in the file `source` raises is a `CheckpointError`.

    It names both and the cause, and ends with the sentence `remedy`. Refusals of ours pass as they are, and so does a
    lack of memory where a tensor of the model's `nbytes` bytes of weights could be as large as what was asked for.
    """
    try:
        yield
    except (TPError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        asked = ALLOCATION.search(str(error))
        if asked and int(asked[1]) <= WIDEST * nbytes:
            raise
        raise CheckpointError(f"{source} makes no {name} ({cause(error)}). {remedy}") from error


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, this thread's parameters move to the meta device as soon as a module registers them, uninitialised."""
    thread = threading.get_ident()
    with _REGISTERING:
        register = nn.Module.register_parameter

        def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(module, name, parameter)
            if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
                module._parameters[name] = nn.Parameter(
                    parameter.to("meta"), requires_grad=parameter.requires_grad
                )

        nn.Module.register_parameter = register_on_meta
        try:
            yield
        finally:
            nn.Module.register_parameter = register


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of `model` that a checkpoint holds."""
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def hold_fp8(model: nn.Module, path: str, scales: fp8.Scales, plan: ResolvedPlan, ranks: Ranks) -> None:
    """Make the Linear at `path` one that keeps its weight in fp8 with `scales`."""
    module = model.get_submodule(path)
    if not isinstance(module, ShardedLinear):
        specs = {name: plan.specs[f"{path}.{name}"] for name, _ in module.named_parameters(recurse=False)}
        parent, _, last = path.rpartition(".")
        module = ReplicatedLinear(module, specs, ranks)
        model.get_submodule(parent)._modules[last] = module
    module.scales = scales


def place(model: nn.Module, shards: Mapping[str, torch.Tensor]) -> None:
    """Put `shards` in place of the model's meta parameters and persistent buffers."""
    for name, tensor in shards.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[last] = tensor


def finish(model: nn.Module, device: torch.device) -> None:
    """Move the buffers that no checkpoint holds to `device`, and make sure that no parameter was left out."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise CheckpointError(f"No weights were read for {len(left)} parameters, first '{left[0]}'.")
