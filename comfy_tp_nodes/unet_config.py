"""ComfyUI's descriptions of the models (its `unet_config`), made from diffusers' config.json.

Made here because core's detection takes head counts for granted that only the largest published models have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import comfy.ldm.flux.model

Config = Mapping[str, Any]

# Architecture -> what its diffusers class takes where a config.json is silent.
DEFAULTS: dict[str, dict[str, Any]] = {
    "flux2": {
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
    },
    "flux": {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    },
    "qwenimage": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
}


def unet_config(architecture: str, config: Config) -> dict[str, Any]:
    """ComfyUI's description of a model of that `architecture`, from diffusers' `config`."""
    given = {key: value for key, value in config.items() if value is not None}
    return MADE[architecture]({**DEFAULTS[architecture], **given})


def flux2(known: Config) -> dict[str, Any]:
    """FLUX.2: one token per latent position, modulations shared by all blocks, no biases, no pooled text."""
    made = {
        **_flux_sizes(known),
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
    # Newer ComfyUI needs it, 0.3.75 does not know it.
    fields = getattr(comfy.ldm.flux.model.FluxParams, "__dataclass_fields__", {})
    if "txt_ids_dims" in fields:
        made["txt_ids_dims"] = [3]
    return made


def flux(known: Config) -> dict[str, Any]:
    """FLUX.1: a token is 2 x 2 latent positions; diffusers counts the channels of tokens, ComfyUI those of latents."""
    return {
        **_flux_sizes(known),
        "image_model": "flux",
        "in_channels": known["in_channels"] // 4,
        "out_channels": known.get("out_channels", known["in_channels"]) // 4,
        "patch_size": 2,
        "mlp_ratio": 4.0,
        "theta": 10000,
        "vec_in_dim": known["pooled_projection_dim"],
        "qkv_bias": True,
    }


def _flux_sizes(known: Config) -> dict[str, Any]:
    return {
        "hidden_size": known["num_attention_heads"] * known["attention_head_dim"],
        "num_heads": known["num_attention_heads"],
        "depth": known["num_layers"],
        "depth_single_blocks": known["num_single_layers"],
        "context_in_dim": known["joint_attention_dim"],
        "axes_dim": list(known["axes_dims_rope"]),
        "guidance_embed": known["guidance_embeds"],
    }


def qwenimage(known: Config) -> dict[str, Any]:
    """Qwen-Image: ComfyUI's class has diffusers' own names."""
    names = DEFAULTS["qwenimage"]
    return {"image_model": "qwen_image", **{name: known[name] for name in names}}


MADE: dict[str, Callable[[Config], dict[str, Any]]] = {"flux2": flux2, "flux": flux, "qwenimage": qwenimage}
