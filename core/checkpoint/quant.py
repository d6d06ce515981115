"""How files declare fp8 weights with one scale per tensor, and which packed formats are refused.

Sources: the quantisation notes of ComfyUI (`_quantization_metadata`, `.comfy_quant`, and the older `scaled_fp8`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError, UnsupportedError
from ..tp.fp8 import FP8, Scales
from ..wording import quote, short
from .files import Checkpoint
from .header import TensorEntry
from .parts import BESIDE
from .strict_json import DamagedJSON, parse_object

FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


SIDE_TENSORS = (
    "*.weight_scale",
    "*.input_scale",
    "*.scale_weight",
    "*.scale_input",
    "*.comfy_quant",
    "scaled_fp8",
)


WEIGHT_SCALES = ("weight_scale", "scale_weight")


SMALL_TENSOR = 4096  # bytes; scales and declarations are smaller


DECLARATION_LIMIT = (
    15_000_000  # bytes that parsing the declaration of all layers may take: some 30,000 layers
)


# What to use in place of formats that cannot be sharded, by their names in the files.
INSTEAD = "Use the fp8 file of the same model (for example flux2_dev_fp8mixed.safetensors) or the bf16 one"


def read_scales(checkpoint: Checkpoint) -> dict[str, Scales]:
    """The scales of every file module (name without `.weight`) whose weight is stored as fp8.

    Accepts the three ways in which files declare quantisation, per layer and mixed with bf16, and fp8 weights
    without any scale. Raises `UnsupportedError` for another format by its name, `CheckpointError` when a declared
    layer has no fp8 weight or no scale, or a scale is not one finite positive number.
    """
    declared = _declared(checkpoint)
    marker = next((name for name in checkpoint.entries if name.rpartition(".")[2] == "scaled_fp8"), None)
    old_style = marker is not None
    old_full_precision = marker is not None and _elements(checkpoint.entries[marker]) == 2
    scales: dict[str, Scales] = {}
    _check_owners(checkpoint)
    for module, settings in declared.items():
        _check_format(checkpoint, module, settings)
    for name, entry in checkpoint.entries.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or entry.dtype not in FP8:
            continue
        weight = _scalar(checkpoint, tuple(f"{module}.{suffix}" for suffix in WEIGHT_SCALES))
        given = _scalar(checkpoint, (f"{module}.input_scale", f"{module}.scale_input"))
        if weight is None and (module in declared or (old_style and marker_covers(marker, name))):
            raise CheckpointError(
                f"{entry.path}: '{name}' is declared as quantised but has no scale ('{module}.weight_scale'). The file "
                f"is incomplete; download it again."
            )
        settings = declared.get(module, {})
        scales[module] = Scales(
            weight if weight is not None else 1.0,
            given if given is not None and not (old_style and given == 1.0) else None,
            bool(settings.get("full_precision_matrix_mult", False)) or old_full_precision,
        )
    return scales


def _check_owners(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a scale whose weight the file lacks or holds otherwise than as fp8: it would be lost
    without a word."""
    for name, entry in checkpoint.entries.items():
        module, _, last = name.rpartition(".")
        if f"*.{last}" not in SIDE_TENSORS:
            continue
        weight = checkpoint.entries.get(f"{module}.weight")
        if weight is None:
            raise CheckpointError(
                f"{entry.path}: '{name}' belongs to no weight: the file has no '{module}.weight'. Download it again."
            )
        if last in WEIGHT_SCALES and weight.dtype not in FP8 and _scalar(checkpoint, (name,)) != 1.0:
            raise CheckpointError(
                f"{entry.path}: '{name}' is the scale of a weight in fp8, but '{module}.weight' is stored as "
                f"{weight.dtype}. Download the file again."
            )


def marker_covers(marker: str | None, name: str) -> bool:
    """Whether the old `scaled_fp8` marker (with the file's prefix) speaks of the tensor `name`."""
    return marker is not None and name.startswith(marker.removesuffix("scaled_fp8"))


