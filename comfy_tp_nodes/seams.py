"""Every name of ComfyUI that the pack uses, by the feature that uses it, and the check against what is installed.

The pack imports ComfyUI nowhere outside the modules of this package, and uses nothing that is not listed here. A name
that an installed ComfyUI lacks switches off the features it is listed under and those that need them, and no more.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..core.errors import UnsupportedError

log = logging.getLogger("comfy_tp.nodes")

REQUIRED_COMFYUI = "0.3.75"
NEWEST_TESTED = "0.33.0"

# Features, named as the sentences that refuse them name them.
NODES = "comfy-tp's nodes"
ON_RANKS = "a model on the ranks"
LOAD_MODEL = "Load TP Model"
FLUX = "ComfyUI's Flux class"
FLUX2, FLUX1, QWEN_IMAGE = "FLUX.2", "FLUX.1", "Qwen-Image"
SAMPLER = "TP Sampler"
MIRRORED = "the loop on the ranks"
LORA = "LoRA on the shards"
LOAD_LORA = "Load TP LoRA"
LOAD_CLIP = "Load TP CLIP"
LOAD_VAE = "Load TP VAE"
STATUS = "TP Status"
PROGRESS = "progress bars"
PREVIEWS = "previews"
STATUS_LINE = "the status line"
RECLAIM = "shards that ComfyUI can reclaim after a load that failed"
OVERRIDES = "what only some releases ask of a patcher"  # where nothing asks, nothing is missing

# Feature -> the features that it cannot do without.
NEEDS: dict[str, tuple[str, ...]] = {
    LOAD_MODEL: (NODES, ON_RANKS),
    FLUX2: (LOAD_MODEL, FLUX),
    FLUX1: (LOAD_MODEL, FLUX),
    QWEN_IMAGE: (LOAD_MODEL,),
    SAMPLER: (LOAD_MODEL,),
    LOAD_LORA: (NODES, LORA),
    LOAD_CLIP: (NODES, ON_RANKS),
    LOAD_VAE: (NODES, ON_RANKS),
    STATUS: (NODES,),
}

# Feature -> the names it uses, with the parameters it relies on. None: the name alone matters (a class, a constant).
SEAMS: dict[str, dict[str, tuple[str, ...] | None]] = {
    NODES: {
        "comfy_api.latest.ComfyExtension": None,
        "comfy_api.latest.io.AnyType.Input": ("id", "optional", "tooltip"),
        "comfy_api.latest.io.AnyType.Output": None,
        "comfy_api.latest.io.Combo.Input": ("id", "options", "tooltip", "default"),
        "comfy_api.latest.io.ComfyNode": None,
        "comfy_api.latest.io.Custom": ("io_type",),
        "comfy_api.latest.io.Input": None,
        "comfy_api.latest.io.Int.Input": ("id", "tooltip", "default", "min", "max", "control_after_generate"),
        "comfy_api.latest.io.Model.Input": ("id", "optional", "tooltip"),
        "comfy_api.latest.io.Model.Output": None,
        "comfy_api.latest.io.NodeOutput": None,
        "comfy_api.latest.io.Schema": (
            "node_id",
            "display_name",
            "category",
            "inputs",
            "outputs",
            "description",
            "is_output_node",
        ),
        "comfy_api.latest.io.String.Input": ("id", "tooltip", "default"),
        "folder_paths.get_filename_list": ("folder_name",),
        "folder_paths.get_folder_paths": ("folder_name",),
    },
    ON_RANKS: {
        "comfy.model_management.DISABLE_SMART_MEMORY": None,
        "comfy.model_management.get_free_memory": ("dev",),
        "comfy.model_management.get_torch_device": (),
        "comfy.model_management.load_models_gpu": ("models",),
        "comfy.model_management.soft_empty_cache": (),
        "comfy.model_management.throw_exception_if_processing_interrupted": (),
        "comfy.model_patcher.ModelPatcher": ("model", "load_device", "offload_device"),
        "comfy.model_patcher.ModelPatcher.clone": ("self",),
        "comfy.model_patcher.ModelPatcher.detach": ("self", "unpatch_all"),
        "comfy.model_patcher.ModelPatcher.get_additional_models_with_key": ("self", "key"),
        "comfy.model_patcher.ModelPatcher.get_nested_additional_models": ("self",),
        "comfy.model_patcher.ModelPatcher.load": ("self", "device_to"),
        "comfy.model_patcher.ModelPatcher.loaded_size": ("self",),
        "comfy.model_patcher.ModelPatcher.model_patches_models": ("self",),
        "comfy.model_patcher.ModelPatcher.model_size": ("self",),
        "comfy.model_patcher.ModelPatcher.partially_load": (
            "self",
            "device_to",
            "extra_memory",
            "force_patch_weights",
        ),
        "comfy.model_patcher.ModelPatcher.partially_unload": ("self", "device_to", "memory_to_free"),
        "comfy.model_patcher.ModelPatcher.patch_model": ("self", "device_to", "load_weights"),
        "comfy.model_patcher.ModelPatcher.set_additional_models": ("self", "key", "models"),
        "comfy.model_patcher.ModelPatcher.unpatch_model": ("self", "device_to", "unpatch_weights"),
    },
    LOAD_MODEL: {
        "comfy.conds.CONDRegular": ("cond",),
        "comfy.conds.CONDRegular._copy_with": ("self", "cond"),
        "comfy.conds.CONDRegular.can_concat": ("self", "other"),
        "comfy.conds.CONDRegular.concat": ("self", "others"),
        "comfy.conds.CONDRegular.process_cond": ("self", "batch_size"),
        "comfy.conds.CONDRegular.size": ("self",),
        "comfy.model_base.BaseModel.get_dtype": ("self",),
        "comfy.model_base.BaseModel.memory_required": ("self", "input_shape", "cond_shapes"),
        "comfy.model_base.BaseModel.process_latent_in": ("self", "latent"),
        "comfy.model_patcher.ModelPatcher.get_all_callbacks": ("self", "call_type"),
        "comfy.patcher_extension.CallbacksMP.ON_LOAD": None,
        "comfy.patcher_extension.WrapperExecutor.execute": ("self", "args", "kwargs"),
        "comfy.patcher_extension.WrapperExecutor.new_class_executor": ("original", "class_obj", "wrappers"),
        "comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL": None,
        "comfy.patcher_extension.get_all_wrappers": ("wrapper_type", "transformer_options"),
        "comfy.utils.repeat_to_batch_size": ("tensor", "batch_size"),
    },
    FLUX: {
        "comfy.ldm.flux.model.Flux.forward": ("self", "x", "timestep", "context", "transformer_options"),
        "comfy.ldm.flux.model.FluxParams": None,
    },
    FLUX2: {
        "comfy.model_base.Flux2": ("model_config", "device"),
        "comfy.model_base.Flux2.extra_conds": ("self", "kwargs"),
        "comfy.supported_models.Flux2": ("unet_config",),
        "comfy.supported_models.Flux2.set_inference_dtype": ("self", "dtype", "manual_cast_dtype"),
    },
    FLUX1: {
        "comfy.model_base.Flux": ("model_config", "model_type", "device"),
        "comfy.model_base.Flux.extra_conds": ("self", "kwargs"),
        "comfy.model_base.ModelType.FLOW": None,
        "comfy.supported_models.Flux": ("unet_config",),
        "comfy.supported_models.FluxInpaint": ("unet_config",),
        "comfy.supported_models.FluxInpaint.unet_config": None,
        "comfy.supported_models.FluxSchnell": ("unet_config",),
    },
    QWEN_IMAGE: {
        "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel.forward": (
            "self",
            "x",
            "timestep",
            "context",
            "transformer_options",
        ),
        "comfy.model_base.QwenImage": ("model_config", "device"),
        "comfy.model_base.QwenImage.extra_conds": ("self", "kwargs"),
        "comfy.supported_models.QwenImage": ("unet_config",),
    },
    SAMPLER: {
        "comfy.sample.fix_empty_latent_channels": ("model", "latent_image"),
        "comfy.sample.prepare_noise": ("latent_image", "seed", "noise_inds"),
        "comfy.sample.sample_custom": (
            "model",
            "noise",
            "cfg",
            "sampler",
            "sigmas",
            "positive",
            "negative",
            "latent_image",
            "noise_mask",
            "callback",
            "disable_pbar",
            "seed",
        ),
        "comfy.samplers.CFGGuider": ("model_patcher",),
        "comfy.samplers.KSampler": ("model", "steps", "device", "sampler", "scheduler", "denoise"),
        "comfy.samplers.KSampler.SAMPLERS": None,
        "comfy.samplers.KSampler.SCHEDULERS": None,
        "comfy.samplers.Sampler.max_denoise": ("self", "model_wrap", "sigmas"),
        "comfy.samplers.Sampler.sample": ("self",),
        "comfy.samplers.sampler_object": ("name",),
        "comfy_api.latest.io.Conditioning.Input": ("id", "tooltip"),
        "comfy_api.latest.io.Float.Input": ("id", "tooltip", "default", "min", "max", "step", "round"),
        "comfy_api.latest.io.Latent.Input": ("id", "tooltip"),
        "comfy_api.latest.io.Latent.Output": None,
        "comfy_api.latest.io.Sigmas.Input": ("id", "optional", "tooltip"),
    },
    MIRRORED: {
        "comfy.model_sampling.CONST.calculate_denoised": ("self", "sigma", "model_output", "model_input"),
        "comfy.model_sampling.CONST.calculate_input": ("self", "sigma", "noise"),
        "comfy.model_sampling.CONST.inverse_noise_scaling": ("self", "sigma", "latent"),
        "comfy.model_sampling.CONST.noise_scaling": ("self", "sigma", "noise", "latent_image", "max_denoise"),
    },
    LORA: {
        "comfy.utils.swap_scale_shift": ("weight",),
        "comfy.weight_adapter.WeightAdapterBase": None,
        "comfy.weight_adapter.adapters": None,
    },
    LOAD_LORA: {
        "comfy.model_patcher.ModelPatcher.add_patches": ("self", "patches", "strength_patch"),
        "comfy_api.latest.io.Float.Input": ("id", "tooltip", "default", "min", "max", "step", "round"),
        "comfy_api.latest.ui.PreviewText": ("value",),
        "folder_paths.get_full_path_or_raise": ("folder_name", "filename"),
    },
    LOAD_CLIP: {
        "comfy.sd.CLIP": ("no_init",),
        "comfy.sd.CLIP.clone": ("self",),
        "comfy.sd.CLIP.encode_from_tokens": ("self", "tokens", "return_pooled", "return_dict"),
        "comfy.sd.CLIP.tokenize": ("self", "text", "return_word_ids"),
        "comfy_api.latest.io.Clip.Output": None,
    },
    LOAD_VAE: {
        "comfy.model_management.intermediate_device": (),
        "comfy.sd.VAE": ("sd",),
        "comfy.sd.VAE.decode": ("self", "samples_in"),
        "comfy.sd.VAE.decode_tiled": ("self", "samples", "tile_x", "tile_y", "overlap"),
        "comfy.sd.VAE.encode": ("self", "pixel_samples"),
        "comfy.sd.VAE.encode_tiled": ("self", "pixel_samples", "tile_x", "tile_y", "overlap"),
        "comfy.sd.VAE.vae_encode_crop_pixels": ("self", "pixels"),
        "comfy_api.latest.io.Vae.Output": None,
    },
    STATUS: {
        "comfy_api.latest.io.String.Output": None,
        "comfy_api.latest.ui.PreviewText": ("value",),
    },
    PROGRESS: {
        "comfy.utils.PROGRESS_BAR_ENABLED": None,
        "comfy.utils.ProgressBar": ("total",),
        "comfy.utils.ProgressBar.update_absolute": ("self", "value", "total"),
    },
    PREVIEWS: {
        "latent_preview.prepare_callback": ("model", "steps"),
    },
    STATUS_LINE: {
        "comfy_execution.utils.get_executing_context": (),
    },
    RECLAIM: {
        "comfy.model_management.LoadedModel": ("model",),
        "comfy.model_management.cleanup_models": (),
        "comfy.model_management.current_loaded_models": None,
    },
    OVERRIDES: {
        "comfy.model_patcher.ModelPatcher.add_weight_wrapper": ("self", "name", "function"),
        "comfy.model_patcher.ModelPatcher.deepclone_multigpu": None,
        "comfy.model_patcher.ModelPatcher.get_free_memory": ("self", "device"),
        "comfy.model_base.BaseModel.state_dict_for_saving": ("self",),
        "comfy.model_patcher.ModelPatcher.get_key_patches": ("self",),
        "comfy.model_patcher.ModelPatcher.get_ram_usage": ("self",),
        "comfy.model_patcher.ModelPatcher.lowvram_patch_counter": ("self",),
        "comfy.model_patcher.ModelPatcher.patch_hook_weight_to_device": ("self", "hooks"),
        "comfy.model_patcher.ModelPatcher.patch_weight_to_device": ("self", "key"),
        "comfy.model_patcher.ModelPatcher.register_all_hook_patches": ("self", "hooks"),
        "comfy.sd.VAE.get_ram_usage": ("self",),
    },
}


def names() -> dict[str, tuple[str, ...] | None]:
    """Every name that is listed, whatever it is for."""
    return {name: parameters for used in SEAMS.values() for name, parameters in used.items()}


@functools.cache
def problems(feature: str) -> tuple[str, ...]:
    """What the installed ComfyUI lacks for `feature`, one sentence each; empty when it fits."""
    found = [text for need in NEEDS.get(feature, ()) for text in problems(need)]
    return tuple([*found, *_problems(SEAMS.get(feature, {}))])


def fits(feature: str) -> bool:
    """Whether the installed ComfyUI has every name that `feature` uses. Says once in the log what is lacking."""
    lacking = problems(feature)
    if lacking:
        _say(f"On this ComfyUI ({version()}) comfy-tp works without {feature}: {'; '.join(lacking[:5])}.")
    return not lacking


def require(feature: str) -> None:
    """Raise `UnsupportedError` with `advice` unless the installed ComfyUI has every name that `feature` uses."""
    lacking = problems(feature)
    if lacking:
        raise UnsupportedError(advice(feature, lacking))


def say_if_untested() -> None:
    """One line in the log where ComfyUI is newer than every release that the pack was tested with."""
    if _numbers(version()) > _numbers(NEWEST_TESTED):
        _say(
            f"ComfyUI {version()} is newer than {NEWEST_TESTED}, the newest that this comfy-tp was tested with. Whatever "
            f"of it has changed is refused by name; update comfy-tp when there is a newer one."
        )


@functools.cache
def _say(text: str) -> None:
    log.warning("%s", text)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


def _problems(seams: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    for name, parameters in seams.items():
        try:
            found = _resolve(name)
        except Exception as error:  # a module of ComfyUI's may fail in any way when it is imported
            yield f"{name} is missing ({type(error).__name__}: {error})"
            continue
        if parameters is None:
            continue
        try:
            has = list(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            yield f"{name} is not callable"
            continue
        lacking = [parameter for parameter in parameters if parameter not in has]
        if lacking:
            yield f"{name} takes no {', '.join(lacking)}"


def _resolve(name: str) -> Any:
    """The object of a dotted name: attributes, and modules that nobody has imported yet."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for used, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            found = importlib.import_module(".".join(parts[:used]))
        else:
            found = getattr(found, part)
    return found


def version() -> str:
    """The installed ComfyUI's version, for error texts."""
    try:
        return str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, AttributeError):
        return "of unknown version"


def advice(feature: str, found: Sequence[str]) -> str:
    """The sentence that says why `feature` does not run here, for the `problems` found."""
    return (
        f"{feature} needs ComfyUI {REQUIRED_COMFYUI} or a later one that comfy-tp knows; this is {version()}. Update "
        f"ComfyUI and comfy-tp. What does not fit: {'; '.join(found[:5])}."
    )
