"""docs/architectures.md: every published model that has a plan, and what a rank then holds, computed from the plans."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...core.models import ARCHITECTURES, Architecture, architecture_named
from ...core.planning.compare import resolved_for
from ...core.planning.propose import count, legal, meta_model

TABLE_DEGREES = (2, 4, 8)
HEAD = """# Architectures

What can be sharded, and what a rank then holds. This page is printed by
`comfy-tp plan --table`; do not edit it.

| model | class | diffusers | parameters | heads | degrees up to 16 | sharded | replicated | GB per rank, whole | {} |
|---|---|---|---|---|---|---|---|---|{}|
"""
FOOT = """
GB are 10^9 bytes of the transformer's weights in bf16, without activations, text encoders and VAE. "sharded" and
"replicated" are shares of the parameters; replicated ones are held by every rank. A degree must divide the attention
heads and every packed block; "-" marks a degree that does not.

Each architecture is one file in `core/models/`; [adding a model](adding-a-model.md) says how to write one.
"""


def page() -> str:
    """docs/architectures.md, computed from the plans on the meta device."""

    columns = " | ".join(f"at {degree}" for degree in TABLE_DEGREES)
    text = HEAD.format(columns, "---|" * len(TABLE_DEGREES)).replace("---||", "---|")
    for name in ARCHITECTURES:
        for row in rows(architecture_named(name)):
            text += f"| {' | '.join(row)} |\n"
    return text + FOOT


def rows(architecture: Architecture) -> Iterator[list[str]]:
    """One row for each published configuration."""

    for title, config in architecture.published.items():
        model = meta_model(architecture.load_class(config), config)
        heads = architecture.heads(model.config)
        plan = architecture.plan_of(model)
        degrees = legal(model, plan, heads)
        specs = resolved_for(model, architecture, 1).specs.values()
        total = count(model)
        sharded = sum(math.prod(spec.shape) for spec in specs if not spec.is_replicated)
        kept = total - sharded
        held = [
            f"{2 * (kept + sharded / degree) / 1e9:.2f}" if degree in degrees else "-"
            for degree in TABLE_DEGREES
        ]
        yield [
            title,
            f"`{architecture.model_class}`",
            f"{architecture.minimum_diffusers} or newer",
            f"{total / 1e9:.2f} B",
            str(heads),
            ", ".join(map(str, degrees)),
            f"{sharded / total:.1%}",
            f"{kept / total:.1%}",
            f"{2 * total / 1e9:.2f}",
            *held,
        ]
