"""A LoRA (LoHa, LoKr, DoRA) on shards: merged against a side path, in swap time, memory, step time and exactness.

Real ranks over gloo on the CPU, on a FLUX.2-shaped checkpoint in the page cache. Exactness is the output's distance
from the same file loaded in float32 with the LoRA merged, in which neither weight nor change is rounded.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..calls.keys import KEYS
from ..calls.remote import RemoteModel
from ..lora.adapters import Adapter
from ..lora.apply import PatchReport
from ..lora.patch import Patch
from ..ranks.client import RankGroup
from .arguments import count
from .bench_load import CONFIG, STD, make_checkpoint, warm

MODES = ("merge", "side")
KINDS = ("lora", "loha", "lokr", "dora", "dora-columns")
WIDTHS = {"num_layers": 2, "num_single_layers": 6, "num_attention_heads": 16, "joint_attention_dim": 6144}
TEXT_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp bench lora``."""
    parser.add_argument("--ranks", type=count, default=2, help="ranks that share the model (default 2)")
    parser.add_argument(
        "--kind", choices=KINDS, default="lora", help="what changes the weights (default lora)"
    )
    parser.add_argument(
        "--rank", type=count, default=32, help="rank of the LoRA, of each half of a LoHa (default 32)"
    )
    parser.add_argument(
        "--factor", type=count, default=16, help="rows and columns of a LoKr's first matrix (default 16)"
    )
    parser.add_argument(
        "--dtype", default="default", help="dtype of the weights (default: bfloat16, as stored)"
    )
    parser.add_argument("--repeats", type=count, default=5, help="steps and swaps that are timed (default 5)")
    parser.add_argument("--tokens", type=count, default=16, help="image tokens of a step (default 16)")
    parser.add_argument("--heads", type=count, default=16, help="attention heads of 128 (16: 1.2 GB)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the checkpoint is made (default: temp)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Make the checkpoint, measure both ways, print a table; the checkpoint is removed."""
    folder = Path(tempfile.mkdtemp(prefix="comfy-tp-bench-", dir=args.folder))
    try:
        checkpoint = folder / "transformer"
        print(f"making a FLUX.2-shaped checkpoint in {folder} ...", flush=True)
        nbytes = make_checkpoint(checkpoint, {**CONFIG, **WIDTHS, "num_attention_heads": args.heads})
        group = RankGroup.start(["cpu"] * args.ranks, env={"OMP_NUM_THREADS": "1"}, step_timeout=600.0)
        try:
            size = f"factor {args.factor}" if args.kind == "lokr" else f"rank {args.rank}"
            figures = {
                "checkpoint_bytes": nbytes,
                "rank": size,
                "kind": args.kind,
                **measure(group, checkpoint, args),
            }
        finally:
            group.close()
        _print_table(figures)
        return 0, figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(group: RankGroup, checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Load, swap and step in both modes, and compare with float32."""
    loras = [make_lora(checkpoint, args.kind, args.rank, args.factor, seed) for seed in (1, 2)]
    inputs = make_inputs(args.tokens)
    exact_model = RemoteModel.load(group, str(checkpoint), dtype="float32")
    exact_model.set_patches(loras[0], mode="merge")
    exact = call(exact_model, inputs)
    exact_model.unload()
    warm(checkpoint)
    load_seconds, model = timed(load, group, str(checkpoint), args.dtype)
    plain = call(model, inputs)
    figures: dict[str, Any] = {
        "load_seconds": load_seconds,
        "lora_bytes": sum(tensor.nbytes for patch in loras[0] for tensor in patch.adapter.tensors.values()),
        "step_seconds": steps(model, inputs, args.repeats),
        "modes": {},
    }
    for mode in MODES:
        first, report = timed(set_patches, model, loras[0], mode)
        error = distance(call(model, inputs), exact)
        step_seconds = steps(model, inputs, args.repeats)
        swaps, strengths = [], []
        for repeat in range(args.repeats):
            patches = loras[(repeat + 1) % 2]
            swaps.append(timed(set_patches, model, patches, mode)[0])
            weaker = [Patch(patch.key, patch.adapter, 0.5) for patch in patches]
            strengths.append(timed(set_patches, model, weaker, mode)[0])
        removal, _ = timed(set_patches, model, [], mode)
        figures["modes"][mode] = {
            "first_seconds": first,
            "swap_seconds": statistics.median(swaps),
            "strength_seconds": statistics.median(strengths),
            "removal_seconds": removal,
            "swap_of_load": statistics.median(swaps) / load_seconds,
            "step_seconds": step_seconds,
            "step_ratio": step_seconds / figures["step_seconds"],
            "host_bytes": report.host_bytes,
            "side_bytes": report.side_bytes,
            "error": error,
            "bit_identical_after": bool(torch.equal(call(model, inputs), plain)),
        }
    model.unload()
    figures["effect"] = distance(plain, exact)
    return figures


def make_lora(checkpoint: Path, kind: str, rank: int, factor: int, seed: int) -> list[Patch]:
    """A bf16 adapter of every Linear in the blocks, whose change is a few percent of the weight's size."""
    from ..checkpoint.files import Checkpoint, resolve_source

    generator = torch.Generator().manual_seed(seed)
    entries = Checkpoint.open(resolve_source(str(checkpoint))).entries

    def random(rows: int, columns: int, size: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * size).to(torch.bfloat16)

    patches = []
    for name, entry in entries.items():
        if len(entry.shape) != 2 or "transformer_blocks" not in name:
            continue
        rows, columns = entry.shape
        if kind in ("lora", "dora", "dora-columns"):
            tensors = {"up": random(rows, rank, 0.02), "down": random(rank, columns, 0.05 / rank**0.5)}
            if kind != "lora":
                # The checkpoint's weights are random numbers of this size, so are their norms all alike.
                size, shape = (columns, (rows, 1)) if kind == "dora" else (rows, (1, columns))
                trained = 1 + 0.1 * torch.randn(shape, generator=generator)
                tensors["dora_scale"] = trained * STD * size**0.5
        elif kind == "loha":
            size = 0.03 / rank**0.5
            tensors = {"w1_a": random(rows, rank, 1.0), "w1_b": random(rank, columns, size)}
            tensors |= {"w2_a": random(rows, rank, 1.0), "w2_b": random(rank, columns, size)}
        else:
            tensors = {
                "w1": random(factor, factor, 0.1),
                "w2": random(rows // factor, columns // factor, 0.01),
            }
        patches.append(Patch(name, Adapter("lora" if kind.startswith("dora") else kind, tensors)))
    return patches


def make_inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    """Latent, timestep and conditioning of one call."""
    generator = torch.Generator().manual_seed(7)
    side = int(tokens**0.5)
    return (
        torch.randn(1, 128, side, side, generator=generator),
        torch.tensor([0.7]),
        torch.randn(1, TEXT_TOKENS, WIDTHS["joint_attention_dim"], generator=generator),
    )


def call(model: RemoteModel, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The velocity of one call."""
    return model.forward(inputs[0], inputs[1], {"context": KEYS.kept(inputs[2])}).clone()


def steps(model: RemoteModel, inputs: tuple[torch.Tensor, ...], repeats: int) -> float:
    """Median seconds of a step."""
    call(model, inputs)
    return statistics.median(timed(call, model, inputs)[0] for _ in range(repeats))


def load(group: RankGroup, checkpoint: str, dtype: str) -> RemoteModel:
    """The model of `checkpoint` on the ranks."""
    return RemoteModel.load(group, checkpoint, dtype=dtype)


def set_patches(model: RemoteModel, patches: list[Patch], mode: str) -> PatchReport:
    """Replace the model's patches."""
    return model.set_patches(patches, mode=mode)


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds that `work` takes with `arguments`, and its result."""
    started = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - started, result


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """|found - exact| / |exact|, in L2."""
    return float((found - exact).norm() / exact.norm())


def _print_table(figures: dict[str, Any]) -> None:
    print(
        f"{figures['checkpoint_bytes'] / 1e9:.2f} GB loaded in {figures['load_seconds']:.2f} s; {figures['kind']} of "
        f"{figures['rank']}, {figures['lora_bytes'] / 1e6:.0f} MB; step without it {figures['step_seconds']:.3f} s; its "
        f"effect on the output {figures['effect']:.3f}"
    )
    rows = {
        "swap, seconds": ("swap_seconds", "{:.3f}"),
        "swap, share of the load": ("swap_of_load", "{:.3f}"),
        "new strength, seconds": ("strength_seconds", "{:.3f}"),
        "removal, seconds": ("removal_seconds", "{:.3f}"),
        "step, ratio to none": ("step_ratio", "{:.3f}"),
        "host memory per rank, bytes": ("host_bytes", "{}"),
        "device memory per rank, bytes": ("side_bytes", "{}"),
        "error against float32": ("error", "{:.2e}"),
        "bit-identical after removal": ("bit_identical_after", "{}"),
    }
    print(f"{'':32}" + "".join(f"{mode:>14}" for mode in MODES))
    for label, (key, form) in rows.items():
        print(f"{label:32}" + "".join(f"{form.format(figures['modes'][mode][key]):>14}" for mode in MODES))
