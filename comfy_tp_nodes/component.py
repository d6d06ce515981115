"""What text encoders and VAEs on the ranks share: how they are opened, and their patcher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ..core.calls.remote import RemoteModel
from ..core.checkpoint.files import Checkpoint
from ..core.errors import UnsupportedError
from ..core.parts import text_encoder, vae
from .devices import place, remote_address
from .errors import comfy_errors
from .patcher import POLICY, STUBS, OnRanks, add_stubs, load_with_progress
from .room import return_reserve
from .sharded import ShardedModel, sharded_model
from .source import ModelSource

log = logging.getLogger("comfy_tp.nodes")

RELEASE = "release after use"
POLICIES = ("keep", RELEASE)


def open_encoder(path: Path, degree: int, devices: str, dtype: str) -> ShardedModel:
    """The text encoder at `path`, to be spread over the ranks that `degree` and `devices` choose."""
    checkpoint = Checkpoint.open(path)
    heads = text_encoder.key_value_heads(checkpoint)
    own = comfy.model_management.get_torch_device()
    # A degree that does not divide the key/value heads is no error: each rank then holds the whole encoder.
    free = degree == 0 and remote_address(devices) is None
    placement = place(devices, degree, heads if free else None, "the text encoder", own)
    opened = text_encoder.open_text_encoder(checkpoint, placement.degree)
    log.info("Load TP CLIP: %s, %s", path, placement.reason)
    return _shown(
        sharded_model(ModelSource.of_component(checkpoint, opened, "text_encoder"), placement, dtype)
    )


def open_autoencoder(path: Path, degree: int, devices: str, dtype: str) -> ShardedModel:
    """The VAE at `path`, to be run by the ranks that `degree` and `devices` choose."""
    checkpoint = Checkpoint.open(path)
    opened = vae.open_vae(checkpoint)
    placement = place(devices, degree, None, "the VAE", comfy.model_management.get_torch_device())
    log.info("Load TP VAE: %s, %s", path, placement.reason)
    return _shown(sharded_model(ModelSource.of_component(checkpoint, opened, "vae"), placement, dtype))


def _shown(sharded: ShardedModel) -> ShardedModel:
    """The same, with its status line in the loader node that runs now."""
    sharded.line.shown_by_this_node()
    return sharded


class RemoteModule(torch.nn.Module):
    """A module without weights whose work is done on the ranks. `sharded` is the model there."""

    def __init__(self, sharded: ShardedModel, policy: str):
        super().__init__()
        self.sharded = sharded
        self.policy = policy
        self.device: torch.device | None = None
        self.device_shards: dict[str, Any] = {}  # device -> what stands for its shards
        self._holds = 0
        sharded.serve(self)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the model stays on the ranks between calls whatever the policy, so that tiles do not load it anew."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._release()

    def _release(self) -> None:
        if self.policy == RELEASE and not self._holds:
            self.sharded.unload()

    def on_ranks(self, work: Callable[[RemoteModel, Callable[[], None]], torch.Tensor]) -> torch.Tensor:
        """`work(remote, poll)` with ComfyUI's errors and Cancel; the ranks release the model after it if so asked."""
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        try:
            with comfy_errors():
                return work(self.sharded.load(poll=poll), poll)
        finally:
            self._release()


class ComponentPatcher(OnRanks, comfy.model_patcher.ModelPatcher):
    """The patcher of a text encoder or VAE on the ranks. Its `model` is a `RemoteModule`."""

    def __init__(self, model: Any, load_device: Any, offload_device: Any, *args: Any, **kwargs: Any):
        super().__init__(model, load_device, offload_device, *args, **kwargs)

    @classmethod
    def of(cls, module: RemoteModule) -> ComponentPatcher:
        """A patcher on ComfyUI's own device."""
        patcher = cls(module, comfy.model_management.get_torch_device(), torch.device("cpu"))
        patcher.model_options[POLICY] = "keep" if module.policy == "keep" else "release"
        add_stubs(patcher)
        return patcher

    def model_patches_models(self) -> list[Any]:
        """What `load_models_gpu` loads with this model, and makes room for: the shards on the other devices."""
        return [*super().model_patches_models(), *self.get_additional_models_with_key(STUBS)]

    def partially_load(self, device_to: Any, *args: Any, **kwargs: Any) -> int:
        """Put the weights on the ranks. Returns the bytes that came onto the patcher's device."""
        if self.patches:
            raise UnsupportedError(
                "A text encoder or VAE on the ranks takes no LoRA. Use a loader that patches the model alone "
                "(LoraLoaderModelOnly), or the stock CLIP loader."
            )
        before = self.loaded_size()
        return_reserve(self.sharded)
        with comfy_errors():
            load_with_progress(self.sharded)
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.loaded_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        return self.loaded_size() - before

    def register_all_hook_patches(self, hooks: Any, *args: Any, **kwargs: Any) -> Any:
        """Set CLIP Hooks: none pass, any are refused."""
        if hooks is not None and len(hooks):
            raise UnsupportedError(
                "A text encoder on the ranks cannot honour hooks (the Set CLIP Hooks node). Remove that node, or use the "
                "stock CLIP loader."
            )
        return super().register_all_hook_patches(hooks, *args, **kwargs)

    def load(self, device_to: Any = None, *args: Any, **kwargs: Any) -> None:
        self.partially_load(device_to or self.load_device)

    def patch_model(self, device_to: Any = None, *args: Any, load_weights: bool = True, **kwargs: Any) -> Any:
        if load_weights and not self.sharded.loaded:
            self.partially_load(device_to or self.load_device)
        return self.model

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self.leave_devices()
            self.model.current_weight_patches_uuid = None
            self.model.model_loaded_weight_memory = 0
