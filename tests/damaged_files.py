"""Open many damaged files in a process of its own and say what happened: FOLDER COUNT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from weight_files import damaged, small_model

from comfy_tp.core.checkpoint import Checkpoint
from comfy_tp.core.errors import CheckpointError


def peak_kilobytes() -> int:
    """The most memory that this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RuntimeError("no VmHWM in /proc/self/status")


def main(folder: Path, count: int) -> int:
    """Each file must be refused with its name in the text; prints the growth of the peak while opening them."""
    whole = folder / "whole.safetensors"
    small_model(whole)
    refused = 0
    rise = 0
    for seed in range(count):
        path = folder / f"damaged-{seed}.safetensors"
        kind = damaged(seed, whole, path)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_kilobytes()
        try:
            Checkpoint.open(path)
        except CheckpointError as error:
            refused += 1
            if str(path) not in str(error):
                print(f"{kind} (seed {seed}): the file is not named: {error}")
                return 1
        else:
            print(f"{kind} (seed {seed}): not noticed")
            return 1
        rise = max(rise, peak_kilobytes() - before)
        path.unlink()
    print(json.dumps({"refused": refused, "peak_mb": rise / 1000}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
