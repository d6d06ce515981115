"""Checks that run on every rank of a real group: reading, failing and saving together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from comfy_tp.core.checkpoint import Checkpoint, Piece, Wanted, read_shards
from comfy_tp.core.checkpoint.writer import save_pretrained
from comfy_tp.core.cli.bench_load import MemoryWatch
from comfy_tp.core.errors import CheckpointError
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.shard import ShardSpec

SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "norm.weight": ((96,), None),
    "embed.weight": ((2048, 960), None),
    "modulation.weight": ((1024, 960), None),
    "scale": ((), None),
    "to_q.weight": ((1920, 960), 0),
    "to_out.weight": ((960, 3840), 1),
    "conv.weight": ((24, 48, 3, 3), 1),
    "empty.weight": ((0, 12), 0),
}


def full_tensors() -> dict[str, torch.Tensor]:
    """The model that the checks read and save: replicated, col-wise and row-wise tensors, large and small."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, (shape, _) in SHAPES.items()
    }


def specs(degree: int) -> dict[str, ShardSpec]:
    """The layout of `full_tensors` over `degree` ranks."""
    return {
        name: ShardSpec.replicated(shape, degree) if dim is None else ShardSpec.split(shape, degree, dim)
        for name, (shape, dim) in SHAPES.items()
    }


def wanted(degree: int) -> dict[str, Wanted]:
    """Every tensor, as stored."""
    return {name: Wanted(spec, (Piece(name),)) for name, spec in specs(degree).items()}


def rchar() -> int:
    """Bytes that this process has read by read calls so far."""
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar:")).split()[1])


def _read(ranks: Ranks, path: str, **options: Any):
    return read_shards(
        Checkpoint.open(path),
        wanted(ranks.degree),
        rank=ranks.rank,
        degree=ranks.degree,
        group=dist.group.WORLD,
        **options,
    )


def reading(ranks: Ranks, path: str) -> dict:
    """Read together; say whether every shard is right and what was read."""
    checkpoint = Checkpoint.open(path)
    before = rchar()
    shards, report = _read(ranks, path)
    grown = rchar() - before
    full = full_tensors()
    wrong = [
        name
        for name, spec in specs(ranks.degree).items()
        if not torch.equal(shards[name], spec.shard(full[name], ranks.rank))
    ]
    return {
        "wrong": wrong,
        "bytes_read": report.bytes_read,
        "bytes_kept": report.bytes_kept,
        "bytes_broadcast": report.bytes_broadcast,
        "rchar": grown,
        "file_bytes": checkpoint.nbytes,
        "distinct": len({shard.data_ptr() for shard in shards.values() if shard.numel()}),
    }


def converting(ranks: Ranks, path: str) -> list[str]:
    """Read into float32, through staging; the names that came out wrong."""
    checkpoint = Checkpoint.open(path)
    full = full_tensors()
    want = {name: Wanted(spec, (Piece(name),), torch.float32) for name, spec in specs(ranks.degree).items()}
    shards, _ = read_shards(
        checkpoint, want, rank=ranks.rank, degree=ranks.degree, group=dist.group.WORLD, threads=2
    )
    return [
        name
        for name, spec in specs(ranks.degree).items()
        if shards[name].dtype != torch.float32
        or not torch.equal(shards[name], spec.shard(full[name], ranks.rank).float())
    ]


def failing(ranks: Ranks, path: str, kind: str) -> dict:
    """The last rank fails in a way of its own; all must raise soon, and the group must stay usable."""

    def raise_at_once() -> None:
        raise CheckpointError("stopped by the check")

    last = ranks.rank == ranks.degree - 1
    begin = time.perf_counter()
    try:
        if kind == "cancel":
            _read(ranks, path, cancelled=raise_at_once if last else None)
        else:
            checkpoint = Checkpoint.open(path)
            want = wanted(ranks.degree)
            if last:
                want["to_q.weight"] = Wanted(want["to_q.weight"].spec, (Piece("absent"),))
            read_shards(checkpoint, want, rank=ranks.rank, degree=ranks.degree, group=dist.group.WORLD)
        text = "nothing was raised"
    except CheckpointError as error:
        text = str(error)
    seconds = time.perf_counter() - begin
    total = ranks.all_reduce(torch.ones(1)).item()
    return {"text": text, "seconds": seconds, "total": total}


def saving(ranks: Ranks, path: str, folder: str, max_shard_bytes: int) -> list[str]:
    """Read, save with diffusers' file names, read again plainly on rank 0; the names that came out wrong."""
    shards, _ = _read(ranks, path)
    save_pretrained(
        folder,
        shards,
        specs(ranks.degree),
        rank=ranks.rank,
        degree=ranks.degree,
        group=dist.group.WORLD,
        config={"_class_name": "Model"},
        max_shard_bytes=max_shard_bytes,
    )
    if ranks.rank:
        return []
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found.update(load_file(file))
    full = full_tensors()
    return [name for name in full if name not in found or not torch.equal(found[name], full[name])]


def saving_in_memory(ranks: Ranks, folder: str) -> dict[str, int]:
    """What saving a model of ten tensors, 8 MiB each, takes of anonymous memory at its peak."""
    rows = 2048
    layout = {
        "replicated": ShardSpec.replicated((rows, rows), ranks.degree),
        **{f"cols.{i}": ShardSpec.split((rows, rows), ranks.degree, 0) for i in range(4)},
        **{f"packed.{i}": ShardSpec.split((rows, rows), ranks.degree, 0, (512, 1536)) for i in range(2)},
        **{f"rows.{i}": ShardSpec.split((rows, rows), ranks.degree, 1) for i in range(3)},
    }
    shards = {name: torch.ones(spec.local_shape, dtype=torch.bfloat16) for name, spec in layout.items()}

    def save(names: list[str], into: str) -> None:
        save_pretrained(
            os.path.join(folder, into),
            {name: shards[name] for name in names},
            layout,
            rank=ranks.rank,
            degree=ranks.degree,
            group=dist.group.WORLD,
        )

    save(["cols.0"], "warm")  # gloo's own buffers
    with MemoryWatch() as memory:
        save(list(layout), "model")
    largest = 2 * rows * rows
    return {"peak": memory.anonymous_peak, "largest": largest, "model": largest * len(layout)}


def saving_fails(ranks: Ranks, path: str, folder: str) -> str:
    """Rank 0 cannot write; every rank must say so."""
    shards, _ = _read(ranks, path)
    try:
        save_pretrained(
            folder, shards, specs(ranks.degree), rank=ranks.rank, degree=ranks.degree, group=dist.group.WORLD
        )
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"
