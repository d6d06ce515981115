"""File layouts: FLUX.2's single file against diffusers' names, and every way a file may not fit the model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from comfy_tp.core.checkpoint import (
    IDENTITY,
    Checkpoint,
    FileLayout,
    Piece,
    Rows,
    Rule,
    Target,
    Wanted,
    check,
    choose_layout,
    read_shards,
)
from comfy_tp.core.errors import CheckpointError
from comfy_tp.core.models.flux2_layout import BFL_FLUX2
from comfy_tp.core.tp.shard import ShardSpec

D = 16


def diffusers_weights() -> dict[str, torch.Tensor]:
    """The weights of one double and two single blocks, width 16, by diffusers' names."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        "x_embedder.weight": weight(D, 8),
        "context_embedder.weight": weight(D, 24),
        "norm_out.linear.weight": weight(2 * D, D),
        "proj_out.weight": weight(8, D),
        "single_stream_modulation.linear.weight": weight(3 * D, D),
    }
    for part in ("timestep", "guidance"):
        weights[f"time_guidance_embed.{part}_embedder.linear_1.weight"] = weight(D, 32)
        weights[f"time_guidance_embed.{part}_embedder.linear_2.weight"] = weight(D, D)
    for stream in ("img", "txt"):
        weights[f"double_stream_modulation_{stream}.linear.weight"] = weight(6 * D, D)
    block = "transformer_blocks.0"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
        weights[f"{block}.attn.{name}.weight"] = weight(D, D)
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        weights[f"{block}.attn.{name}.weight"] = weight(4)
    for name in ("ff", "ff_context"):
        weights[f"{block}.{name}.linear_in.weight"] = weight(6 * D, D)
        weights[f"{block}.{name}.linear_out.weight"] = weight(D, 3 * D)
    for index in range(2):
        single = f"single_transformer_blocks.{index}.attn"
        weights[f"{single}.to_qkv_mlp_proj.weight"] = weight(9 * D, D)
        weights[f"{single}.to_out.weight"] = weight(D, 4 * D)
        weights[f"{single}.norm_q.weight"] = weight(4)
        weights[f"{single}.norm_k.weight"] = weight(4)
    return weights


