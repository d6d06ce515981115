"""Single files as artists have them: recognised by their tensors alone, sharded as they are read, fp8 kept as fp8."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flux2_files import (
    beside_a_transformer,
    call_inputs,
    fp8_tensors,
    save_single_file,
    single_file_tensors,
    small_flux2,
)
from installed import skip_without
from thread_ranks import on_ranks
from weight_files import MODEL_DAMAGES, damaged

from comfy_tp.core.checkpoint.files import Checkpoint
from comfy_tp.core.errors import CheckpointError, UnsupportedError
from comfy_tp.core.load import load_opened, open_model
from comfy_tp.core.models import flux2
from comfy_tp.core.models.flux2_layout import BFL_FLUX2
from comfy_tp.core.tp import fp8
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.linear import ReplicatedLinear, ShardedLinear

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")


def rel_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def velocity(model, inputs: dict) -> torch.Tensor:
    with torch.inference_mode():
        return flux2.predict(model, **inputs)


def sharded_velocity(path, degree: int, inputs: dict, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The velocity of the file's model at `degree`; every rank must compute the same."""

    def work(ranks: Ranks) -> torch.Tensor:
        model, _ = load_opened(open_model(Checkpoint.open(path)), ranks, dtype=dtype)
        return velocity(model, inputs)

    results = on_ranks(degree, work)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


@pytest.fixture(scope="module")
def model():
    return small_flux2()


@pytest.fixture(scope="module")
def expected(model):
    return velocity(model, call_inputs())


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("norm", ["scale", "weight"])
def test_a_single_file_gives_the_model_it_was_made_from(tmp_path, model, expected, prefix, norm):
    tensors = {
        name.replace("_norm.scale", f"_norm.{norm}"): tensor
        for name, tensor in single_file_tensors(model, prefix).items()
    }
    names = list(tensors)
    random.Random(3).shuffle(names)
    path = save_single_file(tmp_path / "anything.safetensors", {name: tensors[name] for name in names})
    assert rel_l2(sharded_velocity(path, 2, call_inputs()), expected) <= 1e-6


def test_a_single_file_at_four_ranks_and_at_one(tmp_path, model, expected):
    path = save_single_file(tmp_path / "model.safetensors", single_file_tensors(model))
    assert rel_l2(sharded_velocity(path, 4, call_inputs()), expected) <= 1e-6
    assert torch.equal(sharded_velocity(path, 1, call_inputs()), expected)


# A process of its own for each load, so that what it takes is not what another has left.
COST = """
import json, sys
from thread_ranks import on_ranks
from comfy_tp.core.checkpoint.files import Checkpoint
from comfy_tp.core.cli.bench_load import MemoryWatch
from comfy_tp.core.load import load_opened, open_model
opened = [open_model(Checkpoint.open(sys.argv[1])) for _ in range(2)]
with MemoryWatch() as memory:
    loaded = on_ranks(2, lambda ranks: load_opened(opened[ranks.rank], ranks))
print(json.dumps([sum(report.bytes_read for _, report in loaded), memory.anonymous_peak]))
"""


def test_a_single_file_takes_no_more_bytes_and_memory_than_the_diffusers_layout(tmp_path):
    model = small_flux2(num_attention_heads=16)  # 100 MB: more than an allocator's noise
    model.save_pretrained(tmp_path / "folder")
    save_single_file(tmp_path / "model.safetensors", single_file_tensors(model))

    def cost(name: str) -> list[int]:
        command = [sys.executable, "-c", COST, str(tmp_path / name)]
        paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        return json.loads(subprocess.check_output(command, env=paths, timeout=120))

    folder, single = cost("folder"), cost("model.safetensors")
    assert single[0] == folder[0] >= sum(parameter.nbytes for parameter in model.parameters())
    assert single[1] <= folder[1] + 4_000_000
    assert folder[1] > 0.9 * folder[0]  # what is watched is there


