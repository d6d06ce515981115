"""One prompt at 1 and at 2 ranks side by side, with their difference; prints the largest difference of a pixel.

python tools/images/compare_ranks.py [PIPELINE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from comfy_tp.comfyui import ComfyServer, demo
from comfy_tp.core.small.pipeline import pipeline_folder

TARGET = Path(__file__).resolve().parents[2] / "docs" / "images" / "ranks.png"
SIDE = 256
TIMES = 64  # how much the difference is amplified in the picture


def pictures(folder: Path) -> list[np.ndarray]:
    """The demo's picture [H, W, 3] uint8 of the same seed at 1 and at 2 ranks."""
    found = []
    with ComfyServer() as comfy, tempfile.TemporaryDirectory() as output:
        demo.link_models(comfy.models, folder)
        for ranks in (1, 2):
            graph = demo.text_to_image(demo.PROMPT, ranks=ranks, devices="cpu", seed=7, steps=demo.STEPS)
            file, _seconds = demo.render(comfy, graph, Path(output) / f"{ranks}.png")
            with Image.open(file) as picture:
                found.append(np.asarray(picture.convert("RGB")))
    return found


def side_by_side(one: np.ndarray, two: np.ndarray) -> Image.Image:
    """Both pictures and TIMES their difference."""
    difference = np.abs(one.astype(int) - two.astype(int))
    print(f"largest difference of a pixel: {difference.max()}/255")
    strip = Image.new("RGB", (3 * SIDE + 32, SIDE), (255, 255, 255))
    for place, values in enumerate((one, two, np.minimum(TIMES * difference, 255).astype(np.uint8))):
        shown = Image.fromarray(values).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        strip.paste(shown, (place * (SIDE + 16), 0))
    return strip


if __name__ == "__main__":
    pipeline = Path(sys.argv[1]) if sys.argv[1:] else pipeline_folder()
    side_by_side(*pictures(pipeline)).save(TARGET, optimize=True)
