"""Runs inside ComfyUI's tree, in one process: TP Sampler on two CPU ranks beside stock nodes on ComfyUI's own model.

    python sampler_checks.py COMFYUI FOLDER

Both models have the same weights: a small random FLUX.2, written by ComfyUI's own model class in FOLDER. Prints one
JSON object {check name: result} as its last line; test_sampler_node.py says what the results have to be.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 4, 4, 4),
}
RESULTS: dict[str, Any] = {}
CHECKS: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function as a check; what it returns is its result."""
    CHECKS.append(function)
    return function


class Lines(logging.Handler):
    """The log lines of the pack, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((found - expected).norm() / expected.norm())


def conditioning(seed: int, length: int = 7, batch: int = 1, **more: Any) -> list:
    """A ComfyUI CONDITIONING [batch, length, 48] with a guidance of 3.5."""
    made = torch.randn(batch, length, 48, generator=torch.Generator().manual_seed(seed))
    return [[made, {"pooled_output": None, "guidance": 3.5, **more}]]


def latent(height: int = 5, width: int = 7, batch: int = 1, seed: int | None = None, **more: Any) -> dict:
    """A ComfyUI LATENT [batch, 128, height, width]: empty, or random with a `seed`."""
    samples = torch.zeros(batch, 128, height, width)
    if seed is not None:
        samples = torch.randn(samples.shape, generator=torch.Generator().manual_seed(seed))
    return {"samples": samples, **more}


def native_model(path: Path) -> Any:
    """ComfyUI's own small FLUX.2 of random weights as a MODEL, its file written to `path`."""
    import comfy.model_patcher
    import comfy.supported_models
    import safetensors.torch

    from comfy_tp.comfy_tp_nodes.families.flux2 import unet_config

    config = comfy.supported_models.Flux2({**unet_config(CONFIG), "dtype": torch.float32})
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "", device="cpu")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.diffusion_model.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith(("_norm.scale", "_norm.weight")):
            parameter.fill_(1.0)
        else:
            # Larger than a trained model's, so that x0 depends on the prompt and steps are not straight lines.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    safetensors.torch.save_file(model.diffusion_model.state_dict(), path)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, cpu, cpu)


def tp_model(path: Path, dtype: str = "float32") -> Any:
    """The file at `path` as a MODEL on two CPU ranks."""
    from comfy_tp.comfy_tp_nodes.devices import place
    from comfy_tp.comfy_tp_nodes.model import build_model
    from comfy_tp.comfy_tp_nodes.patcher import make_patcher
    from comfy_tp.comfy_tp_nodes.sharded import sharded_model
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    source = ModelSource.open(path)
    placement = place("cpu", 2, source.heads, path.name, torch.device("cpu"))
    return make_patcher(build_model(sharded_model(source, placement, dtype)), "keep")


class Run:
    """The two models, and the nodes that sample them."""

    native: Any
    ours: Any
    path_of_file: Path
    lines = Lines()

    @classmethod
    def stock(cls, sampler: str = "euler", cfg: float = 1.0, steps: int = 4, **inputs: Any) -> torch.Tensor:
        """What KSampler makes of ComfyUI's own model."""
        import nodes

        arguments = {
            "scheduler": "simple",
            "positive": conditioning(2),
            "negative": conditioning(3),
            "latent_image": latent(),
            "denoise": 1.0,
            **inputs,
        }
        arguments.setdefault("model", cls.native)
        return nodes.KSampler().sample(seed=11, steps=steps, cfg=cfg, sampler_name=sampler, **arguments)[0][
            "samples"
        ]

    @classmethod
    def tp(cls, sampler: str = "euler", cfg: float = 1.0, steps: int = 4, **inputs: Any) -> torch.Tensor:
        """What TP Sampler makes of our model on the ranks."""
        from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

        arguments = {
            "scheduler": "simple",
            "positive": conditioning(2),
            "negative": conditioning(3),
            "latent_image": latent(),
            "denoise": 1.0,
            **inputs,
        }
        arguments.setdefault("model", cls.ours)
        cls.lines.lines.clear()
        return TPSampler.execute(seed=11, steps=steps, cfg=cfg, sampler_name=sampler, **arguments).args[0][
            "samples"
        ]

    @classmethod
    def path(cls) -> str:
        """Which way the last TP Sampler went: "ranks", or why not."""
        for line in cls.lines.lines:
            if line.startswith("TP Sampler runs"):
                return "ranks"
            if line.startswith("TP Sampler goes"):
                return line.split("at a time: ")[1]
        return "neither"

    @classmethod
    def both(cls, sampler: str = "euler", cfg: float = 1.0, steps: int = 3, **inputs: Any) -> dict[str, Any]:
        """Distance of TP Sampler from KSampler, and which way it went."""
        expected = cls.stock(sampler, cfg, steps, **inputs)
        found = cls.tp(sampler, cfg, steps, **inputs)
        return {"distance": relative(found, expected), "path": cls.path()}


