"""Load a model in shards while it is read: checks from headers first, then only this rank's bytes."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import quant
from .checkpoint.files import Checkpoint, resolve_source
from .checkpoint.layout import FileLayout, Piece, Wanted, check, choose_layout
from .checkpoint.parts import transformer_of
from .checkpoint.reader import ReadReport, read_shards
from .errors import CheckpointError, ConfigError
from .guards import guard
from .models import Architecture, unknown_settings
from .parallelize import resolve
from .recognise import recognise
from .restart import load_shards, saved_shards
from .tp import fp8
from .tp.agreement import check_kinds, first_difference, gather_json
from .tp.apply import apply_plan
from .tp.collectives import Ranks
from .tp.config import TensorParallelConfig
from .tp.plan import ResolvedPlan
from .tp.shard import ShardSpec
from .tp.skeleton import build_skeleton, building, finish, hold_fp8, persistent_buffers, place
from .tp.together import Together

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
QUANTISE_BYTES = 1 << 30  # float weights that wait at once to be quantised
HUB_OPTIONS = ("revision", "cache_dir", "local_files_only", "token", "variant")


@dataclass
class OpenedModel:
    """A checkpoint whose model is known: headers read, nothing allocated.

    `pieces` maps each parameter to the rows of the file's tensors that make it up; `scales` has the modules of the
    file whose weight is fp8.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    model_class: type
    config: dict[str, Any]
    layout: FileLayout
    skeleton: nn.Module
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    scales: dict[str, fp8.Scales] = field(default_factory=dict)


def from_pretrained(
    model_class: type,
    name_or_path: str,
    *,
    subfolder: str | None = None,
    dtype: torch.dtype | None = None,
    parallel_config: Any,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], None] | None = None,
    **options: Any,
) -> nn.Module:
    """Load `model_class` from a folder or hub id, each rank reading only its own shards onto its own device (R1, R5).

    `dtype` defaults to float32, as the model's own `from_pretrained` does. Every check (degree, heads, blocks,
    device, headers) runs before anything is allocated. `variant` ("fp16") picks among several versions of
    the weights. `progress(bytes_done, bytes_total)` counts this rank's bytes; `cancelled()` may raise to stop. From a
    folder that `save_shards` wrote every rank reads its own file, in the dtype that it was saved in.

    Raises `ConfigError` for the options that would load the full checkpoint (R12-R15), `CheckpointError` for weights
    that are not safetensors (R16), damaged or of another model, `PlanError` for a degree that does not fit.

    Source: diffusers tensor-parallelism page, "Load a sharded model".
    """
    dtype = options.pop("torch_dtype", None) or dtype
    refuse_options(options)
    hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    if options:
        raise ConfigError(
            f"Unknown loading options with tensor parallelism: {', '.join(sorted(options))}. Remove them."
        )
    config = TensorParallelConfig.of(parallel_config)
    ranks = Ranks.of(config, device)
    with ranks.on_device():
        found = opened_together(ranks, model_class, name_or_path, subfolder, hub)
        if isinstance(found, OpenedModel):
            model, _ = load_opened(
                found,
                ranks,
                config=config,
                dtype=dtype or torch.float32,
                progress=progress,
                cancelled=cancelled,
            )
        else:
            model, _ = load_shards(
                model_class, found, ranks, config=config, dtype=dtype, progress=progress, cancelled=cancelled
            )
        guard(model, ranks)
        return model


def opened_together(
    ranks: Ranks, model_class: type, name_or_path: str, subfolder: str | None, hub: dict[str, Any]
) -> OpenedModel | Path:
    """What every rank finds there: a model whose headers are read, or the folder that `save_shards` wrote.

    Raises on every rank where one of them fails, and `ConfigError` where they do not see the same.
    """

    def opened() -> OpenedModel | Path:
        saved = saved_shards(name_or_path, subfolder)
        if saved is not None:
            return saved
        location = resolve_source(name_or_path, subfolder=subfolder, **hub)
        return open_model(Checkpoint.open(location, variant=hub.get("variant")), model_class=model_class)

    others = f"cannot open {name_or_path}; its own error says why. Nothing was loaded."
    found = Together(ranks.group, ranks.degree, ranks.rank).do(others, opened)
    if ranks.degree > 1:
        check_kinds(ranks, name_or_path, isinstance(found, Path))
        if isinstance(found, OpenedModel):
            check_files(ranks, found.checkpoint)
    return found


