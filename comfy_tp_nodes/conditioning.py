"""Conditionings that cross to the ranks once: in ComfyUI's own machinery, integer keys stand for the tensors.

ComfyUI repeats and concatenates conditionings anew for every model call, so a tensor's identity is lost there. Keys
survive: they are int64, which core's conversion to the inference dtype leaves alone.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import comfy.conds
import comfy.utils
import torch

TEXT_LENGTH = 512  # shorter text is padded with zeros on the left, as ComfyUI's Flux2 does


class KeyTable:
    """Keys of tensors, and of the rows that a conditioning is split into. Holds no tensor alive by itself."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._keys: dict[int, int] = {}
        self._rows: dict[
            tuple[int, torch.dtype, int], tuple[weakref.ref[torch.Tensor], list[torch.Tensor]]
        ] = {}
        self._lock = threading.RLock()

    def key_of(self, tensor: torch.Tensor) -> int:
        """The key of this tensor object; the same one while it lives."""
        with self._lock:
            key = self._keys.get(id(tensor))
            if key is not None and self._tensors[key]() is tensor:
                return key
            key = next(self._next)
            identity = id(tensor)

            def forget(_: weakref.ref) -> None:
                with self._lock:
                    self._tensors.pop(key, None)
                    if self._keys.get(identity) == key:
                        del self._keys[identity]

            self._tensors[key] = weakref.ref(tensor, forget)
            self._keys[identity] = key
            return key

    def tensor(self, key: int) -> torch.Tensor:
        """The tensor of a key. Raises `KeyError` when it is gone."""
        reference = self._tensors.get(key)
        tensor = reference() if reference is not None else None
        if tensor is None:
            raise KeyError(f"conditioning {key} is gone")
        return tensor

    def rows(self, tensor: torch.Tensor, dtype: torch.dtype, length: int = 0) -> list[torch.Tensor]:
        """The rows [1, ...] of `tensor` [B, ...] in `dtype` on the CPU, the same objects for the same tensor.

        With a `length`, dimension 1 is padded to it with zeros on the left.
        """
        slot = (id(tensor), dtype, length)
        with self._lock:
            known = self._rows.get(slot)
            if known is not None and known[0]() is tensor:
                return known[1]
            whole = tensor.detach().to("cpu", dtype)
            if whole.ndim == 3 and whole.shape[1] < length:
                whole = torch.nn.functional.pad(whole, (0, 0, length - whole.shape[1], 0))
            if whole.data_ptr() == tensor.data_ptr():
                whole = whole.clone()  # a view of the tensor would keep it, and so this entry, alive for ever
            rows = [whole[index : index + 1] for index in range(whole.shape[0])]

            def forget(_: weakref.ref) -> None:
                with self._lock:
                    self._rows.pop(slot, None)

            self._rows[slot] = (weakref.ref(tensor, forget), rows)
            return rows


KEYS = KeyTable()


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


def shares(keys: Sequence[int]) -> list[int]:
    """The shortest list of which every key stands for an equal share of the batch, in order.

    [3, 3, 4, 4] gives [3, 4]; [3, 3, 3, 4] stays as it is.
    """
    runs = [(key, len(list(run))) for key, run in itertools.groupby(keys)]
    lengths = {length for _, length in runs}
    return [key for key, _ in runs] if len(lengths) == 1 else list(keys)
