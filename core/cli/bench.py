"""``comfy-tp bench``: loading or the forward pass, measured against diffusers in one run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util

# One module per measurement, with the same two functions as a subcommand's.
MEASUREMENTS = {
    "load": "bench_load",
    "rowwise": "bench_rowwise",
    "forward": "bench_forward",
    "lora": "bench_lora",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The measurements that this build has, each with its own options."""
    measurements = parser.add_subparsers(dest="measurement", metavar="MEASUREMENT", required=True)
    for name, module_name in MEASUREMENTS.items():
        if importlib.util.find_spec(f"{__package__}.{module_name}") is None:
            continue
        module = importlib.import_module(f".{module_name}", __package__)
        summary = (module.__doc__ or name).splitlines()[0]
        measurement = measurements.add_parser(name, help=summary, description=summary)
        # Also understood here; the default must not undo a --json that came before the measurement's name.
        measurement.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        module.add_arguments(measurement)
        measurement.set_defaults(run_measurement=module.run)


def run(args: argparse.Namespace) -> tuple[int, dict]:
    """Run the chosen measurement."""
    return args.run_measurement(args)
