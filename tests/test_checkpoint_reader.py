"""Reading shards: for any shapes, layouts and files the ranks' parts are the tensor, and each byte is read once."""

from __future__ import annotations

import json
import os
import random
import time
from math import prod
from pathlib import Path

import pytest
import torch
from checkpoint_checks import SHAPES, full_tensors, rchar
from safetensors.torch import save_file

from comfy_tp.core.checkpoint import Checkpoint, Piece, Wanted, memory, ranges, read_shards, reader
from comfy_tp.core.checkpoint.memory import PAGE, Buffer, Staging
from comfy_tp.core.errors import CheckpointError, PlanError
from comfy_tp.core.tp.shard import ShardSpec

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float16)


def random_case(
    rng: random.Random, degree: int
) -> tuple[torch.Tensor, torch.Tensor, ShardSpec, list[tuple[int, int]]]:
    """A tensor, how a file stores it (its rows in shuffled pieces), its layout, and the pieces in order."""
    ndim = rng.randint(0, 4)
    shape = [rng.choice([0, 1, 1, 2, 3, 5, 8]) * rng.choice([1, degree]) for _ in range(ndim)]
    dtype = rng.choice(DTYPES)
    raw = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8)
    cuts = sorted({0, *(rng.randint(0, shape[0]) for _ in range(3)), shape[0]}) if ndim else [0]
    spans = list(zip(cuts, cuts[1:], strict=False)) if ndim and rng.random() < 0.7 else []
    order = list(range(len(spans)))
    rng.shuffle(order)
    pieces = [(0, 0)] * len(spans)
    parts = []
    position = 0
    for index in order:
        start, stop = spans[index]
        pieces[index] = (position, position + stop - start)
        position += stop - start
        parts.append(raw[start:stop])
    full = raw.view(dtype).reshape(shape)
    stored = torch.cat(parts).view(dtype).reshape(shape) if parts else full
    splittable = [dim for dim in range(ndim) if shape[dim] % degree == 0 and shape[dim]]
    if not splittable or rng.random() < 0.2:
        return full, stored, ShardSpec.replicated(shape, degree), pieces
    dim = rng.choice(splittable)
    units = shape[dim] // degree
    inner = rng.randint(1, units - 1) if units > 1 and rng.random() < 0.6 else None
    blocks = (inner * degree, (units - inner) * degree) if inner else None
    return full, stored, ShardSpec.split(shape, degree, dim, blocks), pieces


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("seed", range(60))
def test_the_shards_of_all_ranks_gather_to_the_stored_tensor(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(ranges, "CHUNK", rng.choice([16, 100, 1000, 8 << 20]))
    degree = rng.choice([1, 2, 3, 4])
    cases = {f"p{index}": random_case(rng, degree) for index in range(rng.randint(1, 9))}
    stored = list({f"file.{name}": case[1] for name, case in cases.items()}.items())
    rng.shuffle(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "a.safetensors")
    convert = rng.choice([None, None, torch.float32])
    wanted = {
        name: Wanted(
            spec,
            tuple(Piece(f"file.{name}", start, stop) for start, stop in pieces) or (Piece(f"file.{name}"),),
            convert,
        )
        for name, (_, _, spec, pieces) in cases.items()
    }
    ranks = [
        read_shards(checkpoint, wanted, rank=rank, degree=degree, threads=rng.choice([1, 3]))
        for rank in range(degree)
    ]
    for name, (full, _, spec, _) in cases.items():
        for shards, _ in ranks:
            assert shards[name].shape == spec.local_shape
            assert shards[name].dtype == (convert or full.dtype)
        if full.numel():
            gathered = (full.to(convert) if convert else full).reshape(spec.shape)
            parts = [shards[name] for shards, _ in ranks]
            assert torch.equal(bits(spec.gather(parts)), bits(gathered)) or convert
            assert torch.allclose(
                spec.gather(parts).float(), gathered.float(), rtol=0, atol=0, equal_nan=True
            )
    replicated = sum(full.nbytes for full, _, spec, _ in cases.values() if spec.is_replicated)
    read = sum(report.bytes_read for _, report in ranks)
    assert (
        checkpoint.nbytes + (degree - 1) * replicated
        <= read
        <= 1.02 * checkpoint.nbytes + degree * replicated + 64
    )


def save_model(path: Path) -> Path:
    save_file(full_tensors(), path)
    return path


def whole(names: list[str]) -> dict[str, Wanted]:
    return {name: Wanted(ShardSpec.replicated(SHAPES[name][0], 1), (Piece(name),)) for name in names}


def test_the_kernel_counts_the_same_bytes_as_we_do(tmp_path):
    checkpoint = Checkpoint.open(save_model(tmp_path / "a.safetensors"))
    before = rchar()
    _, report = read_shards(checkpoint, whole(list(SHAPES)), rank=0, degree=1)
    assert report.bytes_read <= rchar() - before <= report.bytes_read + 10_000
    assert report.bytes_kept == checkpoint.nbytes
    assert checkpoint.nbytes <= report.bytes_read <= 1.001 * checkpoint.nbytes + 8


def test_small_neighbours_share_a_read(tmp_path):
    save_file(
        {f"n{index:03d}": torch.full((7,), float(index)) for index in range(200)}, tmp_path / "a.safetensors"
    )
    checkpoint = Checkpoint.open(tmp_path / "a.safetensors")
    wanted = {
        f"n{index:03d}": Wanted(ShardSpec.replicated((7,), 1), (Piece(f"n{index:03d}"),))
        for index in range(200)
    }
    shards, report = read_shards(checkpoint, wanted, rank=0, degree=1, threads=1)
    assert report.calls == 1
    assert all(shards[f"n{index:03d}"].tolist() == [float(index)] * 7 for index in range(200))


def test_progress_ends_at_the_total_and_is_not_called_too_often(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "CHUNK", 4096)
    checkpoint = Checkpoint.open(save_model(tmp_path / "a.safetensors"))
    calls: list[tuple[int, int]] = []
    begin = time.perf_counter()
    read_shards(
        checkpoint,
        whole(list(SHAPES)),
        rank=0,
        degree=1,
        progress=lambda *call: calls.append(call),
        threads=2,
    )
    seconds = time.perf_counter() - begin
    assert calls[0] == (0, checkpoint.nbytes)
    assert calls[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert calls == sorted(calls)
    assert len(calls) <= 20 * seconds + 4


@pytest.mark.parametrize("threads", [1, 3])
def test_a_cancel_stops_the_reading_and_leaves_nothing_open(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(ranges, "CHUNK", 65536)
    checkpoint = Checkpoint.open(save_model(tmp_path / "a.safetensors"))

    class Stop(Exception):
        pass

    polls = 0

    def cancelled() -> None:
        nonlocal polls
        polls += 1
        if polls == 5:
            raise Stop

    files = len(os.listdir("/proc/self/fd"))
    done: list[int] = []
    with pytest.raises(Stop):
        read_shards(
            checkpoint,
            whole(list(SHAPES)),
            rank=0,
            degree=1,
            threads=threads,
            cancelled=cancelled,
            progress=lambda part, total: done.append(part),
        )
    assert done[-1] < checkpoint.nbytes
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(ranges, "CHUNK", 65536)
    path = save_model(tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(path)
    wanted = {name: Wanted(want.spec, want.pieces, dtype) for name, want in whole(list(SHAPES)).items()}
    polls = 0

    def shrink() -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            os.truncate(path, path.stat().st_size - 100_000)

    with pytest.raises(
        CheckpointError, match=r"a.safetensors: tensor '.*' ended before all its bytes were read"
    ):
        read_shards(checkpoint, wanted, rank=0, degree=1, threads=1, cancelled=shrink)


def test_a_strided_read_of_a_file_that_shrank_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "CHUNK", 4096)
    save_file({"to_out.weight": torch.ones(64, 256)}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "a.safetensors")
    wanted = {"to_out.weight": Wanted(ShardSpec.split((64, 256), 2, 1), (Piece("to_out.weight"),))}
    with pytest.raises(CheckpointError, match="tensor 'to_out.weight' ended before all its bytes were read"):
        read_shards(
            checkpoint,
            wanted,
            rank=1,
            degree=2,
            threads=1,
            cancelled=lambda: os.truncate(tmp_path / "a.safetensors", 30_000),
        )


def test_a_file_that_changed_since_it_was_opened_is_not_read(tmp_path):
    path = save_model(tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(path)
    os.truncate(path, 5000)
    with pytest.raises(CheckpointError, match="the file changed since its header was read"):
        read_shards(checkpoint, whole(["to_q.weight"]), rank=0, degree=1)
    os.unlink(path)
    with pytest.raises(CheckpointError, match="a.safetensors: cannot be opened"):
        read_shards(checkpoint, whole(["to_q.weight"]), rank=0, degree=1)


def test_requests_that_do_not_fit_are_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    checkpoint = Checkpoint.open(save_model(tmp_path / "a.safetensors"))

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("allocated")

    monkeypatch.setattr(reader, "allocate", refuse)
    spec = ShardSpec.replicated((96,), 1)
    with pytest.raises(CheckpointError, match="has no tensor 'absent', which 'p' needs"):
        read_shards(checkpoint, {"p": Wanted(spec, (Piece("absent"),))}, rank=0, degree=1)
    with pytest.raises(CheckpointError, match=r"has 96 rows, but 'p' needs rows \[0, 97\)"):
        read_shards(checkpoint, {"p": Wanted(spec, (Piece("norm.weight", 0, 97),))}, rank=0, degree=1)
    with pytest.raises(CheckpointError, match="needs 96 elements of one dtype, but its tensors hold 95"):
        read_shards(checkpoint, {"p": Wanted(spec, (Piece("norm.weight", 0, 95),))}, rank=0, degree=1)
    with pytest.raises(PlanError, match="'p' is laid out for 1 ranks, but 2 are reading"):
        read_shards(checkpoint, {"p": Wanted(spec, (Piece("norm.weight"),))}, rank=0, degree=2)


def test_weights_read_under_inference_mode_are_ordinary_tensors(tmp_path):
    checkpoint = Checkpoint.open(save_model(tmp_path / "a.safetensors"))
    with torch.inference_mode():
        shards, _ = read_shards(checkpoint, whole(["norm.weight"]), rank=0, degree=1, threads=2)
    assert not shards["norm.weight"].is_inference()


def placed(nbytes: int, begin: int) -> torch.Tensor:
    """Memory that begins `begin` bytes into a page."""
    memory = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    skipped = (begin - memory.data_ptr()) % PAGE
    return memory[skipped : skipped + nbytes]


class PlacedBuffer(Buffer):
    def __init__(self, staging: Staging, nbytes: int) -> None:
        super().__init__(staging, nbytes)
        self._memory = placed(nbytes, 64)
        self.address = self._memory.data_ptr()


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["direct", "staged"])
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_is_read_to_where_the_kernel_copies_slowly(tmp_path, monkeypatch, dim, dtype):
    weight = torch.arange(1 << 19, dtype=torch.int32).view(torch.bfloat16).view(1024, 1024)
    header = {"w": {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [0, weight.nbytes]}}
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write((PAGE + 48 - 8).to_bytes(8, "little"))
        file.write(json.dumps(header).encode().ljust(PAGE + 48 - 8))
        file.write(bits(weight).numpy().data)

    def allocate(shape: tuple, dtype: torch.dtype, device: torch.device, shift: int = 0) -> torch.Tensor:
        return placed(prod(shape) * dtype.itemsize, 64 + shift).view(dtype).view(shape)

    distances = []
    preadv = os.preadv

    def watched(descriptor: int, views: list, offset: int) -> int:
        distances.append((torch.frombuffer(views[0], dtype=torch.uint8).data_ptr() - offset) % PAGE)
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(reader, "allocate", allocate)
    monkeypatch.setattr(memory, "Buffer", PlacedBuffer)
    monkeypatch.setattr(os, "preadv", watched)
    wanted = {"w": Wanted(ShardSpec.split(weight.shape, 2, dim), (Piece("w"),), dtype)}
    checkpoint = Checkpoint.open(tmp_path / "a.safetensors")
    shards, _ = read_shards(checkpoint, wanted, rank=1, degree=2, threads=1)
    assert torch.equal(bits(shards["w"]), bits(weight.chunk(2, dim)[1].to(shards["w"].dtype)))
    assert distances and not [distance for distance in distances if 0 < distance < 32]
