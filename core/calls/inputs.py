"""The inputs of a model call beside the latent and its time: text, references and whatever else a model's `predict` takes.

They are a mapping by the names of `predict`'s arguments, the same from ComfyUI to the ranks; nothing between knows one
of them. A new input of a model is an argument of its `predict`, and a word in its family's table in comfy_tp_nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .keys import Kept

# As they are sent: tensors come along, kept ones lie on the ranks already; references are a list.
Part = torch.Tensor | Kept
Input = torch.Tensor | Kept | list[torch.Tensor | Kept] | str
Inputs = Mapping[str, Input]
# As `predict` takes them.
Resolved = dict[str, Any]


def kept_keys(inputs: Inputs) -> Iterator[int]:
    """The keys of all tensors that the ranks have to keep for `inputs`."""
    for value in inputs.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Kept):
                yield from part.keys


def each(change: Callable[..., Any], *inputs: Mapping[str, Any]) -> Resolved:
    """`change` of every tensor or part, of those of the same place together; words stay as they are."""

    def changed(values: list[Any]) -> Any:
        if isinstance(values[0], str):
            return values[0]
        if isinstance(values[0], list):
            return [change(*parts) for parts in zip(*values, strict=True)]
        return change(*values)

    return {name: changed([one[name] for one in inputs]) for name in inputs[0]}


def joins(first: Resolved, second: Resolved) -> bool:
    """Whether both can go through the model as one batch: the same inputs of the same shapes."""
    return each(lambda one: one.shape, first) == each(lambda one: one.shape, second)


def joined(first: Resolved, second: Resolved) -> Resolved:
    """Both as one batch, `first` in front."""
    return each(lambda *parts: torch.cat(parts), first, second)


def fitted(inputs: Resolved, batch: int, dtype: torch.dtype) -> Resolved:
    """The inputs in `dtype`, repeated in order or cut to `batch` items, as ComfyUI fits conditionings to a latent."""
    return each(lambda tensor: cast(fit_batch(tensor, batch), dtype), inputs)


def cast(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """`tensor` on `device` in `dtype`; whole numbers stay whole."""
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def fit_batch(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """`tensor` [b, ...] repeated in order, or cut, to [batch, ...]."""
    if tensor.shape[0] == batch:
        return tensor
    if tensor.shape[0] == 1:
        return tensor.expand(batch, *tensor.shape[1:])
    return tensor.repeat(math.ceil(batch / tensor.shape[0]), *[1] * (tensor.ndim - 1))[:batch]
