"""The FLUX.2 VAE over several ranks: exact decoding with every rank holding a band of the picture's rows.

The decoder's first convolution and its attending mid block run whole on every rank (they are small); then each rank
takes its band of rows. A 3x3 convolution needs one row of each neighbour, and a GroupNorm the sums over the whole
picture, so both are exchanged, and the result equals the single-device decode but for rounding. The weights are
replicated; what is shared is the memory of the activations and the time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..checkpoint.files import Checkpoint
from ..checkpoint.layout import IDENTITY, check
from ..checkpoint.settings import check_settings, config_path
from ..errors import InputError, UnsupportedError
from ..load import OpenedModel
from ..models.architecture import Architecture
from ..tp.collectives import Ranks
from ..tp.skeleton import build_skeleton, building, persistent_buffers

MODEL_CLASS = "AutoencoderKLFlux2"
PATCH = 2  # a latent position holds a 2x2 patch of the VAE's own latents


def open_vae(checkpoint: Checkpoint) -> OpenedModel:
    """Recognise the VAE folder at `checkpoint` and compare its headers with it. Nothing is allocated.

    Raises `UnsupportedError` for another class, `CheckpointError` for missing or misshapen tensors and for a config.json
    that makes no model.
    """
    config = dict(checkpoint.config or {})
    check_settings(checkpoint, config)
    if config.get("_class_name") != MODEL_CLASS:
        raise UnsupportedError(
            f"{checkpoint.path} holds {config.get('_class_name') or 'no VAE'}; the ranks decode with {MODEL_CLASS}. "
            f"Choose the vae folder of a FLUX.2 pipeline, or use the stock Load VAE node for a single file."
        )
    architecture = Architecture(name="flux2_vae", model_class=MODEL_CLASS, plan={}, heads_key=())
    model_class = architecture.load_class()
    # On meta with its buffers too: the file holds all of them, and damaged settings make some of any size.
    with building(MODEL_CLASS, config_path(checkpoint.path), checkpoint.nbytes), torch.device("meta"):
        skeleton = build_skeleton(model_class, config)
    # A counter of training steps that decoding never reads.
    skeleton.bn.num_batches_tracked = None
    opened = OpenedModel(checkpoint, architecture, model_class, config, IDENTITY, skeleton)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    shapes.update({name: tuple(buffer.shape) for name, buffer in persistent_buffers(skeleton)})
    opened.pieces = check(checkpoint, IDENTITY, shapes, ignored=("bn.num_batches_tracked",))
    return opened


def scale(vae: nn.Module) -> int:
    """Pixels per latent position along each side (16 for FLUX.2)."""
    return PATCH * 2 ** (len(vae.config.block_out_channels) - 1)


def _statistics(vae: nn.Module, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation [1, C, 1, 1] by which latents are normalised."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1).to(like)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).to(like)
    return mean, deviation


def encode(vae: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents [B, 4 C, H/16, W/16] of `pixels` [B, 3, H, W] in -1..1 (the mean, not a sample).

    Sides that are no multiple of 16 lose their last rows and columns.
    """
    step = scale(vae)
    height, width = (side // step * step for side in pixels.shape[-2:])
    if not height or not width:
        raise InputError(
            f"The image is {pixels.shape[-1]}x{pixels.shape[-2]} pixels, but the VAE needs at least {step}x{step}. "
            f"Scale it up."
        )
    with torch.inference_mode():
        latents = vae.encode(pixels[..., :height, :width]).latent_dist.mode()
        batch, channels, rows, columns = latents.shape
        latents = latents.view(batch, channels, rows // PATCH, PATCH, columns // PATCH, PATCH)
        latents = latents.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        mean, deviation = _statistics(vae, latents)
        return (latents - mean) / deviation


def decode(vae: nn.Module, latents: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Pixels [B, 3, 16 h, 16 w] in about -1..1 of normalised `latents` [B, 4 C, h, w], whole on every rank.

    All ranks call it with the same latents. Pictures with fewer rows than ranks are decoded whole by each.
    """
    expected = vae.bn.running_mean.numel()
    if latents.shape[1] != expected:
        raise InputError(
            f"The latent has {latents.shape[1]} channels, but this VAE takes {expected}. It belongs to another model: "
            f"use the VAE that was made for it."
        )
    with torch.inference_mode():
        mean, deviation = _statistics(vae, latents)
        latents = latents * deviation + mean
        batch, channels, rows, columns = latents.shape
        latents = latents.view(batch, channels // PATCH**2, PATCH, PATCH, rows, columns)
        latents = latents.permute(0, 1, 4, 2, 5, 3).reshape(batch, -1, rows * PATCH, columns * PATCH)
        if vae.post_quant_conv is not None:
            latents = vae.post_quant_conv(latents)
        return decode_in_bands(vae.decoder, latents, ranks)


def decode_in_bands(decoder: nn.Module, latents: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The decoder on [B, C, h, w] with the rows of its up blocks shared out among the ranks; the whole picture."""
    whole = decoder.mid_block(decoder.conv_in(latents))
    rows = whole.shape[2]
    if ranks.degree == 1 or rows < ranks.degree:
        return _rest(decoder, whole)
    bounds = [rows * rank // ranks.degree for rank in range(ranks.degree + 1)]
    band = whole[:, :, bounds[ranks.rank] : bounds[ranks.rank + 1]].contiguous()
    del whole
    with Bands(decoder, ranks):
        band = _rest(decoder, band)
    step = band.shape[2] // (bounds[ranks.rank + 1] - bounds[ranks.rank])
    most = max(after - before for before, after in zip(bounds, bounds[1:], strict=False)) * step
    padded = F.pad(band, (0, 0, 0, most - band.shape[2]))
    parts = ranks.all_gather(padded)
    heights = [(bounds[rank + 1] - bounds[rank]) * step for rank in range(ranks.degree)]
    return torch.cat([part[:, :, :height] for part, height in zip(parts, heights, strict=True)], dim=2)


def _rest(decoder: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The decoder after its mid block."""
    for block in decoder.up_blocks:
        x = block(x)
    return decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(x)))


class Bands:
    """While entered, the convolutions and norms of a decoder's up blocks work on this rank's band of rows."""

    def __init__(self, decoder: nn.Module, ranks: Ranks):
        self.parts = [*decoder.up_blocks, decoder.conv_norm_out, decoder.conv_out]
        self.ranks = ranks

    def __enter__(self) -> Bands:
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
                    module.forward = _BandConv(module, self.ranks)  # type: ignore[assignment]
                elif isinstance(module, nn.GroupNorm):
                    module.forward = _BandNorm(module, self.ranks)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        for part in self.parts:
            for module in part.modules():
                module.__dict__.pop("forward", None)


class _BandConv:
    """A 3x3 convolution with padding 1 on a band [B, C, rows, W]: one row of each neighbour is fetched first."""

    def __init__(self, conv: nn.Conv2d, ranks: Ranks):
        if conv.kernel_size != (3, 3) or conv.stride != (1, 1) or conv.padding != (1, 1):
            raise UnsupportedError(f"Decoding in bands knows 3x3 convolutions of stride 1 only, not {conv}.")
        self.conv = conv
        self.ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        edges = self.ranks.all_gather(torch.cat([x[:, :, :1], x[:, :, -1:]], dim=2))
        rank = self.ranks.rank
        nothing = x.new_zeros(x.shape[0], x.shape[1], 1, x.shape[3])
        above = edges[rank - 1][:, :, 1:] if rank > 0 else nothing
        below = edges[rank + 1][:, :, :1] if rank + 1 < self.ranks.degree else nothing
        return F.conv2d(torch.cat([above, x, below], dim=2), self.conv.weight, self.conv.bias, padding=(0, 1))


class _BandNorm:
    """A GroupNorm on a band [B, C, rows, W]: means and deviations of the whole picture, from sums over the ranks."""

    def __init__(self, norm: nn.GroupNorm, ranks: Ranks):
        self.norm = norm
        self.ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        groups = x.unflatten(1, (norm.num_groups, -1)).flatten(2).float()
        count = torch.full_like(groups[..., 0], groups.shape[-1], dtype=torch.float64)
        total = groups.sum(-1, dtype=torch.float64)
        mean = groups.mean(-1, keepdim=True)
        spread = (groups - mean).square().sum(-1, dtype=torch.float64)
        # Sums of squares about zero, from those about the band's own mean: no digits are lost in long sums.
        squares = spread + mean.squeeze(-1).double().square() * count
        sums = self.ranks.all_reduce(torch.stack([count, total, squares]))
        count, total, squares = sums.unbind(0)
        mean = total / count
        deviation = torch.sqrt(squares / count - mean.square() + norm.eps)
        normal = (groups - mean.float().unsqueeze(-1)) / deviation.float().unsqueeze(-1)
        normal = normal.view(x.shape).to(x.dtype)
        return normal * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)
