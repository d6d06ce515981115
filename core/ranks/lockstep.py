"""How ranks agree at the boundaries of their commands: one small all-reduce on the control group.

In it a rank says whether it goes on, wants to cancel (rank 0 alone), has finished, was stopped or has failed, and
learns what all say. So a rank that raises takes the others out of their command at their next boundary, and the group
stays usable. Ranks that wait in the model's own collectives for one that raised are ended from outside (`watchdog`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Ordered so that the largest and the smallest of all ranks' words tell everything.
GOES_ON, CANCELS, FINISHED, STOPPED, FAILED = 0, 1, 2, 3, 4


class PeerFailed(BaseException):
    """Another rank failed in this command. A BaseException, so that no command mistakes it for its own error."""


class PeerStopped(BaseException):
    """Another rank saw the cancel between two boundaries and has ended this command."""


class LockstepBroken(BaseException):
    """One rank is at a step boundary where another has ended its command."""


class PeerLost(BaseException):
    """The control group is broken: another rank is gone, and so is this group."""


class Lockstep:
    """One rank's side of the agreement, over the control group of `degree` ranks."""

    def __init__(self, group: dist.ProcessGroup | None, degree: int):
        self._group = group
        self._degree = degree
        self._numbers = torch.zeros(3, dtype=torch.int64)

    def agree(self, state: int, size: int = 0) -> tuple[int, int]:
        """What all ranks together say, and the largest `size`.

        Raises PeerFailed or PeerStopped where this rank goes on and another has failed or was stopped, and
        LockstepBroken where some ranks have finished and others have not.
        """
        numbers = self._numbers
        numbers[0], numbers[1], numbers[2] = state, -state, size
        self.collective(dist.all_reduce, numbers, dist.ReduceOp.MAX)
        highest, lowest, longest = numbers.tolist()
        if state in (GOES_ON, CANCELS):
            if highest == FAILED:
                raise PeerFailed
            if highest == STOPPED:
                raise PeerStopped
        if highest == FINISHED and -lowest != FINISHED:
            raise LockstepBroken
        return highest, longest

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON can say), in rank order. A boundary of a command that goes on."""
        text = json.dumps(value).encode()
        return self._texts(text, self.agree(GOES_ON, len(text))[1])

    def exchange(self, value: Any) -> list[Any]:
        """The same after a failure, where no rank agrees to anything any more."""
        text = json.dumps(value).encode()
        sizes = torch.tensor([len(text)], dtype=torch.int64)
        self.collective(dist.all_reduce, sizes, dist.ReduceOp.MAX)
        return self._texts(text, int(sizes[0]))

    def _texts(self, text: bytes, longest: int) -> list[Any]:
        own = torch.frombuffer(
            bytearray(len(text).to_bytes(8, "little") + text.ljust(longest)), dtype=torch.uint8
        )
        parts = [torch.empty_like(own) for _ in range(self._degree)]
        self.collective(dist.all_gather, parts, own)
        raws = [part.numpy().tobytes() for part in parts]
        return [json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) for raw in raws]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as rank 0 has it."""
        self.collective(dist.broadcast, tensor, 0)
        return tensor

    def collective(self, operation: Callable[..., Any], *args: Any) -> None:
        """One collective on the control group; raises PeerLost where the group is broken."""
        try:
            operation(*args, group=self._group)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
