"""The table of the calls, which every rank executes by their names: those of all files in this folder."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..ranks.commands import Command
from ..ranks.context import RankContext
from .call import Call

log = logging.getLogger("comfy_tp.rank")


def prepare() -> None:
    """Import what every load needs: diffusers, whose own imports take longer than torch's."""
    try:
        importlib.import_module("diffusers.models.transformers.transformer_flux2")
    except ImportError as error:
        # A load says better what is missing and what to do.
        log.info("diffusers is not imported yet: %s", error)


def describe_models(rank: RankContext) -> dict[str, Any]:
    """What `status` tells of this rank's models."""
    return {
        "models": [
            {
                "model": key,
                "source": model.opened.checkpoint.path,
                "architecture": model.opened.architecture.name,
                "resident_bytes": model.resident_bytes,
                "parked": model.parked,
            }
            for key, model in rank.models.items()
        ]
    }


def calls(folder: Path) -> Iterator[type[Call]]:
    """The calls that the files of `folder` define."""
    for found in pkgutil.iter_modules([str(folder)]):
        if found.name != "commands":
            module = importlib.import_module(f".{found.name}", __package__)
            for kind in vars(module).values():
                if isinstance(kind, type) and issubclass(kind, Call) and kind.__module__ == module.__name__:
                    if kind.name:
                        yield kind


COMMANDS: dict[str, Command] = {kind.name: kind.command for kind in calls(Path(__file__).parent)}
