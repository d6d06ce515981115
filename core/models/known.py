"""The table of the architectures: those of all files in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import UnsupportedError
from .architecture import Architecture, no_plan


def architectures(folder: Path) -> Iterator[Architecture]:
    """What the files of `folder` define as ARCHITECTURE."""
    for found in pkgutil.iter_modules([str(folder)]):
        if found.name != "known":
            module = importlib.import_module(f".{found.name}", __package__)
            if hasattr(module, "ARCHITECTURE"):
                yield module.ARCHITECTURE


_BY_NAME = {each.name: each for each in architectures(Path(__file__).parent)}
# Architecture name -> the class that diffusers calls it by.
ARCHITECTURES: dict[str, str] = {name: each.model_class for name, each in _BY_NAME.items()}


def architecture_named(name: str) -> Architecture:
    """The architecture of that `name` in `ARCHITECTURES`."""
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"Unknown architecture '{name}'. Known: {', '.join(ARCHITECTURES)}.")
    return _BY_NAME[name]


def architecture_of(model_class: type) -> Architecture:
    """The architecture of a model class, ours by name (base classes too) or one made from its own `_tp_plan`.

    Raises `PlanError` for a class without a plan (R4).
    """
    by_class = {each.model_class: each for each in _BY_NAME.values()}
    for base in model_class.__mro__:
        if base.__name__ in by_class:
            return by_class[base.__name__]
    if getattr(model_class, "_tp_plan", None):
        return Architecture(name=model_class.__name__, model_class=model_class.__name__)
    raise no_plan(model_class.__name__, f"Models that have one: {', '.join(sorted(by_class))}. ")
