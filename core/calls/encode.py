"""A prompt's conditioning from a text encoder on the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..parts import text_encoder
from ..ranks.context import RankContext
from .call import ModelCall


@dataclass
class EncodeText(ModelCall[torch.Tensor], name="encode_text"):
    """The conditioning [1, L, 3 * hidden] float32 of `tokens` [1, L]; `mask` [1, L] is 0 at padding, both int64."""

    tokens: torch.Tensor
    mask: torch.Tensor

    def run(self, rank: RankContext) -> torch.Tensor:
        model = self.ready(rank)
        layers = text_encoder.read_layers(model.opened)
        states = text_encoder.encode(model.module, layers, self.tokens, self.mask, rank.device)
        return states.float().cpu()
