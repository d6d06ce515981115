"""Node ids, and the names, order, types and defaults of inputs, are frozen: saved workflows depend on them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from comfy_inprocess import in_comfy  # noqa: F401  a fixture

CONTRACT = Path(__file__).with_name("node_contract.json")

pytestmark = pytest.mark.usefixtures("in_comfy")


def contract() -> dict[str, Any]:
    """The nodes as ComfyUI tells them to its frontend; lists of models and samplers are not part of it."""
    import comfy_tp.comfy_tp_nodes as pack

    found = {}
    for node in pack.node_list():
        schema = node.GET_SCHEMA()
        inputs = []
        for one in schema.inputs:
            entry: dict[str, Any] = {"name": one.id, "type": one.io_type, "optional": one.optional}
            if getattr(one, "default", None) is not None:
                entry["default"] = one.default
            inputs.append(entry)
        found[schema.node_id] = {
            "display_name": schema.display_name,
            "category": schema.category,
            "inputs": inputs,
            "outputs": [output.io_type for output in schema.outputs],
        }
    return found


def test_the_nodes_keep_their_contract():
    if os.environ.get("COMFY_TP_WRITE_CONTRACT") == "1":
        CONTRACT.write_text(json.dumps(contract(), indent=2) + "\n")
    frozen = json.loads(CONTRACT.read_text())
    now = contract()
    for node_id, node in frozen.items():
        assert node_id in now, f"{node_id} is gone"
        count = len(node["inputs"])
        assert now[node_id]["inputs"][:count] == node["inputs"], f"{node_id}: inputs may only be appended"
        assert now[node_id]["outputs"] == node["outputs"]
    assert now == frozen, "write the new contract with COMFY_TP_WRITE_CONTRACT=1 and commit it"


def test_every_input_explains_itself():
    import comfy_tp.comfy_tp_nodes as pack

    for node in pack.node_list():
        schema = node.GET_SCHEMA()
        assert schema.node_id.startswith("TP") and schema.description
        for one in schema.inputs:
            assert one.tooltip and one.tooltip.endswith("."), f"{schema.node_id}.{one.id} has no tooltip"


def test_appended_inputs_have_a_default_or_are_optional():
    """Required inputs without a default break workflows saved before; only connections may lack one."""
    for node_id, node in json.loads(CONTRACT.read_text()).items():
        for one in node["inputs"]:
            connection = one["type"] not in ("INT", "FLOAT", "STRING", "BOOLEAN")
            assert connection or one["optional"] or "default" in one, f"{node_id}.{one['name']}"


def test_search_aliases_are_given_only_to_a_comfyui_that_knows_them(monkeypatch):
    import dataclasses

    from comfy_api.latest import io

    from comfy_tp.comfy_tp_nodes.nodes import schema as module

    def aliases() -> Any:
        made = module.make_schema(node_id="x", search_aliases=["one"], inputs=[], outputs=[])
        return getattr(made, "search_aliases", None)

    if "search_aliases" not in {field.name for field in dataclasses.fields(io.Schema)}:
        assert aliases() is None

    @dataclasses.dataclass
    class Newer(io.Schema):
        search_aliases: list | None = None

    monkeypatch.setattr(module.io, "Schema", Newer)
    assert aliases() == ["one"]