def refuse_options(options: dict[str, Any]) -> None:
    """Remove the loading options that tensor parallelism honours by itself, refuse the others (R12-R15)."""
    reasons = {
        "device_map": (None, "each rank's shards go to its own device. Leave `device_map` out"),
        "quantization_config": (
            None,
            "quantising while loading is not possible. Use an fp8 checkpoint, sharded as it is read",
        ),
        "low_cpu_mem_usage": (
            True,
            "reading in shards never holds a full weight. Leave `low_cpu_mem_usage` out",
        ),
        "use_flashpack": (False, "flashpack files cannot be read in slices. Use the safetensors weights"),
        "use_safetensors": (
            True,
            "only safetensors files can be read in slices. Use the safetensors weights",
        ),
    }
    for name, (neutral, reason) in reasons.items():
        value = options.pop(name, neutral)
        if value is not None and value != neutral:
            raise ConfigError(
                f"`{name}={value!r}` does not work with a tensor-parallel `parallel_config`: {reason}."
            )


def open_model(checkpoint: Checkpoint, *, model_class: type | None = None) -> OpenedModel:
    """Recognise the model of `checkpoint` and compare every header with it. Nothing is allocated.

    Raises `CheckpointError` when it is not recognised, when its settings make no model, or tensors are missing, unknown
    or of the wrong shape.
    """
    checkpoint = transformer_of(checkpoint)
    found = recognise(checkpoint, model_class)
    architecture, config = found.architecture, found.config
    model_class = model_class or architecture.load_class()
    with building(model_class.__name__, found.described, checkpoint.nbytes):
        skeleton = build_skeleton(model_class, config)
    layout = choose_layout(checkpoint, found.layouts)
    opened = OpenedModel(checkpoint, architecture, model_class, config, layout, skeleton)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    persistent = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(skeleton)}
    quant.refuse_packed(checkpoint.entries.values())
    ignored = (*quant.SIDE_TENSORS, *architecture.ignored)
    try:
        opened.pieces = check(checkpoint, layout, {**shapes, **persistent}, ignored=ignored)
    except CheckpointError as error:
        unknown = unknown_settings(model_class, config)
        newer = f" If the file is whole, upgrade diffusers: {unknown}." if unknown else ""
        raise CheckpointError(f"{error}{newer}") from None
    opened.scales = quant.read_scales(checkpoint)
    return opened


def load_opened(
    opened: OpenedModel,
    ranks: Ranks,
    *,
    config: TensorParallelConfig | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], None] | None = None,
) -> tuple[nn.Module, ReadReport]:
    """Read this rank's shards of an opened model onto `ranks.device`; the model is complete when it returns.

    `dtype` None keeps every weight as stored; a float dtype casts all of them (fp8 is scaled); float8_e4m3fn quantises
    the planned Linears while they are read, and keeps the rest as stored.
    """
    config = config or TensorParallelConfig(ranks.degree)
    model = opened.skeleton
    plan = resolve(model, config, opened.architecture)
    storage = storage_of(opened, plan, dtype, ranks.device)
    specs = dict(plan.specs)
    for name, buffer in persistent_buffers(model):
        specs[name] = ShardSpec.replicated(buffer.shape, ranks.degree)
    wanted = {name: Wanted(spec, opened.pieces[name], storage.dtypes[name]) for name, spec in specs.items()}
    apply_plan(model, plan, ranks, opened.architecture)
    for name, scales in storage.kept.items():
        hold_fp8(model, name.removesuffix(".weight"), scales, plan, ranks)
    reports = []
    groups = read_groups(wanted, storage.quantised)
    total = sum(_local_bytes(want) for want in wanted.values())
    before = 0
    for group in groups:
        share = sum(_local_bytes(wanted[name]) for name in group) / max(total, 1)

        def group_progress(done: int, of: int, before: int = before, share: float = share) -> None:
            if progress is not None:
                whole = int(of / share) if share else of
                progress(min(before + done, whole), max(whole, before + of))

        shards, report = read_shards(
            opened.checkpoint,
            {name: wanted[name] for name in group},
            rank=ranks.rank,
            degree=ranks.degree,
            group=ranks.group,
            device=ranks.device,
            progress=group_progress,
            cancelled=cancelled,
        )
        before += report.bytes_read
        reports.append(report)
        for name in group:
            if name in storage.scaled:
                shards[name].mul_(storage.scaled[name])
            if name in storage.quantised:
                shards[name], scale = fp8.quantise(shards[name])
                hold_fp8(model, name.removesuffix(".weight"), fp8.Scales(scale), plan, ranks)
        place(model, shards)
    finish(model, ranks.device)
    model.tensor_parallel.compute_dtype = storage.compute
    return model.eval(), joined_report(reports)


