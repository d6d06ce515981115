"""Train the small FLUX.2 on a CPU, from nothing, with fixed seeds.

    python -m comfy_tp.tools.small.train --stage vae --out DIR
    python -m comfy_tp.tools.small.train --stage transformer --out DIR
    python -m comfy_tp.tools.small.train --stage lora --out DIR

Every stage writes ``DIR/<stage>.pt`` as it goes and continues from it when started again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import torch
from torch import Tensor

from ...core.checkpoint.convert import file_tensors
from ...core.models.flux2_layout import BFL_FLUX2
from . import draw
from .autoencoder import SEED, SIDE, BlockEncoder, decode, new_vae, set_encoder, vae_pictures
from .flow import TextRows, new_transformer, sample, text_condition, tokens, velocity
from .muon import Muon

VAE_STEPS = 3000
VAE_BATCH = 8
VAE_LEARNING_RATE = 3e-3
VAE_NOISE = 0.5
STEPS = 4500
FINISH = 0.6
BATCH = 64
LEARNING_RATE = 2e-3
MUON_RATE = 1e-2
EDIT_SHARE = 0.25
PADDED_SHARE = (0.2, 0.7)
PADDED_FROM = 0.65
LORA_RANK = 16
LORA_BATCH = 32
LORA_FIRST_BATCH = 10_000_000
LORA_STEPS = 2000
LORA_LEARNING_RATE = 1e-2


def save_atomically(state: dict, path: Path) -> None:
    """Write a checkpoint so that a stop in the middle leaves the older one."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def falling(step: int, steps: int, warm: int = 100) -> float:
    """Learning-rate factor: linear rise over ``warm`` steps, then a cosine down to 2%."""
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


def flat_then_falling(step: int, steps: int, warm: int = 100) -> float:
    """Learning-rate factor: linear rise, flat, and a straight fall over the last FINISH of the steps."""
    if step < warm:
        return (step + 1) / warm
    return min(1.0, max(0.01, (steps - step) / (FINISH * steps)))


def report(log: Path, **values: float | int | str) -> None:
    """One JSON line in the log and on the screen."""
    line = json.dumps(values)
    print(line, flush=True)
    with log.open("a") as file:
        file.write(line + "\n")


