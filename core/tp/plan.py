"""The plan language: module-name patterns mapped to sharding styles, resolved into one `ShardSpec` per parameter.

Source: diffusers tensor-parallelism page, "Add tensor parallelism to a model" (requirements R21-R35). Beyond it: the
entries of `local` and `norm` (attributes that become local, a sliced output, a norm across ranks), entries for
modules that only some configurations have (`WherePresent`), and packed blocks named by attributes (`sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ..errors import PlanError
from .shard import ShardSpec

if TYPE_CHECKING:
    from .collectives import Ranks


class Submodule(NamedTuple):
    """Where a plan entry points: `module` at `path`, an attribute of `parent`."""

    module: nn.Module
    path: str
    parent: nn.Module


@dataclass(frozen=True)
class Style:
    """How the module that a plan key names is shared among the ranks.

    `reduces` is the number of all-reduces that one call of the module makes.
    """

    reduces = 0

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        """The `ShardSpec` of each parameter of the module that this style lays out, by the parameter's own name.

        Raises `PlanError`, naming the path, when the module cannot be sharded in this style at this degree.
        """
        raise NotImplementedError

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        """What stands in the place of `module` on this rank: a new module, or `module` itself, changed.

        `specs` are those of its parameters by their own names. Parameters on the meta device stay there.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LinearStyle(Style):
    """A style of `nn.Linear`: `dim` is the dimension of `weight` that is split."""

    blocks: tuple[int, ...] | None = None

    dim = 0
    blocks_attribute = ""

    def block_sizes(self, submodule: Submodule) -> list[int] | None:
        """Absolute sizes of the packed blocks along `dim`, or None for a plain style."""
        return None

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        """`weight` is split along `dim`; a bias is split with the rows of a col-wise weight, else replicated (R35)."""
        module, path, _ = submodule
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None:
            raise PlanError(
                f"'{path}' is a {type(module).__name__}; the style {self} shards nn.Linear only. Leave it out of the "
                f"plan, and it is replicated."
            )
        blocks = self.block_sizes(submodule)
        specs = {"weight": ShardSpec.split(weight.shape, degree, self.dim, blocks, name=f"{path}.weight")}
        if module.bias is not None:
            shape = module.bias.shape
            specs["bias"] = (
                ShardSpec.split(shape, degree, 0, blocks, name=f"{path}.bias")
                if self.dim == 0
                else ShardSpec.replicated(shape, degree)
            )
        return specs

    def __str__(self) -> str:
        return STYLE_NAMES.get(type(self), type(self).__name__)


@dataclass(frozen=True)
class Colwise(LinearStyle):
    """Splits the output features (dim 0 of `weight`); each rank computes a slice of the output (R24)."""


@dataclass(frozen=True)
class Rowwise(LinearStyle):
    """Splits the input features (dim 1 of `weight`); partial sums are joined by one all-reduce (R25)."""

    dim = 1
    reduces = 1


@dataclass(frozen=True)
class RowwiseSplitInput(Rowwise):
    """Row-wise with a replicated input, of which the layer takes its own slice (R26)."""


class _Packed:
    """Shared by the packed styles: where the block sizes come from (R29-R31)."""

    blocks: tuple[int, ...] | None
    sizes: tuple[str, ...]
    dim: int
    blocks_attribute: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks) if self.blocks is not None else None)
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def block_sizes(self, submodule: Submodule) -> list[int]:
        module, path, parent = submodule
        size = module.weight.shape[self.dim]
        if self.blocks is not None:
            return proportional_blocks(size, self.blocks, path)
        absolute = getattr(module, self.blocks_attribute, None)
        if not absolute and self.sizes:
            absolute = [_attribute(parent, name, path) for name in self.sizes]
        if not absolute:
            raise PlanError(
                f"'{path}' uses {type(self).__name__} but has no blocks: pass `blocks` to the style, or set "
                f"`{self.blocks_attribute}` on the Linear in the model's __init__."
            )
        return proportional_blocks(size, absolute, path)


