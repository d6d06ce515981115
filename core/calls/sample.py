"""The denoising loop as every rank runs it, in lockstep with the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import InputError, UnsupportedError
from ..ranks.context import RankContext
from .call import ModelCall, tell
from .inputs import Input, Resolved, fitted, joined, joins
from .samplers import SAMPLERS, why_not_descending

# Up to so many image tokens a call is bound by latency, and both sides of the guidance go through the model at once.
JOINT_TOKENS = 1024


@dataclass
class Step:
    """A step has ended: its number from 0, of how many, its seconds, and x0 where previews are wanted."""

    step: int
    steps: int
    seconds: float
    x0: torch.Tensor | None


@dataclass
class Sample(ModelCall[torch.Tensor], name="sample"):
    """The whole denoising loop: the latent [B, C, h, w] float32 after the last sigma.

    `x` is the noised start latent [B, C, h, w], `sigmas` [S + 1] descend. `negative` is used when `cfg` is not 1. Each
    step is an event `Step`, with x0 when `preview`. Cancel takes effect between steps.
    """

    event = Step

    x: torch.Tensor
    sigmas: torch.Tensor
    sampler: str
    positive: dict[str, Input]
    negative: dict[str, Input] | None
    cfg: float
    preview: bool

    def run(self, rank: RankContext) -> torch.Tensor:
        model = self.ready(rank)
        steps = max(len(self.sigmas) - 1, 0)
        started = time.perf_counter()

        def report(step: int, x0: torch.Tensor) -> None:
            nonlocal started
            if x0.device.type == "cuda":
                torch.cuda.synchronize(x0.device)
            now = time.perf_counter()
            shown = x0.cpu() if self.preview and rank.rank == 0 else None
            tell(rank, Step(step, steps, now - started, shown))
            started = now

        def predict(x: torch.Tensor, timestep: torch.Tensor, inputs: Resolved) -> torch.Tensor:
            rank.progress("sample")  # a step may hold four calls; each is progress
            return model.velocity(x, timestep, inputs)

        with torch.inference_mode():
            return denoise(
                predict,
                self.x.to(model.ranks.device),
                self.sigmas,
                sampler=self.sampler,
                positive=model.resolved(self.positive),
                negative=model.resolved(self.negative) if self.negative is not None else None,
                cfg=self.cfg,
                compute_dtype=model.dtype,
                latent_patch=model.opened.architecture.latent_patch,
                on_step=report,
                check=rank.check_cancelled,
            ).cpu()


def denoise(
    predict: Callable[[torch.Tensor, torch.Tensor, Resolved], torch.Tensor],
    x: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    sampler: str,
    positive: Resolved,
    negative: Resolved | None = None,
    cfg: float = 1.0,
    compute_dtype: torch.dtype = torch.float32,
    latent_patch: int = 1,
    on_step: Callable[[int, torch.Tensor], None] | None = None,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Walk `x` [B, C, h, w] float32 down `sigmas` [S + 1] and return it at the last one.

    `predict(x, timestep [B], inputs)` returns the velocity [B, C, h, w]. It gets x and inputs in `compute_dtype`; x0,
    guidance and steps are float32. With `cfg` other than 1, x0 = negative + cfg (positive - negative), Ho and Salimans
    2022 (arXiv:2207.12598). `on_step(step, x0)` is called after each step, `check()` before each one: every rank calls
    it equally often. A token of the model stands for `latent_patch` x `latent_patch` positions of x.

    Raises `UnsupportedError` for a sampler that is not in `SAMPLERS`, `InputError` for sigmas that do not descend.
    """
    if sampler not in SAMPLERS:
        raise UnsupportedError(
            f"The ranks do not run the sampler '{sampler}' themselves. They run: {', '.join(sorted(SAMPLERS))}."
        )
    if reason := why_not_descending(sigmas):
        raise InputError(f"The ranks cannot walk these sigmas: {reason}. Connect sigmas that descend.")
    if math.isclose(cfg, 1.0):
        negative = None
    elif negative is None:
        raise InputError(f"cfg {cfg:g} needs a negative conditioning. Connect one, or set cfg to 1.")
    x0_of = denoiser(predict, x, positive, negative, cfg, compute_dtype, JOINT_TOKENS * latent_patch**2)
    levels = [float(sigma) for sigma in sigmas.float()]
    walk = SAMPLERS[sampler](x0_of, x.float(), levels)
    for step in range(len(levels) - 1):
        if check is not None:
            check()
        x, x0 = next(walk)
        if on_step is not None:
            on_step(step, x0)
    return x


def denoiser(
    predict: Callable[[torch.Tensor, torch.Tensor, Resolved], torch.Tensor],
    x: torch.Tensor,
    positive: Resolved,
    negative: Resolved | None,
    cfg: float,
    compute_dtype: torch.dtype,
    joint_positions: int,
) -> Callable[[torch.Tensor, float], torch.Tensor]:
    """`f(x, sigma)` -> x0, guided by `negative` where there is one, for latents of the shape of `x`.

    Both sides go through the model at once where they fit together and x has at most `joint_positions`.
    """
    batch = x.shape[0]
    positive = fitted(positive, batch, compute_dtype)
    negative = fitted(negative, batch, compute_dtype) if negative is not None else None
    joint = None
    if negative is not None and joins(negative, positive):
        if batch * x.shape[-2] * x.shape[-1] <= joint_positions:
            joint = joined(negative, positive)

    def velocity(x: torch.Tensor, sigma: float, inputs: Resolved) -> torch.Tensor:
        timestep = torch.full((x.shape[0],), sigma, dtype=torch.float32, device=x.device)
        return predict(x.to(compute_dtype), timestep, inputs).float()

    def x0_of(x: torch.Tensor, sigma: float) -> torch.Tensor:
        if negative is None:
            return x - sigma * velocity(x, sigma, positive)
        if joint is not None:
            away, towards = velocity(torch.cat([x, x]), sigma, joint).chunk(2)
        else:
            towards, away = velocity(x, sigma, positive), velocity(x, sigma, negative)
        x0_towards, x0_away = x - sigma * towards, x - sigma * away
        return x0_away + cfg * (x0_towards - x0_away)

    return x0_of
