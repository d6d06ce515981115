"""Every sentence of the tensor-parallelism page as a behaviour: R1 to R37.

R8 is in test_generate, the timings of R10 and R11 are in `comfy-tp bench load`; here is what they rest on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from ranks_harness import Check, run_on_ranks
from requirement_checks import DOCUMENTED, Feed, Stack, error_of, small_flux
from torch import nn

import comfy_tp.core as core
from comfy_tp.core.errors import ConfigError, PlanError, UnsupportedError
from comfy_tp.core.models import ARCHITECTURES, architecture_named, architecture_of
from comfy_tp.core.parallelize import enable_parallelism
from comfy_tp.core.planning.compare import example_model
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.config import TensorParallelConfig
from comfy_tp.core.tp.linear import ColwiseLinear, RowwiseLinear, RowwiseSplitInputLinear
from comfy_tp.core.tp.plan import (
    LinearStyle,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Submodule,
    proportional_blocks,
    resolve_plan,
    style_of,
)

FLUX = architecture_named("flux")


class Recorder(Ranks):
    """Ranks without a group, which keep what would be reduced."""

    def __init__(self, rank: int, degree: int):
        super().__init__(rank, degree, "cpu")
        self.partial: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.collectives += 1
        self.partial.append(tensor.clone())
        return tensor


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """A small FLUX.1 pipeline without text encoders, the same with other weights, one of 3 heads, and a Wan."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D"],
        block_out_channels=[8],
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=small_flux(),
    )
    pipeline.save_pretrained(root / "flux")
    example_model(FLUX, "schnell", seed=1).save_pretrained(root / "other" / "transformer")
    odd = {**FLUX.examples["schnell"], "num_attention_heads": 3}
    FLUX.load_class().from_config(odd).save_pretrained(root / "odd" / "transformer")
    example_model(architecture_named("wan"), "text").save_pretrained(root / "wan")
    return {name: str(root / name) for name in ("flux", "other", "odd", "wan", "saved")}


@pytest.fixture(scope="module")
def ranks(folders) -> dict[str, list[Any]]:
    """Everything that needs two real ranks, once."""
    flux = {"folder": folders["flux"]}
    checks = [
        Check("load", "requirement_checks:load_as_documented", flux),
        Check("generate", "requirement_checks:generate", flux),
        Check("configurations", "requirement_checks:configurations"),
        Check("first", "requirement_checks:checks_come_first", {**flux, "odd_folder": folders["odd"]}),
        Check("refusals", "requirement_checks:refusals", flux),
        Check("save", "requirement_checks:save", {**flux, "target": folders["saved"]}),
        Check("disagreement", "requirement_checks:disagreement", {**flux, "other": folders["other"]}),
        Check("stack", "requirement_checks:stack"),
        Check("pair", "requirement_checks:one_pair"),
        Check("bfloat16", "requirement_checks:bfloat16"),
        Check("kept", "requirement_checks:kept_in_float32", {"folder": folders["wan"]}),
        Check("one", "requirement_checks:degree_one"),
        Check("same", "requirement_checks:same_everywhere"),
    ]
    return run_on_ranks([2], checks)[2]


def on_every_rank(ranks: dict[str, list[Any]], name: str) -> list[Any]:
    assert len(ranks[name]) == 2
    for found in ranks[name]:
        assert "kind" not in found, found
    return ranks[name]


# Loading


def test_R1_from_pretrained_takes_a_config_a_subfolder_and_a_dtype(ranks) -> None:
    for found in on_every_rank(ranks, "load"):
        assert found["distance"] <= 1e-6
        assert found["is_the_class"]
        assert found["whole_class_is_plain"]


def test_R2_the_same_config_shards_a_model_in_memory(ranks) -> None:
    for found in on_every_rank(ranks, "configurations"):
        assert len(found) == (6 if DOCUMENTED else 3)
        assert max(found.values()) <= 1e-6, found


def test_R3_R33_a_degree_that_does_not_divide_the_heads_is_refused_by_both_entries_before_anything_is_read(
    ranks,
) -> None:
    for found in on_every_rank(ranks, "first"):
        expected = (
            "tp_degree=2 must divide the 3 attention heads of FluxTransformer2DModel. Legal degrees: 1, 3."
        )
        assert found["in memory"] == f"PlanError: {expected}"
        assert found["reading"] == f"PlanError: {expected}"
        assert "the process group has 2 ranks. Set tp_degree=2" in found["size"]
        assert found["untouched"]
        assert found["group works"]


