"""ComfyUI's own model classes without weights, one module per family, for models that live on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def given(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as diffusers' class reads it: with `defaults` where it is silent or says null."""
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}
