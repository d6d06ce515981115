"""The rooms of the core: imports run one way, from what a user calls down to tensors, and no two files import each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfy_tp.tools.rooms import BASE, CORE, Graph, circle, import_graph, room_of, table

ENTRANCE = ("__init__", "classes", "load", "recognise", "restart", "parallelize", "guards")
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
    "calls": "base tp checkpoint models lora entrance parts planning ranks",
    "cli": "base tp checkpoint models lora entrance parts ranks calls planning small",
}


def forbidden(graph: Graph) -> list[str]:
    """The imports that no room allows."""
    return sorted(
        f"{path} -> {target}"
        for path, targets in graph.items()
        for target in targets
        if room_of(target) not in (room_of(path), *ROOMS[room_of(path)].split())
    )


def test_every_file_lies_in_a_room():
    graph = import_graph()
    assert {room_of(path) for path in graph} == set(ROOMS)
    assert {path.stem for path in graph if len(path.parts) == 1} == {*BASE, *ENTRANCE}


def test_imports_run_one_way_through_the_rooms():
    graph = import_graph()
    assert sum(map(len, graph.values())) > 200
    assert forbidden(graph) == []
    assert circle(graph) == []


@pytest.mark.parametrize(
    "path, line",
    [
        ("tp/plan.py", "from ..checkpoint.files import Checkpoint"),
        ("models/flux.py", "def predict():\n    from ..load import open_model"),
    ],
)
def test_an_import_the_wrong_way_is_seen(tmp_path, path, line):
    for file in CORE.rglob("*.py"):
        copy = tmp_path / "core" / file.relative_to(CORE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text() + (f"\n{line}\n" if copy == tmp_path / "core" / path else ""))
    (found,) = forbidden(import_graph(tmp_path / "core"))
    assert found.startswith(f"{path} -> ")


def test_two_files_that_import_each_other_are_seen():
    graph = {Path("a.py"): {Path("b.py")}, Path("b.py"): {Path("c.py")}, Path("c.py"): {Path("b.py")}}
    assert circle(graph) == [Path("b.py"), Path("c.py")]


def test_the_table_counts_every_line():
    rows = [line.split() for line in table().splitlines()]
    assert [row[0] for row in rows[1:-1]] != [] and {row[0] for row in rows[1:-1]} == set(ROOMS)
    assert int(rows[-1][2]) == sum(len(path.read_text().splitlines()) for path in CORE.rglob("*.py"))
