"""Going on together or not at all: what one rank cannot do is known to all, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError

Result = TypeVar("Result")


class Together:
    """The ranks of `group`, as rank `rank` of `degree` sees them; alone without a group."""

    def __init__(self, group: dist.ProcessGroup | None, degree: int, rank: int):
        self._group = group
        self._degree = degree
        self._rank = rank

    def do(self, others: str, work: Callable[..., Result], *args: Any) -> Result:
        """What `work(*args)` returns here, once it has returned on every rank. All ranks call this.

        Where it raised, the rank itself raises that (a device out of memory too), and the others a `CheckpointError`
        that begins with the number of that rank and goes on with `others`.
        """
        try:
            result = work(*args)
        except BaseException:
            self._failed(True)
            raise
        failed = self._failed(False)
        if failed:
            raise CheckpointError(f"Rank {', '.join(map(str, failed))} {others}")
        return result

    def _failed(self, here: bool) -> list[int]:
        """The ranks that failed, known to all of them."""
        if self._group is None or self._degree == 1:
            return []
        on_gpu = dist.get_backend(self._group) == "nccl"
        where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        flags = torch.zeros(self._degree, dtype=torch.int32, device=where)
        flags[self._rank] = int(here)
        dist.all_reduce(flags, group=self._group)
        return [index for index, flag in enumerate(flags.tolist()) if flag]
