"""``comfy-tp plan``: proposals from shapes alone, and the table of architectures in the docs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from requirement_checks import Feed
from torch import nn

from comfy_tp.core.cli import main
from comfy_tp.core.cli.plan import as_code, as_json, find
from comfy_tp.core.errors import UnsupportedError
from comfy_tp.core.models import ARCHITECTURES, architecture_named
from comfy_tp.core.planning.compare import plan_from_json
from comfy_tp.core.planning.propose import legal, meta_model, propose
from comfy_tp.core.tp.plan import WherePresent, resolve_plan

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_proposal_is_our_plan_or_the_difference_has_a_reason(name, capsys) -> None:
    assert main(["plan", name, "--json"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert figures["unexplained"] == []
    if name in ("flux", "flux2", "qwenimage", "qwenimage21", "minimax_h3", "wan"):
        assert figures["differences"] == []
        assert f"Our plan of {name}: the same" in printed
    else:
        assert figures["differences"]
        assert all(reason in printed for reason in architecture_named(name).differs.values())
    assert "Replicated on every rank:" in printed
    assert figures["replicated_parameters"] < 0.02 * figures["parameters"]


def test_the_page_of_architectures_is_computed_from_the_plans(capsys) -> None:
    assert main(["plan", "--table"]) == 0
    assert capsys.readouterr().out == (DOCS / "architectures.md").read_text()


def test_where_the_pages_are_not_installed_the_command_says_where_they_are(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "comfy_tp.tools.pages.files", None)
    assert main(["plan", "--files"]) == 1
    refusal = capsys.readouterr().err
    assert "docs/files.md is made by tools/pages/files.py, which is not installed" in refusal
    assert "clone of the repository" in refusal


def test_neither_a_class_nor_a_page_is_refused(capsys) -> None:
    assert main(["plan"]) == 1
    assert "Name a model class" in capsys.readouterr().err


class Gated(nn.Module):
    """A feed-forward whose gate and up projections are packed, beside a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.linear_in = nn.Linear(24, 2 * 60)
        self.linear_out = nn.Linear(60, 24)


class Mine(nn.Module):
    """A model of no library: blocks of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Gated(), Feed(24)])
        self.head = nn.Linear(24, 3)


def test_a_model_of_ones_own_gets_pairs_and_entries_for_the_blocks_that_have_them() -> None:
    proposal = propose(Mine(), None)
    code = {key: as_code(style) for key, style in proposal.plan.items()}
    assert code == {
        "layers.*.linear_in": "WherePresent(PackedColwiseParallel((1, 1)))",
        "layers.*.linear_out": "WherePresent('rowwise')",
        "layers.*.up": "WherePresent('colwise')",
        "layers.*.down": "WherePresent('rowwise')",
    }
    plan = resolve_plan(Mine(), proposal.plan, 2)
    assert plan.specs["layers.0.linear_in.weight"].blocks == (60, 60)
    assert plan.all_reduces == 3
    left = {part.key: part.why for part in proposal.replicated}
    assert left["layers.*.norm"] == "a norm: a few numbers, needed whole"
    assert set(left) == {"layers.*.norm", "head"}
    assert legal(Mine(), proposal.plan, None) == [1, 2, 3, 4, 6, 12]


def test_a_proposal_survives_its_json_form() -> None:
    proposal = propose(Mine(), None)
    again = plan_from_json(json.loads(json.dumps({k: as_json(v) for k, v in proposal.plan.items()})))
    assert again == proposal.plan
    assert isinstance(again["layers.*.up"], WherePresent)
    flux2 = architecture_named("flux2").plan
    assert plan_from_json({key: as_json(style) for key, style in flux2.items()}) == flux2


def test_a_model_of_diffusers_without_a_plan_gets_one_that_resolves() -> None:
    model_class, architecture = find("SD3Transformer2DModel")
    assert architecture is None
    model = meta_model(model_class, {"num_layers": 3})
    proposal = propose(model, 18)
    assert proposal.plan["transformer_blocks.*.attn.to_out.0"] == "rowwise"
    assert resolve_plan(model, proposal.plan, 2).all_reduces > 0
    assert next(model.parameters()).device == torch.device("meta")


def test_a_diffusers_that_is_too_old_for_a_class_is_named(monkeypatch) -> None:
    monkeypatch.setattr("diffusers.__version__", "0.36.0")
    with pytest.raises(
        UnsupportedError, match="LTX2VideoTransformer3DModel needs diffusers 0.37.0 or newer; 0.36.0 is"
    ):
        architecture_named("ltx2").load_class()
    assert architecture_named("flux").load_class().__name__ == "FluxTransformer2DModel"


def test_a_diffusers_that_fails_to_give_a_class_it_should_have_is_told_from_an_old_one(monkeypatch) -> None:
    monkeypatch.setattr("diffusers.FluxTransformer2DModel", None)
    with pytest.raises(
        UnsupportedError, match="gives no FluxTransformer2DModel, which it should have. See what"
    ):
        architecture_named("flux").load_class()


def test_an_unknown_class_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        UnsupportedError, match="has no model class 'Nothing'. For a class of your own write module:Class"
    ):
        find("Nothing")
    with pytest.raises(UnsupportedError, match="json has no class 'Nothing'"):
        find("json:Nothing")
