"""Errors of the ranks as ComfyUI knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..core.errors import RankOutOfMemory


@contextmanager
def comfy_errors() -> Iterator[None]:
    """Inside, a rank without memory raises torch's own out-of-memory error.

    ComfyUI answers that one by unloading all models and by its advice on memory. All other errors pass as they are.
    """
    try:
        yield
    except RankOutOfMemory as error:
        raise torch.cuda.OutOfMemoryError(str(error)) from error
