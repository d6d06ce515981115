"""Entry script of the launcher and of every rank, run by its path: ``python .../core/ranks/entry.py``.

The package may lie in a folder of any name (``custom_nodes/comfy-tp``), so it is registered by path under the name
it has when installed. ComfyUI is never imported.
"""

import importlib.util
import sys
from pathlib import Path


def register_package() -> None:
    """Make the folder three levels up importable as ``comfy_tp``."""
    root = Path(__file__).absolute().parents[2]
    spec = importlib.util.spec_from_file_location(
        "comfy_tp", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{root} is not the comfy-tp package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["comfy_tp"] = module
    spec.loader.exec_module(module)


def main() -> None:
    # argv: this file, what to be (shown by ps), then for the launcher its log folder, for a rank its folder and number.
    # Python has followed the links in it, such as that of a pack that is linked into custom_nodes.
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    # diffusers imports peft wherever it is installed, which takes a second and a half; the ranks apply LoRAs themselves.
    sys.modules.setdefault("peft", None)  # type: ignore[arg-type]
    register_package()
    if sys.argv[1] == "comfy_tp launcher":
        from comfy_tp.core.ranks.launcher import main as run

        run()
    elif sys.argv[1] == "comfy_tp node":
        from comfy_tp.core.ranks.machines.node import main as run_node

        run_node(sys.argv[2:])
    else:
        from comfy_tp.core.ranks.rank import main as run_rank

        run_rank(sys.argv[2], int(sys.argv[3]))


if __name__ == "__main__":
    main()
