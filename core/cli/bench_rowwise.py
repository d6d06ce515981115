"""Row-wise weights, strided on disk: three ways of reading a rank's columns, measured side by side.

`strided` reads each row's columns by a call of its own (what the loader does), `whole rows` reads everything and keeps
the columns, `exchanged` lets each rank read its share of the rows and swap columns with the others by an all-to-all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from .arguments import count
from .bench_load import run_ranks, warm

# The output projection of a FLUX.2-dev single block, 302 MB in bf16, several times.
ROWS, COLUMNS, TENSORS = 6144, 24576, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp bench rowwise``."""
    parser.add_argument("--ranks", type=count, default=2, help="ranks that share the columns (default 2)")
    parser.add_argument("--repeats", type=count, default=5, help="reads by each method (default 5)")
    parser.add_argument("--folder", type=Path, default=None, help="where the file is made (default: temp)")


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Make the file, read it by every method in turn over `--ranks` gloo ranks, print the medians."""
    import torch

    from ..checkpoint.writer import write_file

    folder = Path(tempfile.mkdtemp(prefix="comfy-tp-bench-", dir=args.folder))
    try:
        weight = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16).add_(torch.arange(COLUMNS) % 100)
        table = {f"w{index}": (weight.dtype, tuple(weight.shape)) for index in range(TENSORS)}
        write_file(folder / "rowwise.safetensors", table, ((name, weight) for name in table))
        warm(folder)
        ranks = run_ranks(
            f"{__package__}.bench_rowwise", [str(folder), str(args.repeats)], args.ranks, 1, folder
        )
        kept = weight.nbytes * TENSORS // args.ranks
        figures = {"ranks": args.ranks, "run_bytes": COLUMNS * 2 // args.ranks, "methods": {}}
        print(
            f"{args.ranks} ranks, {figures['run_bytes']} bytes per row, {kept / 1e6:.0f} MB kept by each rank"
        )
        for method in METHODS:
            seconds = [max(rank[method]["seconds"][index] for rank in ranks) for index in range(args.repeats)]
            read = sum(rank[method]["bytes_read"] for rank in ranks) / (weight.nbytes * TENSORS)
            median = statistics.median(seconds)
            cpu = statistics.median(second for rank in ranks for second in rank[method]["cpu"])
            figures["methods"][method] = {
                "seconds": median,
                "seconds_all": seconds,
                "cpu_seconds": cpu,
                "bytes_read_ratio": read,
            }
            print(
                f"  {method:12} {median:6.3f} s ({min(seconds):.3f}..{max(seconds):.3f}), {cpu:.3f} s of CPU per rank, "
                f"file read {read:.2f} times"
            )
        return 0, figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _strided(path: str, shards: list, rank: int, degree: int) -> int:
    from ..checkpoint import Checkpoint, Piece, Wanted, read_shards, reader
    from ..tp.shard import ShardSpec

    spec = ShardSpec.split((ROWS, COLUMNS), degree, 1)
    wanted = {f"w{index}": Wanted(spec, (Piece(f"w{index}"),)) for index in range(TENSORS)}
    prepared = iter(shards)
    with mock.patch.object(reader, "allocate", lambda *_: next(prepared)):
        _, report = read_shards(Checkpoint.open(path), wanted, rank=rank, degree=degree, threads=1)
    return report.bytes_read


def _whole_rows(path: str, shards: list, rank: int, degree: int) -> int:
    return _by_chunks(path, shards, rank, degree, exchange=False)


def _exchanged(path: str, shards: list, rank: int, degree: int) -> int:
    return _by_chunks(path, shards, rank, degree, exchange=True)


def _by_chunks(path: str, shards: list, rank: int, degree: int, *, exchange: bool) -> int:
    """Read contiguous rows into a staging buffer, all of them or this rank's share, and take or swap columns."""
    import torch
    import torch.distributed as dist

    from ..checkpoint import Checkpoint
    from ..checkpoint.memory import byte_view

    checkpoint = Checkpoint.open(path)
    chunk = 192  # rows; 9.4 MB
    mine = chunk // degree if exchange else chunk
    width = COLUMNS // degree
    staging = torch.empty(mine, COLUMNS, dtype=torch.bfloat16)
    packed = torch.empty(degree, mine, width, dtype=torch.bfloat16)
    view = byte_view(staging)
    descriptor = os.open(path, os.O_RDONLY)
    read = 0
    try:
        for index, shard in enumerate(shards):
            start = checkpoint.entries[f"w{index}"].start
            for row in range(0, ROWS, chunk):
                first = row + (rank * mine if exchange else 0)
                read += os.preadv(descriptor, [view], start + first * COLUMNS * 2)
                if exchange:
                    packed.copy_(staging.view(mine, degree, width).transpose(0, 1))
                    received = shard[row : row + chunk].view(torch.uint8).reshape(-1)
                    dist.all_to_all_single(received, packed.view(torch.uint8).reshape(-1))
                else:
                    shard[row : row + chunk] = staging[:, rank * width : (rank + 1) * width]
    finally:
        os.close(descriptor)
    return read


METHODS: dict[str, Callable[[str, list, int, int], int]] = {
    "strided": _strided,
    "whole rows": _whole_rows,
    "exchanged": _exchanged,
}


def _rank(folder: str, repeats: int, work: str, rank: int, degree: int, threads: int) -> None:
    import torch
    import torch.distributed as dist

    from ..checkpoint.memory import allocate

    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{work}/store", degree), rank=rank, world_size=degree
    )
    # Memory that is already there: what is compared is the reading, not the first touch of fresh pages.
    shape = (ROWS, COLUMNS // degree)
    shards = [allocate(shape, torch.bfloat16, torch.device("cpu")).zero_() for _ in range(TENSORS)]
    columns = torch.arange(rank * shape[1], (rank + 1) * shape[1]) % 100
    figures: dict[str, dict] = {method: {"seconds": [], "cpu": [], "bytes_read": 0} for method in METHODS}
    for _ in range(repeats):
        for method, read in METHODS.items():
            for shard in shards:
                shard.zero_()
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            figures[method]["bytes_read"] = read(f"{folder}/rowwise.safetensors", shards, rank, degree)
            figures[method]["seconds"].append(time.perf_counter() - begin)
            figures[method]["cpu"].append(time.process_time() - cpu)
            if not all(torch.equal(shard, columns.to(shard.dtype).expand_as(shard)) for shard in shards):
                raise ValueError(f"{method}: the columns read are not the ones asked for")
    Path(work, f"rank-{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:7]))
