"""The inputs `devices` and `degree` become one device per rank, or an error that says what to set."""

from __future__ import annotations

import pytest
import torch

from comfy_tp.comfy_tp_nodes.devices import place, usable_devices
from comfy_tp.core.errors import ConfigError, PlanError

CPU = torch.device("cpu")
FIRST = torch.device("cuda:0")


@pytest.fixture
def gpus(monkeypatch):
    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


def on(text: str, degree: int, heads: int | None = 48, comfy: torch.device = FIRST):
    return place(text, degree, heads, "Flux2Transformer2DModel", comfy)


def test_auto_takes_all_gpus_and_comfyuis_own_first(gpus):
    gpus(4)
    assert usable_devices(torch.device("cuda:2")) == ["cuda:2", "cuda:0", "cuda:1", "cuda:3"]
    found = on("auto", 0)
    assert found.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert found.reason == "degree 4 on cuda:0, cuda:1, cuda:2, cuda:3: all usable devices"


def test_degree_0_takes_the_largest_degree_that_divides_the_heads_and_says_so(gpus):
    gpus(5)
    found = on("auto", 0, heads=32)
    assert found.degree == 4
    assert "largest that divides the 32 attention heads; cuda:4 not used" in found.reason


def test_one_gpu_gives_degree_1(gpus):
    gpus(1)
    assert on("auto", 0).devices == ("cuda:0",)


def test_a_list_is_taken_in_its_order_and_cut_to_the_degree(gpus):
    gpus(4)
    assert on("cuda:3, cuda:1", 2).devices == ("cuda:3", "cuda:1")
    assert on("cuda:3,cuda:1,cuda:0", 2).devices == ("cuda:3", "cuda:1")


def test_one_gpu_named_twice_runs_two_ranks_over_gloo(gpus):
    gpus(1)
    found = on("cuda:0,cuda:0", 2)
    assert found.devices == ("cuda:0", "cuda:0") and found.backend == "gloo"
    gpus(2)
    assert on("cuda:0,cuda:1", 2).backend is None


def test_the_cpu_has_one_rank_unless_more_are_asked_for(gpus):
    gpus(0)
    assert on("auto", 0, comfy=CPU).devices == ("cpu",)
    assert on("auto", 8, comfy=CPU).devices == ("cpu",) * 8
    assert on("cpu", 2).devices == ("cpu", "cpu")


def test_auto_on_a_comfyui_without_a_gpu_takes_the_cpu_even_if_there_is_one(gpus):
    gpus(2)
    assert usable_devices(CPU) == ["cpu"]


@pytest.mark.parametrize(
    ("text", "degree", "error", "words"),
    [
        (
            "auto",
            4,
            ConfigError,
            "degree 4 needs 4 devices, but there are 2: cuda:0, cuda:1. Set degree to 2",
        ),
        ("cuda:1", 2, ConfigError, "degree 2 needs 2 devices, but there is 1: cuda:1"),
        ("cuda:7", 1, ConfigError, "'cuda:7' does not exist: this machine has cuda:0, cuda:1"),
        ("cuda:0,cpu", 2, ConfigError, "mixes the CPU and CUDA"),
        ("tpu", 1, ConfigError, "'tpu' is no device"),
        ("meta", 1, ConfigError, "not on 'meta'"),
        ("cpu", 9, ConfigError, "more than the 8 ranks"),
        ("cpu", 5, PlanError, "tp_degree=5 must divide the 48 attention heads"),
        (
            "http://ranks:80",
            0,
            ConfigError,
            "'http://ranks:80': no host can have this name. Write tcp://HOST:PORT",
        ),
        ("tcp://ranks", 0, ConfigError, "'ranks' is not of the form host:port. Write tcp://HOST:PORT"),
        ("tcp://ranks:\u00b2", 0, ConfigError, "is not of the form host:port. Write tcp://HOST:PORT"),
        ("tcp://ranks:65536", 0, ConfigError, "'ranks:65536': a port is a number up to 65535. Write"),
        ("tcp://" + "x" * 300 + ":80", 0, ConfigError, "xxx...': no host can have this name. Write"),
        ("tcp://\ud800:80", 0, ConfigError, r"'\\ud800:80': no host can have this name. Write"),
    ],
)
def test_what_cannot_be_placed_says_what_to_set(gpus, text, degree, error, words):
    gpus(2)
    with pytest.raises(error, match=words.replace("(", r"\(")):
        on(text, degree)
