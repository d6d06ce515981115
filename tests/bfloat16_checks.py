"""bfloat16 against float32, sharded and not: the small models of every architecture. See ranks_harness."""

from __future__ import annotations

import functools
from typing import Any

import torch
from installed import examples
from torch import nn

from comfy_tp.core.models import architecture_named
from comfy_tp.core.planning.compare import example_inputs, example_model, resolved_for, tensors_of
from comfy_tp.core.tp.apply import apply_plan
from comfy_tp.core.tp.collectives import Ranks


def before_fork() -> None:
    """The unsharded runs, once for all ranks and degrees."""
    torch.set_num_threads(1)
    for name, example in examples():
        unsharded(name, example)


@functools.cache
def unsharded(name: str, example: str) -> tuple[torch.Tensor, float]:
    """The float32 output of a whole model, and how far its bfloat16 self is from it (relative L2)."""
    exact = output(example_model(architecture_named(name), example), name, torch.float32)
    model = example_model(architecture_named(name), example, dtype=torch.bfloat16)
    return exact, relative(output(model, name, torch.bfloat16), exact)


def sharded(ranks: Ranks, name: str, example: str) -> dict[str, Any]:
    """The same distance of the sharded bfloat16 model."""
    known = architecture_named(name)
    exact, own = unsharded(name, example)
    model = example_model(known, example, dtype=torch.bfloat16)
    apply_plan(model, resolved_for(model, known, ranks.degree), ranks, known)
    found = output(model, name, torch.bfloat16)
    return {"unsharded": own, "sharded": relative(found, exact)}


def output(model: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """All that one forward puts out, flat, in float32.

    Numbers per sample (timestep, guidance) become powers of two: models multiply them by 1000 in their own dtype and
    take sines of the product, so that with others the rounding of one product would hide all that follows.
    """
    inputs = example_inputs(architecture_named(name), model.config, dtype=dtype)
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 1:
            inputs[key] = value.log2().floor().exp2()
    with torch.no_grad():
        return torch.cat([part.flatten() for part in tensors_of(model(**inputs, return_dict=False))])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
