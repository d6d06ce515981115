"""ComfyUI's VAE around a FLUX.2 VAE that lives on the ranks and decodes in bands of rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.sd
import torch

from ..core.calls.vae import Decode, Encode
from ..core.errors import InputError
from .component import ComponentPatcher, RemoteModule
from .sharded import ShardedModel

CHANNELS = 128  # of a FLUX.2 latent: 32 of the VAE's own times a 2x2 patch
PIXELS = 16  # per latent position along each side
# Values held at once per output pixel while decoding: ComfyUI's own estimate for KL autoencoders.
VALUES_PER_PIXEL = 2178


@contextmanager
def unremarked(text: str) -> Iterator[None]:
    """Inside, log lines that contain `text` are dropped."""

    def other(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    root = logging.getLogger()
    root.addFilter(other)
    try:
        yield
    finally:
        root.removeFilter(other)


class RemoteAutoencoder(RemoteModule):
    """The `first_stage_model` of a VAE: encodes and decodes on the ranks."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents [B, 128, h, w] of pixels [B, 3, H, W] in -1..1."""
        return self.on_ranks(lambda remote, poll: remote.ask(Encode, pixels, poll=poll))

    def decode(self, latents: torch.Tensor, **options: Any) -> torch.Tensor:
        """Pixels [B, 3, H, W] in about -1..1 of latents [B, 128, h, w]. Raises `InputError` for those of a video."""
        if latents.ndim != 4:
            raise InputError(
                f"The latent has the shape {list(latents.shape)}, but this VAE takes [batch, {CHANNELS}, height, width]. It "
                f"belongs to another model: use the VAE that was made for it."
            )
        return self.on_ranks(lambda remote, poll: remote.ask(Decode, latents, poll=poll))


class RemoteVAE(comfy.sd.VAE):
    """A stock VAE (its tiling, cropping and batching) whose first stage model is on the ranks."""

    def __init__(self, sharded: ShardedModel, policy: str):
        with unremarked(
            "No VAE weights"
        ):  # without weights ComfyUI's own sets what a release's code asks of a VAE
            super().__init__(sd={})
        degree = sharded.placement.degree
        self.first_stage_model = RemoteAutoencoder(sharded, policy)
        self.memory_used_decode = lambda shape, dtype: (
            shape[2] * shape[3] * PIXELS**2 * VALUES_PER_PIXEL * dtype.itemsize // degree
        )
        self.memory_used_encode = lambda shape, dtype: shape[2] * shape[3] * VALUES_PER_PIXEL * dtype.itemsize
        self.downscale_ratio = self.upscale_ratio = PIXELS
        self.latent_channels = CHANNELS
        self.process_input = lambda image: image * 2.0 - 1.0
        # In place: newer ComfyUIs read the tensor that they hand over, older ones what comes back.
        self.process_output = lambda image: image.add_(1.0).div_(2.0).clamp_(0.0, 1.0)
        self.working_dtypes = [torch.float32]
        self.size = 0
        # Tensors wait on the CPU, from where they go to the ranks.
        self.device = torch.device("cpu")
        self.vae_dtype = torch.float32
        self.output_device = comfy.model_management.intermediate_device()
        self.patcher = ComponentPatcher.of(self.first_stage_model)

    def vae_encode_crop_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, H, W, C] cut to whole latent positions. Raises `InputError` for a picture smaller than one, or grey."""
        height, width, channels = pixels.shape[1:4]
        if channels < 3:
            raise InputError(
                f"The image has {channels} channel{'s' if channels > 1 else ''}, but the VAE needs red, green and blue. "
                f"Turn a mask into a picture with Convert Mask to Image."
            )
        if min(height, width) < PIXELS:
            raise InputError(
                f"The image is {width}x{height} pixels, but the VAE needs at least {PIXELS}x{PIXELS}. Scale it up."
            )
        return super().vae_encode_crop_pixels(pixels)

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Pixels [B, H, W, 3] in 0..1 of latents [B, 128, h, w]."""
        with self.first_stage_model.held():
            return super().decode(*args, **kwargs)

    def decode_tiled(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `decode`, in overlapping tiles that are blended: close to it, not equal."""
        with self.first_stage_model.held():
            return super().decode_tiled(*args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Latents [B, 128, h, w] of pixels [B, H, W, 3] in 0..1."""
        with self.first_stage_model.held():
            return super().encode(*args, **kwargs)

    def encode_tiled(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `encode`, in overlapping tiles that are blended."""
        with self.first_stage_model.held():
            return super().encode_tiled(*args, **kwargs)

    def get_ram_usage(self) -> int:
        """Host memory only."""
        return self.patcher.get_ram_usage()
