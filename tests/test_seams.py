"""Every name of ComfyUI that the pack uses is listed in seams.py and fits the installed ComfyUI."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from comfy_inprocess import in_comfy  # noqa: F401  a fixture

ROOT = Path(__file__).parents[1]
PACK = ROOT / "comfy_tp_nodes"
COMFY = (
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "folder_paths",
    "latent_preview",
    "nodes",
    "server",
)

pytestmark = pytest.mark.usefixtures("in_comfy")


def test_the_installed_comfyui_has_every_seam():
    from comfy_tp.comfy_tp_nodes import seams

    assert seams.problems() == []


def used_names() -> set[str]:
    """Dotted names of ComfyUI that the pack's source names, by import and attribute."""
    found = set()
    for file in PACK.rglob("*.py"):
        tree = ast.parse(file.read_text())
        bound: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    if top in COMFY:
                        bound[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                if node.module.split(".")[0] in COMFY:
                    for alias in node.names:
                        bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = dotted(node)
                if name and name.split(".")[0] in bound:
                    head, _, rest = name.partition(".")
                    found.add(f"{bound[head]}.{rest}")
        found.update(name for name in bound.values() if "." in name)
    return found


def dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else None
    return None


def test_nothing_of_comfyui_is_used_that_is_not_listed():
    from comfy_tp.comfy_tp_nodes.seams import SEAMS

    listed = {
        ".".join(name.split(".")[:length]) for name in SEAMS for length in range(1, name.count(".") + 2)
    }
    unlisted = sorted(name for name in used_names() if not covered(name, listed))
    assert unlisted == []


def covered(name: str, listed: set[str]) -> bool:
    """Whether the name, or what it is an attribute of beyond a listed name, is in the list."""
    return name in listed or any(name.startswith(f"{seam}.") for seam in listed if seam.count(".") >= 2)


def test_a_missing_name_and_a_missing_parameter_are_told():
    from comfy_tp.comfy_tp_nodes.seams import _problems

    found = list(
        _problems(
            {
                "comfy.conds.CONDRegular": ("cond", "flavour"),
                "comfy.conds.CONDGone": None,
                "comfy.gone.thing": None,
                "gone": None,
            }
        )
    )
    assert found[0] == "comfy.conds.CONDRegular takes no flavour"
    assert [text.split(" is missing")[0] for text in found[1:]] == [
        "comfy.conds.CONDGone",
        "comfy.gone.thing",
        "gone",
    ]


def test_on_a_comfyui_that_does_not_fit_the_pack_loads_and_its_nodes_say_what_is_needed(monkeypatch):
    import comfy_tp.comfy_tp_nodes as pack
    from comfy_tp.comfy_tp_nodes import misfit, seams
    from comfy_tp.core.errors import UnsupportedError

    monkeypatch.setitem(seams.SEAMS, "comfy.model_patcher.ModelPatcher", ("model", "flavour"))
    extension = asyncio.run(pack.comfy_entrypoint())
    nodes = asyncio.run(extension.get_node_list())
    assert [node.GET_SCHEMA().node_id for node in nodes] == list(misfit.NODES)
    with pytest.raises(
        UnsupportedError, match=r"needs ComfyUI 0\.3\.75 .* this is 0\.3\.75.*takes no flavour"
    ):
        nodes[0].execute()


def test_the_stand_ins_have_the_ids_of_the_nodes():
    import comfy_tp.comfy_tp_nodes as pack
    from comfy_tp.comfy_tp_nodes import misfit

    assert {node.GET_SCHEMA().node_id for node in pack.node_list()} == set(misfit.NODES)


def test_importing_the_pack_imports_neither_torch_nor_comfyui_nor_starts_anything():
    code = (
        "import sys, threading; import comfy_tp, comfy_tp.comfy_tp_nodes;"
        "print([m for m in ('torch', 'comfy', 'comfy_api', 'diffusers', 'transformers') if m in sys.modules],"
        "threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT / "tests"
    )
    assert done.stdout.split() == ["[]", "1"], done.stderr
