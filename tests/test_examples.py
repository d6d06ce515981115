"""The example script runs as the README says: it queues an API workflow, follows it and saves its picture."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from comfy_tp.comfyui import ComfyServer, demo
from comfy_tp.core.small.pipeline import pipeline_folder
from comfy_tp.tools.small import draw

RUN = Path(__file__).parents[1] / "workflows" / "api" / "run.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def graph(comfy: ComfyServer) -> dict:
    """The demo's graph on the small FLUX.2."""
    folder = comfy.models / "diffusers" / demo.MODEL
    if not folder.is_dir():
        shutil.copytree(pipeline_folder(), folder)
    return demo.text_to_image(demo.PROMPT, ranks=2, devices="cpu", seed=3, steps=8)


def test_run_py_saves_the_picture_of_an_api_workflow(comfy, graph, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    done = run(tmp_path / "graph.json", tmp_path / "picture.png", comfy.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node sample: 8/8" in done.stdout
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (demo.SIZE, demo.SIZE)
        assert draw.judge(np.asarray(picture.convert("RGB"))).triple == ("circle", "red", "blue")


def test_run_py_says_why_a_workflow_was_refused_or_failed(comfy, graph, tmp_path):
    graph = json.loads(json.dumps(graph))
    graph["sample"]["inputs"]["steps"] = 0
    (tmp_path / "refused.json").write_text(json.dumps(graph))
    done = run(tmp_path / "refused.json", tmp_path / "picture.png", comfy.url)
    assert done.returncode == 1 and "ComfyUI refused the workflow" in done.stderr
    graph["sample"]["inputs"]["steps"] = 2
    graph["model"]["inputs"]["degree"] = 3
    (tmp_path / "failed.json").write_text(json.dumps(graph))
    done = run(tmp_path / "failed.json", tmp_path / "picture.png", comfy.url)
    assert done.returncode == 1 and "tp_degree=3 must divide the 4 attention heads" in done.stderr


def test_the_example_is_twenty_lines_beside_its_imports():
    code = ast.parse(RUN.read_text()).body
    assert [type(node) for node in code[-2:]] == [ast.AsyncFunctionDef, ast.Expr]
    assert code[-2].end_lineno - code[-2].lineno <= 20