@check
def mirrored_samplers() -> Any:
    from comfy_tp.core.calls.samplers import SAMPLERS

    # Five steps: the multistep samplers reach their full order of four in the last but one.
    return {
        **{f"{name} cfg 3.5": Run.both(name, 3.5, steps=5) for name in SAMPLERS},
        "euler cfg 1": Run.both("euler", steps=5),
        "heun cfg 1": Run.both("heun", steps=5),
        "euler cfg 3.5 batch 2": Run.both("euler", 3.5, latent_image=latent(batch=2)),
    }


@check
def mirrored_samplers_on_a_formula() -> Any:
    """The loop alone beside ComfyUI's samplers, on a velocity that costs nothing, over many schedules."""
    import comfy.samplers
    from comfy_extras.nodes_flux import Flux2Scheduler

    from comfy_tp.core.calls.sample import denoise
    from comfy_tp.core.calls.samplers import SAMPLERS

    sampling = Run.native.get_model_object("model_sampling")
    weights = torch.randn(12, 12, generator=torch.Generator().manual_seed(4)) / 4
    x = torch.randn(2, 12, 5, 7, generator=torch.Generator().manual_seed(5))

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bchw,cd->bdhw", x, weights)
        return torch.tanh(mixed) + x * sigma.view(-1, 1, 1, 1) - 0.3

    class Model:
        """What ComfyUI's samplers call: x0 of x at sigma. Some ask it for the model's sampling, along two ways."""

        model_patcher = Run.native
        model_sampling = sampling
        inner_model = property(lambda self: self)

        def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **_: Any) -> torch.Tensor:
            return x - velocity(x, sigma) * sigma.view(-1, 1, 1, 1)

    schedules = {
        f"{name} {steps}": comfy.samplers.calculate_sigmas(sampling, name, steps)
        for name in ("simple", "beta", "karras", "exponential", "sgm_uniform", "kl_optimal")
        for steps in (1, 4, 20)
        if (name, steps) != ("kl_optimal", 1)  # ComfyUI makes NaN of it
    }
    schedules["Flux2Scheduler 20"] = Flux2Scheduler.execute(20, 1024, 1024).args[0]
    schedules["without its end"] = schedules["Flux2Scheduler 20"][:-4]
    schedules["without its start"] = schedules["Flux2Scheduler 20"][7:]
    return {
        f"{name} on {schedule}": relative(
            denoise(
                lambda x, t, _: velocity(x, t),
                x,
                sigmas,
                sampler=name,
                positive={},
            ),
            comfy.samplers.sampler_object(name).sampler_function(
                Model(), x.clone(), sigmas, extra_args={}, disable=True
            ),
        )
        for name in SAMPLERS
        for schedule, sigmas in schedules.items()
    }


@check
def stock_samplers_through_the_proxy() -> Any:
    return {
        name: Run.both(name, 2.0, steps=3)
        for name in ("euler_ancestral", "uni_pc", "ipndm_v", "euler_cfg_pp")
    }


