"""FLUX.1 (dev, schnell): the page's plan, one packed row-wise projection, no fused inputs.

Besides it the modulations of the blocks are sharded, 3.2 of 11.9 billion parameters, for one reduce in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..checkpoint.layout import IDENTITY
from ..local import LocalAttributes
from ..plan import PackedRowwiseParallel
from ..ranks import Ranks
from .architecture import Architecture
from .flux_layout import BFL_FLUX, detect
from .modulation import join
from .tokens import image_ids, text_ids

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
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.ff_context.net.0.proj": "colwise",
    "transformer_blocks.*.ff_context.net.2": "rowwise",
    "single_transformer_blocks.*.attn": LocalAttributes(("heads", "inner_dim")),
    "single_transformer_blocks.*.attn.to_q": "colwise",
    "single_transformer_blocks.*.attn.to_k": "colwise",
    "single_transformer_blocks.*.attn.to_v": "colwise",
    "single_transformer_blocks.*.proj_mlp": "colwise",
    # Its input is the attention output beside the feed-forward's.
    "single_transformer_blocks.*.proj_out": PackedRowwiseParallel(sizes=("attn.inner_dim", "mlp_hidden_dim")),
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1_context.linear": "rowwise_split_input",
    "single_transformer_blocks.*.norm.linear": "rowwise_split_input",
}


def modulations(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The AdaLN modules of all blocks: (module, its activation's name, its Linear)."""
    norms = [norm for block in model.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    norms += [block.norm for block in model.single_transformer_blocks]
    return [(norm, "silu", norm.linear) for norm in norms]


def bind(model: nn.Module, ranks: Ranks) -> None:
    """Join the reduces of all modulations."""
    join(modulations(model), ranks)


def merged(model: nn.Module) -> int:
    """All-reduces that `bind` saves in one forward: all modulations' but one."""
    return len(modulations(model)) - 1


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 4x3 image tokens, 5 text tokens, batch 2, unequal timesteps."""
    image, text = (4, 3), 5
    return {
        "hidden_states": torch.randn(2, image[0] * image[1], config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, text, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(2, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.tensor([0.7, 0.4]),
        "img_ids": image_ids(*image, "cpu")[:, :3],
        "txt_ids": text_ids(text, "cpu")[:, :3],
        "guidance": torch.tensor([3.5, 2.0]) if config["guidance_embeds"] else None,
    }


SMALL = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 12,
    "joint_attention_dim": 40,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": True,
}

ARCHITECTURE = Architecture(
    name="flux",
    model_class="FluxTransformer2DModel",
    plan=PLAN,
    layouts=(BFL_FLUX, IDENTITY),
    detect=detect,
    bind=bind,
    merged=merged,
    published={"FLUX.1-dev": {"guidance_embeds": True}},
    examples={"dev": SMALL, "schnell": {**SMALL, "num_layers": 1, "guidance_embeds": False}},
    inputs=inputs,
)