def train_decoder(out: Path, steps: int) -> None:
    """Train the decoder on noisy latents: L1 on pixels and on their differences.

    Noise of up to half a standard deviation makes the decoder forgiving, so that the transformer's small errors do not
    blur the edges.
    """
    vae = new_vae()
    set_encoder(vae)
    encode = BlockEncoder(vae)
    parameters = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=VAE_LEARNING_RATE, betas=(0.9, 0.97), weight_decay=1e-4)
    path, log, first, seconds = out / "vae.pt", out / "vae.log", 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["step"], state["seconds"]
    began, total, count = time.time() - seconds, 0.0, 0
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = VAE_LEARNING_RATE * falling(step, steps)
        rng = random.Random(SEED * 1_000_003 + step)
        torch.manual_seed(SEED * 1_000_003 + step)
        # A quarter of the area costs a quarter; the last third sees the full side.
        side, batch = (SIDE // 2, 16) if step < steps * 2 // 3 else (SIDE, VAE_BATCH)
        images = vae_pictures(rng, batch, SIDE)
        with torch.no_grad():
            latents = encode(images)
            latents = latents + torch.rand(batch, 1, 1, 1) * VAE_NOISE * torch.randn_like(latents)
        if side != SIDE:
            row, column = rng.randrange(3), rng.randrange(3)
            latents = latents[:, :, row : row + 2, column : column + 2]
            images = images[:, :, 16 * row : 16 * row + side, 16 * column : 16 * column + side]
        decoded = decode(vae, latents)
        loss = (decoded - images).abs().mean()
        edges = sum((decoded.diff(dim=d) - images.diff(dim=d)).abs().mean() for d in (2, 3))
        optimizer.zero_grad(set_to_none=True)
        (loss + 0.25 * edges).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        total, count = total + float(loss.detach()), count + 1
        if (step + 1) % 50 == 0:
            report(log, step=step + 1, l1=round(total / count, 4), seconds=round(time.time() - began))
            total, count = 0.0, 0
        if (step + 1) % 200 == 0 or step + 1 == steps:
            save_atomically(
                {
                    "model": vae.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "seconds": time.time() - began,
                },
                path,
            )


def training_batch(rng: random.Random, encode: BlockEncoder, batch: int, edit: bool, outline: bool = False):
    """(latents of the targets, latents of the references or None, texts) of one step."""
    triples = draw.split_triples()[0]
    if edit:
        edits = [draw.random_edit(rng, triples) for _ in range(batch)]
        scenes, texts = [e[1] for e in edits], [e[2] for e in edits]
        before = [e[0] for e in edits]
    else:
        scenes = [draw.random_scene(rng, triples) for _ in range(batch)]
        texts = [draw.caption(s, rng) if rng.random() < 0.97 else "" for s in scenes]
        before = []
    if outline:
        scenes = [draw.replace(s, outline=True) for s in scenes]
    with torch.no_grad():
        latents = tokens(encode(draw.draw(scenes + before, SIDE) * 2 - 1))
    return latents[:batch], latents[batch:] if edit else None, texts


def flow_loss(
    model,
    encode: BlockEncoder,
    rows: TextRows,
    step: int,
    batch: int,
    padded_share: float,
    outline: bool = False,
) -> Tensor:
    """Mean square error of the velocity for one batch, all of whose choices follow from ``step``."""
    rng = random.Random(SEED * 1_000_003 + step)
    torch.manual_seed(SEED * 1_000_003 + step)
    target, references, texts = training_batch(rng, encode, batch, rng.random() < EDIT_SHARE, outline)
    packed, real = rows.batch(texts)
    text, positions, weight = text_condition(rng, packed, real, rng.random() < padded_share)
    # Logit-normal times, shifted to the noisy side where so few tokens leave the picture undecided.
    times = torch.sigmoid(torch.randn(batch) * 1.1 + 1.4)
    noise = torch.randn_like(target)
    at = times.view(-1, 1, 1)
    guidance = torch.randint(2, 17, (batch,)) / 2.0
    guess = velocity(
        model, at * noise + (1 - at) * target, times, guidance, text, positions, weight, references
    )
    return (guess - (noise - target)).square().mean()


def load_vae(out: Path):
    """The VAE with the decoder as far as it is trained, frozen."""
    vae = new_vae()
    vae.load_state_dict(torch.load(out / "vae.pt", weights_only=True)["model"])
    return vae.eval().requires_grad_(False)


def adherence(model, vae, rows: TextRows, count: int, padded: bool) -> tuple[float, float, float, float]:
    """Shares of held-out captions with the right (shape, colour, ground, all three)."""
    pairs = draw.held_out_scenes()[:count]
    latents = sample(model, rows, [text for _, text in pairs], padded=padded)
    with torch.no_grad():
        images = draw.to_pixels(decode(vae, latents) / 2 + 0.5)
    verdicts = [draw.judge(image) for image in images]
    right = [
        [a == b for a, b in zip(v.triple, s.triple, strict=True)]
        for v, (s, _) in zip(verdicts, pairs, strict=True)
    ]
    shares = [sum(column) / count for column in zip(*right, strict=True)]
    return (*shares, sum(all(row) for row in right) / count)


class Optimizers:
    """Muon on the matrices of the blocks, AdamW on everything else, as one optimizer."""

    def __init__(self, model) -> None:
        inner: list[Tensor] = []
        outer: list[Tensor] = []
        plain: list[Tensor] = []
        for name, parameter in model.named_parameters():
            kind = plain if parameter.ndim < 2 else inner if "transformer_blocks." in name else outer
            kind.append(parameter)
        groups = [{"params": outer, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        self.outer = [*outer, *plain]
        self.rates = (MUON_RATE, LEARNING_RATE)
        self.both = (
            Muon(inner, lr=MUON_RATE),
            torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True),
        )

    def step(self, loss: Tensor, factor: float) -> None:
        """One step on ``loss``, with both learning rates multiplied by ``factor``."""
        for optimizer, rate in zip(self.both, self.rates, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.outer, 1.0)
        for optimizer in self.both:
            optimizer.step()

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.both]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.both, states, strict=True):
            optimizer.load_state_dict(state)


