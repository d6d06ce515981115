"""TP Sampler: KSampler, with its loop on the ranks."""

from __future__ import annotations

from typing import Any

import comfy.sample
import comfy.samplers
import comfy.utils
import torch
from comfy_api.latest import io

from ...core.calls.samplers import SAMPLERS
from ...core.errors import InputError
from .. import seams
from ..mirrored import MirroredSampler
from ..patcher import STUBS, list_as_loaded
from .schema import check_choice, make_schema

DESCRIPTION = (
    "KSampler for a model from Load TP Model. Its whole loop runs on the ranks: one trip per image instead of one per "
    f"step. The ranks run these samplers themselves: {', '.join(SAMPLERS)}. Every other sampler, and a model or "
    "conditioning with an option that the ranks do not know (masks, areas, start and end percent, CFG functions, "
    "wrappers), goes through ComfyUI's own sampler with the same result, and the log says why. With sigmas connected, "
    "steps, scheduler and denoise are not used."
)


class TPSampler(io.ComfyNode):
    """The node. Inputs are KSampler's, in its order, and then sigmas."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPSampler",
            display_name="TP Sampler",
            description=DESCRIPTION,
            search_aliases=["tensor parallel", "multi gpu", "ksampler", "flux2", "sample"],
            inputs=[
                *ksampler_inputs(),
                io.Sigmas.Input(
                    "sigmas",
                    optional=True,
                    tooltip="Noise levels from a scheduler node, such as Flux2Scheduler. They replace steps, "
                    "scheduler and denoise.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: list,
        negative: list,
        latent_image: dict[str, Any],
        denoise: float,
        sigmas: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        check_model(model)
        check_choice("sampler_name", sampler_name, comfy.samplers.KSampler.SAMPLERS)
        if sigmas is None:
            check_choice("scheduler", scheduler, comfy.samplers.KSampler.SCHEDULERS)
            stock = comfy.samplers.KSampler(
                model,
                steps=steps,
                device=model.load_device,
                sampler=sampler_name,
                scheduler=scheduler,
                denoise=denoise,
                model_options=model.model_options,
            )
            sigmas = stock.sigmas
        samples = fixed_latent(model, latent_image)
        result = comfy.sample.sample_custom(
            model,
            comfy.sample.prepare_noise(samples, seed, latent_image.get("batch_index")),
            cfg,
            MirroredSampler(sampler_name),
            sigmas,
            positive,
            negative,
            samples,
            noise_mask=latent_image.get("noise_mask"),
            callback=preview_callback(model, max(sigmas.shape[-1] - 1, 0)),
            disable_pbar=not (seams.fits(seams.PROGRESS) and comfy.utils.PROGRESS_BAR_ENABLED),
            seed=seed,
        )
        if model.sharded.loaded:
            list_as_loaded([model, *model.get_additional_models_with_key(STUBS)])
        return io.NodeOutput({**latent_image, "samples": result})


def ksampler_inputs() -> list[io.Input]:
    """KSampler's inputs, in its order."""
    return [
        io.Model.Input("model", tooltip="The model from a Load TP Model node."),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="The random seed of the noise. The same seed gives the same noise as in KSampler.",
        ),
        io.Int.Input(
            "steps",
            default=20,
            min=1,
            max=10000,
            tooltip="How many steps the noise is removed in. Not used when sigmas is connected.",
        ),
        io.Float.Input(
            "cfg",
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="Classifier-free guidance. At 1 the negative is not used, and a step takes half the time. "
            "FLUX.2-dev and the distilled klein models want 1, klein base models about 5.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=comfy.samplers.KSampler.SAMPLERS,
            default="euler",
            tooltip=f"The ranks run these themselves: {', '.join(SAMPLERS)}. The others give the same "
            "result as in KSampler too, with one trip to the ranks per model call.",
        ),
        io.Combo.Input(
            "scheduler",
            options=comfy.samplers.KSampler.SCHEDULERS,
            default="simple",
            tooltip="How the noise is spread over the steps. Not used when sigmas is connected.",
        ),
        io.Conditioning.Input("positive", tooltip="What the image should show."),
        io.Conditioning.Input("negative", tooltip="What it should not show. Not used when cfg is 1."),
        io.Latent.Input("latent_image", tooltip="The latent to denoise."),
        io.Float.Input(
            "denoise",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="How much of the latent is replaced: lower values keep more of it. Not used when sigmas "
            "is connected.",
        ),
    ]


def check_model(model: Any) -> None:
    """Raise `InputError` unless `model` is a MODEL of ours."""
    if not hasattr(model.model, "sharded"):
        raise InputError(
            f"TP Sampler needs a model from Load TP Model, and this one is a {type(model.model).__name__} that another "
            f"loader put on one device. Load it with Load TP Model, or sample it with KSampler."
        )


def preview_callback(model: Any, steps: int) -> Any:
    """What ComfyUI wants to be told of each step, for progress and previews; None where it has no such thing."""
    if not seams.fits(seams.PREVIEWS):
        return None
    import latent_preview

    return latent_preview.prepare_callback(model, steps)


def fixed_latent(model: Any, latent: dict[str, Any]) -> torch.Tensor:
    """The latent's samples, an empty one with the model's channel count, as KSampler does it."""
    # Newer ComfyUIs write the empty latent's scale down and fit that too.
    scale = latent.get("downscale_ratio_spacial")
    more = () if scale is None else (scale,)
    return comfy.sample.fix_empty_latent_channels(model, latent["samples"], *more)
