"""Every stock node that takes a MODEL works on ours with the stock result, or is refused by name; nothing in between."""

from __future__ import annotations

import json
import os
from pathlib import Path

import matrix_report
import pytest
import torch
from comfy_inprocess import in_comfy, tp_model  # noqa: F401  a fixture
from node_sweep import (
    CHOSEN,
    NOT_FOR_THIS_MODEL,
    REFUSED,
    WORKS,
    WRONG,
    Finding,
    builtin_nodes,
    judge,
    nodes_with_models,
    sampled,
    sweep,
    write_files,
)

from comfy_tp.comfyui import comfyui_path

pytestmark = pytest.mark.usefixtures("in_comfy")

TESTS = Path(__file__).parent


def result_file() -> Path:
    """Where the verdicts of this release lie: with the page that the matrix makes of them where it runs."""
    # By the name of its folder: what is between two releases prints the number of the older one.
    release = comfyui_path().name.removeprefix("ComfyUI-")
    in_matrix = matrix_report.VARIABLE in os.environ
    folder = TESTS.parent / "docs" / "comfyui" if in_matrix else TESTS / "output" / "comfyui"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"sweep-{release}.json"


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_every_stock_node_that_takes_a_model_works_as_with_the_stock_model_or_is_refused_by_name():
    nodes = builtin_nodes()
    expected = nodes_with_models(nodes)
    assert len(expected) > 80, "the stock nodes were not found"
    before = sampled(tp_model(), {})
    findings = sweep(nodes)
    assert {finding.node for finding in findings} == set(expected)
    lines = [json.dumps(finding.record(), ensure_ascii=False) for finding in findings]
    result_file().write_text("[\n" + ",\n".join(lines) + "\n]\n")
    wrong = [finding for finding in findings if finding.verdict == WRONG]
    assert not wrong, "\n".join(f"{finding.node} {finding.given}: {finding.says}" for finding in wrong)
    for finding in findings:
        if finding.verdict == REFUSED:
            assert "Load TP" in finding.says and finding.says.endswith("."), finding
    # What no node could spoil for those that came after it.
    assert torch.equal(sampled(tp_model(), {}), before)
    assert sum(finding.verdict == WORKS for finding in findings) > 30
    assert sum(finding.verdict == WORKS and finding.changes for finding in findings) > 25


# Module of comfy_extras, or nodes itself -> the class -> what is expected, and words of the refusal.
FEW = [
    ("nodes", "KSamplerAdvanced", WORKS, ""),
    ("nodes", "LoraLoaderModelOnly", WORKS, ""),
    ("comfy_extras.nodes_model_advanced", "ModelSamplingFlux", WORKS, ""),
    ("comfy_extras.nodes_model_advanced", "ModelComputeDtype", REFUSED, "ModelComputeDtype"),
    ("comfy_extras.nodes_model_advanced", "RescaleCFG", WORKS, ""),
    ("comfy_extras.nodes_model_merging", "ModelMergeSimple", REFUSED, "merged"),
    ("comfy_extras.nodes_custom_sampler", "DualCFGGuider", WORKS, ""),
    ("comfy_extras.nodes_differential_diffusion", "DifferentialDiffusion", WORKS, ""),
    ("comfy_extras.nodes_freelunch", "FreeU", NOT_FOR_THIS_MODEL, ""),
    ("comfy_extras.nodes_slg", "SkipLayerGuidanceDiT", REFUSED, "SkipLayerGuidanceDiT of nodes_slg"),
    ("comfy_extras.nodes_flux", "FluxKVCache", REFUSED, "Flux KV Cache"),
    ("comfy_extras.nodes_train", "TrainLoraNode", REFUSED, "cannot be trained: .* Train LoRA node"),
    ("comfy_extras.nodes_lora_debug", "LoraLoaderBypassModelOnly", REFUSED, "Load LoRA \\(Bypass\\)"),
]


@pytest.mark.parametrize(("module", "name", "verdict", "words"), FEW)
def test_a_stock_node_works_or_is_refused_by_name(module, name, verdict, words):
    import importlib
    import re

    try:
        node = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this ComfyUI has no {name}")
    write_files()
    found: Finding = judge(name, node, CHOSEN.get(name, [{}])[-1])
    assert (found.verdict, bool(re.search(words, found.says))) == (verdict, True), found
    if verdict == WORKS:
        assert found.changes or name == "KSamplerAdvanced"
