"""Sharding of diffusion transformers over ranks. Knows nothing of ComfyUI.

The public names are imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import from_pretrained
    from .parallelize import enable_parallelism
    from .restart import save_shards
    from .tp.config import TensorParallelConfig
    from .tp.plan import PackedColwiseParallel, PackedRowwiseParallel
    from .tp.shard import ShardSpec

_PUBLIC = {
    "TensorParallelConfig": "tp.config",
    "ShardSpec": "tp.shard",
    "PackedColwiseParallel": "tp.plan",
    "PackedRowwiseParallel": "tp.plan",
    "enable_parallelism": "parallelize",
    "from_pretrained": "load",
    "save_shards": "restart",
}

__all__ = [
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ShardSpec",
    "TensorParallelConfig",
    "enable_parallelism",
    "from_pretrained",
    "save_shards",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    if name.endswith("Model"):
        # The model classes under diffusers' own names: `from comfy_tp.core import Flux2Transformer2DModel`.
        return importlib.import_module(".classes", __name__).model_class(name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
