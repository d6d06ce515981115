"""Run, previews, the status line, help and languages in several frontends, whose nodes are a canvas or elements (Vue)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from browser_session import Browser, what_is_missing
from conftest import TESTS, test_packs
from test_browser_product import FIT, LORA, MODEL, SIZE, errors, line_of, node_id, small, workflow
from wheels import unpacked

from comfy_tp.core.cli.comfyui import ComfyServer
from comfy_tp.core.small.pipeline import LORA_NAME, pipeline_folder

PACKAGE = "comfyui-frontend-package"
# A newer one than any release here requires itself; theirs are 1.32.9 (0.3.75) to 1.49.6. Moved forward by a commit.
NEWEST = "1.58.1"
STEPS = 60
SPANISH = "Muestreador TP"  # TP Sampler in the language that the page is opened in

RENDERERS = {"canvas": False, "vue": True}
# What a node shows, by the elements that are seen: a canvas has none.
ELEMENT = "[...document.querySelectorAll('[data-node-id]')].filter((e) => e.getBoundingClientRect().width > 0).length"
HELP = "fetch('/extensions/comfy-tp/docs/TPSampler/en.md').then((r) => r.text()).then((t) => t.length)"


@pytest.fixture(scope="module", params=["its own", NEWEST])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, ComfyServer, Browser]]:
    """A ComfyUI that serves that frontend, with the small FLUX.2, and a browser on it."""
    missing = what_is_missing()
    if missing:
        pytest.skip(f"no browser tests: {missing}")
    arguments = []
    if request.param != "its own":
        folder = unpacked(PACKAGE, request.param) / "comfyui_frontend_package" / "static"
        arguments = ["--front-end-root", str(folder)]
    with ComfyServer(custom_nodes=test_packs(), arguments=arguments) as server:
        shutil.copytree(pipeline_folder(), server.models / "diffusers" / MODEL)
        (server.models / "loras").mkdir(exist_ok=True)
        shutil.copy(pipeline_folder() / "lora" / LORA_NAME, server.models / "loras" / LORA)
        browser = Browser(server, TESTS / "output")
        try:
            yield request.param, server, browser
        finally:
            browser.close()


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("renderer", RENDERERS)
def test_run_shows_the_line_previews_and_the_picture(served, renderer: str):
    frontend, _, browser = served
    graph = small(workflow("text_to_image_tp"), steps=STEPS)
    loader, sampler = node_id(graph, "TPLoadModel"), node_id(graph, "TPSampler")
    seen = browser.open(
        graph,
        name=f"frontend-{frontend.replace(' ', '-')}-{renderer}",
        fresh=True,
        locale="es",
        settings={"Comfy.VueNodes.Enabled": RENDERERS[renderer]},
        run=True,
        timeout_s=400,
        watch={"sampler": line_of(sampler), "loader": line_of(loader), "fit": FIT, "elements": ELEMENT},
        evaluate={
            "elements": ELEMENT,
            "seen": shown(sampler),
            "saved": f"app.graph.serialize().nodes.find((n) => n.id === {sampler}).widgets_values.length",
            "help": HELP,
            "node": f"app.graph.getNodeById({sampler}).constructor.nodeData.display_name",
        },
    )
    assert seen["missingNodeTypes"] == [] and errors(seen) == []
    if frontend != "its own":
        assert seen["frontend"] == frontend
    elements = max(seen["run"]["watched"]["elements"])
    if renderer == "vue" and not elements:
        pytest.skip(f"frontend {seen['frontend']} draws its nodes on the canvas alone")
    assert bool(elements) == RENDERERS[renderer]
    run = seen["run"]
    assert run["outcome"] == "success", run["error"]
    assert run["previews"] >= 1
    (image,) = (image for image in run["images"] if image["type"] == "SaveImage")
    assert (image["width"], image["height"]) == (SIZE, SIZE)
    lines = [line for line in run["watched"]["sampler"] if line]
    assert [line for line in lines if "2 rangos · " in line and f"/{STEPS} · " in line], lines
    assert f"{STEPS} pasos en " in lines[-1] and run["watched"]["loader"][-1] == lines[-1]
    assert seen["evaluated"]["seen"] == {"text": lines[-1], "visible": True}, "the line cannot be seen"
    node = next(node for node in graph["nodes"] if node["id"] == sampler)
    assert seen["evaluated"]["saved"] == len(node["widgets_values"])
    assert seen["evaluated"]["help"] > 500
    assert seen["evaluated"]["node"] == SPANISH


def shown(node: int) -> str:
    """JavaScript: the text of a node's line and whether it is on the page where it can be seen."""
    return f"""(() => {{
      const element = app.graph.getNodeById({node}).widgets.find((w) => w.name === 'tp_status').element
      const box = element.getBoundingClientRect()
      return {{ text: element.textContent, visible: box.height >= 8 && box.width >= 40 && element.isConnected }}
    }})()"""
