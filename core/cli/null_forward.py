"""The ranks' commands with a model call that computes nothing: for measuring what surrounds the model."""

from __future__ import annotations

import torch

from ..calls import commands
from ..calls.forward import Forward
from ..ranks.context import RankContext


class NullForward(Forward):
    """A call with all that it takes, and zeros in place of the model's answer."""

    def run(self, rank: RankContext) -> torch.Tensor:
        model = self.ready(rank)
        model.resolved(self.inputs, self.x.shape[0])
        return torch.zeros_like(self.x.to(rank.device, model.dtype)).float().cpu()


COMMANDS = {**commands.COMMANDS, "forward": NullForward.command}