def single_file_weights(w: dict[str, torch.Tensor], norm: str = "scale") -> dict[str, torch.Tensor]:
    """The same weights as Black Forest Labs' file has them, written out by hand."""
    shift_scale = w["norm_out.linear.weight"]
    file = {
        "img_in.weight": w["x_embedder.weight"],
        "txt_in.weight": w["context_embedder.weight"],
        "time_in.in_layer.weight": w["time_guidance_embed.timestep_embedder.linear_1.weight"],
        "time_in.out_layer.weight": w["time_guidance_embed.timestep_embedder.linear_2.weight"],
        "guidance_in.in_layer.weight": w["time_guidance_embed.guidance_embedder.linear_1.weight"],
        "guidance_in.out_layer.weight": w["time_guidance_embed.guidance_embedder.linear_2.weight"],
        "double_stream_modulation_img.lin.weight": w["double_stream_modulation_img.linear.weight"],
        "double_stream_modulation_txt.lin.weight": w["double_stream_modulation_txt.linear.weight"],
        "single_stream_modulation.lin.weight": w["single_stream_modulation.linear.weight"],
        "final_layer.adaLN_modulation.1.weight": torch.cat([shift_scale[D:], shift_scale[:D]]),
        "final_layer.linear.weight": w["proj_out.weight"],
    }
    streams = {
        "img": (("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
        "txt": (
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            "to_add_out",
            "ff_context",
        ),
    }
    for stream, (qkv, norms, out, ff) in streams.items():
        block, target = f"double_blocks.0.{stream}", "transformer_blocks.0"
        file[f"{block}_attn.qkv.weight"] = torch.cat([w[f"{target}.attn.{name}.weight"] for name in qkv])
        file[f"{block}_attn.norm.query_norm.{norm}"] = w[f"{target}.attn.{norms[0]}.weight"]
        file[f"{block}_attn.norm.key_norm.{norm}"] = w[f"{target}.attn.{norms[1]}.weight"]
        file[f"{block}_attn.proj.weight"] = w[f"{target}.attn.{out}.weight"]
        file[f"{block}_mlp.0.weight"] = w[f"{target}.{ff}.linear_in.weight"]
        file[f"{block}_mlp.2.weight"] = w[f"{target}.{ff}.linear_out.weight"]
    for index in range(2):
        single = f"single_transformer_blocks.{index}.attn"
        file[f"single_blocks.{index}.linear1.weight"] = w[f"{single}.to_qkv_mlp_proj.weight"]
        file[f"single_blocks.{index}.linear2.weight"] = w[f"{single}.to_out.weight"]
        file[f"single_blocks.{index}.norm.query_norm.{norm}"] = w[f"{single}.norm_q.weight"]
        file[f"single_blocks.{index}.norm.key_norm.{norm}"] = w[f"{single}.norm_k.weight"]
    return {name: tensor.clone() for name, tensor in file.items()}


def shapes_of(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def spec_of(name: str, weight: torch.Tensor, degree: int) -> ShardSpec:
    """FLUX.2's own plan for `name`."""
    shape = tuple(weight.shape)
    if "to_qkv_mlp_proj" in name:
        return ShardSpec.split(shape, degree, 0, (D, D, D, 3 * D, 3 * D))
    if "attn.to_out.weight" in name:
        return ShardSpec.split(shape, degree, 1, (D, 3 * D))
    if "linear_in" in name:
        return ShardSpec.split(shape, degree, 0, (3 * D, 3 * D))
    if "linear_out" in name or "to_out.0" in name or "to_add_out" in name:
        return ShardSpec.split(shape, degree, 1)
    if "attn." in name and len(shape) == 2:
        return ShardSpec.split(shape, degree, 0)
    return ShardSpec.replicated(shape, degree)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("norm", ["scale", "weight"])
def test_a_flux2_single_file_is_read_into_the_shards_of_diffusers_weights(tmp_path, prefix, norm):
    weights = diffusers_weights()
    file = single_file_weights(weights, norm)
    save_file({prefix + name: tensor for name, tensor in file.items()}, tmp_path / "flux2.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "flux2.safetensors")
    assert choose_layout(checkpoint, (IDENTITY, BFL_FLUX2)) is BFL_FLUX2
    pieces = check(checkpoint, BFL_FLUX2, shapes_of(weights))
    assert pieces["norm_out.linear.weight"] == (
        Piece(f"{prefix}final_layer.adaLN_modulation.1.weight", D, 2 * D),
        Piece(f"{prefix}final_layer.adaLN_modulation.1.weight", 0, D),
    )
    specs = {name: spec_of(name, weight, 2) for name, weight in weights.items()}
    wanted = {name: Wanted(spec, pieces[name]) for name, spec in specs.items()}
    ranks = [read_shards(checkpoint, wanted, rank=rank, degree=2)[0] for rank in range(2)]
    for name, weight in weights.items():
        assert torch.equal(specs[name].gather([shards[name] for shards in ranks]), weight), name


def test_the_table_read_backwards_says_where_a_files_module_goes():
    assert BFL_FLUX2.targets("double_blocks.7.txt_attn.qkv") == (
        Target("transformer_blocks.7.attn.add_q_proj", 0, 3, 0, 1),
        Target("transformer_blocks.7.attn.add_k_proj", 1, 3, 0, 1),
        Target("transformer_blocks.7.attn.add_v_proj", 2, 3, 0, 1),
    )
    assert BFL_FLUX2.targets("final_layer.adaLN_modulation.1") == (
        Target("norm_out.linear", 1, 2, 0, 2),
        Target("norm_out.linear", 0, 2, 1, 2),
    )
    assert BFL_FLUX2.targets("single_blocks.31.linear2") == (
        Target("single_transformer_blocks.31.attn.to_out", 0, 1, 0, 1),
    )
    assert BFL_FLUX2.targets("single_blocks.x.linear2") == ()
    assert IDENTITY.targets("a.b") == (Target("a.b", 0, 1, 0, 1),)


def test_a_diffusers_folder_keeps_its_names(tmp_path):
    weights = diffusers_weights()
    save_file(weights, tmp_path / "diffusion_pytorch_model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert choose_layout(checkpoint, (IDENTITY, BFL_FLUX2)) is IDENTITY
    assert check(checkpoint, IDENTITY, shapes_of(weights))["proj_out.weight"] == (Piece("proj_out.weight"),)


def test_every_problem_is_gathered_into_one_error(tmp_path):
    weights = diffusers_weights()
    file = single_file_weights(weights)
    del file["img_in.weight"]
    file["final_layer.linear.weight"] = torch.zeros(9, D)
    file["txt_in.weight"] = torch.zeros(D, 24, dtype=torch.int32)
    file["strange.weight"] = torch.zeros(1)
    save_file(file, tmp_path / "flux2.safetensors")
    with pytest.raises(CheckpointError) as caught:
        check(Checkpoint.open(tmp_path / "flux2.safetensors"), BFL_FLUX2, shapes_of(weights))
    text = str(caught.value)
    assert f"{tmp_path / 'flux2.safetensors'} does not fit the model (read as FLUX.2 single file)" in text
    assert "missing tensor 'img_in.weight' (for 'x_embedder.weight')" in text
    assert "tensor 'txt_in.weight' has the unsupported dtype I32 (for 'context_embedder.weight')" in text
    assert (
        "tensor 'final_layer.linear.weight' has shape [9, 16], expected [8, 16] (for 'proj_out.weight')"
        in text
    )
    assert "unknown tensor 'strange.weight'" in text
    assert "or a part of one" in text and "ownload" not in text


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    shapes = {f"p{index}": (1,) for index in range(9)}
    with pytest.raises(CheckpointError, match="missing tensor 'p4'; and 5 more"):
        check(Checkpoint.open(tmp_path / "a.safetensors"), IDENTITY, shapes)


def test_optional_parameters_may_be_missing_and_ignored_tensors_present(tmp_path):
    save_file({"m.weight": torch.zeros(2), "m.weight_scale": torch.zeros(())}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "a.safetensors")
    pieces = check(
        checkpoint,
        IDENTITY,
        {"m.weight": (2,), "m.bias": (2,)},
        optional=("m.bias",),
        ignored=("*.weight_scale",),
    )
    assert pieces == {"m.weight": (Piece("m.weight"),)}


def test_a_shape_that_no_equal_parts_make_is_refused(tmp_path):
    layout = FileLayout(
        "thirds", (Rule("q", (Rows("qkv", 0, 3),)), Rule("kv", (Rows("qkv", 1, 3), Rows("other"))))
    )
    save_file(
        {"qkv.weight": torch.zeros(7, 2), "other.weight": torch.zeros(1, 3)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(CheckpointError) as caught:
        check(Checkpoint.open(tmp_path / "a.safetensors"), layout, {"q.weight": (3, 2), "kv.weight": (3, 2)})
    assert "'qkv.weight' has shape [2, 2], expected [3, 2]" in str(caught.value)
    assert "'qkv.weight' + 'other.weight' has shape that does not fit together" in str(caught.value)


def test_tensors_of_different_dtype_cannot_make_one_parameter(tmp_path):
    layout = FileLayout("halves", (Rule("m", (Rows("a"), Rows("b"))),))
    save_file(
        {"a.weight": torch.zeros(1, 2), "b.weight": torch.zeros(1, 2).half()}, tmp_path / "a.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"'a.weight' \(F32\) and 'b.weight' \(F16\) of 'm.weight' differ in dtype"
    ):
        check(Checkpoint.open(tmp_path / "a.safetensors"), layout, {"m.weight": (2, 2)})
