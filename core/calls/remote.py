"""`RemoteModel`: a sharded model that lives on a resident rank group, as its client sees it."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..lora.apply import PatchReport
from ..lora.patch import Patch
from ..ranks.client import RankGroup
from .call import Answer, ModelCall, Poll
from .forward import Forward, Keep
from .inputs import Inputs, kept_keys
from .keys import KEYS
from .load import Load, ModelInfo, Progress
from .park import Park, Unload
from .patch import PatchSender, SetPatches
from .sample import Sample, Step

KEPT_TENSORS = (
    32  # conditionings and references that the ranks keep per model; the least recently used goes first
)

UNKNOWN = object()  # a `patches_key` that equals no other


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
        self._kept: OrderedDict[int, None] = OrderedDict()  # the keys of what the ranks keep
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

        def event(progress: Progress) -> None:
            if on_progress is not None:
                on_progress(progress.done, progress.total, progress.gb_per_second)

        info = Load(model_id, kind, str(source), dtype, files).ask(group, on_event=event, poll=poll)
        return cls(group, model_id, info)

    @property
    def alive(self) -> bool:
        """Whether the ranks still hold the model."""
        return self.group.alive and not self._closed

    def hold(self, inputs: Inputs, *, poll: Poll | None = None) -> None:
        """Send the tensors that `inputs` name by keys to the ranks, those that do not hold them yet."""
        for key in kept_keys(inputs):
            if key in self._kept:
                self._kept.move_to_end(key)
                continue
            while len(self._kept) >= KEPT_TENSORS:
                self._forgotten.append(self._kept.popitem(last=False)[0])
            call = Keep(self.model_id, key, KEYS.tensor(key), self._forgotten)
            # Until the ranks have answered they may hold it, or not: then they are told to forget it the next time.
            self._forgotten = [*self._forgotten, key]
            call.ask(self.group, poll=poll)
            self._forgotten = []
            self._kept[key] = None

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, inputs: Inputs, *, poll: Poll | None = None
    ) -> torch.Tensor:
        """One model call: velocity float32 in the shape of `x` [B, C, h, w] or [B, C, 1, h, w] at `timestep` [B].

        `inputs` by the names of the model's `predict`: "context", "guidance", "references" and so on. Tensors come
        along; what a run uses again is `KEYS.kept(tensor, ...)`, and crosses once.
        """
        self.hold(inputs, poll=poll)
        start = time.perf_counter()
        velocity = Forward(self.model_id, x, timestep, dict(inputs)).ask(self.group, poll=poll)
        self.last_step_seconds = time.perf_counter() - start
        return velocity

    def sample(
        self,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        sampler: str,
        positive: Inputs,
        negative: Inputs | None = None,
        cfg: float = 1.0,
        on_step: Callable[[int, int, torch.Tensor | None], None] | None = None,
        preview: bool = True,
        poll: Poll | None = None,
    ) -> torch.Tensor:
        """The whole denoising loop on the ranks, as `Sample` says; the sides of the guidance are inputs as of `forward`.

        `on_step(step, steps, x0)` runs in this thread after each step, with the denoised estimate when `preview`.
        Raises `UnsupportedError` for a sampler the ranks do not run themselves.
        """

        def event(step: Step) -> None:
            self.last_step_seconds = step.seconds
            if on_step is not None:
                on_step(step.step, step.steps, step.x0)

        for side in (positive, negative or {}):
            self.hold(side, poll=poll)
        call = Sample(
            self.model_id,
            x.float(),
            sigmas.float(),
            sampler,
            dict(positive),
            dict(negative) if negative is not None else None,
            cfg,
            preview,
        )
        return call.ask(self.group, on_event=event, poll=poll)

    def set_patches(
        self, patches: Sequence[Patch], *, mode: str = "auto", poll: Poll | None = None
    ) -> PatchReport:
        """Replace the LoRA patches on the shards by `patches`; none at all gives the model as it was loaded.

        Tensors cross once: a patch that the ranks hold already (the same tensor objects at the same place) is told by
        its strengths alone. `mode`: "auto", "merge" or "side" (see `core.lora`). No checkpoint bytes are read. Raises
        `InputError` and `UnsupportedError`; the patches in place then stay as they are.
        """
        entries, held = self._patches.write(patches)
        try:
            report = SetPatches(self.model_id, mode, entries).ask(self.group, poll=poll)
        except BaseException:
            # A cancelled command may have been carried out: what the ranks hold is unknown.
            self._patches.forget()
            self.patches_key = UNKNOWN
            raise
        self._patches.accepted(held)
        return report

    def ask(self, call: type[ModelCall[Answer]], *fields: Any, poll: Poll | None = None) -> Answer:
        """The answer of the ranks to a call to this model, such as `ask(Decode, latents)`."""
        return call(self.model_id, *fields).ask(self.group, poll=poll)

    def park(self, *, poll: Poll | None = None) -> int:
        """Move the shards to host memory; returns the device bytes freed over all ranks. `forward` brings them back."""
        return self.ask(Park, poll=poll)

    def unload(self) -> int:
        """Free the shards on every rank; returns the bytes freed. Harmless when already unloaded or the group is gone."""
        closed, self._closed = self._closed, True
        return 0 if closed or not self.group.alive else self.ask(Unload)
