"""FLUX.2 (dev, klein 4B, klein 9B): plan, merged reduces, and the call from ComfyUI's inputs.

The model is diffusers' `Flux2Transformer2DModel`, its file untouched. What is bound onto a sharded one:
the two streams of a double block end in row-wise layers at the same place, so their partial sums are joined in one
buffer and reduced once (twice per double block instead of four times), and the three modulations, which all
read the same timestep embedding, share one reduce.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError, UnsupportedError
from ..tp.collectives import Ranks
from ..tp.linear import joint_reduce
from ..tp.local import LocalAttributes
from ..tp.plan import PackedColwiseParallel, PackedRowwiseParallel
from .architecture import Architecture
from .flux2_layout import BFL_FLUX2
from .modulation import join
from .single_file import DIFFUSERS_FILE, Shapes
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
    "transformer_blocks.*.ff.linear_in": PackedColwiseParallel((1, 1)),
    "transformer_blocks.*.ff.linear_out": "rowwise",
    "transformer_blocks.*.ff_context.linear_in": PackedColwiseParallel((1, 1)),
    "transformer_blocks.*.ff_context.linear_out": "rowwise",
    "single_transformer_blocks.*.attn": LocalAttributes(("heads", "inner_dim", "mlp_hidden_dim")),
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj": PackedColwiseParallel(
        sizes=("inner_dim", "inner_dim", "inner_dim", "mlp_hidden_dim", "mlp_hidden_dim")
    ),
    "single_transformer_blocks.*.attn.to_out": PackedRowwiseParallel(sizes=("inner_dim", "mlp_hidden_dim")),
    # The modulations read one vector per step: 1.13 GB of FLUX.2-dev that every rank would hold whole.
    "double_stream_modulation_img.linear": "rowwise_split_input",
    "double_stream_modulation_txt.linear": "rowwise_split_input",
    "single_stream_modulation.linear": "rowwise_split_input",
}

MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
REFERENCE_SCALE = 10  # axis 0 of the k-th reference's ids is 10 * (k + 1)


Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin [S, head_dim], text tokens first


class JointAttention:
    """Attention processor of a sharded double block: local heads, and one reduce for both output projections.

    Takes image tokens [B, S_img, d] and text tokens [B, S_txt, d], returns both attention outputs, whole.
    """

    def __init__(self, processor: Any):
        self._attention_backend = getattr(processor, "_attention_backend", None)
        self._parallel_config = None  # both are what diffusers looks for on a processor

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rope | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = joint_attention(
            attn,
            hidden_states,
            encoder_hidden_states,
            image_rotary_emb,
            attention_mask,
            self._attention_backend,
        )
        return attn.to_out[1](image), text


def joint_attention(
    attn: nn.Module,
    image: torch.Tensor,
    text: torch.Tensor,
    rope: Rope | None,
    mask: torch.Tensor | None = None,
    backend: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both streams of a double block attend to each other on this rank's heads: image and text outputs, whole."""
    width = attn.head_dim

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, width))

    query = torch.cat(
        [attn.norm_added_q(heads(attn.add_q_proj(text))), attn.norm_q(heads(attn.to_q(image)))], dim=1
    )
    key = torch.cat(
        [attn.norm_added_k(heads(attn.add_k_proj(text))), attn.norm_k(heads(attn.to_k(image)))], dim=1
    )
    value = torch.cat([heads(attn.add_v_proj(text)), heads(attn.to_v(image))], dim=1)
    mixed = attend(query, key, value, rope, mask, backend)
    split = text.shape[1]
    text, image = joint_reduce((attn.to_add_out, mixed[:, :split]), (attn.to_out[0], mixed[:, split:]))
    return image, text


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rope: Rope | None,
    mask: torch.Tensor | None = None,
    backend: Any = None,
) -> torch.Tensor:
    """Rotary attention of [B, S, heads, head_dim] each, by diffusers' backends: [B, S, heads * head_dim]."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.embeddings import apply_rotary_emb

    if rope is not None:
        query = apply_rotary_emb(query, rope, sequence_dim=1)
        key = apply_rotary_emb(key, rope, sequence_dim=1)
    return (
        dispatch_attention_fn(query, key, value, attn_mask=mask, backend=backend)
        .flatten(2, 3)
        .to(query.dtype)
    )


def double_block(
    block: nn.Module,
    image: torch.Tensor,
    text: torch.Tensor,
    image_modulation: torch.Tensor,
    text_modulation: torch.Tensor,
    rope: Rope | None,
    attention: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A double block whose two feed-forwards end in one reduce: text and image tokens after it.

    `attention(image, text)` gives both attention outputs.
    """
    shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation_vectors(image_modulation, 6)
    t_shift, t_scale, t_gate, t_ff_shift, t_ff_scale, t_ff_gate = modulation_vectors(text_modulation, 6)

    attended, t_attended = attention(
        (1 + scale) * block.norm1(image) + shift, (1 + t_scale) * block.norm1_context(text) + t_shift
    )
    image = image + gate * attended
    text = text + t_gate * t_attended

    ff, t_ff = block.ff, block.ff_context
    up = ff.act_fn(ff.linear_in((1 + ff_scale) * block.norm2(image) + ff_shift))
    t_up = t_ff.act_fn(t_ff.linear_in((1 + t_ff_scale) * block.norm2_context(text) + t_ff_shift))
    t_down, down = joint_reduce((t_ff.linear_out, t_up), (ff.linear_out, up))
    image = image + ff_gate * down
    text = text + t_ff_gate * t_down
    if text.dtype == torch.float16:
        text = text.clip(-65504, 65504)
    return text, image


