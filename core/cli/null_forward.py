"""The ranks' commands with a model call that computes nothing: for measuring what surrounds the model."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import commands
from ..ranks.rank import RankContext


def forward(
    context: RankContext, header: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The call as `ResidentModel.forward` takes it apart, and zeros in place of the model."""
    model = context.models[header["model"]]
    x = tensors[0].to(context.device, model.dtype)
    model.shared_by(header["contexts"], x.shape[0])
    for keys in header["references"]:
        model.shared_by(keys, x.shape[0])
    return {}, [torch.zeros_like(x).float().cpu()]


COMMANDS = {**commands.COMMANDS, "forward": forward}
