"""MiniMax-H3: one packed sequence of video, text and audio rows; its AdaLN projections are 39 % of the weights.

They read one embedding per timestep and modality, so `rowwise_split_input` shards them for a small reduce per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tp.local import LocalAttributes
from ..tp.plan import PackedColwiseParallel
from .architecture import Architecture

BLOCK = {
    "attn": LocalAttributes(("heads", "inner_dim")),
    "attn.to_q": "colwise",
    "attn.to_k": "colwise",
    "attn.to_v": "colwise",
    "attn.to_out.0": "rowwise",
    "ff.net.0.proj": PackedColwiseParallel((1, 1)),
    "ff.net.2": "rowwise",
}
PLAN = {
    **{f"token_refiner.refiner_blocks.*.{name}": style for name, style in BLOCK.items()},
    **{f"transformer_blocks.*.{name}": style for name, style in BLOCK.items()},
    "transformer_blocks.*.adaln_proj.linear": "rowwise_split_input",
}

VIDEO, TEXT, AUDIO = 0, 1, 2  # modality tags of the packed sequence


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 4 text rows, 3 audio rows, 2x2x2 video rows, two timesteps, batch 2."""
    text, audio, video = 4, 3, (2, 2, 2)
    frames, height, width = video
    count = frames * height * width
    length = text + audio + count
    positions = torch.zeros(length, 3)
    positions[:, 0] = torch.arange(length)
    positions[text + audio :, 1] = torch.arange(count) // width % height
    positions[text + audio :, 2] = torch.arange(count) % width
    patch = config["in_channels"]
    for size in config["patch_size"]:
        patch *= size
    return {
        "hidden_states": torch.randn(2, count, patch, generator=generator),
        "audio_hidden_states": torch.randn(2, audio, config["audio_in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, text, config["text_dim"], generator=generator),
        "timestep": torch.tensor([0.0, 0.7]),
        "timestep_indices": torch.tensor([0] * text + [1] * (audio + count)),
        "token_tags": torch.tensor([TEXT] * text + [AUDIO] * audio + [VIDEO] * count),
        "position_ids": positions,
        "video_indices": torch.arange(text + audio, length),
        "audio_indices": torch.arange(text, text + audio),
        "text_indices": torch.arange(text),
    }


SMALL = {
    "num_attention_heads": 12,
    "attention_head_dim": 16,
    "hidden_size": 120,  # not the attention's inner width, as in the published model
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 240,
    "in_channels": 4,
    "audio_in_channels": 8,
    "text_dim": 40,
    "freq_dim": 32,
    "time_embed_hidden_dim": 48,
    "time_embed_dim": 36,
    "rope_freq_dim": 2,
}

ARCHITECTURE = Architecture(
    name="minimax_h3",
    model_class="MiniMaxH3Transformer3DModel",
    plan=PLAN,
    minimum_diffusers="0.40.0",
    published={"MiniMax-H3": {}},
    examples={"base": SMALL},
    inputs=inputs,
)