def test_R4_a_class_without_a_plan_is_refused_and_pointed_to_the_proposal() -> None:
    with pytest.raises(
        PlanError, match="'Linear' has no tensor-parallel plan: its class defines no `_tp_plan`"
    ) as error:
        enable_parallelism(nn.Linear(2, 2), config=TensorParallelConfig(tp_degree=1))
    assert "Flux2Transformer2DModel" in str(error.value)
    assert "`comfy-tp plan Linear` proposes a plan" in str(error.value)


def test_R4_support_is_told_by_the_attribute_of_the_class() -> None:
    # Older releases of diffusers do not have them all.
    present = {name: kind for name, kind in ARCHITECTURES.items() if hasattr(diffusers, kind)}
    assert len(present) == len(ARCHITECTURES) if DOCUMENTED else present
    for name, class_name in present.items():
        exported = getattr(core, class_name)
        assert exported._tp_plan is architecture_named(name).plan
        assert issubclass(exported, getattr(diffusers, class_name))
    with pytest.raises(AttributeError, match="No architecture has the model class 'UNet2DConditionModel'"):
        core.UNet2DConditionModel  # noqa: B018


def test_R4_a_class_of_ones_own_with_a_plan_is_shardable() -> None:
    class Mine(Feed):
        _tp_plan = {"up": "colwise", "down": "rowwise"}

    architecture = architecture_of(Mine)
    assert resolve_plan(Mine(), architecture.plan_of(Mine()), 2).all_reduces == 1


def test_R5_R10_every_rank_reads_and_holds_its_own_shards_alone(ranks) -> None:
    for found in on_every_rank(ranks, "load"):
        assert found["local_shapes"]
        assert found["sharded"] > 20
        assert found["held"] == found["needed"]
        assert found["read"] < found["file"]


def test_R6_the_model_is_on_its_device_after_loading(ranks) -> None:
    for found in on_every_rank(ranks, "load"):
        assert found["devices"] == ["cpu"]


def test_R7_R9_a_pipeline_takes_the_sharded_transformer_and_makes_the_same_picture(ranks) -> None:
    for found in on_every_rank(ranks, "generate"):
        assert found["shape"][-2:] == [16, 16]
        assert found["distance"] <= 1e-5
        assert found["others_whole"]


def test_R11_a_model_in_memory_must_be_the_same_on_every_rank(ranks) -> None:
    for found in on_every_rank(ranks, "disagreement"):
        assert found["seed"].startswith("ConfigError: Rank 1 holds another '")
        assert "initialise them from the same seed" in found["seed"]


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("device_map", "auto", "Leave `device_map` out"),
        ("quantization_config", {"load_in_8bit": True}, "Use an fp8 checkpoint, sharded as it is read"),
        ("low_cpu_mem_usage", False, "Leave `low_cpu_mem_usage` out"),
        ("use_flashpack", True, "Use the safetensors weights"),
        ("use_safetensors", False, "Use the safetensors weights"),
    ],
)
def test_R12_R13_R14_R15_R16_options_that_would_load_the_full_checkpoint_are_refused(
    option, value, advice
) -> None:
    with pytest.raises(ConfigError) as error:
        core.from_pretrained(
            FLUX.load_class(), "nowhere", parallel_config=TensorParallelConfig(tp_degree=2), **{option: value}
        )
    assert f"`{option}={value!r}` does not work with a tensor-parallel `parallel_config`" in str(error.value)
    assert advice in str(error.value)


def test_an_unknown_loading_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Unknown loading options with tensor parallelism: offload_folder"):
        core.from_pretrained(FLUX.load_class(), "nowhere", parallel_config=2, offload_folder="x")


def test_R17_a_quantised_model_is_refused() -> None:
    model = small_flux()
    model.hf_quantizer = object()
    with pytest.raises(UnsupportedError, match="is quantised in memory and cannot be sharded"):
        enable_parallelism(model, config=1)


def test_R18_an_offloaded_model_is_refused(ranks) -> None:
    model = small_flux()
    model.proj_out._hf_hook = object()
    with pytest.raises(UnsupportedError, match="has offloading hooks and cannot be sharded"):
        enable_parallelism(model, config=1)
    grouped = small_flux()
    grouped.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(UnsupportedError, match="uses group offloading and cannot be sharded"):
        enable_parallelism(grouped, config=1)
    for found in on_every_rank(ranks, "refusals"):
        assert "is sharded with tensor parallelism, so it cannot be offloaded" in found["offload"]
    if DOCUMENTED:
        for found in on_every_rank(ranks, "generate"):
            assert "tensor parallelism" in found["offload"]


