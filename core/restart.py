"""A restart: each rank saves what it holds of a sharded model, and reads it straight back at the same degree.

    save_shards(model, folder)                                                  # every rank
    from_pretrained(ModelClass, folder, parallel_config=TensorParallelConfig(tp_degree=N))

A rank file is read from end to end into the final tensors: nothing is sliced, cast, quantised or broadcast.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from .checkpoint.files import RANK_FILE, Checkpoint, inside
from .checkpoint.rank_files import (
    AGAIN,
    SavedModel,
    layout_digest,
    open_rank_file,
    read_rank_file,
    write_rank_file,
)
from .checkpoint.reader import ReadReport
from .errors import CheckpointError, ConfigError
from .guards import saved_state
from .models import architecture_of
from .parallelize import resolve
from .tp import fp8
from .tp.agreement import gather_json
from .tp.apply import apply_plan
from .tp.collectives import Ranks
from .tp.config import TensorParallelConfig
from .tp.plan import ResolvedPlan
from .tp.shard import ShardSpec
from .tp.skeleton import build_skeleton, building, finish, hold_fp8, persistent_buffers, place
from .tp.together import Together


def save_shards(model: nn.Module, folder: str | os.PathLike) -> None:
    """Write each rank's part of a sharded `model` into a file of its own in `folder`. Every rank calls it.

    `from_pretrained` recognises the folder and reads it at the same degree, with the same model class and plan, in
    the dtype that it was saved in; fp8 layers stay fp8. What is replicated lies in every file. An earlier save of the
    same degree is replaced when all files of the new one are written.

    Raises `ConfigError` for a model that is not sharded, `UnsupportedError` while LoRA patches are on it,
    `CheckpointError` on every rank when one of them cannot write.
    """
    state = getattr(model, "tensor_parallel", None)
    if state is None:
        raise ConfigError(
            f"'{type(model).__name__}' is not sharded, so it has no shards to save. Load it with from_pretrained(..., "
            f"parallel_config=...), or shard it with enable_parallelism."
        )
    ranks: Ranks = state.ranks
    shards, specs, config = saved_state(model)
    save = [secrets.token_hex(8)]
    if ranks.degree > 1:
        save = gather_json(ranks, save[0])
    main = _main_dtype(shards.values())
    scales = {
        path: [scales.weight, scales.input, scales.full_precision]
        for path, module in model.named_modules()
        if (scales := getattr(module, "scales", None)) is not None
    }
    saved = SavedModel(
        config=config,
        layout=layout_digest(specs),
        dtype=_name(torch.float8_e4m3fn if scales else main),
        compute_dtype=_name(state.compute_dtype or main),
        scales=scales,
        save=save[0],
    )
    with ranks.on_device():
        write_rank_file(folder, shards, saved, rank=ranks.rank, degree=ranks.degree, group=ranks.group)


def saved_shards(name_or_path: str | os.PathLike, subfolder: str | None = None) -> Path | None:
    """The local folder that `name_or_path` means when it holds rank files, else None."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return None
    if subfolder:
        folder = inside(folder, subfolder)
    if folder.is_dir() and any(RANK_FILE.fullmatch(name) for name in os.listdir(folder)):
        return folder
    return None


def load_shards(
    model_class: type,
    folder: Path,
    ranks: Ranks,
    *,
    config: TensorParallelConfig,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], None] | None = None,
) -> tuple[nn.Module, ReadReport]:
    """The model that `save_shards` wrote into `folder`, each rank reading its own file onto `ranks.device`.

    All ranks check their headers first and go on together or not at all.
    Raises `CheckpointError` for shards of another degree, class, plan, dtype or save, and for missing or damaged
    files; `PlanError` for a degree that does not fit.
    """
    others = f"cannot use its shards in {folder}; its own error says why. Nothing was loaded."
    together = Together(ranks.group, ranks.degree, ranks.rank)
    checkpoint, saved, model, plan = together.do(others, _open, model_class, folder, ranks, config, dtype)
    if ranks.degree > 1:
        _check_saves(folder, gather_json(ranks, saved.save))
    apply_plan(model, plan, ranks, architecture_of(model_class))
    for path, (weight, given, full_precision) in saved.scales.items():
        hold_fp8(model, path, fp8.Scales(weight, given, full_precision), plan, ranks)
    read = functools.partial(
        read_rank_file,
        checkpoint,
        degree=ranks.degree,
        device=ranks.device,
        progress=progress,
        cancelled=cancelled,
    )
    shards, report = together.do(others, read)
    place(model, shards)
    finish(model, ranks.device)
    model.tensor_parallel.compute_dtype = getattr(torch, saved.compute_dtype)
    return model.eval(), report


def _open(
    model_class: type, folder: Path, ranks: Ranks, config: TensorParallelConfig, dtype: torch.dtype | None
) -> tuple[Checkpoint, SavedModel, nn.Module, ResolvedPlan]:
    """This rank's file in `folder` and the model that it fills, on the meta device, once everything fits."""
    checkpoint, saved = open_rank_file(folder, rank=ranks.rank, degree=ranks.degree)
    path = checkpoint.path
    named = saved.config.get("_class_name")
    if named not in {base.__name__ for base in model_class.__mro__}:
        raise CheckpointError(
            f"{path} holds shards of a {named}, not of a {model_class.__name__}. Load them with {named}."
        )
    if dtype is not None and _name(dtype) != saved.dtype:
        raise CheckpointError(
            f"{path} holds {saved.dtype} weights, not {_name(dtype)}: shards are read as they were saved. Leave `dtype` "
            f"out, pass torch.{saved.dtype}, or load the model from its own files."
        )
    with building(model_class.__name__, path, checkpoint.nbytes, f"To restart, {AGAIN}."):
        model = build_skeleton(model_class, saved.config)
    plan = resolve(model, config)
    specs = dict(plan.specs)
    for name, buffer in persistent_buffers(model):
        specs[name] = ShardSpec.replicated(buffer.shape, ranks.degree)
    stored = {name: entry.shape for name, entry in checkpoint.entries.items()}
    if saved.layout != layout_digest(specs) or stored != {
        name: spec.local_shape for name, spec in specs.items()
    }:
        raise CheckpointError(
            f"{path} was saved with another plan of {model_class.__name__}, or by another version. To restart, {AGAIN}."
        )
    for entry in checkpoint.entries.values():
        _ = entry.torch_dtype
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for module in saved.scales:
        if module not in linears:
            raise CheckpointError(
                f"{path} has an fp8 scale for '{module}', which is no Linear. To restart, {AGAIN}."
            )
    return checkpoint, saved, model, plan


def _check_saves(folder: Path, saves: list[str]) -> None:
    """Raise `CheckpointError`, on every rank alike, unless all ranks' files are of one save."""
    usual = Counter(saves).most_common(1)[0][0]
    odd = [str(rank) for rank, save in enumerate(saves) if save != usual]
    if odd:
        raise CheckpointError(
            f"{folder}: the shards of rank {', '.join(odd)} are of another save than the others', so they do not fit "
            f"together. Copy all files of one save there, or {AGAIN}."
        )


def _main_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The float dtype that holds most of the bytes, fp8 left out."""
    held: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point() and not fp8.is_fp8(tensor):
            held[tensor.dtype] += tensor.nbytes
    return held.most_common(1)[0][0] if held else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
