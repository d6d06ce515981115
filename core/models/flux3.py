"""FLUX.3: per-mode blocks for image, reference and text tokens, then joint blocks. No plan in diffusers 0.42.1.

A block adds attention and feed-forward, both read from the same normed tokens. The modulations take one row per
token, so they stay replicated: a reduce would be three hidden widths per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tp.local import LocalAttributes
from ..tp.plan import PackedColwiseParallel
from .architecture import Architecture
from .tokens import Offset, image_ids, text_ids

BLOCK = {
    "attn": LocalAttributes(("heads", "inner_dim")),
    "attn.to_q": "colwise",
    "attn.to_k": "colwise",
    "attn.to_v": "colwise",
    "attn.to_out.0": "rowwise",
    "ff.linear_in": PackedColwiseParallel((1, 1)),
    "ff.linear_out": "rowwise",
}
STACKS = ("mode_blocks.image", "mode_blocks.image_cond", "txt_mode_blocks", "single_transformer_blocks")
PLAN = {f"{stack}.*.{name}": style for stack in STACKS for name, style in BLOCK.items()}


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 4x3 image tokens, a reference of 2x3, 5 text tokens, batch 2."""
    image, reference, text = (4, 3), (2, 3), 5
    return {
        "hidden_states": torch.randn(2, image[0] * image[1], config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, text, config["joint_attention_dim"], generator=generator),
        "timestep": torch.tensor([0.7, 0.4]),
        "img_ids": image_ids(*image, "cpu"),
        "txt_ids": text_ids(text, "cpu"),
        "image_cond_hidden_states": torch.randn(
            2, reference[0] * reference[1], config["cond_in_channels"], generator=generator
        ),
        "image_cond_ids": image_ids(*reference, "cpu", Offset(index=10)),
        "target_timestep": torch.tensor([0.5, 0.2]) if config["flow_map"] else None,
    }


SMALL = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 12,
    "joint_attention_dim": 40,
    "timestep_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}

ARCHITECTURE = Architecture(
    name="flux3",
    model_class="Flux3Transformer2DModel",
    plan=PLAN,
    minimum_diffusers="0.42.0",
    published={"FLUX.3 (class defaults)": {}},
    differs={
        "early_stream_modulations": "the embedding is one row per token, so the reduce would be large",
        "single_stream_modulations": "the embedding is one row per token, so the reduce would be large",
    },
    examples={"base": SMALL, "flow map": {**SMALL, "flow_map": True}},
    inputs=inputs,
)