def test_the_configuration_of_a_single_file_follows_from_its_shapes(tmp_path, model):
    path = save_single_file(tmp_path / "model.safetensors", single_file_tensors(model))
    opened = open_model(Checkpoint.open(path))
    assert opened.layout is BFL_FLUX2
    assert opened.config["num_attention_heads"] == 4
    assert opened.config["guidance_embeds"] is True
    for name, value in {
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 96,
        "mlp_ratio": 3.0,
    }.items():
        assert opened.config[name] == value


@pytest.mark.parametrize(
    "config",
    ['{"_class_name": "Flux2Transformer2DModel", "num_layers": 7}', '{"model_type": "mistral3"}', "[", "{}"],
    ids=["of the same class", "of another library", "broken", "empty"],
)
def test_a_config_json_that_lies_beside_a_single_file_is_not_its_own(tmp_path, model, config):
    """ComfyUI keeps the files of many models in one folder, and any of them may have brought one."""
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    path = save_single_file(tmp_path / "model.safetensors", single_file_tensors(model))
    expected = open_model(Checkpoint.open(path)).config
    (tmp_path / "config.json").write_text(config)
    opened = open_model(Checkpoint.open(path))
    assert opened.layout is BFL_FLUX2 and opened.config == expected
    assert ModelSource.open(path).config == expected
    folder = tmp_path / "transformer"
    model.save_pretrained(folder)
    opened = open_model(Checkpoint.open(folder / "diffusion_pytorch_model.safetensors"))
    assert opened.layout is not BFL_FLUX2 and opened.config["num_layers"] == 2


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("double_blocks.0.img_attn.norm.query_norm.scale", (0,)),
        ("img_in.weight", (0, 128)),
        ("txt_in.weight", (128,)),
        ("time_in.in_layer.weight", (128,)),
        ("double_blocks.99999999999.img_attn.qkv.weight", (384, 128)),
        ("double_blocks.0.img_attn.norm.query_norm.scale", (1, 2, 3)),
    ],
)
def test_a_shape_or_block_number_that_no_model_has_is_a_clear_error_at_once(tmp_path, model, name, shape):
    tensors = {**single_file_tensors(model), name: torch.ones(shape)}
    path = save_single_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors (is not a model|does not fit the model|makes no Flux2)"
    ):
        open_model(Checkpoint.open(path))


def test_klein_without_guidance_is_recognised(tmp_path):
    klein = small_flux2(guidance_embeds=False)
    path = save_single_file(tmp_path / "klein.safetensors", single_file_tensors(klein))
    inputs = call_inputs()
    assert open_model(Checkpoint.open(path)).config["guidance_embeds"] is False
    assert rel_l2(sharded_velocity(path, 2, inputs), velocity(klein, inputs)) <= 1e-6


def with_weights(model, tensors: dict[str, torch.Tensor], tmp_path):
    """A copy of `model` with the weights of a single file's `tensors`."""
    path = save_single_file(tmp_path / "exact.safetensors", {name: t.float() for name, t in tensors.items()})
    loaded, _ = load_opened(open_model(Checkpoint.open(path)), Ranks.single())
    return copy.deepcopy(loaded)


