"""Loading a model in shards onto the ranks."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.files import Checkpoint, check_identities, resolve_source
from ..errors import CheckpointError, ConfigError
from ..load import DTYPES, OpenedModel, open_model
from ..parallelize import resolve
from ..parts import text_encoder, vae
from ..ranks.context import RankContext
from ..tp.config import TensorParallelConfig
from .call import Call, ranks_of, tell
from .resident import ResidentModel

# Kind of model -> how its files are opened at a degree.
OPENERS: dict[str, Callable[[Checkpoint, int], OpenedModel]] = {
    "transformer": lambda checkpoint, degree: open_model(checkpoint),
    "text_encoder": text_encoder.open_text_encoder,
    "vae": lambda checkpoint, degree: vae.open_vae(checkpoint),
}


@dataclass(frozen=True)
class ModelInfo:
    """What the ranks report of a loaded model. Sizes in bytes, one entry per rank; times in seconds."""

    architecture: str
    config: dict[str, Any]
    layout: str
    dtype: str
    parameters: int
    degree: int
    devices: list[str]
    resident_bytes: list[int]
    bytes_read: list[int]
    load_seconds: float
    all_reduces: int
    notes: list[str]

    @property
    def gb_per_second(self) -> float:
        """Bytes read by all ranks over the load time, in 1e9 bytes a second."""
        return sum(self.bytes_read) / max(self.load_seconds, 1e-9) / 1e9


@dataclass
class Progress:
    """Bytes that all ranks have read, of how many, and 1e9 bytes a second."""

    done: int
    total: int
    gb_per_second: float


@dataclass
class Load(Call[ModelInfo], name="load"):
    """Load the model folder, single file or hub id `source` in shards, as the model with the id `model`.

    `kind`: one of `OPENERS`. `dtype`: "default" (as stored) or one of `DTYPES`. `files`: the `identities` of the
    files that are meant, if others shall be refused. Every rank opens the files and checks them
    before any of them allocates: they go on together or not at all.
    """

    event = Progress

    model: str
    kind: str
    source: str
    dtype: str
    files: dict[str, list[int]] | None = None

    def run(self, rank: RankContext) -> ModelInfo:
        started = time.perf_counter()
        ranks = ranks_of(rank)
        dtype = dtype_named(self.dtype)
        checkpoint = self._open(rank)
        opened = OPENERS[self.kind](checkpoint, ranks.degree)
        resolve(opened.skeleton, TensorParallelConfig(ranks.degree), opened.architecture)
        rank.check_cancelled()
        same_files(rank, opened.checkpoint, self.source)

        def progress(done: int, total: int) -> None:
            rank.progress("load")
            seconds = max(time.perf_counter() - started, 1e-9)
            done *= ranks.degree
            tell(rank, Progress(done, total * ranks.degree, done / seconds / 1e9))

        model = ResidentModel.load(
            opened, ranks, dtype=dtype, progress=progress, cancelled=rank.stop_if_cancelled
        )
        # A boundary: either every rank keeps the model or none does.
        rank.check_cancelled()
        rank.models[self.model] = model
        figures = rank.gather([model.resident_bytes, model.report.bytes_read, str(model.ranks.device)])
        resident, read, devices = map(list, zip(*figures, strict=True))
        state = model.module.tensor_parallel
        return ModelInfo(
            architecture=opened.architecture.name,
            config={key: value for key, value in opened.config.items() if not key.startswith("_")},
            layout=opened.layout.name,
            dtype=str(model.dtype).removeprefix("torch."),
            parameters=sum(math.prod(spec.shape) for spec in state.plan.specs.values()),
            degree=ranks.degree,
            devices=devices,
            resident_bytes=resident,
            bytes_read=read,
            load_seconds=time.perf_counter() - started,
            all_reduces=state.all_reduces(model.module),
            notes=load_notes(model),
        )

    def _open(self, rank: RankContext) -> Checkpoint:
        if os.path.isabs(self.source) and not os.path.exists(self.source):
            raise CheckpointError(
                f"No such model: rank {rank.rank} finds no '{self.source}' on the machine {socket.gethostname()}. "
                "Every machine of a group opens a model at the same path: put the files there, or share their folder."
            )
        checkpoint = Checkpoint.open(resolve_source(self.source))
        if self.files is not None:
            check_identities(checkpoint, self.files)
        return checkpoint


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a load by its name; None keeps what is stored."""
    if name != "default" and name not in DTYPES:
        raise ConfigError(f"Unknown dtype '{name}'. Expected default, {', '.join(DTYPES)}.")
    return DTYPES.get(name)


def same_files(rank: RankContext, checkpoint: Checkpoint, source: str) -> None:
    """Raise `ConfigError` on every rank unless all of them see the same files (sizes, headers' tensors) at `source`."""
    seen = sorted((name, entry.dtype, entry.shape, entry.start) for name, entry in checkpoint.entries.items())
    digests = rank.gather(hashlib.sha256(repr((checkpoint.nbytes, seen)).encode()).hexdigest())
    strangers = [each for each, digest in enumerate(digests) if digest != digests[0]]
    if strangers:
        raise ConfigError(
            f"Rank {', '.join(map(str, strangers))} sees other files than rank 0 at {source}. Make sure that every "
            f"machine holds the same model files."
        )


def load_notes(model: ResidentModel) -> list[str]:
    """What a user should know of a load: a model that is whole on every rank, weights that stay fp8."""
    notes = []
    degree, name = model.ranks.degree, model.opened.architecture.name
    if degree > 1 and not model.module.tensor_parallel.plan.styles and name != "flux2_vae":
        notes.append(f"{degree} ranks do not divide the key/value heads, so each holds the whole {name}")
    fp8 = sum(getattr(module, "scales", None) is not None for module in model.module.modules())
    if fp8:
        notes.append(f"{fp8} layers stay fp8")
    return notes