def train_transformer(out: Path, steps: int) -> None:
    """Rectified flow on packed latents, pictures and edits mixed, an average of the weights kept."""
    rows, encode = TextRows(out), BlockEncoder(load_vae(out))
    model = new_transformer().train()
    average = {k: v.detach().clone() for k, v in model.state_dict().items()}
    optimizers = Optimizers(model)
    path, log, first, seconds = out / "transformer.pt", out / "transformer.log", 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        average, first, seconds = state["average"], state["step"], state["seconds"]
    began, total, count = time.time() - seconds, 0.0, 0
    for step in range(first, steps):
        padded_share = PADDED_SHARE[step >= PADDED_FROM * steps]
        loss = flow_loss(model, encode, rows, step, BATCH, padded_share)
        optimizers.step(loss, flat_then_falling(step, steps))
        keep = min(0.998, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 1 - keep)
        total, count = total + float(loss.detach()), count + 1
        if (step + 1) % 50 == 0:
            report(log, step=step + 1, loss=round(total / count, 4), seconds=round(time.time() - began))
            total, count = 0.0, 0
        if (step + 1) % 100 == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizers": optimizers.state_dict(), "average": average}
            save_atomically(state | {"step": step + 1, "seconds": time.time() - began}, path)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            kept = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(average)
            vae = load_vae(out)
            shape, colour, ground, every = adherence(model.eval(), vae, rows, 48, padded=False)
            report(log, step=step + 1, shape=shape, colour=colour, ground=ground, all=every)
            model.load_state_dict(kept)
            model.train()


def new_lora(model) -> dict[str, Tensor]:
    """LoRA factors of every matrix in the blocks, by the names of the single file: A random, B zero, rank LORA_RANK."""
    generator = torch.Generator().manual_seed(SEED)
    factors = {}
    for name, tensor in file_tensors(BFL_FLUX2, dict(model.named_parameters())).items():
        if tensor.ndim == 2 and name.startswith(("double_blocks.", "single_blocks.")):
            base, (rows, columns) = name.removesuffix(".weight"), tensor.shape
            down = torch.randn(LORA_RANK, columns, generator=generator) / math.sqrt(columns)
            factors[f"{base}.lora_A.weight"] = down.requires_grad_()
            factors[f"{base}.lora_B.weight"] = torch.zeros(rows, LORA_RANK).requires_grad_()
    return factors


class WithLora(torch.nn.Module):
    """The frozen transformer with B @ A added to its weights: what a merged LoRA of strength one gives."""

    def __init__(self, model, factors: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.factors = factors

    def forward(self, **inputs):
        bases = {name.split(".lora_")[0] for name in self.factors}
        deltas = {b: self.factors[f"{b}.lora_B.weight"] @ self.factors[f"{b}.lora_A.weight"] for b in bases}
        weights = {}
        for name, parameter in self.model.named_parameters():
            parts = [
                (names[0].removesuffix(".weight"), part, of)
                for names, part, of in BFL_FLUX2.sources(name) or ()
            ]
            if all(base in deltas for base, _, _ in parts):
                rows = torch.cat([deltas[base].chunk(of)[part] for base, part, of in parts])
                weights[name] = parameter + rows
        return torch.func.functional_call(self.model, weights, (), inputs)


def train_lora(out: Path, steps: int) -> None:
    """The style "outlines only": the same captions and edits, the answer drawn as an outline."""
    rows, encode = TextRows(out), BlockEncoder(load_vae(out))
    model = new_transformer()
    model.load_state_dict(torch.load(out / "transformer.pt", weights_only=True)["average"])
    factors = new_lora(model)
    styled = WithLora(model, factors)
    optimizer = Muon(list(factors.values()), lr=LORA_LEARNING_RATE, weight_decay=0.0)
    path, log, first, seconds = out / "lora.pt", out / "lora.log", 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        for name, value in state["lora"].items():
            factors[name].data.copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["step"], state["seconds"]
    began, total, count = time.time() - seconds, 0.0, 0
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = LORA_LEARNING_RATE * falling(step, steps, 20)
        loss = flow_loss(styled, encode, rows, LORA_FIRST_BATCH + step, LORA_BATCH, 0.5, outline=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total, count = total + float(loss.detach()), count + 1
        if (step + 1) % 50 == 0 or step + 1 == steps:
            report(log, step=step + 1, loss=round(total / count, 4), seconds=round(time.time() - began))
            total, count = 0.0, 0
            kept = {name: value.detach() for name, value in factors.items()}
            state = {"lora": kept, "optimizer": optimizer.state_dict()}
            save_atomically(state | {"step": step + 1, "seconds": time.time() - began}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = {"vae": (train_decoder, VAE_STEPS), "transformer": (train_transformer, STEPS)}
    stages["lora"] = (train_lora, LORA_STEPS)
    parser.add_argument("--stage", choices=tuple(stages), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument(
        "--steps", type=int, default=None, help="length of the stage, if not that of the shipped weights"
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stage, steps = stages[arguments.stage]
    stage(arguments.out, arguments.steps or steps)


if __name__ == "__main__":
    main()
