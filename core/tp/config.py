"""`TensorParallelConfig`: how many ranks share a model, and which process group they form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError


@dataclass
class TensorParallelConfig:
    """Configuration of tensor parallelism for one model.

    `tp_degree` is the number of ranks that share the model; it must divide the number of attention heads and
    every packed block. With a 1-D `mesh` (torch `DeviceMesh`) or a `process_group` the degree is that of the mesh
    or group, and the model's collectives run there; without either they run on the default process group.

    Source: diffusers tensor-parallelism page, "Load a sharded model" (R1, R2).
    """

    tp_degree: int = 1
    mesh: Any = None
    process_group: Any = None

    def __post_init__(self) -> None:
        if self.mesh is not None and self.process_group is not None:
            raise ConfigError("Give either `mesh` or `process_group` to TensorParallelConfig, not both.")
        if self.mesh is not None:
            if self.mesh.ndim != 1:
                names = self.mesh.mesh_dim_names
                raise ConfigError(
                    f"TensorParallelConfig needs a 1-D mesh, got one of {self.mesh.ndim} dimensions {names}. Pass its "
                    f"tensor-parallel sub-mesh, for example mesh['tp']."
                )
            self.tp_degree = self.mesh.size()
        elif self.process_group is not None:
            self.tp_degree = dist.get_world_size(self.process_group)
        if not isinstance(self.tp_degree, int) or isinstance(self.tp_degree, bool) or self.tp_degree < 1:
            raise ConfigError(f"`tp_degree` must be a whole number of at least 1, got {self.tp_degree!r}.")

    @classmethod
    def of(cls, config: Any) -> TensorParallelConfig:
        """Our configuration from ours, from a whole number, or from diffusers' own config objects.

        diffusers' `ParallelConfig` is accepted when it carries tensor parallelism alone; with context parallelism
        beside it `ConfigError` is raised rather than half of the configuration being dropped.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, int) and not isinstance(config, bool):
            return cls(tp_degree=config)
        if hasattr(config, "tensor_parallel_config") or hasattr(config, "context_parallel_config"):
            if getattr(config, "context_parallel_config", None) is not None:
                raise ConfigError(
                    "Context parallelism together with tensor parallelism is not supported. Pass a configuration that "
                    "carries tensor parallelism only."
                )
            config = config.tensor_parallel_config
        if config is None or not hasattr(config, "tp_degree"):
            raise ConfigError(
                f"`parallel_config` must be a TensorParallelConfig (ours or diffusers'), got {type(config).__name__}."
            )
        return cls(tp_degree=config.tp_degree, mesh=getattr(config, "mesh", None))

    def group(self) -> Any:
        """The process group of the model's collectives, or None for the default group."""
        if self.mesh is not None:
            return self.mesh.get_group()
        return self.process_group