@check
def shapes_and_conditionings() -> Any:
    reference = {"reference_latents": [latent(3, 5, seed=5)["samples"]]}
    two = {"reference_latents": [latent(3, 5, seed=5)["samples"], latent(4, 4, seed=6)["samples"]]}
    return {
        "text of 1 and 600 tokens": Run.both(
            cfg=3.5, positive=conditioning(2, 600), negative=conditioning(3, 1)
        ),
        "more tokens than are joined in one call": Run.both(
            cfg=3.5, steps=2, latent_image=latent(24, 24, batch=2)
        ),
        "reference": Run.both(positive=conditioning(2, **reference)),
        "reference on one side": Run.both(cfg=3.5, positive=conditioning(2, **reference)),
        "reference on both sides": Run.both(
            cfg=3.5, positive=conditioning(2, **reference), negative=conditioning(3, **reference)
        ),
        "two references by uxo, batch 2": Run.both(
            positive=conditioning(2, **two, reference_latents_method="uxo"), latent_image=latent(batch=2)
        ),
        "no guidance": Run.both(
            positive=[[conditioning(2)[0][0], {"pooled_output": None, "guidance": None}]]
        ),
        "a guidance of its own on each side": Run.both(
            cfg=3.5,
            positive=conditioning(2),
            negative=[[conditioning(3)[0][0], {"pooled_output": None, "guidance": 1.0}]],
        ),
        "two prompts in one conditioning, batch 3": Run.both(
            positive=conditioning(2, batch=2), latent_image=latent(batch=3)
        ),
        "batch index": Run.both(latent_image=latent(batch=2, batch_index=[3, 1])),
        "empty latent of 4 channels": Run.both(latent_image={"samples": torch.zeros(1, 4, 6, 5)}),
        "denoise 0.6": Run.both(denoise=0.6, latent_image=latent(seed=7)),
        "denoise 0": Run.both(denoise=0.0, latent_image=latent(seed=7)),
        "cfg 0": Run.both(cfg=0.0),
        "one step": Run.both(steps=1),
        "many steps": Run.both(steps=12),
        "cfg of 1.0000000001": Run.both(cfg=1.0000000001),
        "beta scheduler": Run.both(scheduler="beta"),
        "dpm_2 on karras": Run.both("dpm_2", scheduler="karras"),
    }


@check
def casts_in_bfloat16() -> Any:
    """The loop on the ranks beside ComfyUI's own loop on the same MODEL: every cast has to be at the same place."""
    model = tp_model(Run.path_of_file, "bfloat16")
    odd = [[conditioning(2)[0][0], {"pooled_output": None, "guidance": 3.3}]]
    inputs = {"model": model, "positive": odd, "latent_image": latent(seed=7), "denoise": 0.7}
    expected = Run.stock("heun", 3.5, 3, **inputs)
    found = Run.tp("heun", 3.5, 3, **inputs)
    exact = Run.stock("heun", 3.5, 3, **{**inputs, "model": Run.native})
    return {"distance": relative(found, expected), "path": Run.path(), "effect": relative(found, exact)}


@check
def sigmas_input() -> Any:
    """Against SamplerCustom on ComfyUI's own model, which takes sigmas too."""
    from comfy_extras.nodes_custom_sampler import KSamplerSelect, SamplerCustom
    from comfy_extras.nodes_flux import Flux2Scheduler

    def compare(sigmas: torch.Tensor, samples: dict) -> dict[str, Any]:
        expected = SamplerCustom.execute(
            Run.native,
            True,
            11,
            1.0,
            conditioning(2),
            conditioning(3),
            KSamplerSelect.execute("heun").args[0],
            sigmas,
            samples,
        ).args[0]["samples"]
        # Another step count, scheduler and denoise, which must not matter.
        found = Run.tp("heun", steps=9, scheduler="karras", denoise=0.3, sigmas=sigmas, latent_image=samples)
        return {"distance": relative(found, expected), "path": Run.path()}

    flux2 = Flux2Scheduler.execute(4, 512, 512).args[0]
    return {
        "Flux2Scheduler": compare(flux2, latent()),
        "the low half of it": compare(flux2[2:], latent(seed=8)),
        "stopping early": compare(flux2[:3], latent()),
        "rising": compare(flux2.flip(0)[1:-1], latent(seed=8)),
    }


