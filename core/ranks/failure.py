"""Errors across processes: an exception on a rank as JSON, and the exception the client raises for it."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path
from typing import Any

import torch

from .. import errors
from ..errors import Cancelled, RankError, RankOutOfMemory, TPError

log = logging.getLogger("comfy_tp.rank")

TRACEBACK_TAIL = 6000
# Marks a described error that ended its rank, and with it the group.
ENDS = "ends"

# The refusals that keep their type: every TPError, by its name.
REFUSALS: dict[str, type[TPError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TPError)
}


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left for an allocation."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError, RankOutOfMemory)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def describe(
    error: BaseException, rank: int | None, device: str | None, logs: str | None = None
) -> dict[str, Any]:
    """An exception as JSON. `logs`: where the rank's log is, if the client cannot know."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    kind = type(error).__name__
    if out_of_memory(error):
        kind = RankOutOfMemory.__name__
    return {
        "type": kind,
        "original": type(error).__name__,
        "message": str(error)[:20000],
        "traceback": text[-TRACEBACK_TAIL:],
        "rank": rank,
        "device": device,
        "logs": logs,
    }


def choose(described: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Of the errors of all ranks, the one that tells the cause.

    Out of memory comes first, a rank that only stopped for another's sake last, and of equals the lowest rank.
    """
    present = [error for error in described if error]
    order = {RankOutOfMemory.__name__: 0, Cancelled.__name__: 2}
    return min(present, key=lambda error: order.get(error["type"], 1))


def rebuild(described: dict[str, Any], *, log_dir: str | None = None, note: str = "") -> TPError:
    """The exception the client raises for a described one.

    A refusal of ours keeps its type and text. Any other exception is a RankError that names rank and device and
    carries the traceback's tail; running out of memory is a RankOutOfMemory. These name the rank's log, or `log_dir`
    where it is not described.
    """
    name = str(described.get("type"))
    message = str(described.get("message"))
    rank = described.get("rank") if isinstance(described.get("rank"), int) else None
    device = described.get("device") if isinstance(described.get("device"), str) else None
    kind = REFUSALS.get(name)
    if kind is not None and not issubclass(kind, RankError):
        return kind(message + note)
    log_dir = described["logs"] if isinstance(described.get("logs"), str) else log_dir
    logs = f"\nLogs: {log_dir}" if log_dir else ""
    tail = str(described.get("traceback") or "").rstrip()
    tail = f"\n{tail}" if tail else ""
    where = f"Rank {rank} ({device})"
    if kind is RankOutOfMemory:
        first = f"{where} ran out of memory: {message}"
        return RankOutOfMemory(f"{first}{note}{tail}{logs}", rank=rank, device=device)
    if kind is RankError:
        return RankError(f"{message}{note}{logs}", rank=rank, device=device)
    first = f"{where} raised {described.get('original', name)}: {message}"
    return RankError(f"{first}{note}{tail}{logs}", rank=rank, device=device)


def record(folder: Path, rank: int, error: dict[str, Any]) -> None:
    """Leave a described error for the launcher; the file is there only when it is complete.

    Where it cannot be written (no room, or a cleaner has removed the folder), the error goes its other ways.
    """
    path = _record(folder, rank)
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(json.dumps(error))
        unfinished.replace(path)
    except OSError as reason:
        log.warning("%s cannot be written: %s", path, reason)


def recorded(folder: Path, rank: int) -> dict[str, Any] | None:
    """The error that a rank has left, if it has."""
    try:
        return json.loads(_record(folder, rank).read_text())
    except (OSError, ValueError):
        return None


def _record(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"
