"""How well the small FLUX.2 does what it is told, measured by pixels on captions it never saw.

python -m comfy_tp.tools.small.evaluate --text pipeline --count 100
python -m comfy_tp.tools.small.evaluate --text zeros --count 100
python -m comfy_tp.tools.small.evaluate --text short --count 100
python -m comfy_tp.tools.small.evaluate --edit --count 50
python -m comfy_tp.tools.small.evaluate --outline --count 50
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ...core.small.pipeline import lora_file, pipeline_folder
from . import draw, encoder

SIDE = 64
STEPS = 12
GUIDANCE = 4.0
SEED = 20261129
TEXT_LENGTH = 512
TEXT_PATHS = ("pipeline", "zeros", "short")


@dataclass(frozen=True)
class Adherence:
    """Shares of pictures with the right shape, colour, ground, and all three."""

    shape: float
    colour: float
    ground: float
    every: float
    count: int

    @classmethod
    def of(cls, images: list[np.ndarray], scenes: list[draw.Scene]) -> Adherence:
        """Judge ``images`` against what ``scenes`` name."""
        rows = []
        for image, scene in zip(images, scenes, strict=True):
            seen = draw.judge(image).triple
            rows.append([a == b for a, b in zip(seen, scene.triple, strict=True)])
        count = len(rows)
        shape, colour, ground = (sum(column) / count for column in zip(*rows, strict=True))
        return cls(shape, colour, ground, sum(all(row) for row in rows) / count, count)


def load_pipeline(folder: Path | None = None):
    """The small Flux2Pipeline in float32 on the CPU, silent."""
    from diffusers import Flux2Pipeline

    pipeline = Flux2Pipeline.from_pretrained(
        folder or pipeline_folder(), torch_dtype=torch.float32, trust_remote_code=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def text_rows(pipeline, texts: list[str], path: str) -> list[torch.Tensor]:
    """Conditionings [1, n, joint] of ``texts`` along one of TEXT_PATHS.

    ``pipeline``: 512 tokens through the encoder, padding included. ``zeros``: zero rows and then
    the rows of the real tokens, 512 together, as ComfyUI does. ``short``: the real tokens' rows alone.
    """
    if path == "pipeline":
        return [pipeline.encode_prompt(text)[0] for text in texts]
    rows = encoder.encode_short(pipeline.text_encoder, pipeline.tokenizer, texts)
    if path == "zeros":
        rows = [torch.cat([row.new_zeros(TEXT_LENGTH - len(row), row.shape[1]), row]) for row in rows]
    return [row.unsqueeze(0) for row in rows]


@torch.no_grad()
def paint(
    pipeline, texts: list[str], path: str = "pipeline", references: list | None = None, steps: int = STEPS
) -> list[np.ndarray]:
    """Pictures [64, 64, 3] (bytes) for ``texts``; picture i starts from seed SEED + i.

    ``references``: one PIL image a text, for edits.
    """
    embeds = text_rows(pipeline, texts, path)
    images: list[np.ndarray | None] = [None] * len(texts)
    # Texts of one length go together, edits one by one (the pipeline shares references within a batch).
    groups: dict[object, list[int]] = {}
    for index, rows in enumerate(embeds):
        groups.setdefault(rows.shape[1] if references is None else index, []).append(index)
    for members in groups.values():
        for start in range(0, len(members), 10):
            part = members[start : start + 10]
            result = pipeline(
                image=None if references is None else references[part[0]],
                prompt_embeds=torch.cat([embeds[i] for i in part]),
                height=SIDE,
                width=SIDE,
                num_inference_steps=steps,
                guidance_scale=GUIDANCE,
                generator=[torch.Generator().manual_seed(SEED + i) for i in part],
                output_type="np",
            ).images
            for index, image in zip(part, result, strict=True):
                images[index] = (np.asarray(image) * 255).round().astype(np.uint8)
    return [image for image in images if image is not None]


def measure_captions(pipeline, count: int = 100, path: str = "pipeline", steps: int = STEPS) -> Adherence:
    """Adherence on the first ``count`` held-out captions."""
    pairs = draw.held_out_scenes(count)
    return Adherence.of(paint(pipeline, [t for _, t in pairs], path, steps=steps), [s for s, _ in pairs])


def measure_edits(pipeline, count: int = 50, path: str = "pipeline", steps: int = STEPS) -> Adherence:
    """Adherence of edits of drawn references on ``count`` held-out results."""
    edits = draw.held_out_edits(count)
    references = [Image.fromarray(i) for i in draw.to_pixels(draw.draw([e[0] for e in edits], SIDE))]
    images = paint(pipeline, [e[2] for e in edits], path, references, steps)
    return Adherence.of(images, [e[1] for e in edits])


def measure_outlines(
    pipeline, count: int = 50, path: str = "pipeline", steps: int = STEPS
) -> tuple[Adherence, float]:
    """(adherence with the LoRA, share of hollow shapes) on ``count`` held-out captions. Loads the LoRA."""
    pipeline.load_lora_weights(str(lora_file()))
    pairs = draw.held_out_scenes(count)
    images = paint(pipeline, [t for _, t in pairs], path, steps=steps)
    hollow = sum(draw.judge(image).hollow > 0.1 for image in images) / count
    return Adherence.of(images, [s for s, _ in pairs]), hollow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=None, help="a pipeline folder; the shipped one by default"
    )
    parser.add_argument("--text", choices=TEXT_PATHS, default="pipeline")
    parser.add_argument("--edit", action="store_true")
    parser.add_argument("--outline", action="store_true")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    pipeline = load_pipeline(arguments.folder)
    began = time.time()
    line: dict[str, object] = {"text": arguments.text, "steps": arguments.steps}
    if arguments.edit:
        found = measure_edits(pipeline, arguments.count, arguments.text, arguments.steps)
    elif arguments.outline:
        found, line["hollow"] = measure_outlines(pipeline, arguments.count, arguments.text, arguments.steps)
    else:
        found = measure_captions(pipeline, arguments.count, arguments.text, arguments.steps)
    print(json.dumps(line | vars(found) | {"seconds": round(time.time() - began)}))


if __name__ == "__main__":
    main()
