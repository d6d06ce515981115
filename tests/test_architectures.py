"""Every architecture against its unsharded self, at every degree of 2, 3 and 4, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_harness import Check, run_on_ranks

from comfy_tp.core.models import ARCHITECTURES, architecture_named

DEGREES = (2, 3, 4)
CASES = [(name, example) for name in ARCHITECTURES for example in architecture_named(name).examples]


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, list[Any]]]:
    return run_on_ranks(
        DEGREES,
        [
            Check(f"{name} {example}", "rank_checks:architecture", {"name": name, "example": example})
            for name, example in CASES
        ],
    )


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("name", "example"), CASES)
def test_sharded_equals_unsharded(results, name: str, example: str, degree: int) -> None:
    for found in results[degree][f"{name} {example}"]:
        assert "error" not in found, found
        assert found["failure"] is None, (found["failed_in"], found["failure"])
        assert found["rel_l2"] <= 1e-6
        assert found["first_wrong"] is None
        assert found["rank_spread"] <= 1e-6
        assert found["collectives"] == found["predicted"] > 0
