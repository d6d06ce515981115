"""Wan 2.1 and 2.2: self- and cross-attention whose q and k are normed over all heads at once.

Each rank holds whole heads, so the mean square needs a reduce of one number per token; q and k share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..tp.local import LocalAttributes
from ..tp.norm import RMSNormAcrossRanks
from ..tp.plan import WherePresent
from .architecture import Architecture
from .joins import of_norms

ATTENTION = {
    "": LocalAttributes(("heads", "inner_dim", "kv_inner_dim")),
    ".to_q": "colwise",
    ".to_k": "colwise",
    ".to_v": "colwise",
    ".norm_q": RMSNormAcrossRanks(),
    ".norm_k": RMSNormAcrossRanks(),
    ".to_out.0": "rowwise",
}
PLAN = {
    **{f"blocks.*.attn1{name}": style for name, style in ATTENTION.items()},
    **{f"blocks.*.attn2{name}": style for name, style in ATTENTION.items()},
    # Image-conditioned models attend to image tokens as well.
    "blocks.*.attn2.add_k_proj": "colwise",
    "blocks.*.attn2.add_v_proj": "colwise",
    "blocks.*.attn2.norm_added_k": WherePresent(RMSNormAcrossRanks()),
    "blocks.*.ffn.net.0.proj": "colwise",
    "blocks.*.ffn.net.2": "rowwise",
}


def attentions(model: nn.Module) -> Iterator[nn.Module]:
    """Every attention of the model."""
    for block in model.blocks:
        yield block.attn1
        yield block.attn2


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 2 frames of 4x4, 6 text tokens (512 after 4 image tokens where it takes images)."""
    image = config["image_dim"]
    text = 6 if image is None else 512
    return {
        "hidden_states": torch.randn(2, config["in_channels"], 2, 4, 4, generator=generator),
        "timestep": torch.tensor([700.0, 400.0]),
        "encoder_hidden_states": torch.randn(2, text, config["text_dim"], generator=generator),
        "encoder_hidden_states_image": (
            torch.randn(2, 4, image, generator=generator) if image is not None else None
        ),
    }


SMALL = {
    "num_attention_heads": 12,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 40,
    "freq_dim": 32,
    "ffn_dim": 240,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}

ARCHITECTURE = Architecture(
    name="wan",
    model_class="WanTransformer3DModel",
    plan=PLAN,
    **of_norms(attentions),
    published={
        "Wan2.1-T2V-14B": {},
        "Wan2.1-T2V-1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    },
    examples={
        "text": SMALL,
        "image": {**SMALL, "num_layers": 1, "image_dim": 24, "added_kv_proj_dim": 192},
    },
    inputs=inputs,
)
