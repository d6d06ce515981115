"""``comfy-tp verify``: right plans pass, every deliberately wrong one fails and is located."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rank_checks import WRONG_PLANS
from ranks_harness import Check, run_on_ranks

from comfy_tp.core.cli import main
from comfy_tp.core.models import architecture_named
from comfy_tp.core.planning.compare import example_model


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[Any]]:
    checks = [Check(case, "rank_checks:wrong_plan", {"case": case}) for case in WRONG_PLANS]
    return run_on_ranks([2], checks)[2]


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_a_wrong_plan_fails_on_every_rank(wrong, case: str) -> None:
    for found in wrong[case]:
        assert "error" not in found, found
        assert not found["passed"]


@pytest.mark.parametrize(
    ("case", "block"),
    [
        ("packed treated as plain", "transformer_blocks.0"),
        ("packed rows treated as plain", "single_transformer_blocks.0"),
        ("bias added on every rank", "transformer_blocks.0"),
        ("gate and up exchanged", "transformer_blocks.0"),
        ("norm over the local width", "blocks.0"),
    ],
)
def test_a_plan_that_runs_but_is_wrong_is_named_by_its_first_wrong_block(wrong, case, block) -> None:
    for found in wrong[case]:
        assert found["first_wrong"] == block
        assert found["rel_l2"] > 1e-3
        assert [row["name"] for row in found["rows"]].index(block) > 1  # what runs before it is right


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("col and row swapped", "shapes cannot be multiplied"),
        ("rotary angles not cut", "must match the size of tensor b"),
        ("whole input of a row-wise layer", "takes its whole input of 192 features on every rank, got 96"),
    ],
)
def test_a_plan_whose_shapes_do_not_fit_names_the_block_it_fails_in(wrong, case, reason) -> None:
    for found in wrong[case]:
        assert found["failed_in"] == "transformer_blocks.0"
        assert reason in found["failure"]


def test_the_command_passes_an_architecture_and_a_pipeline_folder_read_in_shards(tmp_path, capsys) -> None:
    example_model(architecture_named("flux"), "schnell").save_pretrained(tmp_path / "transformer")
    assert main(["verify", "qwenimage21", str(tmp_path), "--tp", "2", "--json"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert figures["passed"]
    assert [result["model"] for result in figures["results"]] == [
        "qwenimage21 (base)",
        "qwenimage21 (one timestep)",
        str(tmp_path),
    ]
    assert figures["results"][2]["predicted"] == 7
    assert "transformer_blocks.1" in printed
    assert "the same on every rank" in printed


def test_the_command_fails_a_wrong_plan_and_names_the_block(tmp_path, capsys) -> None:
    wrong = tmp_path / "plan.json"
    wrong.write_text(
        json.dumps(
            {
                "transformer_blocks.*.attn": ["LocalAttributes", ["heads", "inner_dim"]],
                "transformer_blocks.*.img_mlp.proj": "colwise",
                "transformer_blocks.*.img_mlp.gate_layer": ["PackedColwiseParallel", [1, 1]],
                "transformer_blocks.*.img_mlp.out": "rowwise",
            }
        )
    )
    assert main(["verify", "qwenimage21", "--tp", "2", "--plan", str(wrong)]) == 1
    assert "FAILED: the first block that differs is transformer_blocks.0" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_check(tmp_path, capsys) -> None:
    assert main(["verify", "flux2", "--tp", "3", "--devices", "cpu,cpu"]) == 1
    assert "--tp 3 needs 3 devices, but --devices names 2" in capsys.readouterr().err
    plan = tmp_path / "plan.json"
    assert main(["verify", str(tmp_path), "--plan", str(plan)]) == 1
    assert "plan.json cannot be read" in capsys.readouterr().err
    plan.write_text("[]")
    assert main(["verify", str(tmp_path), "--plan", str(plan)]) == 1
    assert "must be a JSON object that maps module names to styles" in capsys.readouterr().err
    plan.write_text("{}")
    assert main(["verify", str(tmp_path), "--plan", str(plan)]) == 1
    assert "give its name as MODEL" in capsys.readouterr().err