def test_R19_a_model_with_adapters_is_refused_and_a_sharded_one_takes_none(ranks) -> None:
    from peft import LoraConfig

    model = small_flux()
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(UnsupportedError, match="carries LoRA adapters. Fuse and unload them first"):
        enable_parallelism(model, config=1)
    for found in on_every_rank(ranks, "refusals"):
        for action in ("lora", "adapter"):
            assert "cannot take a PEFT adapter. Apply the LoRA to the shards" in found[action]


def test_an_already_sharded_model_is_refused(ranks) -> None:
    for found in on_every_rank(ranks, "refusals"):
        assert "is already sharded. Load it again to shard it at another degree" in found["again"]
        assert "cannot be sharded again" in found["again by method"]
        assert "cannot be cast layer by layer" in found["casting"]


def test_R20_saving_gathers_the_shards_into_what_plain_diffusers_reads_back(ranks) -> None:
    for found in on_every_rank(ranks, "save"):
        assert found["equal"]
        assert found["config"] == 12
        assert found["files"] > 1
    for found in on_every_rank(ranks, "refusals"):
        assert "Remove: safe_serialization=False" in found["save"]
        assert "like '5GB', got 'five'" in found["size"]


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"):
        model = FLUX.load_class().from_config(FLUX.examples["schnell"])
    with pytest.raises(ConfigError, match="has no data .meta device.. Load the weights first"):
        enable_parallelism(model, config=1)


def test_no_process_group_is_refused_with_the_way_to_start_one() -> None:
    with pytest.raises(
        ConfigError, match="tp_degree=2 needs an initialised process group. Start .* torchrun"
    ):
        enable_parallelism(small_flux(), config=2)


def test_R33_the_device_type_is_checked_before_anything_is_changed(ranks) -> None:
    with pytest.raises(
        ConfigError, match="cannot place shards on a 'mps' device. Supported device types: cuda, xpu"
    ):
        enable_parallelism(small_flux(), config=1, device="mps")
    with pytest.raises(ConfigError, match="'gpu0' is not a device"):
        enable_parallelism(small_flux(), config=1, device="gpu0")


def test_a_degree_of_one_is_a_true_no_op(ranks) -> None:
    for found in on_every_rank(ranks, "one"):
        assert found["plain"]
        assert found["equal"]


@pytest.mark.parametrize("degree", [0, -1, 2.0, True, "2"])
def test_R1_a_degree_must_be_a_whole_number(degree) -> None:
    with pytest.raises(ConfigError, match="`tp_degree` must be a whole number of at least 1"):
        TensorParallelConfig(tp_degree=degree)


# The plan language


def refused(plan: dict[str, Any], degree: int = 2, model: nn.Module | None = None) -> str:
    return error_of(resolve_plan, model or Stack(), plan, degree)


def test_R21_a_key_with_two_wildcards_is_refused() -> None:
    assert refused({"blocks.*.up.*": "colwise"}) == (
        "PlanError: Plan key 'blocks.*.up.*' has more than one '*'. A key may hold at most one wildcard."
    )


def test_R22_the_part_before_the_wildcard_must_be_a_module_list() -> None:
    assert refused({"modulation.*.up": "colwise"}) == (
        "PlanError: The part before '*' in plan key 'modulation.*.up' must be an nn.ModuleList, but 'modulation' is a "
        "Linear."
    )


def test_R22_one_entry_covers_every_block() -> None:
    plan = resolve_plan(Stack(), {"blocks.*.up": "colwise"}, 2)
    assert list(plan.styles) == ["blocks.0.up", "blocks.1.up"]


def test_R23_a_key_without_wildcard_is_a_path_from_the_model() -> None:
    assert list(resolve_plan(Stack(), {"modulation": "rowwise_split_input"}, 2).styles) == ["modulation"]
    assert list(resolve_plan(Stack(), {"blocks.1.up": "colwise"}, 2).styles) == ["blocks.1.up"]


def test_R23_a_key_that_matches_nothing_is_refused() -> None:
    assert refused({"blocks.*.dwon": "rowwise"}) == (
        "PlanError: Plan key 'blocks.*.dwon' names no module: a Feed has no submodule 'dwon'. Check the key against "
        "the model's named_modules()."
    )


