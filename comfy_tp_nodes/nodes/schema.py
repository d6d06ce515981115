"""What the nodes' schemas share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from ...core.errors import ConfigError

CATEGORY = "comfy-tp"


def make_schema(*, search_aliases: Sequence[str] = (), **fields: Any) -> io.Schema:
    """An `io.Schema` in our category; `search_aliases` only where this ComfyUI knows the field."""
    known = {field.name for field in dataclasses.fields(io.Schema)}
    if search_aliases and "search_aliases" in known:
        fields["search_aliases"] = list(search_aliases)
    return io.Schema(category=CATEGORY, **fields)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`; ComfyUI 0.3.75 does not check V3 combos itself."""
    if value not in choices:
        shown = ", ".join(map(str, choices[:12])) + (", ..." if len(choices) > 12 else "")
        raise ConfigError(
            f"{name}: '{value}' is not one of the choices. Choose {shown or 'nothing: the list is empty'}."
        )
