"""Writes safetensors files as a stream: header first, then one tensor after the other, never a whole state dict."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..shard import ShardSpec
from .broadcast import agree
from .files import Checkpoint
from .header import DTYPE_NAMES
from .layout import Piece
from .memory import byte_view
from .reader import ReadReport, Wanted, read_shards

WEIGHTS_NAME = "diffusion_pytorch_model"
# What diffusers writes into one file unless told otherwise.
MAX_SHARD_BYTES = 10_000_000_000
SHARDS_FORMAT = "comfy-tp shards 1"

Table = Mapping[str, tuple[torch.dtype, Sequence[int]]]


def write_file(
    path: str | os.PathLike,
    table: Table,
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file whose tensors arrive one at a time, in the order of `file_order(table)`.

    The file appears under its name only when it is complete. Raises `CheckpointError` when it cannot be written.
    """
    stream = FileStream(path, table, metadata)
    try:
        for name, tensor in tensors:
            stream.write(name, tensor)
        stream.close()
    except BaseException:
        stream.abort()
        raise
    stream.publish()


def file_order(table: Table) -> list[str]:
    """The order of tensors in a file: wide elements first, so that each lies at a multiple of its size, then names."""
    return sorted(table, key=lambda name: (-table[name][0].itemsize, name))


class FileStream:
    """A safetensors file in the making, under a temporary name beside its own."""

    def __init__(
        self, path: str | os.PathLike, table: Table, metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        self._table = table
        self._order = file_order(table)
        self._next = 0
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name in self._order:
            dtype, shape = table[name]
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' of {dtype} cannot be written as safetensors."
                )
            nbytes = dtype.itemsize
            for extent in shape:
                nbytes *= extent
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + nbytes],
            }
            offset += nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        try:
            self._file = open(self._temporary, "wb", buffering=0)
            self._write(len(raw).to_bytes(8, "little") + raw)
        except OSError as error:
            raise self._refusal(error) from None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        if self._next >= len(self._order) or name != self._order[self._next]:
            raise ValueError(f"'{name}' is not the next tensor of {self.path}")
        dtype, shape = self._table[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"'{name}' is {tensor.dtype} {list(tensor.shape)}, announced as {dtype} {list(shape)}"
            )
        self._next += 1
        try:
            self._write(byte_view(tensor.detach().cpu().contiguous()))
        except OSError as error:
            raise self._refusal(error) from None

    def close(self) -> None:
        """Finish the temporary file and put it safely on disk."""
        if self._next != len(self._order):
            raise ValueError(f"{self.path} lacks '{self._order[self._next]}'")
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._refusal(error) from None

    def publish(self) -> None:
        """Give the finished file its name."""
        os.replace(self._temporary, self.path)

    def abort(self) -> None:
        """Remove what was written."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]

    def _refusal(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be written ({error.strerror}). Free some space or choose another folder; what was "
            f"written is removed."
        )


def save_pretrained(
    folder: str | os.PathLike,
    shards: Mapping[str, torch.Tensor],
    specs: Mapping[str, ShardSpec],
    *,
    rank: int,
    degree: int,
    group: dist.ProcessGroup | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    weights_name: str = WEIGHTS_NAME,
) -> None:
    """Write the full model from every rank's `shards` into `folder`, in the files that diffusers reads.

    Every rank calls this with its own shards; rank 0 writes. One tensor at a time is gathered, so rank 0 holds at most
    two full tensors more than its shards. `config` becomes `config.json`. Files of the same name that were there
    before are replaced when the new ones are complete.
    Raises `CheckpointError` on every rank when rank 0 cannot write.
    """
    folder = Path(folder)
    table = {name: (tensor.dtype, specs[name].shape) for name, tensor in shards.items()}
    parts = _partition(table, max_shard_bytes)
    names = _file_names(weights_name, len(parts))
    finished: list[FileStream] = []
    stream: FileStream | None = None
    failure: BaseException | None = None
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            failure = CheckpointError(f"{folder} cannot be made ({error.strerror}). Choose another folder.")
    try:
        _raise_if_failed(group, degree, rank, failure, folder)
        for file_name, part in zip(names, parts, strict=True):
            if rank == 0:
                stream, failure = _try(FileStream, folder / file_name, part, {"format": "pt"})
            _raise_if_failed(group, degree, rank, failure, folder)
            for name in file_order(part):
                full = gather_tensor(shards[name], specs[name], rank, degree, group)
                if stream is not None and full is not None:
                    _, failure = _try(stream.write, name, full)
                del full
                _raise_if_failed(group, degree, rank, failure, folder)
            if stream is not None:
                _, failure = _try(stream.close)
                finished.append(stream)
                stream = None
            _raise_if_failed(group, degree, rank, failure, folder)
    except BaseException:
        for one in [*finished, *([stream] if stream is not None else [])]:
            one.abort()
        raise
    if rank == 0:
        _, failure = _try(_publish, folder, finished, parts, names, weights_name, config)
    _raise_if_failed(group, degree, rank, failure, folder)


def gather_tensor(
    shard: torch.Tensor, spec: ShardSpec, rank: int, degree: int, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """The full tensor, in CPU memory of rank 0, from every rank's part; None on the other ranks."""
    shard = shard.detach()
    if degree == 1 or spec.is_replicated:
        return shard.cpu() if rank == 0 else None
    flat = shard.contiguous().reshape(-1).view(torch.uint8)
    received = [torch.empty_like(flat) if other else flat for other in range(degree)] if rank == 0 else None
    root = dist.get_global_rank(group, 0) if group is not None else 0
    dist.gather(flat, received, dst=root, group=group)
    if received is None:
        return None
    parts = []
    while received:
        parts.append(received.pop(0).cpu().view(shard.dtype).reshape(spec.local_shape))
    return spec.gather(parts)


