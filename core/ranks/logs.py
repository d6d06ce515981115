"""Where a group's logs go: one folder per group under the user's cache, the ten newest kept."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import ConfigError

KEPT = 10
RUNNING = "launcher.pid"
LAUNCHER_LOG = "launcher.log"


def cache_dir() -> Path:
    """The user's cache folder of this product (`XDG_CACHE_HOME` is honoured)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "comfy-tp"


@contextmanager
def _possible(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"there can be no log at {path}: {error.strerror or error}. Let it be written, or choose another folder: "
            "XDG_CACHE_HOME in the environment, log_dir in Python."
        ) from None


def make_log_dir(path: Path) -> Path:
    """Make a log folder that somebody chose, unless it is there; raises ConfigError where it cannot be made."""
    with _possible(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def new_log_dir(*, running: bool = False) -> Path:
    """Make the log folder of a new group, and remove the oldest ones of groups that have ended.

    running: mark it as that of this process, for as long as it lives. Raises ConfigError where it cannot be made.
    """
    root = make_log_dir(cache_dir() / "logs")
    with _possible(root):
        stamp = time.strftime("%Y%m%d-%H%M%S")
        number = 0
        while True:
            path = root / (f"{stamp}-{os.getpid()}" + (f"-{number}" if number else ""))
            try:
                path.mkdir(mode=0o700)
                break
            except FileExistsError:
                number += 1
        if running:
            (path / RUNNING).write_text(str(os.getpid()))
        _prune(root, path)
    return path


def logs_for(degree: int, folder: str | os.PathLike[str] | None) -> Path:
    """The folder of a group's logs, `folder` or a new one, in which every log can be written; errors as above."""
    made = (new_log_dir() if folder is None else make_log_dir(Path(folder))).absolute()
    for name in (LAUNCHER_LOG, *map(rank_log, range(degree))):
        open_log(made / name).close()
    return made


def rank_log(rank: int) -> str:
    """The name of a rank's log in the group's folder."""
    return f"rank-{rank}.log"


def open_log(path: Path) -> TextIO:
    """A log to append to, the user's alone; raises ConfigError where it cannot be opened."""
    with _possible(path):
        return open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))


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
