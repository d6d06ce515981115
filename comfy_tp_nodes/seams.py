"""Every name of ComfyUI that the pack uses, with the parameters it relies on, and the check against what is installed.

The pack imports ComfyUI nowhere outside the modules of this package, and uses nothing that is not listed here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

REQUIRED_COMFYUI = "0.3.75"

# Name -> parameters that must be there. None: the name alone matters (a class, a constant, a module's table).
SEAMS: dict[str, tuple[str, ...] | None] = {
    "comfy.conds.CONDRegular": ("cond",),
    "comfy.conds.CONDRegular._copy_with": ("self", "cond"),
    "comfy.conds.CONDRegular.can_concat": ("self", "other"),
    "comfy.conds.CONDRegular.concat": ("self", "others"),
    "comfy.conds.CONDRegular.process_cond": ("self", "batch_size"),
    "comfy.conds.CONDRegular.size": ("self",),
    "comfy.ldm.flux.model.Flux.forward": (
        "self",
        "x",
        "timestep",
        "context",
        "y",
        "guidance",
        "ref_latents",
        "control",
        "transformer_options",
    ),
    "comfy.ldm.flux.model.FluxParams": None,
    "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel.forward": (
        "self",
        "x",
        "timestep",
        "context",
        "attention_mask",
        "guidance",
        "ref_latents",
        "transformer_options",
    ),
    "comfy.model_base.BaseModel.get_dtype": ("self",),
    "comfy.model_base.BaseModel.memory_required": ("self", "input_shape", "cond_shapes"),
    "comfy.model_base.BaseModel.process_latent_in": ("self", "latent"),
    "comfy.model_base.BaseModel.state_dict_for_saving": ("self",),
    "comfy.model_base.Flux": ("model_config", "model_type", "device"),
    "comfy.model_base.Flux.extra_conds": ("self", "kwargs"),
    "comfy.model_base.Flux2": ("model_config", "device"),
    "comfy.model_base.Flux2.extra_conds": ("self", "kwargs"),
    "comfy.model_base.ModelType.FLOW": None,
    "comfy.model_base.QwenImage": ("model_config", "device"),
    "comfy.model_base.QwenImage.extra_conds": ("self", "kwargs"),
    "comfy.model_management.LoadedModel": ("model",),
    "comfy.model_management.cleanup_models": (),
    "comfy.model_management.current_loaded_models": None,
    "comfy.model_management.get_torch_device": (),
    "comfy.model_management.load_models_gpu": ("models",),
    "comfy.model_management.throw_exception_if_processing_interrupted": (),
    "comfy.model_management.intermediate_device": (),
    "comfy.model_patcher.ModelPatcher": ("model", "load_device", "offload_device"),
    "comfy.model_patcher.ModelPatcher.add_patches": ("self", "patches", "strength_patch"),
    "comfy.model_patcher.ModelPatcher.clone": ("self",),
    "comfy.model_patcher.ModelPatcher.detach": ("self", "unpatch_all"),
    "comfy.model_patcher.ModelPatcher.get_additional_models_with_key": ("self", "key"),
    "comfy.model_patcher.ModelPatcher.get_all_callbacks": ("self", "call_type"),
    "comfy.model_patcher.ModelPatcher.get_key_patches": ("self",),
    "comfy.model_patcher.ModelPatcher.get_nested_additional_models": ("self",),
    "comfy.model_patcher.ModelPatcher.get_ram_usage": ("self",),
    "comfy.model_patcher.ModelPatcher.load": ("self", "device_to"),
    "comfy.model_patcher.ModelPatcher.loaded_size": ("self",),
    "comfy.model_patcher.ModelPatcher.lowvram_patch_counter": ("self",),
    "comfy.model_patcher.ModelPatcher.model_patches_models": ("self",),
    "comfy.model_patcher.ModelPatcher.model_size": ("self",),
    "comfy.model_patcher.ModelPatcher.partially_load": (
        "self",
        "device_to",
        "extra_memory",
        "force_patch_weights",
    ),
    "comfy.model_patcher.ModelPatcher.partially_unload": ("self", "device_to", "memory_to_free"),
    "comfy.model_patcher.ModelPatcher.patch_hook_weight_to_device": ("self", "hooks"),
    "comfy.model_patcher.ModelPatcher.patch_model": ("self", "device_to", "load_weights"),
    "comfy.model_patcher.ModelPatcher.patch_weight_to_device": ("self", "key"),
    "comfy.model_patcher.ModelPatcher.register_all_hook_patches": ("self", "hooks"),
    "comfy.model_patcher.ModelPatcher.set_additional_models": ("self", "key", "models"),
    "comfy.model_patcher.ModelPatcher.unpatch_model": ("self", "device_to", "unpatch_weights"),
    "comfy.model_sampling.CONST.calculate_denoised": ("self", "sigma", "model_output", "model_input"),
    "comfy.model_sampling.CONST.calculate_input": ("self", "sigma", "noise"),
    "comfy.model_sampling.CONST.inverse_noise_scaling": ("self", "sigma", "latent"),
    "comfy.model_sampling.CONST.noise_scaling": ("self", "sigma", "noise", "latent_image", "max_denoise"),
    "comfy.patcher_extension.CallbacksMP.ON_LOAD": None,
    "comfy.patcher_extension.WrapperExecutor.execute": ("self", "args", "kwargs"),
    "comfy.patcher_extension.WrapperExecutor.new_class_executor": ("original", "class_obj", "wrappers"),
    "comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL": None,
    "comfy.patcher_extension.get_all_wrappers": ("wrapper_type", "transformer_options"),
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
    "comfy.sd.CLIP": ("no_init",),
    "comfy.sd.CLIP.clone": ("self",),
    "comfy.sd.CLIP.encode_from_tokens": ("self", "tokens", "return_pooled", "return_dict"),
    "comfy.sd.CLIP.tokenize": ("self", "text", "return_word_ids"),
    "comfy.sd.VAE.decode": ("self", "samples_in"),
    "comfy.sd.VAE.decode_tiled": ("self", "samples", "tile_x", "tile_y", "overlap"),
    "comfy.sd.VAE.encode": ("self", "pixel_samples"),
    "comfy.sd.VAE.encode_tiled": ("self", "pixel_samples", "tile_x", "tile_y", "overlap"),
    "comfy.sd.VAE.get_ram_usage": ("self",),
    "comfy.sd.VAE.vae_encode_crop_pixels": ("self", "pixels"),
    "comfy.supported_models.Flux": ("unet_config",),
    "comfy.supported_models.Flux2": ("unet_config",),
    "comfy.supported_models.Flux2.set_inference_dtype": ("self", "dtype", "manual_cast_dtype"),
    "comfy.supported_models.FluxInpaint": ("unet_config",),
    "comfy.supported_models.FluxInpaint.unet_config": None,
    "comfy.supported_models.FluxSchnell": ("unet_config",),
    "comfy.supported_models.QwenImage": ("unet_config",),
    "comfy.utils.PROGRESS_BAR_ENABLED": None,
    "comfy.utils.ProgressBar": ("total",),
    "comfy.utils.ProgressBar.update_absolute": ("self", "value", "total"),
    "comfy.utils.repeat_to_batch_size": ("tensor", "batch_size"),
    "comfy.utils.swap_scale_shift": ("weight",),
    "comfy.weight_adapter.WeightAdapterBase": None,
    "comfy.weight_adapter.adapters": None,
    "comfy_api.latest.ComfyExtension": None,
    "comfy_api.latest.io.AnyType.Input": ("id", "optional", "tooltip"),
    "comfy_api.latest.io.AnyType.Output": None,
    "comfy_api.latest.io.Combo.Input": ("id", "options", "tooltip", "default"),
    "comfy_api.latest.io.Clip.Output": None,
    "comfy_api.latest.io.ComfyNode": None,
    "comfy_api.latest.io.Custom": ("io_type",),
    "comfy_api.latest.io.Input": None,
    "comfy_api.latest.io.Conditioning.Input": ("id", "tooltip"),
    "comfy_api.latest.io.Float.Input": ("id", "tooltip", "default", "min", "max", "step", "round"),
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
    "comfy_api.latest.io.String.Output": None,
    "comfy_api.latest.io.Latent.Input": ("id", "tooltip"),
    "comfy_api.latest.io.Latent.Output": None,
    "comfy_api.latest.io.Sigmas.Input": ("id", "optional", "tooltip"),
    "comfy_api.latest.io.Vae.Output": None,
    "comfy_api.latest.ui.PreviewText": ("value",),
    "comfy_execution.utils.get_executing_context": (),
    "folder_paths.get_filename_list": ("folder_name",),
    "folder_paths.get_full_path_or_raise": ("folder_name", "filename"),
    "folder_paths.get_folder_paths": ("folder_name",),
    "latent_preview.prepare_callback": ("model", "steps"),
}


def problems() -> list[str]:
    """What the installed ComfyUI lacks, one sentence each; empty when the pack fits it."""
    return list(_problems(SEAMS))


def _problems(seams: dict[str, tuple[str, ...] | None]) -> Iterator[str]:
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


def advice(found: list[str]) -> str:
    """The sentence that a node shows instead of running, for the `problems` found."""
    return (
        f"comfy-tp needs ComfyUI {REQUIRED_COMFYUI} or a later one that it knows; this is {version()}. Update ComfyUI "
        f"and comfy-tp. What does not fit: {'; '.join(found[:5])}."
    )
