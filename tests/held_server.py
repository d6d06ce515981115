"""A ComfyUI that checks prompts and runs none of them, and files of no content by the names that prompts ask for."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comfy_tp.comfyui import ComfyServer

# Node and input -> the folder of models/ that its file lies in; LoadImage's lies beside it.
FOLDERS = {
    ("TPLoadModel", "model"): "diffusion_models",
    ("UNETLoader", "unet_name"): "diffusion_models",
    ("CheckpointLoaderSimple", "ckpt_name"): "checkpoints",
    ("CLIPLoader", "clip_name"): "text_encoders",
    ("DualCLIPLoader", "clip_name1"): "text_encoders",
    ("DualCLIPLoader", "clip_name2"): "text_encoders",
    ("VAELoader", "vae_name"): "vae",
    ("LoraLoaderModelOnly", "lora_name"): "loras",
    ("ControlNetLoader", "control_net_name"): "controlnet",
    ("CLIPVisionLoader", "clip_name"): "clip_vision",
    ("StyleModelLoader", "style_model_name"): "style_models",
    ("ModelPatchLoader", "name"): "model_patches",
    ("LoadImage", "image"): "../input",
}


@contextlib.contextmanager
def held(comfy: ComfyServer) -> Iterator[None]:
    """Inside, ComfyUI's worker stays in one slow node: prompts are checked and queued behind it, and go in the end."""
    slow = {
        "1": {
            "class_type": "TPTestSlowImage",
            "inputs": {"steps": 1000, "milliseconds": 200, "seed": time.time_ns() % 2**40},
        },
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    holding = comfy.post_prompt(slow)
    try:
        yield
    finally:
        comfy.post("/queue", {"clear": True})
        comfy.interrupt()
        comfy.wait(holding, check=False)


@contextlib.contextmanager
def named_files(comfy: ComfyServer, prompts: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Inside, every file that the prompts name is there, without content; what was there before stays as it is."""
    made: list[Path] = []
    try:
        for prompt in prompts:
            for node in prompt.values():
                for name, value in node["inputs"].items():
                    folder = FOLDERS.get((node["class_type"], name))
                    if folder is None or not isinstance(value, str):
                        continue
                    file = comfy.models / folder / value
                    if not file.exists():
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.touch()
                        made.append(file)
        yield
    finally:
        for file in made:
            file.unlink()


def objections(comfy: ComfyServer, prompt: Mapping[str, Any]) -> list[str]:
    """What ComfyUI says against a prompt, [] where it accepts all of it."""
    _, body = comfy.request("/prompt", data=json.dumps({"prompt": dict(prompt)}).encode())
    answer = json.loads(body)
    found = [
        f"{node['class_type']}: {problem['message']}: {problem['details']}"
        for node in (answer.get("node_errors") or {}).values()
        for problem in node["errors"]
    ]
    error = answer.get("error")
    return found or ([json.dumps(error)] if error else [])
