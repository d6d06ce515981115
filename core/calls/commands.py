"""The commands that every rank executes, by name. Each is called on all ranks with the same header and tensors.

A command is `f(context, header, tensors) -> (header, tensors)`; what rank 0 returns is the client's reply.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import os
import socket
import time
from dataclasses import asdict
from typing import Any

import torch

from ..checkpoint.files import Checkpoint, check_identities, resolve_source
from ..errors import CheckpointError, ConfigError, InputError
from ..load import DTYPES, open_model
from ..lora.wire import read_patches
from ..parallelize import resolve
from ..parts import text_encoder, vae
from ..tp.collectives import Ranks
from ..tp.config import TensorParallelConfig
from .resident import ResidentModel, release_cache
from .sampling import run_sample

log = logging.getLogger("comfy_tp.rank")

Result = tuple[dict[str, Any], list[torch.Tensor]]


def prepare() -> None:
    """Import what every load needs: diffusers, whose own imports take longer than torch's."""
    try:
        importlib.import_module("diffusers.models.transformers.transformer_flux2")
    except ImportError as error:
        # A load says better what is missing and what to do.
        log.info("diffusers is not imported yet: %s", error)


def load(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Load a model in shards. Rank 0 reports `progress` events (bytes of all ranks) while reading.

    Every rank opens the files and checks them before any of them allocates: they go on together or not at all.
    """
    started = time.perf_counter()
    ranks = Ranks(context.rank, context.degree, context.device, context.data_group)
    dtype = _dtype(header["dtype"])
    if os.path.isabs(header["source"]) and not os.path.exists(header["source"]):
        raise CheckpointError(
            f"No such model: rank {context.rank} finds no '{header['source']}' on the machine {socket.gethostname()}. "
            "Every machine of a group opens a model at the same path: put the files there, or share their folder."
        )
    location = resolve_source(header["source"])
    checkpoint = Checkpoint.open(location)
    if header.get("files") is not None:
        check_identities(checkpoint, header["files"])
    if header["kind"] == "text_encoder":
        opened = text_encoder.open_text_encoder(checkpoint, ranks.degree)
    elif header["kind"] == "vae":
        opened = vae.open_vae(checkpoint)
    else:
        opened = open_model(checkpoint)
    resolve(opened.skeleton, TensorParallelConfig(ranks.degree), opened.architecture)
    context.check_cancelled()
    same_files(context, opened.checkpoint, header["source"])

    def progress(done: int, total: int) -> None:
        context.pulse("load")
        seconds = max(time.perf_counter() - started, 1e-9)
        scale = ranks.degree
        rate = done * scale / seconds / 1e9
        context.report(
            {"event": "progress", "done": done * scale, "total": total * scale, "gb_per_second": rate}
        )

    model = ResidentModel.load(
        opened, ranks, dtype=dtype, progress=progress, cancelled=context.stop_if_cancelled
    )
    # A boundary: either every rank keeps the model or none does.
    context.check_cancelled()
    context.models[header["model"]] = model
    figures = context.gather([model.resident_bytes, model.report.bytes_read, str(model.ranks.device)])
    info = {
        "architecture": opened.architecture.name,
        "config": _plain(opened.config),
        "layout": opened.layout.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(_size(spec.shape) for spec in model.module.tensor_parallel.plan.specs.values()),
        "degree": ranks.degree,
        "devices": [row[2] for row in figures],
        "resident_bytes": [row[0] for row in figures],
        "bytes_read": [row[1] for row in figures],
        "load_seconds": time.perf_counter() - started,
        "all_reduces": _all_reduces(model),
        "notes": load_notes(model),
    }
    return {"info": info}, []


def load_notes(model: ResidentModel) -> list[str]:
    """What a user should know of a load: a model that is whole on every rank, weights that stay fp8."""
    notes = []
    degree = model.ranks.degree
    if (
        degree > 1
        and not model.module.tensor_parallel.plan.styles
        and model.opened.architecture.name != "flux2_vae"
    ):
        notes.append(
            f"{degree} ranks do not divide the key/value heads, so each holds the whole {model.opened.architecture.name}"
        )
    fp8 = sum(getattr(module, "scales", None) is not None for module in model.module.modules())
    if fp8:
        notes.append(f"{fp8} layers stay fp8")
    return notes


def keep(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Keep a conditioning or reference on the ranks under the client's key."""
    _model(context, header).keep(header["key"], tensors[0], header["forget"])
    return {}, []


def forward(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """One model call."""
    context.pulse("forward")
    return {}, [_model(context, header).forward(header, tensors).cpu()]


def sample(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """The whole denoising loop; rank 0 reports `step` events."""
    return run_sample(context, _model(context, header), header, tensors)


def encode_text(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """The conditioning of a prompt: tokens [1, L] and mask [1, L] int64 in, [1, L, 3 * hidden] float32 out."""
    model = _model(context, header)
    model.unpark()
    layers = text_encoder.read_layers(model.opened)
    states = text_encoder.encode(model.module, layers, tensors[0], tensors[1], context.device)
    return {}, [states.float().cpu()]


def vae_encode(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Latents [B, C, h, w] float32 of pixels [B, 3, H, W] in -1..1."""
    model = _model(context, header)
    model.unpark()
    return {}, [vae.encode(model.module, tensors[0].to(context.device, model.dtype)).float().cpu()]


def vae_decode(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Pixels [B, 3, H, W] float32 in about -1..1 of latents [B, C, h, w], decoded in bands of rows."""
    model = _model(context, header)
    model.unpark()
    return {}, [
        vae.decode(model.module, tensors[0].to(context.device, model.dtype), model.ranks).float().cpu()
    ]


def patch(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Replace the weight patches (LoRA) on a model's shards. All ranks take the new ones, or none does."""
    model = _model(context, header)
    model.unpark()
    staged = model.patches.stage(
        read_patches(header["patches"], tensors), mode=header["mode"], tick=lambda: context.pulse("patch")
    )
    context.check_cancelled()
    return {"report": asdict(model.patches.commit(staged))}, []


def park(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Move a model's shards to host memory."""
    freed = _model(context, header).park()
    return {"freed": sum(context.gather(freed))}, []


def unload(context: Any, header: dict[str, Any], tensors: list[torch.Tensor]) -> Result:
    """Free a model's shards. A model that is not there frees nothing."""
    model = context.models.pop(header["model"], None)
    freed = model.resident_bytes if model is not None else 0
    del model
    gc.collect()  # a module and what is bound onto it refer to each other
    release_cache(context.device)
    return {"freed": sum(context.gather(freed))}, []


def describe_models(context: Any) -> dict[str, Any]:
    """What `status` tells of this rank's models."""
    return {
        "models": [
            {
                "model": key,
                "source": model.opened.checkpoint.path,
                "architecture": model.opened.architecture.name,
                "resident_bytes": model.resident_bytes,
                "parked": model.parked,
            }
            for key, model in context.models.items()
        ]
    }


COMMANDS = {
    "load": load,
    "keep": keep,
    "forward": forward,
    "sample": sample,
    "encode_text": encode_text,
    "vae_encode": vae_encode,
    "vae_decode": vae_decode,
    "patch": patch,
    "park": park,
    "unload": unload,
}


def same_files(context: Any, checkpoint: Checkpoint, source: str) -> None:
    """Raise `ConfigError` on every rank unless all of them see the same files (sizes, headers' tensors) at `source`."""
    seen = sorted((name, entry.dtype, entry.shape, entry.start) for name, entry in checkpoint.entries.items())
    digests = context.gather(hashlib.sha256(repr((checkpoint.nbytes, seen)).encode()).hexdigest())
    strangers = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if strangers:
        raise ConfigError(
            f"Rank {', '.join(map(str, strangers))} sees other files than rank 0 at {source}. Make sure that every "
            f"machine holds the same model files."
        )


def _model(context: Any, header: dict[str, Any]) -> ResidentModel:
    model = context.models.get(header["model"])
    if model is None:
        raise InputError(f"The ranks hold no model '{header['model']}'. Load it again.")
    return model


def _dtype(name: str) -> torch.dtype | None:
    if name == "default":
        return None
    if name not in DTYPES:
        raise ConfigError(f"Unknown dtype '{name}'. Expected default, {', '.join(DTYPES)}.")
    return DTYPES[name]


def _all_reduces(model: ResidentModel) -> int:
    if model.ranks.degree == 1:
        return 0
    architecture = model.opened.architecture
    return model.module.tensor_parallel.plan.all_reduces - architecture.merged(model.module)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The model's own settings of a config.json, without diffusers' private entries."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
