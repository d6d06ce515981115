"""``comfy-tp generate``: one picture from a pipeline folder, its transformer sharded, without ComfyUI.

Without torchrun it starts the ranks itself; under torchrun every process is one rank:

    comfy-tp generate --model FLUX.2-dev --prompt "a cat" --tp 4
    torchrun --nproc-per-node 4 -m comfy_tp.core.cli generate --model FLUX.2-dev --prompt "a cat"

It is the script of the diffusers tensor-parallelism page: the transformer is read in shards, the other parts of the
pipeline are whole on every rank, all ranks draw the same noise from a CPU generator, and rank 0 saves the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .rank_processes import run_ranks

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp generate``."""
    parser.add_argument(
        "--model", required=True, help="a pipeline folder or hub id, such as black-forest-labs/FLUX.2-dev"
    )
    parser.add_argument("--prompt", required=True, help="what to paint")
    parser.add_argument(
        "--tp", type=int, default=0, help="ranks (default: all GPUs; under torchrun its world size)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="where the ranks run"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights (default bfloat16)"
    )
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (default 50)")
    parser.add_argument("--guidance", type=float, default=4.0, help="guidance scale (default 4)")
    parser.add_argument("--width", type=int, default=1024, help="pixels (default 1024)")
    parser.add_argument("--height", type=int, default=1024, help="pixels (default 1024)")
    parser.add_argument("--seed", type=int, default=42, help="noise seed (default 42)")
    parser.add_argument(
        "--output", type=Path, default=Path("output.png"), help="the picture (default output.png)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Generate; returns where the picture is and the seconds of loading and sampling."""
    device = "cuda" if args.device == "cuda" or (args.device == "auto" and _cuda_devices()) else "cpu"
    settings = {**vars(args), "device": device, "output": str(args.output)}
    settings = {name: settings[name] for name in SETTINGS}
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        figures = generate(settings)
    else:
        settings["tp"] = args.tp or max(_cuda_devices() if device == "cuda" else 1, 1)
        if device == "cuda" and settings["tp"] > _cuda_devices():
            raise ConfigError(
                f"--tp {args.tp} needs {args.tp} GPUs, but this machine has {_cuda_devices()}. Lower --tp."
            )
        with tempfile.TemporaryDirectory(prefix="comfy-tp-generate-") as folder:
            program = f"{__package__}.generate"
            figures = run_ranks(program, [json.dumps(settings)], settings["tp"], 1, Path(folder))[0]
    if figures["rank"] == 0:
        print(
            f"{figures['ranks']} ranks: loaded in {figures['load_s']:.1f} s, sampled in {figures['sample_s']:.1f} s"
        )
        print(f"saved {figures['image']}")
    return 0, figures


SETTINGS = (
    "model",
    "prompt",
    "tp",
    "device",
    "dtype",
    "steps",
    "guidance",
    "width",
    "height",
    "seed",
    "output",
)


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def generate(
    settings: dict[str, Any], store: Any = None, rank: int = -1, world_size: int = -1
) -> dict[str, Any]:
    """What every rank does. Without `store` the process group comes from torchrun's environment."""
    import torch
    from diffusers import DiffusionPipeline
    from torch import distributed as dist

    from .. import Flux2Transformer2DModel, TensorParallelConfig

    on_gpu = settings["device"] == "cuda"
    local_rank = int(os.environ.get("LOCAL_RANK", max(rank, 0)))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dtype = getattr(torch, settings["dtype"])
        begin = time.perf_counter()
        transformer = Flux2Transformer2DModel.from_pretrained(
            settings["model"],
            subfolder="transformer",
            dtype=dtype,
            parallel_config=TensorParallelConfig(tp_degree=world_size),
        )
        pipeline = DiffusionPipeline.from_pretrained(
            settings["model"], transformer=transformer, torch_dtype=dtype
        )
        # The transformer is on its device; moving the pipeline as a whole would be refused by its shards.
        pipeline.text_encoder.to(device)
        pipeline.vae.to(device)
        loaded = time.perf_counter()
        pipeline.set_progress_bar_config(disable=rank != 0)
        picture = pipeline(
            prompt=settings["prompt"],
            num_inference_steps=settings["steps"],
            guidance_scale=settings["guidance"],
            width=settings["width"],
            height=settings["height"],
            generator=torch.Generator().manual_seed(settings["seed"]),
        ).images[0]
        sampled = time.perf_counter()
        if rank == 0:
            Path(settings["output"]).parent.mkdir(parents=True, exist_ok=True)
            picture.save(settings["output"])
        dist.barrier()
        return {
            "image": str(Path(settings["output"]).resolve()),
            "rank": rank,
            "ranks": world_size,
            "load_s": loaded - begin,
            "sample_s": sampled - loaded,
        }
    finally:
        dist.destroy_process_group()


def _rank(settings: str, work: str, rank: int, degree: int) -> None:
    """One of the ranks that `run` starts; they meet through a file."""
    from torch import distributed as dist

    figures = generate(json.loads(settings), dist.FileStore(f"{work}/store", degree), rank, degree)
    Path(work, f"rank-{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    settings, work, rank, degree, _threads = sys.argv[1:]
    _rank(settings, work, int(rank), int(degree))
