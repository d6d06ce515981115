"""RMSNorm over a width that is split among the ranks, as video models norm q and k over all their heads at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .collectives import Ranks
from .plan import Style, Submodule
from .shard import ShardSpec


@dataclass(frozen=True)
class RMSNormAcrossRanks(Style):
    """An `nn.RMSNorm` whose input is a col-wise slice: the mean square is taken over all ranks.

    `weight` [width] is split like the rows of the projection before it. One all-reduce of one number per token.
    """

    reduces = 1

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        """`weight` is split along its one dimension; a norm without a weight has nothing to lay out."""
        module, path, _ = submodule
        if not isinstance(module, nn.RMSNorm) or len(module.normalized_shape) != 1:
            raise PlanError(
                f"'{path}' is a {type(module).__name__}; {self} takes an nn.RMSNorm over one dimension. A norm over "
                f"head_dim stays out of the plan: every rank holds whole heads."
            )
        spec = ShardSpec.split(module.normalized_shape, degree, 0, name=f"{path}.weight")
        return {"weight": spec} if module.weight is not None else {}

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        """This rank's `ShardedRMSNorm`."""
        return ShardedRMSNorm(module, specs, ranks)

    def __str__(self) -> str:
        return "RMSNormAcrossRanks()"


class ShardedRMSNorm(nn.Module):
    """One rank's part of an `nn.RMSNorm` over `width` channels: takes x [..., width / degree], norms over all."""

    def __init__(self, norm: nn.RMSNorm, specs: Mapping[str, ShardSpec], ranks: Ranks):
        super().__init__()
        self.specs = dict(specs)
        self.ranks = ranks
        self.width = norm.normalized_shape[0]
        self.eps = norm.eps
        self.joint: JointSums | None = None
        local = None
        if norm.weight is not None:
            full = norm.weight
            local = nn.Parameter(
                specs["weight"].shard(full.detach(), ranks.rank), requires_grad=full.requires_grad
            )
        self.register_parameter("weight", local)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.joint.total_of(self, x) if self.joint is not None else None
        if total is None:
            total = self.ranks.all_reduce(square_sum(x))
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normed = x.float() * torch.rsqrt(total / self.width + eps)
        if self.weight is not None:
            normed = normed * self.weight.float()
        return normed.to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, local={self.width // self.ranks.degree}, eps={self.eps}"


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of squares over the last dimension of x [..., C], float32 [..., 1]."""
    return x.float().square().sum(dim=-1, keepdim=True)


class JointSums:
    """One all-reduce for norms whose inputs are ready at the same time, such as those of q and k.

    Each norm is paired with the projection whose output it takes. The projections' outputs are noted as they are
    made; the first norm called reduces the sums of all of them, and the others find theirs. A norm that is called
    with anything else than its projection's own output falls back to a reduce of its own.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, ShardedRMSNorm]]):
        self.norms = [norm for _, norm in pairs]
        self.made: dict[int, torch.Tensor] = {}
        self.totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, (projection, norm) in enumerate(pairs):
            projection.register_forward_hook(_Note(self, index))
            norm.joint = self

    def total_of(self, norm: ShardedRMSNorm, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of squares of x over all ranks, or None when x is not what the norm's projection made."""
        index = self.norms.index(norm)
        source, total = self.totals.pop(index, (None, None))
        if source is x:
            return total
        if self.made.get(index) is not x or len(self.made) < len(self.norms):
            return None
        sums = {number: square_sum(output) for number, output in sorted(self.made.items())}
        joined = norm.ranks.all_reduce(torch.cat([value.flatten() for value in sums.values()]))
        parts = joined.split([value.numel() for value in sums.values()])
        for (number, value), part in zip(sums.items(), parts, strict=True):
            self.totals[number] = (self.made[number], part.view_as(value))
        self.made.clear()
        return self.totals.pop(index)[1]


@dataclass(frozen=True)
class _Note:
    """Tells `joint` what a projection made. An object, so that a copy of a model notes in the copy's own sums."""

    joint: JointSums
    index: int

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.joint.made[self.index] = output
