"""FLUX.1 as ComfyUI sees it: its own classes without weights, and its descriptions of the models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.model_base
import comfy.supported_models

from ..model import ShardedBase
from . import given
from .flux_class import ShardedFlux, shared_config

# What diffusers' class takes where a config.json is silent.
DEFAULTS = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}


class ShardedFlux1(ShardedBase, comfy.model_base.Flux):
    """`comfy.model_base.Flux` on the ranks: FLUX.1 dev, schnell, Krea, Kontext, Fill, Canny and Depth."""

    diffusion_class = ShardedFlux


def skeleton(config: Mapping[str, Any]) -> tuple[Any, type, dict[str, Any]]:
    """ComfyUI's model configuration, our class around it and what else its constructor takes.

    The models without guidance (schnell) are sampled without shift.
    """
    unet = unet_config(config)
    if not unet["guidance_embed"]:
        flow = {"model_type": comfy.model_base.ModelType.FLOW}
        return comfy.supported_models.FluxSchnell(unet), ShardedFlux1, flow
    inpaints = unet["in_channels"] == comfy.supported_models.FluxInpaint.unet_config["in_channels"]
    kind = comfy.supported_models.FluxInpaint if inpaints else comfy.supported_models.Flux
    return kind(unet), ShardedFlux1, {}


def unet_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """ComfyUI's description, from diffusers' `config`.

    A token is 2 x 2 latent positions; diffusers counts the channels of tokens, ComfyUI those of latents.
    """
    known = given(DEFAULTS, config)
    return {
        **shared_config(known, text_axes=[]),
        "image_model": "flux",
        "in_channels": known["in_channels"] // 4,
        "out_channels": known.get("out_channels", known["in_channels"]) // 4,
        "patch_size": 2,
        "mlp_ratio": 4.0,
        "theta": 10000,
        "vec_in_dim": known["pooled_projection_dim"],
        "qkv_bias": True,
    }