@pytest.mark.parametrize("style", ["metadata", "metadata-short", "comfy_quant", "scaled_fp8", "cast"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_files_keep_their_weights_and_compute_exactly(tmp_path, model, style, dtype):
    prefix = "model.diffusion_model." if style in ("scaled_fp8", "metadata-short") else ""
    held, metadata, exact = fp8_tensors(single_file_tensors(model, prefix), style, dtype, prefix)
    path = save_single_file(tmp_path / "fp8.safetensors", held, metadata)
    want = velocity(with_weights(model, exact, tmp_path), call_inputs())
    assert rel_l2(sharded_velocity(path, 2, call_inputs()), want) <= 1e-5
    assert rel_l2(sharded_velocity(path, 1, call_inputs()), want) <= 1e-5
    assert rel_l2(want, velocity(model, call_inputs())) > 1e-4  # fp8 is not the original: the test can fail


def test_fp8_shards_stay_fp8_and_take_half_of_bf16(tmp_path, model):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in single_file_tensors(model).items()}
    held, metadata, _ = fp8_tensors(tensors, "metadata")
    path = save_single_file(tmp_path / "fp8.safetensors", held, metadata)

    def work(ranks: Ranks):
        return load_opened(open_model(Checkpoint.open(path)), ranks)[0]

    for sharded in on_ranks(2, work):
        kept = [m for m in sharded.modules() if isinstance(m, ShardedLinear) and m.scales is not None]
        assert len(kept) == 2 * 4 + 2 * 2
        assert all(fp8.is_fp8(m.weight) for m in kept)
        fp8_bytes = sum(m.weight.numel() * m.weight.element_size() for m in kept)
        assert fp8_bytes * 2 == sum(m.weight.numel() * 2 for m in kept)
        assert sharded.tensor_parallel.compute_dtype == torch.bfloat16


def test_an_fp8_file_can_be_cast_while_loading(tmp_path, model):
    held, metadata, exact = fp8_tensors(single_file_tensors(model), "metadata")
    path = save_single_file(tmp_path / "fp8.safetensors", held, metadata)
    want = velocity(with_weights(model, exact, tmp_path), call_inputs())
    assert rel_l2(sharded_velocity(path, 2, call_inputs(), torch.float32), want) <= 1e-6


def test_a_float_file_can_be_quantised_while_loading(tmp_path, model, expected):
    path = save_single_file(tmp_path / "model.safetensors", single_file_tensors(model))

    def work(ranks: Ranks):
        loaded, _ = load_opened(open_model(Checkpoint.open(path)), ranks, dtype=torch.float8_e4m3fn)
        kinds = {type(module) for module in loaded.modules() if getattr(module, "scales", None) is not None}
        return velocity(loaded, call_inputs()), kinds

    for result, kinds in on_ranks(2, work):
        assert 1e-4 < rel_l2(result, expected) < 0.1
        assert kinds and ReplicatedLinear not in kinds
    ((single, kinds),) = on_ranks(1, work)
    assert kinds == {ReplicatedLinear}
    assert rel_l2(single, expected) < 0.1


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4"])
def test_an_unknown_quantisation_is_refused_by_name(tmp_path, model, kind):
    held, metadata, _ = fp8_tensors(single_file_tensors(model), "metadata")
    described = json.loads(metadata["_quantization_metadata"])
    described["layers"]["double_blocks.0.img_mlp.0"] = {"format": kind}
    path = save_single_file(
        tmp_path / "x.safetensors", held, {"_quantization_metadata": json.dumps(described)}
    )
    with pytest.raises(
        UnsupportedError, match=rf"double_blocks\.0\.img_mlp\.0' is quantised as {kind}.*Use the fp8 file"
    ):
        open_model(Checkpoint.open(path))


def test_packed_weights_are_refused_by_kind(tmp_path, model):
    tensors = single_file_tensors(model)
    tensors["double_blocks.0.img_mlp.0.weight_scale_2"] = torch.tensor(1.0)
    path = save_single_file(tmp_path / "x.safetensors", tensors)
    with pytest.raises(UnsupportedError, match="nvfp4"):
        open_model(Checkpoint.open(path))


def test_a_declared_layer_without_its_scale_is_refused(tmp_path, model):
    held, metadata, _ = fp8_tensors(single_file_tensors(model), "metadata")
    del held["single_blocks.1.linear2.weight_scale"]
    path = save_single_file(tmp_path / "x.safetensors", held, metadata)
    with pytest.raises(
        CheckpointError, match=r"single_blocks\.1\.linear2\.weight' is declared as quantised but has no scale"
    ):
        open_model(Checkpoint.open(path))


def test_a_scale_without_its_weight_is_refused_and_not_lost(tmp_path, model):
    held, metadata, _ = fp8_tensors(single_file_tensors(model), "metadata")
    held["single_blocks.1.linear3.input_scale"] = held.pop("single_blocks.1.linear2.input_scale")
    path = save_single_file(tmp_path / "x.safetensors", held, metadata)
    with pytest.raises(
        CheckpointError,
        match=r"linear3\.input_scale' belongs to no weight: the file has no '.*linear3\.weight'",
    ):
        open_model(Checkpoint.open(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"layers":' + '{"a":' * 5_000, "is nested too deeply"),
        ('{"layers":{"a":[' + "[]," * 150_000 + "[]]}}", r"of \d+ bytes would take about \d+ MB to parse"),
        ('{"layers": {}, "layers": {}}', "is not valid JSON .key 'layers' appears twice"),
        ("[]", "is not a JSON object"),
    ],
    ids=["deep list", "deep table", "costly", "twice", "list"],
)
def test_a_damaged_declaration_of_the_layers_is_named(tmp_path, model, text, message):
    metadata = {"_quantization_metadata": text}
    path = save_single_file(tmp_path / "x.safetensors", single_file_tensors(model), metadata)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: `_quantization_metadata` {message}"):
        open_model(Checkpoint.open(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**6}, "`num_layers` is 1000000, but the weights are those of 2 layers at most"),
        ({"num_single_layers": 3}, "`num_single_layers` is 3, but the weights are those of 2 layers at most"),
        (
            {"joint_attention_dim": 10**15},
            "`joint_attention_dim` is 10{15}, more than all weights have bytes",
        ),
        (
            {"axes_dims_rope": [8, 8, 8, 10**9]},
            r"is \[8, 8, 8, 1000000000\], more than all weights have bytes",
        ),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0, but heads are counted 1, 2, 3"),
        ({"num_attention_heads": "4"}, "`num_attention_heads` is '4', but heads are counted 1, 2, 3"),
        ({"_class_name": {"a": 1}}, r"`_class_name` is \{'a': 1\}, which is no class"),
        ({"patch_size": 10**6}, r"makes no Flux2Transformer2DModel \(RuntimeError: .*can't allocate memory"),
        ({"num_layers": "2"}, r"makes no Flux2Transformer2DModel \(TypeError: "),
        ({"attention_head_dim": 0}, r"makes no Flux2Transformer2DModel \(ZeroDivisionError: "),
        ({"in_channels": None}, r"makes no Flux2Transformer2DModel \(TypeError: "),
        ({"mlp_ratio": -1}, r"makes no Flux2Transformer2DModel \(RuntimeError: .*negative dimension"),
    ],
    ids=repr,
)
def test_a_config_json_that_makes_no_model_is_named_with_the_cause(tmp_path, model, changes, message):
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(Checkpoint.open(tmp_path), model_class=type(model))
    assert str(config) in str(caught.value) and "ownload it again" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_cannot_be_the_settings_is_refused_before_anything_is_built(tmp_path, model, monkeypatch):
    from comfy_tp.core import load as loading

    def never(*arguments):
        raise AssertionError("a model was built")

    monkeypatch.setattr(loading, "build_skeleton", never)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    whole = json.loads(config.read_text())
    with pytest.raises(
        CheckpointError, match="AssertionError: a model was built"
    ):  # the whole one gets that far
        open_model(Checkpoint.open(tmp_path))
    config.write_text(json.dumps({**whole, "num_layers": 10**6}))
    with pytest.raises(CheckpointError, match="`num_layers` is 1000000"):
        open_model(Checkpoint.open(tmp_path))


