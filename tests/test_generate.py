"""The script of the tensor-parallelism page: as a command that starts its own ranks, and under torchrun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops

SIDE = 64
TIMEOUT_S = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """A FLUX.2 pipeline of random weights in the real layout."""
    from random_pipeline import save_pipeline

    return save_pipeline(tmp_path_factory.mktemp("pipeline"))


def arguments(pipeline: Path, output: Path) -> list[str]:
    settings = {"model": pipeline, "prompt": "a red circle", "device": "cpu", "dtype": "float32", "steps": 2}
    settings |= {"width": SIDE, "height": SIDE, "output": output}
    return ["generate", *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


def run(command: list[str]) -> str:
    """Run `command` in a session of its own, which is ended as a whole when it takes too long."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            # torchrun passes SIGTERM on to its ranks, which have sessions of their own.
            process.terminate()
            process.wait(30)
            raise
    assert process.returncode == 0, err[-3000:]
    return out


def difference(one: Path, other: Path) -> int:
    """The largest difference of any channel of any pixel."""
    a, b = Image.open(one).convert("RGB"), Image.open(other).convert("RGB")
    assert a.size == b.size == (SIDE, SIDE)
    assert max(high - low for low, high in a.getextrema()) > 8  # a picture, not one colour
    return max(high for _, high in ImageChops.difference(a, b).getextrema())


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory) -> Path:
    """The picture of one rank."""
    output = tmp_path_factory.mktemp("alone") / "one.png"
    run([sys.executable, "-m", "comfy_tp.core.cli", *arguments(pipeline, output), "--tp", "1"])
    return output


def test_two_ranks_of_its_own_paint_the_picture_of_one(pipeline, alone, tmp_path):
    output = tmp_path / "two.png"
    printed = run(
        [sys.executable, "-m", "comfy_tp.core.cli", *arguments(pipeline, output), "--tp", "2", "--json"]
    )
    figures = json.loads(printed.strip().splitlines()[-1])
    assert figures["ranks"] == 2
    assert figures["image"] == str(output)
    assert difference(output, alone) <= 1


def test_R8_the_documented_script_runs_under_torchrun(pipeline, alone, tmp_path):
    output = tmp_path / "torchrun.png"
    script = Path(__file__).with_name("tensor_parallel_flux2.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--log-dir", str(tmp_path / "logs")]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    run([*torchrun, *meeting, str(script), str(pipeline), str(output)])
    assert difference(output, alone) <= 1


@pytest.mark.soak  # what refuses it is in test_requirements
def test_a_degree_that_does_not_divide_the_heads_is_refused(pipeline, tmp_path):
    command = [
        sys.executable,
        "-m",
        "comfy_tp.core.cli",
        *arguments(pipeline, tmp_path / "x.png"),
        "--tp",
        "3",
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("comfy-tp generate: tp_degree=3 must divide the 4 attention heads")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "0"], "--steps is 0. Choose 1 or more."),
        (["--height", "-64"], "--height is -64. Choose 1 or more."),
        (["--tp", "-1"], "--tp is -1. Choose 1 or more"),
        (["--seed", str(2**64)], "Choose one from 0 to 18446744073709551615."),
        (["--output", "picture"], "'picture' does not end in one of .png"),
        (["--output", "/proc/none/x.png"], "'/proc/none/x.png' cannot be written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_would_fail_at_the_end_is_refused_before_anything_is_loaded(words, text, monkeypatch, capsys):
    from comfy_tp.core import cli
    from comfy_tp.core.cli import generate

    monkeypatch.setattr(generate, "run_ranks", None)
    assert cli.main(["generate", "--model", "none", "--prompt", "a cat", "--device", "cpu", *words]) == 1
    assert text in capsys.readouterr().err


def test_a_pipeline_without_a_tokenizer_is_refused_by_its_name(pipeline, tmp_path):
    from torch import distributed as dist

    from comfy_tp.core.cli.generate import generate
    from comfy_tp.core.errors import CheckpointError

    bare = shutil.copytree(pipeline, tmp_path / "bare")
    shutil.rmtree(bare / "tokenizer")
    settings = {"model": str(bare), "device": "cpu", "dtype": "float32"}
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(CheckpointError, match=r"bare: the parts beside the transformer cannot be loaded \("):
        generate(settings, store, 0, 1)
