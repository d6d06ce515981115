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
    """Print the lines, one for every machine."""
    if args.nodes < 1 or args.per_node < 1:
        raise ConfigError(f"--nodes and --per-node must be at least 1, got {args.nodes} and {args.per_node}.")
    address = f"{args.host}:{args.port}"
    lines = [torchrun_line(args, address, number) for number in range(args.nodes)]
    degree = args.nodes * args.per_node
    print("Start one line on each machine, within a few minutes of each other.")
    print("Trusted network only: torchrun's store and the ranks' own connections ask for no password.")
    for number, line in enumerate(lines):
        print(f"\nOn {args.host if number == 0 else f'machine {number + 1}'}:\n\n  {line}")
    print(
        "\nWhere a machine has several networks, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of "
        "this one."
    )
    print(f"{args.host} makes the token file when there is none. Copy it to the machine that runs ComfyUI.")
    print(f"There, start ComfyUI with COMFY_TP_TOKEN_FILE={args.token_file} and set in Load TP Model:\n")
    print(f"  devices: tcp://{address}")
    print(f"  degree:  {degree} (or 0)")
    print(
        "\nEach machine keeps the logs of its ranks in ~/.cache/comfy-tp/logs (under XDG_CACHE_HOME where that is set)."
    )
    print("\nAll machines, that one too, hold the model files at the same path.")
    return 0, {
        "lines": lines,
        "devices": f"tcp://{address}",
        "degree": degree,
        "token_file": args.token_file,
    }


def torchrun_line(args: argparse.Namespace, address: str, number: int) -> str:
    """The command for machine `number`, 0 being the first; without an installed package it names the entry script.

    The static rendezvous puts rank 0, which listens for ComfyUI, on the first machine, and needs no host names.
    """
    words = [
        "torchrun",
        f"--nnodes={args.nodes}",
        f"--node-rank={number}",
        f"--nproc-per-node={args.per_node}",
        f"--master-addr={args.host}",
        f"--master-port={args.rendezvous_port}",
        # Otherwise torchrun makes a folder in /tmp and leaves it there; the ranks write logs of their own.
        "--log-dir=/dev/null",
    ]
    if sys.modules.get("comfy_tp") is not None:
        words += ["-m", "comfy_tp.core.ranks.machines.node"]
    else:
        words += [str(PACKAGE / "core" / "ranks" / "entry.py"), "comfy_tp node"]
    words += ["--listen", address, "--token-file", args.token_file, "--device", args.device]
    return shlex.join(words)
