"""`Ranks`: the ranks that share one model, seen from one of them. Every reduce of a forward goes through here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .config import TensorParallelConfig

DEVICE_TYPES = ("cuda", "xpu", "cpu")


class Ranks:
    """One model's ranks: this process's `rank`, the `degree`, the `device` of its shards and their process group.

    `collectives` and `collective_bytes` count what forwards reduce, for tests and the bench.
    """

    def __init__(self, rank: int, degree: int, device: torch.device | str, group: Any = None):
        self.rank = rank
        self.degree = degree
        self.device = torch.device(device)
        self.group = group
        self.collectives = 0
        self.collective_bytes = 0

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Ranks:
        """A model that is not shared: degree 1, no process group, no collectives."""
        return cls(0, 1, device)

    @classmethod
    def of(cls, config: TensorParallelConfig, device: torch.device | str | None = None) -> Ranks:
        """The ranks of `config` seen from this process.

        `device` defaults to the current CUDA device when the group (at degree 1 the default one, if there is one) runs
        NCCL, else the CPU. Raises `ConfigError` when torch.distributed is not initialised, the degree does not equal
        the group's size, or the device type cannot hold shards. Nothing is changed before these checks.
        """
        if config.tp_degree == 1 and config.group() is None:
            return cls.single(check_device(device if device is not None else current_device(None)))
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                f"tp_degree={config.tp_degree} needs an initialised process group. Start the script with torchrun and "
                f"call torch.distributed.init_process_group() first, or use the `comfy-tp generate` command, which "
                f"starts the ranks itself."
            )
        group = config.group() or dist.group.WORLD
        size = dist.get_world_size(group)
        if size != config.tp_degree:
            raise ConfigError(
                f"tp_degree={config.tp_degree}, but the process group has {size} ranks. Set tp_degree={size}, start "
                f"{config.tp_degree} ranks, or pass the process group of {config.tp_degree} ranks."
            )
        device = check_device(device if device is not None else current_device(group))
        return cls(dist.get_rank(group), size, device, group)

    def on_device(self) -> AbstractContextManager[Any]:
        """Inside, `device` is the current one of its kind: NCCL agrees there when it has no tensor of the model to go by."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place, and return it. Degree 1 is a no-op."""
        if self.degree == 1:
            return tensor
        self._count(tensor)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """`tensor` of every rank, in rank order; all have the same shape. Degree 1 gives back its own."""
        if self.degree == 1:
            return [tensor]
        self._count(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.degree)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def _count(self, tensor: torch.Tensor) -> None:
        # A counter that changes would make torch.compile compile every call anew.
        if not torch.compiler.is_compiling():
            self.collectives += 1
            self.collective_bytes += tensor.numel() * tensor.element_size()

    def __deepcopy__(self, memo: dict) -> Ranks:
        return self  # a process group cannot be copied; copies of a model share their ranks


def current_device(group: Any) -> torch.device:
    """Where this process computes in `group` (None: the default one): its current CUDA device under NCCL, else the CPU."""
    ready = dist.is_available() and dist.is_initialized() and torch.cuda.is_available()
    # A group may have a backend per type of device, such as "cpu:gloo,cuda:nccl".
    if ready and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_device(device: torch.device | str) -> torch.device:
    """`device` as a torch.device, or `ConfigError` when its type cannot hold shards."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"'{device}' is not a device: {str(error).splitlines()[0]}") from error
    if device.type not in DEVICE_TYPES:
        raise ConfigError(
            f"Tensor parallelism cannot place shards on a '{device.type}' device. Supported device types: "
            f"{', '.join(DEVICE_TYPES)}."
        )
    return device
