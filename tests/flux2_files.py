"""Small FLUX.2 models of random weights and the files that they come in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from comfy_tp.core.checkpoint.convert import file_tensors
from comfy_tp.core.models.flux2_layout import BFL_FLUX2
from comfy_tp.core.tp import fp8

SMALL = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 96,
    "axes_dims_rope": (8, 8, 8, 8),
}


def small_flux2(seed: int = 0, **changes):
    """A FLUX.2 of two double and two single blocks, width 128, fp32, in evaluation mode."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(seed)
    return Flux2Transformer2DModel(**{**SMALL, **changes}).eval()


def call_inputs(
    batch: int = 1, height: int = 5, width: int = 7, text: int = 9, seed: int = 1, joint: int = 96
) -> dict:
    """Inputs of `predict` with one reference latent, from a fixed seed."""
    random = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, 128, height, width, generator=random),
        "timestep": torch.full((batch,), 0.7),
        "context": torch.randn(batch, text, joint, generator=random),
        "guidance": torch.full((batch,), 4.0),
        "references": [torch.randn(1, 128, 3, 4, generator=random)],
    }


def single_file_tensors(model, prefix: str = "") -> dict[str, torch.Tensor]:
    """The weights of `model` by the names of a BFL/ComfyUI single file."""
    return file_tensors(BFL_FLUX2, dict(model.named_parameters()), prefix=prefix)


def beside_a_transformer() -> dict[str, torch.Tensor]:
    """What an all-in-one checkpoint holds besides `model.diffusion_model.*`, as ComfyUI writes it."""
    names = (
        "vae.decoder.conv_in.weight",
        "text_encoders.t5xxl.transformer.shared.weight",
        "text_encoders.t5xxl.logit_scale",
        "text_encoders.clip_l.transformer.text_model.final_layer_norm.weight",
    )
    held = {name: torch.ones(4, 4) for name in names}
    held["text_encoders.t5xxl.scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    return held


def save_single_file(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Write `tensors` as one safetensors file."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


QUANTISED = ("img_mlp.0", "img_mlp.2", "txt_mlp.0", "txt_mlp.2", "linear1", "linear2")


def fp8_tensors(
    tensors: dict[str, torch.Tensor],
    style: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    prefix: str = "",
    quantised: tuple[str, ...] = QUANTISED,
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, torch.Tensor]]:
    """`tensors` with the Linears whose names end in `quantised` in fp8, declared in `style`.

    Styles: "metadata" (header), "metadata-short" (header, bare strings, no prefix), "comfy_quant", "scaled_fp8"
    and "cast" (no scales).
    Returns the file's tensors, its metadata, and what the weights are worth exactly.
    """
    held: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    layers = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or not module.endswith(quantised):
            held[name] = exact[name] = tensor.detach()
            continue
        layers.append(module)
        if style == "cast":
            held[name] = tensor.detach().to(dtype)
            exact[name] = held[name].float()
            continue
        held[name], scale = fp8.quantise(tensor.detach(), dtype)
        exact[name] = held[name].float() * scale
        old = style == "scaled_fp8"
        held[f"{module}.scale_weight" if old else f"{module}.weight_scale"] = torch.tensor(scale)
        held[f"{module}.scale_input" if old else f"{module}.input_scale"] = torch.tensor(1.0)
    kind = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}[dtype]
    metadata = {}
    if style.startswith("metadata"):
        short = style == "metadata-short"
        described = {
            (name.removeprefix(prefix) if short else name): (kind if short else {"format": kind})
            for name in layers
        }
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": described})
    elif style == "comfy_quant":
        for name in layers:
            raw = json.dumps({"format": kind, "full_precision_matrix_mult": True}).encode()
            held[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    elif style == "scaled_fp8":
        held[f"{prefix}scaled_fp8"] = torch.zeros(0, dtype=dtype)
    return held, metadata, exact
