"""The model classes under diffusers' own names, with our plan as `_tp_plan` and a sharding `from_pretrained`.

from comfy_tp.core import Flux2Transformer2DModel, TensorParallelConfig
Flux2Transformer2DModel.from_pretrained(path, parallel_config=TensorParallelConfig(tp_degree=4))
"""

from __future__ import annotations

import functools
from typing import Any

from .errors import ConfigError
from .models import ARCHITECTURES, architecture_named
from .tp.config import TensorParallelConfig


@functools.cache
def model_class(name: str) -> type:
    """The thin subclass of diffusers' class `name`: the same model, its methods aware of tensor parallelism.

    Raises `UnsupportedError` when the installed diffusers is too old for it, `AttributeError` for an unknown name.
    """
    known = {class_name: architecture for architecture, class_name in ARCHITECTURES.items()}
    if name not in known:
        raise AttributeError(
            f"No architecture has the model class '{name}'. Known: {', '.join(sorted(known))}."
        )
    architecture = architecture_named(known[name])
    base = architecture.load_class()
    made = type(
        name,
        (Sharding, base),
        {
            "_tp_plan": architecture.plan,
            # Pipelines and saved configurations name the library that holds a class; this one stands for diffusers'.
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        },
    )
    return made


class Sharding:
    """What the subclasses add to a diffusers model class."""

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *args: Any, parallel_config: Any = None, **options: Any
    ) -> Any:
        """Load the model: in shards with a tensor-parallel `parallel_config`, else as diffusers does.

        Arguments as in `comfy_tp.core.from_pretrained`: `subfolder`, `dtype`, `device`. Source: diffusers
        tensor-parallelism page, "Load a sharded model" (R1).
        """
        if not is_tensor_parallel(parallel_config):
            if parallel_config is not None:
                options["parallel_config"] = parallel_config
            return super().from_pretrained(name_or_path, *args, **options)  # type: ignore[misc]
        if args:
            raise ConfigError("Pass the loading options by name when `parallel_config` is given.")
        from .load import from_pretrained

        return from_pretrained(cls, name_or_path, parallel_config=parallel_config, **options)

    def enable_parallelism(self, *, config: Any, **options: Any) -> Any:
        """Shard this model, whole in memory, in place (R2); a context-parallel `config` goes to diffusers."""
        if not is_tensor_parallel(config):
            return super().enable_parallelism(config=config, **options)  # type: ignore[misc]
        from .parallelize import enable_parallelism

        return enable_parallelism(self, config=config, **options)


def is_tensor_parallel(config: Any) -> bool:
    """Whether `config` asks for tensor parallelism: ours, diffusers' own, or its `ParallelConfig` with one."""
    if config is None:
        return False
    return (
        isinstance(config, (TensorParallelConfig, int))
        or hasattr(config, "tp_degree")
        or getattr(config, "tensor_parallel_config", None) is not None
    )
