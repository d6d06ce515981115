"""Load a model in shards while it is read: checks from headers first, then only this rank's bytes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .checkpoint.files import Checkpoint, resolve_source
from .checkpoint.layout import IDENTITY, FileLayout, Piece, check, choose_layout
from .checkpoint.reader import ReadReport, Wanted, read_shards
from .config import TensorParallelConfig
from .errors import CheckpointError, ConfigError, UnsupportedError
from .models import ARCHITECTURES, Architecture, architecture_named, architecture_of
from .parallelize import apply_plan, resolve
from .ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_OPTIONS = ("revision", "cache_dir", "local_files_only", "token")


@dataclass
class OpenedModel:
    """A checkpoint whose model is known: headers read, nothing allocated.

    `pieces` maps each parameter to the rows of the file's tensors that make it up.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    model_class: type
    config: dict[str, Any]
    layout: FileLayout
    skeleton: nn.Module
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)


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
    device, headers) runs before anything is allocated. `progress(bytes_done, bytes_total)` counts this rank's bytes;
    `cancelled()` may raise to stop.

    Raises `ConfigError` for the options that would load the full checkpoint (R12-R15), `CheckpointError` for weights
    that are not safetensors (R16), damaged or of another model, `PlanError` for a degree that does not fit.

    Source: diffusers tensor-parallelism page, "Load a sharded model".
    """
    dtype = options.pop("torch_dtype", None) or dtype or torch.float32
    refuse_options(options)
    hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    if options:
        raise ConfigError(
            f"Unknown loading options with tensor parallelism: {', '.join(sorted(options))}. Remove them."
        )
    config = TensorParallelConfig.of(parallel_config)
    ranks = Ranks.of(config, device)
    location = resolve_source(name_or_path, subfolder=subfolder, **hub)
    opened = open_model(Checkpoint.open(location), model_class=model_class)
    model, _ = load_opened(opened, ranks, config=config, dtype=dtype, progress=progress, cancelled=cancelled)
    return model


def refuse_options(options: dict[str, Any]) -> None:
    """Remove the loading options that tensor parallelism honours by itself, refuse refuse others (R12-R15)."""
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


def open_model(
    checkpoint: Checkpoint, *, model_class: type | None = None, architecture: Architecture | None = None
) -> OpenedModel:
    """Recognise the model of `checkpoint` and compare every header with it. Nothing is allocated.

    A folder says its class in config.json; a single file is recognised from its tensor names and shapes alone.
    Raises `CheckpointError` when it is neither, or tensors are missing, unknown or of the wrong shape.
    """
    if checkpoint.config is not None:
        config = dict(checkpoint.config)
        named = config.get("_class_name")
        if model_class is None:
            architecture = architecture or _architecture_of_config(checkpoint, named)
        else:
            architecture = architecture or architecture_of(model_class)
            if named and named not in {base.__name__ for base in model_class.__mro__}:
                raise CheckpointError(
                    f"{checkpoint.path} holds a {named}, not a {model_class.__name__}. Load it with {named}."
                )
        layouts: tuple[FileLayout, ...] = (IDENTITY,)
    else:
        architecture, config, layouts = _recognise(checkpoint, architecture)
    model_class = model_class or architecture.load_class()
    skeleton = build_skeleton(model_class, config)
    layout = choose_layout(checkpoint, layouts)
    opened = OpenedModel(checkpoint, architecture, model_class, config, layout, skeleton)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    persistent = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(skeleton)}
    opened.pieces = check(checkpoint, layout, {**shapes, **persistent}, ignored=architecture.ignored)
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

    `dtype` None keeps the dtype that most of the file is stored in.
    """
    config = config or TensorParallelConfig(ranks.degree)
    model = opened.skeleton
    plan = resolve(model, config, opened.architecture)
    compute = dtype or stored_dtype(opened)
    buffers = dict(persistent_buffers(model))
    wanted: dict[str, Wanted] = {}
    for name, spec in plan.specs.items():
        wanted[name] = Wanted(spec, opened.pieces[name], _dtype_of(model, name, compute))
    for name, buffer in buffers.items():
        from .shard import ShardSpec

        wanted[name] = Wanted(
            ShardSpec.replicated(buffer.shape, ranks.degree), opened.pieces[name], buffer.dtype
        )
    apply_plan(model, plan, ranks, opened.architecture)
    shards, report = read_shards(
        opened.checkpoint,
        wanted,
        rank=ranks.rank,
        degree=ranks.degree,
        group=ranks.group,
        device=ranks.device,
        progress=progress,
        cancelled=cancelled,
    )
    assign(model, shards, ranks.device)
    return model.eval(), report


def assign(model: nn.Module, shards: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put `shards` in place of the model's meta parameters and persistent buffers; move other buffers to `device`."""
    for name, tensor in shards.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[last] = tensor
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise CheckpointError(f"No weights were read for {len(left)} parameters, first '{left[0]}'.")


def stored_dtype(opened: OpenedModel) -> torch.dtype:
    """The dtype that holds most of the checkpoint's unquantised bytes; float32 for a file without any."""
    held: Counter[str] = Counter()
    for pieces in opened.pieces.values():
        for piece in pieces:
            entry = opened.checkpoint.entries[piece.tensor]
            if entry.dtype in ("F32", "BF16", "F16"):
                held[entry.dtype] += entry.nbytes
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return names[held.most_common(1)[0][0]] if held else torch.float32


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of `model` that a checkpoint holds."""
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def _dtype_of(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 for a parameter of a module that the model keeps in float32."""
    keep = getattr(model, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(module in name.split(".") for module in keep) else dtype


def build_skeleton(model_class: type, config: Mapping[str, Any]) -> nn.Module:
    """The model of `config` with every parameter on the meta device; buffers are real, on the CPU."""
    with meta_parameters():
        return model_class.from_config(dict(config)).eval()


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, parameters move to the meta device as soon as a module registers them, before they are initialised."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _architecture_of_config(checkpoint: Checkpoint, class_name: str | None) -> Architecture:
    for name, known in ARCHITECTURES.items():
        if known == class_name:
            return architecture_named(name)
    raise UnsupportedError(
        f"{checkpoint.path}: config.json names the class {class_name!r}, which has no tensor-parallel plan. Models "
        f"that have one: {', '.join(sorted(ARCHITECTURES.values()))}."
    )


def _recognise(
    checkpoint: Checkpoint, architecture: Architecture | None
) -> tuple[Architecture, dict[str, Any], tuple[FileLayout, ...]]:
    """The architecture and configuration of a single file, from its tensor names and shapes alone."""
    candidates = [architecture] if architecture else [architecture_named(name) for name in ARCHITECTURES]
    for candidate in candidates:
        if candidate.detect is None:
            continue
        config = candidate.detect(checkpoint.entries)
        if config is not None:
            return candidate, config, candidate.layouts
    raise CheckpointError(
        f"{checkpoint.path} is not a model that can be sharded: its tensor names fit none of "
        f"{', '.join(ARCHITECTURES)}. Choose a file of one of them, or a diffusers folder with config.json."
    )
