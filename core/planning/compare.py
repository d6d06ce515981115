"""Compare a sharded model with its unsharded self, block by block: same weights, same inputs, one forward each.

"Validate a plan numerically, not by eye: a misplaced col-wise or row-wise entry usually runs, and gives a plausible
but wrong image." Source: diffusers tensor-parallelism page, "Constraints and verification" (R36).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, UnsupportedError
from ..models import Architecture
from ..tp.apply import ShardedState, apply_plan
from ..tp.collectives import Ranks
from ..tp.plan import ResolvedPlan, check_heads, resolve_plan

# Largest relative L2 error that rounding explains. Sharding adds the same products in another order, so each block
# adds about one rounding of its dtype; the mildest wrong plan of the tests is off by more than 1e-2 in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Row:
    """How far one block's output is from the unsharded one. `rel_l2` and `max_abs` are over all its tensors."""

    name: str
    rel_l2: float
    max_abs: float


@dataclass
class Comparison:
    """The outcome of one check. `rows` are in the order of execution, the last one is the model's output."""

    tolerance: float
    rows: list[Row] = field(default_factory=list)
    failure: str | None = None
    failed_in: str | None = None
    collectives: int = 0
    predicted: int = 0
    rank_spread: float = 0.0

    @property
    def first_wrong(self) -> Row | None:
        """The first block whose error is above the tolerance."""
        return next((row for row in self.rows if not row.rel_l2 <= self.tolerance), None)

    @property
    def passed(self) -> bool:
        """Whether everything ran, every row is within the tolerance, and the ranks agree on the output."""
        return (
            self.failure is None
            and bool(self.rows)
            and self.first_wrong is None
            and self.rank_spread <= self.tolerance
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain figures, for JSON."""
        wrong = self.first_wrong
        return {
            **asdict(self),
            "passed": self.passed,
            "first_wrong": wrong.name if wrong else None,
            "rel_l2": self.rows[-1].rel_l2 if self.rows else None,
            "max_abs": self.rows[-1].max_abs if self.rows else None,
        }


def example_model(
    architecture: Architecture, example: str, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A small model of `architecture` whose every parameter is drawn from `seed`; the same on every rank.

    Norm weights are drawn too: at their usual value of one, a wrongly sliced norm would go unnoticed.
    """
    if example not in architecture.examples:
        raise UnsupportedError(
            f"{architecture.name} has no example '{example}'. It has: {', '.join(architecture.examples)}."
        )
    config = architecture.examples[example]
    model_class: Any = architecture.load_class(config)
    model = model_class.from_config(dict(config)).eval()
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            values /= parameter[0].numel() ** 0.5
        else:
            values = 0.2 * values + bool(parameter.numel() and parameter.detach().eq(1).all())
        parameter.data = values.requires_grad_(False)
    return cast(model, dtype)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters in `dtype`, except those of modules that the model keeps in float32 (`_keep_in_fp32_modules`)."""
    keep = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, parameter in model.named_parameters():
        kept = any(module in name.split(".") for module in keep)
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
        parameter.requires_grad_(False)
    return model


def example_inputs(
    architecture: Architecture,
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The arguments of one forward, drawn from `seed` on the CPU; token and pooled states in `dtype`."""
    if architecture.inputs is None:
        raise UnsupportedError(
            f"{architecture.name} describes no example inputs, so it cannot be compared. Add `inputs` to its "
            f"Architecture (docs/adding-a-model.md)."
        )
    made = architecture.inputs(config, torch.Generator().manual_seed(seed))
    moved = {}
    for name, value in made.items():
        if isinstance(value, torch.Tensor):
            value = value.to(device)
            if value.is_floating_point() and ("hidden_states" in name or "pooled" in name):
                value = value.to(dtype)
        moved[name] = value
    return moved


def watched(model: nn.Module, skip: Collection[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """The parts whose outputs are compared: the model's children, of lists every element. `skip` names none of them."""

    def parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                yield from parts(child, f"{path}.")
            elif path not in skip:
                yield path, child

    return parts(model, "")


class Recording:
    """Runs a model once and keeps what its parts put out, as float32 tensors on the CPU, in order of execution."""

    def __init__(self, model: nn.Module, skip: Collection[str] = ()):
        self.model = model
        self.outputs: list[tuple[str, list[torch.Tensor]]] = []
        self.running: list[str] = []
        self._skip = skip

    def run(self, inputs: Mapping[str, Any]) -> None:
        """One forward. What it raises passes through; `running` then names the part it was in, innermost last."""
        handles = []
        for name, part in watched(self.model, self._skip):
            handles.append(part.register_forward_pre_hook(self._enter(name)))
            handles.append(part.register_forward_hook(self._leave(name)))
        try:
            with torch.no_grad():
                output = self.model(**inputs, return_dict=False)
        finally:
            for handle in handles:
                handle.remove()
        self.outputs.append(("output", tensors_of(output)))

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.running.append(name)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()
            self.outputs.append((name, tensors_of(output)))

        return hook


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors in a module's output, copied to float32 on the CPU."""
    if isinstance(output, torch.Tensor):
        real = torch.view_as_real(output) if output.is_complex() else output
        return [real.detach().to("cpu", torch.float32, copy=True)]
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in tensors_of(part)]
    return []


def compare(reference: Recording, sharded: Recording, comparison: Comparison) -> Comparison:
    """Fill `comparison.rows` from two recordings of the same model and inputs."""
    for (name, expected), (other, found) in zip(reference.outputs, sharded.outputs, strict=False):
        if name != other:
            comparison.failure = f"The sharded model runs '{other}' where the unsharded one runs '{name}'."
            return comparison
        shapes = [list(tensor.shape) for tensor in expected], [list(tensor.shape) for tensor in found]
        if shapes[0] != shapes[1]:
            comparison.failure = f"Its output has shapes {shapes[1]} instead of {shapes[0]}."
            comparison.failed_in = name
            return comparison
        if expected:
            joined = [torch.cat([tensor.flatten() for tensor in side]) for side in (expected, found)]
            difference = joined[1] - joined[0]
            norm = joined[0].double().norm().clamp_min(1e-30)
            comparison.rows.append(
                Row(name, (difference.double().norm() / norm).item(), difference.abs().max().item())
            )
    return comparison


def resolved_for(
    model: nn.Module, architecture: Architecture, degree: int, plan: Mapping[str, Any] | None = None
) -> ResolvedPlan:
    """`plan`, or the architecture's own, on `model` at `degree`. Heads and blocks are checked."""
    check_heads(architecture.heads(getattr(model, "config", {})), degree, type(model).__name__)
    return resolve_plan(model, plan if plan is not None else architecture.plan_of(model), degree)


def compare_on_ranks(
    model: nn.Module,
    inputs: Mapping[str, Any],
    ranks: Ranks,
    architecture: Architecture,
    *,
    plan: Mapping[str, Any] | None = None,
    tolerance: float,
    reference: Recording | None = None,
) -> Comparison:
    """Run `model` (whole, in memory, the same on every rank) unsharded and then sharded, and compare.

    Every rank calls it; the model is sharded in place. `reference` replaces the unsharded run.
    """
    resolved = resolved_for(model, architecture, ranks.degree, plan)
    if reference is None:
        reference = Recording(model, resolved.styles)
        reference.run(inputs)
    apply_plan(model, resolved, ranks, architecture)
    return compare_sharded(model, inputs, ranks, tolerance=tolerance, reference=reference)


def compare_sharded(
    model: nn.Module,
    inputs: Mapping[str, Any],
    ranks: Ranks,
    *,
    tolerance: float,
    reference: Recording | None,
) -> Comparison:
    """Run an already sharded `model` and compare it with `reference`, which rank 0 alone needs."""
    state: ShardedState = model.tensor_parallel
    comparison = Comparison(tolerance, predicted=state.all_reduces(model))
    sharded = Recording(model, state.plan.styles)
    before = ranks.collectives
    try:
        sharded.run(inputs)
    except (RuntimeError, ValueError, IndexError, AttributeError, AssertionError) as error:
        comparison.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        comparison.failed_in = sharded.running[-1] if sharded.running else None
        return comparison
    comparison.collectives = ranks.collectives - before
    comparison.rank_spread = spread(sharded.outputs[-1][1], ranks)
    return compare(reference, sharded, comparison) if reference is not None else comparison


def spread(outputs: list[torch.Tensor], ranks: Ranks) -> float:
    """Relative L2 distance of this rank's outputs from the mean over the ranks, the largest of all ranks."""
    if ranks.degree == 1:
        return 0.0
    import torch.distributed as dist

    own = torch.cat([tensor.flatten() for tensor in outputs]).to(ranks.device)
    mean = own.clone()
    dist.all_reduce(mean, group=ranks.group)
    mean /= ranks.degree
    distance = ((own - mean).norm() / mean.norm().clamp_min(1e-30)).reshape(1)
    dist.all_reduce(distance, op=dist.ReduceOp.MAX, group=ranks.group)
    return distance.item()


def moved(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs with their tensors on `device`."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }


def plan_from_json(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan from its JSON form: a style's name, or a list of the style class's name and its arguments."""
    from ..tp.local import LocalAttributes, SlicedOutput
    from ..tp.norm import RMSNormAcrossRanks
    from ..tp.plan import PackedColwiseParallel, PackedRowwiseParallel, WherePresent

    classes: dict[str, Any] = {
        made.__name__: made
        for made in (
            PackedColwiseParallel,
            PackedRowwiseParallel,
            LocalAttributes,
            SlicedOutput,
            RMSNormAcrossRanks,
            WherePresent,
        )
    }

    def style(key: str, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value and value[0] in classes:
            if value[0] == "WherePresent":
                return WherePresent(style(key, value[1]))
            return classes[value[0]](*(frozen(part) for part in value[1:]))
        raise PlanError(
            f"Plan entry '{key}': {value!r} is neither a style's name nor [style class, arguments]."
        )

    def frozen(value: Any) -> Any:
        return tuple(frozen(part) for part in value) if isinstance(value, list) else value

    return {key: style(key, value) for key, value in plan.items()}
