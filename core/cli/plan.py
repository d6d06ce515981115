"""``comfy-tp plan``: propose a tensor-parallel plan for a model class, or print the table of those that have one."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..models import Architecture
    from ..planning.propose import Proposal

TABLE_DEGREES = (2, 4, 8)
LISTED = 12  # replicated groups that are printed one by one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The class, --table or --files."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODELCLASS",
        help="a model class of diffusers, the name of an architecture, or module:Class for one of your own",
    )
    parser.add_argument("--table", action="store_true", help="print docs/architectures.md")
    parser.add_argument("--files", action="store_true", help="print docs/files.md")


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Print a proposal or the table. Nothing is downloaded and no weights are needed."""
    if args.table or args.files:
        from .file_kinds import page

        text = table() if args.table else page()
        print(text, end="")
        return 0, {"table": text}
    if not args.model:
        raise UnsupportedError(
            "Name a model class, for example `comfy-tp plan FluxTransformer2DModel`, or --table."
        )
    return _propose(args.model)


def _propose(name: str) -> tuple[int, dict]:
    from ..planning.propose import compare_plans, legal, meta_model, propose

    model_class, architecture = find(name)
    model = meta_model(model_class)
    config = getattr(model, "config", {})
    heads = architecture.heads(config) if architecture else _heads(model, config)
    proposal = propose(model, heads)
    degrees = legal(model, proposal.plan, heads)
    _print(proposal, heads, degrees)
    figures: dict[str, Any] = {
        "model_class": model_class.__name__,
        "heads": heads,
        "legal_degrees": degrees,
        "parameters": proposal.parameters,
        "replicated_parameters": proposal.replicated_parameters,
        "plan": {key: as_json(style) for key, style in proposal.plan.items()},
        "replicated": [asdict(part) for part in proposal.replicated],
    }
    if architecture is not None and architecture.plan is not None:
        differences = compare_plans(model, proposal.plan, architecture.plan)
        unexplained = [
            line for line in differences if not any(line.startswith(key) for key in architecture.differs)
        ]
        figures |= {"differences": differences, "unexplained": unexplained}
        print(f"\nOur plan of {architecture.name}: ", end="")
        print("the same" if not differences else f"{len(differences)} entries differ")
        for line in differences:
            why = next((why for key, why in architecture.differs.items() if line.startswith(key)), None)
            print(f"  {line}" + (f" ({why})" if why else ""))
    print("\nCheck a plan by numbers before using it: comfy-tp verify (docs/adding-a-model.md).")
    return 0, figures


def find(name: str) -> tuple[type, Architecture | None]:
    """The model class that `name` means, and our architecture of it where there is one."""
    import diffusers

    from ..models import ARCHITECTURES, architecture_named

    by_class = {class_name: known for known, class_name in ARCHITECTURES.items()}
    known = name if name in ARCHITECTURES else by_class.get(name)
    if known is not None:
        architecture = architecture_named(known)
        return architecture.load_class(), architecture
    module, colon, class_name = name.rpartition(":")
    try:
        owner = importlib.import_module(module) if colon else diffusers
    except ImportError as error:
        raise UnsupportedError(f"The module of {name} cannot be imported: {error}") from error
    found = getattr(owner, class_name, None)
    if not isinstance(found, type):
        raise UnsupportedError(
            f"diffusers {diffusers.__version__} has no model class '{name}'. For a class of your own write "
            f"module:Class; with a plan: {', '.join(sorted(by_class))}."
            if not colon
            else f"{module} has no class '{class_name}'."
        )
    return found, None


def _heads(model: Any, config: Any) -> int | None:
    for key in ("num_attention_heads", "num_heads", "n_heads", "heads"):
        if config and isinstance(config.get(key), int):
            return config[key]
    return next(
        (module.heads for module in model.modules() if isinstance(getattr(module, "heads", None), int)), None
    )


