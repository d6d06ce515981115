"""The documents say what is so: quoted texts exist, links and commands lead somewhere, the examples are those that run."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from comfy_tp.core import cli, errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TROUBLES = ROOT / "docs" / "troubleshooting.md"
ONE_SCREEN = 45  # lines
GAP = "\0"  # stands for a value in a text


def texts_in_the_code() -> list[str]:
    """Every string of the package, with `GAP` for each value that an f-string puts in."""
    found = []
    for folder in ("core", "comfy_tp_nodes", "comfyui"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def rows() -> list[tuple[str, str]]:
    """Text and advice of each row of the troubleshooting table."""
    table = re.findall(r"^\| (.+?) \| (.*?) ?\|$", TROUBLES.read_text(encoding="utf-8"), re.M)
    return [(text, advice) for text, advice in table if not text.startswith(("**", "the text"))]


def test_every_quoted_refusal_is_a_text_of_the_code():
    texts = texts_in_the_code()
    unknown = []
    for quoted, advice in rows():
        parts = [part.strip(" '") for part in quoted.split("…") if part.strip(" '")]
        pattern = re.compile(".*".join(re.escape(part) for part in parts), re.S)
        if not any(pattern.search(text) for text in texts):
            unknown.append(quoted)
        assert advice, quoted
    assert unknown == []
    assert len(rows()) >= 20


def test_every_kind_of_refusal_is_on_the_page_and_the_page_fits_one_screen():
    text = TROUBLES.read_text(encoding="utf-8")
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.TPError)
    }
    missing = sorted(kind for kind in kinds - {"TPError", "Cancelled"} if f"`{kind}`" not in text)
    assert missing == []
    assert len(text.splitlines()) <= ONE_SCREEN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_lead_to_files(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documents_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(
        r"\bmake ([a-z]+)\b(?=[` \n])", "\n".join(re.findall(r"`[^`]+`|^make .*", text, re.M))
    ):
        assert target in targets, f"{page.name}: make {target}"
    for command in re.findall(r"comfy-tp (demo|generate|verify|plan|bench|ranks|comfyui|doctor)\b", text):
        assert cli._load(command) is not None, f"{page.name}: comfy-tp {command}"
    for path in re.findall(r"`((?:core|tests|docs|workflows|comfyui|comfy_tp_nodes)/[\w/.]+)`", text):
        assert (ROOT / path).exists() or path.startswith("tests/output/"), f"{page.name}: {path}"


def test_the_script_in_the_readme_is_the_one_that_the_suite_runs():
    """tests/test_generate.py runs tensor_parallel_flux2.py on the CPU; the README has the same calls for GPUs."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    run = ast.parse((ROOT / "tests" / "tensor_parallel_flux2.py").read_text(encoding="utf-8"))
    shown = ast.parse(script)
    # On GPUs each process says first which one is its own; without that all shards would go to the first.
    own_gpu = {"set_device", "int"}
    assert own_gpu <= calls(shown)
    assert calls(shown) - own_gpu <= calls(run)
    assert imports(shown) - {"import os"} <= imports(run)


def calls(tree: ast.AST) -> set[str]:
    """Names and keywords of every call, without what differs between a CPU and GPUs."""
    free = {"init_process_group", "device", "save"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found |= {name} if name in free else {name, *(f"{name}({key.arg}=)" for key in node.keywords)}
    return found


def imports(tree: ast.AST) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}


def test_the_registry_gets_a_square_icon_and_a_wide_banner():
    comfy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["comfy"]
    with Image.open(ROOT / Path(comfy["Icon"]).name) as icon:
        assert icon.width == icon.height <= 400
    with Image.open(ROOT / Path(comfy["Banner"]).name) as banner:
        assert banner.width * 9 == banner.height * 21


def test_pictures_in_the_docs_are_small():
    large = [path.name for path in (ROOT / "docs" / "images").glob("*.png") if path.stat().st_size > 200_000]
    assert large == []


def test_the_page_on_the_architecture_names_files_that_exist_and_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+\.py\b", text))
    assert len(named) > 30
    places = (ROOT, ROOT / "core", ROOT / "core" / "ranks")
    assert [name for name in sorted(named) if not any((place / name).is_file() for place in places)] == []
    rows = {row.split("|")[1] for row in text.splitlines() if row.startswith("| ")}
    rooms = {path.name for path in (ROOT / "core").iterdir() if (path / "__init__.py").is_file()}
    assert [room for room in sorted(rooms) if not any(f"`{room}/`" in row for row in rows)] == []