def test_a_cancel_and_a_lack_of_memory_while_a_model_is_built_stay_what_they_are():
    from comfy_tp.core.errors import Cancelled
    from comfy_tp.core.tp.skeleton import building

    lacking = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes."
    for error in (Cancelled("stop"), KeyboardInterrupt(), MemoryError(), RuntimeError(lacking.format(800))):
        with pytest.raises(type(error)) as caught, building("Model", "config.json", 100):
            raise error
        assert caught.value is error
    with pytest.raises(CheckpointError, match="config.json makes no Model .RuntimeError: Default"):
        with building("Model", "config.json", 100):
            raise RuntimeError(lacking.format(801))


@pytest.mark.parametrize("settings", [7, None, [], {"format": []}, {}], ids=repr)
def test_a_declaration_that_names_no_format_is_refused(tmp_path, model, settings):
    metadata = {"_quantization_metadata": json.dumps({"layers": {"img_in": settings}})}
    path = save_single_file(tmp_path / "x.safetensors", single_file_tensors(model), metadata)
    with pytest.raises(UnsupportedError, match=r"layer 'img_in' is quantised as (7|None|\[\]), which cannot"):
        open_model(Checkpoint.open(path))


@pytest.mark.parametrize("style", ["metadata", "scaled_fp8"])
def test_the_scale_of_a_weight_that_is_not_fp8_is_refused_and_not_lost(tmp_path, model, style):
    held, metadata, _ = fp8_tensors(single_file_tensors(model), style)
    name = f"img_in.{'scale_weight' if style == 'scaled_fp8' else 'weight_scale'}"
    held[name] = torch.tensor(1.0)
    path = save_single_file(tmp_path / "one.safetensors", held, metadata)
    assert "img_in" not in open_model(Checkpoint.open(path)).scales
    held[name] = torch.tensor(0.5)
    path = save_single_file(tmp_path / "half.safetensors", held, metadata)
    with pytest.raises(
        CheckpointError, match=rf"'{name}' is the scale of .* 'img_in\.weight' is stored as F32"
    ):
        open_model(Checkpoint.open(path))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(tmp_path, model, value):
    held, metadata, _ = fp8_tensors(single_file_tensors(model), "metadata")
    held["single_blocks.1.linear2.weight_scale"] = torch.tensor(value)
    path = save_single_file(tmp_path / "x.safetensors", held, metadata)
    with pytest.raises(CheckpointError, match="weight_scale' is"):
        open_model(Checkpoint.open(path))


