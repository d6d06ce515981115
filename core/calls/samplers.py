"""The samplers that the ranks run themselves.

A flow model says at noise level sigma in which direction the latent moves: its velocity v, so that the clean latent
is x0 = x - sigma v. A sampler walks down the levels. Each one here is a pure function of the model's x0 and the
levels: it draws no random numbers, so that ranks which start from the same latent end with the same one, and each
gives what ComfyUI's sampler of that name gives. Those that draw noise, or choose their own steps, are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Denoiser = Callable[[torch.Tensor, float], torch.Tensor]  # (x, sigma) -> x0
Steps = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (x after the step, x0 at its start), one per step
Sampler = Callable[[Denoiser, torch.Tensor, Sequence[float]], Steps]


def heun(denoiser: Denoiser, x: torch.Tensor, sigmas: Sequence[float]) -> Steps:
    """Trapezoidal rule with an Euler predictor: Karras et al. 2022 (arXiv:2206.00364), algorithm 1."""
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        x0 = denoiser(x, sigma)
        if following == 0:
            x = x0
        else:
            slope = (x - x0) / sigma
            ahead = x + (following - sigma) * slope
            slope_ahead = (ahead - denoiser(ahead, following)) / following
            x = x + (following - sigma) / 2 * (slope + slope_ahead)
        yield x, x0


def dpm_2(denoiser: Denoiser, x: torch.Tensor, sigmas: Sequence[float]) -> Steps:
    """Midpoint rule with the midpoint taken in log sigma: DPM-Solver-2 (arXiv:2206.00927)."""
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        x0 = denoiser(x, sigma)
        if following == 0:
            x = x0
        else:
            middle = math.sqrt(sigma * following)
            halfway = x + (middle - sigma) / sigma * (x - x0)
            x = x + (following - sigma) / middle * (halfway - denoiser(halfway, middle))
        yield x, x0


def linear_multistep(order: int, weights: Callable[[Sequence[float], int, int], Sequence[float]]) -> Sampler:
    """The samplers that add a weighted sum of the last `order` slopes (x - x0) / sigma to x.

    `weights(sigmas, i, count)` gives those of step i for `count` slopes, the newest first. The step to sigma 0 lands
    on x0.
    """

    def sampler(denoiser: Denoiser, x: torch.Tensor, sigmas: Sequence[float]) -> Steps:
        slopes: list[torch.Tensor] = []
        for i, (sigma, following) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
            x0 = denoiser(x, sigma)
            slopes = [(x - x0) / sigma, *slopes[: order - 1]]
            if following == 0:
                x = x0
            else:
                for weight, slope in zip(weights(sigmas, i, len(slopes)), slopes, strict=True):
                    x = x + weight * slope
            yield x, x0

    return sampler


def exponential_multistep(weights: Callable[[float, float], tuple[float, float]]) -> Sampler:
    """The samplers that solve the linear part exactly in lambda = -log sigma and interpolate x0 from two steps.

    `weights(h, h_last)` gives those of x0 and of the last step's x0 in x' = exp(-h) x + a x0 + b x0_last. The first
    step, and one to sigma 0, are of first order.
    """

    def sampler(denoiser: Denoiser, x: torch.Tensor, sigmas: Sequence[float]) -> Steps:
        last = None
        for i, (sigma, following) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
            x0 = denoiser(x, sigma)
            ratio = following / sigma
            if last is None or following == 0:
                x = ratio * x + (1 - ratio) * x0
            else:
                now, before = weights(-math.log(ratio), math.log(sigmas[i - 1] / sigma))
                x = ratio * x + now * x0 + before * last
            last = x0
            yield x, x0

    return sampler


def euler_weights(sigmas: Sequence[float], i: int, count: int) -> Sequence[float]:
    """The slope times the step: Karras et al. 2022 (arXiv:2206.00364)."""
    return [sigmas[i + 1] - sigmas[i]]


def lms_weights(sigmas: Sequence[float], i: int, count: int) -> Sequence[float]:
    """Adams-Bashforth for uneven steps: the polynomial through the last `count` slopes, integrated over the step."""
    nodes = [sigmas[i - k] for k in range(count)]
    middle, half = (sigmas[i + 1] + sigmas[i]) / 2, (sigmas[i + 1] - sigmas[i]) / 2
    points = (middle - half / math.sqrt(3), middle + half / math.sqrt(3))  # Gauss-Legendre: exact to degree 3
    return [half * sum(lagrange(nodes, j, point) for point in points) for j in range(count)]


ADAMS_BASHFORTH = ((1,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def ipndm_weights(sigmas: Sequence[float], i: int, count: int) -> Sequence[float]:
    """Adams-Bashforth as if all steps were equal: iPNDM (Zhang and Chen 2022, arXiv:2204.13902)."""
    return [(sigmas[i + 1] - sigmas[i]) * weight for weight in ADAMS_BASHFORTH[count - 1]]


GRADIENT_ESTIMATION_GAMMA = 2.0


def gradient_estimation_weights(sigmas: Sequence[float], i: int, count: int) -> Sequence[float]:
    """The slope extrapolated from the last one by gamma: Permenter and Yuan 2023 (arXiv:2306.04848)."""
    step = sigmas[i + 1] - sigmas[i]
    if count == 1:
        return [step]
    return [GRADIENT_ESTIMATION_GAMMA * step, (1 - GRADIENT_ESTIMATION_GAMMA) * step]


# The VP noise schedule in which DEIS interpolates: Karras et al. 2022, table 1, for sigma from 0.002 to 80.
VP_EPSILON = 1e-3
VP_START = math.log1p(0.002**2)
VP_END = math.log1p(80.0**2)
VP_BETA_D = 2 * (VP_START / VP_EPSILON - VP_END) / (VP_EPSILON - 1)
VP_BETA_MIN = VP_END - VP_BETA_D / 2
DEIS_POINTS = 10_000


def vp_time(sigmas: torch.Tensor) -> torch.Tensor:
    """Times t of noise levels in the VP schedule, where log(1 + sigma^2) = beta_d t^2 / 2 + beta_min t."""
    growth = (sigmas**2 + 1).log()
    return ((VP_BETA_MIN**2 + 2 * VP_BETA_D * growth).sqrt() - VP_BETA_MIN) / VP_BETA_D


def deis_weights(sigmas: Sequence[float], i: int, count: int) -> Sequence[float]:
    """tAB-DEIS (Zhang and Chen 2022, arXiv:2204.13902): slopes interpolated in VP time t, integrated over d sigma.

    The integral of sigma'(t) L_j(t) is the mean of 10,000 even samples, both ends included, times the interval, all in
    float32. Both cost accuracy, at low levels up to 1e-4 of a weight; ComfyUI's deis computes so, and one name must
    mean one image.
    """
    if count == 1:
        return euler_weights(sigmas, i, count)
    times = vp_time(torch.tensor([sigmas[i + 1], *(sigmas[i - k] for k in range(count))]))
    end, nodes = times[0], times[1:]
    t = torch.linspace(nodes[0], end, DEIS_POINTS)
    signal = torch.exp(-VP_BETA_D / 2 * t**2 - VP_BETA_MIN * t)  # 1 / (1 + sigma^2)
    sigma_rate = (VP_BETA_D * t + VP_BETA_MIN) / 2 / (signal * (1 - signal)).sqrt()
    step = (end - nodes[0]) / DEIS_POINTS
    return [float((sigma_rate * lagrange(nodes, j, t)).sum() * step) for j in range(count)]


def lagrange(nodes: Any, j: int, at: Any) -> Any:
    """The polynomial that is 1 at `nodes[j]` and 0 at the other nodes, evaluated `at` a number or tensor."""
    value = 1.0
    for k, node in enumerate(nodes):
        if k != j:
            value = value * ((at - node) / (nodes[j] - node))
    return value


def dpmpp_2m_weights(h: float, h_last: float) -> tuple[float, float]:
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095): x0 extrapolated to the middle of the step."""
    extrapolation = h / (2 * h_last)
    weight = -math.expm1(-h)
    return weight * (1 + extrapolation), -weight * extrapolation


