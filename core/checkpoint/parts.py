"""Files that hold a whole pipeline: the transformer beside its VAE and text encoders, each behind its own prefix."""

from __future__ import annotations

from dataclasses import replace

from .files import Checkpoint

TRANSFORMER = "model.diffusion_model."
# What ComfyUI writes before the names of the parts beside the transformer.
BESIDE = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.", "clip_vision.")


def transformer_of(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` without the parts beside a transformer that it names; itself where there are none."""
    if not any(name.startswith(TRANSFORMER) for name in checkpoint.entries):
        return checkpoint
    own = {name: entry for name, entry in checkpoint.entries.items() if not name.startswith(BESIDE)}
    return replace(checkpoint, entries=own) if len(own) < len(checkpoint.entries) else checkpoint
