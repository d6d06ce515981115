"""Open many damaged files in a process of its own and say what happened: FOLDER COUNT [settings]."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weight_files import damaged, damaged_json, small_model

from comfy_tp.core.checkpoint import Checkpoint
from comfy_tp.core.errors import CheckpointError, TPError


def outcome(folder: Path, count: int, *what: str) -> dict[str, Any]:
    """What came of opening `count` damaged files in a fresh process, and how far its memory rose, in MB."""
    command = [sys.executable, __file__, str(folder), str(count), *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def peak_kilobytes() -> int:
    """The most memory that this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RuntimeError("no VmHWM in /proc/self/status")


def main(folder: Path, count: int) -> int:
    """Each file must be refused with its name in the text; prints the growth of the peak while opening them."""
    whole = folder / "whole.safetensors"
    small_model(whole)
    refused = 0
    rise = 0
    for seed in range(count):
        path = folder / f"damaged-{seed}.safetensors"
        kind = damaged(seed, whole, path)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_kilobytes()
        try:
            Checkpoint.open(path)
        except CheckpointError as error:
            refused += 1
            if str(path) not in str(error):
                print(f"{kind} (seed {seed}): the file is not named: {error}")
                return 1
        else:
            print(f"{kind} (seed {seed}): not noticed")
            return 1
        rise = max(rise, peak_kilobytes() - before)
        path.unlink()
    print(json.dumps({"refused": refused, "peak_mb": rise / 1000}))
    return 0


def save_models(folder: Path) -> dict[str, Callable[[], object]]:
    """A small pipeline in `folder`; of each of its files of settings, how what it describes is opened."""
    from comfy_inprocess import save_small_model
    from random_pipeline import save_pipeline

    from comfy_tp.core.load import load_opened, open_model
    from comfy_tp.core.parts.prompts import PromptTokenizer
    from comfy_tp.core.parts.text_encoder import key_value_heads, open_text_encoder
    from comfy_tp.core.parts.vae import open_vae
    from comfy_tp.core.tp.collectives import Ranks

    save_pipeline(folder)
    model = save_small_model(folder / "model")
    weights = model / "diffusion_pytorch_model.safetensors"
    index = model / f"{weights.name}.index.json"
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(Checkpoint.open(weights).entries, weights.name)})
    )

    def transformer() -> object:
        return load_opened(open_model(Checkpoint.open(model)), Ranks.single())

    def vae() -> object:
        return load_opened(open_vae(Checkpoint.open(folder / "vae")), Ranks.single())

    def text_encoder() -> object:
        checkpoint = Checkpoint.open(folder / "text_encoder")
        key_value_heads(checkpoint)
        return load_opened(open_text_encoder(checkpoint, 1), Ranks.single())

    def tokenizer() -> object:
        return PromptTokenizer(folder / "tokenizer", "MistralModel").tokens("A red fox.")

    return {
        str(model / "config.json"): transformer,
        str(index): transformer,
        str(folder / "vae" / "config.json"): vae,
        str(folder / "text_encoder" / "config.json"): text_encoder,
        str(folder / "tokenizer" / "tokenizer_config.json"): tokenizer,
    }


def settings(folder: Path, count: int) -> int:
    """Each damaged file of settings must be refused with its folder in the text, or make a model."""
    logging.disable()
    opened = save_models(folder)
    for load in opened.values():
        load()
    refused = 0
    rise, costliest = 0, "none"
    for seed in range(count):
        path = Path(sorted(opened)[seed % len(opened)])
        whole = path.read_bytes()
        path.write_bytes(damaged_json(random.Random(seed), whole))
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_kilobytes()
        try:
            opened[str(path)]()
        except TPError as error:
            refused += 1
            text = str(error)
            if str(path.parent) not in text or len(text) > 2000 or not text.isprintable():
                print(f"{path.name} (seed {seed}): not named, or not in few words: {text[:3000]}")
                return 1
        except BaseException as error:
            print(f"{path} (seed {seed}): {type(error).__name__}: {error}")
            return 1
        # What a tokenizer takes is transformers' own affair; its files are bounded in size.
        if path.name != "tokenizer_config.json" and peak_kilobytes() - before > rise:
            rise, costliest = peak_kilobytes() - before, f"{path.parent.name}/{path.name} (seed {seed})"
        path.write_bytes(whole)
    print(json.dumps({"refused": refused, "peak_mb": rise / 1000, "costliest": costliest}))
    return 0


if __name__ == "__main__":
    sys.exit((settings if sys.argv[3:] == ["settings"] else main)(Path(sys.argv[1]), int(sys.argv[2])))
