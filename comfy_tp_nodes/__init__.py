"""The nodes: everything in this package that knows ComfyUI."""

from __future__ import annotations

import importlib
import logging
from typing import Any

log = logging.getLogger("comfy_tp.nodes")

# Class of a node -> its file under nodes/. The order is the one in which ComfyUI registers them.
NODES = {
    "LoadTPModel": "load_model",
    "LoadTPCLIP": "load_clip",
    "LoadTPVAE": "load_vae",
    "LoadTPLoRA": "load_lora",
    "TPSampler": "sampler",
    "UnloadTPModel": "unload_model",
    "TPStatus": "status",
}


async def comfy_entrypoint() -> Any:
    """Return the pack's ``ComfyExtension``; ComfyUI calls it through the root ``__init__.py``."""
    from comfy_api.latest import ComfyExtension

    class TPExtension(ComfyExtension):
        async def get_node_list(self) -> list[type]:
            return node_list()

    return TPExtension()


def node_list() -> list[type]:
    """The node classes; for those that ComfyUI does not fit, stand-ins that say which version is needed."""
    from .seams import say_if_untested

    say_if_untested()
    return [node(class_name) for class_name in NODES]


def node(class_name: str) -> type:
    """The node class of that name, or its stand-in."""
    from .misfit import STAND_INS, stand_in
    from .seams import advice, problems

    feature = STAND_INS[class_name].feature
    found = list(problems(feature))
    if not found:
        try:
            return getattr(importlib.import_module(f".nodes.{NODES[class_name]}", __name__), class_name)
        except Exception as error:  # whatever the list of seams does not know of
            log.exception("%s cannot be imported", class_name)
            found = [f"its code cannot be imported ({type(error).__name__}: {error})"]
    text = advice(feature, found)
    log.error("%s", text)
    return stand_in(class_name, text)
