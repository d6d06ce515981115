"""ComfyUI's CLIP around a text encoder that lives on the ranks."""

from __future__ import annotations

from typing import Any, NoReturn

import comfy.sd
import torch

from ..core.calls.encode import EncodeText
from ..core.errors import UnsupportedError
from ..core.parts.prompts import PromptTokenizer, tokenizer_folder
from .component import ComponentPatcher, RemoteModule
from .sharded import ShardedModel

NAME = "tp_text_encoder"  # under which tokens are handed from the tokenizer to the encoder


class RemoteTokenizer:
    """What `CLIP.tokenize` asks: a prompt's tokens as ComfyUI writes them, [[(number, weight), ...]] under a name."""

    def __init__(self, prompts: PromptTokenizer):
        self.prompts = prompts

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: Any
    ) -> dict[str, list[list[tuple]]]:
        """Weights are 1: FLUX.2's encoders read text as it is, so brackets and numbers in a prompt are text."""
        numbers = self.prompts.tokens(text)
        if return_word_ids:
            return {NAME: [[(number, 1.0, 0) for number in numbers]]}
        return {NAME: [[(number, 1.0) for number in numbers]]}

    def state_dict(self) -> dict[str, Any]:
        return {}


class RemoteEncoder(RemoteModule):
    """The `cond_stage_model` of a CLIP: encodes on the ranks."""

    def __init__(self, sharded: ShardedModel, policy: str, prompts: PromptTokenizer):
        super().__init__(sharded, policy)
        self.prompts = prompts
        self.dtypes = {torch.float32}

    def set_clip_options(self, options: dict[str, Any]) -> None:
        """CLIP Set Last Layer cannot be honoured: FLUX.2 reads three fixed layers."""
        if options.get("layer") is not None:
            raise UnsupportedError(
                "FLUX.2 reads three fixed layers of its text encoder. Remove the CLIP Set Last Layer node."
            )

    def reset_clip_options(self) -> None:
        """Nothing to reset."""

    def encode_token_weights(self, tokens: dict[str, Any]) -> tuple[torch.Tensor, None]:
        """The conditioning [B, 512, D] float32 of tokens from `RemoteTokenizer`."""
        if NAME not in tokens:
            raise UnsupportedError(
                f"The text was cut into tokens by another CLIP ({', '.join(tokens)}). Connect the CLIP of Load TP CLIP to "
                f"the text encode node."
            )
        rows = []
        for section in tokens[NAME]:
            numbers, mask = self.prompts.padded([int(pair[0]) for pair in section])
            rows.append(
                self.on_ranks(
                    lambda remote, poll, n=numbers, m=mask: remote.ask(EncodeText, n, m, poll=poll)  # type: ignore[misc]
                )
            )
        return torch.cat(rows), None

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: only the layers that a picture's conditioning is made of are there."""
        raise UnsupportedError(
            "A CLIP from Load TP CLIP writes no text: only those layers are loaded that FLUX.2 reads. Use the stock CLIP "
            "loader for nodes that generate text."
        )

    def load_sd(self, sd: Any) -> None:
        raise UnsupportedError("The weights of a CLIP from Load TP CLIP come from its own folder.")


def build_clip(sharded: ShardedModel, policy: str) -> comfy.sd.CLIP:
    """A CLIP whose prompts are encoded on the ranks. `CLIP.clone` gives a plain CLIP, so all lives in its parts."""
    from pathlib import Path

    prompts = PromptTokenizer(
        tokenizer_folder(Path(sharded.source.path)), sharded.source.architecture.model_class
    )
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model = RemoteEncoder(sharded, policy, prompts)
    clip.tokenizer = RemoteTokenizer(prompts)
    clip.patcher = ComponentPatcher.of(clip.cond_stage_model)
    clip.patcher.is_clip = True
    clip.layer_idx = None
    clip.tokenizer_options = {}
    clip.use_clip_schedule = False
    clip.apply_hooks_to_conds = None
    return clip
