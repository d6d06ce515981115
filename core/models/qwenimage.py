"""Qwen-Image: the page's plan, plain col-wise and row-wise pairs alone.

Besides it the modulations of the blocks are sharded, 6.8 of 20.4 billion parameters, for one reduce in all (an edit
model gives its text stream another embedding in every block: there each text modulation has its own).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..local import LocalAttributes
from ..ranks import Ranks
from .architecture import Architecture
from .modulation import join
from .qwenimage_layout import QWENIMAGE_FILE, detect

PLAN = {
    "transformer_blocks.*.attn": LocalAttributes(("heads", "inner_dim", "inner_kv_dim")),
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
    "transformer_blocks.*.img_mod.1": "rowwise_split_input",
    "transformer_blocks.*.txt_mod.1": "rowwise_split_input",
}


def modulations(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The modulations of all blocks that read the same tensor: (module, its activation's name, its Linear)."""
    streams = ("img_mod",) if getattr(model, "zero_cond_t", False) else ("img_mod", "txt_mod")
    found = [getattr(block, stream) for block in model.transformer_blocks for stream in streams]
    return [(modulation, "0", modulation[1]) for modulation in found]


def bind(model: nn.Module, ranks: Ranks) -> None:
    """Join the reduces of all modulations."""
    join(modulations(model), ranks)


def merged(model: nn.Module) -> int:
    """All-reduces that `bind` saves in one forward: all joined modulations' but one."""
    return len(modulations(model)) - 1


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 4x3 image tokens (and a 2x3 reference where it is an edit model), padded text."""
    shapes = [(1, 4, 3), (1, 2, 3)] if config.get("zero_cond_t") else [(1, 4, 3)]
    image = sum(frames * height * width for frames, height, width in shapes)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    made = {
        "hidden_states": torch.randn(2, image, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, config["joint_attention_dim"], generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.7, 0.4]),
        "img_shapes": [shapes, shapes],
    }
    model_class: Any = ARCHITECTURE.load_class()
    if "txt_seq_lens" in inspect.signature(model_class.forward).parameters:
        made["txt_seq_lens"] = [5, 5]  # diffusers before 0.37 does not take them from the states
    return made


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
    layouts=(QWENIMAGE_FILE,),
    detect=detect,
    bind=bind,
    merged=merged,
    published={"Qwen-Image": {}},
    examples={"base": SMALL, "edit": {**SMALL, "zero_cond_t": True}},
    inputs=inputs,
)
