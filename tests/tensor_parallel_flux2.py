"""The script of the diffusers tensor-parallelism page, with its import lines changed.

On CPU the backend, device, dtype and path change too, and a small picture is asked for. Run it with
``torchrun --nproc-per-node 2 tensor_parallel_flux2.py MODEL OUTPUT``.
"""

import sys

import torch
from diffusers import DiffusionPipeline
from torch import distributed as dist

from comfy_tp.core import Flux2Transformer2DModel, TensorParallelConfig

MODEL, OUTPUT = sys.argv[1:]


def main():
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")

    transformer = Flux2Transformer2DModel.from_pretrained(
        MODEL,
        subfolder="transformer",
        dtype=torch.float32,
        parallel_config=TensorParallelConfig(tp_degree=world_size),
    )

    pipeline = DiffusionPipeline.from_pretrained(MODEL, transformer=transformer, dtype=torch.float32)
    pipeline.text_encoder.to(device)
    pipeline.vae.to(device)

    generator = torch.Generator().manual_seed(42)
    image = pipeline(
        prompt="a red circle",
        generator=generator,
        width=64,
        height=64,
        num_inference_steps=2,
        guidance_scale=4.0,
    ).images[0]
    if rank == 0:
        image.save(OUTPUT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
