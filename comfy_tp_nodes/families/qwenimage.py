"""Qwen-Image as ComfyUI sees it: its own classes without weights, and its description of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.ldm.qwen_image.model
import comfy.model_base
import comfy.supported_models

from ..model import ShardedBase
from ..proxy import RankCalls
from . import given

# ComfyUI's class has diffusers' own names; these are what it takes where a config.json is silent.
DEFAULTS = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}


class ShardedQwenImage(RankCalls, comfy.ldm.qwen_image.model.QwenImageTransformer2DModel):
    """ComfyUI's Qwen-Image without weights."""

    reference_method = "index"
    mlp_ratio = 4.0

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.inner_dim


class ShardedQwen(ShardedBase, comfy.model_base.QwenImage):
    """`comfy.model_base.QwenImage` on the ranks: Qwen-Image and Qwen-Image-Edit."""

    diffusion_class = ShardedQwenImage


def skeleton(config: Mapping[str, Any]) -> tuple[Any, type, dict[str, Any]]:
    """ComfyUI's model configuration, our class around it and what else its constructor takes."""
    return comfy.supported_models.QwenImage(unet_config(config)), ShardedQwen, {}


def unet_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """ComfyUI's description, from diffusers' `config`."""
    known = given(DEFAULTS, config)
    return {"image_model": "qwen_image", **{name: known[name] for name in DEFAULTS}}
