"""Where a process of a group puts its shards when nobody says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.config import TensorParallelConfig


@pytest.fixture
def second_gpu(monkeypatch):
    """A process whose current device is the second of its GPUs, in a group of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_R6_one_rank_too_takes_the_current_device_of_its_group(second_gpu, monkeypatch, backends, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    whole, grouped = TensorParallelConfig(), TensorParallelConfig(process_group=dist.group.WORLD)
    assert Ranks.of(whole).device == Ranks.of(grouped).device == torch.device(device)
    assert Ranks.of(whole, "cpu").device == torch.device("cpu")


def test_without_a_group_a_whole_model_stays_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Ranks.of(TensorParallelConfig()).device == torch.device("cpu")


def test_nccl_agrees_on_the_device_that_was_asked_for(monkeypatch):
    """`Together` has no tensor of the model, so it goes by the current device."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("current", device))
    assert Ranks(1, 2, "cuda:1").on_device() == ("current", torch.device("cuda:1"))
    with Ranks(1, 2, "cpu").on_device():
        pass
