"""Where a group's logs go: one folder per group under the user's cache, the ten newest kept."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

KEPT = 10
RUNNING = "launcher.pid"


def cache_dir() -> Path:
    """The user's cache folder of this product (`XDG_CACHE_HOME` is honoured)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "comfy-tp"


def new_log_dir() -> Path:
    """Make the log folder of a new group, and remove the oldest ones of groups that have ended."""
    root = cache_dir() / "logs"
    root.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        path = root / (f"{stamp}-{os.getpid()}" + (f"-{number}" if number else ""))
        try:
            path.mkdir(mode=0o700)
            break
        except FileExistsError:
            number += 1
    _prune(root, path)
    return path


def _running(folder: Path) -> bool:
    try:
        os.kill(int((folder / RUNNING).read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _prune(root: Path, newest: Path) -> None:
    folders = sorted((entry for entry in root.iterdir() if entry.is_dir()), key=lambda entry: entry.name)
    for folder in folders[:-KEPT]:
        if folder != newest and not _running(folder):
            shutil.rmtree(folder, ignore_errors=True)


def tail(path: str | Path, limit: int = 3000) -> str:
    """The end of a log file, or nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
