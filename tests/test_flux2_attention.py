"""The attention of a sharded FLUX.2 goes to its processor without the look-ups of diffusers' forward."""

from __future__ import annotations

import inspect
import types

import torch
from flux2_files import small_flux2

from comfy_tp.core.models.flux2 import attention_forward
from comfy_tp.core.models.tokens import image_ids, text_ids


def output(model, **options) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        return model(
            hidden_states=torch.randn(1, 12, 128, generator=random),
            encoder_hidden_states=torch.randn(1, 5, 96, generator=random),
            timestep=torch.tensor([0.7]),
            guidance=torch.tensor([4.0]),
            img_ids=image_ids(3, 4, "cpu"),
            txt_ids=text_ids(5, "cpu"),
            return_dict=False,
            **options,
        )[0]


def test_attention_looks_up_a_signature_only_for_arguments_that_it_may_not_take(monkeypatch):
    model = small_flux2()
    expected = output(model)
    looked_up = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda call: looked_up.append(call) or signature(call))
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.forward = types.MethodType(attention_forward, block.attn)
    assert torch.equal(output(model), expected)
    assert looked_up == []
    assert torch.equal(output(model, joint_attention_kwargs={"gain": 2.0}), expected)
    assert len(looked_up) == 4
