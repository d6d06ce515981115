"""Load TP VAE: the VAE of a diffusers pipeline on background ranks, as an ordinary VAE."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...core.errors import TPError
from ..autoencoder import RemoteVAE
from ..component import POLICIES, open_autoencoder
from ..paths import VAE, choices, component_path
from ..source import fingerprint
from .schema import check_choice, component_inputs, make_schema


class LoadTPVAE(io.ComfyNode):
    """Loads when the first picture is decoded or encoded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPLoadVAE",
            display_name="Load TP VAE",
            description=(
                "Loads the VAE of a FLUX.2 pipeline folder on several GPUs, which decode one picture together. The VAE works "
                "with the stock encode and decode nodes, tiled too. For single VAE files use the stock Load VAE node."
            ),
            search_aliases=["tensor parallel", "autoencoder", "decode", "multi gpu"],
            inputs=component_inputs(
                "vae", choices(VAE), "A pipeline folder (with vae in it), or a vae folder.", POLICIES
            ),
            outputs=[io.Vae.Output(tooltip="An ordinary VAE; its weights are on the ranks.")],
        )

    @classmethod
    def fingerprint_inputs(cls, vae: str, **inputs: Any) -> Any:
        """The files behind the name: a file that was replaced is loaded again."""
        try:
            return fingerprint(component_path(VAE, vae))
        except (TPError, OSError):
            return None

    @classmethod
    def execute(cls, vae: str, degree: int, devices: str, dtype: str, policy: str) -> io.NodeOutput:
        check_choice("policy", policy, POLICIES)
        return io.NodeOutput(
            RemoteVAE(open_autoencoder(component_path(VAE, vae), degree, devices, dtype), policy)
        )
