"""One rank's side of a loaded model: its shards, what its client keeps there, and the calls it answers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..checkpoint.reader import ReadReport
from ..errors import InputError
from ..load import OpenedModel, load_opened
from ..lora.apply import WeightPatches
from ..tp.collectives import Ranks
from .inputs import Inputs, Part, Resolved, cast, each


@dataclass
class ResidentModel:
    """A sharded model on this rank. `dtype` is the compute dtype; `kept` holds the client's tensors by key."""

    opened: OpenedModel
    module: nn.Module
    ranks: Ranks
    dtype: torch.dtype
    report: ReadReport
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    parked: bool = False

    @functools.cached_property
    def patches(self) -> WeightPatches:
        """The LoRA patches on this rank's shards."""
        return WeightPatches(self.module)

    @classmethod
    def load(
        cls,
        opened: OpenedModel,
        ranks: Ranks,
        *,
        dtype: torch.dtype | None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], None] | None = None,
    ) -> ResidentModel:
        """Read this rank's shards of `opened`; errors as in `load_opened`."""
        module, report = load_opened(opened, ranks, dtype=dtype, progress=progress, cancelled=cancelled)
        return cls(opened, module, ranks, module.tensor_parallel.compute_dtype, report)

    @property
    def resident_bytes(self) -> int:
        """Bytes of this rank's parameters and buffers."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def keep(self, key: int, tensor: torch.Tensor, forget: Sequence[int]) -> None:
        """Hold `tensor` on this rank's device in the compute dtype under `key`, and drop the keys in `forget`."""
        for old in forget:
            self.kept.pop(old, None)
        self.kept[key] = tensor.to(self.ranks.device, self.dtype)

    def kept_tensor(self, key: int) -> torch.Tensor:
        """The tensor that the client keeps here under `key`."""
        if key not in self.kept:
            raise InputError(
                f"The ranks hold no tensor under key {key}; send it again. This model was reloaded meanwhile."
            )
        return self.kept[key]

    def shared_by(self, keys: Sequence[int], batch: int) -> torch.Tensor:
        """A tensor [batch, ...] from kept ones [1 or b, ...], each for an equal share of the batch, in order.

        Used for conditionings [batch, L, D] and for reference latents [batch, C, h_k, w_k].
        """
        share, rest = divmod(batch, len(keys))
        if rest:
            raise InputError(f"A batch of {batch} cannot be shared equally by {len(keys)} conditionings.")
        parts = []
        for key in keys:
            kept = self.kept_tensor(key)
            if kept.shape[0] not in (1, share):
                raise InputError(f"A conditioning of batch {kept.shape[0]} does not fit a batch of {share}.")
            parts.append(kept.expand(share, *[-1] * (kept.ndim - 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def resolved(self, inputs: Inputs, batch: int | None = None) -> Resolved:
        """`inputs` with the tensors that are meant: kept ones for a `batch`, or as they are kept; sent ones as they came."""

        def tensor(part: Part) -> torch.Tensor:
            if isinstance(part, torch.Tensor):
                return part.to(self.ranks.device)
            if batch is None:
                return torch.cat([self.kept_tensor(key) for key in part.keys])
            return self.shared_by(part.keys, batch)

        return each(tensor, inputs)

    def velocity(self, x: torch.Tensor, timestep: torch.Tensor, inputs: Resolved) -> torch.Tensor:
        """The model's prediction in the shape of `x` [B, C, h, w] or [B, C, 1, h, w], float32, computed in its own dtype."""
        predict = self.opened.architecture.predict
        if predict is None:
            raise InputError(
                f"{self.opened.architecture.model_class} cannot be sampled from ComfyUI's inputs yet."
            )
        device, dtype = self.ranks.device, self.dtype
        with torch.inference_mode():
            moved = each(lambda tensor: cast(tensor, dtype, device), inputs)
            time = timestep.to(device, torch.float32)
            return predict(self.module, x.to(device, dtype), time, **moved).float()

    def park(self) -> int:
        """Move the shards to host memory; returns the device bytes freed (0 on a CPU rank, where they stay)."""
        if self.parked or self.ranks.device.type == "cpu":
            return 0
        freed = self.resident_bytes
        self.module.to("cpu")
        self.kept = {key: tensor.cpu() for key, tensor in self.kept.items()}
        self.parked = True
        release_cache(self.ranks.device)
        return freed

    def unpark(self) -> None:
        """Bring parked shards back to the device."""
        if self.parked:
            self.module.to(self.ranks.device)
            self.kept = {key: tensor.to(self.ranks.device) for key, tensor in self.kept.items()}
            self.parked = False


def release_cache(device: torch.device) -> None:
    """Give the allocators' free blocks back to the device and the host, so that other processes can use them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    # Without it glibc keeps what the threads that read the files have freed, a little more after every load.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
