"""What the ranks of the tests execute: see ranks_harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from installed import examples
from torch import nn

from comfy_tp.core.models import architecture_named
from comfy_tp.core.planning.compare import TOLERANCE, compare_on_ranks, example_inputs, example_model
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.linear import ColwiseLinear, RowwiseLinear
from comfy_tp.core.tp.norm import RMSNormAcrossRanks
from comfy_tp.core.tp.plan import PackedColwiseParallel, Rowwise, Style, Submodule
from comfy_tp.core.tp.shard import ShardSpec


def before_fork() -> None:
    """One forward of one model: diffusers imports most of itself on first use."""
    known = architecture_named("flux")
    model = example_model(known, "schnell")
    with torch.no_grad():
        model(**example_inputs(known, model.config))
    for name, example in examples():
        architecture_named(name).load_class(architecture_named(name).examples[example])


def architecture(ranks: Ranks, name: str, example: str, dtype: str = "float32") -> dict[str, Any]:
    """A small model of an architecture against its unsharded self."""
    known = architecture_named(name)
    kind = getattr(torch, dtype)
    model = example_model(known, example, dtype=kind)
    inputs = example_inputs(known, model.config, dtype=kind)
    return compare_on_ranks(model, inputs, ranks, known, tolerance=1e-6).as_dict()


class BiasOnEveryRank(RowwiseLinear):
    """A wrong layer: the bias is added before the reduce, so it arrives once per rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(self.product(x, self.bias))


@dataclass(frozen=True)
class WrongRowwise(Style):
    """Row-wise in everything but the moment of the bias."""

    reduces = 1

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        return Rowwise().specs(submodule, degree)

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        return BiasOnEveryRank(module, dict(specs), ranks)


@dataclass(frozen=True)
class ExchangedHalves(Style):
    """A gated feed-forward whose gate and up rows are taken in the other order."""

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        return PackedColwiseParallel((1, 1)).specs(submodule, degree)

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        layer = ColwiseLinear(module, dict(specs), ranks)
        gate, up = layer.weight.data.chunk(2, dim=0)
        layer.weight.data = torch.cat([up, gate])
        return layer


@dataclass(frozen=True)
class NormOfOwnWidth(Style):
    """A norm over all heads that looks at this rank's alone."""

    reduces = 0

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        return RMSNormAcrossRanks().specs(submodule, degree)

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        norm = nn.RMSNorm(specs["weight"].local_shape, eps=module.eps)
        norm.weight.data = specs["weight"].shard(module.weight.data, ranks.rank)
        return norm


# Changes to the right plan of an architecture, each of them wrong. None takes an entry out.
WRONG_PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "col and row swapped": (
        "flux2",
        {
            "transformer_blocks.*.ff.linear_in": "rowwise",
            "transformer_blocks.*.ff.linear_out": "colwise",
        },
    ),
    "packed treated as plain": ("flux2", {"transformer_blocks.*.ff.linear_in": "colwise"}),
    "packed rows treated as plain": ("flux", {"single_transformer_blocks.*.proj_out": "rowwise"}),
    "bias added on every rank": ("flux", {"transformer_blocks.*.ff.net.2": WrongRowwise()}),
    "gate and up exchanged": ("flux2", {"transformer_blocks.*.ff_context.linear_in": ExchangedHalves()}),
    "norm over the local width": (
        "wan",
        {"blocks.*.attn1.norm_q": NormOfOwnWidth(), "blocks.*.attn1.norm_k": NormOfOwnWidth()},
    ),
    "rotary angles not cut": ("ltx2", {"rope": None, "audio_rope": None}),
    "whole input of a row-wise layer": (
        "flux",
        {"transformer_blocks.*.attn.to_out.0": "rowwise_split_input"},
    ),
}


def wrong_plan(ranks: Ranks, case: str) -> dict[str, Any]:
    """A small model sharded by a plan with one mistake, compared as `comfy-tp verify` does."""
    name, changes = WRONG_PLANS[case]
    known = architecture_named(name)
    if name in ("flux2", "wan", "ltx2"):
        # The merged reduces need the layers that the right plan puts there.
        known = replace(known, bind=lambda model, ranks: None, merged=lambda model: 0)
    model = example_model(known, next(iter(known.examples)))
    inputs = example_inputs(known, model.config)
    plan = {key: style for key, style in {**known.plan, **changes}.items() if style is not None}
    return compare_on_ranks(
        model, inputs, ranks, known, plan=plan, tolerance=TOLERANCE[torch.float32]
    ).as_dict()
