"""Loading a FLUX.2-shaped checkpoint in shards: ours against both ways of diffusers, same files, ranks and threads.

Beside them the restart from rank files, which `save_shards` wrote before. Each load runs in fresh rank processes over
gloo on the CPU, with the files in the page cache. diffusers refuses the CPU, so its device gate and its look-ups of
the accelerator are patched in its ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ..errors import ConfigError
from .arguments import count
from .rank_processes import run_ranks

METHODS = {
    "ours": "comfy-tp from_pretrained",
    "restart": "comfy-tp from_pretrained of rank files",
    "diffusers": "diffusers from_pretrained(parallel_config=)",
    "diffusers_after": "diffusers from_pretrained + enable_parallelism",
}
OURS = ("ours", "restart")
STD = 0.02  # of the random weights
# klein 4B's widths with fewer blocks: 1.68 billion parameters, 3.35 GB in bf16.
CONFIG = {
    "_class_name": "Flux2Transformer2DModel",
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 2,
    "num_single_layers": 8,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [32, 32, 32, 32],
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
FILE_BYTES = 2_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp bench load``."""
    parser.add_argument("--ranks", type=count, default=2, help="ranks that share the model (default 2)")
    parser.add_argument(
        "--threads", type=count, default=1, help="threads of each rank, torch's and ours (default 1)"
    )
    parser.add_argument("--repeats", type=count, default=3, help="loads by each method (default 3)")
    parser.add_argument("--single-blocks", type=int, default=8, help="size of the checkpoint (8: 3.35 GB)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the checkpoint is made (default: temp)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float8_e4m3fn"),
        default="bfloat16",
        help="what our loads hold; fp8 is quantised while it is read, and not by diffusers (default bfloat16)",
    )
    parser.add_argument("--only", choices=METHODS, action="append", help="measure these methods only")


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Make the checkpoint, load it by every method in turn, print the medians; the checkpoint is removed."""
    methods = args.only or [method for method in METHODS if args.dtype == "bfloat16" or method in OURS]
    if args.dtype != "bfloat16" and not set(methods) <= set(OURS):
        raise ConfigError(
            f"--dtype {args.dtype} is for {' and '.join(OURS)} alone. Leave --only {methods[0]} out."
        )
    folder = Path(tempfile.mkdtemp(prefix="comfy-tp-bench-", dir=args.folder))
    try:
        _require_space(folder, args.single_blocks, copies=2 if "restart" in methods else 1)
        checkpoint = folder / "transformer"
        print(f"making a FLUX.2-shaped checkpoint in {folder} ...", flush=True)
        nbytes = make_checkpoint(checkpoint, {**CONFIG, "num_single_layers": args.single_blocks})
        print(
            f"{nbytes / 1e9:.2f} GB; {args.ranks} ranks, {args.threads} threads each, {args.repeats} loads each"
        )
        program = f"{__package__}.bench_load"
        files = dict.fromkeys(methods, checkpoint)
        if "restart" in methods:
            files["restart"] = folder / "shards"
            arguments = ["ours", str(checkpoint), str(files["restart"]), args.dtype]
            run_ranks(program, arguments, args.ranks, args.threads, folder)
        loads: dict[str, list[list[dict]]] = {method: [] for method in methods}
        for repeat in range(args.repeats):
            for method in methods:
                arguments = [method, str(files[method]), "", args.dtype]
                ranks = run_ranks(program, arguments, args.ranks, args.threads, folder)
                loads[method].append(ranks)
                print(
                    f"  {repeat + 1}/{args.repeats} {method}: {max(rank['seconds'] for rank in ranks):.2f} s",
                    flush=True,
                )
        figures = summarise(loads, nbytes)
        _print_table(figures)
        return 0, figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_checkpoint(folder: Path, config: dict) -> int:
    """Write random bf16 weights of a FLUX.2 with `config` as diffusers would, in several files; returns their bytes."""
    import torch
    from diffusers import Flux2Transformer2DModel

    from ..checkpoint.writer import save_pretrained
    from ..tp.shard import ShardSpec

    with torch.device("meta"):
        model = Flux2Transformer2DModel.from_config(dict(config))
    # One block of random numbers serves every weight: what a weight holds costs no load time.
    largest = max(parameter.numel() for parameter in model.parameters())
    values = torch.randn(largest, generator=torch.Generator().manual_seed(0)).mul_(STD).to(torch.bfloat16)
    weights = {
        name: values[: parameter.numel()].view(parameter.shape)
        for name, parameter in model.named_parameters()
    }
    specs = {name: ShardSpec.replicated(weight.shape, 1) for name, weight in weights.items()}
    save_pretrained(folder, weights, specs, rank=0, degree=1, config=config, max_shard_bytes=FILE_BYTES)
    return sum(weight.nbytes for weight in weights.values())


def summarise(loads: dict[str, list[list[dict]]], nbytes: int) -> dict:
    """Medians over the repeats, worst rank of each, and the ratios."""
    figures: dict = {"checkpoint_bytes": nbytes, "methods": {}}
    for method, repeats in loads.items():
        seconds = [max(rank["seconds"] for rank in ranks) for ranks in repeats]
        figures["methods"][method] = {
            "seconds": statistics.median(seconds),
            "seconds_all": seconds,
            "cpu_seconds": _worst(repeats, "cpu_seconds"),
            "bytes_read": statistics.median(
                sum(rank["bytes_read"] or 0 for rank in ranks) for ranks in repeats
            ),
            "rchar": statistics.median(sum(rank["rchar"] for rank in ranks) for ranks in repeats),
            "anonymous_peak_mb": _worst(repeats, "anonymous_peak_mb"),
            "file_peak_mb": _worst(repeats, "file_peak_mb"),
            "shard_mb": _worst(repeats, "shard_mb"),
            "anonymous_beyond_shard_mb": _worst(repeats, "anonymous_beyond_shard_mb"),
        }
    figures["same_weights"] = _same_weights([ranks for repeats in loads.values() for ranks in repeats])
    ours = figures["methods"].get("ours")
    if ours is not None:
        figures["anonymous_beyond_shard_mb"] = ours["anonymous_beyond_shard_mb"]
        figures["bytes_read_ratio"] = ours["bytes_read"] / nbytes
        for method, name in (("diffusers", "time_ratio"), ("diffusers_after", "time_ratio_after")):
            if method in figures["methods"]:
                figures[name] = ours["seconds"] / figures["methods"][method]["seconds"]
                figures[f"cpu_{name}"] = ours["cpu_seconds"] / figures["methods"][method]["cpu_seconds"]
        if "restart" in figures["methods"]:
            restart = figures["methods"]["restart"]
            figures["restart_ratio"] = restart["seconds"] / ours["seconds"]
            figures["restart_cpu_ratio"] = restart["cpu_seconds"] / ours["cpu_seconds"]
    return figures


def _worst(repeats: list[list[dict]], key: str) -> float:
    return statistics.median(max(rank[key] for rank in ranks) for ranks in repeats)


def _same_weights(loads: list[list[dict]]) -> bool:
    """Whether every load gave each rank the same weights, wherever two methods split a weight alike."""
    for rank in range(len(loads[0])):
        sums: dict[tuple, int] = {}
        for ranks in loads:
            for name, (*shape, checksum) in ranks[rank]["weights"].items():
                if sums.setdefault((name, *shape), checksum) != checksum:
                    return False
    return True


def _print_table(figures: dict) -> None:
    print(
        f"{'':48}{'seconds':>9}{'spread':>14}{'CPU s':>8}{'read':>9}{'anon MB':>9}{'beyond':>8}{'file MB':>9}"
    )
    for method, row in figures["methods"].items():
        spread = f"{min(row['seconds_all']):.2f}..{max(row['seconds_all']):.2f}"
        read = f"{row['bytes_read'] / figures['checkpoint_bytes']:.3f}" if row["bytes_read"] else "mmap"
        print(
            f"{METHODS[method]:48}{row['seconds']:9.2f}{spread:>14}{row['cpu_seconds']:8.2f}{read:>9}"
            f"{row['anonymous_peak_mb']:9.0f}{row['anonymous_beyond_shard_mb']:8.0f}{row['file_peak_mb']:9.0f}"
        )
    for name in (
        "time_ratio",
        "time_ratio_after",
        "cpu_time_ratio",
        "cpu_time_ratio_after",
        "restart_ratio",
        "restart_cpu_ratio",
        "bytes_read_ratio",
        "anonymous_beyond_shard_mb",
    ):
        if name in figures:
            print(f"{name}: {figures[name]:.3f}")
    print(f"all ranks hold the same weights by every method: {figures['same_weights']}")


def _require_space(folder: Path, single_blocks: int, copies: int) -> None:
    needed = (1.5e9 + 0.25e9 * single_blocks) * copies
    if shutil.disk_usage(folder).free < 1.2 * needed:
        raise ConfigError(
            f"{folder} has less than the {1.2 * needed / 1e9:.1f} GB that the bench's checkpoint needs. Choose another "
            f"place with --folder."
        )


def warm(folder: Path) -> None:
    """Read every file once, so that all methods find them in the page cache."""
    buffer = bytearray(8 << 20)
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# What follows runs in a rank.


def _rank(method: str, checkpoint: str, save: str, dtype: str, work: str, *numbers: str) -> None:
    """Load by `method` and write down the figures; where `save` names a folder, put the rank files there."""
    import torch
    import torch.distributed as dist

    from ..restart import save_shards

    rank, degree, threads = map(int, numbers)
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{work}/store", degree), rank=rank, world_size=degree
    )
    load = {
        "ours": _load_ours,
        "restart": _load_rank_file,
        "diffusers": _load_diffusers,
        "diffusers_after": _load_diffusers_after,
    }[method]
    with load(checkpoint, degree, threads, getattr(torch, dtype)) as loader:
        # Only now, after the imports: on a busy machine the files may leave the cache while those run.
        warm(Path(checkpoint))
        dist.barrier()
        with MemoryWatch() as memory:
            rchar = _rchar()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            model, bytes_read = loader()
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
            rchar = _rchar() - rchar
    if save:
        save_shards(model, save)
    shard_bytes, weights = _local_weights(model)
    figures = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "bytes_read": bytes_read,
        "rchar": rchar,
        "anonymous_peak_mb": memory.anonymous_peak / 1e6,
        "file_peak_mb": memory.file_peak / 1e6,
        "shard_mb": shard_bytes / 1e6,
        "anonymous_beyond_shard_mb": (memory.anonymous_peak - shard_bytes) / 1e6,
        "weights": weights,
    }
    Path(work, f"rank-{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _load_ours(
    checkpoint: str, degree: int, threads: int, dtype: Any
) -> Iterator[Callable[[], tuple[Any, int | None]]]:
    from diffusers import Flux2Transformer2DModel

    from .. import load as loading
    from ..checkpoint import Checkpoint, reader
    from ..tp.collectives import Ranks
    from ..tp.config import TensorParallelConfig

    def load() -> tuple[Any, int | None]:
        config = TensorParallelConfig(degree)
        ranks = Ranks.of(config, "cpu")
        opened = loading.open_model(Checkpoint.open(checkpoint), model_class=Flux2Transformer2DModel)
        model, report = loading.load_opened(opened, ranks, config=config, dtype=dtype)
        return model, report.bytes_read

    with mock.patch.object(reader, "default_threads", lambda degree: threads):
        yield load


@contextmanager
def _load_rank_file(
    folder: str, degree: int, threads: int, dtype: Any
) -> Iterator[Callable[[], tuple[Any, int | None]]]:
    from diffusers import Flux2Transformer2DModel

    from ..checkpoint import rank_files
    from ..restart import load_shards
    from ..tp.collectives import Ranks
    from ..tp.config import TensorParallelConfig

    def load() -> tuple[Any, int | None]:
        config = TensorParallelConfig(degree)
        ranks = Ranks.of(config, "cpu")
        model, report = load_shards(Flux2Transformer2DModel, Path(folder), ranks, config=config, dtype=dtype)
        return model, report.bytes_read

    with mock.patch.object(rank_files, "default_threads", lambda degree: threads):
        yield load


@contextmanager
def diffusers_on_cpu() -> Iterator[None]:
    """diffusers' tensor parallelism with its refusal of the CPU and its look-ups of the accelerator patched."""
    import torch
    from diffusers.hooks import tensor_parallel

    with (
        mock.patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",)),
        mock.patch.object(torch.accelerator, "device_count", lambda: 1),
        mock.patch.object(
            torch.accelerator, "current_accelerator", lambda *args, **options: torch.device("cpu")
        ),
    ):
        yield


