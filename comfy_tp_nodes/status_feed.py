"""The status line of a model on the ranks: what its nodes show in the browser while it is loaded and sampled.

ComfyUI's server sends the figures to the page of the client whose prompt runs, and ``web/status_line.js`` writes them
into the nodes. Only what is known here is sent: nobody asks the ranks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import seams

EVENT = "comfy_tp.status"
INTERVAL_S = 0.25  # at most four messages a second and model


def executing_context() -> Any:
    """ComfyUI's own record of the node that runs in this thread; None outside of a prompt."""
    if not seams.fits(seams.STATUS_LINE):
        return None
    from comfy_execution.utils import get_executing_context

    return get_executing_context()


def executing_node() -> str | None:
    """The id of the node that ComfyUI runs in this thread; None outside of a prompt."""
    context = executing_context()
    return context.node_id if context is not None else None


class StatusLine:
    """The line of one model. The node that handed the model on, the `loader`, shows it too.

    Of a loader with the same inputs in another workflow ComfyUI takes the model from its cache, and runs no node. So the
    loader is known by its class and inputs (`made_by`), and by its id where no prompt can be looked at.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.loader: str | None = None
        self.made_by: tuple[Any, Any] | None = None
        self._sent_at = 0.0
        self._bytes_per_rank: int | None = None
        self._sigmas: torch.Tensor | None = None
        self._begun = 0.0
        self._lock = threading.Lock()

    def shown_by_this_node(self) -> None:
        """The node that runs now is the model's loader."""
        node = executing_node()
        if node is not None:
            self.loader, self.made_by = node, running_nodes().get(node)

    def shown_by_no_loader(self) -> None:
        """No node hands the model on any more; under its loader's id another workflow may have one of another model."""
        self.loader = self.made_by = None

    def starting(self) -> None:
        """The ranks are being started."""
        self._tell("starting", last=True)

    def loading(self, done: int, total: int, gb_per_second: float) -> None:
        """`done` of `total` bytes are read."""
        self._tell("loading", done=done, total=total, gb_per_second=gb_per_second)

    def ready(self, resident_bytes: Sequence[int] | None = None) -> None:
        """The model is on its ranks and at rest; `resident_bytes` per rank."""
        if resident_bytes is not None:
            self._bytes_per_rank = max(resident_bytes, default=0)
        self._tell("ready", last=True)

    def gone(self) -> None:
        """The shards were freed."""
        self._bytes_per_rank = None
        self._tell("gone", last=True)

    def begin(self, steps: int) -> None:
        """A denoising loop of `steps` steps starts on the ranks."""
        self._begun = time.perf_counter()
        self._sigmas = None
        self._tell("sampling", last=True, step=0, steps=steps)

    def step(self, done: int, steps: int, step_seconds: float | None) -> None:
        """`done` of `steps` steps of the loop are through; the last one took `step_seconds`."""
        elapsed = time.perf_counter() - self._begun
        self._tell(
            "sampling",
            last=done == steps,
            step=done,
            steps=steps,
            step_seconds=step_seconds,
            seconds=elapsed,
            seconds_left=elapsed / max(done, 1) * (steps - done),
        )

    def called(self, options: Mapping[str, Any], seconds: float | None) -> None:
        """ComfyUI's own loop has called the model once, which took `seconds`. `options`: its transformer_options."""
        sigmas, now = options.get("sample_sigmas"), options.get("sigmas")
        if sigmas is None or now is None or len(sigmas) < 2:
            return
        if self._sigmas is None or self._sigmas is not sigmas:
            self._sigmas = sigmas
            self._begun = time.perf_counter() - (seconds or 0.0)
        # The step that this call belongs to: that of the nearest level of the schedule.
        levels = sigmas[:-1].detach().float().cpu()
        done = int((levels - float(now.flatten()[0])).abs().argmin())
        steps = len(levels)
        elapsed = time.perf_counter() - self._begun
        left = elapsed / (done + 1) * (steps - done - 1)
        self._tell(
            "sampling",
            last=done + 1 == steps,
            step=done + 1,
            steps=steps,
            step_seconds=elapsed / (done + 1),
            seconds=elapsed,
            seconds_left=left,
        )

    def _tell(self, phase: str, *, last: bool = False, **figures: Any) -> None:
        """Send the line; all but what must not be missed only once in `INTERVAL_S`."""
        now = time.monotonic()
        with self._lock:
            if not last and now - self._sent_at < INTERVAL_S:
                return
            self._sent_at = now
        nodes = [node for node in dict.fromkeys((executing_node(), *self._loaders())) if node is not None]
        if nodes:
            line = {
                "nodes": nodes,
                "phase": phase,
                "ranks": self.ranks,
                "bytes_per_rank": self._bytes_per_rank,
            }
            send({**line, **figures})

    def _loaders(self) -> list[str | None]:
        """The ids of the loader in the prompt that runs, as often as it is in there."""
        nodes = running_nodes()
        if self.made_by is None or not nodes:
            return [self.loader]
        return [node for node, made_by in nodes.items() if made_by == self.made_by]


def running_prompts() -> dict[str, Mapping[str, Any]]:
    """The prompts that ComfyUI's server runs, by id; none where no server is."""
    queue = getattr(server_of_pages(), "prompt_queue", None)
    running = getattr(queue, "get_current_queue_volatile", None)
    return {} if running is None else {str(entry[1]): entry[2] for entry in running()[0]}


def running_nodes() -> dict[str, tuple[Any, Any]]:
    """Class and inputs, by id, of the nodes of the prompt that ComfyUI runs in this thread; none where no server is."""
    context = executing_context()
    prompt = {} if context is None else running_prompts().get(context.prompt_id, {})
    return {str(id): (node.get("class_type"), node.get("inputs")) for id, node in prompt.items()}


def send(line: Mapping[str, Any]) -> None:
    """Hand `line` to ComfyUI's server, for the client whose prompt runs."""
    server = server_of_pages()
    if server is not None:
        server.send_sync(EVENT, dict(line), server.client_id)


def server_of_pages() -> Any:
    """ComfyUI's server, which is loaded wherever it serves a page; tests and scripts run its nodes without it."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
