"""Rank files: what each rank holds of a sharded model, in a safetensors file of its own, for a restart at one degree.

Every file stands alone, so that machines need not share the folder: its metadata say of which rank and degree it is,
how the tensors are laid out, how to build the model, and the number of the save, which all files of one save share.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..tp.shard import ShardSpec
from ..tp.together import Together
from .files import RANK_FILE, Checkpoint, is_safetensors
from .header import read_header
from .layout import Piece, Wanted
from .reader import ReadReport, default_threads, read_shards
from .writer import FileStream, file_order, make_folder, write_json

FORMAT = "comfy-tp shards 1"
AGAIN = "load the model from its own files and save the shards again"


@dataclass(frozen=True)
class SavedModel:
    """What a rank file says of its model beside the tensors.

    `config` builds the model; `layout` is the digest of its shard specs; `dtype` is that of its weights and
    `compute_dtype` the one it computes in; `scales` has [weight scale, input scale or None, full precision] of each
    module whose weight is fp8; `save` tells one save from another.
    """

    config: Mapping[str, Any]
    layout: str
    dtype: str
    compute_dtype: str
    scales: Mapping[str, list[Any]]
    save: str


def rank_file_name(rank: int, degree: int) -> str:
    """The name of a rank's file in the folder of a save."""
    return f"rank-{rank:05d}-of-{degree:05d}.safetensors"


def layout_digest(specs: Mapping[str, ShardSpec]) -> str:
    """Equal for equal layouts of all tensors."""
    rows = sorted((name, spec.shape, spec.degree, spec.dim, spec.blocks) for name, spec in specs.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def write_rank_file(
    folder: str | os.PathLike,
    shards: Mapping[str, torch.Tensor],
    saved: SavedModel,
    *,
    rank: int,
    degree: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write this rank's `shards` into its file; rank 0 writes a config.json beside it, for readers of the folder.

    The files get their names when every rank has written its own. Raises `CheckpointError` on every rank when one of
    them cannot write.
    """
    folder = Path(folder)
    path = folder / rank_file_name(rank, degree)
    others = f"could not write to {folder}; its own error says why. Nothing was saved."
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shards.items()}
    metadata = {
        "format": "pt",
        "comfy_tp": FORMAT,
        "rank": str(rank),
        "degree": str(degree),
        **{key: json.dumps(value) for key, value in vars(saved).items()},
    }

    streams: list[FileStream] = []

    def write() -> None:
        _prepare(folder)
        streams.append(FileStream(path, table, metadata))
        for name in file_order(table):
            streams[0].write(name, shards[name])
        streams[0].finish()

    def publish() -> None:
        streams[0].publish()
        if rank == 0:
            write_json(folder / "config.json", saved.config)

    together = Together(group, degree, rank)
    try:
        together.do(others, write)
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    others = f"could not finish its file in {folder}; its own error says why. Save again before you load from there."
    together.do(others, publish)
    return path


def _prepare(folder: Path) -> None:
    """Make the folder, and refuse one that holds other weights: nobody could say which of them are meant."""
    make_folder(folder)
    found = other_weights(folder)
    if found:
        raise CheckpointError(
            f"{folder} holds other weights ({found[0]}). Choose a folder of their own for the shards."
        )


def other_weights(folder: Path) -> list[str]:
    """The weight files in `folder` that are no rank files, sorted."""
    return sorted(
        name
        for name in os.listdir(folder)
        if is_safetensors(name) and not name.startswith(".") and not RANK_FILE.fullmatch(name)
    )


def open_rank_file(folder: str | os.PathLike, *, rank: int, degree: int) -> tuple[Checkpoint, SavedModel]:
    """The header of this rank's file in `folder` and what it says of the model. Nothing is allocated.

    Raises `CheckpointError` when the shards there are of another degree, this rank's file is missing or damaged, or
    it is another rank's under this one's name.
    """
    folder = Path(folder)
    path = folder / rank_file_name(rank, degree)
    there = sorted(name for name in os.listdir(folder) if RANK_FILE.fullmatch(name))
    degrees = sorted({int(RANK_FILE.fullmatch(name)[2]) for name in there})  # type: ignore[index]
    mixed = other_weights(folder)
    if mixed:
        raise CheckpointError(
            f"{folder} holds shards ({there[0]}) and other weights ({mixed[0]}). Move one of them elsewhere."
        )
    if degree not in degrees:
        known = " or ".join(map(str, degrees))
        raise CheckpointError(
            f"{folder} holds the shards of {known} ranks, not of {degree}. Pass tp_degree={degrees[0]}, or {AGAIN} at "
            f"tp_degree={degree}."
        )
    if path.name not in there:
        raise CheckpointError(
            f"{folder} has no shards of rank {rank} of {degree} ({path.name}). It has: {', '.join(there[:4])}. Copy "
            f"the file there, or {AGAIN}."
        )
    try:
        header = read_header(path)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("download it again", AGAIN)) from None
    kept = header.metadata
    if kept.get("comfy_tp") != FORMAT:
        raise CheckpointError(f"{path} was not written by save_shards of this version. To restart, {AGAIN}.")
    if (kept.get("rank"), kept.get("degree")) != (str(rank), str(degree)):
        raise CheckpointError(
            f"{path} holds rank {kept.get('rank')} of {kept.get('degree')}, not rank {rank} of {degree}: it was "
            f"renamed. Give each file its own name, or {AGAIN}."
        )
    saved = _described(path, kept)
    return Checkpoint(os.fspath(path), header.entries, kept, dict(saved.config), (header,)), saved


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _are_scales(value: Any) -> bool:
    """Whether every entry is [weight scale, input scale or None, full precision]."""
    return isinstance(value, dict) and all(
        isinstance(row, list)
        and len(row) == 3
        and isinstance(row[0], float)
        and isinstance(row[1], float | None)
        and isinstance(row[2], bool)
        for row in value.values()
    )


# Field of `SavedModel` -> whether a value is one of its kind.
KINDS: dict[str, Callable[[Any], bool]] = {
    "config": _is_table,
    "layout": _is_text,
    "dtype": _is_dtype,
    "compute_dtype": _is_dtype,
    "scales": _are_scales,
    "save": _is_text,
}


def _described(path: Path, metadata: Mapping[str, str]) -> SavedModel:
    """The model that a rank file's metadata describe."""
    found: dict[str, Any] = {}
    for name, is_kind in KINDS.items():
        try:
            value = json.loads(metadata.get(name, ""))
        except (ValueError, RecursionError):
            value = None
        if not is_kind(value):
            raise CheckpointError(
                f"{path}: what it says of the model's '{name}' is damaged. To restart, {AGAIN}."
            )
        found[name] = value
    return SavedModel(**found)


def read_rank_file(
    checkpoint: Checkpoint,
    *,
    degree: int,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], None] | None = None,
) -> tuple[dict[str, torch.Tensor], ReadReport]:
    """Every tensor of an opened rank file, as stored, on `device`. The other ranks of `degree` read at the same time.

    Errors as in `read_shards`, on this rank alone.
    """
    wanted = {
        name: Wanted(ShardSpec.replicated(entry.shape, 1), (Piece(name),))
        for name, entry in checkpoint.entries.items()
    }
    return read_shards(
        checkpoint,
        wanted,
        rank=0,
        degree=1,
        device=device,
        progress=progress,
        cancelled=cancelled,
        threads=default_threads(degree),
    )
