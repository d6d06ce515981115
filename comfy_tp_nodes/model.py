"""ComfyUI's own FLUX.2 model object, without weights, for a model that lives on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.conds
import comfy.ldm.flux.model
import comfy.model_base
import comfy.supported_models
import torch

from ..core.errors import UnsupportedError
from .conditioning import KEYS, TEXT_LENGTH, KeyCond
from .proxy import CONTEXT, REFERENCES, ShardedFlux
from .sharded import ShardedModel
from .source import ModelSource

# Keys of a conditioning that reach inside the model and that the ranks do not implement: key -> node that sets it.
REFUSED_CONDITIONING = {
    "control": "ControlNet (the Apply ControlNet node)",
    "gligen": "GLIGEN (the GLIGENTextBoxApply node)",
    "hooks": "hooks (the Cond Set Props or Create Hook nodes)",
}
# What diffusers' Flux2Transformer2DModel takes where its config.json is silent.
CONFIG_DEFAULTS: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 8,
    "num_single_layers": 48,
    "attention_head_dim": 128,
    "num_attention_heads": 48,
    "joint_attention_dim": 15360,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": True,
}


class ShardedFlux2(comfy.model_base.Flux2):
    """`comfy.model_base.Flux2` around `ShardedFlux`. `sharded` is the model on the ranks, shared by all clones."""

    def __init__(self, model_config: Any, sharded: ShardedModel):
        super().__init__(model_config, device="meta", unet_model=ShardedFlux)
        # BaseModel keeps the construction device as where its weights lie; nothing is loaded yet.
        self.device = None
        self.sharded = sharded
        self.device_shards: dict[
            str, Any
        ] = {}  # device -> what stands for its shards, shared by all patchers
        self.diffusion_model.sharded = sharded
        sharded.serve(self)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What core casts inputs to: the manual cast dtype if set, else the model's own."""
        return self.manual_cast_dtype or self.get_dtype()

    def extra_conds(self, **kwargs: Any) -> dict[str, comfy.conds.CONDRegular]:
        """The conditioning as core makes it, with keys in place of the text and of the reference latents."""
        for name, what in REFUSED_CONDITIONING.items():
            if kwargs.get(name) is not None:
                raise UnsupportedError(
                    f"A model from Load TP Model cannot honour {what}. Remove it from the conditioning, or load the "
                    f"model with the stock loader."
                )
        cross_attn = kwargs.pop("cross_attn", None)
        latents = kwargs.get("reference_latents")
        conds = super().extra_conds(**kwargs)
        if cross_attn is not None:
            conds[CONTEXT] = KeyCond.of([KEYS.rows(cross_attn, self.compute_dtype, TEXT_LENGTH)])
        if latents and conds.pop("ref_latents", None) is not None:
            processed = [(latent, self.process_latent_in(latent)) for latent in latents]
            conds[REFERENCES] = KeyCond.of(
                # Rows are remembered per tensor: where processing changes nothing, under the latent itself.
                [
                    KEYS.rows(done if done is not latent else latent, self.compute_dtype)
                    for latent, done in processed
                ]
            )
        return conds

    def memory_required(self, input_shape: Any, cond_shapes: Mapping[str, Any] = {}) -> float:  # noqa: B006
        """Bytes that one rank needs beside its shards for a call on `input_shape` [B, C, h, w]; an upper estimate.

        The peak is a single block: its packed projection, the rotated heads, the gated MLP and the joined input
        of the last layer are split over the ranks; residual, norms and the reduced output are whole.
        """
        params = self.diffusion_model.params
        batch = input_shape[0]
        tokens = input_shape[-1] * input_shape[-2] + TEXT_LENGTH
        for shapes in (cond_shapes.get("ref_latents") or [], cond_shapes.get(REFERENCES) or []):
            if shapes:
                tokens += max(shape[-1] for shape in shapes)
                break
        split = (8 + 3 * params.mlp_ratio) / self.sharded.placement.degree
        itemsize = self.compute_dtype.itemsize
        return float(batch * tokens * params.hidden_size * (split + 8) * itemsize)

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Refused: the weights are on the ranks."""
        raise UnsupportedError(
            "A model from Load TP Model cannot be saved from here: its weights lie in shards on the ranks. Save it "
            "with the stock loader."
        )


def unet_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """ComfyUI's description of a FLUX.2 model, from diffusers' `config`.

    Made here because core's detection takes 48 heads of 128 for granted, which only FLUX.2-dev has.
    """
    known = {**CONFIG_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    channels = known["in_channels"]
    made = {
        "image_model": "flux2",
        "in_channels": channels,
        "out_channels": known.get("out_channels", channels),
        "patch_size": known["patch_size"],
        "hidden_size": known["num_attention_heads"] * known["attention_head_dim"],
        "num_heads": known["num_attention_heads"],
        "depth": known["num_layers"],
        "depth_single_blocks": known["num_single_layers"],
        "context_in_dim": known["joint_attention_dim"],
        "mlp_ratio": known["mlp_ratio"],
        "axes_dim": list(known["axes_dims_rope"]),
        "theta": known["rope_theta"],
        "guidance_embed": known["guidance_embeds"],
        "vec_in_dim": None,
        "qkv_bias": False,
        "ops_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }
    # Newer ComfyUI needs it, 0.3.75 does not know it.
    fields = getattr(comfy.ldm.flux.model.FluxParams, "__dataclass_fields__", {})
    if "txt_ids_dims" in fields:
        made["txt_ids_dims"] = [3]
    return made


def check_sampled(source: ModelSource) -> None:
    """Raise `UnsupportedError` for a model that can be sharded but whose calls ComfyUI's side does not make yet."""
    if source.architecture.name != "flux2":
        raise UnsupportedError(
            f"{source.path} holds a {source.architecture.model_class}. Load TP Model can sample FLUX.2 (dev and klein) "
            f"in ComfyUI today. Load this file with the stock loader, or run it sharded from Python (README, "
            f"`from_pretrained`)."
        )


def build_model(sharded: ShardedModel) -> ShardedFlux2:
    """The ComfyUI model object for `sharded`: the living one if there is one, else a new skeleton on meta."""
    living = sharded.comfy_model()
    if living is not None:
        return living
    config = comfy.supported_models.Flux2(unet_config(sharded.source.config))
    dtype = sharded.source.compute_dtype(sharded.dtype, sharded.placement.devices[0])
    config.set_inference_dtype(getattr(torch, dtype), None)
    return ShardedFlux2(config, sharded)
