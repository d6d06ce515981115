"""FLUX.2 (dev, klein 4B, klein 9B): plan, merged reduces, and the call from ComfyUI's inputs.

The model is diffusers' `Flux2Transformer2DModel`, its file untouched. What is bound onto a sharded one:
the two streams of a double block end in row-wise layers at the same place, so their partial sums are joined in one
buffer and reduced once (twice per double block instead of four times), and the three modulations, which all
read the same timestep embedding, share one reduce.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..checkpoint.layout import IDENTITY
from ..errors import InputError
from ..linear import RowwiseLinear, RowwiseSplitInputLinear
from ..plan import PackedColwiseParallel, PackedRowwiseParallel
from ..ranks import Ranks
from .architecture import Architecture
from .flux2_layout import BFL_FLUX2
from .tokens import flatten_latent, image_ids, reference_tokens, text_ids, unflatten_latent

PLAN = {
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
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj": PackedColwiseParallel(),
    "single_transformer_blocks.*.attn.to_out": PackedRowwiseParallel(),
    # The modulations read one vector per step: 1.13 GB of FLUX.2-dev that every rank would hold whole.
    "double_stream_modulation_img.linear": "rowwise_split_input",
    "double_stream_modulation_txt.linear": "rowwise_split_input",
    "single_stream_modulation.linear": "rowwise_split_input",
}

MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
REFERENCE_SCALE = 10  # axis 0 of the k-th reference's ids is 10 * (k + 1)


class JointAttention:
    """Attention processor of a sharded double block: local heads, and one reduce for both output projections.

    Takes image tokens [B, S_img, d] and text tokens [B, S_txt, d], returns both attention outputs, whole.
    """

    def __init__(self, processor: Any):
        self.processor = processor  # diffusers' own; kept for its backend settings

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from diffusers.models.attention_dispatch import dispatch_attention_fn
        from diffusers.models.embeddings import apply_rotary_emb

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, attn.head_dim))

        query = torch.cat(
            [
                attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))),
                attn.norm_q(heads(attn.to_q(hidden_states))),
            ],
            dim=1,
        )
        key = torch.cat(
            [
                attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))),
                attn.norm_k(heads(attn.to_k(hidden_states))),
            ],
            dim=1,
        )
        value = torch.cat(
            [heads(attn.add_v_proj(encoder_hidden_states)), heads(attn.to_v(hidden_states))], dim=1
        )
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        mixed = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=getattr(self.processor, "_attention_backend", None),
        )
        mixed = mixed.flatten(2, 3).to(query.dtype)
        text = encoder_hidden_states.shape[1]
        context, image = joint_reduce((attn.to_add_out, mixed[:, :text]), (attn.to_out[0], mixed[:, text:]))
        return attn.to_out[1](image), context


def joint_reduce(*products: tuple[RowwiseLinear, torch.Tensor]) -> list[torch.Tensor]:
    """Run row-wise layers on their inputs [B, S_i, in] and join their partial sums with a single all-reduce.

    Returns the outputs [B, S_i, out] in order, as views of one buffer.
    """
    lengths = [x.shape[1] for _, x in products]
    buffer = torch.cat([layer.partial(x) for layer, x in products], dim=1)
    products[0][0].ranks.all_reduce(buffer)
    outputs = list(buffer.split(lengths, dim=1))
    for (layer, _), output in zip(products, outputs, strict=True):
        if layer.bias is not None:
            output.add_(layer.bias)
    return outputs


def double_block_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb_mod_img: torch.Tensor,
    temb_mod_txt: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A double block whose two feed-forwards end in one reduce. Same arguments and result as the diffusers block."""
    image_shift, image_scale, image_gate, ff_shift, ff_scale, ff_gate = _modulation(temb_mod_img, 6)
    text_shift, text_scale, text_gate, text_ff_shift, text_ff_scale, text_ff_gate = _modulation(
        temb_mod_txt, 6
    )

    image, text = hidden_states, encoder_hidden_states
    attended_image, attended_text = self.attn(
        hidden_states=(1 + image_scale) * self.norm1(image) + image_shift,
        encoder_hidden_states=(1 + text_scale) * self.norm1_context(text) + text_shift,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = image + image_gate * attended_image
    text = text + text_gate * attended_text

    image_up = self.ff.act_fn(self.ff.linear_in(self.norm2(image) * (1 + ff_scale) + ff_shift))
    text_up = self.ff_context.act_fn(
        self.ff_context.linear_in(self.norm2_context(text) * (1 + text_ff_scale) + text_ff_shift)
    )
    text_down, image_down = joint_reduce(
        (self.ff_context.linear_out, text_up), (self.ff.linear_out, image_up)
    )
    image = image + ff_gate * image_down
    text = text + text_ff_gate * text_down
    if text.dtype == torch.float16:
        text = text.clip(-65504, 65504)
    return text, image


def _modulation(parameters: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Shift, scale and gate vectors [B, 1 or S, d] from a modulation's output [B, (S,) count * d]."""
    if parameters.ndim == 2:
        parameters = parameters.unsqueeze(1)
    return parameters.chunk(count, dim=-1)


class JointModulation:
    """The three modulations of FLUX.2 as one reduce: the first one called computes all partial sums.

    The later two, called with the same timestep embedding [B, d], take their views of the reduced buffer.
    """

    def __init__(self, modules: Sequence[nn.Module], ranks: Ranks):
        self.modules = list(modules)
        self.ranks = ranks
        self.ready: dict[int, torch.Tensor] = {}
        self.source: torch.Tensor | None = None

    def forward_of(self, index: int) -> Any:
        """The forward to bind onto the module at `index`."""

        def forward(module: nn.Module, temb: torch.Tensor) -> torch.Tensor:
            if self.source is not temb or index not in self.ready:
                self._compute(temb)
            result = self.ready.pop(index)
            if not self.ready:
                self.source = None
            return result

        return forward

    def _compute(self, temb: torch.Tensor) -> None:
        active = self.modules[0].act_fn(temb)
        partial = [module.linear.partial(active) for module in self.modules]
        joined = self.ranks.all_reduce(torch.cat(partial, dim=-1))
        parts = joined.split([part.shape[-1] for part in partial], dim=-1)
        self.ready = dict(enumerate(parts))
        self.source = temb


def bind(model: nn.Module, ranks: Ranks) -> None:
    """Bind the merged forwards onto a freshly sharded model."""
    for block in model.transformer_blocks:
        block.attn.processor = JointAttention(block.attn.processor)
        block.forward = types.MethodType(double_block_forward, block)
    modules = [getattr(model, name) for name in MODULATIONS]
    if all(isinstance(module.linear, RowwiseSplitInputLinear) for module in modules):
        joint = JointModulation(modules, ranks)
        for index, module in enumerate(modules):
            module.forward = types.MethodType(joint.forward_of(index), module)


def merged(model: nn.Module) -> int:
    """All-reduces that `bind` saves in one forward: two per double block, and two of the three modulations'."""
    return 2 * len(model.transformer_blocks) + 2


def predict(
    model: nn.Module,
    x: torch.Tensor,
    timestep: torch.Tensor,
    context: torch.Tensor,
    *,
    guidance: torch.Tensor | None = None,
    references: Sequence[torch.Tensor] = (),
    reference_method: str = "index",
    **_: Any,
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
    batch, _, height, width = x.shape
    tokens = [flatten_latent(x)]
    ids = [image_ids(height, width, x.device)]
    for reference, position in reference_tokens(references, reference_method, height, width, REFERENCE_SCALE):
        tokens.append(flatten_latent(reference.to(x.dtype).expand(batch, -1, -1, -1)))
        ids.append(position.to(x.device))
    velocity = model(
        hidden_states=torch.cat(tokens, dim=1),
        encoder_hidden_states=context,
        timestep=timestep,
        img_ids=torch.cat(ids),
        txt_ids=text_ids(context.shape[1], x.device),
        guidance=guidance if config.guidance_embeds else None,
        return_dict=False,
    )[0]
    return unflatten_latent(velocity[:, : height * width], height, width)


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


def detect(entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's configuration from the tensor names and shapes of a BFL/ComfyUI single file, or None.

    `entries` maps file tensor names to objects with a `shape`. Everything follows from shapes: the head width from
    a q norm, the head count from the hidden width, four equal rope axes.
    """
    prefix = BFL_FLUX2.prefix_of(entries)

    def shape(name: str) -> tuple[int, ...] | None:
        entry = entries.get(prefix + name)
        return tuple(entry.shape) if entry is not None else None

    image_in, text_in = shape("img_in.weight"), shape("txt_in.weight")
    norms = (
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "double_blocks.0.img_attn.norm.query_norm.weight",
    )
    norm = next((found for found in map(shape, norms) if found), None)
    up = shape("double_blocks.0.img_mlp.2.weight")
    modulation = shape("double_stream_modulation_img.lin.weight")
    if None in (image_in, text_in, norm, up, modulation):
        return None
    hidden, head = image_in[0], norm[0]
    numbers = {"double_blocks": -1, "single_blocks": -1}
    for name in entries:
        atoms = name[len(prefix) :].split(".")
        if atoms[0] in numbers and len(atoms) > 1 and atoms[1].isdecimal():
            numbers[atoms[0]] = max(numbers[atoms[0]], int(atoms[1]))
    time_in = shape("time_in.in_layer.weight")
    return {
        "_class_name": "Flux2Transformer2DModel",
        "patch_size": 1,
        "in_channels": image_in[1],
        "num_layers": numbers["double_blocks"] + 1,
        "num_single_layers": numbers["single_blocks"] + 1,
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": text_in[1],
        "timestep_guidance_channels": time_in[1] if time_in else 256,
        "mlp_ratio": up[1] / hidden,
        "axes_dims_rope": (head // 4,) * 4,
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": shape("guidance_in.in_layer.weight") is not None,
    }


ARCHITECTURE = Architecture(
    name="flux2",
    model_class="Flux2Transformer2DModel",
    plan=PLAN,
    layouts=(BFL_FLUX2, IDENTITY),
    detect=detect,
    bind=bind,
    merged=merged,
    predict=predict,
)
