"""The kinds of weight adapters (LoRA and its kin) as matrices that are only ever computed slice by slice.

An `Adapter` is what a file holds for one weight. `factors_of` turns it into `Factors`: a matrix of the weight's own
shape that can give any rows and columns of itself from slices of its factors, so that a rank computes its shard's
change and never the whole one.

Sources: LoRA (arXiv 2106.09685), LyCORIS (arXiv 2309.14859: LoHa, LoKr, the Tucker forms), and the formulas by which
ComfyUI 0.3.75 applies them, which are the reference here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import InputError, TPError, UnsupportedError

# Kind -> the names of its tensors. `dora_scale` beside any of the first three makes it a DoRA.
TENSORS: dict[str, tuple[str, ...]] = {
    "lora": ("up", "down", "mid", "dora_scale"),
    "loha": ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2", "dora_scale"),
    "lokr": ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
    "diff": ("diff",),
    "set": ("value",),
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """What a LoRA file holds for one weight. `kind` and the names in `tensors` are those of `TENSORS`.

    `alpha` over the rank scales the change; without it the scale is 1. `reshape` is the shape that the file wants the
    weight to have.
    """

    kind: str
    tensors: Mapping[str, torch.Tensor]
    alpha: float | None = None
    reshape: tuple[int, ...] | None = None


def is_complete(adapter: Adapter) -> bool:
    """Whether the adapter has every tensor that its kind needs."""
    tensors = adapter.tensors
    if adapter.kind == "lokr":
        return all(
            f"w{side}" in tensors or (f"w{side}_a" in tensors and f"w{side}_b" in tensors) for side in (1, 2)
        )
    return adapter.kind in _REQUIRED and all(name in tensors for name in _REQUIRED[adapter.kind])


class Factors:
    """A matrix of `shape` (rows, columns) held by its factors."""

    @property
    def shape(self) -> tuple[int, int]:
        raise NotImplementedError

    @property
    def rank(self) -> int | None:
        """The rank of the low-rank product that the matrix is, or None where none is at hand."""
        return None

    def low_rank(self, device: torch.device) -> LowRank:
        """The matrix as a product of rank `rank`, on `device`."""
        raise NotImplementedError

    def take(self, rows: torch.Tensor, columns: torch.Tensor) -> Factors:
        """The sub-matrix of these row and column numbers, in storage of its own."""
        raise NotImplementedError

    def matrix(self, device: torch.device) -> torch.Tensor:
        """The matrix, float32, on `device`."""
        raise NotImplementedError


@dataclass
class LowRank(Factors):
    """`up` [rows, r] times `down` [r, columns]."""

    up: torch.Tensor
    down: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    def take(self, rows: torch.Tensor, columns: torch.Tensor) -> LowRank:
        return LowRank(_pick(self.up, 0, rows), _pick(self.down, 1, columns))

    def low_rank(self, device: torch.device) -> LowRank:
        return LowRank(self.up.to(device), self.down.to(device))

    def matrix(self, device: torch.device) -> torch.Tensor:
        return self.up.to(device, torch.float32) @ self.down.to(device, torch.float32)


@dataclass
class Dense(Factors):
    """A matrix that is given as it is."""

    whole: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape[0], self.whole.shape[1]

    def take(self, rows: torch.Tensor, columns: torch.Tensor) -> Dense:
        return Dense(_pick(_pick(self.whole, 0, rows), 1, columns))

    def matrix(self, device: torch.device) -> torch.Tensor:
        return self.whole.to(device, torch.float32)


@dataclass
class Hadamard(Factors):
    """The elementwise product of two low-rank matrices (LoHa)."""

    first: LowRank
    second: LowRank

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.shape

    @property
    def rank(self) -> int:
        return self.first.rank * self.second.rank

    def low_rank(self, device: torch.device) -> LowRank:
        """Column (i, j) of the one factor is the product of column i of the first's and column j of the second's."""
        ups = [half.up.to(device, torch.float32) for half in (self.first, self.second)]
        downs = [half.down.to(device, torch.float32) for half in (self.first, self.second)]
        up = (ups[0].unsqueeze(2) * ups[1].unsqueeze(1)).flatten(1)
        down = (downs[0].unsqueeze(1) * downs[1].unsqueeze(0)).flatten(0, 1)
        return LowRank(up, down)

    def take(self, rows: torch.Tensor, columns: torch.Tensor) -> Hadamard:
        return Hadamard(self.first.take(rows, columns), self.second.take(rows, columns))

    def matrix(self, device: torch.device) -> torch.Tensor:
        return self.first.matrix(device).mul_(self.second.matrix(device))


@dataclass
class Kronecker(Factors):
    """The rows and columns `rows` and `columns` of the Kronecker product of two small matrices (LoKr).

    Element (i, j) of the whole product is left[i // p, j // q] * right[i % p, j % q] for a right side of [p, q].
    """

    left: Factors
    right: Factors
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def take(self, rows: torch.Tensor, columns: torch.Tensor) -> Kronecker:
        return Kronecker(_copy(self.left), _copy(self.right), self.rows[rows], self.columns[columns])

    def matrix(self, device: torch.device) -> torch.Tensor:
        left, right = self.left.matrix(device), self.right.matrix(device)
        rows, columns = self.rows.to(device), self.columns.to(device)
        tall, wide = right.shape
        return (
            left.index_select(0, rows // tall)
            .index_select(1, columns // wide)
            .mul_(right.index_select(0, rows % tall).index_select(1, columns % wide))
        )


@dataclass
class Change:
    """What an adapter does to a weight: `factors` times `scale`, or their values in place of it when `replaces`.

    With `dora_scale` (one number per row [rows, 1] or per column [1, columns]) the changed weight is normed and scaled.
    """

    factors: Factors
    scale: float = 1.0
    replaces: bool = False
    dora_scale: torch.Tensor | None = None


def change_of(adapter: Adapter, rows: int, columns: int, name: str) -> Change:
    """The change that `adapter` makes to a weight of [rows, columns]; a bias or norm weight has one column.

    Raises `UnsupportedError` for an unknown kind and for forms that only convolutions have, `InputError` when the
    factors do not make a matrix of that shape. Both name the weight.
    """
    maker = _MAKERS.get(adapter.kind)
    if maker is None:
        raise UnsupportedError(
            f"The patch of '{name}' is of the kind '{adapter.kind}', which shards cannot carry. Kinds that they can: "
            f"{', '.join(TENSORS)}. Remove that LoRA, or load the model with the stock loader."
        )
    if adapter.reshape is not None and tuple(adapter.reshape) not in ((rows, columns), (rows,)):
        raise UnsupportedError(
            f"The LoRA changes the shape of '{name}' from {[rows, columns]} to {list(adapter.reshape)} (a control "
            f"LoRA), which shards cannot do. Remove it, or load the model with the stock loader."
        )
    missing = [part for part in _REQUIRED[adapter.kind] if part not in adapter.tensors]
    if missing:
        raise InputError(
            f"The {adapter.kind} patch of '{name}' has no '{missing[0]}'. The LoRA file is incomplete; download it "
            f"again."
        )
    try:
        change = maker(adapter, name)
    except TPError:
        raise
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        shapes = {part: list(tensor.shape) for part, tensor in adapter.tensors.items()}
        raise InputError(
            f"The {adapter.kind} patch of '{name}' has factors that do not fit together: {shapes}. Download the LoRA "
            f"again."
        ) from error
    if change.factors.shape != (rows, columns):
        raise InputError(
            f"The {adapter.kind} patch of '{name}' makes a matrix of {list(change.factors.shape)}, but the weight is "
            f"{[rows, columns]}: the LoRA was made for another model. Remove it."
        )
    scale = change.dora_scale
    if scale is not None and tuple(scale.shape) not in ((rows, 1), (1, columns)):
        raise InputError(
            f"The DoRA patch of '{name}' has a `dora_scale` of {list(scale.shape)}, expected {[rows, 1]} or "
            f"{[1, columns]}."
        )
    return change


def _lora(adapter: Adapter, name: str) -> Change:
    parts = adapter.tensors
    up, down = parts["up"].flatten(1), parts["down"].flatten(1)
    rank = parts["down"].shape[0]
    if "mid" in parts:
        down = _square(parts["mid"], name).to(torch.float32) @ down.to(torch.float32)
    return _scaled(LowRank(_fitting(up, down), down), adapter, rank)


def _loha(adapter: Adapter, name: str) -> Change:
    parts = adapter.tensors
    pairs = [
        _pair(parts[f"w{number}_a"], parts[f"w{number}_b"], parts.get(f"t{number}"), name)
        for number in (1, 2)
    ]
    if pairs[0].shape != pairs[1].shape:
        raise RuntimeError("the two products differ in shape")
    return _scaled(Hadamard(*pairs), adapter, parts["w1_b"].shape[0])


def _lokr(adapter: Adapter, name: str) -> Change:
    parts = adapter.tensors
    rank = None
    sides: list[Factors] = []
    for number in (1, 2):
        if f"w{number}" in parts:
            sides.append(Dense(parts[f"w{number}"].flatten(1)))
            continue
        for half in ("a", "b"):
            if f"w{number}_{half}" not in parts:
                raise InputError(
                    f"The lokr patch of '{name}' has neither 'w{number}' nor both of 'w{number}_a' and 'w{number}_b'. "
                    f"The LoRA file is incomplete; download it again."
                )
        # As in ComfyUI: the rank is that of the second side where that is a product.
        rank = parts[f"w{number}_b"].shape[0]
        core = parts.get("t2") if number == 2 else None
        sides.append(_pair(parts[f"w{number}_a"], parts[f"w{number}_b"], core, name))
    left, right = sides
    rows, columns = left.shape[0] * right.shape[0], left.shape[1] * right.shape[1]
    return _scaled(Kronecker(left, right, torch.arange(rows), torch.arange(columns)), adapter, rank)


def _diff(adapter: Adapter, name: str) -> Change:
    return Change(Dense(_as_matrix(adapter.tensors["diff"])))


def _set(adapter: Adapter, name: str) -> Change:
    return Change(Dense(_as_matrix(adapter.tensors["value"])), replaces=True)


_MAKERS = {"lora": _lora, "loha": _loha, "lokr": _lokr, "diff": _diff, "set": _set}
_REQUIRED = {
    "lora": ("up", "down"),
    "loha": ("w1_a", "w1_b", "w2_a", "w2_b"),
    "lokr": (),
    "diff": ("diff",),
    "set": ("value",),
}


def _scaled(factors: Factors, adapter: Adapter, rank: int | None) -> Change:
    scale = adapter.alpha / rank if adapter.alpha is not None and rank is not None else 1.0
    return Change(factors, scale, dora_scale=adapter.tensors.get("dora_scale"))


def _pair(a: torch.Tensor, b: torch.Tensor, core: torch.Tensor | None, name: str) -> LowRank:
    """`a` [rows, r] times `b` [r, columns]; with a Tucker `core` [r, r, 1, 1] `a` is [r, rows]."""
    if core is None:
        return LowRank(_fitting(a, b), b)
    middle = _square(core, name).to(torch.float32) @ b.to(torch.float32)
    up = a.t().contiguous()
    return LowRank(_fitting(up, middle), middle)


def _square(core: torch.Tensor, name: str) -> torch.Tensor:
    """A Tucker core [r, s, 1, 1] as a matrix; larger kernels belong to convolutions."""
    if any(size != 1 for size in core.shape[2:]):
        raise UnsupportedError(
            f"The patch of '{name}' is made for a convolution with a kernel of {list(core.shape[2:])}; sharded models "
            f"have none. Remove that LoRA."
        )
    return core.reshape(core.shape[0], core.shape[1])


def _fitting(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`up`, once it is known that it can be multiplied by `down`, and that this is something."""
    if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0] or up.shape[1] == 0:
        raise RuntimeError("the factors cannot be multiplied")
    return up


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1)


def _pick(tensor: torch.Tensor, dim: int, numbers: torch.Tensor) -> torch.Tensor:
    """The slices `numbers` of `tensor` along `dim`, in storage of their own.

    `numbers` rise, or fall back once where halves are exchanged; a single stretch is copied as such, which is faster.
    """
    count = len(numbers)
    if count and int(numbers[-1]) - int(numbers[0]) == count - 1:
        return tensor.narrow(dim, int(numbers[0]), count).clone(memory_format=torch.contiguous_format)
    return tensor.index_select(dim, numbers)


def _copy(factors: Factors) -> Factors:
    """The same factors in storage of their own: what arrives over the channel is a view of one large buffer."""
    if isinstance(factors, LowRank):
        return LowRank(factors.up.clone(), factors.down.clone())
    if isinstance(factors, Dense):
        return Dense(factors.whole.clone())
    return factors