def test_a_file_of_another_model_is_refused(tmp_path):
    path = save_single_file(tmp_path / "unet.safetensors", {"input_blocks.0.0.weight": torch.zeros(4, 4)})
    with pytest.raises(CheckpointError, match="tensor names fit none of flux, flux2,"):
        open_model(Checkpoint.open(path))


def test_the_fp8_matrix_product_agrees_with_the_exact_one(model):
    weight, scale = fp8.quantise(torch.randn(64, 32))
    x = torch.randn(2, 5, 32).to(torch.bfloat16)
    scales = fp8.Scales(scale)
    exact = torch.nn.functional.linear(x.float(), weight.float() * scale)
    assert rel_l2(fp8.product(x, weight, scales).float(), exact) < 1e-2
    assert rel_l2(fp8._scaled_product(x, weight, scales, None).float(), exact) < 6e-2


def other_model(name: str, example: str):
    """The small example model of another architecture, with its architecture and inputs of one forward."""
    from comfy_tp.core.models import architecture_named

    architecture = architecture_named(name)
    torch.manual_seed(0)
    model = architecture.load_class()(**architecture.examples[example]).eval()
    return architecture, model, architecture.inputs(model.config, torch.Generator().manual_seed(1))


def check_two_ranks_equal(model: torch.nn.Module, path: Path, inputs: dict[str, Any]) -> None:
    """The file at `path`, read by two ranks, gives what the whole `model` gives for `inputs`."""
    with torch.inference_mode():
        want = model(**inputs, return_dict=False)[0]

    def work(ranks: Ranks) -> torch.Tensor:
        loaded, _ = load_opened(open_model(Checkpoint.open(path)), ranks)
        with torch.inference_mode():
            return loaded(**inputs, return_dict=False)[0]

    for result in on_ranks(2, work):
        assert rel_l2(result, want) <= 1e-6


