"""The safetensors header: what is read from it, and that no damaged file gets past it."""

from __future__ import annotations

import os

import pytest
import torch
from damaged_files import outcome
from weight_files import small_model, tensor, write_raw

from comfy_tp.core.checkpoint import Checkpoint, check, read_header
from comfy_tp.core.checkpoint.header import HEADER_LIMIT
from comfy_tp.core.checkpoint.layout import IDENTITY
from comfy_tp.core.errors import CheckpointError


def test_every_tensor_is_found_where_safetensors_wrote_it(tmp_path):
    tensors = small_model(tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert header.metadata == {"format": "pt"}
    assert set(header.entries) == set(tensors)
    for name, entry in header.entries.items():
        assert entry.shape == tuple(tensors[name].shape)
        assert entry.torch_dtype == tensors[name].dtype
        stored = raw[entry.start : entry.start + entry.nbytes]
        assert stored == bytes(tensors[name].reshape(-1).view(torch.uint8).numpy())


def test_an_empty_tensor_and_an_empty_file_of_tensors_are_legal(tmp_path):
    entries = read_header(write_raw(tmp_path / "a.safetensors", {"x": tensor([0, 4], 0, 0)})).entries
    assert entries["x"].shape == (0, 4)
    assert read_header(write_raw(tmp_path / "b.safetensors", {})).entries == {}


def test_a_dtype_we_cannot_hold_is_refused_only_when_it_is_wanted(tmp_path):
    path = write_raw(
        tmp_path / "a.safetensors",
        {"packed": tensor([4], 0, 2, "F4"), "x": tensor([1], 2, 6)},
        bytes(6),
    )
    entries = read_header(path).entries
    assert entries["x"].torch_dtype == torch.float32
    with pytest.raises(
        CheckpointError, match="tensor 'packed' is stored as F4, which is not supported. Use a bf16"
    ):
        _ = entries["packed"].torch_dtype


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": tensor([2], 0, 9)}, bytes(9), r"tensor 'x': shape \[2\] of F32 needs 8 bytes, but it has 9"),
        ({"x": tensor([2], 4, 12)}, bytes(12), "4 bytes before its data belong to no tensor"),
        ({"x": tensor([2], 0, 8)}, bytes(4), "tensor 'x': its data ends at byte 8 .* the file is truncated"),
        ({"x": tensor([2], 0, 8)}, bytes(9), r"its tensors end at byte \d+, but the file has"),
        ({"x": tensor([2], 8, 0)}, bytes(8), "run backwards"),
        ({"x": tensor([2], -8, 0)}, bytes(8), "not two non-negative integers"),
        (
            {"x": tensor([2], 0, 8), "y": tensor([2], 4, 12)},
            bytes(12),
            "tensor 'y': its data overlaps that of 'x'",
        ),
        ({"x": tensor([2**63], 0, 8)}, bytes(8), "larger than any tensor can be"),
        ({"x": tensor([2**32, 2**31, 0, 2], 0, 8)}, bytes(8), "larger than any tensor can be"),
        ({"x": tensor([-2], 0, 8)}, bytes(8), "not a list of non-negative integers"),
        ({"x": tensor([2], 0, 8, "F31")}, bytes(8), "tensor 'x': unknown dtype 'F31'"),
        (
            {"x": {"dtype": "F32", "shape": [2]}},
            bytes(8),
            "tensor 'x': its description has no 'data_offsets'",
        ),
        ({"x": 3}, b"", "tensor 'x': its description is not an object"),
        (b'{"x": 1, "x": 2}', b"", "key 'x' appears twice"),
        (b"[1]", b"", "does not begin with '{'"),
        (b"{]", b"", "not valid JSON"),
        (b'{"__metadata__": {"a": 1}}', b"", "'__metadata__' is not a table of strings"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, header, data, message):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "download it again" in str(caught.value)


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path):
    path = write_raw(tmp_path / "bad.safetensors", b"{}", length=10**9)
    with pytest.raises(
        CheckpointError, match="claims 1000000000 bytes, but only 2 follow: the file is truncated"
    ):
        read_header(path)


def test_a_header_of_a_gigabyte_is_refused_though_the_file_has_it(tmp_path):
    path = write_raw(tmp_path / "bad.safetensors", b"{}", length=10**9)
    os.truncate(path, 2 * 10**9)
    with pytest.raises(CheckpointError, match=f"more than the {HEADER_LIMIT} that any real model needs"):
        read_header(path)


def test_files_that_are_no_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="No such weight file: .*nothing.safetensors. Check the path"):
        read_header(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path / "pipe.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="is not a safetensors file: it has 3 bytes"):
        read_header(tmp_path / "short.safetensors")


def test_damaged_files_are_each_an_error_and_cost_no_memory(tmp_path):
    result = outcome(tmp_path, 88)
    assert result["refused"] == 88
    assert result["peak_mb"] <= 64


@pytest.mark.soak
def test_500_damaged_files_are_each_an_error_and_cost_no_memory(tmp_path):
    result = outcome(tmp_path, 500)
    assert result["refused"] == 500
    assert result["peak_mb"] <= 64


def test_a_renamed_tensor_is_missing_and_unknown(tmp_path):
    tensors = small_model(tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes().replace(b"norm.weight", b"norm.weighs")
    (tmp_path / "a.safetensors").write_bytes(raw)
    shapes = {name: one.shape for name, one in tensors.items()}
    with pytest.raises(CheckpointError, match="missing tensor 'norm.weight'; unknown tensor 'norm.weighs'"):
        check(Checkpoint.open(tmp_path / "a.safetensors"), IDENTITY, shapes)
