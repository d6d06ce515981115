"""What a rank checks of a compiled model (run through `ranks_harness`)."""

from __future__ import annotations

import torch
from flux2_files import small_flux2

from comfy_tp.core.models.tokens import image_ids, text_ids
from comfy_tp.core.parallelize import enable_parallelism
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.config import TensorParallelConfig


def regional_compile(ranks: Ranks) -> dict:
    """Compile the blocks of a FLUX.2 on its shards and compare with the same model uncompiled.

    The compiler's own code generation is left out (it takes minutes here): what can break is the tracing of the
    sharded layers and of their collectives.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    model = enable_parallelism(
        small_flux2(num_layers=3, num_single_layers=3), config=TensorParallelConfig(ranks.degree)
    )
    random = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 12, 128, generator=random),
        "encoder_hidden_states": torch.randn(1, 5, 96, generator=random),
        "timestep": torch.tensor([0.7]),
        "guidance": torch.tensor([4.0]),
        "img_ids": image_ids(3, 4, "cpu"),
        "txt_ids": text_ids(5, "cpu"),
        "return_dict": False,
    }
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        want = model(**inputs)[0]
        for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
            block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
        first, second = model(**inputs)[0], model(**inputs)[0]
    return {
        "graphs": counter.frame_count,
        "first": ((first - want).norm() / want.norm()).item(),
        "second": ((second - want).norm() / want.norm()).item(),
    }
