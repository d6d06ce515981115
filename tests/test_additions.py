"""What an addition touches: a call and an architecture one file each, a conditioning input three at the most.

Each is made in a copy of the package, as docs/adding-a-model.md says, and used there on two ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CALL = '''
from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ranks.context import RankContext
from .call import Call


@dataclass
class WeightedSum(Call[list[float]], name="weighted_sum"):
    """The sum of `values` on every rank, times its number and `factor`."""

    values: torch.Tensor
    factor: float

    def run(self, rank: RankContext) -> list[float]:
        return rank.gather(float(self.values.sum()) * self.factor * (rank.rank + 1))
'''

ARCHITECTURE = """
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tp.local import LocalAttributes
from ..tp.plan import WherePresent
from .architecture import Architecture

BLOCK = {
    "attn": LocalAttributes(("heads", "inner_dim", "inner_kv_dim")),
    **{f"attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")},
    "attn.to_out.0": "rowwise",
    "attn.to_add_out": WherePresent("rowwise"),
    "ff.net.0.proj": "colwise",
    "ff.net.2": "rowwise",
    "ff_context.net.0.proj": WherePresent("colwise"),
    "ff_context.net.2": WherePresent("rowwise"),
}
SMALL = {
    "sample_size": 8, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 12,
    "joint_attention_dim": 24, "caption_projection_dim": 96, "pooled_projection_dim": 16, "out_channels": 4,
    "pos_embed_max_size": 8,
}


def inputs(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, config["in_channels"], 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(2, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.tensor([700.0, 400.0]),
    }


ARCHITECTURE = Architecture(
    name="sd3",
    model_class="SD3Transformer2DModel",
    plan={f"transformer_blocks.*.{name}": style for name, style in BLOCK.items()},
    examples={"medium": SMALL},
    inputs=inputs,
)
"""

# A conditioning input: file -> what is replaced by what. FLUX.2 learns to add a colour to what it predicts.
TINT = {
    "core/models/flux2.py": [
        (
            '    reference_method: str = "index",\n',
            '    reference_method: str = "index",\n    tint: Any = 0.0,\n',
        ),
        (
            "return unflatten_latent(velocity, x.shape[-2], x.shape[-1])",
            "return unflatten_latent(velocity, x.shape[-2], x.shape[-1]) + tint",
        ),
    ],
    "comfy_tp_nodes/families/flux_class.py": [
        ('{"guidance": "guidance", ', '{"guidance": "guidance", "tint": "tint", ')
    ],
    # Where ComfyUI itself hands the input to its model, this file needs no change.
    "comfy_tp_nodes/families/flux2.py": [
        (
            "    text_length = TEXT_LENGTH\n",
            "    text_length = TEXT_LENGTH\n\n"
            "    def extra_conds(self, **values):\n"
            "        conds = super().extra_conds(**values)\n"
            '        if "tint" in values:\n'
            '            conds["tint"] = comfy.conds.CONDRegular(values["tint"])\n'
            "        return conds\n",
        ),
        ("import comfy.model_base\n", "import comfy.conds\nimport comfy.model_base\n"),
    ],
}

SCRIPT = """
import json, sys
import torch
from comfy_inprocess import conditioning, import_comfy, ksampler, latent, tp_model

import_comfy()
from comfy_tp.comfy_tp_nodes import groups
from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler
from comfy_tp.core import models
from comfy_tp.core.calls.verify import VerifyExample
from comfy_tp.core.calls.weighted_sum import WeightedSum

model = tp_model()
group = model.model.sharded.require().group
found = {"sums": WeightedSum(torch.arange(4.0), 0.5).ask(group)}
figures = VerifyExample("sd3", "medium", None, "float32", 0, 1e-5).ask(group)
found["verified"], found["output"] = figures["passed"], figures["rows"][-1]

tint = torch.linspace(-1, 1, 128).view(1, 128, 1, 1)
plain, tinted = conditioning(), conditioning(tint=tint)
options = {"seed": 7, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
before, after = (ksampler(model, text, plain, latent(), **options) for text in (plain, tinted))
with torch.inference_mode():
    on_ranks = TPSampler.execute(model, positive=tinted, negative=plain, latent_image=latent(), denoise=1.0, **options)
found["error"] = float((before - tint - after).abs().max())
found["same"] = torch.equal(on_ranks.args[0]["samples"], after)
print(json.dumps(found))
groups.close_all()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, which the tests may change."""
    copy = tmp_path / "comfy_tp"
    unused = shutil.ignore_patterns("__pycache__", "weights")
    for name in ("core", "comfy_tp_nodes"):
        shutil.copytree(ROOT / name, copy / name, ignore=unused)
    shutil.copy(ROOT / "__init__.py", copy)
    return copy


def test_a_call_an_architecture_and_a_conditioning_input_are_added_in_as_many_files_as_the_docs_say(package):
    (package / "core/calls/weighted_sum.py").write_text(CALL)
    (package / "core/models/sd3.py").write_text(ARCHITECTURE)
    assert len(TINT) <= 3
    for name, changes in TINT.items():
        text = (package / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (package / name).write_text(text)
    path = os.pathsep.join([str(package.parent), str(ROOT / "tests")])
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["sums"] == [3.0, 6.0]
    assert found["verified"], found["output"]
    assert found["error"] < 1e-4  # in one step from sigma 1 the latent loses what the velocity gains
    assert found["same"]