def _print(proposal: Proposal, heads: int | None, degrees: list[int]) -> None:
    share = 1 - proposal.replicated_parameters / max(1, proposal.parameters)
    print(
        f"{proposal.model_class}: {proposal.parameters / 1e9:.2f} billion parameters, {heads} attention heads"
    )
    print(f"The proposal shards {share:.1%} of them; degrees up to 16: {', '.join(map(str, degrees))}\n")
    print("PLAN = {")
    for key, style in proposal.plan.items():
        print(f"    {key!r}: {as_code(style)},  # {proposal.reasons[key]}")
    print("}\n")
    print("Replicated on every rank:")
    for part in proposal.replicated[:LISTED]:
        print(f"  {part.parameters / 1e6:9.2f} M  {part.key}: {part.why}")
    rest = proposal.replicated[LISTED:]
    if rest:
        print(f"  {sum(part.parameters for part in rest) / 1e6:9.2f} M  in {len(rest)} smaller ones")


def as_code(style: Any) -> str:
    """A plan value as Python source."""
    from ..tp.local import LocalAttributes
    from ..tp.plan import PackedColwiseParallel, PackedRowwiseParallel, WherePresent

    if isinstance(style, WherePresent):
        return f"WherePresent({as_code(style.style)})"
    if isinstance(style, (PackedColwiseParallel, PackedRowwiseParallel)):
        given = f"{style.blocks}" if style.blocks else f"sizes={style.sizes}" if style.sizes else ""
        return f"{type(style).__name__}({given})"
    if isinstance(style, LocalAttributes):
        return f"LocalAttributes({style.names})"
    return repr(style) if isinstance(style, str) else str(style)


def as_json(style: Any) -> Any:
    """A plan value as `comfy-tp verify --plan` reads it."""
    from ..tp.local import LocalAttributes
    from ..tp.plan import PackedColwiseParallel, PackedRowwiseParallel, WherePresent

    if isinstance(style, str):
        return style
    if isinstance(style, WherePresent):
        return ["WherePresent", as_json(style.style)]
    if isinstance(style, (PackedColwiseParallel, PackedRowwiseParallel)):
        blocks = list(style.blocks) if style.blocks else None
        return [type(style).__name__, blocks, list(style.sizes)]
    if isinstance(style, LocalAttributes):
        return [type(style).__name__, list(style.names)]
    return [type(style).__name__]


HEAD = """# Architectures

What can be sharded, and what a rank then holds. This page is printed by `comfy-tp plan --table`; do not edit it.

| model | class | diffusers | parameters | heads | degrees up to 16 | sharded | replicated | GB per rank, whole | {} |
|---|---|---|---|---|---|---|---|---|{}|
"""
FOOT = """
GB are 10^9 bytes of the transformer's weights in bf16, without activations, text encoders and VAE. "sharded" and
"replicated" are shares of the parameters; replicated ones are held by every rank. A degree must divide the attention
heads and every packed block; "-" marks a degree that does not.

Each architecture is one file in `core/models/`; [adding a model](adding-a-model.md) says how to write one.
"""


def table() -> str:
    """docs/architectures.md, computed from the plans on the meta device."""
    from ..models import ARCHITECTURES, architecture_named

    columns = " | ".join(f"at {degree}" for degree in TABLE_DEGREES)
    text = HEAD.format(columns, "---|" * len(TABLE_DEGREES)).replace("---||", "---|")
    for name in ARCHITECTURES:
        for row in rows(architecture_named(name)):
            text += f"| {' | '.join(row)} |\n"
    return text + FOOT


def rows(architecture: Architecture) -> Iterator[list[str]]:
    """One row for each published configuration."""
    from ..planning.compare import resolved_for
    from ..planning.propose import count, legal, meta_model

    for title, config in architecture.published.items():
        model = meta_model(architecture.load_class(config), config)
        heads = architecture.heads(model.config)
        plan = architecture.plan_of(model)
        degrees = legal(model, plan, heads)
        specs = resolved_for(model, architecture, 1).specs.values()
        total = count(model)
        sharded = sum(_elements(spec.shape) for spec in specs if not spec.is_replicated)
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


def _elements(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
