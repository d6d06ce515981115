"""Rank files of a model that one rank holds whole, and what a damaged one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import comfy_tp.core as core
from comfy_tp.core.errors import CheckpointError, UnsupportedError
from comfy_tp.core.models import architecture_named
from comfy_tp.core.planning.compare import example_model
from comfy_tp.core.tp.config import TensorParallelConfig

FLUX2 = architecture_named("flux2")
NAME = "rank-00000-of-00001.safetensors"


def load(folder: Path, **options) -> torch.nn.Module:
    return core.from_pretrained(
        FLUX2.load_class(), str(folder), parallel_config=TensorParallelConfig(), **options
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A small FLUX.2 in fp8, as rank files."""
    folder = tmp_path_factory.mktemp("restart")
    example_model(FLUX2, "dev").save_pretrained(str(folder / "full"))
    core.save_shards(load(folder / "full", dtype=torch.float8_e4m3fn), folder / "shards")
    return folder / "shards"


def test_fp8_weights_are_not_saved_without_their_scales(saved, tmp_path):
    with pytest.raises(UnsupportedError, match="holds fp8 weights cannot be saved as a plain checkpoint"):
        load(saved).save_pretrained(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def changed(saved: Path, folder: Path, field: str, value: object) -> Path:
    """A copy of the save that says something else of its model."""
    raw = (saved / NAME).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    kept = header["__metadata__"]
    kept[field] = json.dumps({**json.loads(kept[field]), **value} if isinstance(value, dict) else value)
    text = json.dumps(header).encode()
    (folder / NAME).write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    return folder


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("compute_dtype", "foo", "what it says of the model's 'compute_dtype' is damaged"),
        ("dtype", "nn", "what it says of the model's 'dtype' is damaged"),
        ("scales", {"proj_out": [1.0]}, "what it says of the model's 'scales' is damaged"),
        ("scales", {"proj_out": ["x", None, False]}, "what it says of the model's 'scales' is damaged"),
        ("scales", {"norm_out.norm": [1.0, None, False]}, "scale for 'norm_out.norm', which is no Linear"),
        ("config", {"num_layers": "two"}, "makes no Flux2Transformer2DModel "),
    ],
)
def test_a_damaged_description_is_an_error_that_says_what_to_do(saved, tmp_path, field, value, text):
    with pytest.raises(CheckpointError, match=text) as error:
        load(changed(saved, tmp_path, field, value))
    assert str(error.value).startswith(str(tmp_path / NAME))
    assert str(error.value).endswith(
        "To restart, load the model from its own files and save the shards again."
    )
