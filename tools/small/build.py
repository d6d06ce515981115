"""The small FLUX.2 as files: the diffusers folder that is shipped, and the single file made from it.

    python -m comfy_tp.tools.small.build single-file TARGET.safetensors
    python -m comfy_tp.tools.small.build assemble --training DIR

The folder holds what Flux2Pipeline loads; ``lora/`` beside it holds the style that was trained for it, in the key
names of ComfyUI. The single file carries the same transformer under the names of Black Forest Labs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...core.checkpoint.convert import file_tensors
from ...core.models.flux2_layout import BFL_FLUX2
from ...core.small.pipeline import LORA_NAME, WEIGHTS, pipeline_folder


def bfl_tensors(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transformer's parameters under the names of a BFL single file, without a prefix."""
    return file_tensors(BFL_FLUX2, parameters)


def single_file(
    target: Path,
    folder: Path | None = None,
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = bfl_tensors,
) -> Path:
    """Write the transformer of ``folder`` (the shipped one if None) as one file in BFL's names; returns its path.

    ``convert`` turns diffusers' parameter names into the file's. Dtypes stay as they are in the folder.
    """
    from safetensors.torch import load_file, save_file

    source = (folder or pipeline_folder()) / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in convert(load_file(source)).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target, metadata={"format": "pt"})
    return target


def assemble(training: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the pipeline folder from the checkpoints of a training folder.

    The transformer is stored in ``dtype`` (bfloat16, as FLUX.2's own), VAE, encoder and LoRA in float16. A LoRA
    that has not been trained yet is left out; transformer and VAE must be there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler
    from safetensors.torch import save_file

    from . import encoder, train

    folder.mkdir(parents=True, exist_ok=True)
    transformer = train.new_transformer()
    transformer.load_state_dict(torch.load(training / "transformer.pt", weights_only=True)["average"])
    transformer.to(dtype).save_pretrained(folder / "transformer")
    train.load_vae(training).half().save_pretrained(folder / "vae")
    encoder.save(folder)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "Flux2Pipeline",
        "_diffusers_version": "0.36.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
        "tokenizer": ["transformers", "PixtralProcessor"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    trained = training / "lora.pt"
    if trained.exists():
        state = torch.load(trained, weights_only=True)["lora"]
        (folder / "lora").mkdir(exist_ok=True)
        tensors = {f"diffusion_model.{name}": t.half().contiguous() for name, t in state.items()}
        save_file(tensors, folder / "lora" / LORA_NAME, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("single-file", help="write the transformer as one file in BFL's names")
    one.add_argument("target", type=Path)
    whole = commands.add_parser("assemble", help="write the pipeline folder from a training folder")
    whole.add_argument("--training", type=Path, required=True)
    whole.add_argument("--folder", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    if arguments.command == "single-file":
        print(single_file(arguments.target))
    else:
        assemble(arguments.training, arguments.folder)
        print(arguments.folder)


if __name__ == "__main__":
    main()
