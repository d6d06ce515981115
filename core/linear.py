"""Linear layers that hold one rank's shard as plain local tensors.

A col-wise layer makes a slice of the output, a row-wise layer a partial sum that one in-place all-reduce joins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import quant
from .errors import PlanError
from .plan import Colwise, LinearStyle, Rowwise, RowwiseSplitInput
from .ranks import Ranks
from .shard import ShardSpec


class ShardedLinear(nn.Module):
    """One rank's part of an `nn.Linear`. `weight` [out, in] and `bias` [out] have the local shapes of their specs.

    `specs` are the layouts of the parameters by name; `in_features` and `out_features` are local. With `scales` the
    weight is fp8 and stays so. `side` is a low-rank product added to the weight's own (a LoRA that is not merged).
    """

    def __init__(self, linear: nn.Linear, specs: dict[str, ShardSpec], ranks: Ranks):
        super().__init__()
        self.specs = specs
        self.ranks = ranks
        self.scales: quant.Scales | None = None
        self.register_module("side", None)
        self.out_features, self.in_features = specs["weight"].local_shape
        for name in ("weight", "bias"):
            full = getattr(linear, name)
            local = None
            if full is not None:
                # On the meta device only the shape changes; from memory this rank's slice is taken.
                local = nn.Parameter(
                    specs[name].shard(full.detach(), ranks.rank), requires_grad=full.requires_grad
                )
            self.register_parameter(name, local)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] times the local weight, plus `bias` [out] where given: [..., out]."""
        if self.scales is not None:
            y = quant.product(x, self.weight, self.scales, bias)
        else:
            y = F.linear(x, self.weight, bias)
        return y if self.side is None else self.side.add_to(y, x)

    def extra_repr(self) -> str:
        spec = self.specs["weight"]
        return f"in={self.in_features}, out={self.out_features}, dim={spec.dim}, blocks={list(spec.blocks)}"


class ReplicatedLinear(ShardedLinear):
    """A Linear that every rank holds whole, where its weight is fp8: x [..., in] -> [..., out]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)


class ColwiseLinear(ShardedLinear):
    """x [..., in] (whole) -> this rank's slice of the output [..., out / degree]; the bias is split with the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)


class RowwiseLinear(ShardedLinear):
    """x [..., in / degree] (this rank's slice) -> the whole output [..., out], joined by one all-reduce.

    The replicated bias is added once, after the reduce (R35).
    """

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum, before the reduce and without bias. Lets a block join several reduces in one."""
        return self.product(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ranks.all_reduce(self.partial(x))
        return y if self.bias is None else y.add_(self.bias)


class RowwiseSplitInputLinear(RowwiseLinear):
    """Row-wise with a replicated input x [..., in], of which this rank's slice is taken first (R26)."""

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum from the whole input.

        Raises `PlanError` on every rank for an input of another width, such as a slice left by a col-wise layer.
        """
        spec = self.specs["weight"]
        if x.shape[-1] != spec.shape[1]:
            raise PlanError(
                f"A 'rowwise_split_input' layer takes its whole input of {spec.shape[1]} features on every rank, got "
                f"{x.shape[-1]}. After a col-wise layer use 'rowwise'."
            )
        ranges = spec.ranges(self.ranks.rank)
        parts = [x[..., start:stop] for start, stop in ranges]
        return self.product(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))


def layer_class(style: LinearStyle) -> type[ShardedLinear]:
    """The layer that runs `style`."""
    if isinstance(style, RowwiseSplitInput):
        return RowwiseSplitInputLinear
    if isinstance(style, Rowwise):
        return RowwiseLinear
    if isinstance(style, Colwise):
        return ColwiseLinear
    raise TypeError(f"No layer runs the style {style}.")
