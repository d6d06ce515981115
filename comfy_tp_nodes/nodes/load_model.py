"""Load TP Model: a model file or folder, read in shards onto background ranks, as an ordinary MODEL."""

from __future__ import annotations

import logging
from typing import Any

import comfy.model_management
from comfy_api.latest import io

from ...core.errors import TPError
from ..devices import place
from ..model import build_model, check_sampled
from ..patcher import load_now, make_patcher
from ..paths import model_choices, model_path
from ..sharded import POLICIES, sharded_model
from ..source import ModelSource, fingerprint
from .schema import check_choice, make_schema

log = logging.getLogger("comfy_tp.nodes")

DTYPES = ("default", "bfloat16", "float16", "float32", "float8_e4m3fn")
MOST_RANKS = 64


class LoadTPModel(io.ComfyNode):
    """Loads at execution, so that the time is spent where the progress bar says so."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPLoadModel",
            display_name="Load TP Model",
            description=(
                "Loads a FLUX.2, FLUX.1 or Qwen-Image model in shards over several GPUs. The MODEL works with every stock "
                "sampler, guider and LoRA loader. The shards stay loaded between prompts."
            ),
            search_aliases=[
                "tensor parallel",
                "multi gpu",
                "flux",
                "flux2",
                "qwen",
                "sharded",
                "diffusion model",
            ],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=model_choices(),
                    tooltip="A .safetensors file of diffusion_models/, or a diffusers folder there or in diffusers/.",
                ),
                io.Int.Input(
                    "degree",
                    default=0,
                    min=0,
                    max=MOST_RANKS,
                    tooltip=(
                        "How many ranks share the model. 0 takes all usable devices, or the largest number of them "
                        "that divides the model's attention heads (on the CPU: 1)."
                    ),
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip=(
                        "auto, cpu, or a list such as cuda:0,cuda:1: one rank runs on each. tcp://HOST:PORT takes ranks "
                        "on other machines."
                    ),
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="default",
                    tooltip="The dtype of the weights. default keeps what the file holds.",
                ),
                io.Combo.Input(
                    "policy",
                    options=list(POLICIES),
                    default="keep",
                    tooltip=(
                        "What to do when another model needs room on these GPUs. keep: stay, and give way only to one "
                        "that needs more than all of it. park: wait in host memory. release: free, and read again."
                    ),
                ),
            ],
            outputs=[io.Model.Output(tooltip="An ordinary MODEL; its weights are on the ranks.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: str, **inputs: Any) -> Any:
        """The files behind the name: a file that was replaced is loaded again."""
        try:
            return fingerprint(model_path(model))
        except (TPError, OSError):
            return None

    @classmethod
    def execute(cls, model: str, degree: int, devices: str, dtype: str, policy: str) -> io.NodeOutput:
        check_choice("dtype", dtype, DTYPES)
        check_choice("policy", policy, POLICIES)
        source = ModelSource.open(model_path(model))
        check_sampled(source)
        placement = place(
            devices,
            degree,
            source.heads,
            source.architecture.model_class,
            comfy.model_management.get_torch_device(),
        )
        log.info("Load TP Model: %s, %s", model, placement.reason)
        sharded = sharded_model(source, placement, dtype)
        sharded.line.shown_by_this_node()
        patcher = make_patcher(build_model(sharded), policy)
        load_now(patcher)
        return io.NodeOutput(patcher)
