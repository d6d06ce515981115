"""``comfy-tp doctor``: is this machine ready, how fast is it, and what can it do with each FLUX.2 at each degree.

Measures the disk, host-to-device copies, matrix products and the all-reduce of a real rank group, and gives the bounds
that follow (`core.limits`). It says what is missing, and what to do about it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..planning import bounds as limits
from .rank_processes import run_ranks

FLOORS = {
    "torch": "2.4",
    "diffusers": "0.36",
    "safetensors": "0.4",
    "huggingface_hub": "0.30",
    "transformers": "4.57",
}
DISK_BYTES = 512 << 20
REDUCE_BYTES = 54 << 20  # the reduce of a single block of FLUX.2-dev at 1024x1024
DEGREES = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp doctor``."""
    parser.add_argument(
        "--folder", type=Path, default=None, help="where model files lie; its disk is measured"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="ranks of the all-reduce (default: all GPUs, else 2)"
    )
    parser.add_argument("--quick", action="store_true", help="check the environment only, measure nothing")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Check, measure, predict. Status 1 when something that the pack needs is missing."""
    figures: dict[str, Any] = {"problems": [], "versions": {}}
    for name, floor in FLOORS.items():
        version, problem = check_version(name, floor)
        figures["versions"][name] = version
        if problem:
            figures["problems"].append(problem)
    devices = describe_devices()
    figures["devices"] = devices
    print("versions: " + ", ".join(f"{name} {version}" for name, version in figures["versions"].items()))
    print(
        "devices:  "
        + (", ".join(f"{d['name']} ({d['bytes'] / 1e9:.0f} GB)" for d in devices) or "no GPU, CPU only")
    )
    if sys.platform != "linux":
        figures["problems"].append(
            f"The ranks need Linux (NCCL, Unix sockets); this is {sys.platform}. Use WSL2 on Windows."
        )
    if not args.quick and not figures["problems"]:
        measure(args, devices, figures)
    for problem in figures["problems"]:
        print(f"problem: {problem}")
    print("ready" if not figures["problems"] else "not ready")
    return (1 if figures["problems"] else 0), figures


def check_version(name: str, floor: str) -> tuple[str, str | None]:
    """The installed version of a package, and what is wrong with it, if anything."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing", f"{name} is not installed. Install it: pip install {name}"
    if _numbers(version) < _numbers(floor):
        return (
            version,
            f"{name} {version} is older than {floor}. Upgrade it: pip install -U '{name}>={floor}'",
        )
    return version, None


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts[:3])


def describe_devices() -> list[dict[str, Any]]:
    """Name, memory in bytes and peer access of every CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [
        {
            "name": torch.cuda.get_device_name(index),
            "bytes": torch.cuda.get_device_properties(index).total_memory,
            "peers": [
                other
                for other in range(count)
                if other != index and torch.cuda.can_device_access_peer(index, other)
            ],
        }
        for index in range(count)
    ]


def measure(args: argparse.Namespace, devices: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Bandwidths and arithmetic of this machine, and what follows for each FLUX.2."""
    ranks = args.ranks or (len(devices) if len(devices) > 1 else 2)
    on_gpu = len(devices) >= ranks
    disk = disk_bandwidth(args.folder or Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="comfy-tp-doctor-") as folder:
        kind = "cuda" if on_gpu else "cpu"
        measured = run_ranks(f"{__package__}.doctor", [kind], ranks, 1, Path(folder))
    machine = limits.Machine(
        disk=disk,
        host_to_device=min(rank["host_to_device"] for rank in measured),
        all_reduce=min(rank["all_reduce"] for rank in measured),
        compute=min(rank["compute"] for rank in measured),
        device_bytes=min((device["bytes"] for device in devices), default=None) if on_gpu else None,
    )
    figures["disk_gb_s"] = machine.disk / 1e9
    figures["host_to_device_gb_s"] = machine.host_to_device / 1e9
    figures["all_reduce_gb_s"] = machine.all_reduce / 1e9
    figures["compute_tflops"] = machine.compute / 1e12
    print(
        f"measured: disk {figures['disk_gb_s']:.1f} GB/s, host to device {figures['host_to_device_gb_s']:.1f} GB/s, "
        f"all-reduce over {ranks} {kind} ranks {figures['all_reduce_gb_s']:.1f} GB/s, "
        f"matrix products {figures['compute_tflops']:.2f} TFLOP/s"
    )
    print("bounds from these, bf16, 1024x1024 with 512 text tokens (real times are above them):")
    print(
        f"{'model':24}{'degree':>7}{'GB/rank':>9}{'load cold':>11}{'warm':>8}{'step':>12}{'of it reduce':>14}"
    )
    figures["predictions"] = []
    for size in limits.published():
        for degree in (degree for degree in DEGREES if size.heads % degree == 0):
            bound = limits.predict(size, machine, degree)
            row = {
                "model": size.name,
                "degree": degree,
                "rank_gb": bound.rank_bytes / 1e9,
                "load_cold_s": bound.load_cold_s,
                "load_warm_s": bound.load_warm_s,
                "step_s": bound.step_s,
                "reduce_s": bound.reduce_s,
                "fits": bound.fits,
            }
            figures["predictions"].append(row)
            note = "  does not fit" if bound.fits is False else ""
            print(
                f"{size.name:24}{degree:>7}{row['rank_gb']:>9.1f}{bound.load_cold_s:>9.1f} s{bound.load_warm_s:>6.1f} s"
                f"{bound.step_s:>10.2f} s{bound.reduce_s:>12.2f} s{note}"
            )


def disk_bandwidth(folder: Path) -> float:
    """Bytes a second of reading a file of this folder's disk that is not in the page cache."""
    size = min(DISK_BYTES, shutil.disk_usage(folder).free // 4)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="comfy-tp-doctor-") as file:
        block = os.urandom(1 << 20)
        for _ in range(max(size >> 20, 1)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(8 << 20)
        begin = time.perf_counter()
        with open(file.name, "rb", buffering=0) as reader:
            done = 0
            while count := reader.readinto(buffer):
                done += count
        return done / (time.perf_counter() - begin)


# What follows runs in a rank.


def _rank(kind: str, work: str, rank: int, degree: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{work}/store", degree)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=degree)
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    message = torch.zeros(REDUCE_BYTES // dtype.itemsize, dtype=dtype, device=device)
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=kind == "cuda").fill_(1)
    target = torch.empty(host.numel(), dtype=torch.uint8, device=device)
    side = 8192 if kind == "cuda" else 1024
    a = torch.randn(side, side, dtype=dtype, device=device)

    def timed(work: Any, repeats: int = 5) -> float:
        work()
        seconds = []
        for _ in range(repeats):
            if kind == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            work()
            if kind == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    # A ring moves 2 (p - 1) / p of the message through every rank: that is the bandwidth that counts.
    share = 2 * (degree - 1) / degree if degree > 1 else 1.0
    figures = {
        "all_reduce": REDUCE_BYTES * share / timed(lambda: dist.all_reduce(message)),
        "host_to_device": host.numel() / timed(lambda: target.copy_(host)),
        "compute": 2 * side**3 / timed(lambda: a @ a),
    }
    dist.barrier()
    dist.destroy_process_group()
    return figures


if __name__ == "__main__":
    import torch

    kind, work, rank, degree, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    result = _rank(kind, work, int(rank), int(degree))
    Path(work, f"rank-{rank}.json").write_text(json.dumps(result))
