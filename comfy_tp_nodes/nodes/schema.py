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


def component_inputs(
    name: str, options: Sequence[str], tooltip: str, policies: Sequence[str]
) -> list[io.Input]:
    """The inputs of a text encoder's or VAE's loader; `name` is the folder's."""
    return [
        io.Combo.Input(name, options=list(options), tooltip=tooltip),
        io.Int.Input(
            "degree",
            default=0,
            min=0,
            max=64,
            tooltip="How many ranks share it. 0 takes all usable devices (on the CPU: 1).",
        ),
        io.String.Input(
            "devices",
            default="auto",
            tooltip="auto, cpu, a list such as cuda:0,cuda:1, or tcp://HOST:PORT. The same as the model's shares its ranks.",
        ),
        io.Combo.Input(
            "dtype",
            options=["default", "bfloat16", "float16", "float32"],
            default="default",
            tooltip="The dtype of the weights. default keeps what the file holds.",
        ),
        io.Combo.Input(
            "policy",
            options=list(policies),
            default=policies[0],
            tooltip="keep stays loaded; release after use frees the memory after every encode or decode.",
        ),
    ]


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`; ComfyUI 0.3.75 does not check V3 combos itself."""
    if value not in choices:
        shown = ", ".join(map(str, choices[:12])) + (", ..." if len(choices) > 12 else "")
        raise ConfigError(
            f"{name}: '{value}' is not one of the choices. Choose {shown or 'nothing: the list is empty'}."
        )
