"""`RemoteModel`: a sharded model that lives on a resident rank group, as its client sees it."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..lora.apply import PatchReport
from ..lora.patch import Patch
from ..lora.wire import PatchSender
from ..ranks.client import RankGroup

KEPT_TENSORS = (
    32  # conditionings and references that the ranks keep per model; the least recently used goes first
)

UNKNOWN = object()  # a `patches_key` that equals no other

Poll = Callable[[], None]


@dataclass(frozen=True)
class ModelInfo:
    """What the ranks report of a loaded model. Sizes in bytes, one entry per rank; times in seconds."""

    architecture: str
    config: dict[str, Any]
    layout: str
    dtype: str
    parameters: int
    degree: int
    devices: list[str]
    resident_bytes: list[int]
    bytes_read: list[int]
    load_seconds: float
    all_reduces: int
    notes: list[str] = field(default_factory=list)

    @property
    def gb_per_second(self) -> float:
        """Bytes read by all ranks over the load time, in 1e9 bytes a second."""
        return sum(self.bytes_read) / max(self.load_seconds, 1e-9) / 1e9


@dataclass(frozen=True)
class Conditioning:
    """One side of the guidance for `RemoteModel.sample`: keys from `keep`, and what goes with them."""

    context: int
    guidance: float | None = None
    references: Sequence[int] = ()
    reference_method: str = "index"
    pooled: int | None = None

    def header(self) -> dict[str, Any]:
        """The JSON form that crosses the channel."""
        return {
            "context": self.context,
            "guidance": self.guidance,
            "references": list(self.references),
            "reference_method": self.reference_method,
            "pooled": self.pooled,
        }


class RemoteModel:
    """A model loaded in shards on `group`. All tensors given and returned are on the CPU.

    Errors of the ranks arrive as the `TPError` subclasses that they raised; a dead or hung rank as `RankError`.
    `poll` is called every 50 ms while waiting; whatever it raises cancels the command and propagates.
    """

    _ids = itertools.count(1)

    def __init__(self, group: RankGroup, model_id: str, info: ModelInfo):
        self.group = group
        self.model_id = model_id
        self.info = info
        self.last_step_seconds: float | None = None
        self.patches_key: Any = None
        self._patches = PatchSender()
        self._keys = itertools.count(1)
        self._kept: OrderedDict[int, Callable[[], torch.Tensor | None]] = OrderedDict()
        self._forgotten: list[int] = []  # what the ranks have not been told yet
        self._closed = False

    @classmethod
    def load(
        cls,
        group: RankGroup,
        source: str,
        *,
        kind: str = "transformer",
        dtype: str = "default",
        files: dict[str, list[int]] | None = None,
        on_progress: Callable[[int, int, float], None] | None = None,
        poll: Poll | None = None,
    ) -> RemoteModel:
        """Load the model folder, single file or hub id `source` in shards.

        `kind`: "transformer", "text_encoder" or "vae" (both folders of a FLUX.2 pipeline).
        `dtype`: "default" (as stored), "float32", "bfloat16", "float16", "float8_e4m3fn". `on_progress(bytes_done,
        bytes_total, gb_per_second)` runs in this thread. With `files` (`identities`) the ranks of this machine refuse others
        than these. Raises `CheckpointError`, `PlanError`, `ConfigError`.
        """
        model_id = f"m{next(cls._ids)}"

        def event(header: dict[str, Any], _tensors: list[torch.Tensor]) -> None:
            if on_progress is not None and header.get("event") == "progress":
                on_progress(header["done"], header["total"], header["gb_per_second"])

        header = {
            "model": model_id,
            "kind": kind,
            "source": str(source),
            "dtype": dtype,
            "files": files,
        }
        reply = group.request("load", header, on_event=event, poll=poll)
        return cls(group, model_id, ModelInfo(**reply.header["info"]))

    @property
    def alive(self) -> bool:
        """Whether the ranks still hold the model."""
        return self.group.alive and not self._closed

    def keep(self, tensor: torch.Tensor, *, poll: Poll | None = None) -> int:
        """Send `tensor` to the ranks once and return its key; the same tensor object is not sent again.

        Used for conditionings [1, L, D] and reference latents, which do not change during a run.
        """
        for key, owner in self._kept.items():
            if owner() is tensor:
                self._kept.move_to_end(key)
                return key
        while len(self._kept) >= KEPT_TENSORS:
            self._forgotten.append(self._kept.popitem(last=False)[0])
        key = next(self._keys)
        header = {"model": self.model_id, "key": key, "forget": self._forgotten}
        # Until the ranks have answered they may hold it, or not: then they are told to forget it the next time.
        self._forgotten = [*self._forgotten, key]
        self.group.request("keep", header, [tensor.detach().cpu().contiguous()], poll=poll)
        self._forgotten = []
        self._kept[key] = weakref.ref(tensor)
        return key

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        contexts: Sequence[int],
        *,
        guidance: torch.Tensor | None = None,
        references: Sequence[torch.Tensor | Sequence[int]] = (),
        reference_method: str = "index",
        pooled: torch.Tensor | None = None,
        options: Mapping[str, Any] | None = None,
        poll: Poll | None = None,
    ) -> torch.Tensor:
        """One model call: velocity float32 in the shape of `x` [B, C, h, w] or [B, C, 1, h, w] at `timestep` [B].

        `contexts` are keys from `keep`, each for an equal share of the batch, in batch order. `guidance` [B],
        `references`: each a latent [1 or B, C, h_k, w_k], or keys from `keep` as in `contexts`. `pooled` [B, D] for
        models that take one.
        """
        tensors = [x, timestep]
        header: dict[str, Any] = {
            "model": self.model_id,
            "contexts": list(contexts),
            "references": [[] if isinstance(one, torch.Tensor) else list(one) for one in references],
            "reference_method": reference_method,
            "guidance": guidance is not None,
            "pooled": pooled is not None,
            "options": dict(options or {}),
        }
        tensors += [guidance] if guidance is not None else []
        tensors += [pooled] if pooled is not None else []
        tensors += [one for one in references if isinstance(one, torch.Tensor)]
        start = time.perf_counter()
        reply = self.group.request(
            "forward", header, [t.detach().cpu().contiguous() for t in tensors], poll=poll
        )
        self.last_step_seconds = time.perf_counter() - start
        return reply.tensors[0]

    def sample(
        self,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        sampler: str,
        positive: Conditioning,
        negative: Conditioning | None = None,
        cfg: float = 1.0,
        options: Mapping[str, Any] | None = None,
        on_step: Callable[[int, int, torch.Tensor | None], None] | None = None,
        preview: bool = True,
        poll: Poll | None = None,
    ) -> torch.Tensor:
        """The whole denoising loop on the ranks: latent [B, C, h, w] float32 after the last sigma.

        `x` is the noised start latent [B, C, h, w], `sigmas` [S + 1] descending. `on_step(step, steps, x0)` runs in
        this thread after each step, with the denoised estimate when `preview`. `negative` is used when `cfg` != 1.
        Raises `UnsupportedError` for a sampler the ranks do not run themselves.
        """

        def event(header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
            if header.get("event") != "step":
                return
            self.last_step_seconds = header.get("seconds", self.last_step_seconds)
            if on_step is not None:
                on_step(header["step"], header["steps"], tensors[0] if tensors else None)

        header = {
            "model": self.model_id,
            "sampler": sampler,
            "positive": positive.header(),
            "negative": negative.header() if negative is not None else None,
            "cfg": cfg,
            "options": dict(options or {}),
            "preview": preview,
        }
        tensors = [x.detach().float().cpu().contiguous(), sigmas.detach().float().cpu().contiguous()]
        return self.group.request("sample", header, tensors, on_event=event, poll=poll).tensors[0]

    def encode_text(
        self, tokens: torch.Tensor, mask: torch.Tensor, *, poll: Poll | None = None
    ) -> torch.Tensor:
        """The conditioning [1, L, D] float32 of `tokens` [1, L]; `mask` [1, L] is 0 at padding. A text encoder's."""
        header = {"model": self.model_id}
        return self.group.request("encode_text", header, [tokens, mask], poll=poll).tensors[0]

    def encode_image(self, pixels: torch.Tensor, *, poll: Poll | None = None) -> torch.Tensor:
        """Latents [B, C, h, w] float32 of `pixels` [B, 3, H, W] in -1..1. A VAE's."""
        return self._on_vae("vae_encode", pixels, poll)

    def decode_latent(self, latents: torch.Tensor, *, poll: Poll | None = None) -> torch.Tensor:
        """Pixels [B, 3, H, W] float32 in about -1..1 of `latents` [B, C, h, w]. A VAE's."""
        return self._on_vae("vae_decode", latents, poll)

    def _on_vae(self, command: str, tensor: torch.Tensor, poll: Poll | None) -> torch.Tensor:
        tensors = [tensor.detach().float().cpu().contiguous()]
        return self.group.request(command, {"model": self.model_id}, tensors, poll=poll).tensors[0]

    def set_patches(
        self, patches: Sequence[Patch], *, mode: str = "auto", poll: Poll | None = None
    ) -> PatchReport:
        """Replace the LoRA patches on the shards by `patches`; none at all gives the model as it was loaded.

        Tensors cross once: a patch that the ranks hold already (the same tensor objects at the same place) is told by
        its strengths alone. `mode`: "auto", "merge" or "side" (see `core.lora`). No checkpoint bytes are read. Raises
        `InputError` and `UnsupportedError`; the patches in place then stay as they are.
        """
        entries, tensors, held = self._patches.write(patches)
        header = {"model": self.model_id, "mode": mode, "patches": entries}
        try:
            reply = self.group.request("patch", header, tensors, poll=poll).header
        except BaseException:
            # A cancelled command may have been carried out: what the ranks hold is unknown.
            self._patches.forget()
            self.patches_key = UNKNOWN
            raise
        self._patches.accepted(held)
        return PatchReport(**reply["report"])

    def park(self, *, poll: Poll | None = None) -> int:
        """Move the shards to host memory; returns the device bytes freed over all ranks. `forward` brings them back."""
        return self.group.request("park", {"model": self.model_id}, poll=poll).header["freed"]

    def unload(self) -> int:
        """Free the shards on every rank; returns the bytes freed. Harmless when already unloaded or the group is gone."""
        if self._closed or not self.group.alive:
            self._closed = True
            return 0
        self._closed = True
        return self.group.request("unload", {"model": self.model_id}).header["freed"]
