"""The harness itself, on stock nodes: a real ComfyUI boots, runs graphs, and its frontend works in a browser."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from comfy_tp.comfyui import (
    ComfyServer,
    ComfyUIError,
    ExecutionFailed,
    ExecutionInterrupted,
    PromptRefused,
    comfyui_path,
)
from comfy_tp.core.errors import ConfigError


def slow_graph(steps: int = 4, milliseconds: int = 50, seed: int = 0) -> dict:
    inputs = {"steps": steps, "milliseconds": milliseconds, "seed": seed}
    return {
        "1": {"class_type": "TPTestSlowImage", "inputs": inputs},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "harness"}},
    }


def slow_workflow(steps: int = 4, milliseconds: int = 50, source: str = "TPTestSlowImage") -> dict:
    """The same in UI format. The seed is fixed, and another one in each test, so that nothing is cached."""
    seed = time.time_ns() % 2**40
    return {
        "last_node_id": 2,
        "last_link_id": 1,
        "nodes": [
            {
                "id": 1,
                "type": source,
                "pos": [100, 100],
                "size": [300, 150],
                "flags": {},
                "order": 0,
                "mode": 0,
                "inputs": [],
                "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [1]}],
                "properties": {},
                "widgets_values": [steps, milliseconds, seed, "fixed"],
            },
            {
                "id": 2,
                "type": "SaveImage",
                "pos": [500, 100],
                "size": [300, 300],
                "flags": {},
                "order": 1,
                "mode": 0,
                "inputs": [{"name": "images", "type": "IMAGE", "link": 1}],
                "outputs": [],
                "properties": {},
                "widgets_values": ["harness"],
            },
        ],
        "links": [[1, 1, 0, 2, 0, "IMAGE"]],
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def test_comfyui_knows_its_own_nodes_and_loads_this_pack(comfy: ComfyServer):
    nodes = comfy.object_info()
    assert {"KSampler", "SamplerCustomAdvanced", "EmptyFlux2LatentImage", "SaveImage"} <= nodes.keys()
    (imported,) = [line for line in comfy.log().splitlines() if line.endswith("custom_nodes/comfy-tp")]
    assert "seconds" in imported and "FAILED" not in imported


def test_a_stock_graph_runs_and_its_image_comes_back(comfy: ComfyServer):
    colour = time.time_ns() % 256
    graph = {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": 64, "height": 48, "batch_size": 1, "color": colour},
        },
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "stock"}},
    }
    (png,) = comfy.images(comfy.run(graph, 30))
    image = Image.open(io.BytesIO(png))
    assert image.size == (64, 48)
    assert image.getpixel((0, 0)) == (0, 0, colour)


def test_an_uploaded_image_is_an_input(comfy: ComfyServer):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 24), (10, 200, 30)).save(buffer, "PNG")
    name = comfy.upload_image(buffer.getvalue(), "green.png")
    graph = {
        "1": {"class_type": "LoadImage", "inputs": {"image": name}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    (png,) = comfy.images(comfy.run(graph, 30))
    assert Image.open(io.BytesIO(png)).getpixel((5, 5)) == (10, 200, 30)


def test_progress_and_previews_arrive_over_the_websocket(comfy: ComfyServer):
    with comfy.events() as stream:
        prompt_id = comfy.post_prompt(slow_graph(steps=4, seed=1), client_id=stream.client_id)
        stream.wait_for(lambda s: s.of_type("execution_success"), 30)
    assert [event.data["value"] for event in stream.of_type("progress")] == [1, 2, 3, 4]
    assert {event.data["prompt_id"] for event in stream.of_type("progress")} == {prompt_id}
    assert len(stream.previews) >= 2
    assert Image.open(io.BytesIO(stream.previews[-1].image)).size == (64, 64)
    assert stream.previews[-1].metadata["node_id"] == "1"


def test_a_prompt_is_cancelled_and_the_next_one_runs(comfy: ComfyServer):
    with comfy.events() as stream:
        prompt_id = comfy.post_prompt(
            slow_graph(steps=1000, milliseconds=100, seed=2), client_id=stream.client_id
        )
        stream.wait_for(lambda s: s.of_type("progress"), 30)
        comfy.interrupt(prompt_id)
        with pytest.raises(ExecutionInterrupted, match=f"Prompt {prompt_id} was cancelled"):
            comfy.wait(prompt_id, 30)
    assert comfy.images(comfy.run(slow_graph(steps=1, seed=3), 30))


def test_a_refused_prompt_says_which_node_and_why(comfy: ComfyServer):
    graph = slow_graph()
    graph["1"]["inputs"]["steps"] = 0
    with pytest.raises(
        PromptRefused, match=r"node 1 \(TPTestSlowImage\).*smaller than min.*steps"
    ) as refused:
        comfy.post_prompt(graph)
    assert refused.value.status == 400
    assert "1" in refused.value.node_errors


def test_a_node_that_raises_is_named_with_its_error(comfy: ComfyServer):
    graph = slow_graph()
    graph["1"] = {"class_type": "TPTestRefusal", "inputs": {"text": "no such rank"}}
    with pytest.raises(
        ExecutionFailed, match=r"Node 1 \(TPTestRefusal\) raised ValueError: no such rank"
    ) as failed:
        comfy.run(graph, 30)
    assert failed.value.node_type == "TPTestRefusal"
    assert "raise ValueError(text)" in failed.value.traceback


def test_free_is_accepted_and_the_next_prompt_runs_anew(comfy: ComfyServer):
    comfy.run(slow_graph(steps=1, seed=4), 30)
    comfy.free(unload_models=True, free_memory=True)
    deadline = time.monotonic() + 10
    executed: list = []
    with comfy.events() as stream:
        # ComfyUI drops its cache in its worker thread, at some moment soon after the answer.
        while not executed and time.monotonic() < deadline:
            comfy.run(slow_graph(steps=1, seed=4), 30, client_id=stream.client_id)
            executed = [event for event in stream.of_type("progress") if event.data["node"] == "1"]
    assert executed


def test_the_frontend_opens_a_workflow_and_agrees_on_its_api_form(browser):
    seen = browser.open(slow_workflow(), name="harness-open")
    assert seen["missingNodeTypes"] == []
    assert seen["validationErrors"] == []
    assert seen["consoleErrors"] == []
    assert seen["nodeTypes"] == ["TPTestSlowImage", "SaveImage"]
    assert seen["apiPrompt"]["1"]["class_type"] == "TPTestSlowImage"
    assert seen["apiPrompt"]["1"]["inputs"]["steps"] == 4
    assert seen["apiPrompt"]["2"]["inputs"]["images"] == ["1", 0]
    assert Image.open(seen["screenshots"][0]).size == (1600, 1000)


def test_the_frontend_names_a_missing_node_and_a_broken_workflow(browser):
    workflow = slow_workflow(source="TPNoSuchNode")
    workflow["links"] = [[1, 1, 0, 2, 0]]
    seen = browser.open(workflow, name="harness-broken", evaluate={"page": "document.body.innerText"})
    assert seen["missingNodeTypes"] == ["TPNoSuchNode"]
    assert "links" in " ".join(seen["validationErrors"])
    # In a dialog, or where newer frontends keep errors; the graph itself is a canvas, no text of the page.
    assert "TPNoSuchNode" in " ".join([*seen["dialogs"], seen["evaluated"]["page"]])


def test_the_run_button_shows_progress_a_preview_and_the_picture(browser):
    seen = browser.open(
        slow_workflow(steps=10, milliseconds=150),
        name="harness-run",
        run=True,
        watch={"nodes": "app.graph.nodes.length"},
    )
    run = seen["run"]
    assert run["outcome"] == "success"
    assert [entry["value"] for entry in run["progress"]] == list(range(1, 11))
    assert run["previews"] >= 2
    assert run["previewShown"]
    assert any("%" in title for title in run["titles"])
    assert run["images"] == [{"node": "2", "type": "SaveImage", "width": 64, "height": 48}]
    assert run["watched"] == {"nodes": [2]}


def test_the_cancel_button_ends_the_prompt(browser):
    seen = browser.open(
        slow_workflow(steps=900, milliseconds=50), name="harness-cancel", run=True, cancel_at_progress=3
    )
    assert seen["run"]["outcome"] == "interrupted"
    assert 0 < seen["run"]["cancelSeconds"] < 5
    assert seen["run"]["progress"][-1]["value"] < 500


def test_a_comfyui_that_cannot_start_says_so_with_its_log(tmp_path: Path):
    with pytest.raises(ComfyUIError, match=r"ended while starting, exit status 2(?s:.*)--no-such-option"):
        ComfyServer(base=tmp_path, arguments=["--no-such-option"]).start()


def test_a_comfyui_path_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"COMFYUI_PATH is .* but that is no ComfyUI"):
        comfyui_path()


LEAKING_TEST = """
import subprocess
import sys

def test_that_leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


def test_a_run_that_leaves_a_process_behind_fails_and_ends_it(tmp_path: Path):
    (tmp_path / "conftest.py").write_text(
        (Path(__file__).parent / "conftest.py").read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.2")
    )
    (tmp_path / "test_leak.py").write_text(LEAKING_TEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "processes left behind" in run.stdout
    (line,) = [line for line in run.stdout.splitlines() if "time.sleep(60)" in line]
    assert not is_running(int(line.split(":")[0]))


def is_running(pid: int) -> bool:
    """False for a process that is gone, and for one that has ended and that nobody has waited for."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status
