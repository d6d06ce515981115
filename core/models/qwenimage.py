"""Qwen-Image: the page's plan, plain col-wise and row-wise pairs alone.

Besides it the modulations of the blocks are sharded, 6.8 of 20.4 billion parameters, for one reduce in all (an edit
model gives its text stream another embedding in every block: there each text modulation has its own).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import InputError, UnsupportedError
from ..tp.local import LocalAttributes
from .architecture import Architecture
from .joins import of_modulations
from .qwenimage_layout import EDIT_2511, PATCH, QWENIMAGE_FILE, detect
from .tokens import flatten_latent, image_ids, patches, placed_latents, unflatten_latent

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


REFERENCE_SCALE = 1  # axis 0 of the k-th reference's ids, by method "index"
ROPE_THETA = 10000.0
# Settings of later Qwen-Images whose calls `predict` does not make, and the models that have them.
UNPREDICTED = {
    "zero_cond_t": "Qwen-Image-Edit 2511",
    "use_additional_t_cond": "Qwen-Image-Layered",
    "use_layer3d_rope": "Qwen-Image-Layered",
}


def modulations(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The modulations of all blocks that read the same tensor: (module, its activation's name, its Linear)."""
    streams = ("img_mod",) if getattr(model, "zero_cond_t", False) else ("img_mod", "txt_mod")
    found = [getattr(block, stream) for block in model.transformer_blocks for stream in streams]
    return [(modulation, "0", modulation[1]) for modulation in found]


def predict(
    model: nn.Module,
    x: torch.Tensor,
    timestep: torch.Tensor,
    context: torch.Tensor,
    *,
    references: Sequence[torch.Tensor] = (),
    reference_method: str = "index",
) -> torch.Tensor:
    """One model call from ComfyUI's inputs.

    `x` [B, 16, h, w] latent grid of any size, or [B, 16, 1, h, w] as ComfyUI holds it, `timestep` [B] in 0..1 (sigma),
    `context` [B, L, joint_attention_dim] without padding, `references` latents like x of batch B or 1. Returns the
    velocity in the shape of x.

    Positions: 3 axes; grids are centred on (0, 0), text token l lies on the diagonal at l plus half of the image's
    longer side. The methods "offset" and "uxo" are one to ComfyUI's Qwen-Image.
    """
    config = model.config
    check_predicted(config)
    if x.shape[1] * PATCH**2 != config.in_channels:
        raise InputError(
            f"The latent has {x.shape[1]} channels, but this Qwen-Image model takes {config.in_channels // PATCH**2}. Use "
            f"an EmptySD3LatentImage node or the Qwen-Image VAE."
        )
    if context.shape[-1] != config.joint_attention_dim:
        raise InputError(
            f"The conditioning is {context.shape[-1]} wide, but this Qwen-Image model takes "
            f"{config.joint_attention_dim}: load the text encoder qwen_2.5_vl_7b with a CLIPLoader node of type qwen_image."
        )
    picture = one_frame(x)
    method = "offset" if reference_method == "uxo" else reference_method
    tokens, ids = [], []
    frames = [one_frame(reference) for reference in references]
    for latent, offset in placed_latents(picture, frames, method, REFERENCE_SCALE, PATCH):
        rows, columns = (patches(length, PATCH) for length in latent.shape[-2:])
        positions = image_ids(rows, columns, x.device, offset)[:, :3]
        # ComfyUI counts in the model's dtype and then centres.
        positions[:, 1:] = positions[:, 1:].to(x.dtype) - torch.tensor(
            [rows // 2, columns // 2], device=x.device
        )
        tokens.append(flatten_latent(latent, PATCH))
        ids.append(positions)
    first = max(patches(length, PATCH) // 2 for length in x.shape[-2:])
    diagonal = torch.arange(first, first + context.shape[1], dtype=torch.float32, device=x.device)
    rope = (
        rotations(torch.cat(ids), config.axes_dims_rope, x.dtype),
        rotations(diagonal.unsqueeze(1).expand(-1, 3), config.axes_dims_rope, x.dtype),
    )
    velocity = run(model, torch.cat(tokens, dim=1), context, timestep, rope)
    velocity = unflatten_latent(velocity, x.shape[-2], x.shape[-1], PATCH)
    return velocity.unsqueeze(2) if x.ndim == 5 else velocity


def run(
    model: nn.Module,
    image: torch.Tensor,
    text: torch.Tensor,
    timestep: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The model on image tokens [B, S, in] and text tokens [B, L, joint], with the `rotations` of both.

    `timestep` [B] keeps its float32 value until it is embedded, as ComfyUI has it. Returns [B, S, out].
    """
    image, text = model.img_in(image), model.txt_in(model.txt_norm(text))
    temb = model.time_text_embed(timestep, image)
    for block in model.transformer_blocks:
        text, image = block(
            hidden_states=image,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            temb=temb,
            image_rotary_emb=rope,
        )
    return model.proj_out(model.norm_out(image, temb))


def rotations(ids: torch.Tensor, axes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Rotary factors [S, head_dim / 2] complex64 of positions [S, 3], rounded to `dtype` as ComfyUI keeps them."""
    angles = []
    for axis, width in enumerate(axes):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=ids.device) / width
        angles.append(ids[:, axis : axis + 1].double() * ROPE_THETA**-exponents)
    angle = torch.cat(angles, dim=1)
    return torch.complex(angle.cos().to(dtype).float(), angle.sin().to(dtype).float())


def one_frame(latent: torch.Tensor) -> torch.Tensor:
    """A latent [B, C, h, w], or [B, C, 1, h, w], as [B, C, h, w]. Raises `InputError` for several frames."""
    if latent.ndim == 5:
        if latent.shape[2] != 1:
            raise InputError(
                f"The latent has {latent.shape[2]} frames, and Qwen-Image makes one picture. Use an EmptySD3LatentImage "
                f"node, or encode one picture at a time."
            )
        return latent.squeeze(2)
    return latent


def check_predicted(config: Mapping[str, Any], model: str = "This Qwen-Image") -> None:
    """Raise `UnsupportedError`, about `model`, for one whose calls `predict` does not make."""
    found = {kind: name for name, kind in UNPREDICTED.items() if config.get(name)}
    if found:
        raise UnsupportedError(
            f"{model} is a {' and '.join(found)} ({', '.join(found.values())}), and Load TP Model does not sample such "
            f"models yet. Choose Qwen-Image or a Qwen-Image-Edit up to 2509, load it with the stock loader, or run it "
            f"sharded from Python (README, `from_pretrained`)."
        )


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
    **of_modulations(modulations),
    predict=predict,
    latent_patch=PATCH,
    ignored=(EDIT_2511,),
    published={"Qwen-Image": {}},
    examples={"base": SMALL, "edit": {**SMALL, "zero_cond_t": True}},
    inputs=inputs,
)
