"""Prompts as the tokens of a FLUX.2 text encoder: the pipeline's own chat template, padding and length.

Source: `Flux2Pipeline` (Mistral-3: system message and user turn) and `Flux2KleinPipeline` (Qwen3: user turn, thinking
off) of diffusers; both pad or cut to 512 tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.strict_json import read_object
from ..errors import ConfigError, InputError, TPError
from ..wording import cause
from .text_encoder import TOKENS

log = logging.getLogger("comfy_tp")

SETTINGS = "tokenizer_config.json"
# The files of a tokenizer and the most bytes of each: the largest real ones (17 MB of Mistral-3) have a third of it.
MOST_BYTES = {
    "tokenizer.json": 64_000_000,
    "vocab.json": 16_000_000,
    "merges.txt": 16_000_000,
    "added_tokens.json": 1_000_000,
    "special_tokens_map.json": 1_000_000,
    "chat_template.jinja": 1_000_000,
    SETTINGS: 1_000_000,
}
TEMPLATE_ROOM = 100_000  # characters that a template may add to a prompt, which it may quote several times


class PromptTokenizer:
    """The tokenizer of a pipeline, with the template that its text encoder was used with.

    `kind` is the encoder's model class, "MistralModel" or "Qwen3Model".
    """

    def __init__(self, folder: Path, kind: str):
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", SETTINGS, "vocab.json")):
            raise ConfigError(
                f"There is no tokenizer in {folder}. Put the pipeline's tokenizer folder beside its text_encoder folder."
            )
        for name, most in MOST_BYTES.items():
            if (folder / name).is_file() and (folder / name).stat().st_size > most:
                raise ConfigError(
                    f"{folder / name} has more than the {most} bytes of any real one. Download it again."
                )
        if (folder / SETTINGS).is_file():
            read_object(folder / SETTINGS, MOST_BYTES[SETTINGS])
        self.folder = folder
        with self._whole("be loaded"):
            self.tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {folder} has no chat template (chat_template.jinja). Download the folder again."
            )
        self.kind = kind
        self.tokens("")

    @contextlib.contextmanager
    def _whole(self, purpose: str) -> Iterator[None]:
        """Inside, whatever a damaged tokenizer raises is a `ConfigError` that names its folder and the cause."""
        try:
            yield
        except TPError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The tokenizer in {self.folder} cannot {purpose} ({cause(error)}). Download the folder again."
            ) from error

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        """The conversation that the encoder reads for `prompt`."""
        if self.kind == "Qwen3Model":
            return [{"role": "user", "content": prompt}]
        from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

        # "[IMG]" stands for a picture in this template; a prompt holds none.
        texts = (("system", SYSTEM_MESSAGE), ("user", prompt.replace("[IMG]", "")))
        return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]

    def tokens(self, prompt: str) -> list[int]:
        """The token numbers of `prompt` in its template, not padded; a prompt that is too long is cut, with a warning."""
        if not isinstance(prompt, str):
            raise InputError(f"A prompt is text, got {type(prompt).__name__}.")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The prompt holds half of a character behind {prompt[max(0, error.start - 20) : error.start]!r}, such as "
                f"an emoji that was cut in two. Delete it and write it again."
            ) from None
        options = (
            {"add_generation_prompt": True, "enable_thinking": False} if self.kind == "Qwen3Model" else {}
        )
        with self._whole("read a prompt"):
            text = self.tokenizer.apply_chat_template(self.messages(prompt), tokenize=False, **options)
            if len(text) > TEMPLATE_ROOM + 16 * len(prompt):
                raise ConfigError(
                    f"The chat template in {self.folder} makes {len(text)} characters of a prompt of {len(prompt)}. "
                    f"Download the folder again."
                )
            # Not verbose: what is too long is cut below, and transformers would warn of errors that do not come.
            encoded = self.tokenizer(text, add_special_tokens=self.kind == "Qwen3Model", verbose=False)
            numbers = encoded["input_ids"]
        if len(numbers) > TOKENS:
            log.warning(
                "The prompt has %d tokens with its template; FLUX.2 reads %d, so the last %d are cut off.",
                len(numbers),
                TOKENS,
                len(numbers) - TOKENS,
            )
            numbers = numbers[-TOKENS:] if self.tokenizer.truncation_side == "left" else numbers[:TOKENS]
        return list(numbers)

    def padded(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [1, 512] and mask [1, 512] int64 (0 at padding), padded on the tokenizer's own side."""
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = self.tokenizer.eos_token_id or 0
        missing = TOKENS - len(numbers)
        fill, nothing, something = [pad] * missing, [0] * missing, [1] * len(numbers)
        if self.tokenizer.padding_side == "left":
            rows, mask = fill + numbers, nothing + something
        else:
            rows, mask = numbers + fill, something + nothing
        return torch.tensor([rows]), torch.tensor([mask])


def tokenizer_folder(text_encoder: Path) -> Path:
    """Where the tokenizer of a text encoder folder lies: beside it in the pipeline, or in the folder itself."""
    beside = text_encoder.parent / "tokenizer"
    return beside if beside.is_dir() else text_encoder
