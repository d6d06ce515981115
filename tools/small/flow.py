"""The small FLUX.2's transformer and how it is called: text rows, position ids, one velocity, a sampling loop."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from torch import Tensor

from . import draw, encoder
from .autoencoder import LATENT_CHANNELS, SEED, SIDE

TEXT_LENGTH = 512
PAD_SAMPLES = 8


def new_transformer():
    """An untrained Flux2Transformer2DModel: 4 heads of 32, 2 double and 4 single blocks, 2.1 M parameters."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(SEED)
    model = Flux2Transformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=3 * encoder.WIDTH,
        axes_dims_rope=(8, 8, 8, 8),
    )
    for name, module in model.named_modules():
        if name.endswith("modulation_img.linear") or name.endswith("modulation_txt.linear"):
            torch.nn.init.normal_(module.weight, std=0.02)
        elif name in ("single_stream_modulation.linear", "norm_out.linear"):
            torch.nn.init.normal_(module.weight, std=0.02)
        elif name.endswith("guidance_embedder.linear_2"):
            torch.nn.init.normal_(module.weight, std=0.005)
    torch.nn.init.orthogonal_(model.x_embedder.weight)
    torch.nn.init.zeros_(model.proj_out.weight)
    return model


class TextRows:
    """Encoder rows of every text that training may ask for, kept in a file beside the checkpoints."""

    def __init__(self, out: Path) -> None:
        path = out / "text_rows.pt"
        if not path.exists():
            processor = encoder.new_processor()
            model = encoder.new_text_encoder(len(processor.tokenizer))
            texts = [""]
            for shape, colour, ground in draw.split_triples()[0]:
                for size in draw.SIZES:
                    scene = draw.Scene(shape, colour, ground, size)
                    texts += [draw.caption_in(scene, form) for form in dict.fromkeys(draw.CAPTIONS)]
            texts += draw.all_instructions()
            texts += [text for _, text in draw.held_out_scenes()]
            texts = list(dict.fromkeys(texts))
            with torch.no_grad():
                rows = encoder.encode_short(model, processor, texts)
            torch.save(dict(zip(texts, rows, strict=True)), path)
        self.rows: dict[str, Tensor] = torch.load(path, weights_only=True)

    def batch(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """(rows [b, longest, 3 * WIDTH] aligned to the right, real [b, longest] bool)."""
        rows = [self.rows[text] for text in texts]
        longest = max(len(r) for r in rows)
        packed = torch.zeros(len(rows), longest, rows[0].shape[1])
        real = torch.zeros(len(rows), longest, dtype=torch.bool)
        for index, row in enumerate(rows):
            packed[index, longest - len(row) :] = row
            real[index, longest - len(row) :] = True
        return packed, real


def text_condition(
    rng: random.Random, packed: Tensor, real: Tensor, padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, text positions, log weight of each text row as an attention key).

    ``padded`` stands for the 512 rows that both the pipeline and ComfyUI hand over: the missing rows are zeros. They
    differ only by position, so PAD_SAMPLES of them, drawn evenly over the range, stand for all, each with the logarithm
    of how many it stands for added to its attention score: a tenth of the work. Otherwise the rows stand alone,
    somewhere in 0..511.
    """
    count, longest, width = packed.shape
    weight = torch.zeros(count, longest).masked_fill(~real, 0.0 if padded else -1e9)
    if not padded:
        start = 0 if rng.random() < 0.5 else rng.randrange(0, TEXT_LENGTH - longest + 1)
        return packed, torch.arange(start, start + longest), weight
    missing = TEXT_LENGTH - longest
    edges = [missing * i // PAD_SAMPLES for i in range(PAD_SAMPLES + 1)]
    places = [rng.randrange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    positions = torch.cat([torch.tensor(places), torch.arange(missing, TEXT_LENGTH)])
    share = torch.tensor([float(b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]).log()
    weight = torch.cat([share.expand(count, -1), weight], dim=1)
    return torch.cat([torch.zeros(count, PAD_SAMPLES, width), packed], dim=1), positions, weight


def text_ids(positions: Tensor) -> Tensor:
    """[n, 4] ids: the text axis is the last one."""
    ids = torch.zeros(len(positions), 4)
    ids[:, 3] = positions
    return ids


def image_ids(height: int, width: int, time_index: int = 0) -> Tensor:
    """[height * width, 4] ids: (time index, row, column, 0)."""
    axes = (torch.tensor([time_index]), torch.arange(height), torch.arange(width), torch.tensor([0]))
    return torch.cartesian_prod(*axes).float()


def tokens(latents: Tensor) -> Tensor:
    """[b, 128, h, w] to [b, h * w, 128]."""
    return latents.flatten(2).transpose(1, 2)


def velocity(
    model, noisy: Tensor, times: Tensor, guidance: Tensor, text, positions, weight, references=None
) -> Tensor:
    """One forward as Flux2Pipeline makes it: [text, image, reference] and the image part of the answer."""
    count, length, _ = noisy.shape
    side = math.isqrt(length)
    ids, hidden = image_ids(side, side), noisy
    if references is not None:
        ids, hidden = torch.cat([ids, image_ids(side, side, 10)]), torch.cat([noisy, references], dim=1)
    options = {}
    if weight is not None:
        keys = torch.cat([weight, torch.zeros(count, hidden.shape[1])], dim=1)
        options = {"attention_mask": keys[:, None, None, :]}
    return model(
        hidden_states=hidden,
        encoder_hidden_states=text,
        timestep=times,
        img_ids=ids,
        txt_ids=text_ids(positions),
        guidance=guidance,
        joint_attention_kwargs=options,
        return_dict=False,
    )[0][:, :length]


@torch.no_grad()
def sample(
    model, rows: TextRows, texts: list[str], references=None, padded: bool = False, steps: int = 16
) -> Tensor:
    """Latents [b, 128, 4, 4] for ``texts`` by Euler steps on the pipeline's own times, from a fixed seed."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    generator = torch.Generator().manual_seed(SEED)
    side = SIDE // 16
    state = torch.randn(len(texts), side * side, 4 * LATENT_CHANNELS, generator=generator)
    shift = math.exp(compute_empirical_mu(side * side, steps))
    sigmas = [shift * s / (1 + (shift - 1) * s) for s in torch.linspace(1, 1 / steps, steps).tolist()] + [0.0]
    packed, real = rows.batch(texts)
    text, positions, weight = text_condition(random.Random(SEED), packed, real, padded)
    guidance = torch.full((len(texts),), 4.0)
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        times = torch.full((len(texts),), now)
        state = state + (after - now) * velocity(
            model, state, times, guidance, text, positions, weight, references
        )
    return state.transpose(1, 2).reshape(len(texts), -1, side, side)
