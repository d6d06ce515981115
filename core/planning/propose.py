"""Propose a plan for a model class from its module shapes and names, on the meta device: no weights are needed.

A proposal is where a contributor begins, not a proof: `comfy-tp verify` is that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..tp.local import LocalAttributes
from ..tp.norm import RMSNormAcrossRanks
from ..tp.plan import (
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Style,
    Submodule,
    WherePresent,
    resolve_plan,
    style_of,
)

# Names of projections in attention modules, as diffusers' and the usual checkpoints have them.
QUERIES = (
    "to_q",
    "to_k",
    "to_v",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "q",
    "k",
    "v",
)
PER_HEAD = ("to_gate_logits", "to_gate_compress", "gate")
OUTPUTS = ("to_out.0", "to_out", "to_add_out", "out_proj", "o_proj", "o")
QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k", "q_norm", "k_norm")
LOCAL = ("heads", "num_heads", "inner_dim", "inner_kv_dim", "kv_inner_dim", "mlp_hidden_dim")
MODULATION_PARTS = 3  # shift, scale and gate: what blocks read; output norms have no gate
MODULATION_SHARE = 0.001  # of all parameters, below which sharding a modulation is not worth a reduce


@dataclass
class Replicated:
    """Parameters that stay whole on every rank. `why` is one clause."""

    key: str
    parameters: int
    why: str


@dataclass
class Proposal:
    """A plan, what it leaves replicated, and its totals. `plan` keys have at most one `*`."""

    model_class: str
    plan: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    replicated: list[Replicated] = field(default_factory=list)
    parameters: int = 0

    @property
    def replicated_parameters(self) -> int:
        """Parameters that every rank would hold."""
        return sum(part.parameters for part in self.replicated)


def meta_model(model_class: type, config: Mapping[str, Any] | None = None) -> nn.Module:
    """A model of the class with its default configuration and `config`'s changes, on the meta device."""
    with torch.device("meta"):
        return model_class(**dict(config or {})).eval()


def propose(model: nn.Module, heads: int | None) -> Proposal:
    """A plan for `model` (meta tensors are enough) with `heads` attention heads, from its shapes and names."""
    proposal = Proposal(type(model).__name__, parameters=count(model))
    seen: set[str] = set()
    for key, block in blocks_of(model):
        found = _block_plan(block, heads, proposal.parameters * MODULATION_SHARE / _repeats(model, key))
        for name, (style, reason) in found.items():
            path = ".".join(part for part in (key, name) if part)
            if path not in seen:
                seen.add(path)
                proposal.plan[path] = style if _everywhere(model, key, name) else WherePresent(style)
                proposal.reasons[path] = reason
    inside = {key.split(".*")[0] for key, _ in blocks_of(model)}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not any(path.startswith(f"{stack}.") for stack in inside):
            large = module.weight.numel() >= proposal.parameters * MODULATION_SHARE
            if large and _is_modulation(path, module, _width(model)):
                proposal.plan[path] = "rowwise_split_input"
                proposal.reasons[path] = _modulation_reason(module)
    proposal.replicated = list(_left(model, proposal.plan, heads))
    return proposal


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks that repeat: for every outermost ModuleList its key with `*` and each different element."""

    def search(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList) and any(count(block) for block in child):
                shapes = set()
                for block in child:
                    shape = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
                    if shape not in shapes:
                        shapes.add(shape)
                        yield f"{path}.*", block
            else:
                yield from search(child, f"{path}.")

    return search(model, "")


def count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _everywhere(model: nn.Module, key: str, name: str) -> bool:
    """Whether every block of a list has a module at `name`, or None there."""
    blocks: Any = model.get_submodule(key.partition(".*")[0])
    parent, _, last = name.rpartition(".")
    owners = [_descend(block, parent) if parent else block for block in blocks]
    return all(owner is not None and hasattr(owner, last or parent) for owner in owners) if name else True


def _repeats(model: nn.Module, key: str) -> int:
    return max(1, len(model.get_submodule(key.partition(".*")[0])))


def _width(model: nn.Module) -> int:
    """The hidden width: the input of most of the Linears' parameters."""
    votes: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            votes[module.in_features] = votes.get(module.in_features, 0) + 1
    return max(votes, key=lambda width: votes[width]) if votes else 0


def _block_plan(block: nn.Module, heads: int | None, least: float) -> dict[str, tuple[Any, str]]:
    """Style and reason for each module of one block, by the module's path in it."""
    plan: dict[str, tuple[Any, str]] = {}
    inner: dict[str, int] = {}
    for path, module in block.named_modules():
        attention = _attention(module, heads)
        if attention:
            inner[path] = attention.pop("inner")
            plan.update({_join(path, name): found for name, found in attention.items()})
    linears = {
        path: module
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear) and path not in plan
    }
    for path, down in linears.items():
        if path in plan or down.in_features <= down.out_features:
            continue
        plan.update(_pair(path, down, linears, inner, plan))
    for path, module in linears.items():
        if path not in plan and module.weight.numel() >= least and _is_modulation(path, module, None):
            plan[path] = ("rowwise_split_input", _modulation_reason(module))
    return plan


