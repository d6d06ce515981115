"""Pictures to latents and back, by a VAE on the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..parts import vae
from ..ranks.context import RankContext
from .call import ModelCall


@dataclass
class Encode(ModelCall[torch.Tensor], name="vae_encode"):
    """Latents [B, C, h, w] float32 of `pixels` [B, 3, H, W] in -1..1."""

    pixels: torch.Tensor

    def run(self, rank: RankContext) -> torch.Tensor:
        model = self.ready(rank)
        return vae.encode(model.module, self.pixels.to(rank.device, model.dtype)).float().cpu()


@dataclass
class Decode(ModelCall[torch.Tensor], name="vae_decode"):
    """Pixels [B, 3, H, W] float32 in about -1..1 of `latents` [B, C, h, w], decoded in bands of rows."""

    latents: torch.Tensor

    def run(self, rank: RankContext) -> torch.Tensor:
        model = self.ready(rank)
        return vae.decode(model.module, self.latents.to(rank.device, model.dtype), model.ranks).float().cpu()