@contextmanager
def _load_diffusers(
    checkpoint: str, degree: int, threads: int, dtype: Any
) -> Iterator[Callable[[], tuple[Any, int | None]]]:
    from diffusers import Flux2Transformer2DModel, TensorParallelConfig

    def load() -> tuple[Any, int | None]:
        config = TensorParallelConfig(tp_degree=degree)
        model = Flux2Transformer2DModel.from_pretrained(checkpoint, torch_dtype=dtype, parallel_config=config)
        return model, None

    with diffusers_on_cpu():
        yield load


@contextmanager
def _load_diffusers_after(
    checkpoint: str, degree: int, threads: int, dtype: Any
) -> Iterator[Callable[[], tuple[Any, int | None]]]:
    from diffusers import Flux2Transformer2DModel, TensorParallelConfig

    def load() -> tuple[Any, int | None]:
        model = Flux2Transformer2DModel.from_pretrained(checkpoint, torch_dtype=dtype)
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=degree))
        return model, None

    with diffusers_on_cpu():
        yield load


class MemoryWatch:
    """Samples this process's anonymous and file-backed memory every few ms; peaks above the start, in bytes."""

    interval = 0.005

    def __init__(self) -> None:
        self.anonymous_peak = 0
        self.file_peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._start = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        anonymous, file = resident_bytes()
        self.anonymous_peak = max(self.anonymous_peak, anonymous - self._start[0])
        self.file_peak = max(self.file_peak, file - self._start[1])


def resident_bytes() -> tuple[int, int]:
    """Anonymous and file-backed resident memory of this process."""
    found = {}
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssFile:")):
                key, value, _ = line.split()
                found[key] = int(value) * 1024
    return found["RssAnon:"], found["RssFile:"]


def _rchar() -> int:
    """Bytes that this process has read by read calls so far."""
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar:")).split()[1])


def _local_weights(model: Any) -> tuple[int, dict[str, list[int]]]:
    """Bytes of the rank's own weights, and shape and checksum of each."""
    from ..checkpoint.memory import byte_view

    total = 0
    sums = {}
    for name, parameter in model.named_parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        total += local.nbytes
        sums[name] = [*local.shape, zlib.crc32(byte_view(local.contiguous()))]
    return total, sums


if __name__ == "__main__":
    _rank(*sys.argv[1:9])
