"""What a model call costs beyond the ranks' own forward: its tensors' way there and back, the wait and the lockstep.

The ranks hold a FLUX.2 of small widths that answers each call with zeros, so that what is left is the cost. Latents
and text have the sizes of FLUX.2-dev's; text and references cross once and are named by keys afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import count

if TYPE_CHECKING:
    import torch

    from ..calls.remote import RemoteModel

REFERENCES = (0, 2)
TEXT_WIDTH = 15360
TEXT_TOKENS = 512
WIDTHS = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "axes_dims_rope": [8, 8, 8, 8],
    "joint_attention_dim": TEXT_WIDTH,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp bench overhead``."""
    parser.add_argument("--ranks", type=count, default=1, help="ranks that share the model (default 1)")
    parser.add_argument("--calls", type=count, default=100, help="calls that are timed (default 100)")
    parser.add_argument("--side", type=count, default=64, help="latents along each side of the picture (64)")


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Start the ranks, make the calls, print the milliseconds of one; the checkpoint is removed."""
    from ..calls.remote import RemoteModel
    from ..ranks.client import RankGroup
    from .bench_load import CONFIG, make_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="comfy-tp-bench-"))
    try:
        make_checkpoint(folder / "transformer", {**CONFIG, **WIDTHS})
        with RankGroup.start(["cpu"] * args.ranks, commands=f"{__package__}.null_forward:COMMANDS") as group:
            model = RemoteModel.load(group, str(folder / "transformer"), dtype="float32")
            figures = {
                "ranks": args.ranks,
                "calls": args.calls,
                "references": {
                    number: measure(model, number, args.calls, args.side) for number in REFERENCES
                },
            }
        _print_table(figures)
        return 0, figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(model: RemoteModel, references: int, calls: int, side: int) -> dict[str, float]:
    """Milliseconds of the first call, which sends what the others name by its key, and of the calls after it."""
    import torch

    generator = torch.Generator().manual_seed(7)
    latent = torch.randn(1, 128, side, side, generator=generator)
    text = torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=generator)
    pictures = [torch.randn(1, 128, side, side, generator=generator) for _ in range(references)]
    first, *later = (_seconds(model, latent, text, pictures) * 1000 for _ in range(calls + 1))
    return {"first_ms": first, "median_ms": statistics.median(later), "fastest_ms": min(later)}


def _seconds(
    model: RemoteModel, latent: torch.Tensor, text: torch.Tensor, pictures: list[torch.Tensor]
) -> float:
    """How long one call takes, as ComfyUI's loop makes it."""
    import torch

    from ..calls.inputs import Inputs
    from ..calls.keys import KEYS

    started = time.perf_counter()
    inputs: Inputs = {"context": KEYS.kept(text), "references": [KEYS.kept(picture) for picture in pictures]}
    answer = model.forward(latent, torch.ones(1), inputs, poll=lambda: None)
    seconds = time.perf_counter() - started
    assert answer.shape == latent.shape and not answer.any()
    return seconds


def _print_table(figures: dict[str, Any]) -> None:
    print(f"{figures['ranks']} ranks, {figures['calls']} calls")
    print(f"{'references':12}{'first':>10}{'median':>10}{'fastest':>10}   ms")
    for number, row in figures["references"].items():
        print(
            f"{number:<12}" + "".join(f"{row[f'{key}_ms']:10.2f}" for key in ("first", "median", "fastest"))
        )
