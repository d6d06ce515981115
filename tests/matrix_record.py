"""What a test found out about a release of ComfyUI, kept for docs/comfyui.md."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tp.comfyui import comfyui_path, printed
from comfy_tp.comfyui.tree import version_of

ROOT = Path(__file__).resolve().parents[1]
# `make matrix` sets it.
VARIABLE = "COMFY_TP_MATRIX_REPORT"


def release() -> str:
    """The name of the ComfyUI that the tests run on."""
    path = comfyui_path()
    return version_of(path) or printed(path) or "unknown"


def write(kind: str, found: Mapping[str, Any]) -> None:
    """Keep `found` as KIND-RELEASE.json: beside the page in `make matrix`, else in tests/output/."""
    folder = ROOT / ("docs" if VARIABLE in os.environ else "tests/output") / "comfyui"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True)
    (folder / f"{kind}-{release()}.json").write_text(text + "\n")