def test_an_optional_module_that_is_none_is_skipped() -> None:
    assert not resolve_plan(Stack(), {"blocks.*.optional": "colwise"}, 2).styles


def test_an_unknown_style_is_refused_with_those_that_exist() -> None:
    assert refused({"blocks.*.up": "columnwise"}) == (
        "PlanError: Unknown tensor-parallel style 'columnwise' for 'blocks.*.up'. Expected one of colwise, rowwise, "
        "rowwise_split_input, or a PackedColwiseParallel or PackedRowwiseParallel."
    )


def test_a_style_on_something_else_than_a_linear_is_refused() -> None:
    assert "'blocks.0' is a Feed; the style colwise shards nn.Linear only" in refused({"blocks.*": "colwise"})


def test_one_block_in_two_places_is_sharded_once_and_counted_twice(ranks) -> None:
    for found in on_every_rank(ranks, "stack"):
        assert found["error_of_output"] <= 1e-6
        assert found["one_instance"]
        assert found["kinds"] == [True, True, True]
        assert found["collectives"] == found["predicted"] == 4


def test_conflicting_styles_for_one_instance_are_refused() -> None:
    text = refused({"blocks.0.up": "colwise", "blocks.2.up": "rowwise"})
    assert "Plan keys 'blocks.0.up' and 'blocks.2.up' both name the module 'blocks.0.up'" in text
    assert "(colwise and rowwise)" in text


def linear(out_features: int, in_features: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features)


