"""Weight patches as they cross the channel: a JSON entry per patch and the tensors of those the ranks lack."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from .adapters import Adapter
from .patch import Entry, Patch


@dataclass
class _Known:
    """A patch that the ranks hold: its number, and its tensors, by which it is known again."""

    number: int
    tensors: tuple[weakref.ref[torch.Tensor], ...]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True))


class PatchSender:
    """The client's side: writes a set of patches, with the tensors of those only that the ranks do not hold.

    A patch is the same one when it has the same place and the very same tensor objects; its strengths may differ.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._known: dict[tuple[Any, ...], _Known] = {}

    def write(
        self, patches: Sequence[Patch]
    ) -> tuple[list[dict[str, Any]], list[torch.Tensor], dict[tuple[Any, ...], _Known]]:
        """Entries and tensors to send, and what the ranks will hold when they have accepted them (for `accepted`).

        Raises `InputError` for a strength or an alpha that is no finite number.
        """
        entries: list[dict[str, Any]] = []
        sent: list[torch.Tensor] = []
        held: dict[tuple[Any, ...], _Known] = {}
        times: Counter[tuple[Any, ...]] = Counter()
        for patch in patches:
            adapter = patch.adapter
            _check_numbers(patch)
            tensors = list(adapter.tensors.values())
            identity: tuple[Any, ...] = (
                patch.key,
                patch.offset,
                patch.swapped,
                adapter.kind,
                adapter.alpha,
                adapter.reshape,
                tuple((name, id(tensor)) for name, tensor in adapter.tensors.items()),
            )
            times[identity] += 1
            identity = (*identity, times[identity])  # a LoRA may be stacked on itself
            entry: dict[str, Any] = {
                "strength": float(patch.strength),
                "strength_model": float(patch.strength_model),
            }
            known = self._known.get(identity)
            if known is None or not known.is_of(tensors):
                known = _Known(next(self._numbers), tuple(weakref.ref(tensor) for tensor in tensors))
                entry["patch"] = {
                    "key": patch.key,
                    "offset": list(patch.offset) if patch.offset is not None else None,
                    "swapped": patch.swapped,
                    "kind": adapter.kind,
                    "alpha": adapter.alpha,
                    "reshape": list(adapter.reshape) if adapter.reshape is not None else None,
                    "tensors": {name: len(sent) + index for index, name in enumerate(adapter.tensors)},
                }
                sent.extend(tensor.detach().cpu().contiguous() for tensor in tensors)
            entry["number"] = known.number
            held[identity] = known
            entries.append(entry)
        return entries, sent, held

    def accepted(self, held: dict[tuple[Any, ...], _Known]) -> None:
        """The ranks have put a written set in place: they hold it, and nothing else."""
        self._known = held

    def forget(self) -> None:
        """What the ranks hold is unknown: the next set is sent whole."""
        self._known = {}


def _check_numbers(patch: Patch) -> None:
    numbers = {
        "strength": patch.strength,
        "strength_model": patch.strength_model,
        "alpha": patch.adapter.alpha,
    }
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            what = "Download the LoRA again" if name == "alpha" else "Give the LoRA loader another one"
            raise InputError(f"The patch of '{patch.key}' has the {name} {number}. {what}.")


def read_patches(entries: Sequence[Mapping[str, Any]], tensors: Sequence[torch.Tensor]) -> dict[int, Entry]:
    """The ranks' side: what `WeightPatches.stage` takes, from the entries and tensors of a message."""
    return {
        entry["number"]: Entry(
            _read_patch(entry["patch"], tensors) if "patch" in entry else None,
            entry["strength"],
            entry["strength_model"],
        )
        for entry in entries
    }


def _read_patch(described: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Patch:
    reshape, offset = described["reshape"], described["offset"]
    adapter = Adapter(
        described["kind"],
        {name: tensors[index] for name, index in described["tensors"].items()},
        described["alpha"],
        tuple(reshape) if reshape is not None else None,
    )
    return Patch(
        described["key"],
        adapter,
        offset=tuple(offset) if offset is not None else None,
        swapped=described["swapped"],
    )
