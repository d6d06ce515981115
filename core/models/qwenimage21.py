"""Qwen-Image 2.1: one stream, separate gate and up projections, one modulation for all blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tp.local import LocalAttributes
from .architecture import Architecture

PLAN = {
    "transformer_blocks.*.attn": LocalAttributes(("heads", "inner_dim")),
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.img_mlp.proj": "colwise",
    "transformer_blocks.*.img_mlp.gate_layer": "colwise",
    "transformer_blocks.*.img_mlp.out": "rowwise",
    "modulation.1": "rowwise_split_input",
}


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: text, a 2x2 condition image, more text, and the 4x2 target image, batch 2.

    One image slot of the language model stands for 2x2 latent tokens.
    """
    shapes = [(1, 2, 2), (1, 4, 2)]
    tokens = sum(frames * height * width for frames, height, width in shapes)
    # 3 text tokens, 1 slot of the condition image, 2 text tokens; then the target's 2 slots.
    slots = torch.tensor([False, False, False, True, False, False, True, True])
    return {
        "hidden_states": torch.randn(2, tokens, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, 6, config["context_in_dim"], generator=generator),
        "timestep": torch.tensor([0.7, 0.4]),
        "img_shapes": [shapes, shapes],
        "img_mask": slots.expand(2, -1),
    }


SMALL = {
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 12,
    "context_in_dim": 40,
    "axes_dims_rope": (4, 6, 6),
}

ARCHITECTURE = Architecture(
    name="qwenimage21",
    model_class="QwenImage21Transformer2DModel",
    plan=PLAN,
    minimum_diffusers="0.41.0",
    published={"Qwen-Image-2.1 (class defaults)": {}},
    examples={"base": SMALL, "one timestep": {**SMALL, "num_layers": 1, "causal_condition": False}},
    inputs=inputs,
)