def shards(full: nn.Linear, style: Any, degree: int, layer: type) -> list[Any]:
    found = style_of(style, "x")
    specs = found.specs(Submodule(full, "x", nn.Module()), degree)
    return [layer(full, specs, Recorder(rank, degree)) for rank in range(degree)]


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_R24_colwise_makes_a_slice_of_the_output_and_splits_the_bias(degree) -> None:
    full = linear(24, 10)
    x = torch.randn(3, 10)
    parts = shards(full, "colwise", degree, ColwiseLinear)
    assert [tuple(part.weight.shape) for part in parts] == [(24 // degree, 10)] * degree
    assert [tuple(part.bias.shape) for part in parts] == [(24 // degree,)] * degree
    torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1), full(x))
    assert all(part.ranks.collectives == 0 for part in parts)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_R25_rowwise_makes_partial_sums_joined_by_one_reduce(degree) -> None:
    full = linear(10, 24)
    x = torch.randn(3, 24)
    parts = shards(full, "rowwise", degree, RowwiseLinear)
    for part, piece in zip(parts, x.chunk(degree, dim=-1), strict=True):
        part(piece)
        assert part.ranks.collectives == 1
    torch.testing.assert_close(sum(part.ranks.partial[0] for part in parts) + full.bias, full(x))


@pytest.mark.parametrize("bias", [True, False])
def test_R26_rowwise_split_input_takes_its_slice_of_the_whole_input(bias) -> None:
    full = nn.Linear(24, 10, bias=bias)
    x = torch.randn(3, 24)
    parts = shards(full, "rowwise_split_input", 3, RowwiseSplitInputLinear)
    for part in parts:
        part(x)
    total = sum(part.ranks.partial[0] for part in parts)
    torch.testing.assert_close(total + full.bias if bias else total, full(x))


def test_R26_rowwise_split_input_refuses_a_slice_on_every_rank() -> None:
    for part in shards(linear(10, 24), "rowwise_split_input", 2, RowwiseSplitInputLinear):
        with pytest.raises(PlanError, match="takes its whole input of 24 features on every rank, got 12"):
            part(torch.randn(3, 12))


def test_R27_a_pair_makes_one_collective_and_nothing_is_gathered_in_between(ranks) -> None:
    for found in on_every_rank(ranks, "pair"):
        assert found["collectives"] == 1
        assert found["up"] == [5, 24]


def test_R28_the_text_stream_has_the_styles_of_the_image_stream() -> None:
    twins = {"add_q_proj": "to_q", "add_k_proj": "to_k", "add_v_proj": "to_v", "to_add_out": "to_out.0"}
    for name in ("flux", "flux2", "qwenimage"):
        plan = architecture_named(name).plan
        for text, image in twins.items():
            prefix = "transformer_blocks.*.attn."
            assert plan[prefix + text] == plan[prefix + image]
        for key, style in plan.items():
            for text, image in (("ff_context", "ff"), ("txt_mlp", "img_mlp")):
                if f".{text}." in key:
                    assert plan[key.replace(text, image)] == style


def test_R29_every_packed_block_is_split_on_its_own() -> None:
    full = linear(12, 8)
    x = torch.randn(3, 8)
    parts = shards(full, PackedColwiseParallel((1, 2)), 2, ColwiseLinear)
    first, second = full(x).split([4, 8], dim=-1)
    for rank, part in enumerate(parts):
        expected = torch.cat([first.chunk(2, dim=-1)[rank], second.chunk(2, dim=-1)[rank]], dim=-1)
        torch.testing.assert_close(part(x), expected)
    rows = linear(6, 12)
    parts = shards(rows, PackedRowwiseParallel((1, 2)), 2, RowwiseLinear)
    x = torch.randn(3, 12)
    head, tail = x.split([4, 8], dim=-1)
    for rank, part in enumerate(parts):
        part(torch.cat([head.chunk(2, dim=-1)[rank], tail.chunk(2, dim=-1)[rank]], dim=-1))
    torch.testing.assert_close(sum(part.ranks.partial[0] for part in parts) + rows.bias, rows(x))


def test_R30_proportional_blocks_become_absolute() -> None:
    assert proportional_blocks(24, [1, 1], "x") == [12, 12]
    assert proportional_blocks(18, [1, 1, 1, 3, 3], "x") == [2, 2, 2, 6, 6]


def test_R30_blocks_whose_sum_does_not_divide_are_refused() -> None:
    text = refused({"blocks.*.up": PackedColwiseParallel((1, 1, 3))})
    assert "'blocks.0.up': the sum 5 of the packed blocks [1, 1, 3] does not divide the dimension 48" in text
    text = refused({"blocks.*.up": PackedColwiseParallel((1, 0))})
    assert "packed blocks must be positive whole numbers, got [1, 0]" in text


def test_R31_absolute_blocks_come_from_the_linear() -> None:
    feed = Feed()
    feed.up._tp_packed_col_blocks = [12, 36]
    feed.down._tp_packed_row_blocks = [36, 12]
    plan = resolve_plan(feed, {"up": PackedColwiseParallel(), "down": PackedRowwiseParallel()}, 2)
    assert plan.specs["up.weight"].blocks == (12, 36)
    assert plan.specs["up.bias"].blocks == (12, 36)
    assert plan.specs["down.weight"].blocks == (36, 12)


def test_R31_no_blocks_anywhere_is_refused_with_the_attribute_to_set() -> None:
    for style, attribute in (
        (PackedColwiseParallel(), "_tp_packed_col_blocks"),
        (PackedRowwiseParallel(), "_tp_packed_row_blocks"),
    ):
        text = refused({"blocks.*.up": style})
        assert f"uses {type(style).__name__} but has no blocks" in text
        assert f"set `{attribute}` on the Linear in the model's __init__" in text


def test_R31_sizes_name_attributes_of_the_parent_where_the_linear_has_none() -> None:
    feed = Feed()
    feed.inner = 12
    feed.outer = 36
    plan = resolve_plan(feed, {"up": PackedColwiseParallel(sizes=("inner", "outer"))}, 2)
    assert plan.specs["up.weight"].blocks == (12, 36)
    text = refused({"up": PackedColwiseParallel(sizes=("missing",))}, model=feed)
    assert "sized by the attribute 'missing' of Feed, which is None instead of a whole number" in text


def test_R32_every_block_must_be_divisible_on_its_own() -> None:
    text = refused({"blocks.*.up": PackedColwiseParallel((3, 13))}, degree=2)
    assert "Cannot shard 'blocks.0.up.weight' across 2 ranks: its block of size 9" in text
    assert "Choose a degree that divides every block" in text


def test_R34_modules_outside_the_plan_are_replicated() -> None:
    model = small_flux()
    specs = resolve_plan(model, FLUX.plan, 2).specs
    assert set(specs) == {name for name, _ in model.named_parameters()}
    for name in ("x_embedder.weight", "context_embedder.weight", "norm_out.linear.weight", "proj_out.weight"):
        assert specs[name].is_replicated
    assert specs["transformer_blocks.0.attn.norm_q.weight"].is_replicated


def test_R35_rowwise_biases_are_replicated_and_added_after_the_reduce() -> None:
    full = linear(10, 24)
    for part in shards(full, "rowwise", 2, RowwiseLinear):
        piece = torch.randn(3, 12)
        out = part(piece)
        assert torch.equal(part.bias, full.bias)
        torch.testing.assert_close(out - part.ranks.partial[0], full.bias.expand(3, 10))


def test_R36_outputs_are_compared_numerically_and_equal_on_every_rank(ranks) -> None:
    digests = {found["digest"] for found in on_every_rank(ranks, "same")}
    assert len(digests) == 1


def test_R36_bf16_is_within_twice_its_own_error(ranks) -> None:
    for found in on_every_rank(ranks, "bfloat16"):
        assert found["dtype"] == "torch.bfloat16"
        assert 0 < found["sharded"] <= 2 * found["unsharded"]


def test_modules_kept_in_float32_stay_so(ranks) -> None:
    for found in on_every_rank(ranks, "kept"):
        assert found["both"] == ["torch.bfloat16", "torch.float32"]
        assert found["in_memory"]
        assert found["read"]


def linear_styles(plan: dict[str, Any]) -> dict[str, LinearStyle]:
    styles = {key: style_of(value, key) for key, value in plan.items()}
    return {key: style for key, style in styles.items() if isinstance(style, LinearStyle)}


@pytest.mark.parametrize("name", ["flux", "flux2", "qwenimage", "qwenimage21"])
def test_R37_our_plans_hold_those_of_diffusers(name) -> None:
    """Beside them stand modulations alone, which diffusers replicates."""
    if not hasattr(diffusers, ARCHITECTURES[name]):
        pytest.skip(f"diffusers {diffusers.__version__} has no {ARCHITECTURES[name]}")
    architecture = architecture_named(name)
    model = example_model(architecture, next(iter(architecture.examples)))
    theirs = getattr(architecture.load_class(), "_tp_plan", None)
    if theirs is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no plan of {name}")
    ours = resolve_plan(model, linear_styles(architecture.plan), 2)
    for path, spec in resolve_plan(model, theirs, 2).specs.items():
        if not spec.is_replicated:
            assert ours.specs[path] == spec
    extra = [key for key in linear_styles(architecture.plan) if key not in theirs]
    assert all(architecture.plan[key] == "rowwise_split_input" for key in extra)


def test_R37_the_example_plans_use_the_styles_that_the_page_names() -> None:
    def kinds(name: str) -> set[str]:
        return {str(style) for style in linear_styles(architecture_named(name).plan).values()}

    assert kinds("qwenimage") - {"rowwise_split_input"} == {"colwise", "rowwise"}
    assert kinds("flux") - {"rowwise_split_input"} == {"colwise", "rowwise", "PackedRowwiseParallel"}
    assert {"PackedColwiseParallel", "PackedRowwiseParallel"} < kinds("flux2")
    blocks = [style.blocks for style in linear_styles(architecture_named("flux2").plan).values()]
    assert (1, 1) in blocks and None in blocks


def test_ranks_with_other_inputs_are_named_and_nothing_is_computed(ranks) -> None:
    for found in on_every_rank(ranks, "disagreement"):
        assert "InputError: Rank 1 was given another 'hidden_states' than rank 0 (relative" in found["input"]
        assert "a CPU generator with the same seed" in found["input"]
        assert "another 'timestep'" in found["timestep"]
        assert found["rounding passes"] == "nothing was raised"


def test_ranks_with_other_files_are_named_before_they_read(ranks) -> None:
    for found in on_every_rank(ranks, "disagreement"):
        assert "ConfigError: Rank 1 sees another '" in found["files"]
        assert "Make sure that every rank reads the same model files" in found["files"]


def test_context_parallelism_beside_is_refused_and_a_mesh_must_have_one_dimension() -> None:
    class Both:
        context_parallel_config = object()
        tensor_parallel_config = TensorParallelConfig(tp_degree=2)

    class Mesh:
        ndim = 2
        mesh_dim_names = ("dp", "tp")

    with pytest.raises(ConfigError, match="Context parallelism together with tensor parallelism"):
        TensorParallelConfig.of(Both())
    with pytest.raises(ConfigError, match="needs a 1-D mesh, got one of 2 dimensions"):
        TensorParallelConfig(mesh=Mesh())
    with pytest.raises(ConfigError, match="must be a TensorParallelConfig .ours or diffusers'., got dict"):
        TensorParallelConfig.of({"tp_degree": 2})


def test_importing_the_core_imports_no_torch() -> None:
    code = "import comfy_tp.core, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent).returncode == 0
