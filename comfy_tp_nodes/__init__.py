"""The nodes: everything in this package that knows ComfyUI."""


async def comfy_entrypoint():
    """Return the pack's ``ComfyExtension``; ComfyUI calls it through the root ``__init__.py``."""
    from comfy_api.latest import ComfyExtension

    class TPExtension(ComfyExtension):
        async def get_node_list(self):
            return []

    return TPExtension()
