"""Every style of LoRA keys means the same weights, and what fits nothing is named."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import lora_checks
import pytest
import torch

from comfy_tp.core.checkpoint.convert import file_tensors
from comfy_tp.core.errors import InputError
from comfy_tp.core.lora.apply import WeightPatches
from comfy_tp.core.lora.keys import LoraFile, read_lora
from comfy_tp.core.models import architecture_named
from comfy_tp.core.models.flux2_layout import BFL_FLUX2
from comfy_tp.core.tp.collectives import Ranks

RANK = 3
ALPHA = 2.0

# Style -> how it writes a module, its two factors and alpha.
STYLES = {
    "ComfyUI": ("diffusion_model.{m}", ".lora_B.weight", ".lora_A.weight", None),
    "ComfyUI with alpha": ("diffusion_model.{m}", ".lora_up.weight", ".lora_down.weight", ".alpha"),
    "kohya": ("lora_unet_{flat}", ".lora_up.weight", ".lora_down.weight", ".alpha"),
    "diffusers": ("transformer.{m}", ".lora_B.weight", ".lora_A.weight", None),
    "old diffusers": ("transformer.{m}", ".lora.up.weight", ".lora.down.weight", None),
    "PEFT": ("base_model.model.{m}", ".lora_B.default.weight", ".lora_A.default.weight", None),
    "PEFT around diffusers": (
        "base_model.model.transformer.{m}",
        ".lora_B.style.weight",
        ".lora_A.style.weight",
        None,
    ),
    "LyCORIS": ("lycoris_{flat}", ".lora_up.weight", ".lora_down.weight", ".alpha"),
    "OneTrainer": ("lora_transformer_{flat}", ".lora_up.weight", ".lora_down.weight", ".alpha"),
    "bare": ("{m}", ".lora_B", ".lora_A", None),
}
BFL_MODULES = [key.removesuffix(".weight") for key in lora_checks.FILE if key.endswith(".weight")][:-1]


def model_shapes() -> dict[str, tuple[int, ...]]:
    """What the single file of the small FLUX.2 holds."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in lora_checks.flux2_once().named_parameters():
        sources = BFL_FLUX2.sources(name)
        names, _, of = sources[0]
        rows = parameter.shape[0] // len(sources) * of
        shapes[names[0]] = (rows, *parameter.shape[1:])
    return shapes


def read(tensors: dict[str, torch.Tensor]) -> LoraFile:
    return read_lora(tensors, model_shapes(), architecture_named("flux2").layouts, "flux2")


