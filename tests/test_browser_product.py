"""What an artist meets: the pack's workflows, Run, Cancel, previews, the status line and the help, in ComfyUI's frontend."""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from comfy_tp.comfyui import ComfyServer, demo
from comfy_tp.core.small.pipeline import LORA_NAME, pipeline_folder
from comfy_tp.tools.small import draw

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
IMAGES = ROOT / "docs" / "images"
MODEL = "browser-flux2"
LORA = "browser-outlines.safetensors"
LOADERS = {"UNETLoader": "TPLoadModel", "CLIPLoader": "TPLoadCLIP", "VAELoader": "TPLoadVAE"}
SIZE = 64
FRONTENDS_OWN = (
    "fetching file size",  # it asks the models' hosts, which tests cannot reach
    "cleanup event listeners for graph that was never set up",  # when one workflow follows another quickly
)
# A run is kept as a picture for the README with COMFY_TP_WRITE_SCREENSHOTS=1.
KEEP = os.environ.get("COMFY_TP_WRITE_SCREENSHOTS") == "1"
LARGEST_PICTURE = 200_000

pytestmark = pytest.mark.timeout(600)  # three models are loaded onto ranks that start first


def line_of(node: int) -> str:
    """JavaScript: the status line that a node shows, or null."""
    return f"app.graph.getNodeById({node})?.widgets?.find((w) => w.name === 'tp_status')?.value ?? null"


FIT = """(() => {
  const nodes = app.graph.nodes, ds = app.canvas.ds
  const left = Math.min(...nodes.map((n) => n.pos[0])), top = Math.min(...nodes.map((n) => n.pos[1])) - 40
  const right = Math.max(...nodes.map((n) => n.pos[0] + n.size[0]))
  const bottom = Math.max(...nodes.map((n) => n.pos[1] + n.size[1]))
  ds.scale = Math.min(1480 / (right - left), 780 / (bottom - top), 1.2)
  ds.offset = [85 / ds.scale - left, 140 / ds.scale - top]
  app.canvas.min_font_size_for_lod = 0
  app.canvas.setDirty(true, true)
  app.extensionManager.setting.set('Comfy.Minimap.Visible', false)
  return null
})()"""

EMPTY = {"nodes": [], "links": [], "groups": [], "version": 0.4, "last_node_id": 0, "last_link_id": 0}
BYPASS = 4  # the mode of a node that hands its input on, in a workflow file


def small(workflow: Mapping[str, Any], *, steps: int, image: str | None = None) -> dict[str, Any]:
    """The workflow with the pack's loaders on a small pipeline, over two ranks of the CPU; a new seed each time."""
    made = copy.deepcopy(dict(workflow))
    seed = time.time_ns() % 2**40
    changed = {
        "Flux2Scheduler": [steps, SIZE, SIZE],
        "EmptyFlux2LatentImage": [SIZE, SIZE, 1],
        "RandomNoise": [seed, "fixed"],
        "LoadImage": [image, "image"],
        "CLIPTextEncode": [demo.EDIT if image else demo.PROMPT],
        "LoraLoaderModelOnly": [LORA, 1.0],
    }
    for node in made["nodes"]:
        node["type"] = kind = LOADERS.get(node["type"], node["type"])
        node.get("properties", {}).pop("models", None)
        if kind == "ImageScaleToTotalPixels":
            # It makes no picture as small as the model's; bypassed, the reference comes through as it is.
            node["mode"] = BYPASS
        # The pack's loaders are taller than the stock ones, and grow by the status line.
        lower = {"TPLoadCLIP": 30, "TPLoadVAE": 130, "LoadImage": 250}.get(kind, 0)
        node["pos"] = [node["pos"][0], node["pos"][1] + lower]
        if kind in LOADERS.values():
            node["widgets_values"] = [MODEL, 2, "cpu", "float32", "keep"]
            node["properties"] = {"Node name for S&R": kind}
            node["inputs"] = []
        elif kind == "TPSampler":
            node["widgets_values"][:2] = [seed, "fixed"]
        elif kind in changed:
            node["widgets_values"] = changed[kind]
    # The note speaks of the real model's files.
    made["nodes"] = [node for node in made["nodes"] if node["type"] != "MarkdownNote"]
    return made


def png(scene: draw.Scene) -> bytes:
    """A drawn picture as a file."""
    file = io.BytesIO()
    Image.fromarray(draw.to_pixels(draw.draw([scene], SIZE))[0]).save(file, "PNG")
    return file.getvalue()


