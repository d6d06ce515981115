"""The patchers: how ComfyUI's memory management loads, counts, evicts and clones a model that lives on the ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP

from ..core.calls.remote import RemoteModel
from ..core.errors import UnsupportedError
from . import seams
from .errors import comfy_errors, refuse_training
from .patches import push_patches
from .room import free_for_ranks, needed_by_streaming, return_reserve
from .sharded import KEEP, PARK, ShardedModel

log = logging.getLogger("comfy_tp.nodes")

POLICY = "tp_policy"
STUBS = "tp_shards"
PROGRESS_STEPS = 1000
MOVED = (
    "What a Load TP node loads lies on the ranks, and no other node can move or copy it to {device} (Select Model Device, "
    "Select CLIP Device, Select VAE Device, MultiGPU CFG Split). Remove that node, and set the devices in the Load TP node."
)


# What a stock node leaves on a model -> what the node is called, and what does the same here.
NODES = {
    "diffusion_model.params.default_ref_method": "the Flux KV Cache node",
    "diffusion_model.default_ref_method": "the Flux KV Cache node",
    "bypass_lora": "a Load LoRA (Bypass) node, in place of which Load LoRA does the same to the shards",
}


def by_node(names: Iterable[str]) -> str:
    """The stock node that one of these names is known of, as it goes on after them."""
    return next((f"; {NODES[name]}" for name in names if name in NODES), "")


class OnRanks:
    """What the patchers share: sizes from the ranks, and leaving the devices when ComfyUI needs the room."""

    model: Any
    offload_device: torch.device
    model_options: dict[str, Any]

    @property
    def sharded(self) -> ShardedModel:
        """The model on the ranks."""
        return self.model.sharded

    @property
    def load_device(self) -> torch.device:
        """The device whose shards this patcher counts. Where they lie the loader node says, and nobody after it."""
        return self._load_device

    @load_device.setter
    def load_device(self, device: torch.device) -> None:
        known = vars(self).get("_load_device")
        if known is not None and device != known:
            raise UnsupportedError(MOVED.format(device=device))
        self._load_device = device

    @property
    def policy(self) -> str:
        """What to do when another model needs the room: keep, park or release."""
        return self.model_options.get(POLICY, KEEP)

    def model_size(self) -> int:
        """Bytes of the shards on this patcher's device, once loaded."""
        return self.sharded.bytes_on(str(self.load_device))

    def loaded_size(self) -> int:
        """Bytes of the shards on this patcher's device now."""
        return self.sharded.resident_on(str(self.load_device))

    def get_ram_usage(self) -> int:
        """Host memory only: parked shards."""
        return self.sharded.parked_bytes

    def lowvram_patch_counter(self) -> int:
        return 0

    def get_free_memory(self, device: Any) -> float:
        """Bytes that every rank can still take: ComfyUI sizes batches by them, and each rank computes every batch."""
        return free_for_ranks(self.sharded, device)

    def deepclone_multigpu(self, new_load_device: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(MOVED.format(device=new_load_device or "another GPU"))

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any, **kwargs: Any) -> int:
        """Room is needed on one device: all shards leave theirs, or none (they are of no use apart).

        With policy keep the room is claimed to be free: ComfyUI then goes on to the next model, as it measures
        the real free memory each time, and detaches this one only when it asks for more than the shards hold.
        """
        if self.policy == KEEP:
            return memory_to_free
        before = self.loaded_size()
        self.sharded.make_room(self.policy)
        self.model.device = self.offload_device
        return before - self.loaded_size()

    def detach(self, unpatch_all: bool = True) -> Any:
        """ComfyUI takes the model off its list, as its room is asked for, or for a clone of it.

        Weights that are streamed need none of that room: then a model with policy keep stays, and is listed again.
        """
        stays = unpatch_all and self._stays_beside_streaming()
        found = super().detach(unpatch_all and not stays)  # type: ignore[misc]
        if stays:
            list_as_loaded([self], behind_the_listed=True)
        return found

    def _stays_beside_streaming(self) -> bool:
        if self.policy != KEEP or not self.loaded_size():
            return False
        needed = needed_by_streaming()
        if needed is None:
            return False
        return needed - comfy.model_management.get_free_memory(self.load_device) < self.loaded_size()

    def leave_devices(self) -> None:
        """ComfyUI unloads the model: shards are parked where the policy says so, and freed elsewhere.

        With `--disable-smart-memory` ComfyUI unloads all models after every prompt, its own into host memory. Then shards
        with policy keep are parked too, and on the CPU stay, so that no prompt reads them from disk again.
        """
        to_host = self.policy == KEEP and comfy.model_management.DISABLE_SMART_MEMORY
        if not (to_host and self.sharded.placement.devices[0] == "cpu"):
            self.sharded.make_room(PARK if to_host or self.policy == PARK else "release")
        self.model.device = self.offload_device


