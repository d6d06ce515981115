"""No file, class or function grows beyond what one reads at a sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("core", "comfy_tp_nodes", "comfyui")
FILE, CLASS, FUNCTION, TEST_FILE = 500, 300, 60, 700


def lengths(text: str) -> Iterator[tuple[int, int, str]]:
    """What of a file is bounded: lines, how many are allowed, and what it is."""
    yield len(text.splitlines()), FILE, "the file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
            yield node.end_lineno - node.lineno + 1, limit, node.name


def too_long(text: str) -> list[str]:
    return [f"{what}: {lines} of {limit}" for lines, limit, what in lengths(text) if lines > limit]


def test_the_code_keeps_its_bounds():
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    assert {str(path): found for path in paths if (found := too_long(path.read_text()))} == {}


def test_the_tests_keep_theirs():
    counts = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "tests").glob("*.py")}
    assert len(counts) > 60
    assert {name: lines for name, lines in counts.items() if lines > TEST_FILE} == {}


@pytest.mark.parametrize(
    "text, found",
    [
        ("x = 1\n" * 501, ["the file: 501 of 500"]),
        ("def f():\n" + "    x = 1\n" * 60, ["f: 61 of 60"]),
        ("class C:\n" + "    async def f(self):\n" + "        x = 1\n" * 60, ["f: 61 of 60"]),
        ("class C:\n" + "    x = 1\n" * 300, ["C: 301 of 300"]),
        ("def f():\n" + "    x = 1\n" * 59, []),
    ],
)
def test_what_is_too_long_is_named(text, found):
    assert too_long(text) == found
