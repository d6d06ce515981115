"""LoRA and its kin on a sharded model: each rank computes its own shard's change from slices of the factors.

A set of patches replaces the one before, in two steps. `stage` checks everything, slices the factors through
`ShardSpec`, and computes what will be put in place; the model is not touched, so that any error leaves the
previous patches as they are. `commit` only copies. A patch with cheap factors (LoRA, LoHa, LoKr, DoRA) becomes a side
path of its layer (the weight stays as it is); every other one is merged into the shard, whose original waits in host
memory and is put back when the patch goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from ..errors import ConfigError, InputError
from ..tp import fp8
from ..tp.apply import ShardedState
from ..tp.linear import ShardedLinear
from .dora import Norms, Stored, bend, by_rows, factors_of, goes_beside, is_dora
from .patch import Entry, Part, Patch, PlacedPatch, place_patch
from .side import PatchedWeight, Side, side_bytes, side_cost

MODES = ("auto", "merge", "side")
# A side path of rank r costs r * (in + out) multiplications per token beside the layer's in * out. Above this share
# of them a patch is merged. Merging rounds an fp8 weight again, so there the limit is that of a LoRA of full rank.
SIDE_SHARE = 0.25
FP8_SHARE = 2.0


@dataclass(frozen=True)
class PatchReport:
    """What became of a set of patches: how many are `applied`, the keys that fit no weight, how many parameters are
    `merged` and how many carry a `side` path, what that takes on one rank (originals in `host_bytes` of host memory,
    side paths in `side_bytes` of device memory), and the seconds that it took."""

    applied: int
    unmatched: Sequence[str] = ()
    merged: int = 0
    side: int = 0
    host_bytes: int = 0
    side_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Staged:
    """Patches that are ready to be put in place.

    `signatures` says for each patched parameter which patches make it what it is. `weights` are the new tensors of
    those that are merged anew, `originals` theirs from before the first patch; `sides` the side paths that are new;
    `norms` those that were computed for them.
    """

    placed: dict[int, PlacedPatch]
    report: PatchReport
    signatures: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    weights: dict[str, Stored] = field(default_factory=dict)
    originals: dict[str, Stored] = field(default_factory=dict)
    sides: dict[str, Side] = field(default_factory=dict)
    norms: Norms = field(default_factory=Norms)
    started: float = 0.0


class WeightPatches:
    """The patches on one rank's shards of a model. `held` are the sliced patches in place, by the client's numbers."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.state = cast(ShardedState, model.tensor_parallel)
        self.held: dict[int, PlacedPatch] = {}
        self._signatures: dict[str, tuple[Any, ...]] = {}
        self._originals: dict[str, Stored] = {}
        self._norms = Norms()
        self._plain: set[str] = set()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the originals of merged shards take on this rank."""
        return sum(stored.tensor.nbytes for stored in self._originals.values())

    @property
    def side_bytes(self) -> int:
        """Bytes of device memory that the side paths take on this rank."""
        return side_bytes(self.model)

    def set(self, patches: Iterable[Patch], *, mode: str = "auto") -> PatchReport:
        """Replace all patches by `patches`, on a model whose ranks all call this alike. Errors as in `stage`."""
        entries = [
            Entry(number, patch, patch.strength, patch.strength_model) for number, patch in enumerate(patches)
        ]
        return self.commit(self.stage(entries, mode=mode))

    def stage(
        self,
        entries: Iterable[Entry],
        *,
        mode: str = "auto",
        tick: Callable[[], None] | None = None,
    ) -> Staged:
        """Check, slice and compute a set of patches without touching the model.

        `tick` is called after each weight.

        Raises `InputError` for factors of another model or a number that is not held, `UnsupportedError` for kinds of
        patches that shards cannot carry, `ConfigError` for an unknown `mode`.
        """
        started = time.perf_counter()
        if mode not in MODES:
            raise ConfigError(f"Unknown patch mode '{mode}'. Expected one of {', '.join(MODES)}.")
        state = self.state
        placed: dict[int, PlacedPatch] = {}
        for entry in entries:
            number = entry.number
            if entry.patch is not None:
                found = place_patch(
                    entry.patch, state.plan.specs, state.architecture.layouts, state.ranks.rank
                )
            elif number in self.held:
                found = self.held[number]
            else:
                raise InputError(f"The ranks hold no patch number {number}; send it again.")
            placed[number] = replace(found, strength=entry.strength, strength_model=entry.strength_model)
        unmatched = tuple(patch.key for patch in placed.values() if not patch.parts)
        staged = Staged(placed, PatchReport(len(placed) - len(unmatched), unmatched), started=started)
        with torch.inference_mode(False), torch.no_grad():
            for names, numbers in _groups(placed):
                self._stage_group(staged, names, numbers, mode)
                if tick is not None:
                    tick()
        return staged

    def commit(self, staged: Staged) -> PatchReport:
        """Put staged patches in place of the previous ones, and give the weights without a patch back as they were."""
        with torch.inference_mode(False), torch.no_grad():
            for name in [
                name for name in self._originals if name not in staged.signatures or name in staged.sides
            ]:
                self._store(name, self._originals.pop(name))
            for name in [name for name in self._signatures if name not in staged.signatures]:
                self._remove_side(name)
            for name, stored in staged.weights.items():
                self._remove_side(name)
                self._originals[name] = staged.originals[name]
                self._store(name, stored)
            for name, side in staged.sides.items():
                self._remove_side(name)
                self._add_side(name, side)
        self.held = staged.placed
        self._signatures = staged.signatures
        self._norms = self._norms.after(staged.norms, staged.placed) if staged.placed else Norms()
        self.state.patched = bool(staged.signatures)
        merged = len(self._originals)
        return replace(
            staged.report,
            merged=merged,
            side=len(self._signatures) - merged,
            host_bytes=self.host_bytes,
            side_bytes=self.side_bytes,
            seconds=time.perf_counter() - staged.started,
        )

    def _stage_group(self, staged: Staged, names: Sequence[str], numbers: Sequence[int], mode: str) -> None:
        """Stage the parameters `names`, which only the patches `numbers` change."""
        patches = [staged.placed[number] for number in numbers]
        as_side = mode != "merge" and self._takes_side(names, patches, at_any_rank=mode == "side")
        signature = (
            as_side,
            *(
                (number, staged.placed[number].strength, staged.placed[number].strength_model)
                for number in numbers
            ),
        )
        staged.signatures.update(dict.fromkeys(names, signature))
        if all(self._signatures.get(name) == signature for name in names) and all(
            number in self.held and self.held[number].parts is staged.placed[number].parts
            for number in numbers
        ):
            return
        if as_side:
            self._stage_sides(staged, names, numbers)
            return
        originals = {name: self._originals.get(name) or self._load(name) for name in names}
        weights = {name: self._matrix(stored) for name, stored in originals.items()}
        for patch in patches:
            self._merge(weights, patch)
        for name in names:
            staged.originals[name] = originals[name]
            staged.weights[name] = _as_stored(weights.pop(name), originals[name])

    def _takes_side(self, names: Sequence[str], patches: Sequence[PlacedPatch], at_any_rank: bool) -> bool:
        """Whether these patches can be, and should be, products beside the layers' own."""
        if any(patch.strength_model != 1.0 for patch in patches):
            return False
        if not goes_beside(patches, self.state.plan.specs):
            return False
        for name in names:
            linear = isinstance(self._owner(name), (nn.Linear, ShardedLinear))
            if not linear or not name.endswith(".weight"):
                return False
            weight = self.model.get_parameter(name)
            costs = [
                side_cost(part, weight.shape)
                for patch in patches
                for part in patch.parts
                if part.parameter == name
            ]
            share = FP8_SHARE if fp8.is_fp8(weight) else SIDE_SHARE
            known = [cost for cost in costs if cost is not None]
            if len(known) < len(costs) or not (at_any_rank or sum(known) <= share * weight.numel()):
                return False
        return True

    def _stage_sides(self, staged: Staged, names: Sequence[str], numbers: Sequence[int]) -> None:
        """Stage what the patches `numbers` make, one after the other, beside the Linear weights `names`."""
        held = {name: self.model.get_parameter(name) for name in names}
        patched = {name: PatchedWeight(weight.shape, weight.device) for name, weight in held.items()}
        for position, number in enumerate(numbers):
            patch = staged.placed[number]
            if is_dora(patch):
                bend(patched, patch, self._factors(staged, patched, numbers[: position + 1]))
                continue
            for part in patch.parts:
                patched[part.parameter].add(part, patch.strength * part.change.scale)
        for name, weight in held.items():
            dtype = self.state.compute_dtype if fp8.is_fp8(weight) else None
            staged.sides[name] = patched[name].side(dtype or weight.dtype)

    def _factors(
        self, staged: Staged, patched: Mapping[str, PatchedWeight], numbers: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """The factors of the last of the patches `numbers`, a DoRA, on what those before it made of the weights.

        What was computed for patches that are in place is taken from there, by all ranks or by none: a set that any of
        them refused leaves nothing behind.
        """
        strengths = tuple((number, staged.placed[number].strength) for number in numbers[:-1])
        parts = [staged.placed[number].parts for number in numbers]
        found = self._norms.known(numbers[-1], strengths, parts)
        if found is None:
            patch = staged.placed[numbers[-1]]
            weights = {part.parameter: self._unpatched(part.parameter) for part in patch.parts}
            found = factors_of(
                patch,
                patched,
                weights,
                self.state.plan.specs,
                self.state.ranks,
                self._norms.rows | staged.norms.rows,
                staged.norms.rows,
            )
            staged.norms.factors[numbers[-1]] = (strengths, parts, found)
        return found

    def _merge(self, weights: dict[str, torch.Tensor], patch: PlacedPatch) -> None:
        """Apply `patch` to the float32 local matrices `weights` [rows, columns] of its parameters, in place."""
        for part in patch.parts:
            weight = weights[part.parameter]
            if patch.strength_model != 1.0:
                for block in _blocks(weight, part):
                    block.mul_(patch.strength_model)
        if is_dora(patch):
            self._merge_dora(weights, patch)
            return
        for part in patch.parts:
            weight = weights[part.parameter]
            change = part.change.factors.matrix(weight.device)
            for block, values in zip(_blocks(weight, part), _pieces(change, part), strict=True):
                if part.change.replaces:
                    block.copy_(values)
                else:
                    block.add_(values, alpha=patch.strength * part.change.scale)

    def _merge_dora(self, weights: dict[str, torch.Tensor], patch: PlacedPatch) -> None:
        """A DoRA patch: the changed weight is divided by its norms and multiplied by the trained magnitudes.

        As ComfyUI does it, norms of rows are those of the weight before the change, norms of columns those after it.
        They are taken over the whole region, so that ranks which hold pieces of a row or column add up their squares.
        """
        ranks, specs = self.state.ranks, self.state.plan.specs
        scale = cast(torch.Tensor, patch.parts[0].change.dora_scale)
        rows = by_rows(patch)
        split = specs[patch.parts[0].parameter].dim
        device = weights[patch.parts[0].parameter].device
        squares = torch.zeros(patch.rows if rows else patch.columns, device=device)
        before, after = [], []
        for part in patch.parts:
            weight = weights[part.parameter]
            current = _collect(weight, part)
            changed = current + part.change.factors.matrix(device).mul_(part.change.scale)
            before.append(current)
            after.append(changed)
            if rows:
                squares.index_add_(0, part.region_rows.to(device), current.square().sum(dim=1))
            else:
                squares.index_add_(0, part.region_columns.to(device), changed.square().sum(dim=0))
        # Whole rows (or columns) lie on one rank when the other dimension is the split one.
        if split is not None and split == (1 if rows else 0):
            squares = ranks.all_reduce(squares)
        norms = squares.sqrt_().add_(torch.finfo(torch.float32).eps)
        factor = scale.to(device, torch.float32).flatten() / norms
        for part, current, changed in zip(patch.parts, before, after, strict=True):
            picked = factor[(part.region_rows if rows else part.region_columns).to(device)]
            changed.mul_(picked.unsqueeze(1) if rows else picked)
            if patch.strength != 1.0:
                changed = changed.sub_(current).mul_(patch.strength).add_(current)
            for block, values in zip(
                _blocks(weights[part.parameter], part), _pieces(changed, part), strict=True
            ):
                block.copy_(values)

    def _unpatched(self, name: str) -> Stored:
        """The parameter `name` as it was loaded: itself, or its original where it is merged."""
        tensor = self.model.get_parameter(name).detach()
        return self._originals.get(name) or Stored(tensor, getattr(self._owner(name), "scales", None))

    def _load(self, name: str) -> Stored:
        """A copy in host memory of the parameter `name` as it is, unpatched."""
        stored = self._unpatched(name)
        return Stored(stored.tensor.to("cpu", copy=True), stored.scales)

    def _store(self, name: str, stored: Stored) -> None:
        """Put `stored` into the parameter `name`, in the storage that it has."""
        self.model.get_parameter(name).detach().copy_(stored.tensor)
        if stored.scales is not None:
            cast(ShardedLinear, self._owner(name)).scales = stored.scales

    def _matrix(self, stored: Stored) -> torch.Tensor:
        """`stored` as a float32 matrix [rows, columns] on the ranks' device, in storage of its own."""
        tensor = stored.tensor.to(self.state.ranks.device)
        if stored.scales is not None:
            tensor = fp8.dequantise(tensor, stored.scales.weight, torch.float32)
        return tensor.to(torch.float32, copy=True).reshape(tensor.shape[0], -1)

    def _owner(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _add_side(self, name: str, side: Side) -> None:
        module = self._owner(name)
        module.add_module("side", side)
        if not isinstance(module, ShardedLinear):
            module.forward = _LinearBeside(module).forward
            self._plain.add(name)

    def _remove_side(self, name: str) -> None:
        module = self._owner(name)
        if name in self._plain:
            self._plain.remove(name)
            del module.forward
            del module.side
        elif isinstance(module, ShardedLinear) and name.endswith(".weight"):
            module.register_module("side", None)


def _groups(placed: Mapping[int, PlacedPatch]) -> list[tuple[list[str], list[int]]]:
    """Parameters that patches tie together, with the patches' numbers in order; the same on every rank."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    for patch in placed.values():
        names = [part.parameter for part in patch.parts]
        for name in names[1:]:
            leader[find(name)] = find(names[0])
    groups: dict[str, tuple[list[str], list[int]]] = {}
    for number, patch in placed.items():
        for part in patch.parts:
            names, numbers = groups.setdefault(find(part.parameter), ([], []))
            if part.parameter not in names:
                names.append(part.parameter)
            if number not in numbers:
                numbers.append(number)
    return list(groups.values())


class _LinearBeside:
    """The forward of a plain Linear that has a side path."""

    def __init__(self, linear: nn.Module):
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, side = self._linear, cast(Side, self._linear.side)
        y = type(linear).forward(linear, side.inputs(x))
        return side.add_to(y, x, cast(torch.Tensor | None, linear.bias))


def _blocks(weight: torch.Tensor, part: Part) -> list[torch.Tensor]:
    """Views of the local matrix `weight` where the part goes, row stretch by row stretch."""
    return [
        weight.narrow(0, row, height).narrow(1, column, width)
        for row, height in part.rows
        for column, width in part.columns
    ]


def _pieces(values: torch.Tensor, part: Part) -> list[torch.Tensor]:
    """`values` [rows, columns] of a part, cut as `_blocks` cuts the weight."""
    return [
        piece
        for band in values.split([height for _, height in part.rows], dim=0)
        for piece in band.split([width for _, width in part.columns], dim=1)
    ]


def _collect(weight: torch.Tensor, part: Part) -> torch.Tensor:
    """What the local matrix holds where the part goes, [rows, columns], in storage of its own."""
    found = torch.empty(len(part.region_rows), len(part.region_columns), device=weight.device)
    for block, piece in zip(_blocks(weight, part), _pieces(found, part), strict=True):
        piece.copy_(block)
    return found


def _as_stored(weight: torch.Tensor, original: Stored) -> Stored:
    """The merged matrix `weight` as its parameter is stored, on the CPU; an fp8 one gets a scale of its own."""
    if original.scales is not None:
        tensor, scale = fp8.quantise(weight.reshape(original.tensor.shape), original.tensor.dtype)
        return Stored(tensor.cpu(), replace(original.scales, weight=scale))
    return Stored(weight.reshape(original.tensor.shape).to(original.tensor.dtype).cpu())