@check
def every_option_takes_the_proxy() -> Any:
    """Each option on the MODEL: set on both models, the results compared, and the way that TP Sampler went."""
    from comfy.patcher_extension import CallbacksMP, WrappersMP
    from comfy_extras.nodes_easycache import EasyCacheNode
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux, ModelSamplingSD3

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs)

    def unet_wrapper(apply: Any, call: dict) -> torch.Tensor:
        return 0.9 * apply(call["input"], call["timestep"], **call["c"])

    def set_on(model: Any, option: str) -> Any:
        model = model.clone()
        if option == "sampler_cfg_function":
            model.set_model_sampler_cfg_function(
                lambda args: args["uncond"] + 3 * (args["cond"] - args["uncond"])
            )
        elif option == "sampler_post_cfg_function":
            model.set_model_sampler_post_cfg_function(lambda args: 0.9 * args["denoised"])
        elif option == "sampler_pre_cfg_function":
            model.set_model_sampler_pre_cfg_function(lambda args: [0.9 * out for out in args["conds_out"]])
        elif option == "sampler_calc_cond_batch_function":
            import comfy.samplers

            model.set_model_sampler_calc_cond_batch_function(
                lambda args: [
                    0.9 * out
                    for out in comfy.samplers.calc_cond_batch(
                        args["model"], args["conds"], args["input"], args["sigma"], args["model_options"]
                    )
                ]
            )
        elif option == "disable_cfg1_optimization":
            model.set_model_sampler_post_cfg_function(
                lambda args: args["denoised"], disable_cfg1_optimization=True
            )
            model.model_options["sampler_post_cfg_function"] = []
        elif option == "model_function_wrapper":
            model.set_model_unet_function_wrapper(unet_wrapper)
        elif option == "denoise_mask_function":
            model.set_model_denoise_mask_function(lambda sigma, mask, extra_options: mask)
        elif option == "context_handler":
            from comfy.context_windows import IndexListContextHandler

            model.model_options[option] = IndexListContextHandler.__new__(IndexListContextHandler)
            model.model_options[option].should_use_context = lambda *args: False
        elif option.startswith("wrapper "):
            model.add_wrapper_with_key(option.split()[1], "test", wrapper)
        elif option.startswith("callback "):
            model.add_callback_with_key(option.split()[1], "test", lambda *args, **kwargs: None)
        elif option == "EasyCache":
            model = EasyCacheNode.execute(model, 9.0, 0.15, 0.95, False).args[0]
        elif option == "ModelSamplingFlux":
            model = ModelSamplingFlux().patch(model, 1.3, 0.4, 512, 512)[0]
        elif option == "ModelSamplingSD3":
            model = ModelSamplingSD3().patch(model, 3.0)[0]
        elif option == "object patch":
            model.add_object_patch("memory_usage_factor", 3.0)
        elif option == "transformer option":
            model.model_options["transformer_options"]["something_new"] = 1
        elif option == "additional models":
            model.set_additional_models("test", [Run.native.clone()])
        return model

    without_effect = [
        "nothing",
        "disable_cfg1_optimization",
        "denoise_mask_function",
        "context_handler",
        *(f"wrapper {kind}" for name, kind in vars(WrappersMP).items() if name.isupper()),
        f"callback {CallbacksMP.ON_PREPARE_STATE}",
        f"callback {CallbacksMP.ON_APPLY_HOOKS}",
        f"callback {CallbacksMP.ON_PRE_RUN}",
        f"callback {CallbacksMP.ON_CLEANUP}",
        "object patch",
        "transformer option",
        "additional models",
    ]
    with_effect = [
        "sampler_cfg_function",
        "sampler_post_cfg_function",
        "sampler_pre_cfg_function",
        "sampler_calc_cond_batch_function",
        "model_function_wrapper",
        "ModelSamplingFlux",
        "ModelSamplingSD3",
    ]
    plain = Run.stock(cfg=2.0, steps=2)
    results = {}
    for option in [*without_effect, *with_effect]:
        expected = plain
        if option in with_effect:
            expected = Run.stock(cfg=2.0, steps=2, model=set_on(Run.native, option))
        found = Run.tp(cfg=2.0, steps=2, model=set_on(Run.ours, option))
        results[option] = {
            "distance": relative(found, expected),
            "path": Run.path(),
            "effect": relative(found, plain),
        }
    # EasyCache leaves steps out: enough of them, and the model called less often than there are steps.
    found = Run.tp(steps=8, model=set_on(Run.ours, "EasyCache"))
    path = Run.path()
    results["EasyCache"] = {
        "distance": relative(found, Run.stock(steps=8, model=set_on(Run.native, "EasyCache"))),
        "path": path,
        "effect": relative(found, Run.stock(steps=8)),
    }
    return results


