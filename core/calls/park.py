"""Where a model's shards lie: on their devices, in host memory, or nowhere any more."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from ..ranks.context import RankContext
from .call import ModelCall
from .resident import release_cache


@dataclass
class Park(ModelCall[int], name="park"):
    """Move a model's shards to host memory; the device bytes freed over all ranks. A model call brings them back."""

    def run(self, rank: RankContext) -> int:
        return sum(rank.gather(self.held(rank).park()))


@dataclass
class Unload(ModelCall[int], name="unload"):
    """Free a model's shards; the bytes freed over all ranks. A model that is not there frees nothing."""

    def run(self, rank: RankContext) -> int:
        model = rank.models.pop(self.model, None)
        freed = model.resident_bytes if model is not None else 0
        del model
        gc.collect()  # a module and what is bound onto it refer to each other
        release_cache(rank.device)
        return sum(rank.gather(freed))