def double_block_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb_mod_img: torch.Tensor,
    temb_mod_txt: torch.Tensor,
    image_rotary_emb: Rope | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`double_block` with the arguments of the diffusers block, to be bound onto it."""

    def attention(image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attn(
            hidden_states=image,
            encoder_hidden_states=text,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )

    return double_block(
        self, hidden_states, encoder_hidden_states, temb_mod_img, temb_mod_txt, image_rotary_emb, attention
    )


def single_block(
    block: nn.Module, tokens: torch.Tensor, modulation: torch.Tensor, rope: Rope | None
) -> torch.Tensor:
    """A single block on joint tokens [B, S, d]: attention and feed-forward side by side, one reduce."""
    shift, scale, gate = modulation_vectors(modulation, 3)
    attn = block.attn
    joined = attn.to_qkv_mlp_proj((1 + scale) * block.norm(tokens) + shift)
    # Packed shards keep the proportions of q, k, v and the feed-forward's two halves.
    whole = 3 * attn.inner_dim + attn.mlp_hidden_dim * attn.mlp_mult_factor
    width = joined.shape[-1] * attn.inner_dim // whole
    query, key, value, up = joined.split([width, width, width, joined.shape[-1] - 3 * width], dim=-1)
    query = attn.norm_q(query.unflatten(-1, (-1, attn.head_dim)))
    key = attn.norm_k(key.unflatten(-1, (-1, attn.head_dim)))
    backend = getattr(attn.processor, "_attention_backend", None)
    mixed = attend(query, key, value.unflatten(-1, (-1, attn.head_dim)), rope, backend=backend)
    tokens = tokens + gate * attn.to_out(torch.cat([mixed, attn.mlp_act_fn(up)], dim=-1))
    return tokens.clip(-65504, 65504) if tokens.dtype == torch.float16 else tokens


# What a block hands to its attention, beside the tokens.
ATTENTION_OPTIONS = frozenset(("encoder_hidden_states", "attention_mask", "image_rotary_emb"))


def attention_forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The attention's processor at once, to be bound onto an attention of diffusers.

    Its own forward looks the processor's signature up at every call, to leave out arguments that are not in it; that
    takes longer than the attention's products. Where there are such arguments, it still does.
    """
    if ATTENTION_OPTIONS.issuperset(options):
        return self.processor(self, hidden_states, *args, **options)
    return type(self).forward(self, hidden_states, *args, **options)


