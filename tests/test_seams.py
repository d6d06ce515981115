"""Every name of ComfyUI that the pack uses is listed in seams.py and fits the installed ComfyUI."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

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

    found = {feature: seams.problems(feature) for feature in seams.SEAMS if feature != seams.OVERRIDES}
    assert {feature: texts for feature, texts in found.items() if texts} == {}


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
    from comfy_tp.comfy_tp_nodes.seams import names

    listed = {
        ".".join(name.split(".")[:length]) for name in names() for length in range(1, name.count(".") + 2)
    }
    assert sorted(name for name in used_names() if name not in listed and not of_an_object(name)) == []


def of_an_object(name: str) -> bool:
    """Whether the name is an attribute of a listed thing that is neither a module nor a class, such as a list."""
    from comfy_tp.comfy_tp_nodes.seams import _resolve, names

    seams = [seam for seam in names() if name.startswith(f"{seam}.")]
    return any(not isinstance(_resolve(seam), type | ModuleType) for seam in seams)


def test_what_our_classes_override_and_use_of_comfyuis_classes_is_listed():
    from comfy_tp.comfy_tp_nodes.seams import names

    listed = names()
    unlisted = {
        f"{kind.__name__}: {base.__module__}.{base.__qualname__}.{name}"
        for kind in our_classes()
        for name, base in inherited_names(kind)
        if not any(f"{each.__module__}.{each.__qualname__}.{name}" in listed for each in comfy_bases(kind))
    }
    assert sorted(unlisted) == []


def our_classes() -> list[type]:
    """The classes of the pack that are made from one of ComfyUI's, nodes apart: those have a contract of their own."""
    import importlib

    for file in PACK.rglob("[!_]*.py"):
        importlib.import_module(".".join(("comfy_tp", *file.relative_to(ROOT).with_suffix("").parts)))
    modules = [module for name, module in sys.modules.items() if name.startswith("comfy_tp.comfy_tp_nodes.")]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and comfy_bases(value)
    }
    return sorted(
        (kind for kind in found if not issubclass(kind, ComfyNode())), key=lambda kind: kind.__name__
    )


def ComfyNode() -> type:
    from comfy_api.latest import io

    return io.ComfyNode


def comfy_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] in COMFY]


def inherited_names(kind: type) -> set[tuple[str, type]]:
    """Names of ComfyUI's that the class and its mixins define anew, or take from themselves (`self.x`, `super().x`)."""
    own = [part for part in kind.__mro__ if part.__module__.startswith("comfy_tp.")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(part))) for part in own]
    used = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            or (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "super"
            )
        )
    }
    names = {name for name in used.union(*map(vars, own)) if not name.startswith("__")}
    found = {name: next((base for base in comfy_bases(kind) if name in vars(base)), None) for name in names}
    return {(name, base) for name, base in found.items() if base is not None}


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


@pytest.fixture
def lacking(monkeypatch):
    """A function that makes ComfyUI lack a parameter of a feature; all is as it was after the test."""
    from comfy_tp.comfy_tp_nodes import seams

    def lack(feature: str) -> None:
        monkeypatch.setitem(
            seams.SEAMS, feature, {**seams.SEAMS[feature], "comfy.conds.CONDRegular": ("flavour",)}
        )
        seams.problems.cache_clear()

    yield lack
    monkeypatch.undo()
    seams.problems.cache_clear()


IDS = [
    "TPLoadModel",
    "TPLoadCLIP",
    "TPLoadVAE",
    "TPLoadLoRA",
    "TPSampler",
    "TPUnloadModel",
    "TPStatus",
]


def loaded_nodes() -> dict[str, type]:
    import comfy_tp.comfy_tp_nodes as pack

    extension = asyncio.run(pack.comfy_entrypoint())
    nodes = asyncio.run(extension.get_node_list())
    return {node.GET_SCHEMA().node_id: node for node in nodes}


def is_stand_in(node: type) -> bool:
    return node.__name__ == "StandInNode"


def test_on_a_comfyui_that_does_not_fit_the_pack_loads_and_its_nodes_say_what_is_needed(lacking):
    from comfy_tp.comfy_tp_nodes import seams
    from comfy_tp.core.errors import UnsupportedError

    lacking(seams.NODES)
    nodes = loaded_nodes()
    assert list(nodes) == IDS and all(map(is_stand_in, nodes.values()))
    said = rf"Load TP Model needs ComfyUI 0\.3\.75 .* this is {re.escape(seams.version())}.*takes no flavour"
    with pytest.raises(UnsupportedError, match=said):
        nodes["TPLoadModel"].execute()


