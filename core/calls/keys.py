"""Keys of tensors that cross to the ranks once: conditionings and reference latents, which a run uses again and again.

ComfyUI repeats and concatenates conditionings anew for every model call, so a tensor's identity is lost there; its key
survives. The ranks keep the tensors under the same keys.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kept:
    """Tensors that the ranks keep, by their keys: each is for an equal share of the batch, in order."""

    keys: list[int]


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

    def kept(self, *tensors: torch.Tensor) -> Kept:
        """These tensor objects, for the ranks to keep."""
        return Kept([self.key_of(tensor) for tensor in tensors])

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


def of_batch(keys: Sequence[int]) -> Kept:
    """The tensors of a batch whose items have these keys; one that all items share is named once."""
    return Kept(list(keys[:1] if len(set(keys)) == 1 else keys))
