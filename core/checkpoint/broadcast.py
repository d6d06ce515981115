"""Replicated tensors: which rank reads each, and how the others get it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from .files import Checkpoint
from .layout import Wanted

# Tensors below this size travel together, in messages of at most BUCKET bytes.
SMALL = 1 << 20
BUCKET = 16 << 20


def owners(wanted: Mapping[str, Wanted], checkpoint: Checkpoint, degree: int) -> dict[str, int]:
    """The rank that reads each replicated parameter, the same on every rank: the largest first, to the least laden."""
    sizes = {
        name: sum(
            checkpoint.entries[piece.tensor].nbytes
            for piece in want.pieces
            if piece.tensor in checkpoint.entries
        )
        for name, want in wanted.items()
        if want.spec.is_replicated
    }
    load = [0] * degree
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        chosen[name] = rank
        load[rank] += sizes[name]
    return chosen


def broadcast_tensors(
    tensors: Mapping[str, torch.Tensor], owner: Mapping[str, int], group: dist.ProcessGroup | None, rank: int
) -> int:
    """Send each tensor of `owner` from its owner to all; small ones together. Returns the bytes sent by or to us."""
    total = 0
    for source in sorted(set(owner.values())):
        root = dist.get_global_rank(group, source) if group is not None else source
        bucket: list[torch.Tensor] = []
        for name in sorted(name for name in owner if owner[name] == source):
            flat = tensors[name].reshape(-1).view(torch.uint8)
            total += flat.numel()
            if flat.numel() >= SMALL:
                dist.broadcast(flat, root, group=group)
                continue
            if sum(part.numel() for part in bucket) + flat.numel() > BUCKET:
                _broadcast_bucket(bucket, root, group, source == rank)
                bucket = []
            if flat.numel():
                bucket.append(flat)
        if bucket:
            _broadcast_bucket(bucket, root, group, source == rank)
    return total


def _broadcast_bucket(
    parts: list[torch.Tensor], root: int, group: dist.ProcessGroup | None, is_source: bool
) -> None:
    message = torch.cat(parts)
    dist.broadcast(message, root, group=group)
    if not is_source:
        for part, received in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(received)
