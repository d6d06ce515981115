"""Installing the pack into an artist's environment changes no version there, the oldest supported one included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
from comfy_inprocess import save_small_model

from comfy_tp.core.checkpoint import Checkpoint
from comfy_tp.core.errors import CheckpointError
from comfy_tp.core.load import open_model

ROOT = Path(__file__).parents[1]

# The oldest releases that the pack runs with, and what their metadata asks of each other.
FLOOR = {
    "diffusers": ("0.36.0", ["huggingface-hub>=0.34.0,<2.0", "safetensors>=0.3.1"]),
    "transformers": (
        "4.57.0",
        ["huggingface-hub>=0.34.0,<1.0", "safetensors>=0.4.3", "tokenizers>=0.22.0,<=0.23.0"],
    ),
    "huggingface_hub": ("0.34.0", []),
    "safetensors": ("0.4.3", []),
    "tokenizers": ("0.22.0", []),
}


def pretend(folder: Path, versions: dict[str, tuple[str, list[str]]]) -> Path:
    """A folder for the import path in which these distributions are installed, as far as pip can see."""
    for name, (version, needs) in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {one}" for one in needs),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "RECORD").write_text("")
        (info / "INSTALLER").write_text("pip\n")
    return folder


def would_install(source: Path, path: Path | None) -> dict[str, str]:
    """Name -> version of all that `pip install` of the pack would put there. Nothing is installed or downloaded."""
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", "--quiet"]
        + ["--report", "-", str(source)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in report["install"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pack, so that building its metadata leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("pack") / "source"
    ignored = shutil.ignore_patterns(
        ".*", "tests", "build", "dist", "__pycache__", "*.egg-info", "*.png", "*.jpg"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def test_installing_the_pack_changes_no_version_here(source):
    assert set(would_install(source, None)) == {"comfy-tp"}


def test_installing_the_pack_changes_no_version_in_the_oldest_supported_environment(source, tmp_path):
    assert set(would_install(source, pretend(tmp_path, FLOOR))) == {"comfy-tp"}


def test_an_environment_below_the_floor_would_be_changed(source, tmp_path):
    below = {**FLOOR, "diffusers": ("0.35.0", FLOOR["diffusers"][1])}
    with pytest.raises(AssertionError, match=r"diffusers>=0\.36"):
        would_install(source, pretend(tmp_path, below))


def test_a_model_that_needs_a_newer_diffusers_says_so(tmp_path):
    """As FLUX.2 klein does with diffusers 0.36, which does not know `guidance_embeds`."""
    folder = save_small_model(tmp_path / "model", guidance_embeds=False)
    config = json.loads((folder / "config.json").read_text())
    del config["guidance_embeds"]
    (folder / "config.json").write_text(json.dumps({**config, "guides": False}))
    with pytest.raises(
        CheckpointError,
        match=rf"missing tensor .*If the file is whole, upgrade diffusers: the installed diffusers {diffusers.__version__} "
        "does not know the setting guides",
    ):
        open_model(Checkpoint.open(folder))
