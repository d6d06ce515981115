"""What makes a diffusion model of ComfyUI's, on the meta device, one whose forward runs on the ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

from ..core.calls.inputs import Input
from ..core.calls.keys import KEYS, Kept, of_batch
from ..core.errors import UnsupportedError
from ..core.models.tokens import REFERENCE_METHODS
from .errors import comfy_errors
from .patcher import in_the_middle_of_a_run
from .sharded import ShardedModel

log = logging.getLogger("comfy_tp.nodes")

CONTEXT = "tp_context"
REFERENCES = "tp_references"
METHOD = "ref_latents_method"

# transformer_options that change what the blocks compute. Empty ones are harmless.
REFUSED_OPTIONS = {
    "patches": "patches of the model's blocks",
    "patches_replace": "replacements of the model's blocks",
    "rope_options": "changed rotary positions (the ScaleROPE node)",
    "optimized_attention_override": "an attention override (the Model Attention Backend node)",
}
# Those that say what is going on, or belong to wrappers that run outside the model.
KNOWN_OPTIONS = frozenset(
    "wrappers callbacks sample_sigmas sigmas cond_or_uncond uuids easycache transformer_options "
    "block_index block_type total_blocks activations_shape original_shape context_window".split()
)
_told: set[str] = set()


class RankCalls:
    """What the diffusion models share: a call that the ranks answer. Mixed in before the class of ComfyUI.

    A call is read by the names that ComfyUI's own forward gives its arguments, so that one which a release adds or drops
    changes nothing here: it is refused where it is set. `sharded` is the model on the ranks, `text_length` what shorter
    text is padded to.
    """

    sharded: ShardedModel
    text_length: int
    reference_method: str  # how references are placed where the conditioning does not say
    width: int  # of the residual stream
    mlp_ratio: float
    # Argument of ComfyUI's forward -> the input of `predict` that it is; None: nothing that this model reads.
    inputs: Mapping[str, str | None] = {}
    stock_signature: inspect.Signature  # of the forward of ComfyUI's class

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        stock: Any = next(base for base in cls.__mro__ if base.__module__.startswith("comfy."))
        cls.stock_signature = inspect.signature(stock.forward)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Velocity in the shape of `x` at `timestep` [B]; arguments are ComfyUI's, DIFFUSION_MODEL wrappers run around it."""
        call = self.stock_signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, call.arguments["transformer_options"])
        # Wrappers are handed the arguments in the order in which ComfyUI's own forward hands them on.
        return WrapperExecutor.new_class_executor(self.on_ranks, self, wrappers).execute(
            *call.args[1:], **call.kwargs
        )

    def on_ranks(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The call itself, after the wrappers."""
        call = self.stock_signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        given = dict(call.arguments)
        given.pop("self")
        for name, parameter in self.stock_signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        return self.call_ranks(given.pop("x"), given.pop("timestep"), given)

    def call_ranks(self, x: torch.Tensor, timestep: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """Velocity in the shape of `x` at `timestep` [B]; `given` are the call's other arguments by name.

        Refuses by name whatever the ranks cannot honour.
        """
        options = given.pop("transformer_options")
        inputs = self.inputs_of(given)
        refuse(given.pop("control", None), options, given)
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        with comfy_errors():
            remote = in_the_middle_of_a_run(self.sharded)
            velocity = remote.forward(x, timestep, inputs, poll=poll)
        self.sharded.line.called(options, remote.last_step_seconds)
        return velocity.to(x.device, x.dtype)

    def inputs_of(self, given: dict[str, Any]) -> dict[str, Input]:
        """The inputs of the ranks' model call, taken out of the arguments of ComfyUI's."""
        inputs: dict[str, Input] = {
            "context": self.context(given.pop("context", None), given.pop(CONTEXT, None))
        }
        for name, known in self.inputs.items():
            value = given.pop(name, None)
            if known is not None and value is not None:
                inputs[known] = value
        method = given.pop(METHOD, self.reference_method)
        latents, keys = given.pop("ref_latents", None), given.pop(REFERENCES, None)
        if latents or keys is not None:
            # Latents are a wrapper's own.
            inputs["references"] = (
                list(latents) if latents else [of_batch(column) for column in keys.T.tolist()]
            )
            inputs["reference_method"] = known_method(method)
        return inputs

    def context(self, own: torch.Tensor | None, keys: torch.Tensor | None) -> Kept:
        """The text: a conditioning of a wrapper's own, or what the keys [B, 1] stand for."""
        if own is not None:
            return KEYS.kept(*KEYS.rows(own, own.dtype, self.text_length))
        if keys is None:
            raise UnsupportedError(
                "A model from Load TP Model was called without a conditioning. Connect a text encoder's output to the "
                "sampler or guider."
            )
        return of_batch(keys[:, 0].tolist())


def known_method(method: str) -> str:
    """`method`, or `UnsupportedError` where references cannot be placed so."""
    if method not in REFERENCE_METHODS:
        raise UnsupportedError(
            f"The reference method '{method}' (reference_latents_method) is not known to Load TP Model. Set the "
            f"FluxKontextMultiReferenceLatentMethod node to one of {', '.join(REFERENCE_METHODS)}."
        )
    return method


def origins(patches: Any) -> Iterator[str]:
    """Where the functions and objects among `patches` come from, as far as they tell: the class of a node and its file."""
    if isinstance(patches, Mapping | list | tuple):
        for inside in patches.values() if isinstance(patches, Mapping) else patches:
            yield from origins(inside)
        return
    made_of = patches if hasattr(patches, "__qualname__") else type(patches)
    module = getattr(made_of, "__module__", None) or ""
    if module not in ("builtins", "functools", "comfy.model_patcher"):
        yield f"{made_of.__qualname__.split('.')[0]} of {module.replace('/', '.').rpartition('.')[2]}"


def refuse(control: Any, options: Mapping[str, Any], unknown: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for what ComfyUI hands to a model call and the ranks do not implement."""
    if control is not None:
        raise UnsupportedError(
            "ControlNet cannot be applied to a model from Load TP Model. Remove the Apply ControlNet node, or load "
            "the model with the stock loader."
        )
    for name, what in REFUSED_OPTIONS.items():
        value = options.get(name)
        if value:
            inside = f": {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
            origin = " and ".join(dict.fromkeys(origins(value)))
            raise UnsupportedError(
                f"A model from Load TP Model cannot honour {what} (transformer_options['{name}']{inside}"
                f"{f'; made by {origin}' if origin else ''}). Remove the node that patches the model, or load it with the "
                f"stock loader."
            )
    for name, value in unknown.items():
        if value is not None:
            raise UnsupportedError(
                f"A model from Load TP Model does not know the keyword '{name}' of the model call. Remove the node "
                f"that sets it, or load the model with the stock loader."
            )
    for name in options:
        if name not in KNOWN_OPTIONS and name not in REFUSED_OPTIONS and name not in _told:
            _told.add(str(name))
            log.warning(
                "transformer_options['%s'] is unknown to the ranks; what it does inside the model has no effect",
                name,
            )
