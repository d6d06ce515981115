"""The settings of a model, held against the weights that they describe before anything is built from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..wording import quote, short
from .files import Checkpoint

LAYERS = re.compile(r"num_(\w+_)?layers|layers_per_block")
NUMBER = re.compile(r"(?:^|(?<=\.))\d{1,6}(?=\.)")  # a module's name in a tensor's
HEADS = re.compile(r"(\w+_)?num_(\w+_)?heads")


def config_path(path: str | Path) -> Path:
    """Where the config.json of the model at `path` lies: in its folder, or beside its file."""
    path = Path(path)
    return (path if path.is_dir() else path.parent) / "config.json"


def check_settings(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for settings from a config.json that cannot be those of the weights of `checkpoint`.

    No count of layers is above `most_layers`, no width above the bytes of all weights, and no list is longer than that
    of the tensors. Heads are counted in whole numbers: the degree is compared with them before a model is built.
    """
    where = config_path(checkpoint.path)
    layers = most_layers(checkpoint)
    named = settings.get("_class_name")
    if named is not None and not (isinstance(named, str) and named.isidentifier()):
        raise CheckpointError(
            f"{where}: `_class_name` is {quote(named)}, which is no class. Download it again."
        )
    for key, value in settings.items():
        shown = f"{where}: `{short(key)}` is {quote(value)}"
        values = single_values(value)
        numbers = [one for one in values if isinstance(one, int) and not isinstance(one, bool)]
        if HEADS.fullmatch(key) and value is not None and not (numbers == [value] and value >= 1):
            raise CheckpointError(f"{shown}, but heads are counted 1, 2, 3, ... Download it again.")
        if LAYERS.fullmatch(key) and any(number > layers for number in numbers):
            raise CheckpointError(
                f"{shown}, but the weights are those of {layers} layers at most. The file is damaged or of another model; "
                f"download it again."
            )
        if any(number > checkpoint.nbytes for number in numbers):
            raise CheckpointError(
                f"{shown}, more than all weights have bytes ({checkpoint.nbytes}). The file is damaged or of another "
                f"model; download it again."
            )
        if len(values) > max(1, len(checkpoint.entries)):
            raise CheckpointError(
                f"{where}: `{short(key)}` lists {len(values)} values, but there are only {len(checkpoint.entries)} tensors. "
                f"Download it again."
            )


def most_layers(checkpoint: Checkpoint) -> int:
    """How many layers the weights can have: each is a module with a number for a name, its own among its like."""
    return len({number for name in checkpoint.entries for number in NUMBER.findall(name)})


def single_values(value: Any) -> list[Any]:
    """The values of a setting: itself, or those in the lists that it is made of."""
    found, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        else:
            found.append(one)
    return found
