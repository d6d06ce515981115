"""The status line's figures: to whom they go, how often, and what they say of a run."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfy_inprocess import in_comfy  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("in_comfy")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What reaches the page of the client "page"."""
    lines: list[dict[str, Any]] = []

    class Server:
        client_id = "page"

        def send_sync(self, event: str, data: dict[str, Any], sid: str | None = None) -> None:
            assert (event, sid) == ("comfy_tp.status", "page")
            lines.append(data)

    module = SimpleNamespace(PromptServer=SimpleNamespace(instance=Server()))
    monkeypatch.setitem(sys.modules, "server", module)
    return lines


@pytest.fixture
def line():
    """The line of a model that node 1 loaded onto two ranks, while node 9 runs."""
    from comfy_execution.utils import CurrentNodeContext

    from comfy_tp.comfy_tp_nodes.status_feed import StatusLine

    made = StatusLine(2)
    with CurrentNodeContext("prompt", "1"):
        made.shown_by_this_node()
    with CurrentNodeContext("prompt", "9"):
        yield made


def test_a_line_goes_to_the_node_that_runs_and_to_the_loader(sent, line):
    line.ready([10, 30])
    assert sent == [{"nodes": ["9", "1"], "phase": "ready", "ranks": 2, "bytes_per_rank": 30}]


def test_a_line_goes_to_the_loader_of_the_prompt_that_runs_whatever_its_id(sent, line):
    from comfy_execution.utils import CurrentNodeContext

    loader = {"class_type": "TPLoadModel", "inputs": {"model": "m", "degree": 2}}
    other = {"class_type": "TPLoadModel", "inputs": {"model": "m", "degree": 1}}
    first = (0, "one", {"3": loader, "4": {"class_type": "TPSampler", "inputs": {"model": ["3", 0]}}}, {}, [])
    # The same settings under another id, as in another workflow: ComfyUI takes the model from its cache.
    second = (1, "two", {"3": other, "7:8": loader, "9": {"class_type": "TPSampler", "inputs": {}}}, {}, [])
    running = [first]
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, []))
    sys.modules["server"].PromptServer.instance.prompt_queue = queue
    with CurrentNodeContext("one", "3"):
        line.shown_by_this_node()
    with CurrentNodeContext("one", "4"):
        line.ready([10, 30])
    running[:] = [second]
    with CurrentNodeContext("two", "9"):
        line.ready([10, 30])
    assert [entry["nodes"] for entry in sent] == [["4", "3"], ["9", "7:8"]]


def test_at_most_four_lines_a_second_are_sent_and_the_last_step_always(sent, line):
    from comfy_tp.comfy_tp_nodes.status_feed import INTERVAL_S

    assert INTERVAL_S >= 0.25
    line.begin(1000)
    started = time.perf_counter()
    for step in range(1, 1001):
        line.step(step, 1000, 0.001)
        time.sleep(0.0005)
    seconds = time.perf_counter() - started
    assert sent[-1]["step"] == 1000 and sent[-1]["seconds_left"] == 0
    assert len(sent) <= seconds / INTERVAL_S + 3
    assert sent[0]["step"] == 0


def test_the_time_left_is_foretold_from_the_steps_so_far(sent, line, monkeypatch):
    from comfy_tp.comfy_tp_nodes import status_feed

    now = iter([100.0, 110.0])
    monkeypatch.setattr(status_feed.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(status_feed, "INTERVAL_S", 0.0)
    line.begin(20)
    line.step(5, 20, 2.1)
    assert sent[-1] == {
        "nodes": ["9", "1"],
        "phase": "sampling",
        "ranks": 2,
        "bytes_per_rank": None,
        "step": 5,
        "steps": 20,
        "step_seconds": 2.1,
        "seconds": 10.0,
        "seconds_left": 30.0,
    }


def test_calls_of_a_stock_sampler_are_placed_on_its_sigmas(sent, line, monkeypatch):
    from comfy_tp.comfy_tp_nodes import status_feed

    monkeypatch.setattr(status_feed, "INTERVAL_S", 0.0)
    sigmas = torch.tensor([1.0, 0.7, 0.3, 0.0])
    # heun calls twice in a step, the second time at the next sigma; timesteps may be rounded to bfloat16.
    for sigma in (1.0, 0.7, 0.7, 0.3):
        given = torch.tensor([sigma]).bfloat16()
        line.called({"sample_sigmas": sigmas, "sigmas": given.float()}, 0.5)
    assert [(entry["step"], entry["steps"]) for entry in sent] == [(1, 3), (2, 3), (2, 3), (3, 3)]
    line.called({}, 0.5)
    assert len(sent) == 4


def test_nothing_is_sent_where_no_page_is_served(line, monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    line.starting()
    line.loading(1, 2, 3.0)
    line.gone()
