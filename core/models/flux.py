"""FLUX.1 (dev, schnell): the page's plan, one packed row-wise projection, no fused inputs.

Besides it the modulations of the blocks are sharded, 3.2 of 11.9 billion parameters, for one reduce in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..tp.local import LocalAttributes
from ..tp.plan import PackedRowwiseParallel
from .architecture import Architecture
from .flux_layout import BFL_FLUX, detect
from .joins import of_modulations
from .single_file import DIFFUSERS_FILE
from .tokens import grid_tokens, image_ids, text_ids, unflatten_latent

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


PATCH = 2  # a token is 2 x 2 latent positions
REFERENCE_SCALE = 1  # axis 0 of the k-th reference's ids, by method "index"


def modulations(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The AdaLN modules of all blocks: (module, its activation's name, its Linear)."""
    norms = [norm for block in model.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    norms += [block.norm for block in model.single_transformer_blocks]
    return [(norm, "silu", norm.linear) for norm in norms]


def predict(
    model: nn.Module,
    x: torch.Tensor,
    timestep: torch.Tensor,
    context: torch.Tensor,
    *,
    guidance: torch.Tensor | None = None,
    references: Sequence[torch.Tensor] = (),
    reference_method: str = "offset",
    pooled: torch.Tensor | None = None,
) -> torch.Tensor:
    """One model call from ComfyUI's inputs.

    `x` [B, C, h, w] latent grid of any size (16 channels; with those of a mask or control picture behind them where the
    model takes them), `timestep` [B] in 0..1 (sigma), `context` [B, L, joint_attention_dim], `guidance` [B] or None,
    `references` latents [B or 1, 16, h_k, w_k], `pooled` [B, pooled_projection_dim or wider]; zeros where it is None.
    Returns the velocity [B, 16, h, w].

    Positions: 3 axes; a token of the image at (row, column) has ids (0, row, column), a text token (0, 0, 0), the k-th
    reference those of its place (`placed_latents`).
    """
    config = model.config
    if x.shape[1] * PATCH**2 != config.in_channels:
        raise InputError(
            f"The latent has {x.shape[1]} channels, but this FLUX.1 model takes {config.in_channels // PATCH**2}. Use an "
            f"EmptySD3LatentImage node or the FLUX.1 VAE."
        )
    if context.shape[-1] != config.joint_attention_dim:
        raise InputError(
            f"The conditioning is {context.shape[-1]} wide, but this FLUX.1 model takes {config.joint_attention_dim}: "
            f"load T5-XXL and CLIP-L with a DualCLIPLoader node of type flux."
        )
    width = config.pooled_projection_dim
    if pooled is None:
        pooled = x.new_zeros(x.shape[0], width)
    elif pooled.shape[-1] < width:
        raise InputError(
            f"The pooled output of the conditioning is {pooled.shape[-1]} wide, but this FLUX.1 model takes {width}: load "
            f"T5-XXL and CLIP-L with a DualCLIPLoader node of type flux."
        )
    tokens, ids = grid_tokens(x, references, reference_method, REFERENCE_SCALE, PATCH)
    ids = torch.cat([torch.zeros(context.shape[1], 4, device=x.device), ids])[:, :3]
    velocity = run(model, tokens, context, timestep, guidance, pooled[:, :width], ids)
    return unflatten_latent(velocity, x.shape[-2], x.shape[-1], PATCH)


def run(
    model: nn.Module,
    image: torch.Tensor,
    text: torch.Tensor,
    timestep: torch.Tensor,
    guidance: torch.Tensor | None,
    pooled: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The model on image tokens [B, S, in] and text tokens [B, L, joint]; `ids` [L + S, 3] positions, text first.

    `timestep` and `guidance` [B] stay in the dtype they come in until they are embedded, as ComfyUI has it. Without
    guidance a model that takes it runs without. Returns [B, S, out].
    """
    dtype = image.dtype
    embed = model.time_text_embed
    temb = embed.timestep_embedder(embed.time_proj(timestep * 1000).to(dtype))
    if guidance is not None and model.config.guidance_embeds:
        temb = temb + embed.guidance_embedder(embed.time_proj(guidance * 1000).to(dtype))
    temb = temb + embed.text_embedder(pooled)
    rope = model.pos_embed(ids)
    image, text = model.x_embedder(image), model.context_embedder(text)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        text, image = block(hidden_states=image, encoder_hidden_states=text, temb=temb, image_rotary_emb=rope)
    return model.proj_out(model.norm_out(image, temb))


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
    layouts=(BFL_FLUX, DIFFUSERS_FILE),
    detect=detect,
    **of_modulations(modulations),
    predict=predict,
    latent_patch=PATCH,
    published={"FLUX.1-dev": {"guidance_embeds": True}},
    examples={"dev": SMALL, "schnell": {**SMALL, "num_layers": 1, "guidance_embeds": False}},
    inputs=inputs,
)
