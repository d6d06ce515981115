"""The files in workflows/, opened in ComfyUI's own frontend."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from browser_session import Browser
from workflow_files import FOLDER, WORKFLOWS, api_format, ui_format

from comfy_tp.core.cli.comfyui import ComfyServer, PromptRefused

NAMES = list(WORKFLOWS)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The UI file and the API file of that name."""
    return (
        json.loads((FOLDER / f"{name}.json").read_text()),
        json.loads((FOLDER / "api" / f"{name}.json").read_text()),
    )


def test_there_is_an_api_file_for_every_workflow_and_no_other_file() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.json")) == sorted(f"{name}.json" for name in NAMES)
    assert sorted(path.name for path in (FOLDER / "api").glob("*.json")) == sorted(
        f"{name}.json" for name in NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_files_fit_the_nodes_as_they_are(comfy: ComfyServer, name: str) -> None:
    shapes = comfy.object_info()
    ui, api = read(name)
    assert api == api_format(WORKFLOWS[name], shapes)
    assert ui == ui_format(name, WORKFLOWS[name], shapes)


@pytest.mark.parametrize("name", NAMES)
def test_the_frontend_opens_it_whole_and_queues_the_api_file(browser: Browser, name: str) -> None:
    ui, api = read(name)
    seen = browser.open(FOLDER / f"{name}.json")
    assert seen["missingNodeTypes"] == []
    assert seen["validationErrors"] == []
    assert sorted(seen["nodeTypes"]) == sorted(node["type"] for node in ui["nodes"])
    assert seen["apiPrompt"] == api


@pytest.mark.parametrize("name", NAMES)
def test_comfyui_accepts_it_but_for_files_that_are_not_there(comfy: ComfyServer, name: str) -> None:
    _, api = read(name)
    for node in api.values():
        if node["class_type"] == "LoadImage":
            node["inputs"]["image"] = comfy.upload_image(PIXEL, "pixel.png")
    with pytest.raises(PromptRefused) as refused:
        comfy.post_prompt(api)
    missing = {
        (problem["type"], problem["extra_info"]["input_name"])
        for entry in refused.value.node_errors.values()
        for problem in entry["errors"]
    }
    assert missing == {("value_not_in_list", "clip_name"), ("value_not_in_list", "vae_name")}


@pytest.mark.parametrize("name", NAMES)
def test_every_loader_says_where_its_file_comes_from(name: str) -> None:
    ui, _ = read(name)
    loaders = [node for node in ui["nodes"] if "models" in node["properties"]]
    assert sorted(node["type"] for node in loaders) == ["CLIPLoader", "TPLoadModel", "VAELoader"]
    for node in loaders:
        (file,) = node["properties"]["models"]
        assert node["widgets_values"][0] == file["name"]
        assert file["url"].endswith(f"/{file['directory']}/{file['name']}")


def test_comfyuis_template_browser_lists_them(comfy: ComfyServer) -> None:
    listed = comfy.get("/api/workflow_templates")
    assert NAMES in [sorted(names, key=NAMES.index) for names in listed.values() if set(names) == set(NAMES)]
