"""Each optional name of ComfyUI is taken away in turn, and FLUX.2 still renders."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from types import ModuleType
from typing import Any

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    import_comfy,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    save_small_model,
)

PACK = "comfy_tp.comfy_tp_nodes"
# These hold what outlives an import of the pack: the ranks, and the models on them.
KEPT = {
    f"{PACK}.{name}" for name in ("groups", "sharded", "status_feed", "devices", "source", "conditioning")
}

pytestmark = pytest.mark.usefixtures("in_comfy")


def optional_names() -> list[tuple[str, str]]:
    """(feature, name) of every seam that FLUX.2 does not need."""
    from comfy_tp.comfy_tp_nodes import seams

    def needed(feature: str) -> set[str]:
        return {feature}.union(*map(needed, seams.NEEDS.get(feature, ())))

    must = {name for feature in needed(seams.FLUX2) for name in seams.SEAMS[feature]}
    optional = [feature for feature in seams.SEAMS if feature not in needed(seams.FLUX2)]
    return [(feature, name) for feature in optional for name in seams.SEAMS[feature] if name not in must]


class Lacking:
    """A module of ComfyUI's as our modules would see it if `gone` were not in it."""

    def __init__(self, real: ModuleType, gone: str):
        self.real, self.gone = real, gone

    def __getattr__(self, name: str) -> Any:
        path = f"{self.real.__name__}.{name}"
        if path == self.gone:
            raise AttributeError(f"{self.gone} was taken away")
        found = getattr(self.real, name)
        return Lacking(found, self.gone) if isinstance(found, ModuleType) else found


@contextmanager
def without(name: str) -> Iterator[None]:
    """The pack, imported anew where ComfyUI lacks `name`; afterwards ComfyUI and the pack are as they were.

    ComfyUI itself keeps the name while it runs, as it needs most of them.
    """
    from comfy_tp.comfy_tp_nodes import seams

    holder_name, _, attribute = name.rpartition(".")
    try:
        holder = seams._resolve(holder_name)
        taken = vars(holder)[attribute] if type(holder) is not EnumMeta else None
    except (AttributeError, KeyError, ImportError):  # an enum holds its members elsewhere
        taken = None  # this release has not got it, or from a class further up: nothing to take away
    mine = {key: module for key, module in sys.modules.items() if key.startswith(PACK) and key not in KEPT}
    for key in mine:
        if key != PACK:
            del sys.modules[key]
    if taken is not None:
        delattr(holder, attribute)
    try:
        fresh = importlib.import_module(f"{PACK}.seams")
        for feature in fresh.SEAMS:
            fresh.problems(feature)
        importlib.import_module(f"{PACK}.model").family("flux2")
        pack = importlib.import_module(PACK)
        pack.node_list()
    finally:
        if taken is not None:
            setattr(holder, attribute, taken)
    try:
        for key in [key for key in sys.modules if key.startswith(PACK) and key not in KEPT]:
            for bound, value in list(vars(sys.modules[key]).items()):
                if isinstance(value, ModuleType) and value.__name__.split(".")[0] in (
                    "comfy",
                    "folder_paths",
                ):
                    setattr(sys.modules[key], bound, Lacking(value, name))
        yield
    finally:
        for key in [key for key in sys.modules if key.startswith(PACK) and key not in KEPT and key != PACK]:
            del sys.modules[key]
        sys.modules.update(mine)
        for key, module in mine.items():
            parent, _, child = key.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, module)


@pytest.fixture(scope="module")
def small(in_comfy) -> str:  # noqa: F811
    save_small_model(
        import_comfy() / "models/diffusion_models/seams-flux2", num_layers=1, num_single_layers=1
    )
    return "seams-flux2"


def rendered(name: str) -> torch.Tensor:
    """One step of FLUX.2 by the stock KSampler and, where it is there, by TP Sampler, with the nodes as imported now."""
    pack = importlib.import_module(PACK)
    nodes = {node.GET_SCHEMA().node_id: node for node in pack.node_list()}
    with torch.inference_mode():
        model = nodes["TPLoadModel"].execute(name, 1, "cpu", "default", "keep").args[0]
        words = conditioning(8)
        samples = ksampler(model, words, words, latent(2, 2), steps=1)
        if nodes["TPSampler"].__name__ != "StandInNode":
            again = nodes["TPSampler"].execute(
                model, 7, 1, 1.0, "euler", "simple", words, words, latent(2, 2), 1.0
            )
            assert torch.allclose(again.args[0]["samples"], samples, atol=1e-5)
    del model
    gc.collect()
    return samples


def check_renders_without(names: list[tuple[str, str]], small: str) -> None:
    from comfy_tp.comfy_tp_nodes import seams

    expected = rendered(small)
    for feature, name in names:
        with without(name):
            assert torch.equal(rendered(small), expected), f"{name} of {feature} is taken away"
    # All is back.
    assert torch.equal(rendered(small), expected) and seams.problems(seams.LOAD_CLIP) == ()


def test_flux2_renders_without_any_one_of_the_features_that_it_does_not_need(small):
    """By the first name of each."""
    features = dict(reversed(optional_names()))
    assert len(features) >= 10
    check_renders_without(list(features.items()), small)


@pytest.mark.matrix
def test_flux2_renders_without_any_one_of_the_names_that_it_does_not_need(small):
    names = optional_names()
    assert len(names) > 40
    check_renders_without(names, small)


def test_what_is_taken_away_is_gone_for_the_pack(small):
    with without("comfy.samplers.KSampler"):
        seams = importlib.import_module(f"{PACK}.seams")
        assert not seams.fits(seams.SAMPLER) and seams.fits(seams.FLUX2)
        patcher = importlib.import_module(f"{PACK}.patcher")
        assert patcher.comfy.samplers.CFGGuider
        with pytest.raises(AttributeError, match="taken away"):
            _ = patcher.comfy.samplers.KSampler
