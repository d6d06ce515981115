"""Run, previews, the status line and translations in each frontend that is supported, in both of its node renderers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_session import Browser, what_is_missing
from conftest import test_packs
from matrix_record import release
from test_browser_product import EMPTY, FIT, MODEL, errors, line_of, node_id, small, workflow
from wheels import unpacked

from comfy_tp.comfyui import ComfyServer
from comfy_tp.core.small.pipeline import pipeline_folder

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
# A release's own frontend, and a newer one on the newest of them. They move forward by a commit.
OWN = {"0.33.0": "1.48.7", "master": "1.49.6"}
NEWER = {"master": "1.58.1"}
STEPS = 60
VUE = "Comfy.VueNodes.Enabled"


@pytest.fixture(scope="module", params=["own", "newer"])
def page(request: pytest.FixtureRequest) -> Iterator[tuple[Browser, str]]:
    """A browser on a ComfyUI with the small model, and the frontend that it must show."""
    if missing := what_is_missing():
        pytest.skip(f"no browser tests: {missing}")
    table = OWN if request.param == "own" else NEWER
    if release() not in table:
        pytest.skip(f"no {request.param} frontend is pinned for ComfyUI {release()}")
    version, arguments = table[release()], []
    if request.param == "newer":
        static = unpacked("comfyui-frontend-package", version) / "comfyui_frontend_package" / "static"
        arguments = ["--front-end-root", str(static)]
    with ComfyServer(custom_nodes=test_packs(), arguments=arguments) as server:
        shutil.copytree(pipeline_folder(), server.models / "diffusers" / MODEL)
        session = Browser(server, ROOT / "tests" / "output")
        yield session, version
        session.close()


@pytest.mark.parametrize("renderer", ["canvas", "vue"])
def test_run_shows_preview_status_line_and_picture(page: tuple[Browser, str], renderer: str) -> None:
    browser, version = page
    wanted = json.dumps(renderer == "vue")
    before = browser.open(
        EMPTY,
        fresh=True,
        evaluate={
            "known": f"app.extensionManager.setting.get('{VUE}') !== undefined",
            "set": f"app.extensionManager.setting.set('{VUE}', {wanted})",
        },
    )
    if renderer == "vue" and not before["evaluated"]["known"]:
        pytest.skip(f"the frontend {version} has no Vue nodes")
    graph = small(workflow("text_to_image_tp"), steps=STEPS)
    sampler = node_id(graph, "TPSampler")
    element = f"document.querySelector('[data-node-id=\"{sampler}\"]')"
    line = f"app.graph.getNodeById({sampler}).widgets.find((w) => w.name === 'tp_status').element"
    seen = browser.open(
        graph,
        name=f"frontend-{version}-{renderer}",
        run=True,
        timeout_s=400,
        watch={"line": line_of(sampler), "fit": FIT},
        evaluate={
            "vue": f"{element}?.innerText ?? null",
            "shown": f"[{line}.isConnected, {line}.getBoundingClientRect().height]",
        },
    )
    assert seen["frontend"] == version
    assert seen["missingNodeTypes"] == [] and errors(seen) == []
    run = seen["run"]
    assert run["outcome"] == "success", run["error"]
    assert run["previews"] >= 2 and run["previewShown"]
    assert [image["type"] for image in run["images"]] == ["SaveImage"]
    lines = [text for text in run["watched"]["line"] if text]
    assert any(f"/{STEPS} · " in text and text.endswith("left") for text in lines), lines
    assert f"{STEPS} steps in " in lines[-1]
    connected, height = seen["evaluated"]["shown"]
    assert connected and height >= 8, "the line cannot be seen"
    if renderer == "vue":
        assert lines[-1] in seen["evaluated"]["vue"], "the node was not drawn by Vue"
    else:
        assert seen["evaluated"]["vue"] is None, "the node was not drawn on the canvas"


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_the_nodes_are_in_the_language_of_the_page(page: tuple[Browser, str], language: str) -> None:
    browser, _ = page
    texts = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    title = "LiteGraph.registered_node_types.TPSampler.title"
    seen = browser.open(EMPTY, fresh=True, locale=language, evaluate={"title": title})
    assert seen["evaluated"]["title"] == texts["TPSampler"]["display_name"]
