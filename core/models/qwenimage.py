"""Qwen-Image: the document's plan, plain col-wise and row-wise pairs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..local import LocalAttributes
from .architecture import Architecture

PLAN = {
    "transformer_blocks.*.attn": LocalAttributes(("heads", "inner_dim")),
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.add_q_proj": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",
    "transformer_blocks.*.img_mlp.net.0.proj": "colwise",
    "transformer_blocks.*.img_mlp.net.2": "rowwise",
    "transformer_blocks.*.txt_mlp.net.0.proj": "colwise",
    "transformer_blocks.*.txt_mlp.net.2": "rowwise",
}


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 4x3 image tokens (and a 2x3 reference where it is an edit model), padded text."""
    shapes = [(1, 4, 3), (1, 2, 3)] if config["zero_cond_t"] else [(1, 4, 3)]
    image = sum(frames * height * width for frames, height, width in shapes)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    return {
        "hidden_states": torch.randn(2, image, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, config["joint_attention_dim"], generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.7, 0.4]),
        "img_shapes": [shapes, shapes],
    }


SMALL = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 12,
    "joint_attention_dim": 40,
    "axes_dims_rope": (4, 6, 6),
}

ARCHITECTURE = Architecture(
    name="qwenimage",
    model_class="QwenImageTransformer2DModel",
    plan=PLAN,
    published={"Qwen-Image": {}},
    examples={"base": SMALL, "edit": {**SMALL, "zero_cond_t": True}},
    inputs=inputs,
)