@dataclass(frozen=True)
class PackedColwiseParallel(_Packed, Colwise):
    """Col-wise for a Linear that packs several tensors along its rows; each block is split on its own (R29).

    `blocks` are proportional whole numbers whose sum divides the row count, such as (1, 1) for the halves of a
    SwiGLU. Without them the Linear carries absolute sizes in `_tp_packed_col_blocks` (R31), and where it does not
    (diffusers older than its own plans) `sizes` names the attributes of the Linear's parent that hold them.
    """

    sizes: tuple[str, ...] = ()

    blocks_attribute = "_tp_packed_col_blocks"


@dataclass(frozen=True)
class PackedRowwiseParallel(_Packed, Rowwise):
    """Row-wise for a Linear whose input concatenates several tensors; absolute sizes in `_tp_packed_row_blocks`."""

    sizes: tuple[str, ...] = ()

    blocks_attribute = "_tp_packed_row_blocks"


@dataclass(frozen=True)
class WherePresent:
    """A plan value for a module that only some configurations of the class have: no error where it is missing.

    A module attribute that is None needs no such mark: it is skipped.
    """

    style: Any


STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "rowwise_split_input": RowwiseSplitInput(),
}
STYLE_NAMES: dict[type, str] = {type(style): name for name, style in STYLES.items()}
PACKED_STYLES: dict[str, type] = {
    "PackedColwiseParallel": PackedColwiseParallel,
    "PackedRowwiseParallel": PackedRowwiseParallel,
}


