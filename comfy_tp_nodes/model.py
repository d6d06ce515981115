"""ComfyUI's own model objects, without weights, for models that live on the ranks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import comfy.conds
import torch

from ..core.calls.keys import KEYS
from ..core.checkpoint.settings import config_path
from ..core.errors import UnsupportedError
from ..core.models import flux2, qwenimage
from ..core.tp.skeleton import building
from . import seams
from .conditioning import KeyCond
from .errors import refuse_training
from .proxy import CONTEXT, REFERENCES
from .sharded import ShardedModel
from .source import ModelSource

# Keys of a conditioning that reach inside the model and that the ranks do not implement: key -> node that sets it.
REFUSED_CONDITIONING = {
    "control": "ControlNet (the Apply ControlNet node)",
    "gligen": "GLIGEN (the GLIGENTextBoxApply node)",
    "hooks": "hooks (the Cond Set Props or Create Hook nodes)",
    "attention_mask_img_shape": "an attention bias (the Apply Style Model node with strength_type attn_bias; multiply works)",
}
# The class of ComfyUI comes after the mixin, so that at run time there is nothing to derive from.
if TYPE_CHECKING:
    from comfy.model_base import BaseModel
else:
    BaseModel = object

# Text tokens that the estimate of a call's memory counts on.
TYPICAL_TEXT = 512


class ShardedBase(BaseModel):
    """What turns a model class of ComfyUI into one whose weights are on the ranks.

    `sharded` is the model there, shared by all clones; `diffusion_class` is what answers the calls. Mixed in before the
    class of ComfyUI.
    """

    diffusion_class: type
    text_length = 0  # shorter text is padded to it

    def __init__(self, model_config: Any, sharded: ShardedModel, **options: Any):
        super().__init__(model_config, device="meta", **options)
        # The skeleton as ComfyUI builds it, with another forward.
        self.diffusion_model.__class__ = self.diffusion_class
        self.diffusion_model.sharded = sharded
        self.diffusion_model.text_length = self.text_length
        # BaseModel keeps the construction device as where its weights lie; nothing is loaded yet.
        self.device = None
        self.sharded = sharded
        # device -> what stands for its shards, shared by all patchers
        self.device_shards: dict[str, Any] = {}
        # What the patchers of all loader nodes share: the first of them, and what object patches have replaced.
        self.first_patcher: Callable[[], Any] = lambda: None
        self.object_patches_backup: dict[str, Any] = {}
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
            conds[CONTEXT] = KeyCond.of([KEYS.rows(cross_attn, self.compute_dtype, self.text_length)])
        if latents and conds.pop("ref_latents", None) is not None:
            # Rows are remembered per tensor, and where processing changes nothing (FLUX.2) it hands on the latent itself.
            conds[REFERENCES] = KeyCond.of(
                [KEYS.rows(self.process_latent_in(latent), self.compute_dtype) for latent in latents]
            )
        return conds

    def memory_required(self, input_shape: Any, cond_shapes: Mapping[str, Any] = {}) -> float:  # noqa: B006
        """Bytes that one rank needs beside its shards for a call on `input_shape` [B, C, ..., h, w]; an upper estimate.

        The peak is a single block: its packed projection, the rotated heads, the gated MLP and the joined input
        of the last layer are split over the ranks; residual, norms and the reduced output are whole.
        """
        model = self.diffusion_model
        patch = model.patch_size**2
        tokens = math.ceil(input_shape[-1] * input_shape[-2] / patch) + TYPICAL_TEXT
        for shapes in (cond_shapes.get("ref_latents") or [], cond_shapes.get(REFERENCES) or []):
            if shapes:
                tokens += math.ceil(max(shape[-1] for shape in shapes) / patch)
                break
        split = (8 + 3 * model.mlp_ratio) / self.sharded.placement.degree
        itemsize = self.compute_dtype.itemsize
        return float(input_shape[0] * tokens * model.width * (split + 8) * itemsize)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, but refused outside inference mode.

        There training begins: it freezes all parameters, or puts a LoRA around every module, and both go through here.
        """
        if not torch.is_inference_mode_enabled():
            refuse_training()
        return super().named_modules(*args, **kwargs)

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Refused: the weights are on the ranks."""
        raise UnsupportedError(
            "A model from Load TP Model cannot be saved from here: its weights lie in shards on the ranks. Save it "
            "with the stock loader."
        )


class Family(NamedTuple):
    """Models that ComfyUI can sample on the ranks: the feature of `seams`, and the module whose `skeleton` builds them.

    `skeleton(config)` takes diffusers' config and returns ComfyUI's model configuration, our class around it and what
    else its constructor takes.
    """

    feature: str
    module: str


# Architecture -> its family. A module is imported when a model of it is loaded, and its names of ComfyUI are there.
FAMILIES = {
    "flux2": Family(seams.FLUX2, "flux2"),
    "flux": Family(seams.FLUX1, "flux"),
    "qwenimage": Family(seams.QWEN_IMAGE, "qwenimage"),
}


# Refuses those of its models whose calls the core does not make.
PREDICTED = {"flux2": flux2.check_predicted, "qwenimage": qwenimage.check_predicted}


def family(architecture: str) -> ModuleType:
    """The module of `FAMILIES` for `architecture`."""
    return importlib.import_module(f".families.{FAMILIES[architecture].module}", __package__)


def check_sampled(source: ModelSource) -> None:
    """Raise `UnsupportedError` for a model that can be sharded but whose calls ComfyUI's side does not make yet."""
    known = FAMILIES.get(source.architecture.name)
    if known is None:
        raise UnsupportedError(
            f"{source.path} holds a {source.architecture.model_class}. Load TP Model can sample FLUX.2, FLUX.1 and "
            f"Qwen-Image in ComfyUI today. Load this file with the stock loader, or run it sharded from Python (README, "
            f"`from_pretrained`)."
        )
    seams.require(known.feature)
    check = PREDICTED.get(source.architecture.name)
    if check is not None:
        check(source.config, source.path)


def build_model(sharded: ShardedModel) -> Any:
    """The ComfyUI model object for `sharded`: the living one if there is one, else a new skeleton on meta."""
    living = sharded.comfy_model()
    if living is not None:
        return living
    source = sharded.source
    name = source.architecture.name
    path = Path(source.path)
    described = config_path(path) if path.is_dir() else path
    dtype = source.compute_dtype(sharded.dtype, sharded.placement.devices[0])
    with building(source.architecture.model_class, described, sum(source.stored.values())):
        config, model_class, options = family(name).skeleton(source.config)
        config.set_inference_dtype(getattr(torch, dtype), None)
        return model_class(config, sharded, **options)
