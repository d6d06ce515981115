"""`RankContext`: what a command sees of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Cancelled
from . import channel as wire
from .failure import describe
from .heartbeat import RankHeartbeat
from .lockstep import CANCELS, GOES_ON, Lockstep
from .port import Order


class RankContext:
    """What a command sees of the group.

    rank, degree: this rank's number and how many there are. device: where this rank's shards live.
    data_group: the process group of the model's collectives (nccl or gloo).
    models: what commands keep between calls, by a key of their choice.
    name, logs: what errors call the device, and where they say that this rank's log is, if the client cannot know.
    order: the command that runs and its client, at rank 0.
    """

    def __init__(
        self,
        rank: int,
        degree: int,
        device: torch.device,
        data_group: dist.ProcessGroup | None,
        control_group: dist.ProcessGroup | None,
        heartbeat: RankHeartbeat,
        *,
        name: str | None = None,
        logs: str | None = None,
    ):
        self.rank = rank
        self.degree = degree
        self.device = device
        self.data_group = data_group
        self.lockstep = Lockstep(control_group, degree)
        self.heartbeat = heartbeat
        self.models: dict[Any, Any] = {}
        self.name = name or str(device)
        self.logs = logs
        self.order: Order | None = None

    def report(self, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send an event to the client. Rank 0 alone does; elsewhere nothing happens."""
        if self.order is not None:
            self.order.client.send(wire.EVENT, self.order.frame.request, header=header, tensors=tensors)

    def describe(self, error: BaseException) -> dict[str, Any]:
        """An exception of this rank as JSON."""
        return describe(error, self.rank, self.name, self.logs)

    def progress(self, note: str | None = None) -> None:
        """Say that the command makes progress: once per step, tensor read, or whatever takes long."""
        self.heartbeat.progress(note)

    def check_cancelled(self) -> None:
        """A step boundary; all ranks must call it, equally often. Raises Cancelled on all of them or on none.

        If another rank has failed, the command ends here too. Counts as progress.
        """
        self.progress()
        if self.lockstep.agree(GOES_ON if self._wanted() else CANCELS)[0] == CANCELS:
            raise Cancelled("The command was cancelled.")

    def stop_if_cancelled(self) -> None:
        """Raise Cancelled on this rank alone, if the client cancelled or another rank has failed.

        For long work without the others, such as reading files: cheap, no collective, any number of calls. A rank
        that misses it meets the others at the next boundary; so let a `check_cancelled` follow before anything is
        kept.
        """
        if not self._wanted() or self.heartbeat.told_to_stop():
            raise Cancelled("The command was cancelled.")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON can say), on every rank, in rank order. A boundary too."""
        return self.lockstep.gather(value)

    def _wanted(self) -> bool:
        return self.order is None or self.order.client.wants(self.order.frame.request)
