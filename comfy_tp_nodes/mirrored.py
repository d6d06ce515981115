"""`MirroredSampler`: a ComfyUI sampler whose loop runs on the ranks, where they can honour everything asked of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.samplers
import torch
from tqdm.auto import tqdm

from ..core.calls.inputs import Input
from ..core.calls.samplers import SAMPLERS, why_not_descending
from . import seams
from .errors import comfy_errors
from .patcher import POLICY, STUBS
from .proxy import CONTEXT, METHOD, REFERENCES

log = logging.getLogger("comfy_tp.nodes")

# What a model or a conditioning may carry and still be sampled on the ranks. Everything else, known or not, goes
# through ComfyUI's own loop, which calls the model once per step and honours it there.
MODEL_OPTIONS = {"transformer_options", "to_load_options", POLICY}
TRANSFORMER_OPTIONS = {"sample_sigmas"}  # the sigmas of this run
OUTSIDE_THE_LOOP = {  # callbacks that ComfyUI makes before or after a sampler runs
    "on_clone",
    "on_load_after",
    "on_detach_after",
    "on_cleanup",
    "on_pre_run",
    "on_register_all_hook_patches",
    "on_inject_model",
    "on_eject_model",
}
CONDITIONING = {
    "cross_attn",
    "pooled_output",
    "attention_mask",  # of the text encoder; a model that reads it says so in its model_conds
    "guidance",
    "reference_latents",
    "reference_latents_method",
    "model_conds",
    "uuid",
}


class MirroredSampler(comfy.samplers.Sampler):
    """The stock sampler `name`, run on the ranks.

    Everything around the loop stays ComfyUI's: memory management, noise, latent formats, hooks. Where the loop itself
    has to honour something that the ranks do not implement, the stock sampler runs it and one log line says why.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.stock = comfy.samplers.sampler_object(name)

    def sample(
        self,
        model_wrap: Any,
        sigmas: torch.Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: torch.Tensor,
        latent_image: torch.Tensor | None = None,
        denoise_mask: torch.Tensor | None = None,
        disable_pbar: bool = False,
    ) -> torch.Tensor:
        """Denoise `noise` [B, C, (1,) h, w] over `latent_image` along `sigmas` [S + 1]; arguments are ComfyUI's."""
        reason = why_not_mirrored(
            self.name, model_wrap, sigmas, extra_args["model_options"], noise, denoise_mask
        )
        if reason:
            log.info("TP Sampler goes through ComfyUI's own sampler, one model call at a time: %s.", reason)
            return self.stock.sample(
                model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
            )
        log.info("TP Sampler runs %s on the ranks, %d steps.", self.name, len(sigmas) - 1)
        model = model_wrap.inner_model
        remote = model.sharded.require()
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        sampling = model.model_sampling
        start = sampling.noise_scaling(sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas))
        guided = not math.isclose(model_wrap.cfg, 1.0)
        conds = model_wrap.conds

        line = model.sharded.line
        line.begin(len(sigmas) - 1)
        with tqdm(total=len(sigmas) - 1, disable=disable_pbar) as bar, comfy_errors():

            def on_step(step: int, steps: int, x0: torch.Tensor | None) -> None:
                bar.update(step + 1 - bar.n)
                line.step(step + 1, steps, remote.last_step_seconds)
                if callback is not None:
                    # Where a sampler of ComfyUI has it: previewers with weights of their own lie there too.
                    there = x0.to(noise.device) if x0 is not None else None
                    callback(step, there, there, steps)

            result = remote.sample(
                start,
                sigmas,
                sampler=self.name,
                positive=conditioning(model.diffusion_model, conds["positive"][0]),
                negative=conditioning(model.diffusion_model, conds["negative"][0]) if guided else None,
                cfg=float(model_wrap.cfg),
                on_step=on_step,
                preview=callback is not None,
                poll=poll,
            )
        return sampling.inverse_noise_scaling(sigmas[-1], result.to(noise.device))


def conditioning(model: Any, cond: Mapping[str, Any]) -> dict[str, Input]:
    """One encoded conditioning as inputs of the ranks' model call, read as the diffusion `model` reads its arguments."""
    return model.inputs_of({name: entry.cond for name, entry in cond["model_conds"].items()})


