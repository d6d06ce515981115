"""The rank groups of this ComfyUI: one per choice of devices, started on first use and kept between prompts."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any

from ..core.group.client import RankGroup

log = logging.getLogger("comfy_tp.nodes")

Key = tuple[tuple[str, ...], str | None]

_groups: dict[Key, RankGroup] = {}
_lock = threading.RLock()


def group_for(
    devices: tuple[str, ...], backend: str | None = None, *, poll: Callable[[], None] | None = None
) -> RankGroup:
    """The group on these devices; a dead one is replaced, an absent one started.

    `poll` is called while the ranks start. Raises `RankError` when they do not start, and whatever `poll` raises.
    """
    key = (devices, backend)
    with _lock:
        group = _groups.get(key)
        if group is not None and group.alive:
            return group
        if group is not None:
            log.warning("Starting the ranks on %s again: %s", ", ".join(devices), _first_line(group.failure))
            close_group(group)
        log.info(
            "Starting %d rank%s on %s", len(devices), "s" if len(devices) > 1 else "", ", ".join(devices)
        )
        group = RankGroup.start(list(devices), backend=backend, poll=poll)
        _groups[key] = group
        return group


def running() -> dict[Key, RankGroup]:
    """All groups, also dead ones that nobody has replaced yet."""
    with _lock:
        return dict(_groups)


def close_group(group: RankGroup) -> None:
    """End the ranks of `group` and forget it."""
    with _lock:
        for key, known in list(_groups.items()):
            if known is group:
                del _groups[key]
    group.close()


def close_all() -> None:
    """End the ranks of every group."""
    for group in running().values():
        close_group(group)


def _first_line(failure: Any) -> str:
    return str(failure).splitlines()[0] if failure and str(failure) else "the group was closed"


atexit.register(close_all)
