"""The ranks' commands with one rank that runs out of memory while it stages patches in mode "side"."""

from __future__ import annotations

from comfy_tp.core.calls import commands
from comfy_tp.core.calls.patch import SetPatches
from comfy_tp.core.lora.apply import PatchReport
from comfy_tp.core.ranks.context import RankContext


class FailingPatches(SetPatches):
    """`SetPatches`, but rank 1 raises before it has anything to put in place."""

    def run(self, rank: RankContext) -> PatchReport:
        if rank.rank == 1 and self.mode == "side":
            raise MemoryError("no memory for the side path")
        return super().run(rank)


COMMANDS = {**commands.COMMANDS, "patch": FailingPatches.command}
