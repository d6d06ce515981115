"""fp8 weights with one scale per tensor: their product, and making and reading them.

A scalar scale belongs to every shard of its tensor alike, so a shard stays fp8 and the scale travels with it.
Source: the OCP 8-bit floating point specification (largest finite values 448 and 57344).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F

FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class Scales:
    """Of one file module whose weight is fp8: its weight scale, input scale where given, and how to multiply."""

    weight: float = 1.0
    input: float | None = None
    full_precision: bool = False


def quantise(weight: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, float]:
    """`weight` as fp8 with one scale: the largest magnitude becomes the largest finite value of `dtype`."""
    largest = weight.abs().amax().float().item() if weight.numel() else 0.0
    scale = largest / torch.finfo(dtype).max if largest > 0 else 1.0
    return (weight.float() / scale).to(dtype), scale


def dequantise(weight: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The fp8 `weight` times its `scale` in `dtype`; exact up to one rounding."""
    return weight.to(torch.float32).mul_(scale).to(dtype)


def is_fp8(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds 8-bit floats."""
    return tensor.dtype in FP8.values()


class Workspace(threading.local):
    """Of each thread, one buffer per device and dtype into which layers dequantise their weight, in turn."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def weight(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`stored` in `dtype`, unscaled, in the shared buffer: valid until the next call on this device."""
        key = (stored.device, dtype)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < stored.numel():
            with torch.inference_mode(False):
                buffer = self.buffers[key] = torch.empty(stored.numel(), dtype=dtype, device=stored.device)
        return buffer[: stored.numel()].view(stored.shape).copy_(stored)


WORKSPACE = Workspace()


def product(
    x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., in] times the fp8 `weight` [out, in] and its scale, plus `bias` [out], in the dtype of `x`.

    On devices with fp8 matrix units `torch._scaled_mm` multiplies fp8 by fp8, unless the file asks for full precision;
    elsewhere the weight is cast into a reused buffer (exact) and the scale is applied to the result.
    """
    if multiplies_fp8(x, weight, scales):
        return _scaled_product(x, weight, scales, bias)
    y = F.linear(x, WORKSPACE.weight(weight, x.dtype))
    y = y.mul_(scales.weight) if scales.weight != 1.0 else y
    return y if bias is None else y.add_(bias)


def multiplies_fp8(x: torch.Tensor, weight: torch.Tensor, scales: Scales) -> bool:
    """Whether this layer's product runs on fp8 matrix units: CUDA 8.9 or newer, e4m3, sides multiples of 16."""
    return (
        x.is_cuda
        and weight.dtype == torch.float8_e4m3fn
        and not scales.full_precision
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 16 == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )


def _scaled_product(
    x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None
) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    largest = torch.finfo(torch.float8_e4m3fn).max
    if scales.input is not None:
        input_scale = torch.full((), scales.input, dtype=torch.float32, device=x.device)
    else:
        input_scale = (flat.abs().amax().float() / largest).clamp_(min=1e-12)
    quantised = (flat.float() / input_scale).clamp_(-largest, largest).to(torch.float8_e4m3fn)
    weight_scale = torch.full((), scales.weight, dtype=torch.float32, device=x.device)
    y = torch._scaled_mm(
        quantised, weight.t(), scale_a=input_scale, scale_b=weight_scale, bias=bias, out_dtype=x.dtype
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])
