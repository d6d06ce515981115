"""A call: what the ranks are asked to do with a model, as one typed dataclass with its `run` and its answer.

    @dataclass
    class Park(ModelCall[int], name="park"):
        def run(self, rank: RankContext) -> int: ...

    freed = Park(model_id).ask(group)

A file of this folder that defines one is all that a call needs: `commands` finds it, every rank runs it in lockstep
with the others, and what rank 0 returns is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args

import torch

from ..errors import InputError
from ..ranks.client import RankGroup
from ..ranks.context import RankContext
from ..tp.collectives import Ranks
from .fields import read, write
from .resident import ResidentModel

Answer = TypeVar("Answer")
Poll = Callable[[], None]
ANSWER = "answer"


class Call(Generic[Answer]):
    """What every call has. `event` is the dataclass that `run` may `tell` the client meanwhile."""

    name: ClassVar[str] = ""
    answer: ClassVar[Any] = None
    event: ClassVar[type | None] = None

    def __init_subclass__(cls, name: str = "") -> None:
        if name:
            cls.name = name
            inner = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
            cls.answer = inner[0] if inner else cls.answer

    def run(self, rank: RankContext) -> Answer:
        """Do it on this rank; all ranks do so at the same time."""
        raise NotImplementedError

    def ask(
        self, group: RankGroup, *, on_event: Callable[[Any], None] | None = None, poll: Poll | None = None
    ) -> Answer:
        """Let the ranks of `group` do it; errors as in `RankGroup.request`. Events come in this thread."""

        def heard(header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
            if on_event is not None:
                on_event(read(self.event, header, tensors, f"an event of {self.name}"))

        tensors: list[torch.Tensor] = []
        header = write(self, tensors)
        reply = group.request(self.name, header, tensors, on_event=heard, poll=poll)
        return read(self.answer, reply.header.get(ANSWER), reply.tensors, f"the answer to {self.name}")

    @classmethod
    def command(
        cls, rank: RankContext, header: dict[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The call as the ranks' command of its name."""
        answer = read(cls, header, tensors, f"the call {cls.name}").run(rank)
        sent: list[torch.Tensor] = []
        return {ANSWER: write(answer, sent)}, sent


def tell(rank: RankContext, event: Any) -> None:
    """Send an event to the client; rank 0 alone does."""
    tensors: list[torch.Tensor] = []
    rank.report(write(event, tensors), tensors)


def ranks_of(rank: RankContext) -> Ranks:
    """The ranks of the models that this group loads."""
    return Ranks(rank.rank, rank.degree, rank.device, rank.data_group)


@dataclass
class ModelCall(Call[Answer]):
    """A call to one loaded model, by the id that its load gave it."""

    model: str

    def ready(self, rank: RankContext) -> ResidentModel:
        """The model on this rank, with its shards on the device."""
        model = self.held(rank)
        model.unpark()
        return model

    def held(self, rank: RankContext) -> ResidentModel:
        """The model on this rank, also a parked one. Raises `InputError` where it is not there."""
        model = rank.models.get(self.model)
        if model is None:
            raise InputError(f"The ranks hold no model '{self.model}'. Load it again.")
        return model
