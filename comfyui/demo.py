"""``comfy-tp demo``: a real ComfyUI renders FLUX.2 graphs with the small model of this pack over several ranks.

It posts what a script would post: the API form of graphs made of this pack's loaders and ComfyUI's own nodes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from ..core.cli.arguments import count
from ..core.errors import ConfigError
from ..core.small.pipeline import LORA_NAME, pipeline_folder
from . import ComfyServer, newest_path, printed

MODEL = "small-flux2"
PROMPT = "a red circle on a blue background"
EDIT = "make it green"
SIZE = 64  # pixels a side: what the small model was trained on
STEPS = 12
TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``comfy-tp demo``."""
    parser.add_argument("--ranks", type=count, default=2, help="how many ranks share the model (default 2)")
    parser.add_argument(
        "--devices",
        default=None,
        help="cpu, auto or cuda:0,cuda:1 (default: the GPUs where there are enough)",
    )
    parser.add_argument("--prompt", default=PROMPT, help=f"what to paint (default: {PROMPT!r})")
    parser.add_argument("--edit", default=EDIT, help=f"how to change the picture (default: {EDIT!r})")
    parser.add_argument("--seed", type=int, default=7, help="noise seed (default 7)")
    parser.add_argument("--steps", type=count, default=STEPS, help=f"denoising steps (default {STEPS})")
    parser.add_argument(
        "--model", type=Path, default=None, help="a FLUX.2 pipeline folder (default: the small one)"
    )
    parser.add_argument(
        "--size",
        type=count,
        default=SIZE,
        help=f"pixels a side (default {SIZE}, what the small one was trained on)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help="folder for the pictures (default: ./demo)"
    )
    parser.add_argument(
        "--keep-running", action="store_true", help="leave ComfyUI open in the browser until Ctrl-C"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Boot ComfyUI, render twice, edit and apply the LoRA; returns the figures."""
    folder = args.model or pipeline_folder()
    devices = args.devices or default_devices(args.ranks)
    args.output.mkdir(parents=True, exist_ok=True)
    tree = newest_path(lambda text: print(text, flush=True))
    version = printed(tree) or "of unknown version"
    print(f"Starting ComfyUI {version} ({tree})", flush=True)
    with ComfyServer(cpu=devices == "cpu", tree=tree) as comfy:
        link_models(comfy.models, folder)
        print(f"ComfyUI {version} is up at {comfy.url} after {comfy.boot_s:.1f} s", flush=True)
        options = {
            "ranks": args.ranks,
            "devices": devices,
            "seed": args.seed,
            "steps": args.steps,
            "size": args.size,
        }
        graph = text_to_image(args.prompt, **options)
        image, cold_s = render(comfy, graph, args.output / "text_to_image.png")
        print(
            f"cold: {cold_s:.1f} s with starting {args.ranks} ranks and loading the shards: {image}",
            flush=True,
        )
        again = text_to_image(args.prompt, **{**options, "seed": args.seed + 1})
        _, warm_s = render(comfy, again, args.output / "text_to_image_again.png")
        print(f"warm: {warm_s:.1f} s, the shards were still there", flush=True)
        figures: dict[str, Any] = {
            "comfyui": version,
            "image": str(image),
            "ranks": args.ranks,
            "cold_s": cold_s,
            "warm_s": warm_s,
        }
        reference = comfy.upload_image(image)
        edited, edit_s = render(comfy, edit(args.edit, reference, **options), args.output / "edit.png")
        print(f"edit with a reference: {edit_s:.1f} s: {edited}", flush=True)
        figures.update(edit=str(edited), edit_s=edit_s)
        if (comfy.models / "loras" / LORA_NAME).is_file():
            styled, lora_s = render(
                comfy, text_to_image(args.prompt, lora=True, **options), args.output / "lora.png"
            )
            print(f"with a LoRA: {lora_s:.1f} s: {styled}", flush=True)
            figures.update(lora=str(styled), lora_s=lora_s)
        if args.keep_running:
            wait_for_interrupt(comfy)
    return 0, figures


def default_devices(ranks: int) -> str:
    """The first GPUs where there are enough of them, else the CPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ",".join(f"cuda:{index}" for index in range(ranks)) if count >= ranks > 0 else "cpu"


def link_models(models: Path, folder: Path) -> None:
    """Copy the pipeline into ComfyUI's `diffusers/` folder, and the LoRA into `loras/`. Large pipelines are linked."""
    if not (folder / "model_index.json").is_file():
        raise ConfigError(f"{folder} is no pipeline folder: it has no model_index.json.")
    target = models / "diffusers" / MODEL
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(folder, target, copy_function=_link_or_copy, dirs_exist_ok=True)
    (models / "loras").mkdir(exist_ok=True)
    for file in (folder / "lora").glob("*.safetensors"):
        _link_or_copy(file, models / "loras" / file.name)


def render(comfy: ComfyServer, graph: dict[str, Any], target: Path) -> tuple[Path, float]:
    """Queue an API graph, wait for its picture and save it; returns the file and the seconds it took.

    The picture brings its graph along for a page that it is dropped on, and a file beside it for scripts.
    """
    started = time.monotonic()
    entry = comfy.run(graph, timeout_s=TIMEOUT_S)
    seconds = time.monotonic() - started
    target.write_bytes(comfy.images(entry)[0])
    target.with_suffix(".json").write_text(json.dumps(graph, indent=2) + "\n")
    return target, seconds


def loaders(ranks: int, devices: str) -> dict[str, Any]:
    """The three loaders of the pack, on the same ranks."""
    shared = {
        "degree": ranks,
        "devices": devices,
        "dtype": "float32" if devices == "cpu" else "default",
        "policy": "keep",
    }
    return {
        "model": node("TPLoadModel", model=MODEL, **shared),
        "clip": node("TPLoadCLIP", text_encoder=MODEL, **shared),
        "vae": node("TPLoadVAE", vae=MODEL, **shared),
    }


def text_to_image(
    prompt: str, *, ranks: int, devices: str, seed: int, steps: int, size: int = SIZE, lora: bool = False
) -> dict[str, Any]:
    """A graph in API form: the stock text to image graph of FLUX.2 with the three loaders swapped."""
    graph = {
        **loaders(ranks, devices),
        "text": node("CLIPTextEncode", clip=["clip", 0], text=prompt),
        "guidance": node("FluxGuidance", conditioning=["text", 0], guidance=4.0),
        "latent": node("EmptyFlux2LatentImage", width=size, height=size, batch_size=1),
        **sampling(seed, steps, size, "guidance"),
    }
    if lora:
        graph["lora"] = node(
            "LoraLoaderModelOnly", model=["model", 0], lora_name=LORA_NAME, strength_model=1.0
        )
        graph["sample"]["inputs"]["model"] = ["lora", 0]
    return graph


def edit(
    prompt: str, image: str, *, ranks: int, devices: str, seed: int, steps: int, size: int = SIZE
) -> dict[str, Any]:
    """A graph in API form that changes `image` (an uploaded file's name) as `prompt` says, by a reference latent."""
    return {
        **loaders(ranks, devices),
        "text": node("CLIPTextEncode", clip=["clip", 0], text=prompt),
        "guidance": node("FluxGuidance", conditioning=["text", 0], guidance=4.0),
        "load": node("LoadImage", image=image),
        "encode": node("VAEEncode", pixels=["load", 0], vae=["vae", 0]),
        "reference": node("ReferenceLatent", conditioning=["guidance", 0], latent=["encode", 0]),
        "latent": node("EmptyFlux2LatentImage", width=size, height=size, batch_size=1),
        **sampling(seed, steps, size, "reference"),
    }


def sampling(seed: int, steps: int, size: int, positive: str) -> dict[str, Any]:
    """From the conditioning of node `positive` to the saved picture."""
    return {
        "nothing": node("ConditioningZeroOut", conditioning=["text", 0]),
        "sigmas": node("Flux2Scheduler", steps=steps, width=size, height=size),
        "sample": node(
            "TPSampler",
            model=["model", 0],
            seed=seed,
            steps=steps,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=[positive, 0],
            negative=["nothing", 0],
            latent_image=["latent", 0],
            denoise=1.0,
            sigmas=["sigmas", 0],
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="comfy-tp"),
    }


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node of a graph in API form."""
    return {"class_type": class_type, "inputs": inputs}


def wait_for_interrupt(comfy: ComfyServer) -> None:
    """Hold ComfyUI open for the browser until Ctrl-C, or until it ends."""
    print(
        f"ComfyUI stays open at {comfy.url}: drop one of the pictures on its page to get its graph. Ctrl-C ends it.",
        flush=True,
    )
    try:
        while comfy.alive:
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass


def _link_or_copy(source: str | Path, target: str | Path) -> str:
    """A hard link where the file system allows it (nothing is doubled, and it is no link that leads out), else a copy."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
    return str(target)
