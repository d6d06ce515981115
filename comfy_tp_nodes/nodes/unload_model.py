"""Unload TP Model: frees shards and ranks at a chosen place of the graph."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...core.errors import ConfigError
from ..sharded import forget, known_models
from .schema import make_schema


class UnloadTPModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPUnloadModel",
            display_name="Unload TP Model",
            description=(
                "Frees the shards and ends their ranks once its input has arrived, and hands the input on. Put it "
                "behind the sampler to make room for what follows. The next run loads the model again."
            ),
            search_aliases=["free vram", "unload shards", "end ranks"],
            inputs=[
                io.AnyType.Input(
                    "trigger", tooltip="Anything, such as the sampler's LATENT. It is handed on as it is."
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="The MODEL to unload, from Load TP Model. Without it all of them are unloaded.",
                ),
            ],
            outputs=[io.AnyType.Output(display_name="trigger", tooltip="What came in.")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, trigger: Any, model: Any = None) -> io.NodeOutput:
        if model is None:
            models = known_models()
        else:
            models = [sharded_of(model)]
        for one in models:
            forget(one)
        return io.NodeOutput(trigger)


def sharded_of(patcher: Any) -> Any:
    """The sharded model of a MODEL. Raises `ConfigError` for one of another loader."""
    sharded = getattr(patcher, "sharded", None)
    if sharded is None:
        raise ConfigError(
            "This MODEL is not from Load TP Model. Connect one that is, or leave the input empty."
        )
    return sharded
