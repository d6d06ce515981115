"""`Architecture`: what the core must know of one model class."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, UnsupportedError
from ..tp.collectives import Ranks
from ..wording import short


def _nothing(model: nn.Module, ranks: Ranks) -> None:
    """Bind nothing: the model's own forward runs on its local shards as it is."""


@dataclass(frozen=True)
class Architecture:
    """One shardable model class.

    `plan` maps module-name patterns to styles. `layouts` are the file layouts that its weights come in, besides
    diffusers' own. `bind(model, ranks)` puts our forwards onto a freshly sharded model; `merged` is how many
    all-reduces they save, from the model. `predict` turns ComfyUI's inputs into the model's call, with one token for
    `latent_patch` x `latent_patch` positions of the latent. `detect(entries)` recognises a single file by its tensor
    names and shapes, and gives the model's config. `ignored` are patterns of tensors that a file may hold though no
    parameter uses them.

    `heads_key` names the config entries with the counts of attention heads; the degree must divide them all.
    `published` are the configurations of published models, `examples` small ones for checks, both as changes to the
    class's defaults; `inputs(config, generator)` makes the arguments of one forward at an example's size, in float32.
    `differs` says why the plan is another than `comfy-tp plan` proposes, by the beginning of its keys.
    """

    name: str
    model_class: str
    plan: Mapping[str, Any] | None = None
    heads_key: str | tuple[str, ...] = "num_attention_heads"
    layouts: tuple[Any, ...] = ()
    bind: Callable[[nn.Module, Ranks], None] = _nothing
    merged: Callable[[nn.Module], int] = field(default=lambda model: 0)
    predict: Callable[..., torch.Tensor] | None = None
    latent_patch: int = 1
    detect: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None
    ignored: tuple[str, ...] = ()
    minimum_diffusers: str = "0.36.0"
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    inputs: Callable[[Mapping[str, Any], torch.Generator], dict[str, Any]] | None = None

    def plan_of(self, model: nn.Module) -> Mapping[str, Any]:
        """Our plan where there is one, else the class's own `_tp_plan`."""
        plan = self.plan if self.plan is not None else getattr(type(model), "_tp_plan", None)
        if plan is None:
            raise no_plan(type(model).__name__)
        return plan

    def heads(self, config: Mapping[str, Any]) -> int | None:
        """The number of attention heads in the model's `config`, which the degree must divide (R3).

        Of several counts, their greatest common divisor.
        """
        keys = (self.heads_key,) if isinstance(self.heads_key, str) else self.heads_key
        counts = [config[key] for key in keys if config and config.get(key) is not None]
        return math.gcd(*counts) if counts else None

    def recognise(self, entries: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `detect` makes of a single file; None too where a shape that it asks lacks a dimension or is empty."""
        try:
            return self.detect(entries) if self.detect is not None else None
        except (IndexError, ZeroDivisionError):
            return None

    def load_class(self, config: Mapping[str, Any] | None = None) -> type:
        """The diffusers model class, which takes the settings of `config`.

        Raises `UnsupportedError` when the installed diffusers is too old for the class or for one of the settings.
        """
        import diffusers

        if _numbers(diffusers.__version__) < _numbers(self.minimum_diffusers):
            raise UnsupportedError(
                f"{self.model_class} needs diffusers {self.minimum_diffusers} or newer; {diffusers.__version__} is "
                f"installed."
            )
        found = getattr(diffusers, self.model_class, None)
        if found is None:
            raise UnsupportedError(
                f"diffusers {diffusers.__version__} gives no {self.model_class}, which it should have. See what "
                f"`python -c 'from diffusers import {self.model_class}'` says, and install it again if that fails."
            )
        if unknown := unknown_settings(found, config or {}):
            raise UnsupportedError(f"{self.model_class}: {unknown}. Upgrade diffusers.")
        return found

    def supported(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Those of `published` or `examples` that the installed diffusers can make."""
        found = {}
        for name, config in configs.items():
            with contextlib.suppress(UnsupportedError):
                self.load_class(config)
                found[name] = config
        return found


def unknown_settings(model_class: type, config: Mapping[str, Any]) -> str:
    """Which settings of a model's `config` the installed class does not take, as a clause; empty when it takes all.

    diffusers itself leaves such a setting out and makes another model: FLUX.2 klein with diffusers 0.36, which does
    not know `guidance_embeds`, would be one with guidance.
    """
    import diffusers

    known = inspect.signature(model_class).parameters
    unknown = sorted(key for key in config if not key.startswith("_") and key not in known)
    if not unknown:
        return ""
    return (
        f"the installed diffusers {diffusers.__version__} does not know the setting{'s' if len(unknown) > 1 else ''} "
        f"{', '.join(map(short, unknown[:5]))}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.37.0.dev0" -> (0, 37, 0)."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def no_plan(name: str, known: str = "") -> PlanError:
    """The refusal of a model class without a plan; `known` is a sentence on those that have one."""
    return PlanError(
        f"'{name}' has no tensor-parallel plan: its class defines no `_tp_plan`. {known}"
        f"`comfy-tp plan {name}` proposes a plan for another model."
    )