def why_not_mirrored(
    name: str,
    guider: Any,
    sigmas: torch.Tensor,
    model_options: Mapping[str, Any],
    noise: torch.Tensor,
    denoise_mask: torch.Tensor | None,
) -> str | None:
    """The first thing in this run that the ranks do not implement, in words, or None when they can run the loop."""
    if not seams.fits(seams.MIRRORED):
        return f"ComfyUI {seams.version()} has changed what the ranks follow"
    if name not in SAMPLERS:
        return f"the ranks do not run the sampler {name} themselves"
    if noise.ndim != 4 and not (noise.ndim == 5 and noise.shape[2] == 1):
        return f"the latent has the shape {list(noise.shape)} and is no single picture"
    if denoise_mask is not None:
        return "the latent has a noise_mask"
    rising = why_not_descending(sigmas)
    if rising:
        return f"of the sigmas ({rising})"
    return (
        _foreign_sampling(guider, sigmas)
        or _foreign_patches(guider.model_patcher)
        or _foreign_options(model_options)
        or _foreign_conditioning(guider)
    )


def _foreign_sampling(guider: Any, sigmas: torch.Tensor) -> str | None:
    from comfy.model_sampling import CONST

    if type(guider) is not comfy.samplers.CFGGuider:
        return f"the guider is a {type(guider).__name__}"
    sampling = guider.inner_model.model_sampling
    for method in ("calculate_input", "calculate_denoised"):
        if getattr(type(sampling), method, None) is not getattr(CONST, method):
            return f"the model's sampling is {type(sampling).__mro__[1].__name__}, not that of a flow model"
    if not torch.equal(sampling.timestep(sigmas).float(), sigmas.float()):
        return "the model's timesteps are not its sigmas (a ModelSampling node changed them)"
    return None


def _foreign_patches(patcher: Any) -> str | None:
    for path in patcher.object_patches:
        if path != "model_sampling":
            return f"a node replaced {path} of the model"
    for what in ("injections", "hook_patches", "forced_hooks"):
        if getattr(patcher, what, None):
            return f"the model carries {what}"
    for name in patcher.additional_models:
        if name != STUBS:
            return f"the model brings another model along ({name})"
    return None


def _foreign_options(model_options: Mapping[str, Any]) -> str | None:
    for name, value in model_options.items():
        if name not in MODEL_OPTIONS and not _empty(value):
            return f"the model has the option {name}"
    for holder in (model_options.get("transformer_options", {}), model_options.get("to_load_options", {})):
        for name, value in holder.items():
            if name in TRANSFORMER_OPTIONS or _empty(value):
                continue
            if name == "callbacks":
                inside = [
                    kind
                    for kind, found in value.items()
                    if kind not in OUTSIDE_THE_LOOP and not _empty(found)
                ]
                if inside:
                    return f"the model has a callback {inside[0]}"
            elif name == "wrappers":
                kind, found = next((kind, found) for kind, found in value.items() if not _empty(found))
                owner = next(key for key, entries in found.items() if entries)
                return f"the model has a wrapper {kind}" + (f" of {owner}" if owner else "")
            else:
                return f"the model has the transformer option {name}"
    return None


def _foreign_conditioning(guider: Any) -> str | None:
    sides = ["positive"] if math.isclose(guider.cfg, 1.0) else ["positive", "negative"]
    for side in sides:
        conds = guider.conds.get(side) or []
        if len(conds) != 1:
            return f"the {side} side has {len(conds)} conditionings"
        for name, value in conds[0].items():
            if name not in CONDITIONING and value is not None:
                return f"the {side} conditioning carries {name}"
        encoded = conds[0]["model_conds"]
        if CONTEXT not in encoded:
            return f"the {side} conditioning has no text"
        for name in encoded:
            if name not in (CONTEXT, REFERENCES, METHOD, *guider.inner_model.diffusion_model.inputs):
                return f"the {side} conditioning gives the model {name}"
    return None


def _empty(value: Any) -> bool:
    """Whether an option is unset: None, False, or containers that hold nothing at any depth."""
    if value is None or value is False:
        return True
    if isinstance(value, Mapping):
        return all(_empty(entry) for entry in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value) == 0
    return False
