"""Stand-ins for the nodes that do not fit the installed ComfyUI: they load, and say what is needed when run."""

from __future__ import annotations

from typing import Any, NamedTuple

from comfy_api.latest import io

from ..core.errors import UnsupportedError
from . import seams


class StandIn(NamedTuple):
    """A node's id, display name, the type of its output, and the feature of `seams` that it is."""

    node_id: str
    display_name: str
    output: str
    feature: str


# Class of the node -> what stands in for it.
STAND_INS = {
    "LoadTPModel": StandIn("TPLoadModel", "Load TP Model", "MODEL", seams.LOAD_MODEL),
    "LoadTPCLIP": StandIn("TPLoadCLIP", "Load TP CLIP", "CLIP", seams.LOAD_CLIP),
    "LoadTPVAE": StandIn("TPLoadVAE", "Load TP VAE", "VAE", seams.LOAD_VAE),
    "LoadTPLoRA": StandIn("TPLoadLoRA", "Load TP LoRA", "MODEL", seams.LOAD_LORA),
    "TPSampler": StandIn("TPSampler", "TP Sampler", "LATENT", seams.SAMPLER),
    "UnloadTPModel": StandIn("TPUnloadModel", "Unload TP Model", "*", seams.NODES),
    "TPStatus": StandIn("TPStatus", "TP Status", "STRING", seams.STATUS),
}


def stand_in(class_name: str, text: str) -> type:
    """A node class under the id of `class_name`, which raises `UnsupportedError(text)` when it is run."""
    node = STAND_INS[class_name]

    class StandInNode(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id=node.node_id,
                display_name=node.display_name,
                category="comfy-tp",
                description=text,
                inputs=[],
                outputs=[io.Custom(node.output).Output()],
                is_output_node=True,
            )

        @classmethod
        def execute(cls, **inputs: Any) -> io.NodeOutput:
            raise UnsupportedError(text)

    return StandInNode