def save_shards(
    folder: str | os.PathLike,
    shards: Mapping[str, torch.Tensor],
    specs: Mapping[str, ShardSpec],
    *,
    rank: int,
    degree: int,
    source: Sequence[Sequence[object]],
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write this rank's shards into a file of its own, for an instant restart at the same degree.

    `source` is the fingerprint of the checkpoint that they were read from; `load_shards` compares it.
    """
    folder = Path(folder)
    path = folder / _shards_name(rank, degree)
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shards.items()}
    metadata = {
        "format": "pt",
        "comfy_tp": SHARDS_FORMAT,
        "rank": str(rank),
        "degree": str(degree),
        "source": json.dumps(source),
        "layout": _layout_digest(specs),
    }

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be made ({error.strerror}). Choose another folder."
            ) from None
        write_file(path, table, ((name, shards[name]) for name in file_order(table)), metadata)

    _, failure = _try(write)
    _raise_if_failed(group, degree, rank, failure, folder)
    return path


def load_shards(
    folder: str | os.PathLike,
    specs: Mapping[str, ShardSpec],
    *,
    rank: int,
    degree: int,
    source: Sequence[Sequence[object]],
    device: torch.device | str = "cpu",
    **options: Any,
) -> tuple[dict[str, torch.Tensor], ReadReport]:
    """Read back what `save_shards` wrote for this rank; `options` are those of `read_shards`.

    Raises `CheckpointError` when there are no shards of this degree, when they were made from other weights than
    `source`, or by another plan than `specs`.
    """
    folder = Path(folder)
    path = folder / _shards_name(rank, degree)
    if not path.is_file():
        there = (
            sorted(name for name in os.listdir(folder) if name.startswith("rank-")) if folder.is_dir() else []
        )
        raise CheckpointError(
            f"{folder} has no shards of rank {rank} of {degree} ({path.name}). It has: "
            f"{', '.join(there[:4]) or 'none'}. Load the model from its own files and save the shards at this degree."
        )
    checkpoint = Checkpoint.open(path)
    kept = checkpoint.metadata
    wrong = None
    if kept.get("comfy_tp") != SHARDS_FORMAT:
        wrong = "was not written by save_shards of this version"
    elif (kept.get("rank"), kept.get("degree")) != (str(rank), str(degree)):
        wrong = f"holds rank {kept.get('rank')} of {kept.get('degree')}, not rank {rank} of {degree}"
    elif kept.get("source") != json.dumps(source):
        wrong = "was made from other weights than the model's files, or these changed since"
    elif kept.get("layout") != _layout_digest(specs) or set(checkpoint.entries) != set(specs):
        wrong = "was made with another plan"
    if wrong is not None:
        raise CheckpointError(f"{path} {wrong}. Load the model from its own files and save the shards again.")
    wanted = {
        name: Wanted(ShardSpec.replicated(entry.shape, 1), (Piece(name),))
        for name, entry in checkpoint.entries.items()
    }
    return read_shards(checkpoint, wanted, rank=0, degree=1, device=device, **options)


def _shards_name(rank: int, degree: int) -> str:
    return f"rank-{rank:05d}-of-{degree:05d}.safetensors"


def _layout_digest(specs: Mapping[str, ShardSpec]) -> str:
    """Equal for equal layouts of all tensors."""
    rows = sorted((name, spec.shape, spec.degree, spec.dim, spec.blocks) for name, spec in specs.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _partition(table: Table, limit: int) -> list[dict[str, tuple[torch.dtype, Sequence[int]]]]:
    """The tensors in order, in files of at most `limit` bytes of data (a larger tensor gets a file of its own)."""
    parts: list[dict[str, tuple[torch.dtype, Sequence[int]]]] = [{}]
    held = 0
    for name in table:
        nbytes = table[name][0].itemsize
        for extent in table[name][1]:
            nbytes *= extent
        if parts[-1] and held + nbytes > limit:
            parts.append({})
            held = 0
        parts[-1][name] = table[name]
        held += nbytes
    return parts


def _file_names(weights_name: str, count: int) -> list[str]:
    if count == 1:
        return [f"{weights_name}.safetensors"]
    return [f"{weights_name}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _publish(
    folder: Path,
    finished: list[FileStream],
    parts: Sequence[Table],
    names: Sequence[str],
    weights_name: str,
    config: Mapping[str, Any] | None,
) -> None:
    """Give the finished files their names, the index after them, and remove weights of an earlier save."""
    for stream in finished:
        stream.publish()
    index = folder / f"{weights_name}.safetensors.index.json"
    if len(names) > 1:
        total = sum(
            entry.nbytes for name in names for entry in Checkpoint.open(folder / name).entries.values()
        )
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        _write_json(
            index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )
    else:
        index.unlink(missing_ok=True)
    if config is not None:
        _write_json(folder / "config.json", config)
    earlier = re.compile(re.escape(weights_name) + r"(-\d{5}-of-\d{5})?\.safetensors")
    for name in os.listdir(folder):
        if earlier.fullmatch(name) and name not in names:
            (folder / name).unlink()


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(table, indent=2) + "\n")
    os.replace(temporary, path)


def _try(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """What `call` returns, or the refusal that it raised, to be agreed on with the other ranks first."""
    try:
        return call(*args), None
    except (OSError, CheckpointError, ValueError) as error:
        return None, error


def _raise_if_failed(
    group: dist.ProcessGroup | None, degree: int, rank: int, failure: BaseException | None, folder: Path
) -> None:
    """Raise on every rank when one of them failed, so that none waits for it."""
    failed = []
    if group is not None and degree > 1:
        failed = agree(group, degree, rank, failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(
            f"Rank {', '.join(map(str, failed))} could not write to {folder}; its own error says why. "
            f"Nothing was saved."
        )
