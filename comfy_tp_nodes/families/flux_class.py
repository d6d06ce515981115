"""ComfyUI's Flux class, which FLUX.1 and FLUX.2 share, on the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import comfy.ldm.flux.model

from ..proxy import RankCalls


class ShardedFlux(RankCalls, comfy.ldm.flux.model.Flux):
    """ComfyUI's Flux without weights."""

    @property
    def reference_method(self) -> str:  # type: ignore[override]
        return self.params.default_ref_method

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.params.hidden_size

    @property
    def mlp_ratio(self) -> float:  # type: ignore[override]
        return self.params.mlp_ratio

    @property
    def inputs(self) -> dict[str, str | None]:  # type: ignore[override]
        """`y` [B, D] is the pooled text, which FLUX.1 alone reads."""
        return {"guidance": "guidance", "y": "pooled" if self.params.vec_in_dim is not None else None}


def shared_config(known: Mapping[str, Any], text_axes: list[int]) -> dict[str, Any]:
    """What ComfyUI's descriptions of FLUX.1 and FLUX.2 have in common; `text_axes` count the tokens of the text."""
    made = {
        "hidden_size": known["num_attention_heads"] * known["attention_head_dim"],
        "num_heads": known["num_attention_heads"],
        "depth": known["num_layers"],
        "depth_single_blocks": known["num_single_layers"],
        "context_in_dim": known["joint_attention_dim"],
        "axes_dim": list(known["axes_dims_rope"]),
        "guidance_embed": known["guidance_embeds"],
    }
    # Newer ComfyUIs need it, 0.3.75 does not know it.
    if "txt_ids_dims" in {field.name for field in dataclasses.fields(comfy.ldm.flux.model.FluxParams)}:
        made["txt_ids_dims"] = text_axes
    return made