def res_multistep_weights(h: float, h_last: float) -> tuple[float, float]:
    """RES second-order multistep (Zhang et al. 2023, arXiv:2308.02157): x0 linear in lambda, integrated exactly."""
    first = -math.expm1(-h)
    second = (1 - first / h) * h / h_last
    return first + second, -second


euler = linear_multistep(1, euler_weights)

SAMPLERS: dict[str, Sampler] = {
    "euler": euler,
    "ddim": euler,  # with no added noise DDIM is Euler (Song et al. 2020, arXiv:2010.02502)
    "heun": heun,
    "dpm_2": dpm_2,
    "lms": linear_multistep(4, lms_weights),
    "ipndm": linear_multistep(4, ipndm_weights),
    "deis": linear_multistep(3, deis_weights),
    "gradient_estimation": linear_multistep(2, gradient_estimation_weights),
    "dpmpp_2m": exponential_multistep(dpmpp_2m_weights),
    "res_multistep": exponential_multistep(res_multistep_weights),
}


def why_not_descending(sigmas: torch.Tensor) -> str | None:
    """What keeps `sigmas` from being two or more finite levels, each lower than the one before, none negative."""
    if sigmas.ndim != 1 or len(sigmas) < 2:
        return f"a row of two or more is needed, and these have the shape {list(sigmas.shape)}"
    if not bool(torch.isfinite(sigmas).all()):
        return "one of them is not a number"
    rising = torch.nonzero(sigmas[1:] >= sigmas[:-1]).flatten()
    if len(rising):
        step = int(rising[0])
        return f"at step {step + 1} they go from {float(sigmas[step]):g} to {float(sigmas[step + 1]):g}"
    if float(sigmas[-1]) < 0:
        return f"the last one is {float(sigmas[-1]):g}"
    return None
