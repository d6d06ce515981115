"""DoRA beside a weight: the factors by which it scales rows or columns, from norms taken without a changed copy.

A DoRA of strength s makes of a weight W the weight (1 - s) W + s c (W + a B A), where c is the trained magnitude over a
norm: of W's rows (one number per output), or of the columns of W + a B A (one per input), as ComfyUI 0.3.75 has it.
Both are a scale of the layer's outputs or inputs and a low-rank product, so that W stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ..tp import fp8
from ..tp.collectives import Ranks
from ..tp.shard import ShardSpec
from .adapters import Kronecker
from .patch import PlacedPatch
from .side import PatchedWeight

# Elements of a weight that are float32 at a time: what fits the caches of a CPU; what makes few launches on a GPU.
BLOCK = {"cpu": 1 << 19}
BLOCK_ELSEWHERE = 1 << 24


@dataclass
class Stored:
    """A parameter's local tensor as it lies in memory, and the scales of an fp8 one."""

    tensor: torch.Tensor
    scales: fp8.Scales | None = None


@dataclass
class Norms:
    """What need not be computed again while patches stay.

    Squared norms of the `rows` of weights without any patch, by parameter, and the `factors` of DoRA patches by number,
    with the patches that they depend on: strengths of those before, all parts.
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    factors: dict[int, tuple[tuple[Any, ...], list[Any], dict[str, torch.Tensor]]] = field(
        default_factory=dict
    )

    def known(
        self, number: int, strengths: tuple[Any, ...], parts: Sequence[Any]
    ) -> dict[str, torch.Tensor] | None:
        """The factors of the patch `number` where nothing that they depend on has changed."""
        found = self.factors.get(number)
        if found is None or found[0] != strengths or len(found[1]) != len(parts):
            return None
        return found[2] if all(old is new for old, new in zip(found[1], parts, strict=True)) else None

    def after(self, new: Norms, numbers: Collection[int]) -> Norms:
        """What is known once `new` ones were computed and the patches `numbers` are those in place."""
        factors = {**self.factors, **new.factors}
        kept = {number: factors[number] for number in numbers if number in factors}
        return Norms({**self.rows, **new.rows}, kept)


def is_dora(patch: PlacedPatch) -> bool:
    """Whether a patch norms the weight that it changes."""
    return any(part.change.dora_scale is not None for part in patch.parts)


def by_rows(patch: PlacedPatch) -> bool:
    """Whether a DoRA patch scales rows; otherwise columns."""
    return cast(torch.Tensor, patch.parts[0].change.dora_scale).shape[0] == patch.rows


def goes_beside(patches: Sequence[PlacedPatch], specs: Mapping[str, ShardSpec]) -> bool:
    """Whether patches of the same weights, DoRAs among them, can be scales and low-rank products; alike on all ranks.

    Rows must be scaled over their whole length, and columns likewise; a LoKr is no low-rank product.
    """
    bent = [patch for patch in patches if is_dora(patch)]
    if bent and any(isinstance(part.change.factors, Kronecker) for patch in patches for part in patch.parts):
        return False
    for patch in bent:
        covered: dict[str, int] = {}
        for part in patch.parts:
            covered[part.parameter] = covered.get(part.parameter, 0) + part.covered
        for name, rows in covered.items():
            height, width = specs[name].shape
            if (patch.columns if by_rows(patch) else rows) < (width if by_rows(patch) else height):
                return False
    return True


def factors_of(
    patch: PlacedPatch,
    patched: Mapping[str, PatchedWeight],
    weights: Mapping[str, Stored],
    specs: Mapping[str, ShardSpec],
    ranks: Ranks,
    known_rows: Mapping[str, torch.Tensor],
    new_rows: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """For each parameter of a DoRA patch the factors c of its local rows or columns, float32; 1 where the patch is not.

    `patched` are the parameters' `weights` after the patches before. Norms of rows of weights that have none are taken
    from `known_rows`, or added to `new_rows`. All ranks call this alike: a rank that holds a piece of a row or column
    adds up its squares with the others'.
    """
    names = list(dict.fromkeys(part.parameter for part in patch.parts))
    rows = by_rows(patch)
    device = patched[names[0]].device
    scale = cast(torch.Tensor, patch.parts[0].change.dora_scale).to(device, torch.float32).flatten()
    pieces = specs[names[0]].dim == (1 if rows else 0)
    squares: dict[str, torch.Tensor] = {}
    if rows:
        for name in names:
            found = known_rows.get(name) if patched[name].untouched else None
            if found is None:
                found = squared_norms(weights[name], patched[name], dim=1)
                found = ranks.all_reduce(found) if pieces else found
                if patched[name].untouched:
                    new_rows[name] = found
            squares[name] = found
    else:
        total = torch.zeros(patch.columns, device=device)
        for name in names:
            changed = patched[name].copy()
            own = [part for part in patch.parts if part.parameter == name]
            for part in own:
                changed.add(part, part.change.scale)
            local = squared_norms(weights[name], changed, dim=0)
            picked = torch.cat([local[start : start + length] for start, length in own[0].columns])
            total.index_add_(0, own[0].region_columns.to(device), picked)
        total = ranks.all_reduce(total) if pieces else total
    factors: dict[str, torch.Tensor] = {}
    for part in patch.parts:
        name = part.parameter
        vector = factors.setdefault(name, torch.ones(patched[name].shape[0 if rows else 1], device=device))
        numbers = (part.region_rows if rows else part.region_columns).to(device)
        taken = 0
        for start, length in part.rows if rows else part.columns:
            region = numbers[taken : taken + length]
            square = squares[name][start : start + length] if rows else total[region]
            vector[start : start + length] = scale[region] / (square.sqrt() + torch.finfo(torch.float32).eps)
            taken += length
    return factors


def squared_norms(weight: Stored, patched: PatchedWeight, dim: int) -> torch.Tensor:
    """The squared norms over `dim` of a local weight after patches, float32, block of rows by block of rows."""
    height, width = patched.shape
    device = patched.device
    rows = max(1, BLOCK.get(device.type, BLOCK_ELSEWHERE) // width)
    buffer = torch.empty(min(rows, height), width, device=device)
    total = torch.zeros(height if dim == 1 else width, device=device)
    up, down = patched.product()
    for start in range(0, height, rows):
        stop = min(start + rows, height)
        block = buffer[: stop - start].copy_(weight.tensor[start:stop])
        if weight.scales is not None:
            block.mul_(weight.scales.weight)
        if patched.rows is not None:
            block.mul_(patched.rows[start:stop].unsqueeze(1))
        if patched.columns is not None:
            block.mul_(patched.columns)
        if up is not None and down is not None:
            block.addmm_(up[start:stop], down)
        squares = block.square_().sum(dim=dim)
        if dim == 1:
            total[start:stop] = squares
        else:
            total += squares
    return total


def bend(
    patched: Mapping[str, PatchedWeight], patch: PlacedPatch, factors: Mapping[str, torch.Tensor]
) -> None:
    """Apply a DoRA patch to `patched` parameters, whose local rows or columns it scales by `factors`."""
    rows = by_rows(patch)
    for name, factor in factors.items():
        # Where the patch is not, the factor is 1, and so is this.
        kept = factor * patch.strength + (1.0 - patch.strength) if patch.strength != 1.0 else factor
        (patched[name].scale_rows if rows else patched[name].scale_columns)(kept)
    for part in patch.parts:
        factor = factors[part.parameter]
        patched[part.parameter].add(
            part,
            patch.strength * part.change.scale,
            rows=factor if rows else None,
            columns=None if rows else factor,
        )
