"""Every stock node that takes a MODEL, run on the MODEL of Load TP Model and on ComfyUI's own of the same weights."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from comfy_inprocess import (
    conditioning,
    import_comfy,
    ksampler,
    latent,
    native,
    random_lora,
    relative_error,
    tp_model,
)

from comfy_tp.core.errors import TPError

WORKS, REFUSED, NOT_FOR_THIS_MODEL, WRONG = "works", "refused", "not for FLUX.2", "WRONG"
TOLERANCE = 2e-5  # float32 on both sides, but the ranks add in another order
MODEL = "MODEL"
WIDGETS = (int, float, str, bool)
LORA = "sweep-lora.safetensors"
SAMPLING = {"steps": 3, "cfg": 3.0, "seed": 7}


@dataclass
class Finding:
    """What one node did with one choice of inputs."""

    node: str
    name: str
    module: str
    given: dict[str, Any]
    verdict: str
    says: str = ""
    changes: bool = False  # whether the stock result differs from that without the node

    def record(self) -> dict[str, Any]:
        """For JSON: widgets as they are, and of anything else that it is given."""
        plain = {key: value if isinstance(value, WIDGETS) else "given" for key, value in self.given.items()}
        return {**vars(self), "given": plain}


# -- the nodes


def builtin_nodes() -> dict[str, type]:
    """Every stock node of this release by its id. Asserts that no file with a MODEL in it failed to load."""
    import_comfy()
    import nodes

    failed = asyncio.run(nodes.init_builtin_extra_nodes())
    with_models = [name for name in failed if takes_models(import_comfy_extras(name))]
    assert not with_models, f"these files of comfy_extras cannot be imported here: {', '.join(with_models)}"
    return dict(nodes.NODE_CLASS_MAPPINGS)


def import_comfy_extras(file: str) -> str:
    """The source of a file of comfy_extras."""
    from comfy_tp.comfyui import comfyui_path

    return (comfyui_path() / "comfy_extras" / file).read_text()


def takes_models(source: str) -> bool:
    return '("MODEL"' in source or "io.Model.Input" in source or "IO.Model.Input" in source


def inputs_of(node: type) -> dict[str, tuple[str, Any, dict[str, Any], bool]]:
    """Name -> (type, choices, options, whether it is required) of a node of either schema."""
    found = {}
    declared = node.INPUT_TYPES()
    for section in ("required", "optional"):
        for name, entry in declared.get(section, {}).items():
            kind, options = entry[0], (entry[1] if len(entry) > 1 else {})
            choices = kind if isinstance(kind, list) else options.get("options")
            found[name] = (
                "COMBO" if isinstance(kind, list) else str(kind),
                choices,
                options,
                section == "required",
            )
    return found


def nodes_with_models(nodes: Mapping[str, type]) -> dict[str, type]:
    """Those with an input that takes a MODEL; inputs that take anything at all hand it on."""
    return {
        name: node
        for name, node in nodes.items()
        if any(MODEL in kind.split(",") for kind, *_ in inputs_of(node).values()) or name in HANDED_ON
    }


HANDED_ON = {"ComfySwitchNode"}  # takes anything, and stands before the sampler in official templates


# -- their inputs


def tiny_clip() -> Any:
    """A stock CLIP around a module with one weight, for nodes that save or patch a CLIP beside the MODEL."""
    import comfy.model_patcher
    import comfy.sd

    cpu = torch.device("cpu")
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model = torch.nn.Linear(2, 2)
    clip.tokenizer = SimpleNamespace(state_dict=dict)
    clip.patcher = comfy.model_patcher.ModelPatcher(clip.cond_stage_model, cpu, cpu)
    clip.layer_idx = clip.apply_hooks_to_conds = None
    clip.tokenizer_options, clip.use_clip_schedule = {}, False
    return clip


@functools.cache
def tiny_vae() -> Any:
    """A stock VAE of random weights."""
    import comfy.sd
    import comfy.taesd.taesd

    torch.manual_seed(3)
    state = comfy.taesd.taesd.TAESD(latent_channels=16).state_dict()
    return comfy.sd.VAE(sd={name: tensor for name, tensor in state.items() if "vae_" not in name})


class PatchModel(torch.nn.Module):
    """The model of a MODEL_PATCH: what the nodes ask of it before they hand it to the MODEL."""

    additional_in_dim = num_layers = 0
    cond_in_channels = 3
    denoise_encoder_sd = None
    control_net = None

    def __init__(self) -> None:
        super().__init__()
        self.project_modules = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.audio_proj = AudioProjection()

    def process_input_latent_image(self, image: torch.Tensor) -> torch.Tensor:
        return image


class AudioProjection(torch.nn.Module):
    seq_len = 5

    def forward(self, first: torch.Tensor, latter: torch.Tensor) -> torch.Tensor:
        return torch.zeros(first.shape[0], 1 + latter.shape[1], 4, 8)


def model_patch() -> Any:
    import comfy.model_patcher

    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(PatchModel(), cpu, cpu)


@functools.cache
def lora_file() -> str:
    matrices = {
        name.removeprefix("diffusion_model.").removesuffix(".weight"): weight
        for name, weight in native().model.state_dict().items()
        if name.startswith("diffusion_model.") and name.endswith(".weight") and weight.ndim == 2
    }
    return random_lora(LORA, matrices, seed=5)


def lora_tensors() -> dict[str, torch.Tensor]:
    import comfy.utils
    import folder_paths

    return comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("loras", lora_file()))


def sigmas() -> torch.Tensor:
    return torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])


def noise() -> Any:
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise

    return Noise_RandomNoise(7)


def sampler(name: str = "euler") -> Any:
    import comfy.samplers

    return comfy.samplers.sampler_object(name)


def audio_vae() -> Any:
    return SimpleNamespace(audio_sample_rate=44100, encode=lambda sound: torch.ones(1, 2, 5, 4))


def vision_output() -> Any:
    states = torch.zeros(1, 30, 4, 8)
    return SimpleNamespace(all_hidden_states=states, penultimate_hidden_states=states[:, -2], image_sizes=[])


# Type of an input -> what is given, by the input's name.
GIVEN: dict[str, Callable[[str], Any]] = {
    "CONDITIONING": lambda name: conditioning(seed=sum(map(ord, name))),
    "LATENT": lambda name: latent(6, 4, batch=2, seed=5),
    "SIGMAS": lambda name: sigmas(),
    "SAMPLER": lambda name: sampler(),
    "NOISE": lambda name: noise(),
    "CLIP": lambda name: tiny_clip(),
    "VAE": lambda name: audio_vae() if name == "audio_vae" else tiny_vae(),
    "IMAGE": lambda name: torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1)),
    "MASK": lambda name: torch.ones(1, 64, 64),
    "CLIP_VISION": lambda name: SimpleNamespace(get_sd=dict),
    "CLIP_VISION_OUTPUT": lambda name: vision_output(),
    "LATENT_OPERATION": lambda name: lambda latent: latent * 0.9,
    "LORA_MODEL": lambda name: lora_tensors(),
    "MODEL_PATCH": lambda name: model_patch(),
    "AUDIO": lambda name: {"waveform": torch.zeros(1, 2, 4410), "sample_rate": 44100},
    "AUDIO_ENCODER_OUTPUT": lambda name: {"encoded_audio_all_layers": [torch.zeros(1, 20, 8)] * 3},
    "COMFY_DYNAMICCOMBO_V3": lambda name: {name: "single_speaker"},
}
# Widgets without which a node would do nothing to a small FLUX.2, and further choices that are to be tried.
# "@batch": how many pictures are sampled with the MODEL (2 if not said), "@mask": within a mask.
TRAINING = {"steps": 1, "latents": (latent(4, 4, seed=1), latent(4, 4, seed=2))}
EVERYWHERE = {"start_percent": 0.0, "end_percent": 1.0}
CHOSEN: dict[str, list[dict[str, Any]]] = {
    "BasicScheduler": [{}, {"scheduler": "beta", "denoise": 0.5}],
    "CFGNorm": [{"strength": 0.7}],
    "ChromaRadianceOptions": [{}, {"nerf_tile_size": 8}],
    "ComfySwitchNode": [{"switch": False}, {"switch": True}],
    "ContextWindowsManual": [
        {},
        {"context_length": 1, "context_overlap": 0, "dim": 0},
        {"context_length": 4, "context_overlap": 1, "dim": 2},
    ],
    "DifferentialDiffusion": [{}, {"@mask": True}, {"@mask": True, "strength": 0.5}],
    "DualModelGuider": [{}, {"negative": conditioning(seed=2)}],
    "EasyCache": [{}, {"reuse_threshold": 3.0, **EVERYWHERE}],
    "FreSca": [{"scale_low": 0.5, "scale_high": 1.5}],
    "KSampler": [
        {"steps": 4, "cfg": 3.0},
        {"steps": 4, "cfg": 1.0, "sampler_name": "dpmpp_2m", "denoise": 0.6},
    ],
    "KSamplerAdvanced": [{"steps": 4, "cfg": 3.0}, {"steps": 4, "start_at_step": 1, "end_at_step": 3}],
    "LazyCache": [{}, {"reuse_threshold": 3.0, **EVERYWHERE}],
    "ModelComputeDtype": [{}, {"dtype": "fp32"}, {"dtype": "bf16"}],
    "ModelMergeSimple": [{"ratio": 0.5}],
    "ModelNoiseScale": [{"noise_scale": 1.5}],
    "RenormCFG": [{"@batch": 1}],
    "SAM3_Detect": [{"conditioning": conditioning(seed=3)}],
    "SAM3_VideoTrack": [{"conditioning": conditioning(seed=3)}],
    "SamplerCustom": [{"cfg": 3.0}, {"cfg": 3.0, "add_noise": False}],
    "ScaleROPE": [{}, {"scale_x": 2.0}],
    "SeedVR2Conditioning": [{"vae_conditioning": {"samples": torch.zeros(1, 16, 2, 4, 4)}}],
    "SelectModelDevice": [{}, {"device": "cpu"}],
    "SkipLayerGuidanceDiT": [{"double_layers": "0", "single_layers": "0", **EVERYWHERE}],
    "SkipLayerGuidanceDiTSimple": [{"double_layers": "0", "single_layers": "0", **EVERYWHERE}],
    "SkipLayerGuidanceSD3": [{"layers": "0", **EVERYWHERE}],
    "TemporalScoreRescaling": [{"@batch": 1}],
    "TrainLoraNode": [TRAINING, {**TRAINING, "bypass_mode": True, "training_dtype": "none"}],
    "WanInfiniteTalkToVideo": [
        {"width": 64, "height": 64, "length": 5, "start_image": torch.zeros(1, 64, 64, 3)}
    ],
    "ZImageFunControlnet": [{"image": torch.zeros(1, 64, 64, 3)}],
}
# Files that the widgets of these nodes name.
FILES = {"lora_name": "loras", "hypernetwork_name": "hypernetworks", "control_net_name": "controlnet"}


def write_files() -> None:
    """Put a file where each widget of `FILES` looks for one."""
    import folder_paths
    from safetensors.torch import save_file

    lora_file()
    base = import_comfy() / "models"
    for folder in ("hypernetworks", "controlnet"):
        (base / folder).mkdir(exist_ok=True)
    layer = {"linear.0.weight": torch.eye(48), "linear.0.bias": torch.zeros(48)}
    torch.save(
        {"activation_func": "linear", "is_layer_norm": False, "activate_output": False, 48: [layer, layer]},
        base / "hypernetworks" / "sweep.pt",
    )
    save_file({"control_model.zero": torch.zeros(1)}, base / "controlnet" / "sweep.safetensors")
    folder_paths.filename_list_cache.clear()


def given(node: type, model: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs for `node`: `model` for every MODEL, `chosen` widgets, and defaults for the others."""
    found: dict[str, Any] = {}
    for name, (kind, choices, options, required) in inputs_of(node).items():
        if name in chosen:
            found[name] = chosen[name]
        elif MODEL in kind.split(",") or kind == "COMFY_MATCHTYPE_V3":
            found[name] = model  # as ComfyUI hands a cached MODEL on; nodes make their own clones
        elif not required:
            continue
        elif kind in GIVEN:
            found[name] = GIVEN[kind](name)
        elif name in FILES:
            found[name] = {"lora_name": LORA, "hypernetwork_name": "sweep.pt"}.get(name, "sweep.safetensors")
        elif kind == "COMBO":
            found[name] = options.get("default", choices[0] if choices else None)
        elif kind in ("INT", "FLOAT", "STRING", "BOOLEAN"):
            found[name] = options.get("default", {"STRING": "", "BOOLEAN": False}.get(kind, 0))
        else:
            raise AssertionError(
                f"{node.__name__}: no value is known for the input {name} of the type {kind}"
            )
    if getattr(node, "INPUT_IS_LIST", False):
        return {name: list(value) if isinstance(value, tuple) else [value] for name, value in found.items()}
    return found


