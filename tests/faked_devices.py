"""Devices and free memory as ComfyUI's memory management and the pack see them, for tests on a machine without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch


def freeing(monkeypatch: pytest.MonkeyPatch, free: int) -> Any:
    """ComfyUI's view of the free memory; on the CPU it would never free anything by itself."""
    import comfy.model_management as management

    monkeypatch.setattr(
        management,
        "get_free_memory",
        lambda dev=None, torch_free_too=False: (free, 0) if torch_free_too else free,
    )
    monkeypatch.setattr(management, "soft_empty_cache", lambda force=False: None)
    return management


def on_devices(monkeypatch: pytest.MonkeyPatch, model: Any, *devices: str) -> None:
    """Let the shards pass for lying on these devices, the first being ComfyUI's own."""
    import comfy.model_management as management

    placement = dataclasses.replace(model.sharded.placement, devices=devices)
    monkeypatch.setattr(model.sharded, "placement", placement)
    monkeypatch.setattr(management, "get_torch_device", lambda: torch.device(devices[0]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))


def load_tp_again(loaded: Any, policy: str = "keep") -> Any:
    """What one more loader node hands on for the model of `loaded`."""
    from comfy_tp.comfy_tp_nodes.patcher import load_now, make_patcher

    patcher = make_patcher(loaded.model, policy)
    load_now(patcher)
    return patcher
