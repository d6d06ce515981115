"""The single-file names of FLUX.1 (as Black Forest Labs and ComfyUI write them) and diffusers' names.

More than renames are the fused qkv of a double block (three diffusers weights), `linear1` of a single block (rows q, k,
v and the feed-forward, 3 + 4 of 7 parts) and `norm_out`, whose halves change places. Read backwards it maps LoRA keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.layout import FileLayout, Rows, Rule
from .single_file import NORM, PREFIXES, Shapes, attention_rules, rotary_axes


def _double(
    stream: str, q: str, k: str, v: str, norm_q: str, norm_k: str, out: str, ff: str, norm: str
) -> tuple[Rule, ...]:
    file, model = f"double_blocks.{{i}}.{stream}", "transformer_blocks.{i}"
    return (
        Rule(f"{model}.{norm}.linear", (Rows(f"{file}_mod.lin"),)),
        *attention_rules(file, model, q=q, k=k, v=v, norm_q=norm_q, norm_k=norm_k, out=out),
        Rule(f"{model}.{ff}.net.0.proj", (Rows(f"{file}_mlp.0"),)),
        Rule(f"{model}.{ff}.net.2", (Rows(f"{file}_mlp.2"),)),
    )


def _embedder(file: str, model: str) -> tuple[Rule, ...]:
    return (
        Rule(f"time_text_embed.{model}.linear_1", (Rows(f"{file}.in_layer"),)),
        Rule(f"time_text_embed.{model}.linear_2", (Rows(f"{file}.out_layer"),)),
    )


_SINGLE, _FILE = "single_transformer_blocks.{i}", "single_blocks.{i}"

BFL_FLUX = FileLayout(
    "FLUX.1 single file",
    (
        Rule("x_embedder", (Rows("img_in"),)),
        Rule("context_embedder", (Rows("txt_in"),)),
        *_embedder("time_in", "timestep_embedder"),
        *_embedder("vector_in", "text_embedder"),
        *_embedder("guidance_in", "guidance_embedder"),
        *_double("img", "to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0", "ff", "norm1"),
        *_double(
            "txt",
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "norm_added_q",
            "norm_added_k",
            "to_add_out",
            "ff_context",
            "norm1_context",
        ),
        Rule(f"{_SINGLE}.norm.linear", (Rows(f"{_FILE}.modulation.lin"),)),
        Rule(f"{_SINGLE}.attn.to_q", (Rows(f"{_FILE}.linear1", 0, 7),)),
        Rule(f"{_SINGLE}.attn.to_k", (Rows(f"{_FILE}.linear1", 1, 7),)),
        Rule(f"{_SINGLE}.attn.to_v", (Rows(f"{_FILE}.linear1", 2, 7),)),
        Rule(f"{_SINGLE}.proj_mlp", tuple(Rows(f"{_FILE}.linear1", part, 7) for part in (3, 4, 5, 6))),
        Rule(f"{_SINGLE}.proj_out", (Rows(f"{_FILE}.linear2"),)),
        Rule(f"{_SINGLE}.attn.norm_q", (Rows(f"{_FILE}.norm.query_norm"),), NORM),
        Rule(f"{_SINGLE}.attn.norm_k", (Rows(f"{_FILE}.norm.key_norm"),), NORM),
        Rule(
            "norm_out.linear",
            (Rows("final_layer.adaLN_modulation.1", 1, 2), Rows("final_layer.adaLN_modulation.1", 0, 2)),
        ),
        Rule("proj_out", (Rows("final_layer.linear"),)),
    ),
    prefixes=PREFIXES,
)


def detect(entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a FLUX.1 single file from its tensor names and shapes, or None.

    FLUX.1 has a modulation in every block and a pooled text input (`vector_in`), FLUX.2 neither.
    """
    shapes = Shapes(entries, BFL_FLUX)
    image_in, text_in = shapes["img_in.weight"], shapes["txt_in.weight"]
    norm = (
        shapes["double_blocks.0.img_attn.norm.query_norm.scale"]
        or shapes["double_blocks.0.img_attn.norm.query_norm.weight"]
    )
    vector_in, modulation = shapes["vector_in.in_layer.weight"], shapes["double_blocks.0.img_mod.lin.weight"]
    if not (image_in and text_in and norm and vector_in and modulation):
        return None
    hidden, head = image_in[0], norm[0]
    final = shapes["final_layer.linear.weight"]
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": image_in[1],
        "out_channels": final[0] if final else None,
        "num_layers": shapes.blocks("double_blocks"),
        "num_single_layers": shapes.blocks("single_blocks"),
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": text_in[1],
        "pooled_projection_dim": vector_in[1],
        "guidance_embeds": shapes["guidance_in.in_layer.weight"] is not None,
        "axes_dims_rope": rotary_axes(head),
    }