# -- running them


def run(node: type, inputs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(type, value) of every output."""
    called = node if hasattr(node, "GET_SCHEMA") else node()
    work = called.execute if hasattr(node, "GET_SCHEMA") else getattr(called, node.FUNCTION)
    result = work(**inputs)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    values = getattr(result, "args", result)
    if isinstance(values, dict):
        values = values.get("result", ())
    kinds = [str(kind) for kind in node.RETURN_TYPES]
    return list(zip(kinds, values or (), strict=False))


def start(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The latent that a MODEL is sampled from."""
    found = latent(6, 4, batch=chosen.get("@batch", 2), seed=5)
    return {**found, "noise_mask": torch.linspace(0, 1, 24).view(1, 6, 4)} if chosen.get("@mask") else found


def sampled(model: Any, chosen: Mapping[str, Any]) -> torch.Tensor:
    """What the stock KSampler makes of a MODEL, with guidance and more than one picture."""
    return ksampler(model, conditioning(seed=1), conditioning(seed=2), start(chosen), **SAMPLING)


def sampled_by_tp(model: Any, chosen_inputs: Mapping[str, Any]) -> torch.Tensor:
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    inputs = (conditioning(seed=1), conditioning(seed=2), start(chosen_inputs), 1.0)
    chosen = (SAMPLING["seed"], SAMPLING["steps"], SAMPLING["cfg"], "euler", "simple")
    with torch.inference_mode():
        return TPSampler.execute(model, *chosen, *inputs).args[0]["samples"]


def guided(guider: Any) -> torch.Tensor:
    start = latent(6, 4, batch=2, seed=5)
    return guider.sample(noise().generate_noise(start), start["samples"], sampler(), sigmas(), seed=7)


def custom(model: Any, chosen: Any) -> torch.Tensor:
    import comfy.sample

    start = latent(6, 4, batch=2, seed=5)
    return comfy.sample.sample_custom(
        model,
        noise().generate_noise(start),
        3.0,
        chosen,
        sigmas(),
        conditioning(seed=1),
        conditioning(seed=2),
        start["samples"],
        seed=7,
    )


def tensors(
    kind: str, value: Any, model: Any, chosen: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What an output comes to: pictures of a MODEL, GUIDER or SAMPLER, numbers of the others."""
    if kind == MODEL or (kind == "COMFY_MATCHTYPE_V3" and hasattr(value, "model_options")):
        yield "KSampler", sampled(value, chosen)
        if hasattr(value, "sharded"):
            yield "TP Sampler", sampled_by_tp(value, chosen)
    elif kind == "GUIDER":
        yield "guider", guided(value)
    elif kind == "SAMPLER":
        yield "sampler", custom(model, value)
    elif kind == "LATENT":
        yield "latent", value["samples"]
    elif kind == "CONDITIONING":
        for text, extra in value:
            yield "text", text
            yield from (
                (name, part) for name, part in sorted(extra.items()) if isinstance(part, torch.Tensor)
            )
    elif isinstance(value, torch.Tensor):
        yield kind, value
    elif isinstance(value, int | float):
        yield kind, torch.tensor(float(value))
    elif isinstance(value, dict):
        for name, part in sorted(value.items()):
            yield name, part if isinstance(part, torch.Tensor) else torch.tensor(part, dtype=torch.float32)
    elif kind == "CLIP":
        return
    elif value is None:
        raise ValueError(f"it hands on no {kind}")
    else:
        raise AssertionError(f"nothing is known to compare an output of the type {kind} by")


@dataclass
class Outcome:
    """What a node, and the sampling of what it made, came to: tensors by name, or an error."""

    results: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    error: Exception | None = None


def outcome(node: type, model: Any, chosen: Mapping[str, Any]) -> Outcome:
    try:
        with torch.inference_mode():
            inputs = given(node, model, chosen)
            results = [
                pair for kind, value in run(node, inputs) for pair in tensors(kind, value, model, chosen)
            ]
        return Outcome(results)
    except AssertionError:
        raise
    except Exception as error:
        return Outcome(error=error)


@functools.cache
def plain(batch: int, mask: bool) -> torch.Tensor:
    """What the stock MODEL gives without any node."""
    return sampled(native(), {"@batch": batch, "@mask": mask})


def judge(name: str, node: type, chosen: dict[str, Any]) -> Finding:
    """The verdict on one node with these widgets."""
    import nodes

    shown = nodes.NODE_DISPLAY_NAME_MAPPINGS.get(name, name)
    if hasattr(node, "GET_SCHEMA"):
        shown = node.GET_SCHEMA().display_name or name
    finding = Finding(name, shown, Path(node.__module__.rpartition(".")[2]).name, chosen, WRONG)
    ours = outcome(node, tp_model(), chosen)
    if isinstance(ours.error, TPError):
        finding.verdict, finding.says = REFUSED, str(ours.error)
        return finding
    stock = outcome(node, native(), chosen)
    if ours.error is not None and stock.error is not None:
        finding.verdict, finding.says = NOT_FOR_THIS_MODEL, first_line(stock.error)
    elif ours.error is not None:
        finding.says = f"the stock MODEL works, ours fails with {first_line(ours.error)}"
    elif stock.error is not None:
        finding.says = f"the stock MODEL fails with {first_line(stock.error)}, and ours went on"
    elif not ours.results:
        finding.says = "there is nothing to compare"
    else:
        finding.says = difference(ours, stock)
        finding.verdict = WRONG if finding.says else WORKS
        without = plain(chosen.get("@batch", 2), chosen.get("@mask", False))
        finding.changes = any(
            label != "KSampler" or relative_error(tensor, without) > TOLERANCE
            for label, tensor in stock.results
        )
    return finding


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def difference(ours: Outcome, stock: Outcome) -> str:
    """Where the results differ, or nothing. What TP Sampler makes is held against the stock KSampler's."""
    expected = iter(stock.results)
    for label, tensor in ours.results:
        if label != "TP Sampler":
            wanted_label, wanted = next(expected, ("nothing", tensor))
            if wanted_label != label:
                return f"there is {label}, where the stock MODEL gives {wanted_label}"
        if tensor.shape != wanted.shape:
            return f"{label}: the shape is {list(tensor.shape)}, the stock's {list(wanted.shape)}"
        if not wanted.isfinite().all():
            return f"{label}: the stock result is not finite, and nothing was compared"
        error = (
            relative_error(tensor.float(), wanted.float()) if wanted.any() else float(tensor.float().norm())
        )
        if not error <= TOLERANCE:
            return f"{label}: differs from the stock result by {error:.2g}"
    left = [label for label, _ in expected]
    return f"there is no {left[0]}" if left else ""


def sweep(nodes: Mapping[str, type]) -> list[Finding]:
    """The verdict on every node, with every choice of `CHOSEN`."""
    write_files()
    findings = []
    for name, node in sorted(nodes_with_models(nodes).items()):
        findings += [judge(name, node, chosen) for chosen in CHOSEN.get(name, [{}])]
    return findings
