"""What a proxied model call costs beyond the ranks' own forward."""

from __future__ import annotations

import functools
import os
import statistics
import time
from pathlib import Path

import pytest
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    save_small_model,
)

CALLS = 20
PATIENCE_S = 15.0
MOST_MS = 5.0


@pytest.fixture(scope="module")
def model_that_computes_nothing(in_comfy):  # noqa: F811
    """A MODEL of FLUX.2-dev's text width, whose ranks answer every call with zeros."""
    from comfy_tp.comfy_tp_nodes import groups
    from comfy_tp.core.ranks.client import RankGroup

    save_small_model(in_comfy / "models/diffusion_models/wide-flux2", joint_attention_dim=15360)
    commands = f"{Path(__file__).with_name('null_commands.py')}:COMMANDS"
    for (devices, _), group in groups.running().items():
        # Another test of this process may have left a group of this degree.
        if devices == ("cpu",):
            groups.close_group(group)
    start = RankGroup.start
    RankGroup.start = functools.partial(start, commands=commands)
    model = None
    try:
        # A degree of its own, so that no other test gets these ranks.
        model = load_tp("wide-flux2", 1)
    finally:
        RankGroup.start = start
    yield model
    groups.close_group(model.sharded.remote.group)


def times_of_calls(model, cond: list) -> list[float]:
    """Seconds of each `diffusion_model.forward` of a run of `CALLS` steps at 64x64."""
    import comfy.patcher_extension as extension

    seconds = []

    def timed(executor, *args, **kwargs):
        started = time.perf_counter()
        result = executor(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return result

    measured = model.clone()
    measured.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, timed)
    ksampler(measured, cond, cond, latent(64, 64), steps=CALLS)
    return seconds


@pytest.mark.parametrize("references", [0, 2])
def test_a_proxied_call_costs_at_most_5_ms_beyond_the_ranks_forward(model_that_computes_nothing, references):
    values = (
        {"reference_latents": [latent(64, 64, seed=n)["samples"] for n in range(references)]}
        if references
        else {}
    )
    cond = conditioning(512, width=15360, **values)
    medians, fastest = [], []
    deadline = time.monotonic() + PATIENCE_S
    # Other processes may hold the machine for a while; the cost is what it is when they do not.
    while not medians or (min(medians) > MOST_MS and time.monotonic() < deadline):
        seconds = times_of_calls(model_that_computes_nothing, cond)
        assert len(seconds) == CALLS
        medians.append(1000 * statistics.median(seconds))
        fastest.append(1000 * min(seconds))
    busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    print(
        f"{references} references: median {min(medians):.2f} ms, fastest {min(fastest):.2f} ms, busy: {busy}"
    )
    # Where more processes run than there are processors all the time, no median says anything about this call.
    assert (min(fastest) if busy else min(medians)) <= MOST_MS
