"""A contact sheet of the small FLUX.2: prompts, edits of a reference, and the outline LoRA, each with its text.

python -m comfy_tp.tools.small.sheet docs/images/small_samples.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ...core.small.pipeline import lora_file
from . import draw, evaluate

CELL = 128
LABEL = 34
COLUMNS = 6
EDITS = ("make it green", "make it yellow", "make the background white", "make it a triangle")


def _cell(image: np.ndarray, text: str) -> Image.Image:
    cell = Image.new("RGB", (CELL + 8, CELL + LABEL), "white")
    cell.paste(Image.fromarray(image).resize((CELL, CELL), Image.Resampling.BICUBIC), (4, 4))
    pen, font = ImageDraw.Draw(cell), ImageFont.load_default(10)
    words, lines = text.split(), [""]
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font=font) > CELL:
            lines.append(word)
        else:
            lines[-1] = longer
    for number, line in enumerate(lines[:2]):
        pen.text((4, CELL + 6 + 12 * number), line, fill="black", font=font)
    return cell


def contact_sheet(target: Path, folder: Path | None = None) -> Path:
    """Paint the sheet and write it as a PNG of 128 colours; returns ``target``."""
    pipeline = evaluate.load_pipeline(folder)
    texts = [text for _, text in draw.held_out_scenes(100)][: 2 * COLUMNS]
    cells = [
        _cell(image, text)
        for image, text in zip(evaluate.paint(pipeline, texts, "short"), texts, strict=True)
    ]
    references = draw.to_pixels(
        draw.draw([draw.Scene("circle", "red", "black"), draw.Scene("square", "blue", "orange")])
    )
    for reference in references:
        edits = list(EDITS)
        images = evaluate.paint(pipeline, edits, "short", [Image.fromarray(reference)] * len(edits))
        cells.append(_cell(reference, "reference:"))
        cells += [_cell(image, text) for image, text in zip(images, edits, strict=True)]
        cells.append(_cell(np.full((64, 64, 3), 255, np.uint8), ""))
    if (folder or lora_file().parent.parent).joinpath("lora").exists():
        pipeline.load_lora_weights(str((folder or lora_file().parent.parent) / "lora" / lora_file().name))
        styled = evaluate.paint(pipeline, texts[:COLUMNS], "short")
        cells += [_cell(i, f"LoRA: {t}") for i, t in zip(styled, texts[:COLUMNS], strict=True)]
    width, height = cells[0].size
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(cells) // COLUMNS) * height), "white")
    for index, cell in enumerate(cells):
        sheet.paste(cell, (index % COLUMNS * width, index // COLUMNS * height))
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--folder", type=Path, default=None, help="a pipeline folder; the shipped one by default"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    print(contact_sheet(arguments.target, arguments.folder))


if __name__ == "__main__":
    main()
