"""Errors of the ranks as ComfyUI knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from ..core.errors import RankOutOfMemory, UnsupportedError


@contextmanager
def comfy_errors() -> Iterator[None]:
    """Inside, a rank without memory raises torch's own out-of-memory error.

    ComfyUI answers that one by unloading all models and by its advice on memory. All other errors pass as they are.
    """
    try:
        yield
    except RankOutOfMemory as error:
        raise torch.cuda.OutOfMemoryError(str(error)) from error


def refuse_training() -> NoReturn:
    """Raise the `UnsupportedError` for every way in which a MODEL is made ready for training."""
    raise UnsupportedError(
        "A model from Load TP Model cannot be trained: its weights lie in shards on the ranks, which compute no "
        "gradients. Train (the Train LoRA node) on a model of the stock loader."
    )
