"""Single files through Load TP Model, beside the same files through ComfyUI's own loader, on the same stock samplers."""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    random_lora,
    relative_error,
    save_small_model,
)
from flux2_files import beside_a_transformer, fp8_tensors, save_single_file, single_file_tensors, small_flux2
from installed import skip_without
from weight_files import tensor as raw_tensor
from weight_files import write_raw

from comfy_tp.core.errors import CheckpointError, UnsupportedError

SAME = 1e-5  # fp32; sums over ranks are taken in another order
FP8_EXACT = 1e-3  # against the same weights dequantised beforehand, fp32
FP8_STOCK = 2e-2  # against ComfyUI's own fp8 layers
READ_ONCE = 1.02  # bytes read by all ranks, over the size of the file
EVERYTHING = ("",)  # ends every name: all Linears in fp8, as in files of the older style
HEADS, AXES = 4, [8, 8, 8, 8]

pytestmark = [pytest.mark.usefixtures("in_comfy"), pytest.mark.timeout(600)]


def small_model(**changes: Any) -> Any:
    """A FLUX.2 whose velocity is as large as its input, so that an error shows in the picture."""
    model = small_flux2(joint_attention_dim=48, **changes)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def dev() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def models(in_comfy) -> Path:  # noqa: F811
    return in_comfy / "models/diffusion_models"


def stock(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The MODEL of ComfyUI's own `load_diffusion_model`, which is told the head count alone.

    ComfyUI takes heads of 128 for granted in a FLUX.2 file (0.3.75: 48 of them); prefix, sizes and quantisation it finds
    itself.
    """
    import comfy.model_detection
    import comfy.sd

    detect = comfy.model_detection.detect_unet_config

    def with_small_heads(*arguments: Any, **named: Any) -> Any:
        found = detect(*arguments, **named)
        assert found["image_model"] == "flux2"
        return {**found, "num_heads": HEADS, "axes_dim": AXES}

    with monkeypatch.context() as patched, torch.inference_mode():  # as ComfyUI runs its loader nodes
        patched.setattr(comfy.model_detection, "detect_unet_config", with_small_heads)
        return comfy.sd.load_diffusion_model(str(path), model_options={"dtype": torch.float32})


def combined(model: Any, method: str = "index") -> torch.Tensor:
    """What a graph can ask for at once: two references, an area, texts of different length, a mask, denoise, a batch."""
    import nodes
    from comfy_extras.nodes_edit_model import ReferenceLatent
    from comfy_extras.nodes_flux import FluxGuidance, FluxKontextMultiReferenceLatentMethod

    def with_references(cond: list) -> list:
        for height, width, seed in ((3, 4, 8), (4, 2, 9)):
            cond = ReferenceLatent.execute(cond, latent(height, width, seed=seed)).args[0]
        return FluxKontextMultiReferenceLatentMethod.execute(cond, method).args[0]

    left = nodes.ConditioningSetAreaPercentage().append(conditioning(), 0.5, 1.0, 0, 0, 1.0)[0]
    whole = FluxGuidance.execute(conditioning(600, seed=3), 6.0).args[0]
    mask = torch.zeros(1, 6, 4)
    mask[:, :4] = 1
    into = latent(6, 4, batch=2, seed=5, noise_mask=mask)
    positive, negative = with_references(left + whole), with_references(conditioning(20, seed=2))
    return ksampler(model, positive, negative, into, cfg=2.5, denoise=0.7, steps=2)


@pytest.mark.parametrize(("degree", "prefix"), [(2, "model.diffusion_model."), (4, "")])
def test_a_single_file_gives_what_comfyuis_own_loader_gives(dev, models, monkeypatch, degree, prefix):
    beside = beside_a_transformer() if prefix else {}  # an all-in-one checkpoint
    tensors = {**beside, **single_file_tensors(dev, prefix)}
    path = save_single_file(models / f"plain-{degree}.SAFETENSORS", tensors)
    sharded, native = load_tp(path.name, degree), stock(path, monkeypatch)
    assert sharded.sharded.info.layout == "FLUX.2 single file"
    for method in ("index", "offset", "uxo") if degree == 2 else ("index",):
        expected = combined(native, method)
        assert relative_error(combined(sharded, method), expected) <= SAME, method
    other = stock(changed(path), monkeypatch)
    assert relative_error(combined(other, method), expected) > 1e-2  # a wrongly read weight shows


def matrices(model: Any) -> dict[str, torch.Tensor]:
    """The matrices of a model by the single file's names, without `.weight`."""
    tensors = single_file_tensors(model).items()
    return {name.removesuffix(".weight"): tensor for name, tensor in tensors if tensor.ndim == 2}


def with_lora(model: Any, name: str) -> torch.Tensor:
    """What the graph gives with a LoRA from the stock LoraLoaderModelOnly."""
    import nodes

    return combined(nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, 1.0)[0])