def proportional_blocks(size: int, blocks: Sequence[int], path: str) -> list[int]:
    """Absolute block sizes that sum to `size` from proportional `blocks` (R30).

    Absolute sizes are their own proportions. Raises `PlanError` when a block is not a positive whole number or their
    sum does not divide `size`.
    """
    if any(not isinstance(block, int) or block < 1 for block in blocks):
        raise PlanError(f"'{path}': packed blocks must be positive whole numbers, got {list(blocks)}.")
    total = sum(blocks)
    if size % total:
        raise PlanError(
            f"'{path}': the sum {total} of the packed blocks {list(blocks)} does not divide the dimension {size}. Give "
            f"proportions whose sum divides it, or absolute sizes that sum to it."
        )
    return [block * (size // total) for block in blocks]


def _attribute(module: nn.Module, name: str, path: str) -> int:
    """The whole number at the dotted attribute `name` of `module`, the parent of the Linear at `path`."""
    found: Any = module
    for atom in name.split("."):
        found = getattr(found, atom, None)
    if not isinstance(found, int):
        raise PlanError(
            f"'{path}': its packed blocks are sized by the attribute '{name}' of {type(module).__name__}, which is "
            f"{found!r} instead of a whole number."
        )
    return found


def style_of(value: Any, key: str) -> Style:
    """The style that a plan value means: one of ours, a name, or diffusers' own packed markers."""
    if isinstance(value, WherePresent):
        return style_of(value.style, key)
    if isinstance(value, Style):
        return value
    if isinstance(value, str) and value in STYLES:
        return STYLES[value]
    packed = PACKED_STYLES.get(type(value).__name__)
    if packed is not None and hasattr(value, "blocks"):
        return packed(value.blocks)
    raise PlanError(
        f"Unknown tensor-parallel style {value!r} for '{key}'. Expected one of {', '.join(STYLES)}, or a "
        f"PackedColwiseParallel or PackedRowwiseParallel."
    )


@dataclass
class ResolvedPlan:
    """A plan resolved on one model at one degree.

    `styles` maps module paths to styles, `callers` to the number of paths that lead to the module (more than one where
    blocks share an instance); `specs` holds one `ShardSpec` for every parameter of the model, replicated ones
    included (R34), by the name that `named_parameters()` gives.
    """

    degree: int
    styles: dict[str, Style] = field(default_factory=dict)
    callers: dict[str, int] = field(default_factory=dict)
    specs: dict[str, ShardSpec] = field(default_factory=dict)

    @property
    def all_reduces(self) -> int:
        """All-reduces of one forward when every caller runs its planned module once and none are merged."""
        return sum(style.reduces * self.callers[path] for path, style in self.styles.items())


def resolve_plan(model: nn.Module, plan: Mapping[str, Any], degree: int) -> ResolvedPlan:
    """Resolve `plan` on `model` (meta tensors are enough) for `degree` ranks.

    Raises `PlanError` for a key with two `*`, a prefix that is no ModuleList, a key that names no module, an unknown
    style, missing or ill-fitting blocks, and any block that `degree` does not divide. Nothing is changed.
    """
    names = {id(module): name for name, module in model.named_modules()}
    keys: dict[str, str] = {}
    callers: dict[str, set[str]] = {}
    resolved = ResolvedPlan(degree)
    for key, value in plan.items():
        style = style_of(value, key)
        for submodule in _submodules(model, key, optional=isinstance(value, WherePresent)):
            path = names[id(submodule.module)]
            if resolved.styles.get(path, style) != style:
                raise PlanError(
                    f"Plan keys '{keys[path]}' and '{key}' both name the module '{path}' but give it different styles "
                    f"({resolved.styles[path]} and {style})."
                )
            keys[path] = key
            callers.setdefault(path, set()).add(submodule.path)
            resolved.styles[path] = style
            for parameter, spec in style.specs(submodule._replace(path=path), degree).items():
                resolved.specs[f"{path}.{parameter}" if path else parameter] = spec
    resolved.callers = {path: len(found) for path, found in callers.items()}
    for name, parameter in model.named_parameters():
        resolved.specs.setdefault(name, ShardSpec.replicated(parameter.shape, degree))
    return resolved


def check_heads(heads: int | None, degree: int, model_name: str) -> None:
    """Raise `PlanError` unless `degree` divides the attention `heads` (R3)."""
    if heads is not None and heads % degree:
        legal = ", ".join(str(d) for d in legal_degrees(heads))
        raise PlanError(
            f"tp_degree={degree} must divide the {heads} attention heads of {model_name}. Legal degrees: {legal}."
        )


def legal_degrees(heads: int, most: int = 16) -> list[int]:
    """The degrees up to `most` that divide `heads`."""
    return [degree for degree in range(1, min(heads, most) + 1) if heads % degree == 0]


def _submodules(model: nn.Module, key: str, *, optional: bool) -> Iterator[Submodule]:
    """The submodules that a plan key names: one per element of the ModuleList before `*`, or the one at its path."""
    if key.count("*") > 1:
        raise PlanError(f"Plan key '{key}' has more than one '*'. A key may hold at most one wildcard.")
    if "*" not in key:
        found = _descend(model, key, key, optional=optional)
        if found is not None:
            yield found
        return
    prefix, _, suffix = (part.strip(".") for part in key.partition("*"))
    container = _descend(model, prefix, key, optional=optional)
    if container is None:
        return
    if not isinstance(container.module, nn.ModuleList):
        raise PlanError(
            f"The part before '*' in plan key '{key}' must be an nn.ModuleList, but '{prefix}' is a "
            f"{type(container.module).__name__}."
        )
    for index, block in enumerate(container.module):
        found = _descend(block, suffix, key, optional=optional)
        if found is not None:
            parent = found.parent if suffix else container.module
            path = ".".join(atom for atom in (prefix, str(index), suffix) if atom)
            yield Submodule(found.module, path, parent)


def _descend(module: nn.Module, path: str, key: str, *, optional: bool) -> Submodule | None:
    """The submodule at `path` below `module` (list indices and dictionary keys included); None where it is absent.

    A submodule that the class sets to None is absent; one it does not know is an error unless `optional`.
    """
    parent = found = module
    for atom in path.split(".") if path else []:
        child = getattr(found, atom, None)
        if child is None and (optional or hasattr(found, atom)):
            return None
        if not isinstance(child, nn.Module):
            raise PlanError(
                f"Plan key '{key}' names no module: a {type(found).__name__} has no submodule '{atom}'. Check the key "
                f"against the model's named_modules()."
            )
        parent, found = found, child
    return Submodule(found, path, parent)
