"""Conditioning and latents of random values, where no text encoder or VAE is small enough for a test."""

import torch
from comfy_api.latest import ComfyExtension, io


class RandomConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TPTestConditioning",
            display_name="Random Conditioning (test)",
            category="comfy-tp tests",
            inputs=[
                io.Int.Input("seed", default=0, min=0, max=2**31),
                io.Int.Input("length", default=77, min=1, max=4096),
                io.Int.Input("width", default=48, min=1, max=65536),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed, length, width):
        values = torch.randn(1, length, width, generator=torch.Generator().manual_seed(seed))
        return io.NodeOutput([[values, {"pooled_output": None}]])


class RandomConditioningPack(ComfyExtension):
    async def get_node_list(self):
        return [RandomConditioning]


async def comfy_entrypoint():
    return RandomConditioningPack()
