"""Draws icon.png and banner.png at the repository's root: one disc in four shards, one per rank.

python tools/images/draw_icon.py
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
SCALE = 4  # drawn this much larger and scaled down, for smooth edges
GROUND = (18, 20, 29)
SHARDS = ((255, 138, 76), (245, 84, 112), (128, 92, 245), (56, 176, 240))  # upper right, then clockwise
PALE = (236, 238, 246)
GREY = (150, 156, 176)
SLIDE = 0.16  # of the radius


def shards(image: Image.Image, centre: tuple[float, float], radius: float, gap: float) -> None:
    """Four quarters of a disc, each a little apart from its neighbours and moved along one of them."""
    draw = ImageDraw.Draw(image)
    for quarter, colour in enumerate(SHARDS):
        right, down = ((1, -1), (1, 1), (-1, 1), (-1, -1))[quarter]
        along = ((0, -1), (1, 0), (0, 1), (-1, 0))[quarter]
        x = centre[0] + right * gap + along[0] * radius * SLIDE
        y = centre[1] + down * gap + along[1] * radius * SLIDE
        start = 270 + 90 * quarter
        box = (x - radius, y - radius, x + radius, y + radius)
        draw.pieslice(box, start, start + 90, fill=colour)
        inner = radius * 0.42
        small = (x - inner, y - inner, x + inner, y + inner)
        draw.pieslice(small, start, start + 90, fill=tuple(int(0.72 * c + 0.28 * 255) for c in colour))


def rounded(size: tuple[int, int], corner: int) -> Image.Image:
    """A transparent picture with a dark rounded ground."""
    image = Image.new("RGBA", size, (0, 0, 0, 0))
    ImageDraw.Draw(image).rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), corner, fill=(*GROUND, 255))
    return image


def icon(side: int = 400) -> Image.Image:
    """The square icon."""
    large = side * SCALE
    image = rounded((large, large), large // 6)
    shards(image, (large / 2, large / 2), large * 0.315, large * 0.014)
    return image.resize((side, side), Image.Resampling.LANCZOS)


def banner(width: int = 1260, height: int = 540) -> Image.Image:
    """The 21:9 banner."""
    w, h = width * SCALE // 2, height * SCALE // 2
    image = Image.new("RGB", (w, h), GROUND)
    shards(image, (w * 0.235, h / 2), h * 0.27, h * 0.012)
    draw = ImageDraw.Draw(image)
    draw.text((w * 0.44, h * 0.29), "comfy-tp", font=ImageFont.load_default(h * 0.2), fill=PALE)
    line = "One FLUX.2 over several GPUs."
    draw.text((w * 0.444, h * 0.575), line, font=ImageFont.load_default(h * 0.072), fill=GREY)
    line = "Swap the loader, keep your graph."
    draw.text((w * 0.444, h * 0.675), line, font=ImageFont.load_default(h * 0.072), fill=GREY)
    return image.resize((width, height), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    icon().save(ROOT / "icon.png", optimize=True)
    banner().quantize(128).save(ROOT / "banner.png", optimize=True)