@pytest.mark.parametrize(("name", "example"), [("flux", "dev"), ("flux", "schnell"), ("qwenimage", "base")])
@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_single_files_of_the_other_models_are_recognised_and_sharded(tmp_path, name, example, prefix):
    from comfy_tp.core.checkpoint.convert import file_tensors

    architecture, model, inputs = other_model(name, example)
    tensors = file_tensors(architecture.layouts[0], dict(model.named_parameters()), prefix=prefix)
    path = save_single_file(tmp_path / "model.safetensors", tensors)
    opened = open_model(Checkpoint.open(path))
    assert opened.architecture.name == name
    for key, value in architecture.examples[example].items():
        assert opened.config.get(key, model.config[key]) == value, key
    check_two_ranks_equal(model, path, inputs)


@pytest.mark.parametrize(("name", "example"), [("flux", "dev"), ("flux", "schnell"), ("flux2", "dev")])
@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_single_files_in_diffusers_names_are_recognised_without_a_config_json(
    tmp_path, name, example, prefix
):
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    architecture, model, inputs = other_model(name, example)
    tensors = {f"{prefix}{key}": tensor for key, tensor in model.named_parameters()}
    path = save_single_file(tmp_path / "model.safetensors", tensors)
    opened = open_model(Checkpoint.open(path))
    assert (opened.architecture.name, opened.layout.name) == (name, "diffusers")
    for key, value in architecture.examples[example].items():
        assert opened.config.get(key, model.config[key]) == value, key
    assert ModelSource.open(path).heads == model.config["num_attention_heads"]
    check_two_ranks_equal(model, path, inputs)


@pytest.mark.parametrize("style", ["plain", "metadata", "scaled_fp8"])
def test_of_a_file_with_a_whole_pipeline_the_transformer_is_read(tmp_path, model, style):
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    held, metadata = single_file_tensors(model, "model.diffusion_model."), {}
    if style != "plain":
        held, metadata, _ = fp8_tensors(held, style, prefix="model.diffusion_model.")
    alone = save_single_file(tmp_path / "alone.safetensors", held, metadata)
    if metadata:
        described = json.loads(metadata["_quantization_metadata"])
        described["layers"]["text_encoders.t5xxl.encoder.block.0.wi"] = {"format": "float8_e4m3fn"}
        metadata = {"_quantization_metadata": json.dumps(described)}
    whole = save_single_file(tmp_path / "whole.safetensors", {**beside_a_transformer(), **held}, metadata)
    assert torch.equal(sharded_velocity(whole, 2, call_inputs()), sharded_velocity(alone, 2, call_inputs()))
    assert ModelSource.open(whole).stored == ModelSource.open(alone).stored
    stranger = {**beside_a_transformer(), **held, "control_model.weight": torch.zeros(2, 2)}
    path = save_single_file(tmp_path / "stranger.safetensors", stranger, metadata)
    with pytest.raises(CheckpointError, match=r"unknown tensor 'control_model\.weight'"):
        open_model(Checkpoint.open(path))


def test_a_qwen_image_file_with_a_whole_pipeline_is_recognised(tmp_path):
    architecture, other, _ = other_model("qwenimage", "base")
    held = {f"model.diffusion_model.{name}": tensor for name, tensor in other.named_parameters()}
    path = save_single_file(tmp_path / "whole.safetensors", {**held, **beside_a_transformer()})
    assert set(open_model(Checkpoint.open(path)).pieces) == set(dict(other.named_parameters()))


