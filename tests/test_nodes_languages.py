"""Names, tooltips and help pages of the nodes in every language that the pack speaks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from comfy_inprocess import in_comfy  # noqa: F401  a fixture

ROOT = Path(__file__).parents[1]
LOCALES = ROOT / "locales"
HELP = ROOT / "comfy_tp_nodes" / "web" / "docs"
STATUS_LINE = ROOT / "comfy_tp_nodes" / "web" / "status_line.js"
LANGUAGES = ("en", "es", "ja", "zh")
ROW = re.compile(r"^\| `\w+` \| .* \|$", re.M)
WRITE = os.environ.get("COMFY_TP_WRITE_LOCALES") == "1"
LONGEST_HELP = 6000  # characters: a page that nobody scrolls twice

pytestmark = pytest.mark.usefixtures("in_comfy")


def english() -> dict[str, Any]:
    """What locales/en/nodeDefs.json must hold: the schemas' own texts."""
    import comfy_tp.comfy_tp_nodes as pack

    found = {}
    for node in pack.node_list():
        schema = node.GET_SCHEMA()
        outputs = {}
        for index, output in enumerate(schema.outputs):
            named = {"name": output.display_name} if output.display_name else {}
            outputs[str(index)] = {**named, "tooltip": output.tooltip}
        found[schema.node_id] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {one.id: {"name": one.id, "tooltip": one.tooltip} for one in schema.inputs},
            "outputs": outputs,
        }
    return found


def node_texts(language: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def test_the_english_texts_are_those_of_the_nodes():
    if WRITE:
        text = json.dumps(english(), indent=2, ensure_ascii=False) + "\n"
        (LOCALES / "en" / "nodeDefs.json").write_text(text, encoding="utf-8")
    assert node_texts("en") == english(), "write them with COMFY_TP_WRITE_LOCALES=1 and translate what is new"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_and_input_has_its_text_and_no_text_is_stale(language):
    want, have = english(), node_texts(language)
    assert list(have) == list(want)
    for node_id, node in want.items():
        assert set(have[node_id]) == set(node), node_id
        for part in ("inputs", "outputs"):
            assert set(have[node_id][part]) == set(node[part]), f"{node_id}: {part}"
            for name, entry in have[node_id][part].items():
                assert entry["tooltip"] and set(entry) <= {"name", "tooltip"}, f"{node_id}.{name}"
        assert have[node_id]["display_name"] and have[node_id]["description"]


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_translations_are_translated_and_name_the_same_samplers(language):
    from comfy_tp.core.calls.samplers import SAMPLERS

    want, have = english(), node_texts(language)
    for node_id, node in want.items():
        assert have[node_id]["description"] != node["description"]
        for name, entry in node["inputs"].items():
            assert have[node_id]["inputs"][name]["tooltip"] != entry["tooltip"], f"{node_id}.{name}"
    listed = ", ".join(SAMPLERS)
    assert listed in have["TPSampler"]["description"]
    assert listed in have["TPSampler"]["inputs"]["sampler_name"]["tooltip"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_names_the_category(language):
    main = json.loads((LOCALES / language / "main.json").read_text(encoding="utf-8"))
    assert main["nodeCategories"]["comfy-tp"]


def test_no_language_is_there_by_halves():
    assert sorted(path.name for path in LOCALES.iterdir()) == sorted(LANGUAGES)
    words = STATUS_LINE.read_text(encoding="utf-8")
    for language in LANGUAGES:
        block = re.search(rf"^  {language}: {{(.*?)^  }}", words, re.S | re.M)
        assert block, f"the status line does not speak {language}"
        keys = re.findall(r"^    (\w+):", block[1], re.M)
        assert keys == ["ranks", "each", "starting", "loading", "step", "perStep", "left", "done", "gone"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_has_a_help_page_with_its_inputs_in_the_language(language):
    for node_id, node in node_texts(language).items():
        page = HELP / node_id / f"{language}.md"
        if WRITE:
            page.write_text(with_table(page.read_text(encoding="utf-8"), node), encoding="utf-8")
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {node['display_name']}\n"), page
        assert ROW.findall(text) == [row(*one) for one in node["inputs"].items()], (
            f"{page}: its table is not that of the node; write it with COMFY_TP_WRITE_LOCALES=1"
        )
        assert len(text) <= LONGEST_HELP


def row(name: str, texts: dict[str, str]) -> str:
    """The line of an input in a help page's table."""
    return f"| `{name}` | {texts['tooltip']} |"


def with_table(page: str, node: dict[str, Any]) -> str:
    """The page with the rows of its table made anew."""
    first = ROW.search(page)
    assert first, page
    rest = ROW.sub("\0", page[first.end() :]).replace("\0\n", "").replace("\n\0", "")
    return page[: first.start()] + "\n".join(row(*one) for one in node["inputs"].items()) + rest


def test_no_help_page_is_left_of_a_node_that_is_gone():
    assert sorted(path.name for path in HELP.iterdir()) == sorted(english())
    for folder in HELP.iterdir():
        assert sorted(path.stem for path in folder.iterdir()) == sorted(LANGUAGES)
