"""All-reduces that the layers of a model share: `bind` and `merged` of an `Architecture`, for the two usual cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..tp.collectives import Ranks
from ..tp.norm import JointSums
from .modulation import join


def of_modulations(
    found: Callable[[nn.Module], Sequence[tuple[nn.Module, str, nn.Module]]],
) -> dict[str, Any]:
    """The modulations of all blocks share one reduce. `found(model)`: as `join` takes them."""

    def bind(model: nn.Module, ranks: Ranks) -> None:
        join(found(model), ranks)

    def merged(model: nn.Module) -> int:
        return len(found(model)) - 1

    return {"bind": bind, "merged": merged}


def of_norms(attentions: Callable[[nn.Module], Iterable[nn.Module]]) -> dict[str, Any]:
    """The norms of q and k share one reduce in every attention. `attentions(model)`: all of them."""

    def bind(model: nn.Module, ranks: Ranks) -> None:
        for attn in attentions(model):
            JointSums(((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k)))

    def merged(model: nn.Module) -> int:
        return sum(1 for _ in attentions(model))

    return {"bind": bind, "merged": merged}
