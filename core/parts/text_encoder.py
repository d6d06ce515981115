"""The text encoders of FLUX.2 in shards: Mistral-3 for dev, Qwen3 for klein.

A conditioning is three hidden states of the encoder side by side, so only the layers up to the last of them are read
(30 of Mistral-3's 40), the final norm is left out (it would change the last of the three), and so are the language
head and the vision tower. The plan is transformers' own `base_model_tp_plan`.

Source: `Flux2Pipeline` and `Flux2KleinPipeline` of diffusers (layers, template, padding to 512 tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.files import Checkpoint
from ..checkpoint.layout import FileLayout, check
from ..checkpoint.settings import check_settings, config_path
from ..errors import CheckpointError, UnsupportedError
from ..load import OpenedModel
from ..models.architecture import Architecture
from ..tp.plan import WherePresent
from ..tp.skeleton import building, meta_parameters
from ..wording import quote, short

TOKENS = 512  # prompts are padded or cut to this many tokens


@dataclass(frozen=True)
class EncoderKind:
    """One kind of text encoder: transformers' classes, where its settings lie, and the hidden states that are read."""

    model_class: str
    config_class: str
    settings: str | None
    layers: tuple[int, int, int]


MISTRAL = EncoderKind("MistralModel", "MistralConfig", "text_config", (10, 20, 30))
KINDS: dict[str, EncoderKind] = {
    "Mistral3ForConditionalGeneration": MISTRAL,
    "Mistral3Model": MISTRAL,
    "MistralForCausalLM": EncoderKind("MistralModel", "MistralConfig", None, (10, 20, 30)),
    "Qwen3ForCausalLM": EncoderKind("Qwen3Model", "Qwen3Config", None, (9, 18, 27)),
}


def kind_of(checkpoint: Checkpoint) -> EncoderKind:
    """The kind of text encoder at `checkpoint`, from its config.json. Raises `UnsupportedError` for another model."""
    names = (checkpoint.config or {}).get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in KINDS:
        held = short(name) if isinstance(name, str) else "no text encoder"
        raise UnsupportedError(
            f"{checkpoint.path} holds {held}, which is no text encoder of FLUX.2. Choose the text_encoder folder of "
            f"FLUX.2-dev (Mistral-3) or of FLUX.2 klein (Qwen3)."
        )
    return KINDS[name]


def settings_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The language model's settings in the config.json of `checkpoint`, of as many layers as FLUX.2 reads.

    Raises `CheckpointError` for settings that its weights cannot have, or with too few layers.
    """
    kind = kind_of(checkpoint)
    config = checkpoint.config or {}
    found = config.get(kind.settings) if kind.settings else config
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{config_path(checkpoint.path)}: `{kind.settings}` is {quote(found)}, not a table of settings. Download it "
            f"again."
        )
    settings = dict(found)
    layers = settings.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise CheckpointError(
            f"{config_path(checkpoint.path)}: `num_hidden_layers` is {quote(layers)}, not a number. Download it again."
        )
    if layers < kind.layers[-1]:
        raise CheckpointError(
            f"{checkpoint.path}: the encoder has {layers} layers, but FLUX.2 reads hidden state {kind.layers[-1]}. "
            f"Choose the text encoder that belongs to the model."
        )
    settings["num_hidden_layers"] = kind.layers[-1]
    if isinstance(settings.get("layer_types"), list):
        settings["layer_types"] = settings["layer_types"][: kind.layers[-1]]
    # Only now: weights may lack the layers that are not read.
    check_settings(checkpoint, settings)
    return settings


def key_value_heads(checkpoint: Checkpoint) -> int | None:
    """The number of key/value heads of the encoder at `checkpoint`, which a sharding degree must divide."""
    return settings_of(checkpoint).get("num_key_value_heads")


def open_text_encoder(checkpoint: Checkpoint, degree: int) -> OpenedModel:
    """Recognise the text encoder of `checkpoint` and compare its headers with it. Nothing is allocated.

    At a degree that does not divide its key/value heads the encoder is replicated on every rank instead of sharded.
    Raises `UnsupportedError` for another model, `CheckpointError` for missing or misshapen tensors and for a config.json
    that makes no model.
    """
    import transformers

    kind = kind_of(checkpoint)
    settings = settings_of(checkpoint)
    model_class = getattr(transformers, kind.model_class)
    with building(kind.model_class, config_path(checkpoint.path), checkpoint.nbytes), meta_parameters():
        model_config = getattr(transformers, kind.config_class)(**settings)
        model_config._attn_implementation = "sdpa"
        skeleton = model_class(model_config).eval()
    skeleton.norm = nn.Identity()
    plan = text_plan(model_config, degree)
    architecture = Architecture(
        name=kind.model_class.removesuffix("Model").lower(),
        model_class=kind.model_class,
        plan=plan,
        heads_key=(),
    )
    layout = FileLayout("transformers", prefixes=(_prefix(checkpoint),))
    opened = OpenedModel(checkpoint, architecture, model_class, settings, layout, skeleton)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    opened.pieces = check(checkpoint, layout, shapes, ignored=("*",))
    return opened


def text_plan(config: Any, degree: int) -> dict[str, Any]:
    """transformers' plan of the encoder; empty when `degree` does not divide its key/value heads."""
    if config.num_key_value_heads % degree or config.num_attention_heads % degree:
        return {}
    replicated = ("replicated_with_grad_allreduce", "replicated")
    return {
        key: WherePresent(style)
        for key, style in config.base_model_tp_plan.items()
        if style not in replicated
    }


def read_layers(opened: OpenedModel) -> tuple[int, ...]:
    """The hidden states that make up a conditioning."""
    return kind_of(opened.checkpoint).layers


def encode(
    model: nn.Module, layers: tuple[int, ...], tokens: torch.Tensor, mask: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """The conditioning [B, L, 3 * hidden] of `tokens` [B, L] int64; `mask` [B, L] is 0 at padding.

    Row l holds the three hidden states of token l side by side.
    """
    states: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            states[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [model.layers[layer - 1].register_forward_hook(keep(layer)) for layer in layers]
    try:
        with torch.inference_mode():
            model(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False)
            return torch.stack([states[layer] for layer in layers], dim=2).flatten(2)
    finally:
        for hook in hooks:
            hook.remove()


def _prefix(checkpoint: Checkpoint) -> str:
    """What stands before the language model's names in the file ("model.", "language_model.model.", ...)."""
    ending = "embed_tokens.weight"
    found = sorted(name for name in checkpoint.entries if name.endswith(ending))
    if not found:
        raise CheckpointError(
            f"{checkpoint.path}: no tensor ends in '{ending}'. The file is not a whole text encoder."
        )
    return found[0].removesuffix(ending)
