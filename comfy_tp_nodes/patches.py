"""Weight patches (LoRA) of a MODEL on their way to the shards."""

from __future__ import annotations

from typing import Any

from ..core.errors import UnsupportedError


def push_patches(patcher: Any) -> None:
    """Make the shards carry exactly the weight patches of `patcher`; does nothing when they already do.

    Called after every load and whenever another clone of the MODEL is used.
    """
    remote = patcher.sharded.require()
    if not patcher.patches:
        wanted = None
    else:
        wanted = patcher.patches_uuid
    if remote.patches_key == wanted:
        return
    patcher.model.remote_patch(patcher)
    remote.patches_key = wanted


def refuse_patches(patcher: Any) -> None:
    """Raise `UnsupportedError` for weight patches that shards cannot carry."""
    if patcher.patches:
        keys = sorted(patcher.patches)
        raise UnsupportedError(
            f"LoRA patches cannot be applied to the shards yet ({len(keys)} weights, first '{keys[0]}'). Remove the "
            f"LoRA loader between Load TP Model and the sampler."
        )
