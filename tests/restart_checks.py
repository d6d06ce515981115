"""What the ranks execute about rank files: save what they hold, read it back, and refuse what does not belong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_checks import before_fork  # noqa: F401  the harness calls it
from requirement_checks import error_of
from torch import nn

import comfy_tp.core as core
from comfy_tp.core import restart
from comfy_tp.core.checkpoint.memory import byte_view
from comfy_tp.core.checkpoint.rank_files import rank_file_name
from comfy_tp.core.lora.adapters import Adapter
from comfy_tp.core.lora.apply import WeightPatches
from comfy_tp.core.lora.patch import Patch
from comfy_tp.core.models import architecture_named
from comfy_tp.core.parallelize import enable_parallelism
from comfy_tp.core.planning.compare import example_inputs, example_model
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.config import TensorParallelConfig

# Plain float32, a model that keeps some modules in float32, and layers in fp8: (architecture, example, dtype).
MODELS = {
    "float32": ("flux", "schnell", torch.float32),
    "bfloat16": ("wan", "text", torch.bfloat16),
    "fp8": ("flux2", "dev", torch.float8_e4m3fn),
}


def sharded(ranks: Ranks, name: str, example: str) -> nn.Module:
    return enable_parallelism(example_model(architecture_named(name), example), config=ranks.degree)


def forward(name: str, model: nn.Module) -> torch.Tensor:
    dtype = model.tensor_parallel.compute_dtype
    with torch.no_grad():
        return model(
            **example_inputs(architecture_named(name), model.config, dtype=dtype), return_dict=False
        )[0]


def bytes_read() -> int:
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar:")).split()[1])


def scales_of(model: nn.Module) -> dict[str, Any]:
    return {path: module.scales for path, module in model.named_modules() if getattr(module, "scales", None)}


def same_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Whether both models hold the same tensors of the same dtypes, bit for bit."""
    left, right = one.state_dict(), other.state_dict()
    return list(left) == list(right) and all(
        tensor.dtype == right[name].dtype and byte_view(tensor) == byte_view(right[name])
        for name, tensor in left.items()
    )


def restarted(ranks: Ranks, folder: str, kind: str) -> dict[str, Any]:
    """A model loaded from its full folder, saved as rank files and read from them: what differs."""
    name, example, dtype = MODELS[kind]
    model_class = architecture_named(name).load_class()
    config = TensorParallelConfig(tp_degree=ranks.degree)
    full, shards = (
        Path(folder, kind, str(ranks.degree), "full"),
        Path(folder, kind, str(ranks.degree), "shards"),
    )
    sharded(ranks, name, example).save_pretrained(str(full))
    dist.barrier()
    model = core.from_pretrained(model_class, str(full), dtype=dtype, parallel_config=config)
    core.save_shards(model, shards)
    own = shards / rank_file_name(ranks.rank, ranks.degree)
    before = bytes_read()
    again = core.from_pretrained(model_class, str(shards.parent), subfolder="shards", parallel_config=config)
    read = bytes_read() - before
    return {
        "same": same_tensors(model, again),
        "dtypes": sorted({str(tensor.dtype) for tensor in again.state_dict().values()}),
        "fp8": len(scales_of(again)),
        "same_scales": scales_of(model) == scales_of(again),
        "same_output": torch.equal(forward(name, model), forward(name, again)),
        "replicated": sum(spec.is_replicated for spec in again.tensor_parallel.plan.specs.values()),
        "compute_dtype": str(again.tensor_parallel.compute_dtype),
        "read": read / own.stat().st_size,
        "files": sorted(os.listdir(shards)),
        "guarded": error_of(again.enable_group_offload, onload_device=torch.device("cpu")),
        "saves_again": error_of(core.save_shards, again, shards),
    }


def refused(ranks: Ranks, folder: str) -> dict[str, Any]:
    """Everything that save and load refuse; nothing is read or allocated for any of it."""
    flux, wan = (architecture_named(name).load_class() for name in ("flux", "wan"))
    root = Path(folder, "refused", str(ranks.degree))
    last = ranks.rank == ranks.degree - 1
    model = sharded(ranks, "flux", "schnell")
    for save in ("good", "again"):
        core.save_shards(model, root / save)
    own = rank_file_name(ranks.rank, ranks.degree)

    def damaged(name: str) -> Path:
        """A copy of the good save, made by every rank for itself."""
        (root / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "good" / own, root / name / own)
        return root / name / own

    if not last:
        damaged("missing")
    damaged("others weights")
    if ranks.rank == 0:
        (root / "others weights" / "model.safetensors").write_bytes(b"")
    truncated, renamed, mixed = damaged("truncated"), damaged("renamed"), damaged("mixed")
    if last:
        with open(truncated, "r+b") as file:
            file.truncate(truncated.stat().st_size - 4)
        shutil.copy(root / "again" / own, mixed)
        shutil.copy(root / "good" / rank_file_name(0, ranks.degree), renamed)
    (root / "occupied").mkdir(exist_ok=True)
    if last:
        (root / "occupied" / own / "x").mkdir(parents=True)
    (root / "empty").mkdir(exist_ok=True)
    model.save_pretrained(str(root / "whole"))
    dist.barrier()

    def load(name: str, model_class: type = flux, degree: int = ranks.degree, **options: Any) -> str:
        return error_of(
            core.from_pretrained,
            model_class,
            str(root / name),
            parallel_config=TensorParallelConfig(tp_degree=degree),
            **options,
        )

    plan = architecture_named("flux").plan
    other_plan = {key: style for key, style in plan.items() if ".ff.net." not in key}
    with mock.patch.object(restart, "read_rank_file", side_effect=AssertionError("read before the checks")):
        found = {
            "degree": load("good", degree=1),
            "class": load("good", model_class=wan),
            "dtype": load("good", dtype=torch.bfloat16),
            "missing": load("missing"),
            "truncated": load("truncated"),
            "renamed": load("renamed"),
            "mixed": load("mixed"),
            "other weights": load("others weights"),
            "not there": load("empty" if last else "good"),
            "whole there": load("whole" if last else "good"),
        }
        with mock.patch.dict(plan, other_plan, clear=True):
            found["plan"] = load("good")
    found["saving beside weights"] = error_of(core.save_shards, model, root / "others weights")
    found["occupied"] = error_of(core.save_shards, model, root / "occupied")
    found["left"] = [name for name in os.listdir(root / "occupied") if name.endswith(".tmp")]
    found["unsharded"] = error_of(
        core.save_shards, example_model(architecture_named("flux"), "schnell"), root
    )
    weight = "transformer_blocks.0.attn.to_q.weight"
    rows, columns = model.tensor_parallel.plan.specs[weight].shape
    lora = Patch(weight, Adapter("lora", {"up": torch.ones(rows, 1), "down": torch.ones(1, columns)}))
    patches = WeightPatches(model)
    patches.set([lora])
    found["patched"] = error_of(core.save_shards, model, root / "patched")
    found["patched whole"] = error_of(model.save_pretrained, str(root / "patched"))
    patches.set([])
    found["unpatched"] = error_of(core.save_shards, model, root / "patched")
    found["after all"] = error_of(
        core.from_pretrained, flux, str(root / "good"), dtype=torch.float32, parallel_config=ranks.degree
    )
    return found