def _declared(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Module -> its quantisation settings, from the header's metadata and the `.comfy_quant` tensors."""
    declared: dict[str, dict[str, Any]] = {}
    text = checkpoint.metadata.get("_quantization_metadata")
    if text is not None:
        raw = text.encode(errors="surrogatepass")
        layers = _json_object(raw, f"{checkpoint.path}: `_quantization_metadata`").get("layers")
        if not isinstance(layers, dict):
            raise CheckpointError(
                f"{checkpoint.path}: `_quantization_metadata` lists no layers. Download the file again."
            )
        for module, settings in layers.items():
            if module.startswith(BESIDE) and f"{module}.weight" not in checkpoint.entries:
                continue  # a text encoder's, in a file that holds a whole pipeline
            declared[_with_prefix(checkpoint, module)] = _settings(settings)
    for name, entry in checkpoint.entries.items():
        if name.endswith(".comfy_quant"):
            settings = _json_object(_read_small(entry), f"{entry.path}: '{short(name)}'")
            declared[name.removesuffix(".comfy_quant")] = _settings(settings)
    return declared


def _with_prefix(checkpoint: Checkpoint, module: str) -> str:
    """The name of a declared module in the file: the metadata may leave out the file's prefix."""
    for prefix in ("", "model.diffusion_model.", "diffusion_model."):
        if f"{prefix}{module}.weight" in checkpoint.entries:
            return prefix + module
    return module


def _settings(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {"format": value}


def _json_object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        return parse_object(raw, DECLARATION_LIMIT)
    except DamagedJSON as error:
        raise CheckpointError(f"{where} {error}. Download the file again.") from None


def _check_format(checkpoint: Checkpoint, module: str, settings: Mapping[str, Any]) -> None:
    name, layer = settings.get("format"), short(module)
    if not isinstance(name, str) or name not in FORMATS:
        held = short(name) if isinstance(name, str) else quote(name)
        raise UnsupportedError(
            f"{checkpoint.path}: layer '{layer}' is quantised as {held}, which cannot be sharded yet. {INSTEAD}."
        )
    entry = checkpoint.entries.get(f"{module}.weight")
    if entry is None or entry.dtype != FORMATS[name]:
        stored = f"stored as {entry.dtype}" if entry is not None else "missing"
        raise CheckpointError(
            f"{checkpoint.path}: layer '{layer}' is declared as {name}, but '{layer}.weight' is {stored}. Download the "
            f"file again."
        )


def refuse_packed(entries: Iterable[TensorEntry]) -> None:
    """Refuse files whose weights are packed in whole numbers or fp4 (nvfp4, int8, svdquant) by what they hold."""
    for entry in entries:
        last = entry.name.rpartition(".")[2]
        if last in ("weight_scale_2", "qweight", "absmax", "quant_map") or (
            last == "weight" and entry.dtype in ("U8", "I8", "F4") and len(entry.shape) == 2
        ):
            kinds = {
                "weight_scale_2": "nvfp4",
                "qweight": "SVDQuant or AWQ",
                "absmax": "bitsandbytes",
                "F4": "fp4",
            }
            kind = kinds.get(last) or kinds.get(entry.dtype) or f"{entry.dtype} packed"
            raise UnsupportedError(
                f"{entry.path}: '{entry.name}' is {kind} weights, which cannot be sharded yet. {INSTEAD}."
            )


def _scalar(checkpoint: Checkpoint, names: tuple[str, ...]) -> float | None:
    """The value of the first of `names` that the file holds."""
    entry = next((checkpoint.entries[name] for name in names if name in checkpoint.entries), None)
    if entry is None:
        return None
    if _elements(entry) != 1 or entry.dtype not in ("F32", "BF16", "F16"):
        raise UnsupportedError(
            f"{entry.path}: scale '{entry.name}' has shape {list(entry.shape)} and dtype {entry.dtype}; only one "
            f"number per layer can be sharded. {INSTEAD}."
        )
    value = torch.frombuffer(bytearray(_read_small(entry)), dtype=entry.torch_dtype).float().item()
    if not 0 < value < float("inf"):
        raise CheckpointError(f"{entry.path}: scale '{entry.name}' is {value}. Download the file again.")
    return value


def _read_small(entry: TensorEntry) -> bytes:
    if entry.nbytes > SMALL_TENSOR:
        raise CheckpointError(
            f"{entry.path}: '{entry.name}' is {entry.nbytes} bytes long, expected a few. Download it again."
        )
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw = os.pread(descriptor, entry.nbytes, entry.start)
    finally:
        os.close(descriptor)
    if len(raw) != entry.nbytes:
        raise CheckpointError(f"{entry.path}: the file ends inside '{entry.name}'. Download it again.")
    return raw


def _elements(entry: TensorEntry) -> int:
    count = 1
    for length in entry.shape:
        count *= length
    return count
