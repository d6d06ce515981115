"""The rank groups of this ComfyUI: one per choice of devices, started on first use and kept between prompts.

Groups on other machines are not started here but connected to. Their token comes from a file that the server's owner
names, never from a workflow; without it this ComfyUI connects nowhere.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.ranks.client import RankGroup
from ..core.ranks.machines.secret import read_token

log = logging.getLogger("comfy_tp.nodes")

TOKEN_FILE = "COMFY_TP_TOKEN_FILE"

Key = tuple[tuple[str, ...], str | None]

_groups: dict[Key, RankGroup] = {}
_lock = threading.Lock()  # of the table alone: the status is read in other threads while ranks start
_starting = threading.RLock()  # held while ranks start, so that one choice of devices gets one group


def group_for(
    devices: tuple[str, ...], backend: str | None = None, *, poll: Callable[[], None] | None = None
) -> RankGroup:
    """The group on these devices; a dead one is replaced, an absent one started.

    `poll` is called while the ranks end a cancelled command, and while they start. Raises `RankError` when they do not
    start, and whatever `poll` raises.
    """
    key = (devices, backend)
    with _starting:
        group = running().get(key)
        if group is not None and group.settled(poll=poll):
            return group
        if group is not None:
            log.warning("Starting the ranks on %s again: %s", ", ".join(devices), _first_line(group.failure))
            close_group(group)
        log.info(
            "Starting %d rank%s on %s", len(devices), "s" if len(devices) > 1 else "", ", ".join(devices)
        )
        group = RankGroup.start(list(devices), backend=backend, poll=poll)
        with _lock:
            _groups[key] = group
        return group


def connected(address: str) -> RankGroup:
    """The group that runs at `address` ("tcp://HOST:PORT"); a lost connection is made anew.

    Raises `ConfigError` where the owner has given no token, `RankError` where the group does not admit us.
    """
    key = ((address,), None)
    with _starting:
        group = running().get(key)
        if group is not None and group.alive:
            return group
        named = os.environ.get(TOKEN_FILE, "").strip()
        if not named:
            raise ConfigError(
                f"devices: the group at {address} asks for its token, and this ComfyUI has none. Start ComfyUI with "
                f"{TOKEN_FILE}=FILE, where FILE is a copy of the token file of the group's first machine."
            )
        try:
            token = read_token(Path(named).expanduser())
        except ConfigError as error:
            raise ConfigError(f"{TOKEN_FILE}: {error}") from None
        if group is not None:
            log.warning("Connecting to %s again: %s", address, _first_line(group.failure))
            close_group(group)
        group = RankGroup.connect(address, token)
        log.info("Connected to %d ranks at %s", group.degree, address)
        with _lock:
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
