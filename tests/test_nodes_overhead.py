"""What a proxied model call costs beyond the ranks' own forward: messages, bytes and Python calls.

The time of it is measured by ``comfy-tp bench overhead``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    tp_model,
)

from comfy_tp.core import cli
from comfy_tp.core.ranks import channel as wire

CALLS = 4
SIDE = 8
TEXT_TOKENS = 512
# Of a call; measured were 120 to 150 Python calls and 240 to 290 bytes beside the latent.
MOST_PYTHON_CALLS = 300
MOST_HEADER_BYTES = 600
LATENT_BYTES = 4 * 128 * SIDE * SIDE


@dataclass
class Traffic:
    """What crosses between this process and rank 0: per command its name and bytes, per answer its bytes."""

    commands: list[tuple[str, int, int]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    def named(self, name: str) -> list[tuple[int, int]]:
        """Header and payload bytes of each command of that name."""
        return [(header, payload) for found, header, payload in self.commands if found == name]


@pytest.fixture
def model(in_comfy) -> Any:  # noqa: F811
    """The MODEL that tests share, on its ranks."""
    model = tp_model()
    model.sharded.load()
    return model


@pytest.fixture
def traffic(model, monkeypatch) -> Traffic:
    seen = Traffic()
    send, receive = wire.Channel.send, wire.Channel.receive

    def sending(channel: wire.Channel, kind: int, request: int, message: Any = None, **more: Any) -> None:
        if kind == wire.COMMAND:
            name = json.loads(bytes(message.raw))["name"]
            seen.commands.append((name, len(message.raw), message.payload_bytes))
        send(channel, kind, request, message, **more)

    def receiving(channel: wire.Channel, **more: Any) -> wire.Frame:
        frame = receive(channel, **more)
        if frame.kind == wire.REPLY:
            seen.answers.append(len(frame.raw) + frame.payload.numel())
        return frame

    # The reader of a group that runs already is in the middle of `receive`, and calls this one for the next frame.
    monkeypatch.setattr(wire.Channel, "send", sending)
    monkeypatch.setattr(wire.Channel, "receive", receiving)
    return seen


def with_references(number: int) -> list:
    """A conditioning with so many reference latents."""
    references = [latent(SIDE, SIDE, seed=seed)["samples"] for seed in range(number)]
    return conditioning(TEXT_TOKENS, **({"reference_latents": references} if number else {}))


def run(model: Any, cond: list) -> None:
    ksampler(model, cond, cond, latent(SIDE, SIDE), steps=CALLS)


@pytest.mark.parametrize("references", [0, 2])
def test_a_call_is_one_message_with_the_latent_alone_and_text_and_references_cross_once(
    references, model, traffic
):
    cond = with_references(references)
    run(model, cond)
    kept = traffic.named("keep")
    assert len(kept) == 1 + references
    assert sum(payload for _, payload in kept) >= 4 * 48 * TEXT_TOKENS + references * LATENT_BYTES
    calls = traffic.named("forward")
    # The patches of an earlier test are taken off by the first run.
    others = [name for name, _, _ in traffic.commands if name not in ("keep", "forward")]
    assert len(calls) == CALLS and others in ([], ["patch"])
    for header, payload in calls:
        assert LATENT_BYTES < payload <= LATENT_BYTES + 3 * wire.ALIGNMENT
        assert header < MOST_HEADER_BYTES
    assert all(size < LATENT_BYTES + MOST_HEADER_BYTES for size in traffic.answers[-CALLS:])

    # A run on the same conditioning sends nothing but its calls.
    traffic.commands.clear()
    run(model, cond)
    assert [name for name, _, _ in traffic.commands] == ["forward"] * CALLS


def python_calls(work: Callable[[], Any]) -> tuple[int, Any]:
    """How many Python functions `work` calls in this thread, but for what waits for an answer; and its result."""
    count = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_name not in WAITING

    sys.setprofile(called)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return count, result


# Called about every 50 ms until the answer is there.
WAITING = {
    *("slice", "tick", "next_frame", "wait", "_is_owned", "_release_save", "_acquire_restore"),
    *(
        "check",
        "_check_launcher",
        "get",
        "throw_exception_if_processing_interrupted",
        "__enter__",
        "__exit__",
    ),
}


@pytest.mark.parametrize("references", [0, 2])
def test_a_call_takes_few_steps_of_python(references, model):
    import comfy.patcher_extension as extension

    counts = []

    def counted(executor, *args, **kwargs):
        count, result = python_calls(lambda: executor(*args, **kwargs))
        counts.append(count)
        return result

    watched = model.clone()
    watched.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, counted)
    run(watched, with_references(references))
    assert len(counts) == CALLS
    print(f"{references} references: {counts} Python calls")
    # The first sends text and references.
    assert 50 < max(counts[1:]) < MOST_PYTHON_CALLS


def test_the_bench_of_the_overhead_gives_the_times_of_calls_with_and_without_references(capsys):
    assert cli.main(["bench", "overhead", "--calls", "3", "--side", "4", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures["ranks"] == 1 and figures["calls"] == 3
    for references in ("0", "2"):
        row = figures["references"][references]
        assert 0 < row["fastest_ms"] <= row["median_ms"]
        assert any(line.startswith(f"{references} ") and f"{row['median_ms']:.2f}" in line for line in table)
