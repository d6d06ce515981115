"""The rooms of the core: imports run one way, from what a user calls down to tensors, and no two files import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The files of core/ itself, by what they are for.
BASE = ("errors", "wording", "claims")
ENTRANCE = ("__init__", "classes", "load", "restart", "parallelize", "guards")
# Room -> the rooms that it may import.
ROOMS = {
    "base": "",
    "small": "",
    "tp": "base",
    "ranks": "base",
    "checkpoint": "base tp",
    "models": "base tp checkpoint",
    "lora": "base tp checkpoint",
    "entrance": "base tp checkpoint models",
    "parts": "base tp checkpoint models entrance",
    "planning": "base tp checkpoint models entrance",
    "calls": "base tp checkpoint models lora entrance parts ranks",
    "cli": "base tp checkpoint models lora entrance parts ranks calls planning small",
}


def room_of(path: Path) -> str:
    """The room of a file of the core, by its path under core/."""
    if len(path.parts) > 1:
        return path.parts[0]
    return "base" if path.stem in BASE else "entrance"


def imports(root: Path = ROOT / "core") -> dict[Path, set[Path]]:
    """File -> the files that it imports, also where it does so inside a function; paths under `root`."""
    return {
        path.relative_to(root): set(imported_by(path, root)) - {path.relative_to(root)}
        for path in root.rglob("*.py")
    }


def imported_by(path: Path, root: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            package = path.parents[node.level - 1]
        elif (node.module or "").startswith("comfy_tp.core"):
            package = root.parent  # the entry script, which registers the package by its name
        else:
            continue
        base = package.joinpath(*(node.module or "").removeprefix("comfy_tp.").split("."))
        for name in node.names:
            for found in (base / f"{name.name}.py", base.with_suffix(".py"), base / "__init__.py"):
                if found.is_file():
                    yield found.relative_to(root)
                    break


def forbidden(graph: dict[Path, set[Path]]) -> list[str]:
    """The imports that no room allows."""
    return sorted(
        f"{path} -> {target}"
        for path, targets in graph.items()
        for target in targets
        if room_of(target) not in (room_of(path), *ROOMS[room_of(path)].split())
    )


def circle(graph: dict[Path, set[Path]]) -> list[Path]:
    """Files that import one another, first to last, or none."""
    done: set[Path] = set()

    def walk(path: Path, way: list[Path]) -> list[Path]:
        if path in way:
            return way[way.index(path) :]
        if path in done:
            return []
        for target in sorted(graph.get(path, ())):
            if found := walk(target, [*way, path]):
                return found
        done.add(path)
        return []

    return next((found for path in sorted(graph) if (found := walk(path, []))), [])


def test_every_file_lies_in_a_room():
    assert {room_of(path) for path in imports()} == set(ROOMS)
    loose = {path.stem for path in imports() if len(path.parts) == 1}
    assert loose == {*BASE, *ENTRANCE}


def test_imports_run_one_way_through_the_rooms():
    graph = imports()
    assert sum(map(len, graph.values())) > 200
    assert forbidden(graph) == []
    assert circle(graph) == []


@pytest.mark.parametrize(
    "path, line",
    [
        ("tp/plan.py", "from ..checkpoint.files import Checkpoint"),
        ("ranks/client.py", "from ..models import Architecture"),
        ("models/flux.py", "def predict():\n    from ..load import open_model"),
        ("checkpoint/files.py", "from .. import load"),
    ],
)
def test_an_import_the_wrong_way_is_seen(tmp_path, path, line):
    for file in (ROOT / "core").rglob("*.py"):
        copy = tmp_path / "core" / file.relative_to(ROOT / "core")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text() + (f"\n{line}\n" if copy == tmp_path / "core" / path else ""))
    (found,) = forbidden(imports(tmp_path / "core"))
    assert found.startswith(f"{path} -> ")


def test_two_files_that_import_each_other_are_seen():
    graph = {Path("a.py"): {Path("b.py")}, Path("b.py"): {Path("c.py")}, Path("c.py"): {Path("b.py")}}
    assert circle(graph) == [Path("b.py"), Path("c.py")]
