"""The small FLUX.2's VAE: the real class with narrow channels, and an encoder set by principal components."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from . import draw

SEED = 6
SIDE = 64
LATENT_CHANNELS = 32


def new_vae():
    """An untrained AutoencoderKLFlux2: 32 latent channels as the real one, narrow inside.

    Residual branches start at zero, so that colour and place pass through from the first step on.
    """
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(SEED)
    vae = AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=LATENT_CHANNELS,
        sample_size=SIDE,
    )
    for name, module in vae.named_modules():
        if hasattr(module, "conv2"):
            torch.nn.init.zeros_(module.conv2.weight)
        if name.endswith("to_out.0"):
            torch.nn.init.zeros_(module.weight)
    return vae.eval()


def vae_pictures(rng: random.Random, count: int, side: int) -> Tensor:
    """Pictures for the VAE in -1..1: palette scenes and outlines, and a third in free colours."""
    triples = draw.all_triples()
    scenes = [draw.random_scene(rng, triples, spread=1.0) for _ in range(count)]
    scenes = [draw.replace(s, outline=rng.random() < 0.25) for s in scenes]
    images = draw.draw(scenes, side)
    for index in range(0, count, 3):
        # Mixing the channels by a random matrix keeps the edges and gives colours outside of the palette.
        mix = torch.tensor([[rng.uniform(-0.4, 1.0) for _ in range(3)] for _ in range(3)])
        images[index] = torch.einsum("ij,jhw->ihw", mix, images[index]).clamp(0, 1)
    return images * 2 - 1


def patchify(latents: Tensor) -> Tensor:
    """[b, 32, h, w] to [b, 128, h/2, w/2], channel order (c, row, column) as FLUX.2 packs them."""
    b, c, h, w = latents.shape
    return (
        latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
    )


def unpatchify(latents: Tensor) -> Tensor:
    """The inverse of :func:`patchify`."""
    b, c, h, w = latents.shape
    return latents.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def _spread(vae) -> Tensor:
    return (vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()


def _normalise(vae, packed: Tensor) -> Tensor:
    return (packed - vae.bn.running_mean.view(1, -1, 1, 1)) / _spread(vae)


def encode(vae, images: Tensor) -> Tensor:
    """Pictures in -1..1 to normalised packed latents [b, 128, h/16, w/16]."""
    return _normalise(vae, patchify(vae.encode(images).latent_dist.mode()))


def decode(vae, latents: Tensor) -> Tensor:
    """The inverse of :func:`encode`: pictures in about -1..1."""
    packed = latents * _spread(vae) + vae.bn.running_mean.view(1, -1, 1, 1)
    return vae.decode(unpatchify(packed)).sample


def _principal(vectors: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """(basis [keep, d], mean [d]) of the largest principal components of [n, d]."""
    mean = vectors.mean(0)
    _, basis = torch.linalg.eigh((vectors - mean).T @ (vectors - mean) / len(vectors))
    return basis.flip(1)[:, :keep].T.contiguous(), mean


@torch.no_grad()
def set_encoder(vae) -> None:
    """Give the encoder its weights: principal components of 8x8 blocks of the drawn pictures.

    A convolution of stride two can pick the four pixels of a 2x2 block, so three of them in a row hold any linear map
    of an 8x8 block; the residual branches stay zero. Two constant channels keep the last group norm from dividing
    the picture's own contrast away. Nothing is learned by gradient here, which is why the latents are
    there before the first training step.
    """
    images = vae_pictures(random.Random(SEED), 1500, SIDE)
    encoder = vae.encoder
    for module in encoder.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1) and module.bias is not None:
            module.bias.zero_()
    # Level 0: RGB, then the 2x2 block of each colour: 12 values.
    encoder.conv_in.weight.zero_()
    for c in range(3):
        encoder.conv_in.weight[c, c, 1, 1] = 1.0
    first = encoder.down_blocks[0].downsamplers[0].conv
    first.weight.zero_()
    for c in range(3):
        for row in range(2):
            for column in range(2):
                first.weight[4 * c + 2 * row + column, c, row, column] = 1.0
    # Level 1: widen 12 to 32 channels, then 48 values of a 4x4 block to their 30 largest components.
    shortcut = encoder.down_blocks[1].resnets[0].conv_shortcut
    shortcut.weight.zero_()
    shortcut.bias.zero_()
    for c in range(12):
        shortcut.weight[c, c, 0, 0] = 1.0

    def blocks(maps: Tensor) -> Tensor:
        return patchify(maps).permute(0, 2, 3, 1).reshape(-1, maps.shape[1] * 4)

    def set_down(conv, basis: Tensor, bias: Tensor, channels: int, rows: list[int]) -> None:
        conv.weight.zero_()
        for index, row in enumerate(rows):
            conv.weight[row, :channels, :2, :2] = basis[index].view(channels, 2, 2)
            conv.bias[row] = bias[index]

    maps = patchify(images)
    basis, mean = _principal(blocks(maps)[::7], 30)
    set_down(encoder.down_blocks[1].downsamplers[0].conv, basis, -basis @ mean, 12, list(range(30)))
    maps = torch.einsum("kd,bdhw->bkhw", basis, patchify(maps) - mean.view(1, -1, 1, 1))
    # Level 2: 8x8 blocks. The square root of each component's spread is divided out, halfway to white.
    values = blocks(maps)
    basis, mean = _principal(values[::3], 30)
    spread = ((values - mean) @ basis.T).std(0)
    basis = basis / spread.sqrt().unsqueeze(1)
    rows = [r for r in range(32) if r not in (15, 31)]
    second = encoder.down_blocks[2].downsamplers[0].conv
    set_down(second, basis, -basis @ mean, 30, rows)
    constant = 25.0 * float(spread.sqrt().max())
    second.bias[15] = second.bias[31] = constant
    # The last norm sees a spread that the constants rule; SiLU is straight around +6.
    encoder.conv_norm_out.weight.fill_(1.0)
    encoder.conv_norm_out.bias.fill_(6.0)
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(SEED)))[0][:, :30]
    encoder.conv_out.weight.zero_()
    gain = constant * math.sqrt(15) / 16
    encoder.conv_out.weight[:32, rows, 1, 1] = rotation * gain
    centre = 6.0 - 1 / math.sqrt(15)
    encoder.conv_out.bias[:32] = -(rotation.sum(1) * gain * centre)
    encoder.conv_out.bias[32:] = -10.0
    vae.quant_conv.weight.copy_(torch.eye(64).view(64, 64, 1, 1))
    vae.quant_conv.bias.zero_()
    for parameter in (*encoder.parameters(), *vae.quant_conv.parameters()):
        parameter.copy_(parameter.half().float())
    packed = torch.cat([patchify(vae.encode(part).latent_dist.mode()) for part in images.split(100)])
    vae.bn.running_mean.copy_(packed.mean((0, 2, 3)))
    vae.bn.running_var.copy_(packed.var((0, 2, 3)))


class BlockEncoder:
    """The encoder of :func:`set_encoder` as one convolution of 8x8 blocks and its last layers: cheaper.

    Up to the last norm that encoder is an affine map of single 8x8 blocks, so its answers to 192 single pixels give
    that map exactly.
    """

    @torch.no_grad()
    def __init__(self, vae) -> None:
        self.vae = vae
        grey = self._before_norm(torch.zeros(1, 3, 8, 8))
        points = self._before_norm(torch.eye(192).view(192, 3, 8, 8)) - grey
        self.kernel = points.view(192, -1).T.reshape(-1, 3, 8, 8).contiguous()
        self.offset = grey.flatten()

    def _before_norm(self, images: Tensor) -> Tensor:
        encoder = self.vae.encoder
        hidden = encoder.conv_in(images)
        for block in encoder.down_blocks:
            hidden = block(hidden)
        return encoder.mid_block(hidden)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Pictures in -1..1 to normalised packed latents, as :func:`encode`."""
        encoder = self.vae.encoder
        hidden = torch.nn.functional.conv2d(images, self.kernel, self.offset, stride=8)
        hidden = encoder.conv_out(torch.nn.functional.silu(encoder.conv_norm_out(hidden)))
        return _normalise(self.vae, patchify(self.vae.quant_conv(hidden)[:, :LATENT_CHANNELS]))