@dataclass
class Storage:
    """How each parameter is held: `dtypes` to read it in; fp8 weights `kept` with their scales, or cast and then
    `scaled`; float weights `quantised` after reading."""

    compute: torch.dtype
    dtypes: dict[str, torch.dtype]
    kept: dict[str, fp8.Scales] = field(default_factory=dict)
    scaled: dict[str, float] = field(default_factory=dict)
    quantised: set[str] = field(default_factory=set)


def storage_of(
    opened: OpenedModel, plan: ResolvedPlan, dtype: torch.dtype | None, device: torch.device
) -> Storage:
    """Decide how each parameter of an opened model is held for the asked `dtype` (see `load_opened`)."""
    to_fp8 = dtype == torch.float8_e4m3fn
    compute = dtype if dtype is not None and not to_fp8 else stored_dtype(opened, device)
    storage = Storage(compute, {})
    linears = {
        f"{path}.weight" for path, module in opened.skeleton.named_modules() if isinstance(module, nn.Linear)
    }
    for name, pieces in opened.pieces.items():
        entry = opened.checkpoint.entries[pieces[0].tensor]
        storage.dtypes[name] = _dtype_of(opened.skeleton, name, compute)
        if entry.dtype in fp8.FP8:
            scales = opened.scales.get(pieces[0].tensor.removesuffix(".weight"), fp8.Scales())
            if name in linears and (dtype is None or to_fp8):
                storage.dtypes[name] = entry.torch_dtype
                storage.kept[name] = scales
            elif scales.weight != 1.0:
                storage.scaled[name] = scales.weight
        elif to_fp8 and name in linears and name.removesuffix(".weight") in plan.styles:
            storage.quantised.add(name)
    for name, buffer in persistent_buffers(opened.skeleton):
        storage.dtypes[name] = buffer.dtype
    return storage


def read_groups(wanted: Mapping[str, Wanted], quantised: Collection[str]) -> list[list[str]]:
    """Parameter names in the groups they are read in: all that are held as read, then those to quantise bit by bit,
    so that never more than `QUANTISE_BYTES` wait in their full width."""
    groups = [[name for name in wanted if name not in quantised]]
    size = QUANTISE_BYTES
    for name in wanted:
        if name in quantised:
            nbytes = _local_bytes(wanted[name])
            if size + nbytes > QUANTISE_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += nbytes
    return [group for group in groups if group]


def joined_report(reports: Sequence[ReadReport]) -> ReadReport:
    """One report of several reads, one after the other."""
    return ReadReport(
        bytes_read=sum(report.bytes_read for report in reports),
        bytes_kept=sum(report.bytes_kept for report in reports),
        bytes_broadcast=sum(report.bytes_broadcast for report in reports),
        calls=sum(report.calls for report in reports),
        threads=max(report.threads for report in reports),
        seconds=sum(report.seconds for report in reports),
    )


def _local_bytes(want: Wanted) -> int:
    size = want.dtype.itemsize if want.dtype is not None else 4
    for length in want.spec.local_shape:
        size *= length
    return size


def stored_dtype(opened: OpenedModel, device: torch.device) -> torch.dtype:
    """The dtype that holds most of the checkpoint's unquantised bytes.

    A file that is fp8 throughout computes in bfloat16, on the CPU in float32.
    """
    held: Counter[str] = Counter()
    for pieces in opened.pieces.values():
        for piece in pieces:
            entry = opened.checkpoint.entries[piece.tensor]
            if entry.dtype in ("F32", "BF16", "F16"):
                held[entry.dtype] += entry.nbytes
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if held:
        return names[held.most_common(1)[0][0]]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _dtype_of(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 for a parameter of a module that the model keeps in float32."""
    keep = getattr(model, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(module in name.split(".") for module in keep) else dtype


def check_files(ranks: Ranks, checkpoint: Checkpoint) -> None:
    """Raise `ConfigError` on every rank unless all of them see the same weight files.

    Of every tensor its dtype and shape are compared, and a checksum of up to 4 KiB from its middle.
    """
    seen = {}
    for name, entry in checkpoint.entries.items():
        with open(entry.path, "rb", buffering=0) as file:
            count = min(entry.nbytes, 4096)
            piece = os.pread(file.fileno(), count, entry.start + (entry.nbytes - count) // 2)
        seen[name] = ["file", entry.dtype, list(entry.shape), zlib.crc32(piece)]
    found = first_difference(gather_json(ranks, seen))
    if found is not None:
        name, rank, how = found
        raise ConfigError(
            f"Rank {rank} sees another '{name}' than rank 0 in {checkpoint.path} ({how}). Make sure that every rank "
            f"reads the same model files."
        )
