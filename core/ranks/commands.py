"""The commands that ranks execute: a table by name, from any module, with the built-in ones.

A command is a function ``f(context, header, tensors) -> (header, tensors)`` that every rank calls with the same
arguments; what rank 0 returns goes to the client. The tensors arrive on the CPU as views of one buffer: a command
that keeps one keeps all of them. Built-in commands: `ping`, `echo` and `status`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import ConfigError
from .context import RankContext

Tensors = list[torch.Tensor]
Command = Callable[[RankContext, dict[str, Any], Tensors], tuple[dict[str, Any], Sequence[torch.Tensor]]]


def ping(context: RankContext, header: dict, tensors: Tensors) -> tuple[dict, Tensors]:
    """Answers who is there."""
    return {"degree": context.degree, "ranks": context.gather(context.rank)}, []


def echo(context: RankContext, header: dict, tensors: Tensors) -> tuple[dict, Tensors]:
    """Gives back what it got: measures the channel."""
    return header, tensors


BUILT_IN: dict[str, Command] = {"ping": ping, "echo": echo}


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_status(describe_models: Callable[[RankContext], dict]) -> Command:
    """The command that tells of every rank its device, process, memory and models."""

    def status(context: RankContext, header: dict, tensors: Tensors) -> tuple[dict, Tensors]:
        own: dict[str, Any] = {
            "rank": context.rank,
            "device": str(context.device),
            "pid": os.getpid(),
            "rss_bytes": resident_bytes(),
            "threads": threading.active_count(),
            "slowest_step_s": context.heartbeat.slowest,
            "device_bytes": 0,
            "device_total_bytes": 0,
            "models": [],
        }
        if context.device.type == "cuda":
            own["device_name"] = torch.cuda.get_device_name(context.device)
            own["device_bytes"] = torch.cuda.memory_reserved(context.device)
            own["device_total_bytes"] = torch.cuda.get_device_properties(context.device).total_memory
        own.update(describe_models(context))
        return {"ranks": context.gather(own)}, []

    return status


def load_commands(where: str) -> dict[str, Command]:
    """The command table named by ``module:NAME`` or ``path/to/file.py:NAME``, with the built-in ones.

    If the table's module has a function `describe_models(context) -> dict`, `status` adds its entries.
    Raises ConfigError where there is no such module or table.
    """
    module, table = _import(where)
    status = make_status(getattr(module, "describe_models", lambda context: {}))
    return {**BUILT_IN, "status": status, **table}


def prepare_commands(where: str) -> None:
    """Import the commands, and call their module's `prepare()` if it has one: for what all ranks would import later."""
    module, _ = _import(where)
    getattr(module, "prepare", lambda: None)()


def _import(where: str) -> tuple[ModuleType, dict[str, Command]]:
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"commands {where!r} is not of the form 'module:NAME' or 'path/to/file.py:NAME'")
    try:
        module = _import_file(source) if source.endswith(".py") else importlib.import_module(source)
        return module, getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"the rank commands {where!r} cannot be loaded: {error}") from error


def _import_file(source: str) -> ModuleType:
    """The module of the file `source`; a forked rank finds the one that its launcher has imported."""
    known = sys.modules.get("comfy_tp_commands")
    if known is not None and known.__file__ == source:
        return known
    spec = importlib.util.spec_from_file_location("comfy_tp_commands", source)
    if spec is None or spec.loader is None or not Path(source).is_file():
        raise FileNotFoundError(f"no such file: {source}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