def workflow(word: str) -> dict[str, Any]:
    """The workflow whose file name holds `word`."""
    (path,) = [path for path in WORKFLOWS if word in path.stem]
    return json.loads(path.read_text())


def errors(seen: Mapping[str, Any]) -> list[str]:
    """Errors in the page's console, without what the frontend itself says."""
    return [text for text in seen["consoleErrors"] if not any(own in text for own in FRONTENDS_OWN)]


def node_id(of: Mapping[str, Any], kind: str) -> int:
    return next(node["id"] for node in of["nodes"] if node["type"] == kind)


@pytest.fixture(scope="module")
def pipeline(comfy: ComfyServer) -> None:
    """The pack's small FLUX.2 among ComfyUI's models."""
    folder = comfy.models / "diffusers" / MODEL
    if not folder.is_dir():
        shutil.copytree(pipeline_folder(), folder)
    (comfy.models / "loras").mkdir(exist_ok=True)
    shutil.copy(pipeline_folder() / "lora" / LORA_NAME, comfy.models / "loras" / LORA)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_opens_without_a_missing_node(browser, path: Path):
    seen = browser.open(path)
    assert seen["missingNodeTypes"] == []
    assert seen["validationErrors"] == []
    assert errors(seen) == []
    assert seen["apiPrompt"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_a_thumbnail_for_the_template_browser(path: Path):
    with Image.open(path.with_suffix(".jpg")) as picture:
        assert picture.format == "JPEG" and picture.width <= 1024
    assert path.with_suffix(".jpg").stat().st_size <= LARGEST_PICTURE


def test_run_shows_progress_preview_status_line_and_picture(browser, pipeline):
    steps = 150
    graph = small(workflow("text_to_image_tp"), steps=steps)
    loader, sampler = node_id(graph, "TPLoadModel"), node_id(graph, "TPSampler")
    seen = browser.open(
        graph,
        name="product-text-to-image",
        run=True,
        timeout_s=500,
        watch={"sampler": line_of(sampler), "loader": line_of(loader), "fit": FIT},
        evaluate={
            "saved": f"app.graph.serialize().nodes.find((n) => n.id === {sampler}).widgets_values.length",
            "height": f"app.graph.getNodeById({sampler}).widgets.find((w) => w.name === 'tp_status')"
            ".element.getBoundingClientRect().height",
            "sent": f"app.graphToPrompt().then((p) => Object.keys(p.output['{sampler}'].inputs))",
        },
    )
    assert seen["missingNodeTypes"] == [] and errors(seen) == []
    run = seen["run"]
    assert run["outcome"] == "success", run["error"]
    shown = [entry for entry in run["progress"] if entry["node"] == str(sampler)]
    assert [entry["value"] for entry in shown] == list(range(1, steps + 1))
    assert run["previews"] >= 2 and run["previewShown"]
    assert any("%" in title for title in run["titles"])
    (image,) = run["images"]
    assert (image["type"], image["width"], image["height"]) == ("SaveImage", SIZE, SIZE)

    lines = [line for line in run["watched"]["sampler"] if line]
    moving = [line for line in lines if f"/{steps} · " in line and "s/step" in line and line.endswith("left")]
    assert len(moving) >= 2, lines
    assert all(line.startswith("2 ranks · ") and " each · step " in line for line in moving)
    assert f"{steps} steps in " in lines[-1]
    assert run["watched"]["loader"][-1] == lines[-1]
    assert seen["evaluated"]["height"] >= 8, "the line cannot be seen"
    # The line is neither saved nor sent.
    node = next(node for node in graph["nodes"] if node["id"] == sampler)
    assert seen["evaluated"]["saved"] == len(node["widgets_values"])
    assert "tp_status" not in seen["evaluated"]["sent"]
    keep(seen["screenshots"][-1], "text_to_image.png")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_paints_by_the_run_button(browser, comfy, pipeline, path: Path):
    graph = json.loads(path.read_text())
    image = None
    if any(node["type"] == "LoadImage" for node in graph["nodes"]):
        image = comfy.upload_image(png(draw.Scene("circle", "red", "white")), "every.png")
    # A picture is shown by a node that is in sight.
    seen = browser.open(
        small(graph, steps=2, image=image), name="product-every", run=True, watch={"fit": FIT}
    )
    assert seen["missingNodeTypes"] == [] and seen["run"]["outcome"] == "success", seen["run"]["error"]
    assert [image["width"] for image in seen["run"]["images"] if image["type"] == "SaveImage"] == [SIZE]


def test_a_picture_of_the_demo_dropped_on_the_page_opens_the_graph_that_painted_it(
    browser, comfy, pipeline, tmp_path
):
    graph = demo.text_to_image(demo.PROMPT, ranks=2, devices="cpu", seed=3, steps=2, lora=False)
    for name, part in (("model", "model"), ("clip", "text_encoder"), ("vae", "vae")):
        graph[name]["inputs"][part] = MODEL
    picture, _ = demo.render(comfy, graph, tmp_path / "picture.png")
    assert json.loads(picture.with_suffix(".json").read_text()) == graph
    drop = f"""(async () => {{
      const bytes = Uint8Array.from(atob('{base64.b64encode(picture.read_bytes()).decode()}'), (c) => c.charCodeAt(0))
      await app.handleFile(new File([bytes], 'picture.png', {{ type: 'image/png' }}))
      return app.graphToPrompt().then((p) => [p.output, app.graph.serialize()])
    }})()"""
    prompt, dropped = browser.open(EMPTY, evaluate={"opened": drop})["evaluated"]["opened"]
    assert {one["class_type"]: one["inputs"].keys() for one in prompt.values()} == {
        one["class_type"]: one["inputs"].keys() for one in graph.values()
    }
    seen = browser.open(dropped, name="product-dropped", run=True, watch={"fit": FIT})
    assert seen["run"]["outcome"] == "success", seen["run"]["error"]


def test_cancel_ends_the_run_and_the_line_comes_to_rest(browser, pipeline):
    graph = small(workflow("text_to_image_tp"), steps=3000)
    sampler = node_id(graph, "TPSampler")
    seen = browser.open(
        graph,
        name="product-cancel",
        run=True,
        cancel_at_progress=20,  # so that the line has had time to move
        cancel_in_node=sampler,  # a load has its progress too
        timeout_s=500,
        watch={"sampler": line_of(sampler)},
        evaluate={"line": line_of(sampler)},
    )
    assert seen["run"]["outcome"] == "interrupted"
    assert seen["run"]["cancelSeconds"] < 10
    assert any("/3000" in (line or "") for line in seen["run"]["watched"]["sampler"])
    assert seen["evaluated"]["line"].startswith("2 ranks · ") and "step" not in seen["evaluated"]["line"]


def test_a_stock_sampler_moves_the_line_of_the_loader(browser, pipeline):
    graph = small(workflow("stock_sampler"), steps=30)
    loader = node_id(graph, "TPLoadModel")
    seen = browser.open(
        graph, name="product-stock", run=True, timeout_s=500, watch={"loader": line_of(loader), "fit": FIT}
    )
    assert seen["run"]["outcome"] == "success", seen["run"]["error"]
    lines = [line for line in seen["run"]["watched"]["loader"] if line]
    assert [line for line in lines if "/30 · " in line and line.endswith("left")], lines
    assert "30 steps in " in lines[-1]


def test_an_edit_with_a_reference_runs_from_the_browser(browser, comfy, pipeline):
    picture = comfy.upload_image(png(draw.Scene("circle", "red", "white")), "reference.png")
    graph = small(workflow("edit"), steps=12, image=picture)
    seen = browser.open(graph, name="product-edit", run=True, timeout_s=500, watch={"fit": FIT})
    assert seen["run"]["outcome"] == "success", seen["run"]["error"]
    assert [image["width"] for image in seen["run"]["images"] if image["type"] == "SaveImage"] == [SIZE]
    keep(seen["screenshots"][-1], "edit.png")


def test_the_help_pages_and_languages_are_served_where_the_frontend_asks_for_them(comfy: ComfyServer):
    served = comfy.get("/i18n")
    for language in ("en", "es", "ja", "zh"):
        texts = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
        assert served[language]["nodeDefs"]["TPSampler"] == texts["TPSampler"]
        page = ROOT / "comfy_tp_nodes" / "web" / "docs" / "TPSampler" / f"{language}.md"
        status, body = comfy.request(f"/extensions/comfy-tp/docs/TPSampler/{language}.md")
        assert (status, body.decode()) == (200, page.read_text(encoding="utf-8"))


def keep(screenshot: str, name: str) -> None:
    """With COMFY_TP_WRITE_SCREENSHOTS=1, the picture for the docs, in few colours."""
    if not KEEP:
        return
    with Image.open(screenshot) as picture:
        shown = picture.convert("RGB").crop((0, 0, 1600, 700))
        small = shown.resize((1280, 560), Image.Resampling.LANCZOS)
    # By octree: a median cut would give the painted picture, which is small, none of the colours.
    for colours in (256, 128, 64):
        small.quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            IMAGES / name, optimize=True
        )
        if (IMAGES / name).stat().st_size <= LARGEST_PICTURE:
            return
