"""Weight patches (LoRA) on a model's shards, and what the client knows of those that the ranks hold."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from ..lora.apply import PatchReport
from ..lora.patch import Entry, Patch
from ..ranks.context import RankContext
from .call import ModelCall


@dataclass
class SetPatches(ModelCall[PatchReport], name="patch"):
    """Replace the patches on a model's shards. All ranks take the new ones, or none does."""

    mode: str
    patches: list[Entry]

    def run(self, rank: RankContext) -> PatchReport:
        model = self.ready(rank)
        staged = model.patches.stage(self.patches, mode=self.mode, tick=lambda: rank.progress("patch"))
        rank.check_cancelled()
        return model.patches.commit(staged)


@dataclass
class _Known:
    """A patch that the ranks hold: its number, and its tensors, by which it is known again."""

    number: int
    tensors: tuple[weakref.ref[torch.Tensor], ...]

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True))


Held = dict[tuple[Any, ...], _Known]


class PatchSender:
    """The client's side: writes a set of patches, with the tensors of those only that the ranks do not hold.

    A patch is the same one when it has the same place and the very same tensor objects; its strengths may differ.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._known: Held = {}

    def write(self, patches: Sequence[Patch]) -> tuple[list[Entry], Held]:
        """Entries to send, and what the ranks will hold when they have accepted them (for `accepted`).

        Raises `InputError` for a strength or an alpha that is no finite number.
        """
        entries: list[Entry] = []
        held: Held = {}
        times: Counter[tuple[Any, ...]] = Counter()
        for patch in patches:
            _check_numbers(patch)
            tensors = list(patch.adapter.tensors.values())
            identity = _identity(patch)
            times[identity] += 1
            identity = (*identity, times[identity])  # a LoRA may be stacked on itself
            known = self._known.get(identity)
            new = known is None or not known.is_of(tensors)
            if known is None or new:
                known = _Known(next(self._numbers), tuple(weakref.ref(tensor) for tensor in tensors))
            held[identity] = known
            strengths = (float(patch.strength), float(patch.strength_model))
            entries.append(Entry(known.number, patch if new else None, *strengths))
        return entries, held

    def accepted(self, held: Held) -> None:
        """The ranks have put a written set in place: they hold it, and nothing else."""
        self._known = held

    def forget(self) -> None:
        """What the ranks hold is unknown: the next set is sent whole."""
        self._known = {}


def _identity(patch: Patch) -> tuple[Any, ...]:
    adapter = patch.adapter
    tensors = tuple((name, id(tensor)) for name, tensor in adapter.tensors.items())
    place = (patch.key, patch.offset, patch.swapped)
    return (*place, adapter.kind, adapter.alpha, adapter.reshape, tensors)


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
