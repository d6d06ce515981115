"""The single-file names of FLUX.2 (as Black Forest Labs and ComfyUI write them) and diffusers' names.

Three things are more than renames: the two fused qkv weights, whose rows are three diffusers weights, and
`norm_out`, whose halves are (shift, scale) in the file and (scale, shift) in diffusers. Rows are given as equal
parts, so the table serves every size (dev, klein 9B and 4B). Read backwards it maps LoRA keys.
"""

from __future__ import annotations

from ..checkpoint.layout import FileLayout, Rows, Rule
from .single_file import NORM, PREFIXES, attention_rules


def _double(
    stream: str, q: str, k: str, v: str, norm_q: str, norm_k: str, out: str, ff: str
) -> tuple[Rule, ...]:
    file = f"double_blocks.{{i}}.{stream}"
    model = "transformer_blocks.{i}"
    return (
        *attention_rules(file, model, q=q, k=k, v=v, norm_q=norm_q, norm_k=norm_k, out=out),
        Rule(f"{model}.{ff}.linear_in", (Rows(f"{file}_mlp.0"),)),
        Rule(f"{model}.{ff}.linear_out", (Rows(f"{file}_mlp.2"),)),
    )


def _embedder(file: str, model: str) -> tuple[Rule, ...]:
    return (
        Rule(f"time_guidance_embed.{model}.linear_1", (Rows(f"{file}.in_layer"),)),
        Rule(f"time_guidance_embed.{model}.linear_2", (Rows(f"{file}.out_layer"),)),
    )


BFL_FLUX2 = FileLayout(
    "FLUX.2 single file",
    (
        Rule("x_embedder", (Rows("img_in"),)),
        Rule("context_embedder", (Rows("txt_in"),)),
        *_embedder("time_in", "timestep_embedder"),
        *_embedder("guidance_in", "guidance_embedder"),
        Rule("double_stream_modulation_img.linear", (Rows("double_stream_modulation_img.lin"),)),
        Rule("double_stream_modulation_txt.linear", (Rows("double_stream_modulation_txt.lin"),)),
        Rule("single_stream_modulation.linear", (Rows("single_stream_modulation.lin"),)),
        *_double("img", "to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0", "ff"),
        *_double(
            "txt",
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "norm_added_q",
            "norm_added_k",
            "to_add_out",
            "ff_context",
        ),
        Rule("single_transformer_blocks.{i}.attn.to_qkv_mlp_proj", (Rows("single_blocks.{i}.linear1"),)),
        Rule("single_transformer_blocks.{i}.attn.to_out", (Rows("single_blocks.{i}.linear2"),)),
        Rule("single_transformer_blocks.{i}.attn.norm_q", (Rows("single_blocks.{i}.norm.query_norm"),), NORM),
        Rule("single_transformer_blocks.{i}.attn.norm_k", (Rows("single_blocks.{i}.norm.key_norm"),), NORM),
        Rule(
            "norm_out.linear",
            (Rows("final_layer.adaLN_modulation.1", 1, 2), Rows("final_layer.adaLN_modulation.1", 0, 2)),
        ),
        Rule("proj_out", (Rows("final_layer.linear"),)),
    ),
    prefixes=PREFIXES,
)