def _attention(module: nn.Module, heads: int | None) -> dict[str, Any]:
    """The entries of an attention module, relative to it, and `inner`, its width over all heads; or nothing."""
    queries = [name for name in QUERIES if isinstance(getattr(module, name, None), nn.Linear)]
    fused = [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and "qkv" in name
    ]
    if len(queries) < 3 and not fused:
        return {}
    found: dict[str, Any] = {}
    own = getattr(module, "heads", None) or getattr(module, "num_heads", None) or heads or 1
    if queries:
        found["inner"] = getattr(module, queries[0]).out_features
        for name in queries:
            found[name] = ("colwise", "expands into whole heads")
    for name, linear in fused:
        found["inner"] = getattr(module, "inner_dim", linear.out_features // 3)
        found[name] = _fused(module, linear, found["inner"])
    for name in OUTPUTS:
        child = _descend(module, name)
        if isinstance(child, nn.Linear):
            if child.in_features == found["inner"]:
                found[name] = ("rowwise", "contracts the heads again")
            elif fused and child.in_features > found["inner"]:
                rest = child.in_features - found["inner"]
                found[name] = (
                    PackedRowwiseParallel(sizes=_sizes(module, [found["inner"], rest])),
                    f"takes attention ({found['inner']}) beside feed-forward ({rest})",
                )
    for name in PER_HEAD:
        child = getattr(module, name, None)
        if isinstance(child, nn.Linear) and child.out_features == own:
            found[name] = ("colwise", "one value per head")
    for name in QK_NORMS:
        child = getattr(module, name, None)
        if isinstance(child, nn.RMSNorm) and child.normalized_shape == (found["inner"],):
            found[name] = (RMSNormAcrossRanks(), "norms over all heads, of which a rank has some")
    local = [
        name
        for name in LOCAL
        if isinstance(getattr(module, name, None), int) and getattr(module, name) % own == 0
    ]
    if local:
        found[""] = (LocalAttributes(tuple(local)), "attention code may unflatten by them")
    return found


def _fused(module: nn.Module, linear: nn.Linear, inner: int) -> tuple[Any, str]:
    """A projection that packs q, k, v and perhaps the feed-forward's inputs, recognised by its size."""
    rest = linear.out_features - 3 * inner
    if rest == 0:
        return PackedColwiseParallel((1, 1, 1)), "packs q, k and v"
    hidden = getattr(module, "mlp_hidden_dim", rest)
    parts = [inner] * 3 + [hidden] * (rest // hidden)
    return (
        PackedColwiseParallel(sizes=_sizes(module, parts)),
        f"packs q, k, v and {rest // hidden} feed-forward inputs",
    )


def _sizes(module: nn.Module, parts: list[int]) -> tuple[str, ...]:
    """Attributes of `module` that have the sizes; plain numbers cannot stand in a plan of a whole class."""
    names = []
    for part in parts:
        name = next((name for name in LOCAL if getattr(module, name, None) == part and part), None)
        if name is None:
            return ()
        names.append(name)
    return tuple(names)


def _pair(
    path: str,
    down: nn.Linear,
    linears: Mapping[str, nn.Linear],
    inner: Mapping[str, int],
    plan: Mapping[str, Any],
) -> dict[str, tuple[Any, str]]:
    """The expanding partners of a contracting Linear in the same feed-forward, and itself."""
    parent = path.rpartition(".")[0]
    root = parent.rpartition(".")[0] if parent.rpartition(".")[2] == "net" else parent
    hidden = down.in_features
    ups = {
        name: linear
        for name, linear in linears.items()
        if name != path
        and name not in plan
        and linear.in_features == down.out_features
        and (name.startswith(f"{root}.") if root else "." not in name)
    }
    plain = {name: linear for name, linear in ups.items() if linear.out_features == hidden}
    gated = {name: linear for name, linear in ups.items() if linear.out_features == 2 * hidden}
    if plain:
        return {
            **{name: ("colwise", f"expands to {hidden}") for name in plain},
            path: ("rowwise", f"contracts {hidden} again"),
        }
    if gated:
        name = next(iter(gated))
        return {
            name: (PackedColwiseParallel((1, 1)), f"packs gate and up of {hidden} each"),
            path: ("rowwise", f"contracts {hidden} again"),
        }
    for attention, width in inner.items():
        rest = hidden - width
        beside = {name: linear for name, linear in ups.items() if linear.out_features == rest > 0}
        if beside:
            sizes = (f"{attention}.inner_dim", "mlp_hidden_dim") if attention else ()
            return {
                **{name: ("colwise", f"expands to {rest}") for name in beside},
                path: (
                    PackedRowwiseParallel(sizes=sizes),
                    f"takes attention ({width}) beside feed-forward ({rest})",
                ),
            }
    return {}


def _is_modulation(path: str, linear: nn.Linear, width: int | None) -> bool:
    """Whether a Linear makes shifts, scales and gates from an embedding, told by its name and its proportions."""
    names = path.lower()
    named = any(word in names for word in ("mod", "ada", "norm")) and "embed" not in names
    parts = linear.out_features // max(1, linear.in_features)
    exact = linear.out_features % linear.in_features == 0 or width is None
    return named and parts >= MODULATION_PARTS and exact


def _modulation_reason(linear: nn.Linear) -> str:
    return f"reads one embedding per step for {linear.out_features} shifts, scales and gates"


def _left(model: nn.Module, plan: Mapping[str, Any], heads: int | None) -> Iterator[Replicated]:
    """What the plan leaves replicated, blocks of a list together, largest first."""
    planned = set(resolve_plan(model, plan, 1).styles) if plan else set()
    groups: dict[str, tuple[int, str]] = {}
    for path, module in model.named_modules():
        if path in planned and not isinstance(style_of_path(model, plan, path), LocalAttributes):
            continue
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if not size:
            continue
        key = _generic(model, path) or "(the model's own parameters)"
        total, why = groups.get(key, (0, _why(path, module, model)))
        groups[key] = (total + size, why)
    for key, (size, why) in sorted(groups.items(), key=lambda item: -item[1][0]):
        yield Replicated(key, size, why)


def style_of_path(model: nn.Module, plan: Mapping[str, Any], path: str) -> Style:
    """The style of the module at `path`, which the plan names."""
    generic = _generic(model, path)
    return style_of(plan.get(path, plan.get(generic, "colwise")), path)


def _generic(model: nn.Module, path: str) -> str:
    """`path` with the index in the outermost ModuleList as `*`."""
    atoms = path.split(".") if path else []
    module = model
    for index, atom in enumerate(atoms):
        if isinstance(module, nn.ModuleList):
            return ".".join([*atoms[:index], "*", *atoms[index + 1 :]])
        module = getattr(module, atom)
    return path


def _why(path: str, module: nn.Module, model: nn.Module) -> str:
    name = type(module).__name__
    if not isinstance(module, nn.Linear):
        if "norm" in name.lower():
            return "a norm: a few numbers, needed whole"
        return (
            f"a {name}, not a Linear" if list(module.children()) == [] else "a table of modulation parameters"
        )
    last = path.split(".")[-1]
    if path.split(".")[0] in ("norm_out", "proj_out", "final_layer", "audio_proj_out") or last == "proj_out":
        return "a last layer: its output is the model's own"
    parts = module.out_features / module.in_features
    if any(word in path for word in ("time", "guidance", "pooled")):
        return "an embedding of the timestep or guidance: read once per step"
    if "embed" in path or path in ("img_in", "txt_in", "proj_in", "audio_proj_in") or "caption" in path:
        return "an input projection: its output is needed whole"
    if parts >= MODULATION_PARTS:
        return "a modulation too small to be worth a reduce"
    return "no Linear beside it expands or contracts with it"


def compare_plans(model: nn.Module, proposed: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One line per difference between two plans, resolved on `model`; empty where they lay out the same."""
    first, second = (resolve_plan(model, plan, 1) for plan in (proposed, ours))
    lines: dict[str, None] = {}
    for path in {**first.styles, **second.styles}:
        mine, other = first.styles.get(path), second.styles.get(path)
        key = _generic(model, path)
        if mine is None:
            lines[f"{key}: ours is {other}, the proposal leaves it out"] = None
        elif other is None:
            lines[f"{key}: the proposal is {mine}, ours leaves it out"] = None
        else:
            submodule = Submodule(
                model.get_submodule(path), path, model.get_submodule(path.rpartition(".")[0])
            )
            if type(mine) is not type(other) or mine.specs(submodule, 1) != other.specs(submodule, 1):
                lines[f"{key}: the proposal is {mine}, ours {other}"] = None
            elif isinstance(mine, LocalAttributes) and isinstance(other, LocalAttributes):
                if set(mine.names) != set(other.names):
                    lines[f"{key}: the proposal is {mine}, ours {other}"] = None
    return list(lines)


def legal(model: nn.Module, plan: Mapping[str, Any], heads: int | None, most: int = 16) -> list[int]:
    """The degrees up to `most` at which heads and every packed block divide."""
    sizes = [block for spec in resolve_plan(model, plan, 1).specs.values() for block in spec.blocks]
    divisor = math.gcd(*sizes, heads or 0) if sizes else (heads or 1)
    return [degree for degree in range(1, most + 1) if divisor % degree == 0]


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)


def _descend(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for atom in path.split("."):
        found = getattr(found, atom, None)
    return found if isinstance(found, nn.Module) else None
