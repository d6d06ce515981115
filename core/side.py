"""Side paths: an adapter's change as a cheap product beside a layer's own weight, which stays as it is.

LoRA is a low-rank product. LoHa is one too: the elementwise product of two of ranks r and s has rank r * s (the
row-wise Khatri-Rao product of their factors). LoKr multiplies by two small matrices, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .adapters import Kronecker, LowRank
from .patch import Part


class SidePath(nn.Module):
    """The low-rank product `up` [out, r] times `down` [r, in] beside a layer's weight."""

    down: torch.Tensor
    up: torch.Tensor

    def __init__(self, down: torch.Tensor, up: torch.Tensor):
        super().__init__()
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [..., in] times the product to y [..., out], in place, and return y."""
        narrow = F.linear(x, self.down)
        y.view(-1, y.shape[-1]).addmm_(narrow.reshape(-1, narrow.shape[-1]), self.up.t())
        return y


@dataclass(frozen=True)
class Stretch:
    """`length` of a layer's outputs (or inputs) from `local` on are those of the whole product from `source` on."""

    local: int
    source: int
    length: int

    def blocks(self, size: int) -> tuple[int, int, int]:
        """The blocks of `size` that hold the stretch, [first, last), and where in them it begins."""
        first = self.source // size
        return first, -(-(self.source + self.length) // size), self.source - first * size


class KroneckerPath(nn.Module):
    """Rows and columns of the Kronecker product of `left` [a, b] and `right` [p, q] beside a layer's weight.

    Blocks of p outputs or q inputs that a stretch cuts through are computed whole, so that any shard can be served;
    the two products are made in the order that takes fewer multiplications.
    """

    left: torch.Tensor
    right: torch.Tensor

    def __init__(
        self, left: torch.Tensor, right: torch.Tensor, rows: Sequence[Stretch], columns: Sequence[Stretch]
    ):
        super().__init__()
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("right", right, persistent=False)
        self.rows = tuple(rows)
        self.columns = tuple(columns)
        orders = kronecker_costs((right.shape[0], right.shape[1]), rows, columns)
        self.left_first = orders[0] < orders[1]

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [..., in] times the product to y [..., out], in place, and return y."""
        outputs = y.view(-1, y.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        tall, wide = self.right.shape
        for column in self.columns:
            begin, end, lead = column.blocks(wide)
            rest = (end - begin) * wide - lead - column.length
            blocks = inputs.narrow(1, column.local, column.length)
            if lead or rest:
                blocks = F.pad(blocks, (lead, rest))
            blocks = blocks.reshape(-1, end - begin, wide)
            if not self.left_first:
                blocks = blocks @ self.right.t()
            for row in self.rows:
                first, last, lead = row.blocks(tall)
                made = self.left[first:last, begin:end] @ blocks
                if self.left_first:
                    made = made @ self.right.t()
                made = made.flatten(1).narrow(1, lead, row.length)
                outputs.narrow(1, row.local, row.length).add_(made)
        return y


class SidePaths(nn.Module):
    """Several paths beside one weight."""

    def __init__(self, paths: Iterable[nn.Module]):
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [..., in] times every product to y [..., out], in place, and return y."""
        for path in self.paths:
            path.add_to(y, x)
        return y


def side_cost(part: Part, shape: Sequence[int]) -> int | None:
    """Multiplications per token of the part's change beside a local weight of `shape`; None where it has no path."""
    factors = part.change.factors
    if part.change.dora_scale is not None or part.change.replaces:
        return None
    if isinstance(factors, Kronecker):
        return min(kronecker_costs(factors.right.shape, *_stretches(part, factors)))
    return None if factors.rank is None else factors.rank * sum(shape)


def make_side(
    parts: Iterable[tuple[Part, float]], shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """What stands beside a local weight of `shape` for these parts, each times its factor. Each has a `side_cost`."""
    downs, ups = [], []
    paths: list[nn.Module] = []
    for part, scale in parts:
        factors = part.change.factors
        if isinstance(factors, Kronecker):
            left = factors.left.matrix(device).mul(scale).to(dtype)
            right = factors.right.matrix(device).to(dtype)
            paths.append(KroneckerPath(left, right, *_stretches(part, factors)))
            continue
        product: LowRank = factors.low_rank(device)
        ups.append(_spread(product.up.to(torch.float32).mul(scale).to(dtype), 0, part.rows, shape[0]))
        downs.append(_spread(product.down.to(dtype), 1, part.columns, shape[1]))
    if downs:
        paths.append(SidePath(torch.cat(downs), torch.cat(ups, dim=1)))
    return paths[0] if len(paths) == 1 else SidePaths(paths)


def side_bytes(model: nn.Module) -> int:
    """Bytes of all side paths in `model`."""
    paths = [module for module in model.modules() if isinstance(module, (SidePath, KroneckerPath))]
    return sum(tensor.nbytes for path in paths for tensor in path.buffers())


def kronecker_costs(
    right: tuple[int, int], rows: Sequence[Stretch], columns: Sequence[Stretch]
) -> tuple[int, int]:
    """Multiplications per token with a right side of shape `right`: the left product first, and the right one first."""
    tall, wide = right
    highs = [last - first for first, last, _ in (row.blocks(tall) for row in rows)]
    left_first = right_first = 0
    for first, last, _ in (column.blocks(wide) for column in columns):
        left_first += sum(high * wide * (last - first + tall) for high in highs)
        right_first += (last - first) * tall * (wide + sum(highs))
    return left_first, right_first


def _stretches(part: Part, factors: Kronecker) -> tuple[list[Stretch], list[Stretch]]:
    """Where the rows and columns of a part lie in the local matrix and in the whole Kronecker product."""
    return _runs(part.rows, factors.rows), _runs(part.columns, factors.columns)


def _runs(local: Sequence[tuple[int, int]], source: torch.Tensor) -> list[Stretch]:
    """The longest stretches in which the numbers `source` rise by one while they stay within one stretch of `local`."""
    found: list[Stretch] = []
    taken = 0
    for start, length in local:
        numbers = source[taken : taken + length]
        breaks = (numbers.diff() != 1).nonzero().flatten().add(1).tolist()
        for begin, end in zip([0, *breaks], [*breaks, length], strict=True):
            found.append(Stretch(start + begin, int(numbers[begin]), end - begin))
        taken += length
    return found


def _spread(values: torch.Tensor, dim: int, stretches: Sequence[tuple[int, int]], size: int) -> torch.Tensor:
    """`values` with zeros along `dim` where no stretch is, `size` long."""
    if tuple(stretches) == ((0, size),):
        return values
    shape = list(values.shape)
    shape[dim] = size
    spread = values.new_zeros(shape)
    pieces = values.split([length for _, length in stretches], dim=dim)
    for (start, length), piece in zip(stretches, pieces, strict=True):
        spread.narrow(dim, start, length).copy_(piece)
    return spread
