"""Host time of one FLUX.2 forward: sharded against whole and against diffusers' DTensors, and its collectives.

The model has FLUX.2-dev's 8 + 48 blocks at tiny widths, so that what is measured is the host and not the matrix
products. Everything runs under `torch.inference_mode()`, as ComfyUI samples, with one thread. In one process a fake
process group stands for the second rank, so that no communication is in the figures, and the thread's processor time
is measured, so that other work on the machine is not in them either; then two real ranks over gloo measure seconds.

The whole model is also run with Linears that hand out a ready result, and without diffusers' look-ups of signatures.
What is left (norms, rotary embedding, attention, modulation, residuals) is the same on every rank, however its Linears
are sharded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import count
from .bench_load import diffusers_on_cpu
from .rank_processes import run_ranks

CONFIG: dict[str, Any] = {
    "num_layers": 8,
    "num_single_layers": 48,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 4, 4, 4),
}
IMAGE_TOKENS = 16
TEXT_TOKENS = 8
VARIANTS = {
    "unsharded": "the whole model",
    "no_linears": "the whole model without its Linears",
    "ours": "comfy-tp, 2 ranks, no communication",
    "dtensor": "diffusers DTensor, 2 ranks, no communication",
    "ours_gloo": "comfy-tp, 2 gloo ranks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp bench forward``."""
    parser.add_argument("--repeats", type=count, default=15, help="forwards of each variant (default 15)")


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Time every variant in turn, print medians and ratios."""
    with tempfile.TemporaryDirectory(prefix="comfy-tp-bench-") as folder:
        program = f"{__package__}.bench_forward"
        (alone,) = run_ranks(program, ["alone", str(args.repeats)], 1, 1, Path(folder))
        pair = run_ranks(program, ["pair", str(args.repeats)], 2, 1, Path(folder))
    seconds = {**alone["seconds"], "ours_gloo": pair[0]["seconds"]["ours"]}
    medians = {name: statistics.median(values) * 1000 for name, values in seconds.items()}
    figures = {
        "median_ms": medians,
        "min_ms": {name: min(values) * 1000 for name, values in seconds.items()},
        "max_ms": {name: max(values) * 1000 for name, values in seconds.items()},
        "vs_unsharded": medians["ours"] / medians["unsharded"],
        "vs_dtensor": medians["ours"] / medians["dtensor"],
        "lowest_vs_dtensor": medians["no_linears"] / medians["dtensor"],
        "collectives": alone["collectives"],
        "collective_bytes": alone["collective_bytes"],
        "gloo_collectives": pair[0]["collectives"],
    }
    print(f"{'':48}{'median ms':>10}{'spread':>18}")
    for name, text in VARIANTS.items():
        spread = f"{figures['min_ms'][name]:.1f}..{figures['max_ms'][name]:.1f}"
        print(f"{text:48}{medians[name]:10.1f}{spread:>18}")
    for name in ("vs_unsharded", "vs_dtensor", "lowest_vs_dtensor"):
        print(f"{name}: {figures[name]:.3f}")
    print(
        f"collectives per forward: {figures['collectives']} ({figures['collective_bytes']} bytes at these widths)"
    )
    return 0, figures


def make_model() -> Any:
    """The same random model in every process."""
    import torch
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    return Flux2Transformer2DModel(**CONFIG).eval()


def make_call(model: Any) -> Callable[[], Any]:
    """One forward of `model` on fixed inputs."""
    import torch

    from ..models.tokens import image_ids, text_ids

    random = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, IMAGE_TOKENS, 128, generator=random),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, CONFIG["joint_attention_dim"], generator=random),
        "timestep": torch.tensor([0.7]),
        "guidance": torch.tensor([4.0]),
        "img_ids": image_ids(4, IMAGE_TOKENS // 4, "cpu"),
        "txt_ids": text_ids(TEXT_TOKENS, "cpu"),
        "return_dict": False,
    }

    def call() -> Any:
        with torch.inference_mode():
            return model(**inputs)

    return call


def time_in_turn(
    calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each call by `clock`, one after the other in every repeat, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
    return seconds


# What follows runs in a rank.


def _alone(repeats: int) -> dict:
    """All variants in one process; the second rank is a fake that answers at once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ..parallelize import enable_parallelism

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ours = enable_parallelism(make_model(), config=2, device="cpu")
    calls = {
        "unsharded": make_call(make_model()),
        "no_linears": make_call(_without_linears(make_model())),
        "ours": make_call(ours),
        "dtensor": make_call(_dtensor()),
    }
    seconds = time_in_turn(calls, repeats, time.thread_time)
    ranks = ours.tensor_parallel.ranks
    ranks.collectives = ranks.collective_bytes = 0
    calls["ours"]()
    figures = {
        "seconds": seconds,
        "collectives": ranks.collectives,
        "collective_bytes": ranks.collective_bytes,
    }
    dist.destroy_process_group()
    return figures


def _without_linears(model: Any) -> Any:
    """`model`, whose Linears compute in the next forward and hand out the same tensors from then on."""
    import torch

    from ..models.flux2 import attention_forward

    def computed_once(linear: Any) -> Callable[[Any], Any]:
        ready: list[Any] = []

        def forward(x: Any) -> Any:
            if not ready:
                ready.append(torch.nn.functional.linear(x, linear.weight, linear.bias))
            return ready[0]

        return forward

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = computed_once(module)  # type: ignore[method-assign, assignment]
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.forward = types.MethodType(attention_forward, block.attn)
    return model


def _dtensor() -> Any:
    from diffusers import TensorParallelConfig

    model = make_model()
    with diffusers_on_cpu():
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
    return model


def _pair(repeats: int, work: str, rank: int, degree: int) -> dict:
    """Ours on real ranks over gloo."""
    import torch.distributed as dist

    from ..parallelize import enable_parallelism

    store = dist.FileStore(f"{work}/store", degree)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=degree)
    ours = enable_parallelism(make_model(), config=degree, device="cpu")
    call = make_call(ours)
    seconds = time_in_turn({"ours": call}, repeats)
    ours.tensor_parallel.ranks.collectives = 0
    call()
    figures = {"seconds": seconds, "collectives": ours.tensor_parallel.ranks.collectives}
    dist.barrier()
    dist.destroy_process_group()
    return figures


if __name__ == "__main__":
    import torch

    kind, repeats, work, rank, degree, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    result = _alone(int(repeats)) if kind == "alone" else _pair(int(repeats), work, int(rank), int(degree))
    Path(work, f"rank-{rank}.json").write_text(json.dumps(result))
