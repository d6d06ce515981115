"""Load TP LoRA: a LoRA file of any key style on a MODEL, with a count of what was applied."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io, ui

from ...core.checkpoint.files import Checkpoint
from ...core.checkpoint.reader import read_whole
from ...core.errors import InputError, UnsupportedError
from ...core.lora.keys import LoraFile, read_lora
from ...core.models import architecture_named
from ..patches import comfy_patches
from ..paths import safetensors_names
from .schema import check_choice, make_schema

log = logging.getLogger("comfy_tp.nodes")

PREFIX = "diffusion_model."
SHOWN = 5  # unmatched keys that are named
KEPT_BYTES = 2 << 30  # of LoRA files that were used last

# ComfyUI's class of a model -> the architecture whose key tables read a LoRA for it.
READABLE = {
    "Flux2": "flux2",
    "Flux": "flux",
    "QwenImage": "qwenimage",
}

Content = tuple[dict[str, torch.Tensor], dict[str, str]]


class LoadTPLoRA(io.ComfyNode):
    """The inputs are those of LoraLoaderModelOnly."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPLoadLoRA",
            display_name="Load TP LoRA",
            description=(
                "Loads a LoRA onto a FLUX.2, FLUX.1 or Qwen-Image model and says how many of its keys were applied. It reads "
                "every key style: ComfyUI, diffusers, kohya, PEFT, LyCORIS. Use it instead of the stock LoRA loader when the "
                "log says 'lora key not loaded': older ComfyUIs drop half of a diffusers LoRA for FLUX.2. For a LoRA with "
                "ComfyUI's own keys both do the same."
            ),
            search_aliases=["lora", "lycoris", "lokr", "loha", "diffusers lora"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The model from Load TP Model, or any FLUX.2, FLUX.1 or Qwen-Image MODEL.",
                ),
                io.Combo.Input(
                    "lora_name",
                    options=safetensors_names("loras"),
                    tooltip="A safetensors file of models/loras/.",
                ),
                io.Float.Input(
                    "strength_model",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How strongly to change the model. It can be negative.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with the LoRA.")],
            is_output_node=False,
        )

    @classmethod
    def execute(cls, model: Any, lora_name: str, strength_model: float) -> io.NodeOutput:
        check_choice("lora_name", lora_name, safetensors_names("loras"))
        if strength_model == 0:
            return io.NodeOutput(model, ui=ui.PreviewText("Strength 0: the LoRA is not applied."))
        content = FILES.read(folder_paths.get_full_path_or_raise("loras", lora_name))
        try:
            found = read_file(model.model, content)
        except InputError as error:
            raise InputError(f"{lora_name}: {error}") from None
        text = report(lora_name, found)
        if not found.patches:
            raise InputError(f"{text} It was made for another model.")
        (log.warning if found.unmatched else log.info)("%s", text)
        patched = model.clone()
        for patches in comfy_patches(found.patches, PREFIX):
            added = patched.add_patches(patches, strength_model)
            if len(added) < len(patches):
                lost = next(key for key in patches if key not in set(added))
                raise InputError(f"ComfyUI did not take the LoRA's patch of {lost}. Update ComfyUI.")
        return io.NodeOutput(patched, ui=ui.PreviewText(text))


class LoraFiles:
    """The LoRA files read last, so that a new strength reads nothing and the ranks know the tensors again."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[str, int, int], Content] = OrderedDict()

    def read(self, path: str) -> Content:
        """The tensors and the header's metadata of the file at `path`. Raises `CheckpointError` for one that is damaged."""
        state = os.stat(path)
        key = (path, state.st_size, state.st_mtime_ns)
        if key not in self._files:
            checkpoint = Checkpoint.open(path)
            self._files[key] = read_whole(checkpoint), checkpoint.metadata
        self._files.move_to_end(key)
        while len(self._files) > 1 and sum(map(_nbytes, self._files.values())) > KEPT_BYTES:
            self._files.popitem(last=False)
        return self._files[key]


def _nbytes(content: Content) -> int:
    return sum(tensor.nbytes for tensor in content[0].values())


FILES = LoraFiles()


def read_file(model: Any, content: Content) -> LoraFile:
    """What the LoRA does to ComfyUI's model object `model`. Raises `UnsupportedError` unless it is one of `READABLE`."""
    # A class of ComfyUI's that is made from another (Chroma from Flux) has names of its own.
    own = next((kind for kind in type(model).__mro__ if kind.__module__ == "comfy.model_base"), type(model))
    if own.__name__ not in READABLE:
        raise UnsupportedError(
            f"Load TP LoRA reads LoRAs for FLUX.2, FLUX.1 and Qwen-Image, and this model is a {own.__name__}. Use the stock "
            f"LoRA loader."
        )
    shapes = {
        key.removeprefix(PREFIX): tuple(tensor.shape)
        for key, tensor in model.state_dict().items()
        if key.startswith(PREFIX)
    }
    tensors, metadata = content
    name = READABLE[own.__name__]
    return read_lora(tensors, shapes, architecture_named(name).layouts, name, metadata)


def report(name: str, found: LoraFile) -> str:
    """How much of the LoRA fits, in one or two lines."""
    text = (
        f"{name}: {len(found.applied)} keys applied to {len({patch.key for patch in found.patches})} weights"
    )
    if not found.unmatched:
        return text + ", none unmatched."
    shown = ", ".join(found.unmatched[:SHOWN]) + (", ..." if len(found.unmatched) > SHOWN else "")
    return f"{text}, {len(found.unmatched)} unmatched.\nUnmatched: {shown}."
