"""Beside models that stream their weights (DynamicVRAM): what is on the ranks counts, stays, gives way and comes back."""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    save_small_model,
    tp_model,
)
from faked_devices import freeing, load_tp_again, on_devices

from comfy_tp.core.errors import UnsupportedError
from comfy_tp.core.ranks.client import RankGroup

pytestmark = pytest.mark.usefixtures("in_comfy")

NAME = "dynamic-flux2"


@pytest.fixture(autouse=True)
def folder(in_comfy):  # noqa: F811
    path = in_comfy / "models/diffusion_models" / NAME
    return path if path.is_dir() else save_small_model(path, seed=31)


def needs(name: str) -> None:
    """Skip where this ComfyUI has no such name."""
    from comfy_tp.comfy_tp_nodes.seams import _resolve, version

    try:
        _resolve(name)
    except (ImportError, AttributeError):
        pytest.skip(f"ComfyUI {version()} has no {name}")


def image(model: Any, **changes: Any) -> torch.Tensor:
    return ksampler(model, conditioning(), conditioning(seed=2), latent(), **{"steps": 2, **changes})


def streaming(device: str, size: int) -> Any:
    """A model of `size` bytes that can stream its weights, as ComfyUI's memory management sees it."""
    import comfy.model_patcher

    class Streaming(comfy.model_patcher.ModelPatcher):
        unloaded_pins = 0

        def is_dynamic(self) -> bool:
            return True

        def partially_load(self, device_to: Any, *args: Any, **kwargs: Any) -> None:
            self.model.device = device_to
            self.model.model_loaded_weight_memory = size // 10

        def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any, **kwargs: Any) -> int:
            return memory_to_free

        def partially_unload_ram(self, ram_to_unload: int, subsets: Any = ()) -> int:
            self.unloaded_pins += ram_to_unload
            return ram_to_unload

        unregister_inactive_pins = partially_unload_ram

        def unpin_all_weights(self) -> None:
            """Nothing is pinned."""

        def unpatch_model(self, *args: Any, **kwargs: Any) -> None:
            """Nothing is patched."""

    module = torch.nn.Module()
    module.dynamic_pins = {torch.device(device): {"active": False, "current_prompt": False}}
    return Streaming(module, torch.device(device), torch.device("cpu"), size=size)


def no_margins(management: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "extra_reserved_memory", lambda: 0)
    monkeypatch.setattr(management, "minimum_inference_memory", lambda: 0)


def listed(management: Any, patcher: Any) -> bool:
    return any(entry.model is patcher for entry in management.current_loaded_models)


@pytest.fixture
def on_two_gpus(monkeypatch):
    """The loaded MODEL of one loader node with the policy keep, its shards passing for lying on cuda:0 and cuda:1."""
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    yield load_tp_again(loaded)
    management.unload_all_models()
    assert not loaded.sharded.loaded


def test_nothing_of_ours_is_a_model_that_streams_its_weights():
    needs("comfy.model_patcher.ModelPatcher.is_dynamic")
    from test_seams import our_classes

    patchers = [kind for kind in our_classes() if hasattr(kind, "is_dynamic")]
    assert {"ShardedPatcher", "StubPatcher", "ComponentPatcher", "RemoteVAE"} <= {
        kind.__name__ for kind in patchers
    }
    assert not tp_model().is_dynamic() and not tp_model().clone().is_dynamic()
    for kind in patchers:
        assert not kind.is_dynamic(SimpleNamespace(patcher=tp_model())), kind


def test_every_class_that_is_made_from_one_of_comfyuis_calls_its_constructor():
    from test_seams import our_classes

    own = [kind for kind in our_classes() if "__init__" in vars(kind)]
    assert len(own) > 5
    assert [kind for kind in own if "super().__init__(" not in inspect.getsource(kind.__init__)] == []


@pytest.mark.parametrize("times", [2, 100])
def test_an_encoder_that_can_stream_takes_no_shards_away_however_large_it_is(on_two_gpus, monkeypatch, times):
    needs("comfy.model_patcher.ModelPatcher.is_dynamic")
    model = on_two_gpus
    loads = model.sharded.loads
    management = freeing(monkeypatch, 1000)
    no_margins(management, monkeypatch)
    encoder = streaming("cuda:0", times * model.model_size())
    for _ in range(2):
        management.load_models_gpu([encoder], memory_required=500)
        assert model.sharded.loaded and listed(management, encoder)
        assert sum(entry.model is model for entry in management.current_loaded_models) == 1
    freeing(monkeypatch, 1 << 40)
    management.load_models_gpu([model, *model.get_nested_additional_models()])
    assert model.sharded.loads == loads


def test_shards_give_way_to_what_even_a_streaming_model_cannot_do_without(on_two_gpus, monkeypatch):
    needs("comfy.model_patcher.ModelPatcher.is_dynamic")
    model = on_two_gpus
    management = freeing(monkeypatch, 1000)
    no_margins(management, monkeypatch)
    decoder = streaming("cuda:0", 10)
    management.load_models_gpu([decoder], memory_required=2 * model.model_size())
    assert not model.sharded.loaded and not listed(management, model)


def test_shards_give_way_to_a_model_that_cannot_stream_and_to_unload(on_two_gpus, monkeypatch):
    import comfy.model_patcher

    model = on_two_gpus
    management = freeing(monkeypatch, 1000)
    no_margins(management, monkeypatch)
    module = torch.nn.Module()
    whole = comfy.model_patcher.ModelPatcher(
        module, torch.device("cuda:0"), torch.device("cpu"), size=model.model_size() * 2
    )
    monkeypatch.setattr(whole, "partially_load", lambda *_, **__: 0)
    management.load_models_gpu([whole])
    assert not model.sharded.loaded and not listed(management, model)


@pytest.mark.parametrize("policy", ["release", "park"])
def test_shards_that_are_to_give_way_do_so_to_an_encoder_that_can_stream_too(monkeypatch, policy):
    needs("comfy.model_patcher.ModelPatcher.is_dynamic")
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    monkeypatch.setattr("comfy_tp.core.calls.remote.RemoteModel.park", lambda remote, *, poll=None: 1)
    model = load_tp_again(loaded, policy)
    freeing(monkeypatch, 1000)
    no_margins(management, monkeypatch)
    encoder = streaming("cuda:0", 3 * model.model_size())
    management.load_models_gpu([encoder])
    assert model.loaded_size() == 0
    assert model.sharded.parked is (policy == "park")
    management.unload_all_models()


def test_each_device_charges_its_own_shards_alone_to_the_budget_of_pinned_memory(monkeypatch):
    needs("comfy.model_management.ensure_pin_budget")
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    asked = []
    monkeypatch.setattr(management, "ensure_pin_budget", lambda size, **_: asked.append(size) or True)
    model = load_tp_again(loaded)
    sizes = model.sharded.info.resident_bytes
    assert sorted(asked) == sorted(sizes) and sum(asked) < 1.01 * sum(sizes)
    encoder = streaming("cuda:0", 1000)
    monkeypatch.undo()
    freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    management.load_models_gpu([encoder])
    management.load_models_gpu([model, *model.get_nested_additional_models()])
    # This machine has room for the budget: nothing that the encoder has pinned is taken for our shards.
    assert encoder.unloaded_pins == 0
    management.unload_all_models()


def test_what_comfyui_keeps_in_reserve_goes_back_before_the_ranks_load(monkeypatch):
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    group = loaded.sharded.require().group
    monkeypatch.setattr("comfy_tp.comfy_tp_nodes.groups.group_for", lambda *_, **__: group)
    loaded.sharded.unload()
    emptied = []
    monkeypatch.setattr(
        management, "soft_empty_cache", lambda force=False: emptied.append(loaded.sharded.loaded)
    )
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    load_tp_again(loaded)
    assert loaded.sharded.loaded and emptied[-1] is False
    load_tp_again(loaded)
    assert emptied[-1] is True
    management.unload_all_models()


def with_free_memory(monkeypatch: pytest.MonkeyPatch, free: dict[str, int], reserves: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 1 << 40))
    monkeypatch.setattr(RankGroup, "reserves", property(lambda group: reserves))


def test_the_free_memory_is_that_of_the_rank_which_has_least(monkeypatch):
    needs("comfy.model_patcher.ModelPatcher.get_free_memory")
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 77)
    assert loaded.get_free_memory(torch.device("cpu")) == 77 // 2  # two ranks share the CPU's
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    model = load_tp_again(loaded)
    (stub,) = model.get_nested_additional_models()
    for free, reserves, least in (
        ({"cuda:0": 900, "cuda:1": 300}, [0, 0], 300),
        ({"cuda:0": 900, "cuda:1": 300}, [0, 200], 500),
        ({"cuda:0": 100, "cuda:1": 300}, [50, 200], 150),
    ):
        with_free_memory(monkeypatch, free, reserves)
        for patcher in (model, model.clone(), stub):
            assert patcher.get_free_memory(torch.device("cuda:0")) == least
    management.unload_all_models()


@pytest.mark.parametrize(("free", "batches"), [(1 << 40, [2, 2]), (1 << 10, [1, 1, 1, 1])])
def test_conditionings_are_batched_by_what_is_free_on_the_second_device_too(monkeypatch, free, batches):
    needs("comfy.model_patcher.ModelPatcher.get_free_memory")
    import comfy.patcher_extension as extension

    loaded = load_tp(NAME)
    freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cpu", "cuda:1")
    with_free_memory(monkeypatch, {"cuda:1": free}, [0, 0])
    found = []

    def count(executor, x, *args, **kwargs):
        found.append(x.shape[0])
        return executor(x, *args, **kwargs)

    model = loaded.clone()
    model.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, count)
    image(model, cfg=5.0)
    assert found == batches


RESERVE = """
from comfy_tp.core.ranks import loop
from comfy_tp.core.ranks.commands import BUILT_IN as COMMANDS

loop.reserve_on = lambda device: 1 << 40
"""


def test_ranks_tell_what_they_hold_in_reserve_before_they_answer(tmp_path):
    table = tmp_path / "reserve.py"
    table.write_text(RESERVE)
    with RankGroup.start(["cpu", "cpu"], commands=f"{table}:COMMANDS", log_dir=tmp_path / "logs") as group:
        assert group.reserves == [0, 0]
        group.request("ping")
        assert group.reserves[0] == 1 << 40
        group.request("ping")  # the other rank has ended the first one by now
        assert group.reserves == [1 << 40, 1 << 40]


def test_shards_that_are_taken_away_in_the_middle_of_a_run_come_back(caplog):
    import comfy.model_management as management
    import comfy.patcher_extension as extension

    model = load_tp(NAME, policy="release")
    before, loads = image(model, steps=3), model.sharded.loads
    taken = model.clone()

    def unload(executor, *args, **kwargs):
        if model.sharded.loads == loads:
            management.unload_all_models()
            assert not model.sharded.loaded
        return executor(*args, **kwargs)

    taken.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, unload)
    assert torch.equal(image(taken, steps=3), before)
    assert model.sharded.loads == loads + 1
    assert "were unloaded during the run; loading them again" in caplog.text
    assert listed(management, taken)


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1", "default"])
def test_select_model_device_moves_no_shards_and_says_so(on_two_gpus, monkeypatch, device):
    needs("comfy_extras.nodes_multigpu.SelectModelDeviceNode")
    import comfy.model_management as management
    from comfy_extras.nodes_multigpu import SelectModelDeviceNode

    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(management, "get_all_torch_devices", lambda exclude_current=False: gpus)
    model = on_two_gpus
    if device in ("gpu:0", "default"):  # where its shards are counted anyway
        found = SelectModelDeviceNode.execute(model, device).args[0]
        assert found.load_device == model.load_device and found.sharded is model.sharded
        found.refuse_unsupported()
        return
    named = "cpu" if device == "cpu" else "cuda:1"
    with pytest.raises(UnsupportedError, match=f"can move or copy it to {named} .*Select Model Device"):
        SelectModelDeviceNode.execute(model, device)
    assert model.load_device == torch.device("cuda:0")


def test_cfg_split_is_refused_with_a_sentence(on_two_gpus, monkeypatch):
    needs("comfy_extras.nodes_multigpu.MultiGPUCFGSplitNode")
    import comfy.model_management as management
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    model = on_two_gpus
    # With one GPU the node hands the stock model on as it is.
    assert MultiGPUCFGSplitNode.execute(model, 1).args[0].is_clone(model)
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(management, "get_all_torch_devices", lambda exclude_current=False: gpus)
    with pytest.raises(UnsupportedError, match="MultiGPU CFG Split"):
        MultiGPUCFGSplitNode.execute(model, 2)
    assert not model.get_additional_models_with_key("multigpu")


def component(loaded: Any) -> Any:
    """What a CLIP or VAE on the ranks of `loaded` has of a module; its shards are nobody's."""
    from comfy_tp.comfy_tp_nodes.component import RemoteModule

    shards = SimpleNamespace(
        serve=lambda module: None, bytes_on=lambda device: 0, placement=loaded.sharded.placement
    )
    return RemoteModule(shards, "keep")


@pytest.mark.parametrize("kind", ["CLIP", "VAE"])
def test_select_clip_and_vae_device_move_nothing_and_say_so(monkeypatch, kind):
    needs("comfy_extras.nodes_multigpu.SelectCLIPDeviceNode")
    import comfy.model_management as management
    import comfy.sd
    from comfy_extras import nodes_multigpu

    from comfy_tp.comfy_tp_nodes.component import ComponentPatcher

    node = getattr(nodes_multigpu, f"Select{kind}DeviceNode")
    loaded = load_tp(NAME)
    freeing(monkeypatch, 1 << 40)
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(management, "get_torch_device", lambda: gpus[0])
    monkeypatch.setattr(management, "get_all_torch_devices", lambda exclude_current=False: gpus)
    module = component(loaded)
    if kind == "CLIP":
        stands_for = comfy.sd.CLIP(no_init=True)
        stands_for.cond_stage_model = module
        stands_for.tokenizer = stands_for.layer_idx = stands_for.apply_hooks_to_conds = None
        stands_for.tokenizer_options, stands_for.use_clip_schedule = {}, False
    else:
        stands_for = SimpleNamespace(first_stage_model=module, device=torch.device("cpu"))
    stands_for.patcher = ComponentPatcher.of(module)
    for device, named in (("gpu:1", "cuda:1"), *([("cpu", "cpu")] if kind == "CLIP" else [])):
        with pytest.raises(UnsupportedError, match=f"to {named} .*Select {kind} Device"):
            node.execute(stands_for, device)
    assert node.execute(stands_for, "gpu:0").args[0].patcher.load_device == gpus[0]


def test_hooks_on_a_text_encoder_are_refused():
    import comfy.hooks
    from comfy_extras.nodes_hooks import SetClipHooks

    from comfy_tp.comfy_tp_nodes.component import ComponentPatcher

    patcher = ComponentPatcher.of(component(load_tp(NAME)))
    clip = SimpleNamespace(clone=lambda **_: SimpleNamespace(patcher=patcher))
    hooks = comfy.hooks.HookGroup()
    hooks.add(comfy.hooks.WeightHook())
    with pytest.raises(UnsupportedError, match="Set CLIP Hooks"):
        SetClipHooks().apply_hooks(clip, False, False, hooks)


def newest_signatures(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    """Give ComfyUI's functions the parameters that its release 0.38 has and the installed one may lack."""
    import comfy.model_patcher
    import comfy.sampler_helpers
    import comfy.samplers

    patcher = comfy.model_patcher.ModelPatcher
    construct, clone = patcher.__init__, patcher.clone

    def __init__(self, model, load_device, offload_device, *args, fast_disk=False, **kwargs):
        construct(self, model, load_device, offload_device, *args, **kwargs)
        self.fast_disk = fast_disk

    def cloned(self, *args, **kwargs):
        made = clone(self, *args, **kwargs)
        again = type(made)(made.model, made.load_device, made.offload_device, fast_disk=self.fast_disk)
        seen.append(f"fast_disk={again.fast_disk}")
        made.fast_disk = self.fast_disk
        return made

    prepare, outer = comfy.sampler_helpers.prepare_sampling, comfy.samplers.CFGGuider.outer_sample

    def prepare_sampling(*args, call_model_memory_required, **kwargs):
        seen.append(f"call_model_memory_required={call_model_memory_required}")
        return prepare(*args, **kwargs)

    def outer_sample(self, *args, **kwargs):
        with monkeypatch.context() as patched:
            patched.setattr(
                comfy.sampler_helpers,
                "prepare_sampling",
                lambda *a, **k: prepare_sampling(*a, call_model_memory_required=False, **k),
            )
            return outer(self, *args, **kwargs)

    monkeypatch.setattr(patcher, "__init__", __init__)
    monkeypatch.setattr(patcher, "clone", cloned)
    monkeypatch.setattr(comfy.samplers.CFGGuider, "outer_sample", outer_sample)


def test_flux2_runs_through_the_signatures_of_a_newer_comfyui(monkeypatch):
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    before = image(load_tp(NAME))
    seen: list[str] = []
    newest_signatures(monkeypatch, seen)
    model = load_tp(NAME)
    model.fast_disk = True
    assert torch.equal(image(model), before)
    shifted = ModelSamplingFlux().patch(model, 3.0, 2.0, 1024, 1024)[0]
    assert not torch.equal(image(shifted), before)
    inputs = (7, 2, 1.0, "euler", "simple", conditioning(), conditioning(), latent(), 1.0)
    with torch.inference_mode():
        assert TPSampler.execute(model, *inputs).args[0]["samples"].shape == before.shape
    assert seen.count("call_model_memory_required=False") == 3 and "fast_disk=True" in seen


class Interrupt(BaseException):
    """What Cancel raises in newer ComfyUIs: nothing that `except Exception` sees."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the ranks' waits be interrupted when they poll for the `call`th time."""
    import comfy.model_management as management

    polls = iter(range(1, 1000))

    def poll() -> None:
        if next(polls) == call:
            raise Interrupt

    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", poll)


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("node", ["KSampler", "TPSampler", "load", "patches"])
def test_an_interrupt_that_is_no_exception_passes_through_every_wait(monkeypatch, node, call):
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    model = load_tp(NAME)
    before = image(model)
    work = {
        "KSampler": lambda: image(model),
        "TPSampler": lambda: TPSampler.execute(
            model, 7, 2, 1.0, "euler", "simple", conditioning(), conditioning(), latent(), 1.0
        ),
        "load": lambda: (model.sharded.unload(), load_tp(NAME)),
        "patches": lambda: image(patched(model, float(torch.rand(())))),
    }[node]
    threads = threading.active_count()
    with monkeypatch.context() as patched_poll, torch.inference_mode(), pytest.raises(Interrupt):
        interrupt_at(patched_poll, call)
        for _ in range(20):
            work()
    assert torch.equal(image(model), before)
    assert threading.active_count() <= threads + 1


def patched(model: Any, strength: float) -> Any:
    found = model.clone()
    shape = model.model.diffusion_model.img_in.weight.shape
    found.add_patches({"diffusion_model.img_in.weight": ("diff", (torch.ones(shape),))}, strength)
    return found
