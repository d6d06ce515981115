"""TP Status: what is on the ranks, as text."""

from __future__ import annotations

import os
from typing import Any

from comfy_api.latest import io, ui

from ...core.errors import RankError
from .. import groups
from ..sharded import ShardedModel, known_models
from .schema import make_schema


class TPStatus(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="TPStatus",
            display_name="TP Status",
            description="Shows the ranks, their devices and memory, and the models on them.",
            search_aliases=["ranks", "tensor parallel status", "vram per gpu"],
            inputs=[
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="Anything: the status is taken once it has arrived, for example after the sampler.",
                ),
            ],
            outputs=[io.String.Output(display_name="status", tooltip="The same text.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Never equal: the status is taken anew in every prompt."""
        return float("nan")

    @classmethod
    def execute(cls, after: Any = None) -> io.NodeOutput:
        text = status_text()
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def status_text() -> str:
    """The state of all groups and models, some lines of text."""
    models = known_models()
    lines = []
    for group in groups.running().values():
        lines.append(f"Ranks: {group.degree} on {', '.join(group.devices)}")
        try:
            status = group.status()
        except RankError as error:
            lines.append(f"  ended: {str(error).splitlines()[0]}")
            continue
        if status.get("failure"):
            lines.append(f"  ended: {status['failure'].splitlines()[0]}")
        for rank in status["ranks"]:
            lines.append("  " + _rank_line(rank))
        for note in status["notes"]:
            lines.append(f"  note: {note}")
        if status["log_dir"]:
            lines.append(f"  logs: {status['log_dir']}")
        for model in models:
            if model.loaded and model.remote is not None and model.remote.group is group:
                lines += _model_lines(model)
    for model in models:
        if not model.loaded:
            lines.append(f"Model: {os.path.basename(model.source.path)}, not loaded")
    return "\n".join(lines) if lines else "No ranks are running and no TP model is loaded."


def _rank_line(rank: dict[str, Any]) -> str:
    parts = [f"rank {rank.get('rank')} on {rank.get('device')}"]
    if rank.get("device_name"):
        parts[0] += f" ({rank['device_name']})"
    if rank.get("pid"):
        parts.append(f"pid {rank['pid']}")
    if rank.get("device_total_bytes"):
        parts.append(f"{_size(rank['device_bytes'])} of {_size(rank['device_total_bytes'])} device memory")
    if rank.get("rss_bytes"):
        parts.append(f"{_size(rank['rss_bytes'])} host memory")
    return ", ".join(parts)


def _model_lines(model: ShardedModel) -> list[str]:
    info = model.info
    if info is None:
        return []
    where = "parked in host memory" if model.parked else "loaded"
    sizes = ", ".join(_size(size) for size in info.resident_bytes)
    lines = [
        f"Model: {os.path.basename(model.source.path)} ({info.architecture}, {info.dtype}), {where}",
        f"  shards: {sizes} per rank, {info.parameters / 1e9:.3g} B parameters",
        f"  all-reduces per call: {info.all_reduces}",
        f"  load: {info.load_seconds:.1f} s, {sum(info.bytes_read) / 1e9:.3g} GB read, {info.gb_per_second:.2f} GB/s",
    ]
    seconds = model.remote.last_step_seconds if model.remote is not None else None
    lines.append(f"  last step: {seconds:.3f} s" if seconds is not None else "  last step: none yet")
    return lines + [f"  note: {note}" for note in info.notes]


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
