"""Linear layers that hold one rank's shard as plain local tensors.

A col-wise layer makes a slice of the output, a row-wise layer a partial sum that one in-place all-reduce joins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import PlanError
from . import fp8
from .collectives import Ranks
from .plan import Colwise, LinearStyle, Rowwise, RowwiseSplitInput
from .shard import ShardSpec


class ShardedLinear(nn.Module):
    """One rank's part of an `nn.Linear`. `weight` [out, in] and `bias` [out] have the local shapes of their specs.

    `specs` are the layouts of the parameters by name; `in_features` and `out_features` are local. With `scales` the
    weight is fp8 and stays so. `side` is what stands beside the weight (a LoRA that is not merged), see `side.Side`.
    """

    def __init__(self, linear: nn.Linear, specs: dict[str, ShardSpec], ranks: Ranks):
        super().__init__()
        self.specs = specs
        self.ranks = ranks
        self.scales: fp8.Scales | None = None
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
        inputs = x if self.side is None else self.side.inputs(x)
        if self.scales is not None:
            y = fp8.product(inputs, self.weight, self._scales_of(inputs, x), bias)
        else:
            y = F.linear(inputs, self.weight, bias)
        return y if self.side is None else self.side.add_to(y, x, bias)

    def product_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write x [..., in] times the local weight into `out` [..., out], whose rows may lie apart in memory."""
        rows, target = x.reshape(-1, self.in_features), out.view(-1, self.out_features)
        inputs = rows if self.side is None else self.side.inputs(rows)
        if self.scales is not None:
            target.copy_(fp8.product(inputs, self.weight, self._scales_of(inputs, rows)))
        else:
            torch.mm(inputs, self.weight.t(), out=target)
        if self.side is not None:
            self.side.add_to(target, rows)

    def _scales_of(self, inputs: torch.Tensor, x: torch.Tensor) -> fp8.Scales:
        """The scales for `inputs`; the file's input scale is that of x, and may be too small for a scaled one."""
        scales = cast(fp8.Scales, self.scales)
        return scales if inputs is x or scales.input is None else replace(scales, input=None)

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
        return self.product(self.local_input(x))

    def partial_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`partial(x)` written into `out` [..., out]."""
        self.product_into(out, self.local_input(x))

    def local_input(self, x: torch.Tensor) -> torch.Tensor:
        """What of the layer's input this rank multiplies; here it comes as this rank's slice already."""
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ranks.all_reduce(self.partial(x))
        return y if self.bias is None else y.add_(self.bias)


class RowwiseSplitInputLinear(RowwiseLinear):
    """Row-wise with a replicated input x [..., in], of which this rank's slice is taken first (R26)."""

    def local_input(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features of the whole input.

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
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def writes_in_place(x: torch.Tensor) -> bool:
    """Whether products may be written into a buffer that is there already: not where autograd or autocast has to see
    each of them, nor in a graph, whose compiler places them itself."""
    return not (
        torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling()
    )


def joint_reduce(*products: tuple[nn.Module, torch.Tensor]) -> list[torch.Tensor]:
    """Run row-wise layers of one width on their inputs [..., in] and join their partial sums with one all-reduce.

    Returns the outputs [..., out] in order, as views of one buffer that the products were written into, and that
    belongs to this call alone: whoever keeps an output keeps the buffer. Plain Linears (degree 1) just run.
    """
    first, x = products[0]
    if not isinstance(first, RowwiseLinear):
        return [layer(x) for layer, x in products]
    rows = [x.shape[:-1].numel() for _, x in products]
    if writes_in_place(x):
        buffer = x.new_empty(sum(rows), first.out_features)
        for (layer, x), part in zip(products, buffer.split(rows), strict=True):
            layer.partial_into(part, x)
    else:
        buffer = torch.cat([layer.partial(x).flatten(0, -2) for layer, x in products])
    first.ranks.all_reduce(buffer)
    outputs = []
    start = 0
    for (layer, x), count in zip(products, rows, strict=True):
        output = buffer[start : start + count].view(*x.shape[:-1], first.out_features)
        outputs.append(output if layer.bias is None else output.add_(layer.bias))
        start += count
    return outputs


def layer_class(style: LinearStyle) -> type[ShardedLinear]:
    """The layer that runs `style`."""
    if isinstance(style, RowwiseSplitInput):
        return RowwiseSplitInputLinear
    if isinstance(style, Rowwise):
        return RowwiseLinear
    if isinstance(style, Colwise):
        return ColwiseLinear
    raise TypeError(f"No layer runs the style {style}.")