@check
def every_conditioning_option_takes_the_proxy() -> Any:
    half = torch.zeros(1, 5, 7)
    half[:, :, :4] = 1.0
    changes: dict[str, dict[str, Any]] = {
        "area": {"area": (3, 4, 1, 2), "strength": 1.0},
        "strength": {"strength": 0.5},
        "mask": {"mask": half, "set_area_to_bounds": False, "mask_strength": 1.0},
        "start_percent": {"start_percent": 0.2},
        "end_percent": {"end_percent": 0.6},
        "an unknown key": {"something_new": 1},
    }
    results = {
        name: Run.both(cfg=2.0, steps=3, positive=conditioning(2, **change))
        for name, change in changes.items()
    }
    results["several on one side"] = Run.both(steps=2, positive=[*conditioning(2), *conditioning(4)])
    results["mask on the negative"] = Run.both(cfg=2.0, steps=2, negative=conditioning(3, mask=half))
    results["unused negative at cfg 1"] = Run.both(steps=2, negative=[*conditioning(3), *conditioning(4)])
    results["noise_mask"] = Run.both(steps=2, latent_image=latent(seed=9, noise_mask=half))
    return results


@check
def refusals() -> Any:
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    def text(**inputs: Any) -> str:
        try:
            Run.tp(**inputs)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return "accepted"

    assert TPSampler.GET_SCHEMA().node_id == "TPSampler"
    return {
        "stock model": text(model=Run.native),
        "unknown sampler": text(sampler="eulre"),
        "unknown scheduler": text(scheduler="simpel"),
        "channels": text(latent_image={"samples": torch.ones(1, 16, 5, 7)}),
        "width": text(positive=[[torch.randn(1, 7, 24), {"pooled_output": None}]]),
        "then a good one": text(),
    }


@check
def cancel_in_the_middle() -> Any:
    """The third preview presses Cancel; the run ends at once, and the next one is right."""
    import comfy.model_management
    import latent_preview

    stock_callback = latent_preview.prepare_callback
    seen: list[tuple[int, int, list[int]]] = []

    def prepare(model: Any, steps: int, x0_output_dict: Any = None) -> Any:
        def callback(step: int, x0: torch.Tensor, x: Any, total: int) -> None:
            seen.append((step, total, list(x0.shape)))
            if step == 2:
                comfy.model_management.interrupt_current_processing()

        return callback

    latent_preview.prepare_callback = prepare
    raised = "nothing"
    try:
        Run.tp(steps=200)
    except comfy.model_management.InterruptProcessingException:
        raised = "InterruptProcessingException"
    finally:
        latent_preview.prepare_callback = stock_callback
    return {"raised": raised, "seen": seen, "next": Run.both()}


@check
def progress_and_previews() -> Any:
    import comfy.utils

    calls: list[tuple[int, int]] = []
    comfy.utils.set_progress_bar_global_hook(lambda value, total, *rest, **more: calls.append((value, total)))
    Run.tp("heun", steps=3)
    comfy.utils.set_progress_bar_global_hook(None)
    return calls


@check
def metadata_is_kept() -> Any:
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    given = latent(something="kept")
    made = TPSampler.execute(
        Run.ours, 11, 1, 1.0, "euler", "simple", conditioning(2), conditioning(3), given, 1.0
    ).args[0]
    return {"keys": sorted(made), "input untouched": bool((given["samples"] == 0).all())}


def main(comfyui: str, folder: str, only: list[str]) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    torch.set_num_threads(1)
    import comfy.samplers  # noqa: F401

    from comfy_tp.comfy_tp_nodes import groups

    logging.getLogger("comfy_tp.nodes").addHandler(Run.lines)
    logging.getLogger("comfy_tp.nodes").setLevel(logging.INFO)
    path = Path(folder) / "small_flux2.safetensors"
    try:
        with torch.inference_mode():
            Run.path_of_file = path
            Run.native = native_model(path)
            Run.ours = tp_model(path)
            for function in CHECKS:
                if only and function.__name__ not in only:
                    continue
                started = time.perf_counter()
                try:
                    RESULTS[function.__name__] = function()
                except Exception:  # noqa: BLE001
                    RESULTS[function.__name__] = traceback.format_exc()
                print(f"{function.__name__}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    finally:
        groups.close_all()
    print(json.dumps(RESULTS))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
