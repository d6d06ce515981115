"""``comfy-tp ranks``: the exact lines that start one group of ranks over several machines, and how to connect to it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``comfy-tp ranks``."""
    parser.add_argument("--host", required=True, help="address of the first machine, as the others reach it")
    parser.add_argument("--nodes", type=int, default=2, help="how many machines (default 2)")
    parser.add_argument("--per-node", type=int, default=1, help="ranks on each, one per GPU (default 1)")
    parser.add_argument(
        "--rendezvous-port", type=int, default=29400, help="port of torchrun's store (default 29400)"
    )
    parser.add_argument(
        "--port", type=int, default=29500, help="port that ComfyUI connects to (default 29500)"
    )
    parser.add_argument(
        "--token-file", default="ranks.token", help="file of the shared secret (default ranks.token)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="kind of device (default cuda)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print the lines."""
    if args.nodes < 1 or args.per_node < 1:
        raise ConfigError(f"--nodes and --per-node must be at least 1, got {args.nodes} and {args.per_node}.")
    address = f"{args.host}:{args.port}"
    line = torchrun_line(args, address)
    degree = args.nodes * args.per_node
    print(
        f"On each of the {args.nodes} machines (trusted network only: torchrun's store asks for no password):\n"
    )
    print(f"  {line}\n")
    print(
        "The first machine makes the token file when there is none; copy it to the machine that runs ComfyUI."
    )
    print(f"There, start ComfyUI with COMFY_TP_TOKEN_FILE={args.token_file} and set in Load TP Model:\n")
    print(f"  devices: tcp://{address}")
    print(f"  degree:  {degree} (or 0)")
    return 0, {"line": line, "devices": f"tcp://{address}", "degree": degree, "token_file": args.token_file}


def torchrun_line(args: argparse.Namespace, address: str) -> str:
    """The command for every machine; from a folder that is not installed it names the entry script."""
    words = [
        "torchrun",
        f"--nnodes={args.nodes}",
        f"--nproc-per-node={args.per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={args.host}:{args.rendezvous_port}",
    ]
    if sys.modules.get("comfy_tp") is not None:
        words += ["-m", "comfy_tp.core.group.node"]
    else:
        words += [str(PACKAGE / "core" / "group" / "launch.py"), "comfy_tp node"]
    words += ["--listen", address, "--token-file", args.token_file, "--device", args.device]
    return shlex.join(words)
