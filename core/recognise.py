"""Which model a checkpoint holds: recognised in one way, by the ranks and by whoever starts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint.files import Checkpoint
from .checkpoint.layout import IDENTITY, FileLayout, choose_layout
from .checkpoint.settings import check_settings, config_path
from .errors import CheckpointError, UnsupportedError
from .models import ARCHITECTURES, Architecture, architecture_named, architecture_of
from .models.resemblance import unrecognised
from .wording import quote


@dataclass(frozen=True)
class Recognised:
    """`config` makes the model, whose tensors lie in one of the `layouts`. `described`: the file that says so."""

    architecture: Architecture
    config: dict[str, Any]
    layouts: tuple[FileLayout, ...]
    described: str | Path


def recognise(checkpoint: Checkpoint, model_class: type | None = None) -> Recognised:
    """The model that config.json names, or else the tensors' names and shapes alone; `model_class` if that is asked.

    Raises `CheckpointError` where they fit none or another model, `UnsupportedError` for a class without a plan.
    """
    config = config_of(checkpoint)
    named = (config or {}).get("_class_name")
    if config is not None and (named or model_class is not None):
        if model_class is None:
            architecture = _of_class(checkpoint, named)
        else:
            architecture = architecture_of(model_class)
            if named and named not in {base.__name__ for base in model_class.__mro__}:
                raise CheckpointError(
                    f"{checkpoint.path} holds a {named}, not a {model_class.__name__}. Load it with {named}."
                )
        return Recognised(architecture, dict(config), (IDENTITY,), config_path(checkpoint.path))
    known = [architecture_named(name) for name in ARCHITECTURES]
    for candidate in known:
        config = candidate.recognise(checkpoint.entries)
        if config is not None:
            return Recognised(candidate, config, candidate.layouts, checkpoint.path)
    raise unrecognised(checkpoint.path, checkpoint.entries, known)


def config_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config.json that describes `checkpoint`, a folder's own, with settings that its weights can have.

    One beside a single file may be that of any other model, as in ComfyUI's folder of many. It counts where the file is
    recognised by itself as a model of the class that it names, under diffusers' names, and where it is not recognised.
    Raises `CheckpointError` as `check_settings` does.
    """
    config = _own_config(checkpoint)
    if config is not None:
        check_settings(checkpoint, config)
    return config


def _own_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    config = checkpoint.config
    if config is None or Path(checkpoint.path).is_dir():
        return config
    for architecture in map(architecture_named, ARCHITECTURES):
        if architecture.recognise(checkpoint.entries) is None:
            continue
        layout = choose_layout(checkpoint, architecture.layouts)
        plain = layout.rules is None and not layout.prefix_of(checkpoint.entries)
        return config if plain and config.get("_class_name") == architecture.model_class else None
    return config


def _of_class(checkpoint: Checkpoint, class_name: Any) -> Architecture:
    for name, known in ARCHITECTURES.items():
        if known == class_name:
            return architecture_named(name)
    raise UnsupportedError(
        f"{checkpoint.path} holds a {quote(class_name)}, which cannot be sharded yet. Choose a model of the class "
        f"{', '.join(ARCHITECTURES.values())}."
    )
