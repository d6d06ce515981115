"""Qwen-Image single files: diffusers' own names, behind a prefix or none, recognised by what only Qwen-Image has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.layout import FileLayout
from .single_file import PREFIXES, Shapes, rotary_axes

QWENIMAGE_FILE = FileLayout("Qwen-Image single file", prefixes=PREFIXES)
PATCH = 2
# What the files of later models hold besides, and the settings of diffusers that it stands for.
EDIT_2511 = "__index_timestep_zero__"  # empty: a mark, no parameter
LATER = {
    EDIT_2511: ("zero_cond_t",),
    "time_text_embed.addition_t_embedding.weight": ("use_additional_t_cond", "use_layer3d_rope"),
}


def detect(entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a Qwen-Image single file from its tensor names and shapes, or None."""
    shapes = Shapes(entries, QWENIMAGE_FILE)
    text_norm, image_in = shapes["txt_norm.weight"], shapes["img_in.weight"]
    norm = shapes["transformer_blocks.0.attn.norm_added_q.weight"]
    modulation, out = shapes["transformer_blocks.0.img_mod.1.weight"], shapes["proj_out.weight"]
    if not (text_norm and image_in and norm and modulation and out):
        return None
    hidden, head = image_in[0], norm[0]
    return {
        "_class_name": "QwenImageTransformer2DModel",
        "patch_size": PATCH,
        "in_channels": image_in[1],
        "out_channels": out[0] // PATCH**2,
        "num_layers": shapes.blocks("transformer_blocks"),
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": text_norm[0],
        "axes_dims_rope": rotary_axes(head),
        **{key: True for mark, keys in LATER.items() if shapes[mark] is not None for key in keys},
    }
