"""Where a weight patch goes: from a tensor of the file to stretches of this rank's shards, through `ShardSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..checkpoint.layout import IDENTITY, FileLayout
from ..errors import InputError, UnsupportedError
from ..tp.shard import ShardSpec
from .adapters import Adapter, Change, change_of

KEY_PREFIX = "diffusion_model."


@dataclass(frozen=True, eq=False)
class Patch:
    """An adapter at a place, as ComfyUI's patcher holds it.

    `key` names a tensor as the single file does (with or without `diffusion_model.`) or as the model does. `offset`
    (dimension, start, length) restricts the patch to a part of it. `swapped` adds the change with its two halves of
    rows exchanged (diffusers' norm_out has scale and shift in the other order); values that are set stay in order.
    `strength` scales the change, `strength_model` the weight before it.
    """

    key: str
    adapter: Adapter
    strength: float = 1.0
    strength_model: float = 1.0
    offset: tuple[int, int, int] | None = None
    swapped: bool = False


@dataclass(frozen=True, eq=False)
class Entry:
    """One line of a set of patches: the client's number for it, the `patch` itself (None: the one that is held under
    that number already), and the strengths it has now."""

    number: int
    patch: Patch | None
    strength: float
    strength_model: float = 1.0


@dataclass(frozen=True)
class Share:
    """Rows [start, stop) of a file's tensor are the rows of `parameter` from `into` on."""

    parameter: str
    start: int
    stop: int
    into: int


@dataclass(frozen=True)
class Region:
    """What a key and its offset name: a rectangle of a tensor that one or several parameters hold.

    `shares` are the tensor's rows by parameter; the rectangle begins at (`top`, `left`) and is [`rows`, `columns`].
    """

    shares: tuple[Share, ...]
    top: int
    left: int
    rows: int
    columns: int


@dataclass
class Part:
    """A patch's change to this rank's part of one parameter.

    `rows` and `columns` are where it goes, as stretches (start, length) of the local matrix; `region_rows` and
    `region_columns` are the numbers of the same rows and columns in the patch's region. `change` is sliced to them.
    `covered` counts the rows of the parameter that the patch is for on all ranks.
    """

    parameter: str
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    region_rows: torch.Tensor
    region_columns: torch.Tensor
    change: Change
    covered: int


@dataclass
class PlacedPatch:
    """A patch on this rank: its part of every parameter that it changes, on the CPU. No part: no weight has its key."""

    key: str
    parts: list[Part]
    rows: int
    columns: int
    strength: float = 1.0
    strength_model: float = 1.0


def place_patch(
    patch: Patch, specs: Mapping[str, ShardSpec], layouts: Sequence[FileLayout], rank: int
) -> PlacedPatch:
    """The slices of `patch` that belong to `rank`; no part at all when its key names no weight of the model.

    `specs` are the layouts of the model's parameters, `layouts` the tables that may know the key. Raises `InputError`
    and `UnsupportedError` as `change_of` does.
    """
    region = region_of(patch, specs, layouts)
    if region is None:
        return PlacedPatch(patch.key, [], 0, 0)
    change = change_of(patch.adapter, region.rows, region.columns, patch.key)
    half = region.rows // 2
    parts = []
    for share in region.shares:
        spec = specs[share.parameter]
        low, high = max(share.start, region.top), min(share.stop, region.top + region.rows)
        if low >= high:
            continue
        into = share.into + low - share.start
        rows = spec.overlap(rank, 0, into, into + high - low)
        columns: tuple[tuple[int, int, int], ...] = ((region.left, 0, region.columns),)
        if len(spec.shape) == 2:
            columns = spec.overlap(rank, 1, region.left, region.left + region.columns)
        region_rows = _numbers(rows) + (low - region.top)
        region_columns = _numbers(columns)
        swapped = patch.swapped and not change.replaces
        source_rows = (region_rows + half) % region.rows if swapped else region_rows
        sliced = replace(change, factors=change.factors.take(source_rows, region_columns))
        stretches = _joined(rows), _joined(columns)
        parts.append(Part(share.parameter, *stretches, region_rows, region_columns, sliced, high - low))
    return PlacedPatch(patch.key, parts, region.rows, region.columns, patch.strength, patch.strength_model)


def region_of(
    patch: Patch, specs: Mapping[str, ShardSpec], layouts: Sequence[FileLayout] = ()
) -> Region | None:
    """The region that the key and offset of `patch` name, or None when no layout knows the key.

    Raises `InputError` for an offset outside the tensor.
    """
    name = patch.key.removeprefix(KEY_PREFIX)
    for layout in (*layouts, IDENTITY):
        shares, rows = _shares(name, specs, layout)
        if not shares:
            continue
        columns = prod(specs[shares[0].parameter].shape[1:])
        top, left, height, width = 0, 0, rows, columns
        if patch.offset is not None:
            dim, start, length = patch.offset
            size = (rows, columns)[dim] if dim in (0, 1) else 0
            if start < 0 or length < 1 or start + length > size:
                raise InputError(
                    f"The patch of '{patch.key}' is for {length} of its indices from {start} on along dimension {dim}, "
                    f"but the weight is {[rows, columns]}: the LoRA was made for another model. Remove it."
                )
            if dim == 0:
                top, height = start, length
            else:
                left, width = start, length
        if patch.swapped and height % 2:
            raise InputError(
                f"The patch of '{patch.key}' swaps halves of {height} rows, which is an odd number."
            )
        region = Region(shares, top, left, height, width)
        _check_splits(patch.key, region, specs)
        return region
    return None


def _shares(name: str, specs: Mapping[str, ShardSpec], layout: FileLayout) -> tuple[tuple[Share, ...], int]:
    """The parameters that the file's tensor `name` makes up, and its number of rows."""
    module, _, last = name.rpartition(".")
    shares = []
    total = 0
    for target in layout.targets(module):
        for suffix in dict.fromkeys((last, "weight", "bias")):
            parameter = f"{target.module}.{suffix}"
            sources = layout.sources(parameter) if parameter in specs else None
            if sources is None or not any(name in names for names, _, _ in sources):
                continue
            size = specs[parameter].shape[0] // target.count
            shares.append(Share(parameter, target.part * size, (target.part + 1) * size, target.index * size))
            total = size * target.of
            break
    return tuple(shares), total


def _check_splits(key: str, region: Region, specs: Mapping[str, ShardSpec]) -> None:
    """Raise unless the parameters of a region are split alike, which sums over ranks rely on."""
    splits = {specs[share.parameter].dim for share in region.shares}
    if len(splits) > 1:
        raise UnsupportedError(
            f"'{key}' is made of weights that are split in different ways ({splits}), which no patch can cover. Patch "
            f"them one by one."
        )


def _numbers(stretches: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """The source numbers of stretches (local, source, length), in order."""
    if not stretches:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat([torch.arange(source, source + length) for _, source, length in stretches])


def _joined(stretches: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """The destinations (start, length) of stretches, those that follow each other joined."""
    joined: list[tuple[int, int]] = []
    for local, _, length in stretches:
        if joined and sum(joined[-1]) == local:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((local, length))
    return tuple(joined)
