"""What to say of a file that no architecture recognises: which it resembles, and what it lacks of that one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import CheckpointError
from ..wording import short
from .architecture import Architecture


class Asked(dict):
    """The tensors of a file, which notes for which names it was asked: True for those that it has."""

    def __init__(self, entries: Mapping[str, Any]):
        super().__init__(entries)
        self.answers: dict[str, bool] = {}

    def get(self, name: str, default: Any = None) -> Any:
        self.answers[name] = name in self
        return super().get(name, default)


def unrecognised(path: str, entries: Mapping[str, Any], known: Collection[Architecture]) -> CheckpointError:
    """The refusal of the file at `path`, which none of the `known` architectures recognises by its tensors."""
    asked = [(*_asked(one, entries), one) for one in known]
    share, lacking, architecture = max(asked, key=lambda one: one[0])
    if share < 0.5:
        names = ", ".join(one.name for one in known)
        return CheckpointError(
            f"{path} is not a model that can be sharded: its tensor names fit none of {names}. Choose "
            f"the file of a FLUX.2, FLUX.1 or Qwen-Image transformer, or a diffusers folder with config.json."
        )
    if not lacking:
        return CheckpointError(
            f"{path} is not a model that can be sharded: it has the names of a {architecture.model_class}, but their "
            f"shapes are those of none. The file is damaged; download it again."
        )
    names = ", ".join(f"'{short(name)}'" for name in lacking[:3])
    return CheckpointError(
        f"{path} resembles a {architecture.model_class} but has no {names}, so it cannot be sharded. It is another model "
        f"that was made from one, or a part of one: choose the whole model's file, or load this one with the stock loader."
    )


def _asked(architecture: Architecture, entries: Mapping[str, Any]) -> tuple[float, list[str]]:
    """Which share of the names that `architecture` recognises a file by it has, and those that it lacks.

    Of the two names of a norm's weight one is enough.
    """
    asked = Asked(entries)
    architecture.recognise(asked)
    stems: dict[str, str] = {}
    has: dict[str, bool] = {}
    for name, there in asked.answers.items():
        stem = name.removesuffix(".scale").removesuffix(".weight")
        stems.setdefault(stem, name)
        has[stem] = has.get(stem, False) or there
    lacking = [stems[stem] for stem, there in has.items() if not there]
    return (1 - len(lacking) / len(has) if has else 0.0), lacking