@pytest.mark.parametrize(
    ("feature", "gone"),
    [
        ("LOAD_CLIP", {"TPLoadCLIP"}),
        ("LOAD_VAE", {"TPLoadVAE"}),
        ("LOAD_LORA", {"TPLoadLoRA"}),
        ("LORA", {"TPLoadLoRA"}),
        ("SAMPLER", {"TPSampler"}),
        ("LOAD_MODEL", {"TPLoadModel", "TPSampler"}),
        ("STATUS", {"TPStatus"}),
        ("QWEN_IMAGE", set()),
        ("PROGRESS", set()),
    ],
)
def test_what_does_not_fit_takes_only_the_nodes_away_that_need_it(lacking, feature, gone):
    from comfy_tp.comfy_tp_nodes import seams

    lacking(getattr(seams, feature))
    assert {name for name, node in loaded_nodes().items() if is_stand_in(node)} == gone


def test_a_family_that_does_not_fit_is_refused_when_a_model_of_it_is_loaded(lacking):
    from comfy_tp.comfy_tp_nodes import seams
    from comfy_tp.comfy_tp_nodes.model import check_sampled
    from comfy_tp.core.errors import UnsupportedError
    from comfy_tp.core.models import architecture_named

    lacking(seams.FLUX1)
    architectures = {name: architecture_named(name) for name in ("flux", "flux2")}
    sources = {
        name: SimpleNamespace(architecture=found, path=name, config=next(iter(found.examples.values())))
        for name, found in architectures.items()
    }
    check_sampled(sources["flux2"])
    with pytest.raises(UnsupportedError, match=r"^FLUX\.1 needs ComfyUI .*takes no flavour"):
        check_sampled(sources["flux"])


def test_a_node_that_cannot_be_imported_is_stood_in_for_alone(monkeypatch):
    import comfy_tp.comfy_tp_nodes as pack
    from comfy_tp.core.errors import UnsupportedError

    monkeypatch.setitem(pack.NODES, "TPSampler", "sampler_of_another_time")
    nodes = loaded_nodes()
    assert list(nodes) == IDS
    assert {name for name, node in nodes.items() if is_stand_in(node)} == {"TPSampler"}
    said = r"^TP Sampler needs.*cannot be imported \(ModuleNotFoundError: .*sampler_of_another_time"
    with pytest.raises(UnsupportedError, match=said):
        nodes["TPSampler"].execute()


def test_a_newer_comfyui_than_any_tested_one_works_and_is_told_of_once(monkeypatch, caplog):
    from comfy_tp.comfy_tp_nodes import seams

    monkeypatch.setattr("comfyui_version.__version__", "0.38.1")
    for _ in range(2):
        assert not any(map(is_stand_in, loaded_nodes().values()))
    told = [record.message for record in caplog.records if "0.38.1 is newer than" in record.message]
    assert len(told) == 1 and seams.NEWEST_TESTED in told[0]


def test_every_reference_and_call_of_the_pack_fits_the_release_that_it_needs(in_comfy, tmp_path):  # noqa: F811
    """By comfy-import-guard, which reads ComfyUI's source from a git clone: here of the release that the tests run."""
    from comfy_tp.comfyui import comfyui_path

    release = tmp_path / "cache" / "ComfyUI"
    for part in ("comfy", "comfy_api", "comfy_execution"):
        shutil.copytree(comfyui_path() / part, release / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in comfyui_path().glob("*.py"):
        shutil.copy(file, release)
    author = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for words in (["init", "-q"], ["add", "--all"], [*author, "commit", "-q", "-m", "the release"]):
        subprocess.run(["git", *words], cwd=release, check=True, timeout=60)
    pack = tmp_path / "custom_nodes" / "comfy-tp"
    shutil.copytree(PACK, pack / "comfy_tp_nodes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", pack)

    def checked() -> tuple[int, dict]:
        start = "import sys; from comfy_import_guard.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "--cache-dir", tmp_path / "cache"]
        command += ["--offline", "--json", "--quiet", "check"]
        command += ["--comfy-dir", tmp_path, "--no-update", "--target", "HEAD", "--strict"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, json.loads(done.stdout)["packs"][0]

    code, found = checked()
    assert (code, found["verdict"]) == (0, "SAFE"), found
    assert found["references"] > 50
    with open(pack / "comfy_tp_nodes" / "patcher.py", "a") as file:
        file.write("\n\ndef leave():\n    comfy.model_management.free_memory(1, 2, 3, 4, 5, 6, 7, 8, 9)\n")
    code, found = checked()
    assert code != 0 and "free_memory" in json.dumps(found), found


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
