"""Where the small FLUX.2 lies, which the demo and the tests run: the diffusers folder, and the LoRA beside it."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).resolve().parent / "weights"
LORA_NAME = "outlines_only.safetensors"
PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")


def pipeline_folder() -> Path:
    """The shipped pipeline. Raises FileNotFoundError that names what is missing."""
    missing = [p for p in ("model_index.json", *PARTS) if not (WEIGHTS / p).exists()]
    if missing:
        raise FileNotFoundError(
            f"The small FLUX.2 is incomplete: {WEIGHTS} has no {', '.join(missing)}. Install comfy-tp again, or train "
            "it: python -m comfy_tp.tools.small.train --help"
        )
    return WEIGHTS


def lora_file() -> Path:
    """The LoRA that draws outlines only, for the small FLUX.2."""
    path = WEIGHTS / "lora" / LORA_NAME
    if not path.exists():
        raise FileNotFoundError(f"The small FLUX.2's LoRA is missing: {path}. Install comfy-tp again.")
    return path
