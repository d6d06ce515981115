"""The nodes: everything in this package that knows ComfyUI."""

from __future__ import annotations

import importlib
import logging
from typing import Any

log = logging.getLogger("comfy_tp.nodes")

# File under nodes/ -> the class in it. The order is the one in which ComfyUI registers them.
NODES = {
    "load_model": "LoadTPModel",
    "load_clip": "LoadTPCLIP",
    "load_vae": "LoadTPVAE",
    "load_lora": "LoadTPLoRA",
    "sampler": "TPSampler",
    "unload_model": "UnloadTPModel",
    "status": "TPStatus",
}


async def comfy_entrypoint() -> Any:
    """Return the pack's ``ComfyExtension``; ComfyUI calls it through the root ``__init__.py``."""
    from comfy_api.latest import ComfyExtension

    class TPExtension(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return node_list()

    return TPExtension()


def node_list() -> list[type]:
    """The node classes; where ComfyUI does not fit, stand-ins that say which version is needed."""
    from .seams import advice, problems

    found = problems()
    if not found:
        try:
            return [
                getattr(importlib.import_module(f".nodes.{name}", __name__), class_name)
                for name, class_name in NODES.items()
            ]
        except Exception as error:  # whatever the list of seams does not know of
            log.exception("the nodes cannot be imported")
            found = [f"its nodes cannot be imported ({type(error).__name__}: {error})"]
    from .misfit import stand_ins

    text = advice(found)
    log.error("%s", text)
    return stand_ins(text)
