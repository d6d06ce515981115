"""What `comfy-tp verify` asks of the ranks: sharded against unsharded, on an example or on a model on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.files import Checkpoint, resolve_source
from ..load import OpenedModel, load_opened, open_model
from ..models import architecture_named
from ..planning.compare import (
    Comparison,
    Recording,
    compare_on_ranks,
    compare_sharded,
    example_inputs,
    example_model,
    moved,
    plan_from_json,
    resolved_for,
)
from ..ranks.context import RankContext
from ..tp.collectives import Ranks
from .call import Call, ranks_of


@dataclass
class VerifyExample(Call[dict[str, Any]], name="verify_example"):
    """Compare a small random model of a named architecture; the figures of `Comparison.as_dict`."""

    architecture: str
    example: str
    plan: dict[str, Any] | None
    dtype: str
    seed: int
    tolerance: float

    def run(self, rank: RankContext) -> dict[str, Any]:
        architecture = architecture_named(self.architecture)
        dtype = getattr(torch, self.dtype)
        ranks = ranks_of(rank)
        model = example_model(architecture, self.example, seed=self.seed, dtype=dtype).to(ranks.device)
        inputs = example_inputs(architecture, model.config, seed=self.seed, dtype=dtype, device=ranks.device)
        plan = plan_from_json(self.plan) if self.plan else None
        comparison = compare_on_ranks(model, inputs, ranks, architecture, plan=plan, tolerance=self.tolerance)
        return joined(rank, comparison)


@dataclass
class VerifyCheckpoint(Call[dict[str, Any]], name="verify_checkpoint"):
    """Compare a model on disk, read in shards, with the same read whole.

    Rank 0 alone holds the whole model, on `reference_device`, and frees it before the shards are read.
    """

    source: str
    reference_device: str
    dtype: str
    seed: int
    tolerance: float

    def run(self, rank: RankContext) -> dict[str, Any]:
        dtype = getattr(torch, self.dtype)
        ranks = ranks_of(rank)
        found = self._opened()
        inputs = example_inputs(found.architecture, found.skeleton.config, seed=self.seed, dtype=dtype)
        reference = self._reference(rank, found, inputs) if ranks.rank == 0 else None
        rank.gather(0)
        model, _ = load_opened(found, ranks, dtype=dtype)
        rank.progress("the sharded forward")
        comparison = compare_sharded(
            model, moved(inputs, ranks.device), ranks, tolerance=self.tolerance, reference=reference
        )
        return joined(rank, comparison)

    def _opened(self) -> OpenedModel:
        return open_model(Checkpoint.open(resolve_source(self.source)))

    def _reference(self, rank: RankContext, found: OpenedModel, inputs: dict[str, Any]) -> Recording:
        rank.progress("reading the whole model")
        device = torch.device(self.reference_device)
        whole, _ = load_opened(self._opened(), Ranks.single(device), dtype=getattr(torch, self.dtype))
        reference = Recording(whole, resolved_for(found.skeleton, found.architecture, rank.degree).styles)
        rank.progress("the unsharded forward")
        reference.run(moved(inputs, device))
        return reference


def joined(rank: RankContext, comparison: Comparison) -> dict[str, Any]:
    """Rank 0's comparison, with the first failure that any rank had."""
    for each, (failure, failed_in) in enumerate(rank.gather([comparison.failure, comparison.failed_in])):
        if failure is not None and comparison.failure is None:
            comparison.failure = f"on rank {each}: {failure}"
            comparison.failed_in = failed_in
    return comparison.as_dict()
