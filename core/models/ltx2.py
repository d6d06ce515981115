"""LTX-2: a video and an audio stream with attention within, to the text, and across. Norms span all heads.

The rotary angles hold a part for every head (unlike in models whose heads share them), so each rank takes its slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..tp.local import LocalAttributes, SlicedOutput
from ..tp.norm import RMSNormAcrossRanks
from ..tp.plan import WherePresent
from .architecture import Architecture
from .joins import of_norms

ATTENTION = {
    "": LocalAttributes(("heads", "inner_dim", "inner_kv_dim")),
    ".to_q": "colwise",
    ".to_k": "colwise",
    ".to_v": "colwise",
    ".norm_q": RMSNormAcrossRanks(),
    ".norm_k": RMSNormAcrossRanks(),
    ".to_gate_logits": WherePresent("colwise"),  # one gate per head, in models that have them
    ".to_out.0": "rowwise",
}
ATTENTIONS = ("attn1", "audio_attn1", "attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
ROPES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
# "interleaved": [B, tokens, width], heads side by side. "split": [B, heads, tokens, width / 2].
HEADS_OF_ROPE = SlicedOutput(((3, 2), (4, 1)))
PLAN = {
    **{rope: HEADS_OF_ROPE for rope in ROPES},
    **{
        f"transformer_blocks.*.{attention}{name}": style
        for attention in ATTENTIONS
        for name, style in ATTENTION.items()
    },
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.audio_ff.net.0.proj": "colwise",
    "transformer_blocks.*.audio_ff.net.2": "rowwise",
}


def attentions(model: nn.Module) -> Iterator[nn.Module]:
    """Every attention of the model."""
    for block in model.transformer_blocks:
        for name in ATTENTIONS:
            yield getattr(block, name)


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 2 frames of 3x2 video tokens, 5 audio tokens, 6 text tokens, batch 2."""
    frames, height, width, audio, text = 2, 3, 2, 5, 6
    projected = config.get("use_prompt_embeddings", True)
    text_width = config["caption_channels"] if projected else config["cross_attention_dim"]
    audio_text_width = config["caption_channels"] if projected else config["audio_cross_attention_dim"]
    modulated = config.get("cross_attn_mod") or config.get("audio_cross_attn_mod")
    return {
        "hidden_states": torch.randn(2, frames * height * width, config["in_channels"], generator=generator),
        "audio_hidden_states": torch.randn(2, audio, config["audio_in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, text, text_width, generator=generator),
        "audio_encoder_hidden_states": torch.randn(2, text, audio_text_width, generator=generator),
        "timestep": torch.tensor([[700.0], [400.0]]).expand(2, frames * height * width),
        "audio_timestep": torch.tensor([700.0, 400.0]),
        **({"sigma": torch.tensor([700.0, 400.0])} if modulated else {}),
        "encoder_attention_mask": torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2]),
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": audio,
    }


SMALL = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 12,
    "attention_head_dim": 16,
    "cross_attention_dim": 192,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 12,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 96,
    "num_layers": 2,
    "caption_channels": 40,
}

ARCHITECTURE = Architecture(
    name="ltx2",
    model_class="LTX2VideoTransformer3DModel",
    plan=PLAN,
    heads_key=("num_attention_heads", "audio_num_attention_heads"),
    **of_norms(attentions),
    minimum_diffusers="0.37.0",
    published={"LTX-2": {}},
    differs={rope: "no shape tells that the angles hold a part for every head" for rope in ROPES},
    examples={
        "interleaved rope": SMALL,
        "split rope, gates": {
            **SMALL,
            "num_layers": 1,
            "rope_type": "split",
            "gated_attn": True,
            "audio_gated_attn": True,
            "cross_attn_mod": True,
            "audio_cross_attn_mod": True,
        },
    },
    inputs=inputs,
)
