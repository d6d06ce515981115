"""Stand-ins for the nodes on a ComfyUI that the pack does not fit: they load, and say what is needed when run."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..core.errors import UnsupportedError

# Node id -> display name and the type of its output.
NODES = {
    "TPLoadModel": ("Load TP Model", "MODEL"),
    "TPLoadCLIP": ("Load TP CLIP", "CLIP"),
    "TPLoadVAE": ("Load TP VAE", "VAE"),
    "TPLoadLoRA": ("Load TP LoRA", "MODEL"),
    "TPSampler": ("TP Sampler", "LATENT"),
    "TPUnloadModel": ("Unload TP Model", "*"),
    "TPStatus": ("TP Status", "STRING"),
}


def stand_ins(text: str) -> list[type]:
    """One node class per id of ours, which raises `UnsupportedError(text)` when it is run."""
    return [_stand_in(node_id, name, kind, text) for node_id, (name, kind) in NODES.items()]


def _stand_in(node_id: str, name: str, kind: str, text: str) -> type:
    class StandIn(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id=node_id,
                display_name=name,
                category="comfy-tp",
                description=text,
                inputs=[],
                outputs=[io.Custom(kind).Output()],
                is_output_node=True,
            )

        @classmethod
        def execute(cls, **inputs: Any) -> io.NodeOutput:
            raise UnsupportedError(text)

    return StandIn
