"""Side paths: an adapter's change as a cheap product beside a layer's own weight, which stays as it is.

LoRA is a low-rank product. LoHa is one too: the elementwise product of two of ranks r and s has rank r * s (the
row-wise Khatri-Rao product of their factors). LoKr multiplies by two small matrices, one after the other. DoRA also
scales what goes into the layer or comes out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..tp.linear import writes_in_place
from .adapters import Kronecker, LowRank
from .patch import Part


class Side(nn.Module):
    """What stands beside a layer's weight."""

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer's own weight multiplies in place of x [..., in]."""
        return x

    def add_to(self, y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Make of the weight's product y [..., out] of `inputs(x)` the layer's of x [..., in], in place, and return it.

        `bias` [out] is what y has been added already.
        """
        raise NotImplementedError


class SidePath(Side):
    """The low-rank product `up` [out, r] times `down` [r, in] beside a layer's weight."""

    down: torch.Tensor
    up: torch.Tensor

    def __init__(self, down: torch.Tensor, up: torch.Tensor):
        super().__init__()
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)

    def add_to(self, y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
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


class KroneckerPath(Side):
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

    def add_to(self, y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
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


class SidePaths(Side):
    """Several paths beside one weight."""

    def __init__(self, paths: Iterable[Side]):
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def add_to(self, y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Add x [..., in] times every product to y [..., out], in place, and return y."""
        for path in self.paths:
            path.add_to(y, x)
        return y


class ScaledSide(Side):
    """`path` beside a weight whose products are scaled: outputs by `rows` [out], inputs by `columns` [in] (DoRA).

    The scales are float32 and the bias is not scaled.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None

    def __init__(self, path: Side, rows: torch.Tensor | None, columns: torch.Tensor | None):
        super().__init__()
        self.path = path
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] times the columns' scales."""
        if self.columns is None:
            return x
        if writes_in_place(x):
            return torch.mul(x, self.columns, out=torch.empty_like(x))
        return (x * self.columns).to(x.dtype)

    def add_to(self, y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Scale y [..., out] but for its `bias`, add x [..., in] times the path, in place, and return y."""
        if self.rows is not None:
            y.mul_(self.rows)
            if bias is not None:
                y.add_(bias * (1.0 - self.rows))
        return self.path.add_to(y, x)


class PatchedWeight:
    """What becomes of a local weight of `shape` [out, in] by patches in order, while it stays as it is itself.

    It is the weight, its rows times `rows` and its columns times `columns` where there are such, plus low-rank and
    Kronecker products. The latter cannot be scaled.
    """

    def __init__(self, shape: Sequence[int], device: torch.device):
        self.shape = (shape[0], shape[1])
        self.device = device
        self.rows: torch.Tensor | None = None
        self.columns: torch.Tensor | None = None
        self._ups: list[torch.Tensor] = []
        self._downs: list[torch.Tensor] = []
        self._paths: list[tuple[Part, Kronecker, float]] = []

    @property
    def untouched(self) -> bool:
        """Whether nothing has been done to the weight."""
        return self.rows is None and self.columns is None and not self._ups and not self._paths

    def copy(self) -> PatchedWeight:
        """The same, to go on with apart."""
        copied = PatchedWeight(self.shape, self.device)
        copied.rows, copied.columns = self.rows, self.columns
        copied._ups, copied._downs, copied._paths = [*self._ups], [*self._downs], [*self._paths]
        return copied

    def scale_rows(self, factor: torch.Tensor) -> None:
        """Multiply every row by its `factor` [out], float32."""
        self.rows = factor if self.rows is None else self.rows * factor
        self._ups = [up.to(torch.float32) * factor.unsqueeze(1) for up in self._ups]

    def scale_columns(self, factor: torch.Tensor) -> None:
        """Multiply every column by its `factor` [in], float32."""
        self.columns = factor if self.columns is None else self.columns * factor
        self._downs = [down.to(torch.float32) * factor for down in self._downs]

    def add(
        self,
        part: Part,
        scale: float,
        *,
        rows: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """Add the change of `part`, which has a `side_cost`, times `scale`, its rows times `rows` [out] and its columns
        times `columns` [in] where given."""
        factors = part.change.factors
        if isinstance(factors, Kronecker):
            self._paths.append((part, factors, scale))
            return
        product: LowRank = factors.low_rank(self.device)
        up = _spread(product.up.to(torch.float32).mul(scale), 0, part.rows, self.shape[0])
        down = _spread(product.down, 1, part.columns, self.shape[1])
        self._ups.append(up if rows is None else up.mul_(rows.unsqueeze(1)))
        self._downs.append(down if columns is None else down.to(torch.float32) * columns)

    def product(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """The low-rank products as one of factors [out, r] and [r, in], float32, where there are any."""
        if not self._ups:
            return None, None
        return torch.cat(self._ups, dim=1), torch.cat([down.to(torch.float32) for down in self._downs])

    def side(self, dtype: torch.dtype) -> Side:
        """What stands beside the weight, multiplying in `dtype`."""
        paths: list[Side] = []
        for part, factors, scale in self._paths:
            left = factors.left.matrix(self.device).mul(scale).to(dtype)
            right = factors.right.matrix(self.device).to(dtype)
            paths.append(KroneckerPath(left, right, *_stretches(part, factors)))
        if self._ups:
            downs = torch.cat([down.to(dtype) for down in self._downs])
            paths.append(SidePath(downs, torch.cat([up.to(dtype) for up in self._ups], dim=1)))
        path = paths[0] if len(paths) == 1 else SidePaths(paths)
        if self.rows is None and self.columns is None:
            return path
        return ScaledSide(path, self.rows, self.columns)


def side_cost(part: Part, shape: Sequence[int]) -> int | None:
    """Multiplications per token of the part's change beside a local weight of `shape`; None where it has no path."""
    factors = part.change.factors
    if part.change.replaces:
        return None
    if isinstance(factors, Kronecker):
        if part.change.dora_scale is not None:
            return None
        return min(kronecker_costs(factors.right.shape, *_stretches(part, factors)))
    return None if factors.rank is None else factors.rank * sum(shape)


def side_bytes(model: nn.Module) -> int:
    """Bytes of all side paths in `model`."""
    sides = [module for module in model.modules() if isinstance(module, Side)]
    return sum(tensor.nbytes for side in sides for tensor in side.buffers(recurse=False))


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
