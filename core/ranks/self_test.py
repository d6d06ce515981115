"""The test of the collectives before a group serves anybody."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import RankError
from .heartbeat import EXIT_SELF_TEST

log = logging.getLogger("comfy_tp.rank")

# GPUs whose P2P is broken often do not give wrong sums, but none at all.
SELF_TEST_TIMEOUT = 60.0


def self_test(group: dist.ProcessGroup | None, rank: int, degree: int, device: torch.device) -> str | None:
    """One all-reduce per dtype against the known sum; returns what is wrong, or None.

    All sums are whole numbers up to 256, which every dtype here holds exactly.
    """
    weight = degree * (degree + 1) // 2
    top = max(1, 256 // weight)
    pattern = torch.arange(4096, device=device) % (top + 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = (pattern * (rank + 1)).to(dtype)
        dist.all_reduce(tensor, group=group)
        wrong = int((tensor.float() != (pattern * weight).float()).sum())
        if wrong:
            return f"an all-reduce of {dtype} over {degree} ranks gave {wrong} wrong sums of {len(pattern)}"
    return None


def run_self_test(
    group: dist.ProcessGroup | None,
    rank: int,
    degree: int,
    device: torch.device,
    failed: Callable[[BaseException], None],
) -> None:
    """`self_test`, in bounded time.

    Raises RankError where it fails, or `SystemExit(EXIT_SELF_TEST)` where it may pass without P2P. Where it does not
    end, `failed` is called with the same, in another thread, and must end this process.
    """

    def failure(wrong: str) -> BaseException:
        hint = " Try again with NCCL_P2P_DISABLE=1." if p2p_in_use(group) else ""
        text = f"The start-up test failed on rank {rank} ({device}): {wrong}.{hint}"
        if not hint:
            return RankError(text, rank=rank)
        log.error("%s", text)
        return SystemExit(EXIT_SELF_TEST)

    late = f"an all-reduce over {degree} ranks did not end within {SELF_TEST_TIMEOUT:g} s"
    timer = threading.Timer(SELF_TEST_TIMEOUT, lambda: failed(failure(late)))
    timer.daemon = True
    timer.start()
    try:
        wrong = self_test(group, rank, degree, device)
    finally:
        timer.cancel()
    if wrong:
        raise failure(wrong)


def p2p_in_use(group: dist.ProcessGroup | None) -> bool:
    """Whether the collectives may go directly from GPU to GPU."""
    return dist.get_backend(group) == "nccl" and not os.environ.get("NCCL_P2P_DISABLE")
