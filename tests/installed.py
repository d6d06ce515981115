"""What the installed diffusers can make: `make floor` runs with the oldest that is supported, which lacks some models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import pytest

from comfy_tp.core.errors import UnsupportedError
from comfy_tp.core.models import ARCHITECTURES, architecture_named

# The first release that has every class and setting of this pack's architectures: there, nothing is skipped.
COMPLETE = (0, 42)


def skip_without(architecture: str, config: Mapping[str, Any]) -> None:
    """Skip the test where the installed diffusers is too old for the class or for a setting of `config`."""
    try:
        architecture_named(architecture).load_class(config)
    except UnsupportedError as error:
        if tuple(int(part) for part in diffusers.__version__.split(".")[:2]) >= COMPLETE:
            raise
        pytest.skip(str(error))


def examples() -> list[tuple[str, str]]:
    """Every (architecture, small example) that can be made here."""
    return [
        (name, example)
        for name in ARCHITECTURES
        for example in architecture_named(name).supported(architecture_named(name).examples)
    ]