def modulation_vectors(parameters: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Shift, scale and gate vectors [B, 1 or S, d] from a modulation's output [B, (S,) count * d]."""
    if parameters.ndim == 2:
        parameters = parameters.unsqueeze(1)
    return parameters.chunk(count, dim=-1)


def bind(model: nn.Module, ranks: Ranks) -> None:
    """Bind the merged forwards onto a freshly sharded model.

    diffusers 0.36 hands modulations to its blocks in another form; there its own block forward stays (with one reduce
    more per block), while `predict` calls the blocks' parts itself and is the same everywhere.
    """
    for block in model.transformer_blocks:
        block.attn.processor = JointAttention(block.attn.processor)
        if splits_modulations(block):
            block.forward = types.MethodType(double_block_forward, block)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.forward = types.MethodType(attention_forward, block.attn)
    join(
        [(module, "act_fn", module.linear) for module in (getattr(model, name) for name in MODULATIONS)],
        ranks,
    )


def splits_modulations(block: nn.Module) -> bool:
    """Whether a double block of diffusers takes whole modulations and splits them itself, as all since 0.37 do."""
    return "temb_mod_img" in inspect.signature(type(block).forward).parameters


def merged(model: nn.Module) -> int:
    """All-reduces that `bind` saves in one forward of the model's own: one or two per double block (of its attention
    and, where the block's forward is ours, its feed-forward), and two of the three modulations'."""
    return sum(1 + splits_modulations(block) for block in model.transformer_blocks) + 2


def predict(
    model: nn.Module,
    x: torch.Tensor,
    timestep: torch.Tensor,
    context: torch.Tensor,
    *,
    guidance: torch.Tensor | None = None,
    references: Sequence[torch.Tensor] = (),
    reference_method: str = "index",
) -> torch.Tensor:
    """One model call from ComfyUI's inputs.

    `x` [B, 128, h, w] latent grid, `timestep` [B] in 0..1 (sigma), `context` [B, L, joint_attention_dim],
    `guidance` [B] or None, `references` latents [B or 1, 128, h_k, w_k]. Returns the velocity [B, 128, h, w].

    Positions: 4 axes; a token of the image at (row, column) has ids (0, row, column, 0), text token l (0, 0, 0, l), the
    k-th reference axis 0 = 10 (k + 1) with method "index".
    """
    config = model.config
    if x.shape[1] != config.in_channels:
        raise InputError(
            f"The latent has {x.shape[1]} channels, but this FLUX.2 model takes {config.in_channels}. Use an "
            f"EmptyFlux2LatentImage node or the FLUX.2 VAE."
        )
    if context.shape[-1] != config.joint_attention_dim:
        raise InputError(
            f"The conditioning is {context.shape[-1]} wide, but this model takes {config.joint_attention_dim}: "
            f"{text_encoder_of(config.joint_attention_dim)}"
        )
    tokens, ids = grid_tokens(x, references, reference_method, REFERENCE_SCALE)
    ids = torch.cat([text_ids(context.shape[1], x.device), ids])
    velocity = run(model, tokens, context, timestep, guidance, ids)
    return unflatten_latent(velocity, x.shape[-2], x.shape[-1])


def run(
    model: nn.Module,
    image: torch.Tensor,
    text: torch.Tensor,
    timestep: torch.Tensor,
    guidance: torch.Tensor | None,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The model on image tokens [B, S, in] and text tokens [B, L, joint]; `ids` [L + S, 4] positions, text first.

    `timestep` and `guidance` [B] stay in the dtype they come in until they are embedded: in bfloat16 the time keeps
    its float32 value and a guidance of 3.5 becomes 3504 / 1000, as ComfyUI has it. Returns [B, S, out].
    """
    dtype = image.dtype
    embed = model.time_guidance_embed
    temb = embed.timestep_embedder(embed.time_proj(timestep * 1000).to(dtype))
    if guidance is not None and embed.guidance_embedder is not None:
        temb = temb + embed.guidance_embedder(embed.time_proj(guidance * 1000).to(dtype))
    # Not through the modules' own forwards, whose result has had several forms in diffusers.
    image_modulation, text_modulation, single_modulation = (
        module.linear(module.act_fn(temb)) for module in (getattr(model, name) for name in MODULATIONS)
    )
    rope = model.pos_embed(ids)
    image, text = model.x_embedder(image), model.context_embedder(text)
    for block in model.transformer_blocks:
        backend = getattr(block.attn.processor, "_attention_backend", None)

        def attention(
            image: torch.Tensor, text: torch.Tensor, attn: nn.Module = block.attn, backend: Any = backend
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return joint_attention(attn, image, text, rope, backend=backend)

        text, image = double_block(block, image, text, image_modulation, text_modulation, rope, attention)
    tokens = torch.cat([text, image], dim=1)
    for block in model.single_transformer_blocks:
        tokens = single_block(block, tokens, single_modulation, rope)
    return model.proj_out(model.norm_out(tokens[:, text.shape[1] :], temb))


# Conditioning width -> the text encoder it comes from (three hidden states of it side by side).
TEXT_ENCODERS = {
    15360: "FLUX.2-dev with the Mistral-3 text encoder (mistral_3_small_flux2)",
    12288: "FLUX.2 klein 9B with the Qwen3-8B text encoder (qwen_3_8b)",
    7680: "FLUX.2 klein 4B with the Qwen3-4B text encoder (qwen_3_4b)",
}


def text_encoder_of(width: int) -> str:
    """What to load so that conditionings are `width` wide."""
    if width in TEXT_ENCODERS:
        return f"it belongs to {TEXT_ENCODERS[width]}. Load that text encoder."
    return "load the text encoder that was made for it."


def check_predicted(config: Mapping[str, Any], model: str = "This FLUX.2") -> None:
    """Raise `UnsupportedError`, about `model`, for one that reads more channels than it makes."""
    read, made = config.get("in_channels"), config.get("out_channels")
    if read is not None and made is not None and read != made:
        raise UnsupportedError(
            f"{model} is a FLUX.2 that reads {read} channels and makes {made}: one made for inpainting or control, whose "
            f"further inputs no node gives it yet. Choose a FLUX.2 of {made} channels, load it with the stock loader, or "
            f"run it sharded from Python (README, `from_pretrained`)."
        )


def detect(entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's configuration from the tensor names and shapes of a BFL/ComfyUI single file, or None.

    `entries` maps file tensor names to objects with a `shape`. Everything follows from shapes: the head width from
    a q norm, the head count from the hidden width, four equal rope axes.
    """
    shapes = Shapes(entries, BFL_FLUX2)
    image_in, text_in = shapes["img_in.weight"], shapes["txt_in.weight"]
    norm_name = "double_blocks.0.img_attn.norm.query_norm"
    norm = shapes[f"{norm_name}.scale"] or shapes[f"{norm_name}.weight"]
    up, modulation = (
        shapes["double_blocks.0.img_mlp.2.weight"],
        shapes["double_stream_modulation_img.lin.weight"],
    )
    if not (image_in and text_in and norm and up and modulation):
        return None
    hidden, head = image_in[0], norm[0]
    time_in, final = shapes["time_in.in_layer.weight"], shapes["final_layer.linear.weight"]
    return {
        "_class_name": "Flux2Transformer2DModel",
        "patch_size": 1,
        "in_channels": image_in[1],
        "out_channels": final[0] if final else None,
        "num_layers": shapes.blocks("double_blocks"),
        "num_single_layers": shapes.blocks("single_blocks"),
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": text_in[1],
        "timestep_guidance_channels": time_in[1] if time_in else 256,
        "mlp_ratio": up[1] / hidden,
        "axes_dims_rope": (head // 4,) * 4,
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": shapes["guidance_in.in_layer.weight"] is not None,
    }


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Arguments of one forward: 4x3 image tokens, 5 text tokens, batch 2, unequal timesteps."""
    image, text = (4, 3), 5
    return {
        "hidden_states": torch.randn(2, image[0] * image[1], config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(2, text, config["joint_attention_dim"], generator=generator),
        "timestep": torch.tensor([0.7, 0.4]),
        "img_ids": image_ids(*image, "cpu"),
        "txt_ids": text_ids(text, "cpu"),
        "guidance": torch.tensor([3.5, 2.0]) if config.get("guidance_embeds", True) else None,
    }


SMALL = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 12,
    "joint_attention_dim": 40,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}

ARCHITECTURE = Architecture(
    name="flux2",
    model_class="Flux2Transformer2DModel",
    plan=PLAN,
    layouts=(BFL_FLUX2, DIFFUSERS_FILE),
    detect=detect,
    bind=bind,
    merged=merged,
    predict=predict,
    published={
        "FLUX.2-dev": {},
        "FLUX.2-klein-9B": {
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
        "FLUX.2-klein-4B": {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    },
    examples={"dev": SMALL, "klein": {**SMALL, "num_layers": 1, "guidance_embeds": False}},
    inputs=inputs,
)
