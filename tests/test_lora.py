"""LoRA and its kin on shards: every kind at every plan style gives what the whole model gives, and leaves no trace."""

from __future__ import annotations

import functools
from typing import Any

import lora_checks
import pytest
from thread_ranks import on_ranks

DEGREES = (1, 2, 4)


@functools.cache
def of(degree: int, name: str) -> Any:
    """Rank 0's result of a check."""
    lora_checks.flux2_once()
    return on_ranks(degree, getattr(lora_checks, name))[0]


@pytest.mark.parametrize("degree", DEGREES)
def test_shards_of_every_kind_at_every_style_gather_to_the_full_merge(degree):
    """float32, relative to the weight's largest value; a rounding of float32 is 6e-8."""
    found = of(degree, "merged_everywhere")
    assert "error" not in found, found
    errors = found["errors"]
    assert len(errors) == 14 * 15
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-6, f"{worst}: {errors[worst]}"
    assert found["restored"] and found["host_bytes"] == 0


@pytest.mark.parametrize("degree", DEGREES)
def test_norm_weights_are_changed_and_set(degree):
    assert max(of(degree, "vectors")["errors"]) <= 1e-6


@pytest.mark.parametrize("degree", DEGREES)
def test_stacked_patches_of_both_signs_give_the_output_of_the_whole_model(degree):
    found = of(degree, "stacked")
    assert found["effect"] > 0.05  # the patches do something
    for label, error in found["outputs"].items():
        assert error <= 1e-5, label
    reports = found["reports"]
    beside = [label for label in reports if label.endswith("on LoRA, side")]
    assert len(beside) == 5
    for label in ("stacked, side", *beside):
        assert reports[label][1] == 0, f"{label}: cheap factors need no merge"
    # Merged: a scale of a row's or a column's part alone, with all that is patched together with that weight.
    merged = {kind: reports[f"{kind} between LoRAs, side"][1] for kind in ("dora of rows", "dora of columns")}
    assert merged == {"dora of rows": 1, "dora of columns": 4}
    assert reports["DoRA on LoKr, side"][2] == reports["stacked, merge"][2] == 0


@pytest.mark.parametrize("degree", DEGREES)
def test_a_dora_alone_is_not_merged_and_takes_no_norm_twice(degree):
    found = of(degree, "stacked")["dora alone"]
    for label, (error, _, merged) in found.items():
        assert error <= 1e-5 and merged == 0, label
    # Only ranks that hold pieces of a row (four layers) or of a column (the others) add up their squares.
    reduces = {label: bool(found[label][1]) for label in found}
    assert reduces == {
        ("dora of rows", "first"): True,
        ("dora of rows", "new strength"): False,
        ("dora of rows", "swap"): False,  # the norms of the weight's own rows are known
        ("dora of columns", "first"): True,
        ("dora of columns", "new strength"): False,
        ("dora of columns", "swap"): True,
    }


@pytest.mark.parametrize("degree", DEGREES)
def test_after_removal_the_output_is_bit_identical(degree):
    assert of(degree, "stacked")["back"] == {"merge": True, "side": True}


@pytest.mark.parametrize("degree", DEGREES)
def test_what_cannot_be_carried_is_refused_by_name_and_leaves_the_previous_patches(degree):
    found = of(degree, "refused")
    texts = found["texts"]
    place = "'diffusion_model.double_blocks.0.img_attn.qkv.weight'"
    assert all(text is not None and place in text for text in texts.values()), texts
    assert "'oft'" in texts["kind"] and "lora, loha, lokr" in texts["kind"]
    assert "makes a matrix of [128, 64], but the weight is [192, 64]" in texts["shape"]
    assert "made for another model" in texts["shape"]
    assert "do not fit together" in texts["factors"]
    assert "do not fit together: {'up': [192, 0], 'down': [0, 64]}" in texts["rank 0"]
    assert "has no 'down'" in texts["missing"]
    assert "'w2_a' and 'w2_b'" in texts["missing half"]
    assert "changes the shape" in texts["reshape"]
    assert "kernel of [3, 3]" in texts["kernel"]
    assert "the weight is [192, 64]" in texts["offset"]
    assert "`dora_scale` of [5, 1]" in texts["dora"]
    assert found["stayed"]
    assert found["unmatched"] == ["double_blocks.7.img_attn.qkv.weight"] and found["applied"] == 15


@pytest.mark.parametrize("degree", DEGREES)
def test_biases_and_models_without_a_file_layout_are_patched(degree):
    found = of(degree, "biases")
    assert max(found["errors"].values()) <= 1e-6, found["errors"]
    assert found["counts"] == [(2, 2)] * 3


@pytest.mark.parametrize("degree", DEGREES)
def test_fp8_weights_take_cheap_factors_beside_them_and_other_kinds_rounded_anew(degree):
    """e4m3 has 3 bits of mantissa: a weight that is rounded anew differs by up to 1/16."""
    found = of(degree, "fp8")
    for kind in ("lora", "loha", "lokr", "dora of rows", "dora of columns"):
        assert found[kind]["error"] <= 1e-5 and found[kind]["side"] == 2 and found[kind]["merged"] == 0
    assert found["diff"]["merged"] == 2 and found["diff"]["error"] <= 4e-2
    assert found["diff"]["effect"] > 4 * found["diff"]["error"]
    assert found["diff"]["dtype"] == "torch.float8_e4m3fn"
    assert found["back"]
