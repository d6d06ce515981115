"""FLUX.2 as ComfyUI sees it: its own classes without weights, and its description of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.model_base
import comfy.supported_models

from ..conditioning import TEXT_LENGTH
from ..model import ShardedBase
from . import given
from .flux_class import ShardedFlux, shared_config

# What diffusers' class takes where a config.json is silent.
DEFAULTS = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 8,
    "num_single_layers": 48,
    "attention_head_dim": 128,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": True,
}


class ShardedFlux2(ShardedBase, comfy.model_base.Flux2):
    """`comfy.model_base.Flux2` on the ranks."""

    diffusion_class = ShardedFlux
    text_length = TEXT_LENGTH


def skeleton(config: Mapping[str, Any]) -> tuple[Any, type, dict[str, Any]]:
    """ComfyUI's model configuration, our class around it and what else its constructor takes."""
    return comfy.supported_models.Flux2(unet_config(config)), ShardedFlux2, {}


def unet_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """ComfyUI's description, from diffusers' `config`.

    One token per latent position, modulations shared by all blocks, no biases, no pooled text. Made here because core's
    detection takes head counts for granted that only the largest published model has.
    """
    known = given(DEFAULTS, config)
    return {
        **shared_config(known, text_axes=[3]),
        "image_model": "flux2",
        "in_channels": known["in_channels"],
        "out_channels": known.get("out_channels", known["in_channels"]),
        "patch_size": known["patch_size"],
        "mlp_ratio": known["mlp_ratio"],
        "theta": known["rope_theta"],
        "vec_in_dim": None,
        "qkv_bias": False,
        "ops_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }
