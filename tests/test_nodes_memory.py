"""ComfyUI's memory management sees the shards, takes them away and brings them back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    relative_error,
    save_small_model,
    tp_model,
)
from faked_devices import freeing, load_tp_again, on_devices

from comfy_tp.core.calls.remote import RemoteModel
from comfy_tp.core.errors import CheckpointError, RankError
from comfy_tp.core.ranks.client import RankGroup

pytestmark = pytest.mark.usefixtures("in_comfy")

NAME = "memory-flux2"


@pytest.fixture(autouse=True)
def folder(in_comfy):  # noqa: F811
    path = in_comfy / "models/diffusion_models" / NAME
    return path if path.is_dir() else save_small_model(path, seed=11)


def image(model) -> torch.Tensor:
    return ksampler(model, conditioning(), conditioning(), latent(), steps=2)


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_second_load_of_the_same_model_reads_nothing():
    first = load_tp(NAME)
    loads, remote = first.sharded.loads, first.sharded.remote
    second = load_tp(NAME)
    assert second.sharded is first.sharded and second.model is first.model
    assert first.sharded.loads == loads and first.sharded.remote is remote


def test_two_loader_nodes_of_one_model_do_not_see_each_others_patches():
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    first, second = load_tp(NAME, policy="keep"), load_tp(NAME, policy="release")
    assert second.model is first.model
    before = image(first)
    shifted = ModelSamplingFlux().patch(first, 3.0, 2.0, 1024, 1024)[0]
    assert not torch.equal(image(shifted), before)
    assert torch.equal(image(second), before)
    assert torch.equal(image(first), before)


def test_a_loader_node_that_is_taken_out_of_the_graph_leaves_no_leaked_model_behind(monkeypatch):
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    # So that what stands for the shards on a further device is looked at too.
    on_devices(monkeypatch, loaded, "cpu", "cuda:1")
    stays, goes = load_tp_again(loaded), load_tp_again(loaded)
    ours = [stays.model, stays.model.device_shards["cuda:1"]]

    def listed():
        return [entry for entry in management.current_loaded_models if entry.real_model() in ours]

    assert {entry.model for entry in listed()} == {goes, *goes.get_nested_additional_models()}
    del goes
    gc.collect()
    assert len(listed()) == 2 and not any(entry.is_dead() for entry in listed())
    assert {entry.model.model for entry in listed()} == set(ours)
    management.unload_all_models()


def test_every_byte_is_read_once_over_all_ranks(folder):
    info = load_tp(NAME).sharded.info
    weights = next(folder.glob("*.safetensors")).stat().st_size
    assert sum(info.bytes_read) <= weights * 1.01
    assert info.degree == 2 and len(info.resident_bytes) == 2
    assert max(info.resident_bytes) < weights * 0.6


@pytest.mark.parametrize("dtype", ["default", "bfloat16", "float8_e4m3fn"])
def test_comfyui_casts_to_the_dtype_that_the_ranks_compute_in(dtype):
    model = load_tp(NAME, dtype=dtype)
    assert model.model_dtype() == getattr(torch, model.sharded.info.dtype)
    model.sharded.unload()


def test_unload_all_models_frees_the_ranks_and_the_next_run_reads_again():
    import comfy.model_management as management

    model = load_tp(NAME)
    before = image(model)
    loads, pids = model.sharded.loads, model.sharded.remote.group.pids
    assert model.loaded_size() == model.model_size() > 0
    management.unload_all_models()
    assert model.loaded_size() == 0 and not model.sharded.loaded
    listed = [entry.model for entry in management.current_loaded_models if entry.model is not None]
    assert not any(other.is_clone(model) for other in listed)
    assert torch.equal(image(model), before)
    assert model.sharded.loads == loads + 1
    assert model.sharded.remote.group.pids == pids  # the ranks stay


def test_with_smart_memory_disabled_a_prompt_reads_nothing_again(monkeypatch):
    """ComfyUI then unloads all models after every prompt, into host memory."""
    import comfy.model_management as management

    monkeypatch.setattr(management, "DISABLE_SMART_MEMORY", True)
    model = load_tp(NAME)
    before, loads = image(model), model.sharded.loads
    management.unload_all_models()
    assert model.sharded.loaded
    assert torch.equal(image(model), before)
    assert model.sharded.loads == loads
    monkeypatch.setattr(management, "DISABLE_SMART_MEMORY", False)
    management.unload_all_models()
    assert not model.sharded.loaded


def test_with_smart_memory_disabled_the_shards_of_gpus_are_parked(monkeypatch):
    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    monkeypatch.setattr(
        RemoteModel, "park", lambda remote, *, poll=None: sum(remote.info.resident_bytes)
    )  # ranks on the CPU have nothing to park
    model = load_tp_again(loaded, "keep")
    monkeypatch.setattr(management, "DISABLE_SMART_MEMORY", True)
    management.unload_all_models()
    assert model.sharded.loaded and model.sharded.parked and model.loaded_size() == 0


def test_clones_share_the_shards_and_switching_between_them_unloads_nothing():
    model = load_tp(NAME)
    loads = model.sharded.loads
    clone = model.clone()
    assert clone.is_clone(model) and clone.sharded is model.sharded and clone.policy == model.policy
    before = image(model)
    assert torch.equal(image(clone), before)
    del clone
    gc.collect()
    assert torch.equal(image(model), before)
    assert model.sharded.loads == loads


def test_no_reference_cycle_keeps_a_model_alive():
    model = load_tp(NAME)
    image(model)
    gc.collect()
    gc.disable()
    try:
        living = model.sharded.comfy_model
        assert living() is not None
        del model
        assert living() is None
    finally:
        gc.enable()


class HandTimer:
    """A `threading.Timer` that the test lets run out."""

    made: list[HandTimer] = []

    def __init__(self, seconds: float, function):
        self.seconds, self.function = seconds, function
        self.waiting = False
        HandTimer.made.append(self)

    def start(self) -> None:
        self.waiting = True

    def cancel(self) -> None:
        self.waiting = False


def test_an_unused_model_waits_and_is_then_freed(monkeypatch):
    from comfy_tp.comfy_tp_nodes import sharded as module

    tp_model().sharded.load()  # keeps the ranks
    monkeypatch.setattr(module.threading, "Timer", HandTimer)
    monkeypatch.setattr(HandTimer, "made", [])
    model = load_tp(NAME)
    sharded, remote = model.sharded, model.sharded.remote
    del model
    (timer,) = HandTimer.made
    assert timer.waiting and timer.seconds == module.IDLE_SECONDS
    assert sharded.loaded
    again = load_tp(NAME)  # taken up again in time
    assert not timer.waiting
    timer.function()  # as if it had run out at the same moment
    assert sharded.remote is remote and sharded.loaded
    del again
    HandTimer.made[-1].function()
    assert not sharded.loaded
    assert sharded not in module.known_models()
    assert remote.group.alive  # another model is on it


def test_a_load_whose_ranks_are_ended_with_another_model_meanwhile_gets_new_ones(monkeypatch):
    from comfy_tp.comfy_tp_nodes import groups

    model = load_tp(NAME, 1)  # no other test counts on these ranks
    before = image(model)
    model.sharded.unload()
    choose, given = groups.group_for, []

    def ended_at_once(*arguments, **named):
        group = choose(*arguments, **named)
        if not given:
            groups.close_group(group)
        given.append(group)
        return group

    monkeypatch.setattr(groups, "group_for", ended_at_once)
    assert torch.equal(image(model), before)
    assert len(given) == 2 and given[1].alive


@pytest.mark.parametrize(("policy", "stays"), [("keep", True), ("release", False), ("park", False)])
def test_another_model_that_needs_some_room_is_answered_as_the_policy_says(monkeypatch, policy, stays):
    model = load_tp(NAME, policy=policy)
    before = image(model)
    management = freeing(monkeypatch, 1000)
    management.free_memory(model.model_size() // 2, torch.device("cpu"))
    assert model.sharded.loaded is stays
    assert model.loaded_size() == (model.model_size() if stays else 0)
    monkeypatch.undo()
    assert torch.equal(image(model), before)


def test_with_policy_keep_a_model_that_needs_more_than_the_shards_hold_gets_the_room(monkeypatch):
    model = load_tp(NAME, policy="keep")
    management = freeing(monkeypatch, 1000)
    management.free_memory(model.model_size() * 3, torch.device("cpu"))
    assert not model.sharded.loaded


def test_every_device_counts_its_own_shards_and_losing_one_frees_all(monkeypatch):
    from comfy_tp.comfy_tp_nodes.patcher import load_now, make_patcher

    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    model = make_patcher(loaded.model, "release")
    load_now(model)
    (stub,) = model.get_nested_additional_models()
    assert (model.load_device, stub.load_device) == (torch.device("cuda:0"), torch.device("cuda:1"))
    sizes = model.sharded.info.resident_bytes
    assert [model.loaded_size(), stub.loaded_size()] == sizes
    listed = [entry.model for entry in management.current_loaded_models]
    assert model in listed and stub in listed
    freeing(monkeypatch, 1000)
    management.free_memory(sizes[1] // 2, torch.device("cuda:1"))
    assert not model.sharded.loaded
    assert model.loaded_size() == stub.loaded_size() == 0
    management.unload_all_models()


def test_unloading_from_comfyuis_own_device_frees_the_other_devices_too(monkeypatch):
    from comfy_tp.comfy_tp_nodes.patcher import load_now, make_patcher

    loaded = load_tp(NAME)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    model = make_patcher(loaded.model, "keep")
    load_now(model)
    management.unload_all_models()
    assert not model.sharded.loaded
    assert all(stub.loaded_size() == 0 for stub in model.get_nested_additional_models())


def test_loading_makes_room_on_every_device_first(monkeypatch):
    from comfy_tp.comfy_tp_nodes import groups
    from comfy_tp.comfy_tp_nodes.patcher import load_now, make_patcher

    loaded = load_tp(NAME)
    group = loaded.sharded.require().group
    monkeypatch.setattr(groups, "group_for", lambda *arguments, **options: group)
    loaded.sharded.unload()
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    asked = []
    free = management.free_memory
    monkeypatch.setattr(
        management,
        "free_memory",
        lambda need, device, *rest, **named: (
            asked.append((str(device), need, loaded.sharded.loaded)) or free(need, device, *rest, **named)
        ),
    )
    model = make_patcher(loaded.model, "keep")
    load_now(model)
    assert {device for device, _, _ in asked} == {"cuda:0", "cuda:1"}
    assert all(need > model.sharded.bytes_on(device) for device, need, _ in asked)
    assert not any(was_loaded for _, _, was_loaded in asked)
    management.unload_all_models()


def test_parked_shards_stay_parked_however_often_room_is_asked_for_and_come_back(monkeypatch):
    loaded = load_tp(NAME, policy="park")
    before = image(loaded)
    management = freeing(monkeypatch, 1 << 40)
    on_devices(monkeypatch, loaded, "cuda:0", "cuda:1")
    # Ranks on the CPU have nothing to park; these answer as those on a GPU.
    asked = []
    monkeypatch.setattr(
        RemoteModel,
        "park",
        lambda remote, *, poll=None: asked.append(remote) or sum(remote.info.resident_bytes),
    )
    model = load_tp_again(loaded, "park")
    freeing(monkeypatch, 1000)
    for _ in range(3):
        management.free_memory(1 << 20, torch.device("cuda:0"))
        management.free_memory(1 << 20, torch.device("cuda:1"))
        assert model.sharded.loaded and model.sharded.parked
        assert model.loaded_size() == 0
        assert model.get_ram_usage() == sum(model.sharded.info.resident_bytes)
    assert len(asked) == 1
    loads = model.sharded.loads
    assert torch.equal(image(loaded), before)
    assert not model.sharded.parked and model.sharded.loads == loads


def test_ranks_that_have_ended_in_a_cancelled_command_are_not_asked_to_park(monkeypatch):
    model = load_tp(NAME, policy="park")
    on_devices(monkeypatch, model, "cuda:0", "cuda:1")
    monkeypatch.setattr(RankGroup, "settled", lambda group, *, poll=None: False)
    monkeypatch.setattr(RemoteModel, "park", lambda remote, *, poll=None: pytest.fail("asked"))
    model.sharded.make_room("park")
    assert not model.sharded.loaded


def test_two_models_that_do_not_fit_together_are_used_in_turn_by_the_policy_release(monkeypatch, in_comfy):  # noqa: F811
    save_small_model(in_comfy / "models/diffusion_models/memory-second", seed=21)
    first, second = load_tp(NAME, policy="release"), load_tp("memory-second", policy="release")
    expected = image(first), image(second)
    first.sharded.unload()
    second.sharded.unload()
    room = first.model_size() * 3 // 2
    management = freeing(monkeypatch, 0)

    def free_memory(device=None, torch_free_too=False):
        free = room - first.loaded_size() - second.loaded_size()
        return (free, 0) if torch_free_too else free

    monkeypatch.setattr(management, "get_free_memory", free_memory)
    monkeypatch.setattr(management, "extra_reserved_memory", lambda: 0)
    monkeypatch.setattr(management, "minimum_inference_memory", lambda: 0)
    # ComfyUI makes room on every device but the CPU; these shards lie there.
    load = management.load_models_gpu

    def load_with_room(models, *arguments, **named):
        need = sum(one.model_size() - one.loaded_size() for one in models)
        management.free_memory(need * 1.1, torch.device("cpu"), [])
        return load(models, *arguments, **named)

    monkeypatch.setattr(management, "load_models_gpu", load_with_room)
    for _ in range(2):
        for model, other, image_before in ((first, second, expected[0]), (second, first, expected[1])):
            assert torch.equal(image(model), image_before)
            assert model.sharded.loaded and not other.sharded.loaded


@pytest.mark.parametrize("policy", ["release", "keep"])
def test_shards_that_are_at_work_stay_when_a_step_callback_asks_for_the_room(policy, caplog):
    import comfy.model_management as management

    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    model = load_tp(NAME, policy=policy)
    before, loads = image(model), model.sharded.loads
    comfy_hook(lambda *_, **__: management.unload_all_models())
    try:
        with torch.inference_mode():
            inputs = (7, 2, 1.0, "euler", "simple", conditioning(), conditioning(), latent(), 1.0)
            found = TPSampler.execute(model, *inputs).args[0]["samples"]
    finally:
        comfy_hook(None)
    assert relative_error(found, before) < 1e-5
    assert "stays on its ranks until their command has ended" in caplog.text
    assert model.sharded.loads == loads
    # They are in ComfyUI's list again, so that its Unload button finds them.
    assert model in [entry.model for entry in management.current_loaded_models]
    management.unload_all_models()
    assert not model.sharded.loaded
    assert torch.equal(image(model), before)


def comfy_hook(call) -> None:
    """What ComfyUI calls at every step of a progress bar."""
    import comfy.utils

    comfy.utils.set_progress_bar_global_hook(call)


def test_host_memory_is_all_that_the_ram_cache_scores():
    assert load_tp(NAME).get_ram_usage() == 0


def test_a_group_that_died_is_started_again_and_gives_the_same_image():
    model = load_tp(NAME)
    before = image(model)
    group = model.sharded.remote.group
    os.kill(group.pids[1], signal.SIGKILL)
    wait_until(lambda: not group.alive)
    assert not model.sharded.loaded and model.loaded_size() == 0
    assert torch.equal(image(model), before)
    assert model.sharded.remote.group is not group


def test_a_rank_that_dies_during_a_run_ends_it_with_its_name():
    import comfy.patcher_extension as extension

    model = load_tp(NAME)
    before = image(model)
    wrapped = model.clone()
    group = model.sharded.remote.group

    def kill(executor, *args, **kwargs):
        if group.alive:
            os.kill(group.pids[1], signal.SIGKILL)
            wait_until(lambda: not group.alive)
        return executor(*args, **kwargs)

    wrapped.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, kill)
    with pytest.raises(RankError, match="Rank 1 .*killed by signal 9"):
        image(wrapped)
    assert torch.equal(image(model), before)


def test_a_rank_that_dies_while_loading_is_named_and_the_next_load_starts_the_ranks_again():
    model = load_tp(NAME)
    before = image(model)
    group = model.sharded.remote.group
    model.sharded.unload()
    os.kill(group.pids[1], signal.SIGSTOP)  # so that the load cannot end before
    threading.Timer(0.5, os.kill, (group.pids[1], signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"Rank 1 \(cpu, pid \d+\) was killed by signal 9"):
        load_tp(NAME)
    assert not group.alive and not model.sharded.loaded
    assert torch.equal(image(model), before)


def test_cancel_during_a_run_leaves_the_ranks_usable():
    import comfy.model_management as management
    import comfy.patcher_extension as extension

    model = load_tp(NAME)
    before = image(model)
    wrapped = model.clone()

    def cancel(executor, *args, **kwargs):
        management.interrupt_current_processing()
        return executor(*args, **kwargs)

    wrapped.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, cancel)
    loads = model.sharded.loads
    with pytest.raises(management.InterruptProcessingException):
        image(wrapped)
    assert torch.equal(image(model), before)
    assert model.sharded.loads == loads


def test_cancel_while_loading_leaves_nothing_loaded_and_the_next_load_works():
    import comfy.model_management as management

    model = load_tp(NAME)
    model.sharded.unload()
    management.interrupt_current_processing()
    with pytest.raises(management.InterruptProcessingException):
        load_tp(NAME)
    assert not model.sharded.loaded
    assert load_tp(NAME).sharded.loaded


SLOW_COMMANDS = """
import time
from comfy_tp.core.checkpoint import ranges, reader
from comfy_tp.core.calls.commands import COMMANDS, describe_models

