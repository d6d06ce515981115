"""The ranks' commands with one rank that runs out of memory while it stages patches in mode "side"."""

from __future__ import annotations

from typing import Any

from comfy_tp.core.calls import commands


def patch(context: Any, header: dict[str, Any], tensors: list) -> commands.Result:
    """`patch`, but rank 1 raises before it has anything to put in place."""
    if context.rank == 1 and header["mode"] == "side":
        raise MemoryError("no memory for the side path")
    return commands.patch(context, header, tensors)


COMMANDS = {**commands.COMMANDS, "patch": patch}
