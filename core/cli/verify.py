"""``comfy-tp verify``: a sharded model against its unsharded self, block by block, on ranks that it starts itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .arguments import count

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and how to run it."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a diffusers model folder, a pipeline folder with transformer/, a .safetensors file, or the name of an "
        "architecture, whose small example models are checked then",
    )
    parser.add_argument("--tp", type=count, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument(
        "--devices", metavar="LIST", help="comma-separated, one per rank; default: cpu for every rank"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl on cuda, gloo on cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs, and of an example's weights")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="relative L2 error that still passes; default: by dtype, from rounding",
    )
    parser.add_argument(
        "--reference-device", default="cpu", help="where rank 0 runs the whole model (default: cpu)"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="another plan for an architecture's examples, as JSON"
    )


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Start the ranks, compare, print one line per block. Status 1 when anything is above the tolerance."""
    import torch

    from ..planning.compare import TOLERANCE
    from ..ranks.client import RankGroup

    devices = args.devices.split(",") if args.devices else ["cpu"] * args.tp
    if len(devices) != args.tp:
        raise ConfigError(f"--tp {args.tp} needs {args.tp} devices, but --devices names {len(devices)}.")
    tolerance = args.tolerance if args.tolerance is not None else TOLERANCE[getattr(torch, args.dtype)]
    common = {"dtype": args.dtype, "seed": args.seed, "tolerance": tolerance}
    plan = _read_plan(args.plan) if args.plan else None
    calls = [call for model in args.models for call in _calls(model, plan, args.reference_device, common)]
    results = []
    with RankGroup.start(devices, backend=args.backend) as group:
        for title, call in calls:
            comparison = call.ask(group)
            results.append({"model": title, **comparison})
            _print(title, comparison, args.tp)
    passed = all(result["passed"] for result in results)
    return (0 if passed else 1), {"passed": passed, "results": results}


def _calls(
    model: str, plan: dict[str, Any] | None, reference_device: str, common: dict[str, Any]
) -> list[tuple[str, Any]]:
    """What the ranks are asked for one MODEL, with titles."""
    from ..calls.verify import VerifyCheckpoint, VerifyExample
    from ..models import ARCHITECTURES, architecture_named

    if model in ARCHITECTURES:
        architecture = architecture_named(model)
        architecture.load_class()
        examples = architecture.supported(architecture.examples)
        for example in architecture.examples.keys() - examples.keys():
            print(f"{model} ({example}) needs a newer diffusers and is left out.")
        return [
            (f"{model} ({example})", VerifyExample(model, example, plan, **common)) for example in examples
        ]
    if plan is not None:
        raise ConfigError("--plan is for the small examples of an architecture; give its name as MODEL.")
    return [(model, VerifyCheckpoint(_source(model), reference_device, **common))]


def _source(model: str) -> str:
    """Where the model lies: of a pipeline folder its transformer."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file() and (path / "transformer").is_dir():
        return str(path / "transformer")
    return model


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The plan {path} cannot be read: {error}") from error
    if not isinstance(plan, dict):
        raise ConfigError(f"The plan {path} must be a JSON object that maps module names to styles.")
    return plan


def _print(title: str, comparison: dict[str, Any], degree: int) -> None:
    print(f"{title}, {degree} ranks")
    width = max([len(row["name"]) for row in comparison["rows"]] + [6])
    for row in comparison["rows"]:
        mark = "" if row["rel_l2"] <= comparison["tolerance"] else "  <- above the tolerance"
        print(f"  {row['name']:<{width}}  rel-L2 {row['rel_l2']:.2e}  max {row['max_abs']:.2e}{mark}")
    print(f"  all-reduces: {comparison['collectives']}, the plan predicts {comparison['predicted']}")
    if comparison["failure"]:
        print(f"  FAILED in {comparison['failed_in'] or 'the model'}: {comparison['failure']}")
    elif comparison["first_wrong"]:
        print(f"  FAILED: the first block that differs is {comparison['first_wrong']}")
    elif comparison["passed"]:
        print(f"  passed: within {comparison['tolerance']:.0e}, the same on every rank")
    else:
        print(f"  FAILED: the ranks' outputs are {comparison['rank_spread']:.2e} apart")
