"""Architectures that can be sharded: each file holds a plan, its file layouts and the call from ComfyUI's inputs."""

from __future__ import annotations

from .architecture import Architecture, unknown_settings
from .known import ARCHITECTURES, architecture_named, architecture_of

__all__ = ["ARCHITECTURES", "Architecture", "architecture_named", "architecture_of", "unknown_settings"]
