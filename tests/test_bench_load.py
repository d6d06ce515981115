"""What the load bench makes of its ranks' figures, and how it ends when a rank fails."""

from __future__ import annotations

import os

import pytest

from comfy_tp.core.cli.bench_load import run_ranks, summarise
from comfy_tp.core.errors import RankError


def rank_figures(seconds: float, checksum: int = 7, shape: int = 4) -> dict:
    return {
        "seconds": seconds,
        "bytes_read": 50,
        "rchar": 60,
        "anonymous_peak_mb": 10.0,
        "file_peak_mb": 1.0,
        "shard_mb": 8.0,
        "anonymous_beyond_shard_mb": 2.0,
        "weights": {"w": [shape, checksum]},
    }


def test_ratios_are_of_medians_of_the_slowest_rank():
    figures = summarise(
        {
            "ours": [
                [rank_figures(1.0), rank_figures(2.0)],
                [rank_figures(9.0), rank_figures(1.0)],
                [rank_figures(1.0)] * 2,
            ],
            "diffusers": [[rank_figures(8.0), rank_figures(1.0)]] * 3,
            "diffusers_after": [[rank_figures(16.0), rank_figures(1.0)]] * 3,
        },
        100,
    )
    assert figures["time_ratio"] == 2.0 / 8.0
    assert figures["time_ratio_after"] == 2.0 / 16.0
    assert figures["bytes_read_ratio"] == 1.0
    assert figures["anonymous_beyond_shard_mb"] == 2.0
    assert figures["same_weights"]


def test_different_weights_are_noticed_where_the_shards_have_one_shape():
    ours = [[rank_figures(1.0, checksum=7)]]
    assert not summarise({"ours": ours, "diffusers": [[rank_figures(1.0, checksum=8)]]}, 100)["same_weights"]
    assert summarise({"ours": ours, "diffusers": [[rank_figures(1.0, checksum=8, shape=2)]]}, 100)[
        "same_weights"
    ]


def test_a_rank_that_fails_is_named_with_what_it_said(tmp_path):
    with pytest.raises(RankError, match=r"Rank [01] of .* ended with 1:\n.*No module named"):
        run_ranks("comfy_tp.no_such_program", ["ours"], 2, 1, tmp_path)
    assert os.listdir(tmp_path) == []
