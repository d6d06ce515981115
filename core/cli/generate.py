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

from ..errors import CheckpointError, ConfigError
from .bench import unwound_by_signals
from .rank_processes import refusals_told, run_ranks

DTYPES = ("bfloat16", "float16", "float32")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
LARGEST_SEED = 2**64 - 1
# A first run may download the model, and a processor takes hours for a large one. A rank that fails ends all at once.
LIMIT_S = 24 * 3600.0


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
    check(args)
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
        print(f"{settings['tp']} ranks on the {device} load {args.model} and paint ...", flush=True)
        with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="comfy-tp-generate-") as folder:
            program = f"{__package__}.generate"
            arguments = [str(args.model), json.dumps(settings)]
            ranks = run_ranks(
                program, arguments, settings["tp"], 1, Path(folder), limit_s=LIMIT_S, downloads=True
            )
            figures = ranks[0]
    if figures["rank"] == 0:
        print(
            f"{figures['ranks']} ranks: loaded in {figures['load_s']:.1f} s, sampled in {figures['sample_s']:.1f} s"
        )
        print(f"saved {figures['image']}")
    return 0, figures


def check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for what would fail only after the model was loaded or the picture was painted."""
    for name in ("steps", "width", "height"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}. Choose 1 or more.")
    if args.tp < 0:
        raise ConfigError(f"--tp is {args.tp}. Choose 1 or more, or leave it out to take all GPUs.")
    if not 0 <= args.seed <= LARGEST_SEED:
        raise ConfigError(f"--seed is {args.seed}. Choose one from 0 to {LARGEST_SEED}.")
    if args.output.suffix.lower() not in PICTURES:
        raise ConfigError(f"--output: '{args.output}' does not end in one of {', '.join(PICTURES)}.")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: '{args.output}' cannot be written ({error.strerror}).") from None
    if args.output.is_dir() or not os.access(args.output.parent, os.W_OK):
        raise ConfigError(f"--output: '{args.output}' cannot be written. Choose another place.")


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
    from torch import distributed as dist

    on_gpu = settings["device"] == "cuda"
    local_rank = int(os.environ.get("LOCAL_RANK", max(rank, 0)))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        begin = time.perf_counter()
        pipeline = load_pipeline(settings["model"], getattr(torch, settings["dtype"]), device, world_size)
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


def load_pipeline(source: str, dtype: Any, device: Any, degree: int) -> Any:
    """The pipeline of `source` on `device`, its transformer in shards."""
    from diffusers import DiffusionPipeline

    from .. import Flux2Transformer2DModel, TensorParallelConfig

    transformer = Flux2Transformer2DModel.from_pretrained(
        source, subfolder="transformer", dtype=dtype, parallel_config=TensorParallelConfig(tp_degree=degree)
    )
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            source, transformer=transformer, torch_dtype=dtype, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source}: the parts beside the transformer cannot be loaded "
            f"({' '.join(str(error).split())[:300]}). Download the whole pipeline folder again."
        ) from error
    # The transformer is on its device; moving the pipeline as a whole would be refused by its shards.
    pipeline.text_encoder.to(device)
    pipeline.vae.to(device)
    return pipeline


def _rank(settings: str, work: str, rank: int, degree: int) -> None:
    """One of the ranks that `run` starts; they meet through a file."""
    from torch import distributed as dist

    with refusals_told(work, rank):
        figures = generate(json.loads(settings), dist.FileStore(f"{work}/store", degree), rank, degree)
    Path(work, f"rank-{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    _model, settings, work, rank, degree, _threads = sys.argv[1:]
    _rank(settings, work, int(rank), int(degree))
