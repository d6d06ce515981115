"""torch.compile of the blocks of a sharded model: one graph per kind of block, reused, with the same numbers."""

from __future__ import annotations

from ranks_harness import Check, run_on_ranks


def test_compiled_blocks_give_the_same_numbers_from_one_graph_per_kind():
    results = run_on_ranks([2], [Check("compile", "compile_checks:regional_compile")])[2]["compile"]
    for result in results:
        assert result["graphs"] == 2, (
            result
        )  # one for six double and single blocks each; fullgraph: no breaks
        assert result["first"] <= 1e-6
        assert result["second"] <= 1e-6