def write(style: str, module: str, up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    name, up_suffix, down_suffix, alpha = STYLES[style]
    name = name.format(m=module, flat=module.replace(".", "_"))
    tensors = {name + up_suffix: up, name + down_suffix: down}
    return tensors | ({name + alpha: torch.tensor(ALPHA)} if alpha else {})


def patched(found: LoraFile) -> dict[str, torch.Tensor]:
    """The small FLUX.2's parameters with the patches of a LoRA file."""
    model = lora_checks.sharded(lora_checks.flux2(), Ranks.single())
    WeightPatches(model).set(found.patches, mode="merge")
    return dict(model.named_parameters())


def linears() -> list[str]:
    model = lora_checks.flux2_once()
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.parametrize("style", STYLES)
def test_diffusers_names_mean_the_model_s_own_weights_in_every_style(style):
    """All of them: to_qkv_mlp_proj, the single block's to_out, ff.linear_in, norm_out with its halves swapped too."""
    generator = torch.Generator().manual_seed(3)
    expected = {name: tensor.clone() for name, tensor in lora_checks.flux2_once().named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for module in linears():
        rows, columns = expected[f"{module}.weight"].shape
        up = torch.randn(rows, RANK, generator=generator)
        down = torch.randn(RANK, columns, generator=generator)
        tensors |= write(style, module, up, down)
        expected[f"{module}.weight"] += up @ down * (ALPHA / RANK if STYLES[style][3] else 1.0)
    found = read(tensors)
    assert found.unmatched == [] and sorted(found.applied) == sorted(tensors)
    assert lora_checks.difference(patched(found), expected) <= 1e-6


@pytest.mark.parametrize("style", STYLES)
def test_single_file_names_mean_the_file_s_weights_in_every_style(style):
    generator = torch.Generator().manual_seed(4)
    state = dict(lora_checks.flux2_once().named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    patches = []
    for module in BFL_MODULES:
        rows, columns = lora_checks.file_tensor(state, f"{module}.weight").shape
        up = torch.randn(rows, RANK, generator=generator)
        down = torch.randn(RANK, columns, generator=generator)
        tensors |= write(style, module, up, down)
        alpha = ALPHA if STYLES[style][3] else None
        adapter = lora_checks.Adapter("lora", {"up": up, "down": down}, alpha)
        patches.append(lora_checks.Patch(f"{module}.weight", adapter))
    found = read(tensors)
    assert found.unmatched == [] and len(found.patches) == len(BFL_MODULES)
    assert lora_checks.difference(patched(found), lora_checks.expected_state(state, patches)) <= 1e-6


def test_unfused_names_of_single_blocks_are_rows_of_the_fused_weight():
    h = lora_checks.H
    down = torch.ones(1, h)
    block = "single_transformer_blocks.0"
    found = read(
        {
            f"transformer.{block}.attn.to_k.lora_B.weight": torch.ones(h, 1),
            f"transformer.{block}.attn.to_k.lora_A.weight": down,
            f"transformer.{block}.proj_mlp.lora_B.weight": torch.ones(6 * h, 1),
            f"transformer.{block}.proj_mlp.lora_A.weight": down,
            "diffusion_model.single_blocks.0.linear1_qkv.lora_B.weight": torch.ones(3 * h, 1),
            "diffusion_model.single_blocks.0.linear1_qkv.lora_A.weight": down,
        }
    )
    assert [patch.offset for patch in found.patches] == [(0, h, h), (0, 3 * h, 6 * h), (0, 0, 3 * h)]
    assert {patch.key for patch in found.patches} == {"single_blocks.0.linear1.weight"}


@pytest.mark.parametrize("kind", [kind for kind in lora_checks.KINDS if kind not in ("diff", "set")])
def test_every_kind_is_read_from_its_own_suffixes(kind):
    names = {"up": ".lora_up.weight", "down": ".lora_down.weight", "mid": ".lora_mid.weight"}
    adapter = lora_checks.adapter_of(kind, 192, 64, 1)
    tensors = {}
    for name, tensor in adapter.tensors.items():
        start = {"lora": "", "loha": ".hada_", "lokr": ".lokr_"}[adapter.kind]
        suffix = names.get(name) or (".dora_scale" if name == "dora_scale" else start + name)
        tensors["lycoris_double_blocks_0_img_attn_qkv" + suffix] = tensor
    if adapter.alpha is not None:
        tensors["lycoris_double_blocks_0_img_attn_qkv.alpha"] = torch.tensor(adapter.alpha)
    found = read(tensors)
    assert found.unmatched == []
    (patch,) = found.patches
    assert patch.adapter.kind == adapter.kind and patch.adapter.alpha == adapter.alpha
    assert patch.adapter.tensors.keys() == adapter.tensors.keys()


def test_differences_and_set_values_of_norms_are_read():
    norm = "double_blocks.0.img_attn.norm.query_norm.scale"
    found = read(
        {
            f"diffusion_model.{norm}.set_weight": torch.ones(16),
            "transformer.transformer_blocks.0.attn.norm_k.diff": torch.ones(16),
            "diffusion_model.img_in.diff": torch.ones(64, 8),
        }
    )
    assert found.unmatched == []
    assert [(patch.key, patch.adapter.kind) for patch in found.patches] == [
        (norm, "set"),
        ("double_blocks.0.img_attn.norm.key_norm.scale", "diff"),
        ("img_in.weight", "diff"),
    ]


def test_keys_that_fit_nothing_are_named():
    up, down = torch.ones(64, 2), torch.ones(2, 64)
    good = {
        "transformer.transformer_blocks.0.attn.to_q" + end: t
        for end, t in ((".lora_B.weight", up), (".lora_A.weight", down))
    }
    bad = {
        "transformer.transformer_blocks.9.attn.to_q.lora_B.weight": up,  # no such block
        "transformer.transformer_blocks.0.attn.to_k.lora_B.weight": up,  # its other half is missing
        "transformer.transformer_blocks.0.attn.to_v.oft_blocks": torch.ones(2, 2, 2),  # no kind of ours
        "transformer.transformer_blocks.0.attn.to_v.alpha": torch.tensor(1.0),
        "transformer.transformer_blocks.0.attn.to_q.diff_b": torch.ones(64),  # the model has no biases
        "text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": down,
    }
    found = read(good | bad)
    assert sorted(found.unmatched) == sorted(bad)
    assert sorted(found.applied) == sorted(good)
    assert len(found.patches) == 1


def small(architecture: str) -> torch.nn.Module:
    """A small model of the architecture with random weights, the same every time."""
    known = architecture_named(architecture)
    torch.manual_seed(1)
    return known.load_class()(**next(iter(known.examples.values()))).eval().requires_grad_(False)


def shapes_of(architecture: str, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """What a single file of the model holds."""
    tensors = file_tensors(architecture_named(architecture).layouts[0], dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def saved_by_diffusers(
    folder: Path, pipeline: str, model: torch.nn.Module, layers: str | list[str], **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Give the model a random LoRA of PEFT's on `layers`; the file that diffusers saves of it, and its header."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig, get_peft_model_state_dict
    from safetensors import safe_open

    config = LoraConfig(r=3, lora_alpha=8, target_modules=layers, init_lora_weights=False, **settings)
    torch.manual_seed(0)
    model.add_adapter(config)
    weights = convert_state_dict_to_diffusers(get_peft_model_state_dict(model))
    peft_settings = config.to_dict() | {"task_type": None, "peft_type": "LORA"}
    save = getattr(diffusers, pipeline).save_lora_weights
    save(folder, weights, transformer_lora_adapter_metadata=peft_settings)
    with safe_open(folder / "pytorch_lora_weights.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


def check_forward(found: LoraFile, model: torch.nn.Module, plain: torch.nn.Module) -> None:
    """The patches on the `plain` model do what PEFT does in `model`."""
    plain = lora_checks.sharded(plain, Ranks.single())
    before = lora_checks.call(plain)
    WeightPatches(plain).set(found.patches)
    model.tensor_parallel = plain.tensor_parallel
    wanted = lora_checks.call(model)
    assert (before - wanted).norm() > 0.01 * wanted.norm()
    assert (lora_checks.call(plain) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"attn.to_q": 9}}])
def test_a_lora_saved_by_diffusers_gives_what_peft_itself_gives(tmp_path, settings):
    """Rank 3, alpha 8: diffusers writes alpha into the file's header only."""
    model = lora_checks.flux2()
    layers = (
        r".*\.(to_q|to_out\.0|to_qkv_mlp_proj|linear_in|linear_out)|single.*attn\.to_out|norm_out\.linear"
    )
    tensors, metadata = saved_by_diffusers(tmp_path, "Flux2Pipeline", model, layers, **settings)
    found = read_lora(tensors, model_shapes(), architecture_named("flux2").layouts, "flux2", metadata)
    assert found.unmatched == [] and len(found.applied) == len(tensors)
    check_forward(found, model, lora_checks.flux2())


# Architecture -> its pipeline, and names that trainers use for rows of a module of the file: (module, widths of rows).
OTHERS: dict[str, tuple[str, dict[str, tuple[str, tuple[int, int]]]]] = {
    "flux": ("FluxPipeline", {"single_blocks.0.linear1_qkv": ("single_blocks.0.linear1", (0, 3))}),
    "qwenimage": ("QwenImagePipeline", {}),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_flux1_and_qwen_image_loras_of_every_linear_give_what_peft_itself_gives(tmp_path, architecture):
    """As diffusers saves them; then the same modules under the names of every style mean the same places."""
    model = small(architecture)
    linears = {
        name: module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    layouts, shapes = architecture_named(architecture).layouts, shapes_of(architecture, model)
    pipeline, fused = OTHERS[architecture]
    tensors, metadata = saved_by_diffusers(tmp_path, pipeline, model, list(linears))
    found = read_lora(tensors, shapes, layouts, architecture, metadata)
    assert found.unmatched == [] and len(found.applied) == len(tensors) == 2 * len(linears)
    check_forward(found, model, small(architecture))

    def places(sizes: Mapping[str, Sequence[int]], style: str) -> list[tuple[Any, ...]]:
        written: dict[str, torch.Tensor] = {}
        for name, (rows, columns) in sizes.items():
            written |= write(style, name, torch.ones(rows, 1), torch.ones(1, columns))
        read = read_lora(written, shapes, layouts, architecture)
        assert read.unmatched == [], style
        return [(patch.key, patch.offset, patch.swapped) for patch in read.patches]

    modules = {key.removesuffix(".weight"): shape for key, shape in shapes.items() if len(shape) == 2}
    diffusers_places = places(linears, "diffusers")
    for style in STYLES:
        assert places(linears, style) == diffusers_places, style
        assert places(modules, style) == [(f"{module}.weight", None, False) for module in modules], style
        for name, (module, (start, count)) in fused.items():
            width = shapes[f"{module}.weight"][1]
            size = (count * width, width)
            assert places({name: size}, style) == [(f"{module}.weight", (0, start, count * width), False)], (
                style
            )


def test_peft_s_own_dora_is_left_out_whole():
    up, down = torch.ones(64, 2), torch.ones(2, 64)
    module = "transformer.transformer_blocks.0.attn.to_q"
    keys = {
        f"{module}.lora_B.weight": up,
        f"{module}.lora_A.weight": down,
        f"{module}.lora_magnitude_vector": torch.ones(64),
    }
    found = read(keys)
    assert sorted(found.unmatched) == sorted(keys) and not found.patches


def test_an_alpha_that_is_not_one_number_and_factors_that_do_not_fit_the_weight_are_named():
    module = "double_blocks.0.img_attn.qkv"
    tensors = write("ComfyUI with alpha", module, torch.ones(192, 2), torch.tensor(1.0))
    alpha = next(key for key in tensors if key.endswith(".alpha"))
    with pytest.raises(InputError, match=rf"'{alpha}' has the shape \[2\], expected one number"):
        read({**tensors, alpha: torch.ones(2)})
    del tensors[alpha]
    with pytest.raises(InputError, match=f"'{module}.weight' has factors that do not fit together"):
        read(tensors)
    larger = write("ComfyUI", module, torch.ones(18432, 2), torch.ones(2, 6144))
    with pytest.raises(InputError, match=r"\[18432, 6144\], but the weight is \[192, 64\]: .* another model"):
        read(larger)
    half = write("diffusers", "transformer_blocks.0.attn.to_q", torch.ones(192, 2), torch.ones(2, 64))
    with pytest.raises(InputError, match=r"\[192, 64\], but the weight is \[64, 64\]"):
        read(half)


def test_reading_leaves_the_tensors_as_they_are():
    up, down = torch.randn(192, 2), torch.randn(2, 64)
    before = copy.deepcopy((up, down))
    found = read(write("ComfyUI", "double_blocks.0.img_attn.qkv", up, down))
    patched(found)
    assert torch.equal(up, before[0]) and torch.equal(down, before[1])
    assert found.patches[0].adapter.tensors["up"] is up
