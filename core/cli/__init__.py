"""``comfy-tp``: the command line. One module per subcommand, imported only when that subcommand runs.

A subcommand's module has two functions::

    def add_arguments(parser: argparse.ArgumentParser) -> None
    def run(args: argparse.Namespace) -> tuple[int, dict]

``run`` prints what a person wants to read and returns the exit status with a dictionary of figures. With
``--json`` the dictionary is the last line of standard output, as one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence

SUBCOMMANDS = {
    "demo": "boot a ComfyUI, render with a small FLUX.2 over several ranks, show the picture",
    "generate": "render one image from a model folder, without ComfyUI",
    "verify": "compare a sharded model with the unsharded one, block by block",
    "plan": "propose a tensor-parallel plan for a model class",
    "bench": "measure loading or the forward pass against diffusers",
    "ranks": "print the lines that start a group over several machines",
    "comfyui": "fetch releases of ComfyUI for the demo and the tests, or list them",
    "doctor": "measure this machine and predict load and step times",
}
# Those that run a ComfyUI lie beside the core, which knows nothing of it.
BESIDE = {"demo": "comfyui.demo", "comfyui": "comfyui"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    0: done. 1: refused or failed, with one line on standard error that says why. 2: wrong usage.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    module = _load(name) if name in SUBCOMMANDS else None
    args = _parser(name, module).parse_args(argv)
    if module is None:
        print(f"comfy-tp: {name} is not available in this build", file=sys.stderr)
        return 1

    from ..errors import TPError

    try:
        status, figures = module.run(args)
    except TPError as error:
        print(f"comfy-tp {name}: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        return 1
    if args.json:
        print(json.dumps(figures), flush=True)
    return status


def _load(name: str):
    """The subcommand's module, or None where this build does not have it."""
    full_name = f"{__name__.split('.')[0]}.{BESIDE[name]}" if name in BESIDE else f"{__name__}.{name}"
    if importlib.util.find_spec(full_name) is None:
        return None
    return importlib.import_module(full_name)


def _parser(name: str | None, module) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="comfy-tp", description="Tensor parallelism for diffusion transformers."
    )
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for subcommand, summary in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            subcommand, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        subparser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        if subcommand == name and module is not None:
            module.add_arguments(subparser)
    return parser