class ShardedPatcher(OnRanks, comfy.model_patcher.ModelPatcher):
    """The MODEL that Load TP Model hands on. Its `model` is a `ShardedBase`."""

    def __init__(self, model: Any, load_device: Any, offload_device: Any, *args: Any, **kwargs: Any):
        super().__init__(model, load_device, offload_device, *args, **kwargs)

    def partially_load(
        self,
        device_to: Any,
        extra_memory: float = 0,
        force_patch_weights: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Put the shards on the ranks, all of them, and this clone's patches onto the shards.

        Returns the bytes that came onto the patcher's device. ComfyUI has made room on every device before. Where only
        the patches fail, or are cancelled, the shards stay.
        """
        self.refuse_unsupported()
        if force_patch_weights:
            self._no_weights()  # older ComfyUIs ask so for weights that are to be saved
        before = self.loaded_size()
        return_reserve(self.sharded)
        # Object patches of the clone that was used before go back first; the shards stay.
        super().unpatch_model(None, unpatch_weights=False)
        loaded = False
        try:
            with comfy_errors():
                load_with_progress(self.sharded)
                push_patches(self)
            self.patch_model(load_weights=False)
            loaded = True
        finally:
            if not loaded:
                # ComfyUI does not list a model whose load failed, so it could not reclaim its shards later.
                if self.sharded.loaded:
                    self.model.device = device_to
                    list_as_loaded([self, *self.get_additional_models_with_key(STUBS)])
                else:
                    self.detach()
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.loaded_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, device_to, extra_memory, force_patch_weights, True)
        return self.loaded_size() - before

    def load(self, device_to: Any = None, *args: Any, **kwargs: Any) -> None:
        """As `partially_load`; older and newer cores call one or the other."""
        self.partially_load(device_to or self.load_device)

    def patch_model(self, device_to: Any = None, *args: Any, load_weights: bool = True, **kwargs: Any) -> Any:
        """Apply object patches; with `load_weights` also put the shards on the ranks."""
        if load_weights and not self.sharded.loaded:
            self.partially_load(device_to or self.load_device)
            return self.model
        return super().patch_model(device_to, load_weights=False)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Take object patches back; with `unpatch_weights` the shards leave their devices."""
        super().unpatch_model(None, unpatch_weights=False)
        if unpatch_weights:
            self.leave_devices()
            self.model.current_weight_patches_uuid = None
            self.model.model_loaded_weight_memory = 0

    def refuse_unsupported(self) -> None:
        """Raise `UnsupportedError` for changes to the model's inside that the ranks would not see."""
        inside = sorted(key for key in self.object_patches if key.startswith("diffusion_model"))
        found = {
            "object patches": inside,
            "weight wrappers": sorted(self.weight_wrapper_patches),
            "hooks on weights": [str(key) for key in self.hook_patches],
            "injections": sorted(map(str, self.injections)),
        }
        if self.model_options.get("torch_compile_kwargs"):
            found["torch.compile"] = ["TorchCompileModel"]
        self._refuse_other_compute_dtype()
        for what, names in found.items():
            if names:
                raise UnsupportedError(
                    f"A model from Load TP Model cannot honour {what} ({', '.join(names[:4])}{by_node(names)}): the model "
                    f"is computed on the ranks. Remove the node that sets it, or load the model with the stock loader."
                )

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """As ComfyUI's, which can also make a copy with weights of its own, for training."""
        if kwargs.get("force_deepcopy"):
            refuse_training()
        return super().clone(*args, **kwargs)

    def add_weight_wrapper(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: what computes a weight anew in every call, as a LoRA in training does, cannot reach the shards."""
        refuse_training()

    def _refuse_other_compute_dtype(self) -> None:
        """ModelComputeDtype may ask for the dtype that the ranks compute in, and for no other."""
        asked, own = self.object_patches.get("manual_cast_dtype"), self.model.get_dtype()
        if asked is not None and asked != own:
            names = [str(dtype).removeprefix("torch.") for dtype in (asked, own)]
            raise UnsupportedError(
                f"A model from Load TP Model cannot honour the compute dtype {names[0]} of the ModelComputeDtype node: its "
                f"ranks compute in {names[1]}. Remove that node and choose dtype {names[0]} in Load TP Model."
            )

    def register_all_hook_patches(self, hooks: Any, *args: Any, **kwargs: Any) -> Any:
        """Before a run, and before anything gives way for it: what the ranks would not see is refused, any hooks too."""
        self.refuse_unsupported()
        if hooks is not None and len(hooks):
            kinds = sorted({type(hook).__name__ for hook in hooks.hooks})
            raise UnsupportedError(
                f"A model from Load TP Model cannot honour hooks ({', '.join(kinds)}). Remove the hook nodes from the "
                f"conditioning, or load the model with the stock loader."
            )
        return super().register_all_hook_patches(hooks, *args, **kwargs)

    def _no_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "The weights of a model from Load TP Model lie in shards on the ranks, so it cannot be saved, merged or "
            "copied. Use the stock loader for that."
        )

    get_key_patches = _no_weights
    patch_weight_to_device = _no_weights
    patch_hook_weight_to_device = _no_weights
    __deepcopy__ = _no_weights


class DeviceShards(torch.nn.Module):
    """Stands for the shards on one further device in ComfyUI's list of loaded models."""

    def __init__(self, sharded: ShardedModel):
        super().__init__()
        self.device: torch.device | None = None
        self.sharded = sharded
        self.first_patcher: Callable[[], Any] = lambda: None
        self.object_patches_backup: dict[str, Any] = {}


class StubPatcher(OnRanks, comfy.model_patcher.ModelPatcher):
    """Shows ComfyUI what the ranks hold on a device other than its own, so that it counts and can reclaim it."""

    def __init__(self, model: Any, load_device: Any, offload_device: Any, *args: Any, **kwargs: Any):
        super().__init__(model, load_device, offload_device, *args, **kwargs)

    def partially_load(self, device_to: Any, *args: Any, **kwargs: Any) -> int:
        """Nothing to do: the shards of all devices come with the MODEL itself."""
        self.model.device = device_to
        return 0

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self.leave_devices()


def load_with_progress(sharded: ShardedModel) -> None:
    """Load the shards with ComfyUI's progress bar and Cancel; call it from the node's own thread."""
    poll = comfy.model_management.throw_exception_if_processing_interrupted
    bar = comfy.utils.ProgressBar(PROGRESS_STEPS) if seams.fits(seams.PROGRESS) else None

    def show(done: int, total: int, _gb_per_second: float) -> None:
        if bar is not None:
            bar.update_absolute(int(PROGRESS_STEPS * done / max(total, 1)), PROGRESS_STEPS)

    sharded.load(on_progress=show, poll=poll)


def make_patcher(model: Any, policy: str) -> ShardedPatcher:
    """A MODEL for `model`, with a stub for each device of its ranks on this machine that is not ComfyUI's own."""
    own = comfy.model_management.get_torch_device()
    patcher = related(ShardedPatcher(model, own, torch.device("cpu")))
    patcher.model_options[POLICY] = policy
    add_stubs(patcher)
    return patcher


def add_stubs(patcher: Any) -> None:
    """Give `patcher` a stub for each device of its model's ranks on this machine that is not its own."""
    model, placement = patcher.model, patcher.sharded.placement
    stubs = []
    here = placement.devices if placement.address is None else ()
    for name in sorted(set(here) - {str(patcher.load_device)}):
        device = torch.device(name)
        if device.type == "cpu":
            continue
        shards = model.device_shards.setdefault(name, DeviceShards(model.sharded))
        stub = related(StubPatcher(shards, device, patcher.offload_device))
        stub.model_options[POLICY] = patcher.policy
        stubs.append(stub)
    if stubs:
        patcher.set_additional_models(STUBS, stubs)


def related(patcher: Any) -> Any:
    """`patcher`, which shares its model with those that other loader nodes made, as if it were a clone of the first.

    So one takes back the object patches that another has left on the model, and ComfyUI's list of loaded models falls
    back on the first when this one is gone instead of calling the model leaked.
    """
    model = patcher.model
    first = model.first_patcher()
    if first is None:
        model.first_patcher = weakref.ref(patcher)
    else:
        patcher.parent = first
    patcher.object_patches_backup = model.object_patches_backup
    return patcher


def list_as_loaded(patchers: Iterable[Any], *, behind_the_listed: bool = False) -> None:
    """Have ComfyUI list the patchers as loaded, as it does itself after a load that did not fail.

    So it can reclaim their shards: after a load that failed later on, and where it took them off its list during a run.
    `behind_the_listed`: while it goes through its list, and is about to drop the entry of the patcher itself.
    """
    if not seams.fits(seams.RECLAIM):
        return
    listed = comfy.model_management.current_loaded_models
    for one in patchers:
        if not behind_the_listed and any(entry.model is one for entry in listed):
            continue
        entry = comfy.model_management.LoadedModel(one)
        entry.real_model = weakref.ref(one.model)
        entry.model_finalizer = weakref.finalize(one.model, comfy.model_management.cleanup_models)
        entry.model_finalizer.atexit = False
        listed.insert(len(listed) if behind_the_listed else 0, entry)


def load_now(patcher: ShardedPatcher) -> None:
    """Load through ComfyUI's memory management, which makes room on every device first."""
    comfy.model_management.load_models_gpu([patcher, *patcher.get_nested_additional_models()])


def in_the_middle_of_a_run(sharded: ShardedModel) -> RemoteModel:
    """The model on the ranks for a call of a run, loaded again where something took its shards away since the run began.

    Raises `RankError` where the ranks are gone.
    """
    model = sharded.comfy_model()
    patcher = model.current_patcher if model is not None else None
    if sharded.remote is None and patcher is not None:
        log.warning("The shards of %s were unloaded during the run; loading them again", sharded.source.path)
        load_now(patcher)
    return sharded.require()
