"""Ranks that read and save one checkpoint together: real processes over gloo."""

from __future__ import annotations

import pytest
from checkpoint_checks import SHAPES, full_tensors
from ranks_harness import Check, run_on_ranks
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory) -> dict[int, dict[str, list]]:
    folder = tmp_path_factory.mktemp("ranks")
    path = str(folder / "a.safetensors")
    save_file(full_tensors(), path)
    (folder / "file").write_text("no folder")
    checks = [
        Check("reading", "checkpoint_checks:reading", {"path": path}),
        Check("converting", "checkpoint_checks:converting", {"path": path}),
        Check("cancel", "checkpoint_checks:failing", {"path": path, "kind": "cancel"}),
        Check("absent", "checkpoint_checks:failing", {"path": path, "kind": "absent"}),
        Check(
            "saving",
            "checkpoint_checks:saving",
            {"path": path, "folder": str(folder / "one"), "max_shard_bytes": 10**9},
        ),
        Check(
            "saving in parts",
            "checkpoint_checks:saving",
            {"path": path, "folder": str(folder / "many"), "max_shard_bytes": 4_000_000},
        ),
        Check("memory", "checkpoint_checks:saving_in_memory", {"folder": str(folder / "memory")}, (2,)),
        Check(
            "saving fails", "checkpoint_checks:saving_fails", {"path": path, "folder": str(folder / "file")}
        ),
    ]
    return run_on_ranks([2, 3], checks)


@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_together_read_each_byte_once(on_ranks, degree):
    ranks = on_ranks[degree]["reading"]
    assert [rank["wrong"] for rank in ranks] == [[]] * degree
    read = sum(rank["bytes_read"] for rank in ranks)
    assert ranks[0]["file_bytes"] <= read <= 1.001 * ranks[0]["file_bytes"] + 8 * degree
    for rank in ranks:
        # Every weight has memory of its own; what the group's own sockets read is all that the kernel counts besides.
        assert rank["distinct"] == len([shape for shape, _ in SHAPES.values() if 0 not in shape])
        assert rank["bytes_read"] <= rank["rchar"] <= rank["bytes_read"] + rank["bytes_broadcast"] + 100_000


@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_convert_on_the_fly(on_ranks, degree):
    assert on_ranks[degree]["converting"] == [[]] * degree


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(
    ("kind", "own"),
    [("cancel", "stopped by the check"), ("absent", "has no tensor 'absent', which 'to_q.weight' needs")],
)
def test_when_one_rank_fails_all_say_so_and_none_waits(on_ranks, degree, kind, own):
    *others, last = on_ranks[degree][kind]
    assert own in last["text"]
    for rank in others:
        assert f"Rank {degree - 1} could not read its part of" in rank["text"]
        assert rank["seconds"] < 60
    assert [rank["total"] for rank in (*others, last)] == [degree] * degree


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("kind", ["saving", "saving in parts"])
def test_ranks_save_the_full_model_together(on_ranks, degree, kind):
    assert on_ranks[degree][kind] == [[]] * degree


def test_saving_takes_no_more_memory_than_two_tensors_on_any_rank(on_ranks):
    for rank in on_ranks[2]["memory"]:
        assert rank["peak"] <= 2 * rank["largest"] < rank["model"] / 4


@pytest.mark.parametrize("degree", [2, 3])
def test_when_rank_0_cannot_write_every_rank_says_so(on_ranks, degree):
    first, *others = on_ranks[degree]["saving fails"]
    assert "cannot be made" in first
    for text in others:
        assert "Rank 0 could not write to" in text
