"""Writes safetensors files as a stream: header first, then one tensor after the other, never a whole state dict."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..claims import Claim, abandoned
from ..errors import CheckpointError
from ..tp.shard import ShardSpec
from ..tp.together import Together
from .files import Checkpoint
from .header import DTYPE_NAMES
from .memory import byte_view

WEIGHTS_NAME = "diffusion_pytorch_model"
# What diffusers writes into one file unless told otherwise.
MAX_SHARD_BYTES = 10_000_000_000

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
        stream.finish()
    except BaseException:
        stream.abort()
        raise
    stream.publish()


def file_order(table: Table) -> list[str]:
    """The order of tensors in a file: wide elements first, so that each lies at a multiple of its size, then names."""
    return sorted(table, key=lambda name: (-table[name][0].itemsize, name))


TEMPORARY = re.compile(r"\..+\.safetensors\.\d+\.tmp")


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
        folder = self.path.parent
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        try:
            for left in abandoned(one for one in folder.iterdir() if TEMPORARY.fullmatch(one.name)):
                left.unlink(missing_ok=True)
            self._claim = Claim(self._make)
            self._file = open(self._temporary, "r+b", buffering=0)
        except OSError as error:
            raise self._refusal(error) from None
        try:
            self._write(len(raw).to_bytes(8, "little") + raw)
        except OSError as error:
            self.abort()
            raise self._refusal(error) from None

    def _make(self) -> Path:
        self._temporary.write_bytes(b"")
        return self._temporary

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

    def finish(self) -> None:
        """Put the whole temporary file safely on disk. It stays claimed, so that no other save takes it for a leftover."""
        if self._next != len(self._order):
            raise ValueError(f"{self.path} lacks '{self._order[self._next]}'")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from None

    def publish(self) -> None:
        """Give the finished file its name."""
        try:
            os.replace(self._temporary, self.path)
            self._close()
        except OSError as error:
            self.abort()
            raise self._refusal(error) from None

    def abort(self) -> None:
        """Remove what was written."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        self._file.close()
        self._claim.release()

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
    others = f"could not write to {folder}; its own error says why. Nothing was saved."
    table = {name: (tensor.dtype, specs[name].shape) for name, tensor in shards.items()}
    parts = _partition(table, max_shard_bytes)
    names = _file_names(weights_name, len(parts))
    streams: list[FileStream] = []
    together = Together(group, degree, rank)

    def begin(file_name: str, part: Table) -> None:
        if rank == 0:
            streams.append(FileStream(folder / file_name, part, {"format": "pt"}))

    def write(name: str, full: torch.Tensor | None) -> None:
        if full is not None:
            streams[-1].write(name, full)

    def finish() -> None:
        if streams:
            streams[-1].finish()

    try:
        gathering = together.do(others, Gathering, shards, specs, rank, degree, group)
        together.do(others, lambda: make_folder(folder) if rank == 0 else None)
        for file_name, part in zip(names, parts, strict=True):
            together.do(others, begin, file_name, part)
            for name in file_order(part):
                together.do(others, write, name, gathering.full(name))
            together.do(others, finish)
    except BaseException:
        for stream in streams:
            stream.abort()
        raise

    def publish() -> None:
        if rank == 0:
            _publish(folder, streams, parts, names, weights_name, config)

    others = f"could not finish its files in {folder}; its own error says why. Save again before you load from there."
    together.do(others, publish)


def make_folder(folder: Path) -> None:
    """Make the folder that is saved into, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made ({error.strerror}). Choose another folder.") from None


class Gathering:
    """Full tensors, one after the other, in CPU memory of rank 0 from every rank's part.

    Rank 0 has room for a full tensor and for one other rank's part of it, allocated once for the largest: an
    allocator that is asked anew for every tensor may keep what it was given back, and gloo's gather holds all parts.
    """

    def __init__(
        self,
        shards: Mapping[str, torch.Tensor],
        specs: Mapping[str, ShardSpec],
        rank: int,
        degree: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rank, self._degree, self._group = rank, degree, group
        self._shards, self._specs = shards, specs
        # gloo sends from host memory only.
        on_host = degree == 1 or dist.get_backend(group) == "gloo"
        first = next(iter(shards.values()), torch.empty(0))
        self._wire = torch.device("cpu") if on_host else first.device
        part = max((shard.nbytes for name, shard in shards.items() if self._is_split(name)), default=0)
        moved = max((shard.nbytes for shard in shards.values() if shard.device.type != "cpu"), default=0)
        self._part = torch.empty(0 if rank else part, dtype=torch.uint8, device=self._wire)
        self._full = torch.empty(0 if rank else max(part * degree, moved), dtype=torch.uint8)

    def full(self, name: str) -> torch.Tensor | None:
        """The full tensor `name` on rank 0, valid until the next call; None on the other ranks. All ranks call it."""
        shard, spec = self._shards[name].detach(), self._specs[name]
        if not self._is_split(name):
            if self._rank:
                return None
            return shard if shard.device.type == "cpu" else self._whole(shard.dtype, spec.shape).copy_(shard)
        if self._rank:
            if shard.numel():
                dist.send(_flat(shard.to(self._wire).contiguous()), self._global(0), group=self._group)
            return None
        full = self._whole(shard.dtype, spec.shape)
        spec.put(full, shard, 0)
        part = self._part[: shard.nbytes].view(shard.dtype).view(spec.local_shape)
        for other in range(1, self._degree if shard.numel() else 1):
            dist.recv(_flat(part), self._global(other), group=self._group)
            spec.put(full, part, other)
        return full

    def _is_split(self, name: str) -> bool:
        return self._degree > 1 and not self._specs[name].is_replicated

    def _global(self, rank: int) -> int:
        """The number in the default group of a rank of ours."""
        return dist.get_global_rank(self._group, rank) if self._group is not None else rank

    def _whole(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The room for the full tensor, seen as one of `dtype` and `shape`."""
        return self._full[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


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
    try:
        for stream in finished:
            stream.publish()
    except CheckpointError:
        for stream in finished:
            stream.abort()
        raise
    index = folder / f"{weights_name}.safetensors.index.json"
    if len(names) > 1:
        total = sum(
            entry.nbytes for name in names for entry in Checkpoint.open(folder / name).entries.values()
        )
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    else:
        index.unlink(missing_ok=True)
    if config is not None:
        write_json(folder / "config.json", config)
    earlier = re.compile(re.escape(weights_name) + r"(-\d{5}-of-\d{5})?\.safetensors")
    for name in os.listdir(folder):
        if earlier.fullmatch(name) and name not in names:
            (folder / name).unlink()


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write `table` as JSON; the file appears under its name only when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(table, indent=2) + "\n")
    os.replace(temporary, path)
