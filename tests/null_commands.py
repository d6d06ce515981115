"""The ranks' commands with a model call that computes nothing, to measure what surrounds the model."""

import torch

from comfy_tp.core.calls import commands


def forward(context, header, tensors):
    """The call as `ResidentModel.forward` takes it apart, and zeros in place of the model."""
    model = context.models[header["model"]]
    rest = list(tensors)
    x = rest[0].to(context.device, model.dtype)
    model.shared_by(header["contexts"], x.shape[0])
    for keys in header["references"]:
        model.shared_by(keys, x.shape[0])
    return {}, [torch.zeros_like(x).float().cpu()]


COMMANDS = {**commands.COMMANDS, "forward": forward}
