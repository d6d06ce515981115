"""Saving: the files that diffusers reads back bit-identically, and per-rank shards for a restart."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_checks import full_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from comfy_tp.core.checkpoint import Checkpoint
from comfy_tp.core.checkpoint.writer import (
    FileStream,
    file_order,
    save_pretrained,
    write_file,
)
from comfy_tp.core.cli.bench_load import MemoryWatch
from comfy_tp.core.errors import CheckpointError
from comfy_tp.core.tp.shard import ShardSpec
from comfy_tp.core.tp.together import Together


def table_of(tensors: dict[str, torch.Tensor]) -> dict:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def stream_out(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    table = table_of(tensors)
    write_file(path, table, ((name, tensors[name]) for name in file_order(table)), {"format": "pt"})


def test_a_streamed_file_is_what_safetensors_would_write(tmp_path):
    tensors = {
        **full_tensors(),
        "wide": torch.ones(3),
        "flags": torch.tensor([True, False]),
        "byte": torch.ones(1).bool(),
    }
    tensors["fp8"] = torch.ones(5).to(torch.float8_e5m2)
    stream_out(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(tmp_path / "theirs.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name].float(), tensor.float())
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(os.listdir(tmp_path)) == ["ours.safetensors", "theirs.safetensors"]


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}

    def interrupted():
        yield "a", tensors["a"]
        raise KeyboardInterrupt

    (tmp_path / "m.safetensors").write_text("the old file")
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "m.safetensors", table_of(tensors), interrupted())
    assert (tmp_path / "m.safetensors").read_text() == "the old file"
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="m.safetensors cannot be written .*choose another folder"):
        FileStream(tmp_path / "file" / "m.safetensors", {"a": (torch.float32, (1,))})
    with pytest.raises(
        CheckpointError, match="tensor 'a' of torch.complex128 cannot be written as safetensors"
    ):
        FileStream(tmp_path / "m.safetensors", {"a": (torch.complex128, (1,))})


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(FileStream, "_write", side_effect=full),
        pytest.raises(CheckpointError, match="No space left on device.*what was written is removed"),
    ):
        FileStream(tmp_path / "m.safetensors", {"a": (torch.float32, (1,))})
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_taken_leaves_no_part_of_a_file(tmp_path):
    taken = "diffusion_pytorch_model-00002-of-00003.safetensors"
    (tmp_path / taken).mkdir()
    with pytest.raises(CheckpointError, match=f"{taken} cannot be written"):
        save_alone(tmp_path, {name: torch.ones(4) for name in "abc"}, max_shard_bytes=16)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_what_a_killed_save_left_is_removed_by_the_next_one_and_nothing_of_a_save_that_goes_on(tmp_path):
    writing = FileStream(tmp_path / "other.safetensors", {"a": (torch.float32, (1,))})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (left,) = set(os.listdir(tmp_path)) - {writing._temporary.name}
    assert left.startswith(".m.safetensors.") and left.endswith(".tmp")
    write_file(tmp_path / "n.safetensors", {"a": (torch.float32, (1,))}, [("a", torch.ones(1))])
    assert sorted(os.listdir(tmp_path)) == [writing._temporary.name, "n.safetensors"]
    writing.write("a", torch.ones(1))
    writing.finish()
    writing.publish()
    assert sorted(os.listdir(tmp_path)) == ["n.safetensors", "other.safetensors"]


def test_saves_that_begin_at_the_same_time_in_one_folder_leave_each_other_alone(tmp_path):
    def save(name: str) -> None:
        for _ in range(100):
            write_file(tmp_path / f"{name}.safetensors", {"a": (torch.float32, (1,))}, [("a", torch.ones(1))])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(save, name) for name in "abcd"]:
            done.result(60)
    assert sorted(os.listdir(tmp_path)) == [f"{name}.safetensors" for name in "abcd"]


KILLED = """
import os, signal, sys
import torch
from comfy_tp.core.checkpoint.writer import FileStream

FileStream(sys.argv[1] + "/m.safetensors", {"a": (torch.float32, (1,))})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_whatever_stops_a_rank_from_writing_is_told_to_the_others_first(monkeypatch):
    def out_of_memory():
        raise torch.OutOfMemoryError("no room for a copy")

    told = []
    monkeypatch.setattr(Together, "_failed", lambda self, here: told.append(here) or [])
    with pytest.raises(torch.OutOfMemoryError):
        Together(None, 2, 0).do("could not write.", out_of_memory)
    assert told == [True]


def save_alone(folder: Path, tensors: dict[str, torch.Tensor], **options) -> None:
    layout = {name: ShardSpec.replicated(tensor.shape, 1) for name, tensor in tensors.items()}
    save_pretrained(folder, tensors, layout, rank=0, degree=1, **options)


def test_saving_again_leaves_no_file_of_the_earlier_save(tmp_path):
    tensors = full_tensors()
    save_alone(tmp_path, tensors, max_shard_bytes=4_000_000, config={"a": 1})
    assert "diffusion_pytorch_model.safetensors.index.json" in os.listdir(tmp_path)
    assert set(Checkpoint.open(tmp_path).entries) == set(tensors)
    save_alone(tmp_path, tensors)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "diffusion_pytorch_model.safetensors"]
    save_alone(tmp_path, tensors, max_shard_bytes=4_000_000)
    assert "diffusion_pytorch_model.safetensors" not in os.listdir(tmp_path)
    assert set(Checkpoint.open(tmp_path).entries) == set(tensors)


def test_diffusers_reads_back_what_was_saved(tmp_path):
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    config = {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "in_channels": 8,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    model = Flux2Transformer2DModel(**config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    plain = {key: value for key, value in model.config.items() if not key.startswith("_")}
    save_alone(
        tmp_path, weights, max_shard_bytes=20_000, config={"_class_name": "Flux2Transformer2DModel", **plain}
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = Flux2Transformer2DModel.from_pretrained(tmp_path)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_saving_holds_no_more_than_two_tensors(tmp_path):
    size = 16 << 20
    one = torch.zeros(size, dtype=torch.uint8).view(torch.bfloat16).reshape(1024, -1)
    save_alone(tmp_path / "warm", {"w": one})
    with MemoryWatch() as memory:
        save_alone(tmp_path / "model", {f"w{index}": one for index in range(12)})
    assert memory.anonymous_peak <= 2 * size
