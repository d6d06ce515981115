"""FLUX.1 and Qwen-Image from Load TP Model, beside the same files through ComfyUI's own loader, on stock samplers."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    import_comfy,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    load_tp,
    relative_error,
)
from flux2_files import save_single_file

from comfy_tp.core.errors import InputError, UnsupportedError

SAME = 1e-5  # fp32; sums over ranks are taken in another order
BF16 = 1e-2  # a guidance or a time rounded otherwise gives 0.2 and more

FLUX = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 40,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
QWEN = {
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 40,
    "axes_dims_rope": (4, 6, 6),
}
# Name -> architecture and settings of a small model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dev": ("flux", {**FLUX, "guidance_embeds": True}),
    "schnell": ("flux", {**FLUX, "guidance_embeds": False}),
    "fill": ("flux", {**FLUX, "guidance_embeds": True, "in_channels": 384, "out_channels": 64}),
    "canny": ("flux", {**FLUX, "guidance_embeds": True, "in_channels": 128, "out_channels": 64}),
    "qwen": ("qwenimage", QWEN),
}
# What ComfyUI 0.3.75 takes for granted in a file of the architecture, at the sizes of the small models.
SMALL_HEADS: dict[str, dict[str, Any]] = {
    "flux": {"num_heads": 8, "axes_dim": [4, 6, 6]},
    "qwenimage": {
        "num_attention_heads": 8,
        "attention_head_dim": 16,
        "joint_attention_dim": 40,
        "axes_dims_rope": (4, 6, 6),
    },
}

pytestmark = [pytest.mark.usefixtures("in_comfy"), pytest.mark.timeout(300)]


@functools.cache
def files(name: str) -> tuple[Path, Path]:
    """The single file and the diffusers folder of a small model, among ComfyUI's diffusion_models.

    Its velocity is as large as its input, so that an error shows in the picture.
    """
    from comfy_tp.core.checkpoint.convert import file_tensors
    from comfy_tp.core.models import architecture_named

    kind, config = MODELS[name]
    architecture = architecture_named(kind)
    torch.manual_seed(3)
    model = architecture.load_class()(**config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    folder = import_comfy() / f"models/diffusion_models/small-{name}"
    model.save_pretrained(folder)
    tensors = file_tensors(architecture.layouts[0], dict(model.named_parameters()))
    return save_single_file(folder.with_suffix(".safetensors"), tensors), folder


def stock(path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> Any:
    """The MODEL of ComfyUI's own `load_diffusion_model`, which is told the head count, and to compute in `dtype`.

    On a CPU it would compute bf16 weights in float32, which a GPU does not.
    """
    import comfy.model_detection
    import comfy.model_management
    import comfy.sd

    detect = comfy.model_detection.detect_unet_config
    kind = MODELS[path.stem.removeprefix("small-")][0]

    def with_small_heads(*arguments: Any, **named: Any) -> Any:
        return {**detect(*arguments, **named), **SMALL_HEADS[kind]}

    with monkeypatch.context() as patched, torch.inference_mode():  # as ComfyUI runs its loader nodes
        patched.setattr(comfy.model_detection, "detect_unet_config", with_small_heads)
        patched.setattr(comfy.model_management, "unet_manual_cast", lambda *arguments, **named: None)
        return comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype})


def cond(length: int, *, seed: int = 1, pooled: int | None = 24, **values: Any) -> list:
    """A CONDITIONING with a pooled output, as T5 and CLIP make it for FLUX.1; Qwen-Image reads no pooled output."""
    generator = torch.Generator().manual_seed(seed + 100)
    vector = None if pooled is None else torch.randn(1, pooled, generator=generator)
    return conditioning(length, seed=seed, width=40, pooled_output=vector, **values)


def latent(height: int, width: int, *, batch: int = 1, seed: int | None = None, **more: Any) -> dict:
    """A LATENT of 16 channels; empty without a seed."""
    samples = torch.zeros(batch, 16, height, width)
    if seed is not None:
        samples = torch.randn(samples.shape, generator=torch.Generator().manual_seed(seed))
    return {"samples": samples, **more}


def combined(model: Any, method: str | None = None) -> torch.Tensor:
    """What a graph can ask for at once, at odd sizes: two references, an area (ComfyUI has none for Qwen-Image, there a
    masked conditioning), texts of different length, a noise mask, denoise, a batch."""
    import nodes
    from comfy_extras.nodes_edit_model import ReferenceLatent
    from comfy_extras.nodes_flux import FluxGuidance, FluxKontextMultiReferenceLatentMethod

    frames = model.model.latent_format.latent_dimensions == 3

    def with_references(cond: list) -> list:
        for height, width, seed in ((5, 4, 8), (7, 3, 9)):
            given = latent(height, width, seed=seed)
            if frames:
                given["samples"] = given["samples"].unsqueeze(2)
            cond = ReferenceLatent.execute(cond, given).args[0]
        if method is not None:
            cond = FluxKontextMultiReferenceLatentMethod.execute(cond, method).args[0]
        return cond

    mask = torch.zeros(1, 9, 7)
    mask[:, :6] = 1
    if frames:
        left = nodes.ConditioningSetMask().append(cond(9), mask, "default", 1.0)[0]
    else:
        left = nodes.ConditioningSetAreaPercentage().append(cond(9), 0.6, 1.0, 0, 0, 1.0)[0]
    whole = FluxGuidance.execute(cond(30, seed=3), 6.0).args[0]
    into = latent(9, 7, batch=2, seed=5, noise_mask=mask)
    positive, negative = with_references(left + whole), with_references(cond(20, seed=2))
    return ksampler(model, positive, negative, into, cfg=2.5, denoise=0.7, steps=2)


@pytest.mark.parametrize(("name", "degree"), [("dev", 2), ("schnell", 4), ("qwen", 2), ("qwen", 4)])
def test_a_single_file_gives_what_comfyuis_own_loader_gives(name, degree, monkeypatch):
    path, _ = files(name)
    native, sharded = stock(path, monkeypatch), load_tp(path.name, degree)
    assert type(native.model).__name__ == {"qwen": "QwenImage"}.get(name, "Flux")
    methods = (None, "index", "offset", "uxo") if degree == 2 else (None,)
    seen = []
    for method in methods:
        expected = combined(native, method)
        assert expected.norm() > 1
        assert relative_error(combined(sharded, method), expected) <= SAME, method
        seen.append(expected)
    assert degree == 4 or relative_error(seen[1], seen[2]) > 1e-3


@pytest.mark.parametrize("name", ["dev", "qwen"])
def test_a_diffusers_folder_gives_the_image_of_the_single_file(name):
    path, folder = files(name)
    single, whole = load_tp(path.name), load_tp(folder.name)
    assert single.sharded.info.layout.endswith("single file")
    assert whole.sharded.info.layout != single.sharded.info.layout
    assert torch.equal(combined(whole), combined(single))


@pytest.mark.parametrize("name", ["dev", "qwen"])
def test_a_plain_fp8_cast_gives_what_its_values_give_in_comfyui(name, monkeypatch):
    from safetensors.torch import load_file

    path, _ = files(name)
    held = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in load_file(path).items()}
    folder = import_comfy() / "models/diffusion_models/fp8"
    folder.mkdir(exist_ok=True)
    save_single_file(folder / f"cast-{name}.safetensors", held)
    exact = save_single_file(folder / path.name, {key: tensor.float() for key, tensor in held.items()})
    fp8 = load_tp(f"fp8/cast-{name}.safetensors")
    assert any("layers stay fp8" in note for note in fp8.sharded.info.notes)
    assert relative_error(combined(fp8), combined(stock(exact, monkeypatch))) <= SAME


@pytest.mark.parametrize("name", ["dev", "schnell", "qwen"])
def test_tp_sampler_runs_on_the_ranks_and_equals(name, monkeypatch, caplog):
    from comfy_extras.nodes_edit_model import ReferenceLatent

    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    path, _ = files(name)
    given = latent(5, 4, seed=8)
    if name == "qwen":
        given["samples"] = given["samples"].unsqueeze(2)
    positive, negative = cond(30, guidance=5.0), cond(20, seed=2)
    positive = ReferenceLatent.execute(positive, given).args[0]
    expected = ksampler(stock(path, monkeypatch), positive, negative, latent(9, 7, batch=2), cfg=2.5)
    with caplog.at_level(logging.INFO, logger="comfy_tp.nodes"), torch.inference_mode():
        output = TPSampler.execute(
            load_tp(path.name), 7, 3, 2.5, "euler", "simple", positive, negative, latent(9, 7, batch=2), 1.0
        )
    assert "TP Sampler runs euler on the ranks, 3 steps." in caplog.text
    found = output.args[0]["samples"]
    assert found.shape == expected.shape
    assert relative_error(found, expected) <= SAME


@pytest.mark.parametrize("name", ["fill", "canny"])
def test_pictures_and_masks_behind_the_latents_channels_are_read_as_in_comfyui(name, monkeypatch):
    import comfy.supported_models

    path, _ = files(name)
    mask = torch.zeros(1, 1, 72, 56)
    mask[..., 20:50, 10:40] = 1
    picture = latent(9, 7, seed=6)["samples"]
    positive = cond(9, concat_latent_image=picture, concat_mask=mask, guidance=30.0)
    native, sharded = stock(path, monkeypatch), load_tp(path.name)
    assert isinstance(sharded.model.model_config, comfy.supported_models.FluxInpaint) == (name == "fill")
    runs = [ksampler(model, positive, cond(9, seed=2), latent(9, 7)) for model in (sharded, native)]
    assert relative_error(*runs) <= SAME
    assert relative_error(ksampler(sharded, cond(9), cond(9), latent(9, 7)), runs[1]) > 1e-3


@pytest.mark.parametrize("name", ["dev", "qwen"])
def test_pooled_text_guidance_and_missing_ones_are_what_they_are_in_comfyui(name, monkeypatch):
    from comfy_extras.nodes_flux import FluxDisableGuidance

    path, _ = files(name)
    native, sharded = stock(path, monkeypatch), load_tp(path.name)
    images = []
    for positive in (
        cond(9),
        cond(9, pooled=None),
        cond(9, pooled=30),
        FluxDisableGuidance.execute(cond(9)).args[0],
    ):
        found, expected = (ksampler(model, positive, cond(9), latent(4, 6)) for model in (sharded, native))
        assert relative_error(found, expected) <= SAME
        images.append(found)
    different = [relative_error(image, images[0]) > 1e-3 for image in images[1:]]
    assert different == [name == "dev"] * 3  # Qwen-Image reads none of them


@pytest.mark.parametrize("name", ["dev", "qwen"])
def test_bf16_times_and_guidance_are_rounded_as_in_comfyui(name, monkeypatch):
    # Guidance is rounded, 3.57 to 3.5625, and times are not; both are multiplied by 1000 before they become waves.
    path, _ = files(name)
    native, sharded = stock(path, monkeypatch, torch.bfloat16), load_tp(path.name, dtype="bfloat16")
    runs = [
        ksampler(model, cond(9, guidance=3.57), cond(9), latent(5, 7), steps=2) for model in (sharded, native)
    ]
    assert relative_error(*runs) <= BF16


def lora(path: Path) -> dict[str, torch.Tensor]:
    """A LoRA of every matrix of a file, with alpha, in ComfyUI's keys; what diffusers fuses or splits in its own keys."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(4)
    made = {}
    for key, weight in load_file(path).items():
        if weight.ndim == 2:
            module = f"diffusion_model.{key.removesuffix('.weight')}"
            made[f"{module}.lora_up.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
            made[f"{module}.lora_down.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.2
            made[f"{module}.alpha"] = torch.tensor(2.0)
    return made


def diffusers_lora(folder: Path) -> dict[str, torch.Tensor]:
    """A LoRA of every matrix in diffusers' keys."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(5)
    made = {}
    for key, weight in load_file(folder / "diffusion_pytorch_model.safetensors").items():
        if weight.ndim == 2:
            module = f"transformer.{key.removesuffix('.weight')}"
            made[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
            made[f"{module}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.2
    return made


def uso_lora(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A LoRA of the attentions of FLUX.1 in the names of XLabs and USO; `state` is that of ComfyUI's own model."""
    names = {
        "double_blocks.{i}.processor.qkv_lora1": ("double_blocks.{i}.img_attn.qkv", 1.0),
        "double_blocks.{i}.processor.qkv_lora2": ("double_blocks.{i}.txt_attn.qkv", 1.0),
        "double_blocks.{i}.processor.proj_lora1": ("double_blocks.{i}.img_attn.proj", 1.0),
        "double_blocks.{i}.processor.proj_lora2": ("double_blocks.{i}.txt_attn.proj", 1.0),
        "single_blocks.{i}.processor.qkv_lora": ("single_blocks.{i}.linear1", 3 / 7),
        "single_blocks.{i}.processor.proj_lora": ("single_blocks.{i}.linear2", 1.0),
    }
    generator = torch.Generator().manual_seed(6)
    made = {}
    for name, (module, share) in names.items():
        for number in "01":
            rows, columns = state[f"diffusion_model.{module.replace('{i}', number)}.weight"].shape
            lora = name.replace("{i}", number)
            made[f"{lora}.up.weight"] = torch.randn(round(rows * share), 4, generator=generator)
            made[f"{lora}.down.weight"] = torch.randn(4, columns, generator=generator)
    return made


@pytest.mark.parametrize("name", ["dev", "qwen"])
def test_loras_equal_by_the_stock_loader_and_by_load_tp_lora_and_are_taken_back(name, monkeypatch):
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_base
    import folder_paths
    import nodes
    from safetensors.torch import save_file

    from comfy_tp.comfy_tp_nodes.nodes.load_lora import LoadTPLoRA

    path, folder = files(name)
    loras = import_comfy() / "models/loras"
    loras.mkdir(exist_ok=True)
    save_file(lora(path), loras / f"{name}.safetensors")
    save_file(diffusers_lora(folder), loras / f"{name}-diffusers.safetensors")
    folder_paths.filename_list_cache.clear()

    def run(model: Any) -> torch.Tensor:
        return ksampler(model, cond(9), cond(20, seed=2), latent(5, 7), cfg=2.0, steps=2)

    def patched(model: Any) -> Any:
        for file, strength in ((f"{name}.safetensors", 0.8), (f"{name}-diffusers.safetensors", -0.6)):
            model = nodes.LoraLoaderModelOnly().load_lora_model_only(model, file, strength)[0]
        return model

    native, sharded = stock(path, monkeypatch), load_tp(path.name)
    plain = run(sharded)
    with_lora = patched(sharded)
    assert len(with_lora.patches) == len(patched(native).patches) > 20
    found = run(with_lora)
    assert relative_error(found, run(patched(native))) <= SAME
    assert relative_error(found, plain) > 1e-2
    assert torch.equal(run(sharded), plain)
    same = sharded
    for file, strength in ((f"{name}.safetensors", 0.8), (f"{name}-diffusers.safetensors", -0.6)):
        output = LoadTPLoRA.execute(same, file, strength)
        same = output.args[0]
        assert output.ui.as_dict()["text"][0].endswith("none unmatched.")
    assert lines(same.patches) == lines(with_lora.patches)
    if name == "dev":
        # The stock loader tells USO's names by the last blocks of the full size, which a small model lacks.
        tensors = uso_lora(native.model.state_dict())
        save_file(tensors, loras / "uso.safetensors")
        folder_paths.filename_list_cache.clear()
        output = LoadTPLoRA.execute(sharded, "uso.safetensors", 0.8)
        assert output.ui.as_dict()["text"][0].endswith("none unmatched.")
        by_stock = sharded.clone()
        keys = comfy.lora.model_lora_keys_unet(sharded.model, {})
        by_stock.add_patches(comfy.lora.load_lora(comfy.lora_convert.convert_uso_lora(tensors), keys), 0.8)
        assert len(by_stock.patches) == len(tensors) // 2
        assert lines(output.args[0].patches) == lines(by_stock.patches)
    other = SimpleNamespace(model=object.__new__(comfy.model_base.Chroma))
    text = r"reads LoRAs for FLUX\.2, FLUX\.1 and Qwen-Image, and this model is a Chroma\. Use the stock LoRA loader"
    with pytest.raises(UnsupportedError, match=text):
        LoadTPLoRA.execute(other, f"{name}.safetensors", 1.0)


def lines(patches: dict[str, list[tuple]]) -> dict[str, list[tuple]]:
    """What a ModelPatcher's `patches` do, to be compared: the adapters' tensors as bytes, the order of places set."""

    def part(value: Any) -> Any:
        return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value

    return {
        key: sorted(
            (strength, offset or (), str(function), tuple(part(value) for value in adapter.weights))
            for strength, adapter, _, offset, function in given
        )
        for key, given in patches.items()
    }


def test_what_does_not_fit_is_named_with_what_to_load_instead():
    dev, qwen = (load_tp(files(name)[0].name) for name in ("dev", "qwen"))
    wide = conditioning(9, width=48)
    refused = [
        (
            dev,
            wide,
            latent(4, 4),
            "48 wide, but this FLUX.1 model takes 40: load T5-XXL and CLIP-L with a DualCLIPLoader",
        ),
        (
            dev,
            cond(9, pooled=8),
            latent(4, 4),
            "pooled output of the conditioning is 8 wide, .* takes 24: load T5-XXL",
        ),
        (
            dev,
            cond(9),
            {"samples": torch.ones(1, 4, 4, 4)},
            "4 channels, but this FLUX.1 model takes 16. Use an Empty",
        ),
        (
            qwen,
            wide,
            latent(4, 4),
            "48 wide, but this Qwen-Image model takes 40: load the text encoder qwen_2.5_vl_7b",
        ),
        (
            qwen,
            cond(9),
            {"samples": torch.zeros(1, 16, 2, 4, 4)},
            "has 2 frames, and Qwen-Image makes one picture",
        ),
    ]
    for model, positive, into, text in refused:
        with pytest.raises(InputError, match=text):
            ksampler(model, positive, cond(9), into, steps=1)
        assert ksampler(model, cond(9), cond(9), latent(4, 4), steps=1).isfinite().all()


@pytest.mark.parametrize("example", ["wan", "edit"])
def test_a_model_that_comfyui_cannot_sample_on_ranks_is_refused_before_anything_starts(example):
    from comfy_tp.comfy_tp_nodes.sharded import known_models
    from comfy_tp.core.models import architecture_named

    architecture = architecture_named("wan" if example == "wan" else "qwenimage")
    config = next(iter(architecture.examples.values())) if example == "wan" else {**QWEN, "zero_cond_t": True}
    folder = import_comfy() / f"models/diffusion_models/refused-{example}"
    architecture.load_class()(**config).save_pretrained(folder)
    known = len(known_models())
    with pytest.raises(UnsupportedError) as refused:
        load_tp(folder.name)
    assert len(known_models()) == known
    if example == "wan":
        assert str(refused.value) == (
            f"{folder} holds a WanTransformer3DModel. Load TP Model can sample FLUX.2, FLUX.1 and Qwen-Image in ComfyUI "
            f"today. Load this file with the stock loader, or run it sharded from Python (README, `from_pretrained`)."
        )
    else:
        assert str(refused.value).startswith(f"{folder} is a Qwen-Image-Edit 2511 (zero_cond_t), and")
