"""What a user of a real ComfyUI sees when a rank dies or runs out of memory, and what strangers and the end of it leave."""

from __future__ import annotations

import ast
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from comfy_inprocess import save_small_model
from conftest import test_packs
from group_processes import SOON, folder_of, still_running
from test_nodes_server import MODEL, alive, graph, latents, progress_of, rank_pids, status

from comfy_tp.comfyui import ComfyServer, ExecutionFailed

ROOT = Path(__file__).parents[1]
SECOND = "second-flux2"
ROOM = 256 << 20  # address space left to a rank: enough for its threads, too little for a batch of big images


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    save_small_model(comfy.models / "diffusion_models" / MODEL)
    save_small_model(comfy.models / "diffusion_models" / SECOND, seed=9)
    return comfy


def test_a_rank_killed_in_the_middle_of_a_prompt_fails_it_soon_and_the_next_one_gives_the_same_image(server):
    before = rank_pids(status(server.run(graph(21, prefix="kill"), 280)))
    with server.events() as events:
        prompt = server.post_prompt(graph(22, steps=5000), client_id=events.client_id)
        events.wait_for(lambda stream: len(progress_of(stream, prompt)) > 2, 60)
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(ExecutionFailed) as failed:
            server.wait(prompt, 30)
    text = failed.value.exception_message
    assert re.search(
        rf"Rank 1 \(cpu, pid {before[1]}\) was killed by signal 9 .*probably out of memory", text
    )
    assert "the next run starts a new one" in text and "Logs: " in text
    assert still_running(before, SOON) == []
    again = server.run(graph(21, prefix="kill"), 280)
    first, second = latents(server, "kill")
    assert first.equal(second)
    after = rank_pids(status(again))
    assert len(after) == 2 and not set(after) & set(before)


def test_a_rank_without_memory_reaches_comfyui_as_its_own_error(server):
    pids = rank_pids(status(server.run(graph(31, prefix="oom"), 280)))
    limits = resource.prlimit(pids[1], resource.RLIMIT_AS)
    size = int(Path(f"/proc/{pids[1]}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pids[1], resource.RLIMIT_AS, (size + ROOM, limits[1]))
    big = graph(32, size=1024)
    big["4"]["inputs"]["batch_size"] = 8
    with pytest.raises(ExecutionFailed) as failed:
        server.run(big, 120)
    if alive(pids[1:]):
        resource.prlimit(pids[1], resource.RLIMIT_AS, limits)
    assert failed.value.exception_type in ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
    assert failed.value.exception_message.startswith("Rank 1 (cpu) ran out of memory")
    assert "TIPS" in failed.value.exception_message  # ComfyUI's own advice
    again = server.run(graph(31, prefix="oom"), 280)
    first, second = latents(server, "oom")
    assert first.equal(second)
    assert len(rank_pids(status(again))) == 2


def test_the_prompts_of_two_clients_on_two_models_are_not_mixed_up(server):
    jobs = [(MODEL, 41), (SECOND, 41), (MODEL, 42), (SECOND, 42)]
    with server.events() as one, server.events() as other:
        ids = [
            server.post_prompt(
                graph(seed, model=model, prefix=f"mix-{model}-{seed}"),
                client_id=(one if model == MODEL else other).client_id,
            )
            for model, seed in jobs
        ]
        entries = [server.wait(prompt, 280) for prompt in ids]
        for stream, mine in ((one, ids[::2]), (other, ids[1::2])):
            told = {
                event.data["prompt_id"] for event in stream.of_type("progress") if "prompt_id" in event.data
            }
            assert told == set(mine)
    spans = [
        [
            data["timestamp"]
            for kind, data in entry["status"]["messages"]
            if kind in ("execution_start", "execution_success")
        ]
        for entry in entries
    ]
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert len({tuple(rank_pids(status(entry))) for entry in entries}) == 1  # one group holds both models
    mixed = [latents(server, f"mix-{model}-{seed}")[-1] for model, seed in jobs]
    server.free(unload_models=True, free_memory=True)
    for (model, seed), found in zip(reversed(jobs), reversed(mixed), strict=True):
        server.run(graph(seed, model=model, prefix=f"alone-{model}-{seed}"), 280)
        assert latents(server, f"alone-{model}-{seed}")[-1].equal(found), (model, seed)
    assert not mixed[0].equal(mixed[1])


def test_a_second_comfyui_has_its_own_ranks_and_leaves_nothing_when_it_is_killed(server):
    ours = rank_pids(status(server.run(graph(51), 280)))
    with ComfyServer(custom_nodes=test_packs()) as second:
        save_small_model(second.models / "diffusion_models" / MODEL)
        theirs = rank_pids(status(second.run(graph(51), 280)))
        assert len(theirs) == 2 and not set(theirs) & set(ours)
        folders = {folder_of(pid) for pid in theirs}
        (folder,) = folders
        assert folder not in {folder_of(pid) for pid in ours}
        assert (folder / "socket").exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        shared = [path for pid in theirs for path in shared_memory(pid)]
        os.kill(second.pid, signal.SIGKILL)
        assert still_running(theirs, SOON) == []
        deadline = time.monotonic() + SOON
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not folder.exists()
        assert [path for path in shared if os.path.exists(path)] == []
    assert alive(ours) == ours
    assert rank_pids(status(server.run(graph(52), 280))) == ours


def shared_memory(pid: int) -> list[str]:
    """Files of shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted(
        {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    )


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "os.system",
    "os.popen",
}
PICKLING_COLLECTIVES = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
# What runs no code of a model's folder and takes no `trust_remote_code`: classes of diffusers models alone.
MODELS = ("Flux2Transformer2DModel.from_pretrained", "super().from_pretrained")
# How the demo's model was made: run by hand, reads only what it wrote itself.
RECIPE = "tools/small/"


def dangerous(source: str) -> list[str]:
    """Imports, calls and arguments by which data could become code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in PICKLING_COLLECTIVES:
                found.append(name)
            given = {word.arg for word in node.keywords}
            if name.endswith(".from_pretrained") and name not in MODELS and "trust_remote_code" not in given:
                found.append(f"{name} without trust_remote_code")
            for word in node.keywords:
                if (
                    word.arg in ("shell", "trust_remote_code", "allow_pickle")
                    and ast.unparse(word.value) != "False"
                ):
                    found.append(f"{name}({word.arg})")
    return found


@pytest.mark.parametrize("path", ["core/cli/generate.py", "tools/small/evaluate.py", "core/parts/prompts.py"])
def test_every_pipeline_and_tokenizer_is_read_without_code_of_its_folder(path):
    found = dangerous((ROOT / path).read_text())
    assert [call for call in found if "trust_remote_code" in call] == []


def test_nothing_in_the_product_turns_data_into_code():
    paths = [
        ROOT / "__init__.py",
        *ROOT.glob("core/**/*.py"),
        *ROOT.glob("comfy_tp_nodes/**/*.py"),
        *ROOT.glob("comfyui/**/*.py"),
        *ROOT.glob("tools/**/*.py"),
    ]
    found = {path.relative_to(ROOT).as_posix(): dangerous(path.read_text()) for path in paths}
    assert {path: calls for path, calls in found.items() if calls and not path.startswith(RECIPE)} == {}
    for line in (
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "torch.load(path)",
        "dist.broadcast_object_list(parts)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(name, **options)",
    ):
        assert dangerous(line), line
