"""Conditionings that cross to the ranks once: in ComfyUI's own machinery, their keys stand for the tensors.

Keys survive there because they are int64, which core's conversion to the inference dtype leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import comfy.conds
import comfy.utils
import torch

from ..core.calls.keys import KEYS

TEXT_LENGTH = 512  # shorter text is padded with zeros on the left, as ComfyUI's Flux2 does


class KeyCond(comfy.conds.CONDRegular):
    """Keys [B, R] int64 in place of R tensors, for ComfyUI's batching of conditionings.

    Two are concatenated when the tensors they stand for could be: equal shapes. `tensors` keeps those alive.
    """

    def __init__(
        self, cond: torch.Tensor, shapes: Sequence[torch.Size] = (), tensors: Sequence[torch.Tensor] = ()
    ):
        super().__init__(cond)
        self.shapes = list(shapes)
        self.tensors = list(tensors)

    @classmethod
    def of(cls, columns: Sequence[Sequence[torch.Tensor]]) -> KeyCond:
        """Keys for R tensors, each given as its rows [1, ...]."""
        batch = max(len(rows) for rows in columns)
        keys = [
            comfy.utils.repeat_to_batch_size(
                torch.tensor([KEYS.key_of(row) for row in rows], dtype=torch.int64), batch
            )
            for rows in columns
        ]
        shapes = [rows[0].shape for rows in columns]
        return cls(torch.stack(keys, dim=1), shapes, [row for rows in columns for row in rows])

    def _copy_with(self, cond: torch.Tensor) -> KeyCond:
        return type(self)(cond, self.shapes, self.tensors)

    def can_concat(self, other: comfy.conds.CONDRegular) -> bool:
        return (
            isinstance(other, KeyCond) and self.shapes == other.shapes and self.cond.shape == other.cond.shape
        )

    def size(self) -> list[int]:
        """The shape that ComfyUI's memory estimate sees: one tensor with the values of all."""
        values = sum(shape.numel() for shape in self.shapes)
        width = self.shapes[0][1] if self.shapes and len(self.shapes[0]) > 1 else 1
        return [1, width, max(1, values // width)]
