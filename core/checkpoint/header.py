"""The safetensors header, parsed strictly and without mapping the file.

Format: 8 bytes little-endian header length, a JSON object (tensor name -> dtype, shape, data_offsets relative
to the end of the header; `__metadata__` -> strings), then the tensors' bytes without holes.
Source: the format section of the safetensors repository.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from ..wording import quote, short
from .strict_json import DamagedJSON, parse_object

# Bits per element and torch's type; None where this build of torch or this reader cannot hold it as plain
# elements. Such a tensor may lie in a file, but asking for it is an error.
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "F64": (64, torch.float64),
    "F32": (32, torch.float32),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "I64": (64, torch.int64),
    "I32": (32, torch.int32),
    "I16": (16, torch.int16),
    "I8": (8, torch.int8),
    "U8": (8, torch.uint8),
    "BOOL": (8, torch.bool),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "U64": (64, None),
    "U32": (32, None),
    "U16": (16, None),
    "C64": (64, None),
    "F8_E8M0": (8, None),
    "F8_E4M3FNUZ": (8, None),
    "F8_E5M2FNUZ": (8, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
}
DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None
}

# The reference reader allows headers of 100 MB. A FLUX.2-dev header is 40 kB and one of 100,000 tensors about 12 MB,
# so 16 MB leaves room for every real file, while a hostile one cannot make us allocate much.
HEADER_LIMIT = 16_000_000
MAX_ELEMENTS = 2**63 - 1


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight file: its type and shape, and where its bytes lie (absolute offset, length)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The stored type as torch's. Raises `CheckpointError` for a type that is not supported."""
        dtype = DTYPES[self.dtype][1]
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor '{self.name}' is stored as {self.dtype}, which is not supported. Use a bf16, "
                f"fp16, fp32 or fp8 (E4M3, E5M2) version of the file."
            )
        return dtype


@dataclass(frozen=True)
class Header:
    """All that a safetensors file says about itself.

    `real` is where the file lies when links are followed; with `device` and `inode` it says which file it is.
    """

    path: str
    entries: dict[str, TensorEntry]
    metadata: dict[str, str] = field(default_factory=dict)
    size: int = 0
    mtime_ns: int = 0
    real: str = ""
    device: int = 0
    inode: int = 0


def read_header(path: str | os.PathLike) -> Header:
    """Read and check the header of one safetensors file.

    Raises `CheckpointError`, naming the file, the tensor and what is wrong, for every malformed file.
    """
    path = os.fspath(path)
    real = os.path.realpath(path)
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CheckpointError(f"No such weight file: {path}. Check the path, or download the file.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}).") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                f"{path}: is not a regular file. Give a .safetensors file or a model folder."
            )
        entries, metadata = _parse(path, descriptor, status.st_size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    finally:
        os.close(descriptor)
    known = (status.st_size, status.st_mtime_ns, real, status.st_dev, status.st_ino)
    return Header(path, entries, metadata, *known)


def _parse(path: str, descriptor: int, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    if size < 8:
        _refuse(path, f"is not a safetensors file: it has {size} bytes, fewer than the 8 of a header length")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > size - 8:
        _refuse(
            path,
            f"its header claims {length} bytes, but only {size - 8} follow: the file is truncated or is not a "
            f"safetensors file",
        )
    if length > HEADER_LIMIT:
        _refuse(
            path, f"its header claims {length} bytes, more than the {HEADER_LIMIT} that any real model needs"
        )
    table = _read_table(path, descriptor, length)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "its '__metadata__' is not a table of strings")
    data_start = 8 + length
    entries = {name: _entry(path, name, info, data_start, size) for name, info in table.items()}
    _check_coverage(path, entries, data_start, size)
    return entries, metadata


def _read_table(path: str, descriptor: int, length: int) -> dict[str, Any]:
    raw = os.pread(descriptor, length, 8)
    if len(raw) != length:
        _refuse(path, f"its header ends after {len(raw)} of {length} bytes: the file is truncated")
    if raw[:1] != b"{":
        _refuse(path, "is not a safetensors file: its header does not begin with '{'")
    try:
        return parse_object(raw)
    except DamagedJSON as error:
        _refuse(path, f"its header {error}")


def _entry(path: str, name: str, info: object, data_start: int, size: int) -> TensorEntry:
    shown = short(name)
    if not isinstance(info, dict):
        _refuse(path, "its description is not an object", shown)
    for key in ("dtype", "shape", "data_offsets"):
        if key not in info:
            _refuse(path, f"its description has no '{key}'", shown)
    dtype = info["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(path, f"unknown dtype {quote(dtype)}", shown)
    shape = info["shape"]
    if not isinstance(shape, list) or not all(_is_count(extent) for extent in shape):
        _refuse(path, f"shape {quote(shape)} is not a list of non-negative integers", shown)
    elements = 1
    for extent in shape:
        if extent > MAX_ELEMENTS:
            _refuse(path, f"shape {quote(shape)} is larger than any tensor can be", shown)
        elements *= extent
        if elements > MAX_ELEMENTS:
            _refuse(path, f"shape {quote(shape)} is larger than any tensor can be", shown)
    offsets = info["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        _refuse(path, f"data_offsets {quote(offsets)} are not two non-negative integers", shown)
    begin, end = offsets
    if begin > end:
        _refuse(path, f"data_offsets [{begin}, {end}] run backwards", shown)
    if end > size - data_start:
        _refuse(
            path,
            f"its data ends at byte {end} of the data, but the file holds {size - data_start}: the file is truncated",
            shown,
        )
    bits = elements * DTYPES[dtype][0]
    if bits % 8 or bits // 8 != end - begin:
        _refuse(
            path,
            f"shape {quote(shape)} of {dtype} needs {bits // 8} bytes, but it has {end - begin}",
            shown,
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _check_coverage(path: str, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors' bytes follow one another from the end of the header to the end of the file."""
    position = data_start
    before = None
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start < position:
            _refuse(path, f"its data overlaps that of '{short(before or '')}'", short(entry.name))
        if entry.start > position:
            _refuse(
                path,
                f"{entry.start - position} bytes before its data belong to no tensor",
                short(entry.name),
            )
        position += entry.nbytes
        before = entry.name
    if position != size:
        _refuse(path, f"its tensors end at byte {position}, but the file has {size}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse(path: str, problem: str, tensor: str | None = None) -> NoReturn:
    where = f"tensor '{tensor}': " if tensor is not None else ""
    raise CheckpointError(f"{path}: {where}{problem}. The file is damaged or incomplete; download it again.")