def changed(path: Path) -> Path:
    """The same file with the two halves of one fused weight exchanged."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("double_blocks.1.img_attn.qkv.weight"))
    tensors[name] = tensors[name].flip(0)
    return save_single_file(path.with_name("changed.safetensors"), tensors)


def test_klein_without_guidance_gives_what_comfyuis_own_loader_gives(models, monkeypatch):
    skip_without("flux2", {"guidance_embeds": False})
    klein = small_model(seed=3, guidance_embeds=False, num_layers=1, num_single_layers=3)
    path = save_single_file(models / "klein.safetensors", single_file_tensors(klein))
    sharded, native = load_tp(path.name), stock(path, monkeypatch)
    assert not native.model.diffusion_model.params.guidance_embed
    assert relative_error(combined(sharded), combined(native)) <= SAME


@pytest.mark.parametrize(("style", "degree"), [("metadata", 2), ("metadata", 4), ("scaled_fp8", 2)])
def test_an_fp8_file_gives_what_comfyuis_own_fp8_layers_give(dev, models, monkeypatch, style, degree):
    quantised = {"quantised": EVERYTHING} if style == "scaled_fp8" else {}
    held, metadata, exact = fp8_tensors(single_file_tensors(dev), style, **quantised)
    path = save_single_file(models / f"{style}-{degree}.safetensors", held, metadata)
    own = stock(path, monkeypatch)
    layers = {type(module).__qualname__ for module in own.model.diffusion_model.modules()}
    # Newer ComfyUIs read both styles by the same layers.
    quantised = ("mixed_precision_ops",) if style == "metadata" else ("mixed_precision_ops", "scaled_fp8_ops")
    assert any(name.startswith(quantised) for name in layers), layers
    dequantised = stock(save_single_file(models / f"exact-{style}.safetensors", exact), monkeypatch)
    sharded = load_tp(path.name, degree)
    found, by_stock, by_exact = (combined(model) for model in (sharded, own, dequantised))
    print(f"{style} at {degree}: {relative_error(found, by_stock):.1e} {relative_error(found, by_exact):.1e}")
    assert relative_error(found, by_stock) <= FP8_STOCK
    assert relative_error(found, by_exact) <= FP8_EXACT
    if degree == 2:
        styled = random_lora(f"{style}.safetensors", matrices(dev), seed=4, size=0.1)
        found, by_stock, by_exact = (with_lora(model, styled) for model in (sharded, own, dequantised))
        print(f"with a LoRA: {relative_error(found, by_stock):.1e} {relative_error(found, by_exact):.1e}")
        assert relative_error(found, by_exact) <= FP8_EXACT
        # ComfyUI rounds the sum to fp8 again, which ours does not.
        assert relative_error(found, by_stock) <= relative_error(by_stock, by_exact) + FP8_EXACT
        assert relative_error(by_exact, combined(dequantised)) > 10 * FP8_EXACT
    original = save_single_file(models / "original.safetensors", single_file_tensors(dev))
    assert (
        relative_error(combined(stock(original, monkeypatch)), by_exact) > 2 * FP8_EXACT
    )  # fp8 is another model


@pytest.mark.parametrize("degree", [2, 4])
def test_every_byte_of_a_single_file_is_read_once(dev, models, degree):
    path = save_single_file(models / f"read-{degree}.safetensors", single_file_tensors(dev))
    info = load_tp(path.name, degree).sharded.info
    held = sum(tensor.nbytes for tensor in single_file_tensors(dev).values())
    assert held <= sum(info.bytes_read) <= READ_ONCE * path.stat().st_size


def test_a_flux2_that_reads_more_channels_than_it_makes_is_refused_before_anything_starts(models):
    wide = small_model(in_channels=384, out_channels=128, num_layers=1, num_single_layers=1)
    path = save_single_file(models / "wide.safetensors", single_file_tensors(wide))
    with pytest.raises(UnsupportedError, match=r"wide\.safetensors is a FLUX\.2 that reads 384 channels"):
        load_tp(path.name)


def test_the_ranks_read_through_a_link_to_another_disk_and_refuse_a_file_that_took_its_place(
    dev, models, monkeypatch
):
    from comfy_tp.comfy_tp_nodes import sharded

    blob = save_single_file(models.parent / "blob", single_file_tensors(dev))  # as the hub's cache names it
    link = models / "linked.safetensors"
    link.symlink_to(blob)
    with monkeypatch.context() as patched:
        patched.setattr(sharded, "identities", lambda path: {str(blob): [0, 0]})
        with pytest.raises(
            CheckpointError, match=r"linked\.safetensors: the file that was chosen is not the one"
        ):
            load_tp(link.name)
    assert load_tp(link.name).sharded.info.layout == "FLUX.2 single file"


def test_the_shards_of_an_fp8_file_take_half_of_those_of_a_bf16_file(dev, models):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in single_file_tensors(dev).items()}
    held, metadata, _ = fp8_tensors(tensors, "metadata", quantised=EVERYTHING)
    save_single_file(models / "bf16.safetensors", tensors)
    save_single_file(models / "all-fp8.safetensors", held, metadata)
    bf16, fp8 = (load_tp(f"{name}.safetensors").sharded.info.resident_bytes for name in ("bf16", "all-fp8"))
    for whole, half in zip(bf16, fp8, strict=True):
        assert abs(half / whole - 0.5) <= 0.03 * 0.5


def test_comfyui_and_the_ranks_compute_a_file_that_is_fp8_throughout_in_the_same_dtype(dev, models):
    """On a GPU in bfloat16: scales, also those of shape [1], are not weights in float32."""
    from comfy_tp.comfy_tp_nodes.source import ModelSource
    from comfy_tp.core.checkpoint.files import Checkpoint
    from comfy_tp.core.load import open_model, stored_dtype

    held, metadata, _ = fp8_tensors(single_file_tensors(dev), "scaled_fp8", quantised=EVERYTHING)
    for name, tensor in held.items():
        if name.endswith(("scale_weight", "scale_input")):
            held[name] = tensor.reshape(1)
        elif tensor.ndim == 1:
            held[name] = tensor.to(torch.float8_e4m3fn)
    path = save_single_file(models / "fp8-throughout.safetensors", held, metadata)
    by_comfyui = ModelSource.open(path).compute_dtype("default", "cuda:0")
    assert by_comfyui == "bfloat16"
    assert stored_dtype(open_model(Checkpoint.open(path)), torch.device("cuda:0")) == torch.bfloat16


def test_one_rank_is_enough_and_the_log_says_so(dev, models, monkeypatch, caplog):
    path = save_single_file(models / "alone.safetensors", single_file_tensors(dev))
    with caplog.at_level(logging.INFO, logger="comfy_tp.nodes"):
        alone = load_tp(path.name, 0)
    assert alone.sharded.placement.degree == 1
    assert (
        "Load TP Model: alone.safetensors, degree 1: one rank on the CPU; set degree to use more"
        in caplog.text
    )
    assert "into 1 shard;" in caplog.text
    native = stock(path, monkeypatch)
    assert relative_error(combined(alone), combined(native)) <= SAME


# The kind of file on the page -> ends of the names of the layers that it stores in fp8, as the published files do.
PUBLISHED = {
    "FLUX.2-dev, single file": (),
    "FLUX.2-dev, fp8 mixed": ("_mlp.0", "_mlp.2", ".linear1", ".linear2"),
    "FLUX.2 klein 9B, fp8": ("_mlp.0", "_mlp.2", ".linear1", ".linear2", "_attn.qkv", "_attn.proj"),
    "FLUX.2 klein 4B, fp8": ("_mlp.0", "_mlp.2", ".linear1", ".linear2", "_attn.qkv", "_attn.proj"),
    "FLUX.1, single file": (),
    "Qwen-Image, single file": (),
}


@pytest.mark.parametrize("title", PUBLISHED)
def test_a_file_of_the_real_size_opens_from_its_header_and_is_as_large_as_the_page_says(tmp_path, title):
    from comfy_tp.comfy_tp_nodes.model import family
    from comfy_tp.core.checkpoint.files import Checkpoint
    from comfy_tp.core.load import open_model
    from comfy_tp.core.models import architecture_named
    from comfy_tp.tools.pages.files import KINDS, resident

    (kind,) = [kind for kind in KINDS if kind.title == title]
    config = architecture_named(kind.architecture).published[kind.published]
    skip_without(kind.architecture, config)
    known_to_comfyui = family(kind.architecture)
    published, _, _ = known_to_comfyui.skeleton(config)
    published.set_inference_dtype(torch.bfloat16, None)
    weights = published.get_model({}, "", device="meta").diffusion_model.state_dict()
    path, size = sparse_file(tmp_path / "real.safetensors", weights, PUBLISHED[title])
    opened = open_model(Checkpoint.open(path))
    known = {**known_to_comfyui.DEFAULTS, **config}
    assert {name: opened.config[name] for name in known} == known
    fp8_layers = sum(name.removesuffix(".weight").endswith(PUBLISHED[title]) for name in weights)
    assert len(opened.scales) == (fp8_layers if PUBLISHED[title] else 0)
    assert size == next(resident(kind))


def sparse_file(path: Path, weights: dict[str, torch.Tensor], fp8: tuple[str, ...]) -> tuple[Path, int]:
    """A file with a real header and real scales whose weights are holes; returns the bytes of its weights too."""
    quantised = [name for name in weights if fp8 and name.removesuffix(".weight").endswith(fp8)]
    header: dict[str, Any] = {}
    end = 0
    for name in quantised:
        header[f"{name.removesuffix('.weight')}.weight_scale"] = raw_tensor([], end, end + 4)
        end += 4
    scales = struct.pack("<f", 0.5) * len(quantised)
    for name, weight in weights.items():
        size = weight.numel() * (1 if name in quantised else 2)
        kind = "F8_E4M3" if name in quantised else "BF16"
        header[name] = raw_tensor(list(weight.shape), end, end + size, kind)
        end += size
    write_raw(path, header, scales)
    os.truncate(path, path.stat().st_size - len(scales) + end)
    return path, end - len(scales)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**6}, "`num_layers` is 1000000, but the weights are those of 2 layers at most"),
        ({"num_attention_heads": "4"}, "`num_attention_heads` is '4', but heads are counted 1, 2, 3"),
        ({"num_layers": "2"}, r"makes no Flux2Transformer2DModel \(TypeError: "),
        ({"axes_dims_rope": 5}, r"makes no Flux2Transformer2DModel \(TypeError: "),
        ({"mlp_ratio": "x"}, r"makes no Flux2Transformer2DModel \(ValueError: "),
    ],
    ids=repr,
)
def test_a_config_json_that_makes_no_model_is_named_by_the_loader_node(models, changes, message):
    config = save_small_model(models / "odd-settings") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tp("odd-settings", 1)
    assert str(config) in str(caught.value) and len(str(caught.value)) < 1000