@pytest.mark.parametrize(
    ("settings", "marks", "message"),
    [
        ({"zero_cond_t": True}, ("__index_timestep_zero__",), r"is a Qwen-Image-Edit 2511 \(zero_cond_t\)"),
        ({"use_additional_t_cond": True, "use_layer3d_rope": True}, (), "is a Qwen-Image-Layered"),
    ],
    ids=["edit 2511", "layered"],
)
@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_single_files_of_later_qwen_images_are_named_and_load_from_python(
    tmp_path, settings, marks, message, prefix
):
    from comfy_tp.comfy_tp_nodes.source import ModelSource
    from comfy_tp.core.models import architecture_named
    from comfy_tp.core.models.qwenimage import check_predicted

    architecture = architecture_named("qwenimage")
    skip_without("qwenimage", settings)
    torch.manual_seed(0)
    model = architecture.load_class()(**architecture.examples["base"], **settings)
    tensors = {f"{prefix}{name}": tensor for name, tensor in model.named_parameters()}
    tensors.update({f"{prefix}{mark}": torch.zeros(0) for mark in marks})
    path = save_single_file(tmp_path / "later.safetensors", tensors)
    opened = open_model(Checkpoint.open(path))
    assert {name: opened.config.get(name) for name in settings} == settings
    source = ModelSource.open(path)
    with pytest.raises(UnsupportedError, match=rf"later\.safetensors {message}.*stock loader"):
        check_predicted(source.config, source.path)


def test_a_flux2_with_more_inputs_than_outputs_is_named_and_loads_from_python(tmp_path):
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    wide = small_flux2(in_channels=384, out_channels=128)
    path = save_single_file(tmp_path / "wide.safetensors", single_file_tensors(wide))
    assert open_model(Checkpoint.open(path)).config["in_channels"] == 384
    source = ModelSource.open(path)
    with pytest.raises(
        UnsupportedError, match=r"wide\.safetensors is a FLUX\.2 that reads 384 channels and makes 128"
    ):
        flux2.check_predicted(source.config, source.path)


@pytest.mark.parametrize("prefix", PREFIXES[:2])
@pytest.mark.parametrize("lost", ["img_in.weight", "double_blocks.0.img_attn.norm.query_norm.scale"])
def test_what_a_file_lacks_of_the_model_that_it_resembles_is_named(tmp_path, model, prefix, lost):
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    tensors = single_file_tensors(model, prefix)
    del tensors[prefix + lost]
    path = save_single_file(tmp_path / "part.safetensors", tensors)
    wanted = (
        rf"part\.safetensors resembles a Flux2Transformer2DModel but has no '{re.escape(prefix + lost)}', so"
    )
    for opens in (lambda: open_model(Checkpoint.open(path)), lambda: ModelSource.open(path)):
        with pytest.raises(CheckpointError, match=wanted) as refused:
            opens()
        assert "ownload" not in str(refused.value)


def test_a_variant_of_the_weights_can_be_asked_for_from_python(tmp_path, model):
    from comfy_tp import core

    model.save_pretrained(tmp_path, variant="fp16")
    small_flux2(seed=5).save_pretrained(tmp_path, variant="other")
    with pytest.raises(CheckpointError, match="several sets of weights: .*fp16.*other.*variant="):
        Checkpoint.open(tmp_path)
    options = {"parallel_config": core.TensorParallelConfig(tp_degree=1), "device": "cpu"}
    loaded = core.from_pretrained(type(model), str(tmp_path), variant="fp16", **options)
    assert torch.equal(velocity(loaded, call_inputs()), velocity(model, call_inputs()))
    with pytest.raises(CheckpointError, match="has no weights of variant 'bf16'"):
        core.from_pretrained(type(model), str(tmp_path), variant="bf16", **options)


