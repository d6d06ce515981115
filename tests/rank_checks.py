"""What the ranks of the tests execute: see ranks_harness."""

from __future__ import annotations

from typing import Any

import torch

from comfy_tp.core.models import ARCHITECTURES, architecture_named
from comfy_tp.core.ranks import Ranks
from comfy_tp.core.verify import compare_on_ranks, example_inputs, example_model


def before_fork() -> None:
    """One forward of one model: diffusers imports most of itself on first use."""
    known = architecture_named("flux")
    model = example_model(known, "schnell")
    with torch.no_grad():
        model(**example_inputs(known, model.config))
    for name in ARCHITECTURES:
        architecture_named(name).load_class()


def architecture(ranks: Ranks, name: str, example: str, dtype: str = "float32") -> dict[str, Any]:
    """A small model of an architecture against its unsharded self."""
    known = architecture_named(name)
    kind = getattr(torch, dtype)
    model = example_model(known, example, dtype=kind)
    inputs = example_inputs(known, model.config, dtype=kind)
    return compare_on_ranks(model, inputs, ranks, known, tolerance=1e-6).as_dict()
