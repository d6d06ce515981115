"""Every architecture against its unsharded self, at every degree of 2, 3 and 4, on real ranks; and restarts of them."""

from __future__ import annotations

from typing import Any

import pytest
from installed import examples, skip_without
from ranks_harness import Check, run_on_ranks
from restart_checks import MODELS

from comfy_tp.core.models import ARCHITECTURES, architecture_named

DEGREES = (2, 3, 4)
CASES = [(name, example) for name in ARCHITECTURES for example in architecture_named(name).examples]


RESTARTS = (2, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict[str, list[Any]]]:
    folder = {"folder": str(tmp_path_factory.mktemp("shards"))}
    restarts = [
        Check(f"restart {kind}", "restart_checks:restarted", {**folder, "kind": kind}, RESTARTS)
        for kind in MODELS
    ]
    return run_on_ranks(
        DEGREES,
        [
            Check(f"{name} {example}", "rank_checks:architecture", {"name": name, "example": example})
            for name, example in examples()
        ]
        + [
            Check(f"bfloat16 {name} {example}", "bfloat16_checks:sharded", {"name": name, "example": example})
            for name, example in examples()
        ]
        + [*restarts, Check("refused", "restart_checks:refused", folder, RESTARTS)],
    )


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("name", "example"), CASES)
def test_sharded_equals_unsharded(results, name: str, example: str, degree: int) -> None:
    skip_without(name, architecture_named(name).examples[example])
    for found in results[degree][f"{name} {example}"]:
        assert "error" not in found, found
        assert found["failure"] is None, (found["failed_in"], found["failure"])
        assert found["rel_l2"] <= 1e-6
        assert found["first_wrong"] is None
        assert found["rank_spread"] <= 1e-6
        assert found["collectives"] == found["predicted"] > 0


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("name", "example"), CASES)
def test_bfloat16_is_within_twice_its_own_error(results, name: str, example: str, degree: int) -> None:
    skip_without(name, architecture_named(name).examples[example])
    for found in results[degree][f"bfloat16 {name} {example}"]:
        assert "error" not in found, found
        assert 1e-3 < found["unsharded"] < 2e-2
        assert 0 < found["sharded"] <= 2 * found["unsharded"]


@pytest.mark.parametrize("degree", RESTARTS)
@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("float32", ["torch.float32"]),
        ("bfloat16", ["torch.bfloat16", "torch.float32"]),
        ("fp8", ["torch.float32", "torch.float8_e4m3fn"]),
    ],
)
def test_a_restart_from_rank_files_gives_the_same_model(
    results, kind: str, dtypes: list[str], degree: int
) -> None:
    files = [f"rank-{rank:05d}-of-{degree:05d}.safetensors" for rank in range(degree)]
    for found in results[degree][f"restart {kind}"]:
        assert "error" not in found, found
        assert found["same"] and found["same_scales"] and found["same_output"]
        assert found["dtypes"] == dtypes
        assert found["replicated"] > 4
        assert (found["fp8"] > 10) == (kind == "fp8")
        assert found["compute_dtype"] == ("torch.bfloat16" if kind == "bfloat16" else "torch.float32")
        assert 1 <= found["read"] <= 1.5  # its own file, the header twice, and what the ranks told each other
        assert found["files"] == ["config.json", *files]
        assert "cannot be offloaded" in found["guarded"]
        assert found["saves_again"] == "nothing was raised"


@pytest.mark.parametrize("degree", RESTARTS)
def test_rank_files_that_do_not_belong_are_refused_on_every_rank_before_anything_is_read(
    results, degree: int
) -> None:
    for rank, found in enumerate(results[degree]["refused"]):
        assert "kind" not in found, found
        own, last = f"rank-{rank:05d}-of-{degree:05d}", degree - 1
        assert (
            f"holds the shards of {degree} ranks, not of 1. Pass tp_degree={degree}, or load"
            in found["degree"]
        )
        assert f"{own}.safetensors holds shards of a FluxTransformer2DModel, not of a Wan" in found["class"]
        assert "Load them with FluxTransformer2DModel" in found["class"]
        assert "holds float32 weights, not bfloat16: shards are read as they were saved" in found["dtype"]
        assert "was saved with another plan of FluxTransformer2DModel" in found["plan"]
        assert f"(rank-00000-of-{degree:05d}.safetensors) and other weights (model" in found["other weights"]
        assert f"mixed: the shards of rank {last} are of another save than the others'" in found["mixed"]
        assert f"wrote for rank 0, but a whole model for rank {last}. Put the same" in found["whole there"]
        own_text = "empty holds no safetensors weights" if rank == last else f"Rank {last} cannot open"
        assert own_text in found["not there"]
        for case, text in {
            "missing": f"has no shards of rank {last} of {degree} ({own}.safetensors). It has: rank-00000",
            "truncated": "incomplete; load the model from its own files and save the shards again.",
            "renamed": f"holds rank 0 of {degree}, not rank {last} of {degree}: it was renamed",
        }.items():
            if rank == last:
                assert text in found[case], found[case]
            else:
                assert f"CheckpointError: Rank {last} cannot use its shards in" in found[case], found[case]
        assert found["after all"] == "nothing was raised"


@pytest.mark.parametrize("degree", RESTARTS)
def test_saves_that_nobody_could_read_back_are_refused(results, degree: int) -> None:
    for rank, found in enumerate(results[degree]["refused"]):
        assert "holds other weights (model.safetensors). Choose a folder" in found["saving beside weights"]
        assert "is not sharded, so it has no shards to save" in found["unsharded"]
        for case in ("patched", "patched whole"):
            assert "has LoRA patches on its shards" in found[case]
        assert found["unpatched"] == "nothing was raised"
        own = "cannot be written" if rank == degree - 1 else f"Rank {degree - 1} could not finish its file in"
        assert own in found["occupied"]
        assert found["left"] == []
