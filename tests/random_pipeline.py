"""A FLUX.2 pipeline of random weights in the real layout, for tests of every loader."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def save_pipeline(folder: Path, seed: int = 0) -> Path:
    """Write transformer, vae, text_encoder, tokenizer, scheduler and model_index.json into `folder`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from comfy_tp.tools.small import autoencoder, encoder, flow

    torch.manual_seed(seed)
    flow.new_transformer().save_pretrained(folder / "transformer")
    autoencoder.new_vae().save_pretrained(folder / "vae")
    encoder.save(folder)
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    parts = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
        "tokenizer": ["transformers", "PixtralProcessor"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    index = {"_class_name": "Flux2Pipeline", "_diffusers_version": "0.36.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder
