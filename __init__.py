"""comfy-tp: tensor parallelism for diffusion transformers.

ComfyUI reads this file when the folder lies in ``custom_nodes/``; Python reads it as the package ``comfy_tp``
in scripts, in tests and in every rank. So it imports nothing: the nodes are imported inside the entry point.
"""

WEB_DIRECTORY = "./comfy_tp_nodes/web"


async def comfy_entrypoint():
    """Return the pack's ``ComfyExtension``; called by ComfyUI alone."""
    from .comfy_tp_nodes import comfy_entrypoint as entrypoint

    return await entrypoint()
