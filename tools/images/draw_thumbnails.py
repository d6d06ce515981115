"""Thumbnails of the workflows, shown by ComfyUI's template browser, from the pictures of the demo.

make demo
python tools/images/draw_thumbnails.py demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
SIDE = 512
# A word of the workflow's file name -> the demo's pictures, side by side.
PICTURES = (
    ("edit", ("text_to_image.png", "edit.png")),
    ("reference", ("text_to_image.png", "edit.png")),
    ("lora", ("text_to_image.png", "lora.png")),
    ("stock", ("text_to_image_again.png",)),
    ("", ("text_to_image.png",)),
)


def thumbnail(folder: Path, names: tuple[str, ...]) -> Image.Image:
    """A square of the demo's pictures; two of them as its left and right half."""
    names = tuple(name for name in names if (folder / name).is_file()) or (PICTURES[-1][1][0],)
    square = Image.new("RGB", (SIDE, SIDE))
    width = SIDE // len(names)
    for place, name in enumerate(names):
        with Image.open(folder / name) as picture:
            large = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        left = (SIDE - width) // 2
        square.paste(large.crop((left, 0, left + width, SIDE)), (place * width, 0))
    return square


if __name__ == "__main__":
    for workflow in sorted(WORKFLOWS.glob("*.json")):
        chosen = next(names for word, names in PICTURES if word in workflow.stem)
        thumbnail(Path(sys.argv[1]), chosen).save(workflow.with_suffix(".jpg"), quality=85)
