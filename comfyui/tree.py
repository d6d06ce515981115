"""The trees of ComfyUI in the cache: where they lie, whether they are whole, and what is known of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.errors import ConfigError, TPError
from .bounded import Deadline
from .releases import OLDEST, refuse_old
from .repository import Snapshot

RECORD = ".comfy-tp.json"
# What every ComfyUI since the oldest supported one has.
PARTS = (
    *("main.py", "nodes.py", "execution.py", "server.py", "folder_paths.py"),
    *("comfy", "comfyui_version.py", "requirements.txt"),
)
NAMED = 3  # files that a sentence lists


@dataclass(frozen=True)
class Tree:
    """One tree in the cache. `fault` says why it is none that runs; `commit` is None where nobody recorded it."""

    version: str
    path: Path
    prints: str | None
    source: str | None = None
    commit: str | None = None
    missing: tuple[str, ...] = ()
    fault: str | None = None


def cache_folder() -> Path:
    """``$COMFY_TP_CACHE``, else ``comfy-tp`` in the user's cache folder."""
    chosen = os.environ.get("COMFY_TP_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "comfy-tp"


def tree_folder(version: str) -> Path:
    """Where the tree of a release lies in the cache."""
    return cache_folder() / f"ComfyUI-{version}"


def version_of(tree: Path) -> str | None:
    """The name of a tree in the cache, None for one that lies elsewhere."""
    tree = tree.resolve()
    inside = tree.parent == cache_folder().resolve()
    return tree.name.removeprefix("ComfyUI-") if inside and tree.name.startswith("ComfyUI-") else None


def cached() -> list[Tree]:
    """Every tree in the cache."""
    return [read(path.name.removeprefix("ComfyUI-")) for path in cache_folder().glob("ComfyUI-*")]


def read(version: str) -> Tree:
    """What is known of the tree of a release in the cache, which is there."""
    path = tree_folder(version)
    record = _record(path)
    return Tree(
        version,
        path,
        printed(path),
        record.get("source"),
        record.get("commit"),
        tuple(record.get("missing", ())),
        fault(path),
    )


def write_record(tree: Path, snapshot: Snapshot) -> None:
    """Note beside a tree's files what it is."""
    (tree / RECORD).write_text(json.dumps(asdict(snapshot), indent=1) + "\n")


def _record(tree: Path) -> dict:
    try:
        content = json.loads((tree / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def printed(tree: Path) -> str | None:
    """The version that a ComfyUI prints of itself, None without one."""
    try:
        text = (tree / "comfyui_version.py").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", text)
    return found.group(1) if found else None


def fault(tree: Path) -> str | None:
    """Why a tree is no whole ComfyUI, in words that follow "it", or None."""
    parts = [name for name in PARTS if not (tree / name).exists()]
    if parts:
        return f"has no {', '.join(parts)}"
    files = _record(tree).get("files", ())
    lost = [name for name in files if not (tree / name).exists()]
    if lost:
        more = ", …" if len(lost) > NAMED else ""
        return f"lacks {len(lost)} of its {len(files)} files ({', '.join(lost[:NAMED])}{more})"
    return None


def check_given(tree: Path, name: str) -> Path:
    """A folder that the variable `name` points to, if it holds a ComfyUI that is new enough. Raises ConfigError."""
    if not (tree / "main.py").is_file() or not (tree / "comfy").is_dir():
        raise ConfigError(
            f"{name} is {tree}, but that is no ComfyUI (no main.py beside comfy/). "
            "Point it at the folder that ComfyUI is started from, or unset it to use a cached one."
        )
    refuse_old(printed(tree) or OLDEST, f"what {name} points to")
    if (tree / RECORD).is_file() and (why := fault(tree)):
        raise ConfigError(f"{name} is {tree}, which {why}: it is half a ComfyUI. Fetch it again.")
    return tree


@contextlib.contextmanager
def locked(deadline: Deadline) -> Iterator[Path]:
    """The cache for this process alone; another one waits until the deadline."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / ".lock"
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not deadline.left():
                    raise TPError(
                        f"{path} has been locked by another process for {deadline.seconds:.0f} s: "
                        "it fetches a ComfyUI. Wait for it, or set COMFYUI_PATH to a folder that holds one."
                    ) from None
                time.sleep(0.2)
        yield cache
