"""A model's parameters as the tensors of another file layout: the table of a `FileLayout`, written instead of read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import CheckpointError
from .layout import FileLayout


def file_tensors(
    layout: FileLayout, parameters: Mapping[str, torch.Tensor], *, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """The tensors of a single file in `layout` that hold the full `parameters` of a model, names with `prefix`.

    Reading the result through the same layout gives the parameters back bit by bit. Raises `CheckpointError` for a
    parameter that the layout does not know, or a fused tensor of which a part is missing.
    """
    parts: dict[str, dict[int, torch.Tensor]] = {}
    counts: dict[str, int] = {}
    for name, parameter in parameters.items():
        sources = layout.sources(name)
        if sources is None:
            raise CheckpointError(f"The {layout.name} layout has no place for '{name}'.")
        for (names, part, of), rows in zip(sources, parameter.chunk(len(sources)), strict=True):
            parts.setdefault(prefix + names[0], {})[part] = rows
            counts[prefix + names[0]] = of
    tensors = {}
    for name, held in parts.items():
        missing = [part for part in range(counts[name]) if part not in held]
        if missing:
            raise CheckpointError(
                f"Part {missing[0]} of {counts[name]} of '{name}' is not among the parameters."
            )
        tensors[name] = (
            torch.cat([held[part] for part in range(counts[name])]) if counts[name] > 1 else held[0].clone()
        )
    return tensors
