"""One model call, and the tensors that calls name by their keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ranks.context import RankContext
from .call import ModelCall
from .inputs import Input


@dataclass
class Keep(ModelCall[None], name="keep"):
    """Keep a conditioning or reference on the ranks under `key`, and drop the keys in `forget`."""

    key: int
    tensor: torch.Tensor
    forget: list[int]

    def run(self, rank: RankContext) -> None:
        self.held(rank).keep(self.key, self.tensor, self.forget)


@dataclass
class Forward(ModelCall[torch.Tensor], name="forward"):
    """One model call: velocity float32 in the shape of `x` [B, C, h, w] or [B, C, 1, h, w] at `timestep` [B]."""

    x: torch.Tensor
    timestep: torch.Tensor
    inputs: dict[str, Input]

    def run(self, rank: RankContext) -> torch.Tensor:
        rank.progress("forward")
        model = self.ready(rank)
        return model.velocity(self.x, self.timestep, model.resolved(self.inputs, self.x.shape[0])).cpu()
