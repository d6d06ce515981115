"""``comfy-tp plan``: propose a tensor-parallel plan for a model class, or print a page that is computed from the plans."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from ..models import Architecture
    from ..planning.propose import Proposal

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
    """Print a proposal or a page. Nothing is downloaded and no weights are needed."""
    if args.table or args.files:
        return print_page("architectures" if args.table else "files")
    if not args.model:
        raise UnsupportedError(
            "Name a model class, for example `comfy-tp plan FluxTransformer2DModel`, or --table."
        )
    return propose_plan(args.model)


def print_page(name: str) -> tuple[int, dict]:
    """Print a page of docs/. What makes it lies beside the tests, in the source code alone."""
    tools = f"{__name__.split('.')[0]}.tools"
    try:
        text = importlib.import_module(f"{tools}.pages.{name}").page()
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(tools):
            raise
        raise UnsupportedError(
            f"docs/{name}.md is made by tools/pages/{name}.py, which is not installed. Run this in a clone of the "
            f"repository after `pip install -e .`; the page as it is made there lies in docs/."
        ) from None
    print(text, end="")
    return 0, {"table": text}


def propose_plan(name: str) -> tuple[int, dict]:
    """Print a proposal for the class that `name` means."""
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
