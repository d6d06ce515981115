"""Do all ranks hold the same? Ranks that were given other seeds, inputs or files are named, not computed on.

A tensor is told by four fixed random projections of a sample of it, so inputs that differ by the rounding of another
kind of GPU pass, and inputs of another seed do not (chance below 1e-7).
"""

from __future__ import annotations

import functools
import inspect
import json
import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError, InputError
from .collectives import Ranks

SAMPLE = 4096  # elements of a tensor that are looked at, evenly spread
PROJECTIONS = 4
SAME = 0.02  # relative difference that is still the same input


def fingerprint(value: Any) -> list[Any]:
    """A JSON description of `value`: of a tensor its shape, norm and projections; of anything else a checksum."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().flatten()
        step = max(1, flat.numel() // SAMPLE)
        sample = flat[::step][:SAMPLE]
        if sample.is_complex():
            sample = torch.view_as_real(sample).flatten()[:SAMPLE]
        sample = sample.to(torch.float32).nan_to_num()
        signs = _signs()[:, : sample.numel()].to(sample.device)
        figures = torch.cat([sample.norm().reshape(1), signs @ sample])
        return ["tensor", list(value.shape), *figures.tolist()]
    return ["value", zlib.crc32(repr(value).encode())]


def gather_json(ranks: Ranks, value: Any) -> list[Any]:
    """Every rank's JSON value, on every rank, in rank order. Two small all-gathers."""
    text = json.dumps(value).encode()
    size = torch.tensor([len(text)], dtype=torch.int64, device=ranks.device)
    sizes = [torch.empty_like(size) for _ in range(ranks.degree)]
    dist.all_gather(sizes, size, group=ranks.group)
    lengths = [int(length) for length in sizes]
    own = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8).to(ranks.device)
    parts = [torch.empty_like(own) for _ in range(ranks.degree)]
    dist.all_gather(parts, own, group=ranks.group)
    return [
        json.loads(part.cpu().numpy().tobytes()[:length]) for part, length in zip(parts, lengths, strict=True)
    ]


def first_difference(descriptions: list[dict[str, list[Any]]]) -> tuple[str, int, str] | None:
    """The first name that some rank describes otherwise than rank 0: (name, rank, how), or None."""
    for rank, description in enumerate(descriptions[1:], start=1):
        for name in {**descriptions[0], **description}:
            how = _difference(descriptions[0].get(name), description.get(name))
            if how is not None:
                return name, rank, how
    return None


def check_inputs(ranks: Ranks, inputs: Mapping[str, Any]) -> None:
    """Raise `InputError` on every rank unless all of them were given the same inputs."""
    found = first_difference(gather_json(ranks, {name: fingerprint(value) for name, value in inputs.items()}))
    if found is not None:
        name, rank, how = found
        raise InputError(
            f"Rank {rank} was given another '{name}' than rank 0 ({how}). All ranks must compute on the same inputs: "
            f"give each the same prompt, the same settings, and a CPU generator with the same seed."
        )


def check_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raise `ConfigError` on every rank unless all of them hold the same whole model in memory."""
    found = first_difference(
        gather_json(ranks, {name: fingerprint(parameter) for name, parameter in model.named_parameters()})
    )
    if found is not None:
        name, rank, how = found
        raise ConfigError(
            f"Rank {rank} holds another '{name}' than rank 0 ({how}), so its shards would not fit together. Load the "
            f"same weight files on every rank, or initialise them from the same seed."
        )


def check_kinds(ranks: Ranks, where: str, holds_shards: bool) -> None:
    """Raise `ConfigError` on every rank unless all of them find rank files at `where`, or all a whole model."""
    found = gather_json(ranks, holds_shards)
    if len(set(found)) > 1:
        raise ConfigError(
            f"{where} holds shards that save_shards wrote for rank {found.index(True)}, but a whole model for rank "
            f"{found.index(False)}. Put the same files on every machine, or name another folder."
        )


def guard_inputs(model: nn.Module, ranks: Ranks) -> None:
    """Check at the first forward of every run of `model` that the ranks agree on its arguments.

    A run is told by its tensors: a sampling loop hands the same prompt embeddings and position ids to every step,
    so a forward that is given a tensor of the last checked one belongs to the same run and costs nothing.
    """
    if ranks.degree == 1:
        return
    signature = inspect.signature(model.forward)
    run: list[weakref.ref[torch.Tensor]] = []

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = signature.bind_partial(*args, **kwargs).arguments
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        known = [seen() for seen in run]
        if any(tensor is one for tensor in tensors for one in known):
            return
        check_inputs(ranks, inputs)
        run[:] = [weakref.ref(tensor) for tensor in tensors]

    model.register_forward_pre_hook(check, with_kwargs=True)


@functools.cache
def _signs() -> torch.Tensor:
    """PROJECTIONS rows of random signs, the same in every process."""
    generator = torch.Generator().manual_seed(20)
    return torch.randint(0, 2, (PROJECTIONS, SAMPLE), generator=generator).float() * 2 - 1


def _difference(expected: list[Any] | None, found: list[Any] | None) -> str | None:
    if expected is None or found is None:
        return "only one of them has it"
    if expected[0] == "tensor" and found[0] == "tensor":
        if expected[1] != found[1]:
            return f"shape {found[1]} instead of {expected[1]}"
        scale = max(abs(expected[2]), abs(found[2]), 1e-12)
        apart = max(abs(a - b) for a, b in zip(expected[2:], found[2:], strict=True)) / scale
        return None if apart <= SAME else f"relative difference about {apart:.2g}"
    return None if expected == found else "another value"