read = reader._Reader.read

def slow(self, batch):
    time.sleep(0.2)
    return read(self, batch)

reader._Reader.read = slow
ranges.CHUNK = 1 << 16
"""


def test_ranks_stop_reading_when_a_load_is_cancelled(folder, tmp_path):
    table = tmp_path / "slow.py"
    table.write_text(SLOW_COMMANDS)
    seen = []
    with RankGroup.start(["cpu", "cpu"], commands=f"{table}:COMMANDS", log_dir=tmp_path / "logs") as group:

        def poll():
            if seen and seen[-1][0] > 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            RemoteModel.load(group, str(folder), poll=poll, on_progress=lambda *figures: seen.append(figures))
        # In the middle of it: to its end it would have taken many times as long.
        assert 0 < seen[-1][0] < seen[-1][1] / 4
        assert group.request("ping").header["degree"] == 2
        assert not any(rank["models"] for rank in group.status()["ranks"])


def test_cancel_while_the_ranks_start_takes_effect_at_once_and_the_next_load_works(monkeypatch):
    import comfy.model_management as management

    from comfy_tp.comfy_tp_nodes import groups

    model = load_tp(NAME, 1)  # no other test counts on these ranks
    group = model.sharded.require().group
    before = image(model)
    model.sharded.unload()
    groups.close_group(group)
    timer = threading.Timer(0.5, management.interrupt_current_processing)
    timer.start()
    with pytest.raises(management.InterruptProcessingException):
        load_tp(NAME, 1)
    # A start that had gone on to its end would have left a group.
    assert (("cpu",), None) not in groups.running()
    assert not model.sharded.loaded
    assert torch.equal(image(model), before)


def test_loading_shows_its_progress(monkeypatch):
    import comfy.utils

    shown = []
    monkeypatch.setattr(
        comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *rest, **more: shown.append((value, total))
    )
    load_tp(NAME).sharded.unload()
    shown.clear()  # it may have loaded, where no test before this one had
    load_tp(NAME)
    assert shown and shown[-1][0] == shown[-1][1]
    assert [value for value, _ in shown] == sorted(value for value, _ in shown)


def test_a_file_that_was_replaced_is_another_model(folder):
    from comfy_tp.comfy_tp_nodes.nodes.load_model import LoadTPModel

    before = LoadTPModel.fingerprint_inputs(NAME)
    old = load_tp(NAME)
    assert LoadTPModel.fingerprint_inputs(NAME) == before
    save_small_model(folder, seed=12)
    assert LoadTPModel.fingerprint_inputs(NAME) != before
    new = load_tp(NAME)
    assert new.sharded is not old.sharded
    assert not torch.equal(image(new), image(old))


def test_a_config_that_was_repaired_is_read_again(in_comfy):  # noqa: F811
    from comfy_tp.comfy_tp_nodes.nodes.load_model import LoadTPModel
    from comfy_tp.comfy_tp_nodes.sharded import known_models

    config = save_small_model(in_comfy / "models/diffusion_models/memory-config") / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"num_layers": 2', '"num_layers": 3'))
    assert config.read_text() != whole
    broken = LoadTPModel.fingerprint_inputs("memory-config")
    with pytest.raises(CheckpointError, match="`num_layers` is 3, but"):
        load_tp("memory-config")
    config.write_text(whole)
    assert LoadTPModel.fingerprint_inputs("memory-config") != broken
    assert image(load_tp("memory-config")).isfinite().all()
    assert not any(known.loaded for known in known_models() if known.source.config["num_layers"] == 3)


def test_status_and_unload_tell_and_free():
    from comfy_tp.comfy_tp_nodes.nodes.status import TPStatus
    from comfy_tp.comfy_tp_nodes.nodes.unload_model import UnloadTPModel

    model = load_tp(NAME)
    image(model)
    pids = model.sharded.remote.group.pids
    result = TPStatus.execute()
    text = result.args[0]
    assert result.ui.as_dict() == {"text": (text,)}
    for words in (
        "Ranks: 2 on cpu, cpu",
        f"rank 1 on cpu, pid {pids[1]}",
        NAME,
        "float32",
        "GB/s",
        "last step: 0.",
        "per rank",
    ):
        assert words in text, text
    trigger = object()
    assert UnloadTPModel.execute(trigger, model).args[0] is trigger
    assert f"{NAME}, not loaded" in TPStatus.execute().args[0]
    UnloadTPModel.execute(trigger)
    assert "Ranks:" not in TPStatus.execute().args[0]
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
