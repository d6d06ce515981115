"""A node that takes its time and shows progress and previews as a sampler does, for the tests of the harness."""

import time

import torch
from comfy.utils import ProgressBar
from comfy_api.latest import ComfyExtension, io
from PIL import Image


class SlowImage(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TPTestSlowImage",
            display_name="Slow Image (test)",
            category="comfy-tp tests",
            inputs=[
                io.Int.Input("steps", default=4, min=1, max=1000),
                io.Int.Input("milliseconds", default=50, min=0, max=10_000),
                io.Int.Input("seed", default=0, min=0, max=2**63 - 1, control_after_generate=True),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, steps, milliseconds, seed):
        progress = ProgressBar(steps)
        for step in range(steps):
            time.sleep(milliseconds / 1000)
            shade = 255 * (step + 1) // steps
            preview = ("JPEG", Image.new("RGB", (64, 64), (shade, 0, 0)), 64)
            progress.update_absolute(step + 1, steps, preview)
        return io.NodeOutput(torch.full((1, 48, 64, 3), (seed % 256) / 255))


class Refusal(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TPTestRefusal",
            display_name="Refusal (test)",
            category="comfy-tp tests",
            inputs=[io.String.Input("text")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, text):
        raise ValueError(text)


class HarnessProbe(ComfyExtension):
    async def get_node_list(self):
        return [SlowImage, Refusal]


async def comfy_entrypoint():
    return HarnessProbe()
