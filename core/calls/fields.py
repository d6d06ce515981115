"""Typed values as they cross the channel: dataclasses, lists, numbers and text as JSON, tensors beside it.

`write` follows the value, `read` the type that is expected, so that both sides share one definition: the dataclass.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from ..errors import InputError
from ..wording import quote

TENSOR = "tensor"  # the key under which a tensor's number stands


def write(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` as JSON; its tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {TENSOR: len(tensors) - 1}
    if is_dataclass(value):
        return {field.name: write(getattr(value, field.name), tensors) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: write(one, tensors) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [write(one, tensors) for one in value]
    return value


def read(kind: Any, given: Any, tensors: Sequence[torch.Tensor], where: str) -> Any:
    """The value of type `kind` that `write` has written. Raises `InputError` that says `where` it is another."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return given
    if origin in (Union, types.UnionType):
        return read(_member(inner, given, where), given, tensors, where)
    if kind is torch.Tensor:
        return tensors[_tensor(given, len(tensors), where)]
    if isinstance(kind, type) and is_dataclass(kind):
        types_of = _types(kind)
        if not isinstance(given, dict) or given.keys() != types_of.keys():
            raise _unfit(kind, given, where)
        return kind(
            **{name: read(one, given[name], tensors, f"{where}.{name}") for name, one in types_of.items()}
        )
    if origin in _MAPPINGS and isinstance(given, dict):
        return {name: read(inner[1], one, tensors, f"{where}.{name}") for name, one in given.items()}
    if origin in _SEQUENCES and isinstance(given, list):
        items = [read(inner[0], one, tensors, where) for one in given]
        return tuple(items) if origin is tuple else items
    if kind is float and type(given) is int:
        return float(given)
    if (given is None and kind in (None, type(None))) or (kind in _PLAIN and type(given) is kind):
        return given
    raise _unfit(kind, given, where)


_MAPPINGS = (dict, Mapping, get_origin(Mapping[str, int]))
_SEQUENCES = (list, tuple, Sequence, get_origin(Sequence[int]))
_PLAIN = (str, int, float, bool)


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """The fields of a dataclass with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _member(kinds: Sequence[Any], given: Any, where: str) -> Any:
    """Which of the types of a union `given` is."""
    for kind in kinds:
        origin = get_origin(kind) or kind
        fits = {
            torch.Tensor: isinstance(given, dict) and given.keys() == {TENSOR},
            type(None): given is None,
            float: type(given) in (int, float),
        }.get(origin)
        if fits is None and origin in _PLAIN:
            fits = type(given) is origin
        elif fits is None and origin in _SEQUENCES:
            fits = isinstance(given, list)
        elif fits is None:
            fits = isinstance(given, dict) and given.keys() != {TENSOR}
        if fits:
            return kind
    raise _unfit(" or ".join(map(str, kinds)), given, where)


def _tensor(given: Any, count: int, where: str) -> int:
    number = given.get(TENSOR) if isinstance(given, dict) else None
    if type(number) is not int or not 0 <= number < count:
        raise _unfit(torch.Tensor, given, where)
    return number


def _unfit(kind: Any, given: Any, where: str) -> InputError:
    return InputError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {quote(given)}.")
