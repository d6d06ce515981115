"""``comfy-tp bench``: loading or the forward pass, measured against diffusers in one run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# One module per measurement, with the same two functions as a subcommand's.
MEASUREMENTS = {
    "load": "bench_load",
    "forward": "bench_forward",
    "lora": "bench_lora",
    "overhead": "bench_overhead",
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
    """Run the chosen measurement. SIGTERM, SIGINT and SIGHUP end it with its ranks and its files removed."""
    with unwound_by_signals():
        return args.run_measurement(args)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Inside, a signal that ends the process raises `SystemExit(128 + number)`, so that what is open gets closed.

    Further ones are ignored meanwhile. One that the process was started to ignore, and any in another thread than the
    main one, stay as they are.
    """
    before: dict[int, Any] = {}

    def end(number: int, _: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
