"""Plan entries for what a model computes with besides its weights: attributes and outputs that become local."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .collectives import Ranks
from .plan import Style, Submodule
from .shard import ShardSpec


@dataclass(frozen=True)
class LocalAttributes(Style):
    """Whole-number attributes of a module that every rank holds its share of, such as `heads` and `inner_dim`.

    Attention code that unflattens by `attn.heads` then sees this rank's heads. A name that the module does not have
    is an error; names that differ between versions of a class go into `where_present`.
    """

    names: tuple[str, ...]
    where_present: tuple[str, ...] = ()

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        """No parameter is laid out; that `degree` divides every attribute is checked."""
        module, path, _ = submodule
        for name in self._present(module, path):
            value = getattr(module, name)
            if not isinstance(value, int) or value % degree:
                raise PlanError(
                    f"'{path}.{name}' is {value!r}, which {degree} ranks cannot share. Choose a degree that divides it."
                )
        return {}

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        """The same module with its attributes divided by the degree."""
        for name in self._present(module, type(module).__name__):
            setattr(module, name, getattr(module, name) // ranks.degree)
        return module

    def _present(self, module: nn.Module, path: str) -> list[str]:
        for name in self.names:
            if not hasattr(module, name):
                raise PlanError(
                    f"'{path}' has no attribute '{name}' to make local: a {type(module).__name__} does not define it."
                )
        return [*self.names, *(name for name in self.where_present if hasattr(module, name))]

    def __str__(self) -> str:
        return f"LocalAttributes({list(self.names + self.where_present)})"


@dataclass(frozen=True)
class SlicedOutput(Style):
    """A module whose output tensors are cut, such as rotary angles that hold a part for every head.

    `dims` maps the number of dimensions of an output tensor to the one along which each rank takes its slice.
    """

    dims: tuple[tuple[int, int], ...]

    def specs(self, submodule: Submodule, degree: int) -> dict[str, ShardSpec]:
        """The module's own parameters, if any, stay replicated."""
        return {}

    def local(self, module: nn.Module, specs: Mapping[str, ShardSpec], ranks: Ranks) -> nn.Module:
        """The same module with a forward hook that takes this rank's slice of every output tensor."""
        dims = dict(self.dims)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            dim = dims.get(tensor.ndim)
            if dim is None or tensor.shape[dim] % ranks.degree:
                raise PlanError(
                    f"The output {list(tensor.shape)} of a {type(module).__name__} cannot be cut for {ranks.degree} "
                    f"ranks by {self}."
                )
            size = tensor.shape[dim] // ranks.degree
            return tensor.narrow(dim, ranks.rank * size, size)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, torch.Tensor):
                return cut(output)
            return type(output)(cut(tensor) for tensor in output)

        module.register_forward_hook(hook)
        return module

    def __str__(self) -> str:
        return f"SlicedOutput({dict(self.dims)})"
