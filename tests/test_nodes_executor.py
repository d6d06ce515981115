"""ComfyUI's own executor with its caches: a MODEL that is dropped in the middle of a prompt, and one that is refused."""

from __future__ import annotations

import gc
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy_inprocess import conditioning, in_comfy, latent, save_small_model, tp_model  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("in_comfy")

NAME = "executor-flux2"
IDLE = 0.2


@pytest.fixture(autouse=True)
def folder(in_comfy):  # noqa: F811
    path = in_comfy / "models/diffusion_models" / NAME
    return path if path.is_dir() else save_small_model(path, seed=41)


class Given:
    """A test's node: a conditioning and an empty latent."""

    RETURN_TYPES = ("CONDITIONING", "LATENT")
    FUNCTION = "give"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def give(self) -> tuple[Any, Any]:
        return conditioning(), latent()


class Patched:
    """A test's node: a MODEL that cannot be honoured, and beside it a latent."""

    RETURN_TYPES = ("MODEL", "LATENT")
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any, Any]:
        model = model.clone()
        model.set_injections("bypass_lora", [SimpleNamespace(inject=print, eject=print)])
        return model, latent()


class Sees:
    """A test's node at the end of the graph, which looks at what is on the ranks when all else has run."""

    RETURN_TYPES = ()
    FUNCTION = "see"
    OUTPUT_NODE = True
    seen: list[Any] = []
    look: Any = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"latent": ("LATENT",), "again": ("INT", {"default": 0})}}

    def see(self, latent: Any, again: int) -> dict[str, Any]:
        Sees.seen.append((latent["samples"], Sees.look()))
        return {}


class Runner:
    """ComfyUI's executor and queue as its main loop uses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: str, **cache_args: Any):
        import execution
        import nodes

        from comfy_tp.comfy_tp_nodes.nodes.load_model import LoadTPModel

        for name, node in {
            "TPLoadModel": LoadTPModel,
            "Given": Given,
            "Patched": Patched,
            "Sees": Sees,
        }.items():
            monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, name, node)
        monkeypatch.setattr(Sees, "seen", [])
        self.server = SimpleNamespace(
            client_id=None, last_node_id=None, send_sync=lambda *_: None, queue_updated=lambda: None
        )
        self.queue = self.server.prompt_queue = execution.PromptQueue(self.server)
        # Where the pack finds the server that serves pages.
        served = SimpleNamespace(PromptServer=SimpleNamespace(instance=self.server))
        monkeypatch.setitem(sys.modules, "server", served)
        kind = getattr(execution.CacheType, cache)
        self.executor = execution.PromptExecutor(self.server, cache_type=kind, cache_args=cache_args)
        self.status = execution.PromptQueue.ExecutionStatus
        self._count = 0

    def run(self, prompt: dict[str, Any]) -> dict[str, Any] | None:
        """Run it from the queue; the error that ComfyUI told, if any."""
        self._count += 1
        self.queue.put((self._count, f"prompt {self._count}", prompt, {}, ["sees"], {}))
        entry, item = self.queue.get()
        try:
            self.executor.execute(prompt, entry[1], {}, ["sees"])
        finally:
            status = self.status(status_str="success", completed=True, messages=[])
            self.queue.task_done(item, {}, status)
        errors = [told for name, told in self.executor.status_messages if name == "execution_error"]
        return errors[0] if errors else None


def graph(model: list[Any], sampled: bool = True, again: int = 0) -> dict[str, Any]:
    sampler = {
        **{"seed": 7, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"},
        **{"denoise": 1.0, "model": model, "positive": ["given", 0], "negative": ["given", 0]},
        "latent_image": ["given", 1],
    }
    loader = {"model": NAME, "degree": 2, "devices": "cpu", "dtype": "default", "policy": "keep"}
    nodes = {
        "loader": ("TPLoadModel", loader),
        "given": ("Given", {}),
        "patched": ("Patched", {"model": ["loader", 0]}),
        "sampler": ("KSampler", sampler),
        "sees": ("Sees", {"latent": ["sampler", 0] if sampled else ["patched", 1], "again": again}),
    }
    return {
        name: {"class_type": kind, "inputs": inputs}
        for name, (kind, inputs) in nodes.items()
        if name != "patched" or not sampled or model[0] == "patched"
    }


def sharded() -> Any:
    from comfy_tp.comfy_tp_nodes.sharded import known_models

    return next((one for one in known_models() if one.source.path.endswith(NAME)), None)


def wait_for_idle() -> tuple[int, bool]:
    """Some idle times after now: how many of ComfyUI's model objects use the model, and whether it is on its ranks."""
    gc.collect()
    time.sleep(4 * IDLE)
    found = sharded()
    return (found._users, found.loaded) if found is not None else (0, False)


@pytest.fixture
def short_idle(monkeypatch):
    from comfy_tp.comfy_tp_nodes import sharded as module

    tp_model().sharded.load()  # keeps the ranks
    monkeypatch.setattr(module, "IDLE_SECONDS", IDLE)
    monkeypatch.setattr(Sees, "look", staticmethod(wait_for_idle))


@pytest.mark.parametrize("cache", ["RAM_PRESSURE", "NONE"])
def test_a_model_that_the_cache_drops_in_the_middle_of_a_prompt_stays_on_its_ranks_until_its_end(
    monkeypatch, short_idle, cache
):
    import execution

    if not hasattr(execution, "RAM_CACHE_LARGE_INTERMEDIATE") and cache == "RAM_PRESSURE":
        pytest.skip("the RAM cache of this ComfyUI drops no output of the prompt that runs")
    # More memory is to be free than any machine has, so that the RAM cache drops all it may.
    runner = Runner(monkeypatch, cache, ram=1e6, ram_inactive=1e6, lru=0)
    assert runner.run(graph(["loader", 0])) is None
    (_, (users, loaded)) = Sees.seen[0]
    assert users == 0, "ComfyUI has kept the MODEL, and nothing was tested"
    assert loaded
    assert runner.run(graph(["loader", 0], again=1)) is None
    (first, _), (second, (_, loaded)) = Sees.seen
    assert loaded and torch.equal(first, second)
    deadline = time.monotonic() + 20
    while sharded() is not None and sharded().loaded:
        assert time.monotonic() < deadline, "the shards were never freed after the prompt"
        time.sleep(0.05)


def test_a_model_that_cannot_be_honoured_is_refused_by_its_sampler_and_never_ends_the_executor(monkeypatch):
    runner = Runner(monkeypatch, "LRU", lru=100, ram=0, ram_inactive=0)
    monkeypatch.setattr(Sees, "look", staticmethod(lambda: None))
    # The node runs for its latent alone, and its MODEL waits in the cache.
    assert runner.run(graph(["patched", 0], sampled=False)) is None
    error = runner.run(graph(["patched", 0]))
    assert error["node_type"] == "KSampler"
    assert "cannot honour injections (bypass_lora; a Load LoRA (Bypass) node" in error["exception_message"]
    assert runner.run(graph(["loader", 0])) is None
    assert Sees.seen[-1][0].isfinite().all()
