"""The core by rooms: how many lines each has, which rooms it imports, and on which floor its highest file stands.

    python -m comfy_tp.tools.rooms

A file stands one floor above the highest file that it imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "core"
# The files of core/ itself, by what they are for.
BASE = ("errors", "wording", "claims")
Graph = dict[Path, set[Path]]


def room_of(path: Path) -> str:
    """The room of a file of the core, by its path under core/."""
    if len(path.parts) > 1:
        return path.parts[0]
    return "base" if path.stem in BASE else "entrance"


def import_graph(root: Path = CORE) -> Graph:
    """File -> the files that it imports, also where it does so inside a function; paths under `root`."""
    return {
        path.relative_to(root): set(_imports(path, root)) - {path.relative_to(root)}
        for path in root.rglob("*.py")
    }


def _imports(path: Path, root: Path) -> Iterator[Path]:
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


def circle(graph: Graph) -> list[Path]:
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


def floors(graph: Graph) -> dict[Path, int]:
    """File -> its floor; those that import nothing of the core stand on 1. `graph` has no circle."""
    found: dict[Path, int] = {}

    def floor(path: Path) -> int:
        if path not in found:
            found[path] = 1 + max((floor(target) for target in graph.get(path, ())), default=0)
        return found[path]

    for path in graph:
        floor(path)
    return found


def table(root: Path = CORE) -> str:
    """One line per room, the lowest first: files, lines, highest floor, and the rooms that it imports."""
    graph = import_graph(root)
    heights = floors(graph)
    rooms: dict[str, list[Path]] = {}
    for path in graph:
        rooms.setdefault(room_of(path), []).append(path)
    rows = [("room", "files", "lines", "floor", "imports")]
    total = 0
    for room, paths in sorted(rooms.items(), key=lambda row: max(heights[path] for path in row[1])):
        lines = sum(len((root / path).read_text().splitlines()) for path in paths)
        total += lines
        needed = sorted({room_of(target) for path in paths for target in graph[path]} - {room})
        rows.append(
            (
                room,
                str(len(paths)),
                str(lines),
                str(max(heights[path] for path in paths)),
                " ".join(needed) or "-",
            )
        )
    rows.append(("all", str(len(graph)), str(total), str(max(heights.values())), ""))
    return "\n".join(
        f"{name:11}{files:>6}{lines:>7}{floor:>7}  {needed}".rstrip()
        for name, files, lines, floor, needed in rows
    )


if __name__ == "__main__":
    print(table())
