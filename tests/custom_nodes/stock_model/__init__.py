"""ComfyUI's own loader of a diffusion model, for FLUX.2 files of any width.

Releases up to 0.8 take every FLUX.2 for one of 48 heads; the loader here tells them how many the file has.
"""

import contextlib

import comfy.model_detection
import comfy.sd
import folder_paths
from comfy_api.latest import ComfyExtension, io


class StockModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TPTestStockModel",
            display_name="Stock Model (test)",
            category="comfy-tp tests",
            inputs=[io.String.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model):
        with heads_as_in_the_file():
            path = folder_paths.get_full_path_or_raise("diffusion_models", model)
            return io.NodeOutput(comfy.sd.load_diffusion_model(path))


@contextlib.contextmanager
def heads_as_in_the_file():
    own = comfy.model_detection.detect_unet_config

    def detect(*arguments, **options):
        found = own(*arguments, **options)
        if found and found.get("image_model") == "flux2":
            found["num_heads"] = found["hidden_size"] // sum(found["axes_dim"])
        return found

    comfy.model_detection.detect_unet_config = detect
    try:
        yield
    finally:
        comfy.model_detection.detect_unet_config = own


class StockModelPack(ComfyExtension):
    async def get_node_list(self):
        return [StockModel]


async def comfy_entrypoint():
    return StockModelPack()
