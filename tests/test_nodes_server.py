"""The nodes in a real ComfyUI: a queue of prompts, Cancel, unloading, wrong input, and the end of the process."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from comfy_inprocess import save_small_model
from conftest import test_packs
from group_processes import SOON, command_line, folder_of, launcher_of, still_running
from safetensors.torch import load_file

from comfy_tp.comfyui import (
    ComfyServer,
    ComfyUIError,
    ExecutionFailed,
    ExecutionInterrupted,
    PromptRefused,
)

MODEL = "server-flux2"
RUNS = itertools.count()


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    save_small_model(comfy.models / "diffusion_models" / MODEL)
    return comfy


def graph(
    seed: int = 1, steps: int = 3, *, prefix: str = "image", size: int = 64, **changes: Any
) -> dict[str, Any]:
    """Text to image through the stock KSampler, and the status after it. Changes are to the loader's inputs.

    The sampler has an input that it does not read, so that newer ComfyUIs, which remember more than the last prompt, run
    it for equal graphs too.
    """
    loader = {"model": MODEL, "degree": 2, "devices": "auto", "dtype": "default", "policy": "keep", **changes}
    width = loader.pop("width", 48)
    sampler = {
        "model": ["1", 0],
        "seed": seed,
        "steps": steps,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": ["2", 0],
        "negative": ["3", 0],
        "latent_image": ["4", 0],
        "denoise": 1.0,
        "run": next(RUNS),
    }
    empty = {"width": size, "height": size, "batch_size": 1}
    return {
        "1": {"class_type": "TPLoadModel", "inputs": loader},
        "2": {"class_type": "TPTestConditioning", "inputs": {"seed": 1, "length": 77, "width": width}},
        "3": {"class_type": "TPTestConditioning", "inputs": {"seed": 2, "length": 77, "width": width}},
        "4": {"class_type": "EmptyFlux2LatentImage", "inputs": empty},
        "5": {"class_type": "KSampler", "inputs": sampler},
        "6": {"class_type": "SaveLatent", "inputs": {"samples": ["5", 0], "filename_prefix": prefix}},
        "7": {"class_type": "TPStatus", "inputs": {"after": ["5", 0]}},
    }


def latents(server: ComfyServer, prefix: str) -> list:
    """The saved latents of a prefix, oldest first."""
    return [load_file(file)["latent_tensor"] for file in sorted(server.output.glob(f"{prefix}_*.latent"))]


def progress_of(stream: Any, prompt_id: str) -> list:
    return [event for event in stream.of_type("progress") if event.data.get("prompt_id") == prompt_id]


def status(entry: dict[str, Any]) -> str:
    return "".join(entry["outputs"]["7"]["text"])


def rank_pids(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"rank \d+ on \S+, pid (\d+)", text)]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_comfyui_tells_of_the_nodes_and_offers_the_model(server):
    info = server.object_info("TPLoadModel")
    assert list(info["input"]["required"]) == ["model", "degree", "devices", "dtype", "policy"]
    assert MODEL in info["input"]["required"]["model"][1]["options"]
    assert info["output"] == ["MODEL"]
    assert {"TPStatus", "TPUnloadModel"} <= server.object_info().keys()


def test_three_prompts_with_a_cancel_in_the_second(server):
    start = len(server.log())
    with server.events() as events:
        first = server.post_prompt(graph(1, prefix="queue"), client_id=events.client_id)
        second = server.post_prompt(graph(2, steps=2000, prefix="never"), client_id=events.client_id)
        third = server.post_prompt(graph(3, prefix="queue"), client_id=events.client_id)
        server.wait(first, 280)
        events.wait_for(lambda stream: stream.previews and progress_of(stream, second), 60)
        server.interrupt()
        with pytest.raises(ExecutionInterrupted):
            server.wait(second, 30)
        entry = server.wait(third, 120)
    assert len(latents(server, "queue")) == 2 and not latents(server, "never")
    log = server.log()[start:]
    assert log.count(f"Loaded {MODEL}") <= 1  # at most by the first
    pids = rank_pids(status(entry))
    assert len(pids) == 2 and alive(pids) == pids


def free_until(server: ComfyServer, text: str, start: int) -> None:
    """Ask ComfyUI to free its memory until its log tells of it: a request that comes just when its worker has read
    the flags and collects garbage waits there for the next prompt."""
    for _ in range(6):
        server.free(unload_models=True, free_memory=True)
        with contextlib.suppress(ComfyUIError):
            server.wait_for_log(text, timeout_s=5, start=start)
            return
    server.wait_for_log(text, timeout_s=0, start=start)


def test_free_unloads_the_shards_and_the_next_prompt_gives_the_same_image(server):
    entry = server.run(graph(5, prefix="free"), 280)
    pids = rank_pids(status(entry))
    start = len(server.log())
    free_until(server, f"Unloading the shards of {MODEL}", start)
    again = server.run(graph(5, prefix="free"), 120)
    server.wait_for_log(f"Loaded {MODEL}", start=start)
    before, after = latents(server, "free")
    assert before.equal(after)
    assert rank_pids(status(again)) == pids  # the ranks stayed


def test_a_loader_that_runs_again_reads_nothing(server):
    server.run(graph(6, prefix="again"), 280)
    start = len(server.log())
    server.run(graph(6, prefix="again", policy="park"), 120)
    log = server.log()[start:]
    assert f"Load TP Model: {MODEL}" in log and f"Loaded {MODEL}" not in log
    before, after = latents(server, "again")
    assert before.equal(after)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"degree": 3}, "tp_degree=3 must divide the 4 attention heads"),
        ({"degree": 9}, "degree 9 is more than the 8 ranks that the CPU may run. Set degree to 8 or less."),
        ({"devices": "cuda:9"}, "'cuda:9' does not exist"),
        ({"model": "gone"}, "there is no 'gone'"),
        ({"model": "../gone"}, "leads out of ComfyUI's model folders"),
        ({"dtype": "int3"}, "dtype: 'int3' is not one of the choices"),
        ({"width": 15360}, "The conditioning is 15360 wide, but this model takes 48"),
    ],
)
def test_wrong_input_says_what_to_do_and_the_next_prompt_works(server, changes, words):
    try:
        server.run(graph(7, **changes), 280)
        pytest.fail("wrong input was accepted")
    except ExecutionFailed as failed:
        assert words in failed.exception_message.splitlines()[0]
    except PromptRefused as refused:  # newer servers compare a choice with the list before anything runs
        ((name, value),) = changes.items()
        assert f"Value not in list: {name}: '{value}' not in" in str(refused)
    assert server.alive
    assert server.run(graph(8, steps=1), 280)["status"]["status_str"] == "success"


def test_unload_tp_model_ends_the_ranks_and_hands_its_input_on(server):
    prompt = graph(9, prefix="unload")
    pids = rank_pids(status(server.run(prompt, 280)))
    prompt["8"] = {"class_type": "TPUnloadModel", "inputs": {"trigger": ["5", 0]}}
    prompt["6"]["inputs"] = {"samples": ["8", 0], "filename_prefix": "unload"}
    prompt["7"]["inputs"] = {"after": ["8", 0]}
    entry = server.run(prompt, 120)
    assert "Ranks:" not in status(entry)
    assert alive(pids) == []
    before, after = latents(server, "unload")
    assert before.equal(after)
    assert rank_pids(status(server.run(graph(10), 280)))


# A SIGKILL is in test_trust.
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_nothing_of_the_ranks_outlives_comfyui(signals):
    with ComfyServer(custom_nodes=test_packs()) as server:
        save_small_model(server.models / "diffusion_models" / MODEL)
        pids = rank_pids(status(server.run(graph(1, steps=1), 280)))
        assert len(alive(pids)) == 2
        launcher, folder = launcher_of(pids[0]), folder_of(pids[0])
        assert "launcher" in command_line(launcher) and folder.is_dir()
        for number in signals:
            os.kill(server.pid, number)
            time.sleep(0.1)
        assert still_running([*pids, launcher], SOON) == []
        deadline = time.monotonic() + SOON
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not folder.exists()
