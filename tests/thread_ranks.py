"""Ranks as threads of one process: the sharded modules and collectives for real, without the cost of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from comfy_tp.core.tp.collectives import Ranks

WAIT = 60.0


class ThreadGroup:
    """What the ranks of one group share: a barrier and a table for the tensors that are being summed."""

    def __init__(self, degree: int):
        self.degree = degree
        self.barrier = threading.Barrier(degree)
        self.table: list[torch.Tensor | None] = [None] * degree


class ThreadRanks(Ranks):
    """`Ranks` whose all-reduce sums over the threads of a `ThreadGroup`."""

    def __init__(self, rank: int, group: ThreadGroup):
        super().__init__(rank, group.degree, "cpu")
        self.threads = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.collectives += 1
        self.collective_bytes += tensor.numel() * tensor.element_size()
        self.threads.table[self.rank] = tensor.clone()
        self.threads.barrier.wait(WAIT)
        total = sum(self.threads.table[1:], self.threads.table[0])
        self.threads.barrier.wait(WAIT)
        return tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.collectives += 1
        self.collective_bytes += tensor.numel() * tensor.element_size()
        self.threads.table[self.rank] = tensor.clone()
        self.threads.barrier.wait(WAIT)
        parts = list(self.threads.table)
        self.threads.barrier.wait(WAIT)
        return parts


def on_ranks(degree: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Run `work(ranks)` on `degree` ranks at once; their results in rank order. Raises what a rank raised."""
    group = ThreadGroup(degree)
    results: list[Any] = [None] * degree
    errors: list[BaseException | None] = [None] * degree

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, group))
        except BaseException as error:
            errors[rank] = error
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    raised = [error for error in errors if error is not None]
    for error in raised:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if raised:
        raise raised[0]
    return results
