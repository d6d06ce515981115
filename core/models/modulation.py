"""Modulations of all blocks as one reduce: they read the same timestep embedding, so their partial sums are joined.

Every block of FLUX.1 and Qwen-Image has its own AdaLN projections, a quarter to a third of the model's weights. They
read SiLU(embedding), one vector per picture: sharded row-wise, the first one called computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..tp.collectives import Ranks
from ..tp.linear import RowwiseSplitInputLinear, writes_in_place


class SharedActivation(nn.Module):
    """An activation that many modules apply to the same tensor: computed once, so that all get the same object."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.activation = activation
        self.source: torch.Tensor | None = None
        self.result: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.source is not x or self.result is None:
            self.source, self.result = x, self.activation(x)
        return self.result


class JointLinears:
    """Row-wise Linears of one input [B, in] with a single all-reduce: the first one called computes all.

    The others, called with the very same tensor, take their part. Any other input makes them start anew.
    """

    def __init__(self, layers: Sequence[RowwiseSplitInputLinear], ranks: Ranks):
        self.layers = list(layers)
        self.ranks = ranks
        self.source: torch.Tensor | None = None
        self.ready: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            layer.forward = _JointLinear(self, index).forward  # type: ignore[method-assign]

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What the layer of that `index` makes of x."""
        if self.source is not x or index not in self.ready:
            self._compute(x)
        output = self.ready.pop(index)
        if not self.ready:
            self.source = None
        bias = self.layers[index].bias
        if bias is None:
            return output
        # Autograd lets no part of a split be written to.
        return output.add_(bias) if writes_in_place(x) else output + bias

    def _compute(self, x: torch.Tensor) -> None:
        widths = [layer.out_features for layer in self.layers]
        if writes_in_place(x):
            joined = x.new_empty(*x.shape[:-1], sum(widths))
            for layer, part in zip(self.layers, joined.split(widths, dim=-1), strict=True):
                layer.partial_into(part, x)
        else:
            joined = torch.cat([layer.partial(x) for layer in self.layers], dim=-1)
        self.ready = dict(enumerate(self.ranks.all_reduce(joined).split(widths, dim=-1)))
        self.source = x


class _JointLinear:
    """The forward of one of the layers. A method of an object, so that a copy of the model computes with its own layers."""

    def __init__(self, joint: JointLinears, index: int):
        self._joint = joint
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._joint.take(self._index, x)


def join(modulations: Sequence[tuple[nn.Module, str, nn.Module]], ranks: Ranks) -> None:
    """Let modulations share one activation and one reduce. Each: (parent, name of its activation, Linear).

    Where a plan leaves one of the Linears whole, nothing is joined.
    """
    linears = [linear for _, _, linear in modulations if isinstance(linear, RowwiseSplitInputLinear)]
    if not modulations or len(linears) < len(modulations):
        return
    parent, name, _ = modulations[0]
    shared = SharedActivation(parent._modules[name])
    for parent, name, _ in modulations:
        parent._modules[name] = shared
    JointLinears(linears, ranks)
