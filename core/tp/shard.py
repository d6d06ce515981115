"""`ShardSpec`: how one tensor is laid out across the ranks. Reading, sharding, gathering, LoRA and checks use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..errors import PlanError


@dataclass(frozen=True)
class Runs:
    """Where a rank's elements lie in the full row-major tensor: the same stretches in each of `rows` rows.

    Row i begins at element i * `pitch`; each stretch is (offset in the row, length), in elements. Taken row by row
    and in order, the stretches are the rank's part, contiguous.
    """

    rows: int
    pitch: int
    stretches: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Elements that the rank holds of one row."""
        return sum(length for _, length in self.stretches)


@dataclass(frozen=True)
class ShardSpec:
    """The layout of one tensor of full `shape` across `degree` ranks.

    `dim` is the dimension that is split, or None for a tensor that every rank holds whole (replicated).
    `blocks` are the absolute sizes of the packed blocks along `dim`; they sum to `shape[dim]`, and each block
    is split among the ranks on its own, so that rank r holds slice r of every block, in block order.
    A plain col- or row-wise weight has one block.

    Source: the packed styles of the diffusers tensor-parallelism page (requirements R24-R32).
    """

    shape: tuple[int, ...]
    degree: int
    dim: int | None = None
    blocks: tuple[int, ...] = ()

    @classmethod
    def replicated(cls, shape: Sequence[int], degree: int) -> ShardSpec:
        """A tensor of `shape` that every one of `degree` ranks holds whole."""
        return cls(tuple(shape), degree)

    @classmethod
    def split(
        cls,
        shape: Sequence[int],
        degree: int,
        dim: int,
        blocks: Sequence[int] | None = None,
        *,
        name: str = "tensor",
    ) -> ShardSpec:
        """A tensor of `shape` split along `dim`, each of the absolute `blocks` on its own.

        Raises `PlanError`, naming `name`, when the blocks do not sum to the dimension or one of them is not
        divisible by `degree` (R32: each block on its own, not only their sum).
        """
        shape = tuple(shape)
        blocks = tuple(blocks) if blocks else (shape[dim],)
        if sum(blocks) != shape[dim]:
            raise PlanError(
                f"'{name}': packed blocks {list(blocks)} sum to {sum(blocks)}, but dimension {dim} of its shape "
                f"{list(shape)} is {shape[dim]}. Give blocks that cover the dimension exactly."
            )
        for block in blocks:
            if block % degree:
                raise PlanError(
                    f"Cannot shard '{name}' across {degree} ranks: its block of size {block} along dimension {dim} "
                    f"(of blocks {list(blocks)}) is not divisible by {degree}. Choose a degree that divides every "
                    f"block."
                )
        return cls(shape, degree, dim, blocks)

    @property
    def is_replicated(self) -> bool:
        """True when every rank holds the whole tensor."""
        return self.dim is None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of one rank's part; the same on every rank."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // self.degree, *self.shape[self.dim + 1 :])

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Half-open index ranges [start, stop) along `dim` that `rank` holds, in local order.

        A replicated tensor has one range over its first dimension (or (0, 1) when it is a scalar).
        """
        if not 0 <= rank < self.degree:
            raise PlanError(f"Rank {rank} does not exist in a group of {self.degree}.")
        if self.dim is None:
            return ((0, self.shape[0] if self.shape else 1),)
        ranges = []
        offset = 0
        for block in self.blocks:
            size = block // self.degree
            ranges.append((offset + rank * size, offset + (rank + 1) * size))
            offset += block
        return tuple(ranges)

    def runs(self, rank: int) -> Runs:
        """The stretches of the full tensor, laid out row-major as in a file, that `rank` holds."""
        if self.dim is None:
            return Runs(1, prod(self.shape), ((0, prod(self.shape)),))
        inner = prod(self.shape[self.dim + 1 :])
        stretches = tuple((start * inner, (stop - start) * inner) for start, stop in self.ranges(rank))
        return Runs(prod(self.shape[: self.dim]), self.shape[self.dim] * inner, stretches)

    def overlap(self, rank: int, dim: int, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
        """What `rank` holds of the indices [start, stop) of the full tensor along `dim`, in local order.

        Stretches (offset in the rank's part, offset in [start, stop), length), none of them empty. Serves patches
        that cover a part of a weight, packed blocks cut through or not.
        """
        ranges = self.ranges(rank) if dim == self.dim else ((0, self.shape[dim]),)
        stretches: list[tuple[int, int, int]] = []
        local = 0
        for first, last in ranges:
            low, high = max(first, start), min(last, stop)
            if low < high:
                stretches.append((local + low - first, low - start, high - low))
            local += last - first
        return tuple(stretches)

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of the full `tensor` that `rank` holds, contiguous and in storage of its own.

        A replicated tensor is returned as it is.
        """
        if tuple(tensor.shape) != self.shape:
            raise PlanError(
                f"Expected the full tensor of shape {list(self.shape)}, got {list(tensor.shape)}."
            )
        if self.dim is None:
            return tensor
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges(rank)]
        if len(parts) == 1:
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, dim=self.dim)

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the parts of all ranks in rank order; inverse of `shard`."""
        if len(shards) != self.degree:
            raise PlanError(f"Expected the parts of {self.degree} ranks, got {len(shards)}.")
        for rank, part in enumerate(shards):
            self._check_part(part, rank)
        if self.dim is None:
            return shards[0]
        full = torch.empty(self.shape, dtype=shards[0].dtype, device=shards[0].device)
        for rank, part in enumerate(shards):
            self.put(full, part, rank)
        return full

    def put(self, full: torch.Tensor, part: torch.Tensor, rank: int) -> None:
        """Copy the `part` that `rank` holds to its places in the `full` tensor, on whichever devices they lie."""
        self._check_part(part, rank)
        if self.dim is None:
            full.copy_(part)
            return
        taken = 0
        for start, stop in self.ranges(rank):
            full.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, taken, stop - start))
            taken += stop - start

    def _check_part(self, part: torch.Tensor, rank: int) -> None:
        if tuple(part.shape) != self.local_shape:
            raise PlanError(
                f"Rank {rank} holds a part of shape {list(part.shape)}, expected {list(self.local_shape)}."
            )
