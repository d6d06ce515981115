"""Load TP CLIP: the text encoder of a diffusers pipeline, sharded on background ranks, as an ordinary CLIP."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...core.errors import TPError
from ..clip import build_clip
from ..component import POLICIES, open_encoder
from ..paths import TEXT_ENCODER, choices, component_path
from ..source import fingerprint
from .schema import check_choice, component_inputs, make_schema


class LoadTPCLIP(io.ComfyNode):
    """Loads when the first prompt is encoded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPLoadCLIP",
            display_name="Load TP CLIP",
            description=(
                "Loads the text encoder of a FLUX.2 pipeline folder in shards over several GPUs. The CLIP works with the "
                "stock text encode nodes. For single text encoder files use the stock Load CLIP node."
            ),
            search_aliases=["tensor parallel", "text encoder", "mistral", "qwen3", "multi gpu"],
            inputs=component_inputs(
                "text_encoder",
                choices(TEXT_ENCODER),
                "A pipeline folder (with text_encoder and tokenizer in it), or a text_encoder folder.",
                POLICIES,
            ),
            outputs=[io.Clip.Output(tooltip="An ordinary CLIP; its weights are on the ranks.")],
        )

    @classmethod
    def fingerprint_inputs(cls, text_encoder: str, **inputs: Any) -> Any:
        """The files behind the name: a file that was replaced is loaded again."""
        try:
            return fingerprint(component_path(TEXT_ENCODER, text_encoder))
        except (TPError, OSError):
            return None

    @classmethod
    def execute(cls, text_encoder: str, degree: int, devices: str, dtype: str, policy: str) -> io.NodeOutput:
        check_choice("policy", policy, POLICIES)
        path = component_path(TEXT_ENCODER, text_encoder)
        return io.NodeOutput(build_clip(open_encoder(path, degree, devices, dtype), policy))
