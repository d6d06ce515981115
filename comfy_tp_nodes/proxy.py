"""What makes a diffusion model of ComfyUI's, on the meta device, one whose forward runs on the ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

from ..core.calls.remote import Poll, RemoteModel
from ..core.errors import UnsupportedError
from ..core.models.tokens import REFERENCE_METHODS
from .conditioning import KEYS, shares
from .errors import comfy_errors
from .patcher import in_the_middle_of_a_run
from .sharded import ShardedModel

log = logging.getLogger("comfy_tp.nodes")

CONTEXT = "tp_context"
REFERENCES = "tp_references"

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
        return self.call_ranks(**self.arguments(given))

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of `call_ranks`, from the call's own by name; what is not known goes into `more`."""
        known = ("x", "timestep", "context", "ref_latents", "control", "guidance", "transformer_options")
        return {**{name: given.pop(name, None) for name in known}, "more": given}

    def call_ranks(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        context: torch.Tensor | None,
        *,
        pooled: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
        ref_latents: list[torch.Tensor] | None = None,
        control: Any = None,
        transformer_options: dict[str, Any],
        more: dict[str, Any],
    ) -> torch.Tensor:
        """Velocity in the shape of `x` at `timestep` [B]. Refuses by name whatever the ranks cannot honour.

        `more` are the call's further keywords: the keys of text and references, and the method that places these.
        """
        context_keys = more.pop(CONTEXT, None)
        reference_keys = more.pop(REFERENCES, None)
        method = more.pop("ref_latents_method", self.reference_method)
        refuse(control, transformer_options, more)
        if (ref_latents or reference_keys is not None) and method not in REFERENCE_METHODS:
            raise UnsupportedError(
                f"The reference method '{method}' (reference_latents_method) is not known to Load TP Model. Set the "
                f"FluxKontextMultiReferenceLatentMethod node to one of {', '.join(REFERENCE_METHODS)}."
            )
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        with comfy_errors():
            remote = in_the_middle_of_a_run(self.sharded)
            if context is not None:
                # A wrapper gave a conditioning of its own.
                contexts = [
                    remote.keep(row, poll=poll) for row in KEYS.rows(context, context.dtype, self.text_length)
                ]
            elif context_keys is not None:
                contexts = [
                    remote.keep(KEYS.tensor(key), poll=poll) for key in shares(context_keys[:, 0].tolist())
                ]
            else:
                raise UnsupportedError(
                    "A model from Load TP Model was called without a conditioning. Connect a text encoder's output to the "
                    "sampler or guider."
                )
            velocity = remote.forward(
                x,
                timestep,
                contexts,
                guidance=guidance,
                references=references(remote, ref_latents, reference_keys, poll),
                reference_method=method,
                pooled=pooled,
                poll=poll,
            )
        self.sharded.line.called(transformer_options, remote.last_step_seconds)
        return velocity.to(x.device, x.dtype)


def references(
    remote: RemoteModel, latents: list[torch.Tensor] | None, keys: torch.Tensor | None, poll: Poll
) -> list[torch.Tensor | Sequence[int]]:
    """The references of a call for `RemoteModel.forward`: latents of a wrapper's own, or what keys [B, R] stand for."""
    if latents:
        return list(latents)
    if keys is None:
        return []
    return [
        [remote.keep(KEYS.tensor(key), poll=poll) for key in shares(column)] for column in keys.T.tolist()
    ]


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