def test_a_name_in_capitals_is_that_of_a_safetensors_file(tmp_path, model):
    path = save_single_file(tmp_path / "MODEL.SAFETENSORS", single_file_tensors(model))
    assert open_model(Checkpoint.open(path)).layout is BFL_FLUX2
    model.save_pretrained(tmp_path / "folder")
    weights = tmp_path / "folder" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("FLUX.Safetensors"))
    assert open_model(Checkpoint.open(tmp_path / "folder")).config["num_layers"] == 2
    (tmp_path / "X.CKPT").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"X\.CKPT is not a safetensors file"):
        Checkpoint.open(tmp_path / "X.CKPT")


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_damaged_single_files_are_each_a_clear_error_before_anything_is_allocated(
    tmp_path, model, monkeypatch, count
):
    from comfy_tp.core import load as loading

    def never(*arguments, **named):
        raise RuntimeError("a damaged file was read")

    for step in ("resolve", "apply_plan", "read_shards"):  # what comes after the headers
        monkeypatch.setattr(loading, step, never)
    held, metadata, _ = fp8_tensors(single_file_tensors(model), "comfy_quant")
    whole = save_single_file(tmp_path / "whole.safetensors", held, metadata)
    with pytest.raises(RuntimeError, match="a damaged file was read"):  # the whole file gets that far
        load_opened(open_model(Checkpoint.open(whole)), Ranks.single())
    for seed in range(count):
        path = tmp_path / f"damaged-{seed}.safetensors"
        kind = damaged(seed, whole, path, MODEL_DAMAGES)
        with pytest.raises((CheckpointError, UnsupportedError)) as refused:
            pytest.fail(
                f"{kind} (seed {seed}): {load_opened(open_model(Checkpoint.open(path)), Ranks.single())}"
            )
        assert str(path) in str(refused.value), kind
        path.unlink()


def test_comfy_tp_verify_passes_every_layout(tmp_path, model, capsys):
    from comfy_tp.core.checkpoint.convert import file_tensors
    from comfy_tp.core.cli import main

    tensors = single_file_tensors(model)
    paths = [save_single_file(tmp_path / "flux2.safetensors", tensors)]
    for style in ("metadata", "comfy_quant", "scaled_fp8", "cast"):
        held, metadata, _ = fp8_tensors(tensors, style)
        paths.append(save_single_file(tmp_path / f"{style}.safetensors", held, metadata))
    klein = single_file_tensors(small_flux2(guidance_embeds=False), "model.diffusion_model.")
    paths.append(save_single_file(tmp_path / "klein.safetensors", klein))
    for name, example in (("flux", "dev"), ("qwenimage", "base")):
        architecture, other, _ = other_model(name, example)
        made = file_tensors(architecture.layouts[0], dict(other.named_parameters()))
        paths.append(save_single_file(tmp_path / f"{name}.safetensors", made))
    assert main(["verify", *map(str, paths), "--tp", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["model"] for result in figures["results"]] == [str(path) for path in paths]
    assert all(result["passed"] and len(result["rows"]) > 4 for result in figures["results"])


def test_the_page_on_files_is_computed_and_names_tests_that_exist(capsys):
    from comfy_tp.core.cli import main
    from comfy_tp.tools.pages import files

    root = Path(__file__).parents[1]
    assert main(["plan", "--files"]) == 0
    text = capsys.readouterr().out
    assert text == (root / "docs" / "files.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert len(named) == len(files.KINDS) + len(files.REFUSED)
    for file, test in named:
        assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), (file, test)


def test_the_sizes_on_the_page_are_those_of_the_published_files():
    from comfy_tp.tools.pages.files import KINDS, resident

    whole = {kind.title: next(resident(kind)) for kind in KINDS}
    assert abs(whole["FLUX.2-dev, fp8 mixed"] / (33.0 * 2**30) - 1) < 0.01  # the file is 33.0 GiB
    assert whole["FLUX.2-dev, plain fp8 cast"] == pytest.approx(
        whole["FLUX.2-dev, single file"] / 2, rel=1e-3
    )
