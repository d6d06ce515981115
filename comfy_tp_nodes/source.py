"""What a model file or folder holds, from its headers alone, before any rank is started."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checkpoint.files import Checkpoint, is_safetensors
from ..core.checkpoint.header import TensorEntry
from ..core.checkpoint.parts import transformer_of
from ..core.checkpoint.settings import config_path
from ..core.load import OpenedModel
from ..core.models import Architecture
from ..core.recognise import recognise

Fingerprint = tuple[tuple[str, int, int], ...]

# Bytes of one stored value, for the estimate of what a dtype chosen in the node makes of the file.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class ModelSource:
    """A model at `path`, as its headers and config.json describe it. Nothing of it is in memory."""

    path: str
    architecture: Architecture
    config: Mapping[str, Any]
    fingerprint: Fingerprint
    stored: Mapping[str, int]
    values: int
    kind: str = "transformer"

    @classmethod
    def of_component(cls, checkpoint: Checkpoint, opened: OpenedModel, kind: str) -> ModelSource:
        """The text encoder or VAE that the core has recognised; only the tensors that are read count."""
        pieces = {piece.tensor for pieces in opened.pieces.values() for piece in pieces}
        stored, values = _sizes(checkpoint.entries[name] for name in pieces)
        files = fingerprint(Path(checkpoint.path))
        return cls(checkpoint.path, opened.architecture, opened.config, files, stored, values, kind)

    @classmethod
    def open(cls, path: Path) -> ModelSource:
        """Read the headers at `path`, a .safetensors file or the folder of one component.

        Raises `CheckpointError` for damaged or foreign files, `UnsupportedError` for a class without a plan.
        """
        checkpoint = transformer_of(Checkpoint.open(path))
        found = recognise(checkpoint)
        stored, values = _sizes(checkpoint.entries.values())
        return cls(str(path), found.architecture, found.config, fingerprint(path), stored, values)

    @property
    def heads(self) -> int | None:
        """Attention heads, which the degree must divide."""
        return self.architecture.heads(self.config)

    def expected_bytes(self, dtype: str) -> int:
        """Bytes of all weights in `dtype` ("default": as stored)."""
        if dtype in DTYPE_BYTES:
            return self.values * DTYPE_BYTES[dtype]
        return sum(self.stored.values())

    def compute_dtype(self, dtype: str, device: str) -> str:
        """The dtype that the ranks on `device` compute in: the chosen one, or the one most of the file is stored in.

        A file that is fp8 throughout computes in bfloat16, on the CPU in float32.
        """
        if dtype in ("float32", "bfloat16", "float16"):
            return dtype
        plain = {STORED[name]: size for name, size in self.stored.items() if name in STORED}
        if plain:
            return max(plain, key=lambda name: plain[name])
        return "float32" if device.startswith("cpu") else "bfloat16"


def fingerprint(path: Path) -> Fingerprint:
    """Path, size and modification time (ns) of every file of the model at `path`, without opening them.

    Equal fingerprints mean the same model: the settings beside the weights count too.
    """
    if path.is_file():
        settings = config_path(path)
        files = [path, settings] if settings.is_file() else [path]
    else:
        files = sorted(p for p in path.iterdir() if p.suffix == ".json" or is_safetensors(p.name))
    found = []
    for file in files:
        status = file.stat()
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return tuple(found)


def _sizes(entries: Iterable[TensorEntry]) -> tuple[dict[str, int], int]:
    """Bytes by stored dtype, and the number of values; single ones are scales of fp8 weights and do not count."""
    stored: dict[str, int] = {}
    values = 0
    for entry in entries:
        if math.prod(entry.shape) == 1:
            continue
        stored[entry.dtype] = stored.get(entry.dtype, 0) + entry.nbytes
        values += math.prod(entry.shape)
    return stored, values
