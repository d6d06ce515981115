"""One rank of a group over several machines, started by torchrun on each of them::

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=HOST0 --master-port=29400 \\
        -m comfy_tp.core.ranks.machines.node --listen HOST0:29500 --token-file ranks.token

(from a folder under custom_nodes: ``.../core/ranks/entry.py "comfy_tp node" --listen ...``). Rank 0 listens; the
loader node connects to it by address and token. The ranks and the commands are the same as on one machine.
torchrun's own store and the ranks' connections have no authentication: a trusted network only.

The ranks watch one another (`watch`); rank 0 tells the client what ends the group. When a rank ends, torchrun ends the
others of its machine.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import ConfigError, RankError
from .. import channel as wire
from ..commands import load_commands
from ..config import Limits
from ..context import RankContext
from ..failure import describe
from ..heartbeat import BUSY, EXIT_PEER_LOST, FAILED, RankHeartbeat
from ..lockstep import PeerLost
from ..logs import new_log_dir, open_log, rank_log
from ..loop import CommandLoop
from ..port import ClientPort
from ..rank import end_process, join_group, open_device
from ..self_test import run_self_test
from ..watchdog import Verdict
from .address import parse_address
from .secret import make_token, read_token
from .watch import GUARD_LATER, Guard, StoreHeartbeat

log = logging.getLogger("comfy_tp.node")

DEFAULT_COMMANDS = "comfy_tp.core.calls.commands:COMMANDS"
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
# Of the text that tells the client where the logs are: it stands in the welcome, whose length is bounded.
LOGS_LIMIT = 256
# How long the client may take to read why the group ends.
TELL_WAIT = 1.0


def parser() -> argparse.ArgumentParser:
    """The command line of a rank under torchrun."""
    made = argparse.ArgumentParser(
        prog="comfy_tp.core.ranks.machines.node", description=__doc__.split("\n")[0]
    )
    made.add_argument("--listen", required=True, metavar="HOST:PORT", help="where rank 0 awaits its client")
    made.add_argument(
        "--token-file", required=True, type=Path, help="the shared secret; rank 0 makes it if there is none"
    )
    made.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="kind of device of every rank"
    )
    made.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl on cuda, gloo on cpu")
    made.add_argument("--commands", default=DEFAULT_COMMANDS, help="module:NAME or file.py:NAME")
    made.add_argument("--step-timeout", type=float, default=120.0, metavar="S")
    made.add_argument("--heartbeat-timeout", type=float, default=60.0, metavar="S")
    made.add_argument("--error-grace", type=float, default=5.0, metavar="S")
    made.add_argument("--collective-timeout", type=float, default=1800.0, metavar="S")
    made.add_argument("--keepalive", type=float, default=30.0, metavar="S")
    return made


def tcp_listener(address: str) -> socket.socket:
    """A bound socket for ``host:port``; raises ConfigError where that cannot be."""
    try:
        host, port = parse_address(address)
    except ConfigError as error:
        raise ConfigError(f"--listen {error}") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None
    return listener


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run as a rank under torchrun."""
    logging.basicConfig(format=LOG_FORMAT, level=logging.INFO)
    options = parser().parse_args(arguments)
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        sys.exit("comfy_tp.core.ranks.machines.node runs under torchrun; see --help and the documentation")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    member = Member.here()
    try:
        _serve(options, member)
    except BaseException as error:
        _end(error, member.rank)


def _end(error: BaseException, rank: int) -> NoReturn:
    def log_it() -> None:
        if isinstance(error, (ConfigError, RankError)):
            log.error("%s", error)
        else:
            log.error("rank %d ended", rank, exc_info=error)

    end_process(error, log_it)


def log_to(folder: Path, rank: int) -> None:
    """Write what this rank logs, warnings too, into its file in `folder` beside where it goes already."""
    handler = logging.StreamHandler(open_log(folder / rank_log(rank)))
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)


@dataclass(frozen=True)
class Member:
    """This process among those of torchrun: its rank of how many, its machine, and its number there."""

    rank: int
    degree: int
    machine: str
    local_rank: int

    @classmethod
    def here(cls) -> Member:
        """As torchrun's environment says."""
        said = os.environ
        machine, local_rank = said.get("GROUP_RANK", "0"), int(said.get("LOCAL_RANK", "0"))
        return cls(int(said["RANK"]), int(said["WORLD_SIZE"]), machine, local_rank)

    def store(self) -> dist.Store:
        """A connection of its own to torchrun's store."""
        return next(dist.rendezvous("env://", self.rank, self.degree))[0]

    def logs(self, own: Path | None, store: dist.Store) -> Path:
        """The folder that the ranks of a machine share: the first of them has made it, and tells the others."""
        folders = dist.PrefixStore("comfy_tp/logs", store)
        if own is not None:
            folders.set(self.machine, str(own))
            return own
        folder = Path(folders.get(self.machine).decode())
        log_to(folder, self.rank)
        return folder


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits of the command line."""
    return Limits(
        step_timeout=options.step_timeout,
        heartbeat_timeout=options.heartbeat_timeout,
        error_grace=options.error_grace,
        collective_timeout=options.collective_timeout,
        keepalive=min(options.keepalive, options.collective_timeout / 2),
    )


def _serve(options: argparse.Namespace, member: Member) -> NoReturn:
    rank, limits = member.rank, limits_of(options)
    own_logs = None
    if member.local_rank == 0:
        own_logs = new_log_dir(running=True)
        log_to(own_logs, rank)
    heartbeat = RankHeartbeat(None, rank, 1.0)
    commands = load_commands(options.commands)
    device = open_device("cpu" if options.device == "cpu" else f"cuda:{member.local_rank}", rank)
    door = _door(options) if rank == 0 else None
    store, life_store = member.store(), member.store()
    logs = member.logs(own_logs, store)
    context = _join(options, member, device, heartbeat, store, logs)
    devices, all_logs = zip(*context.gather([context.name, context.logs]), strict=True)
    port = _port(door, options, context, devices) if door is not None else None
    heartbeat.slowest = 0.0
    signs = StoreHeartbeat(dist.PrefixStore("comfy_tp/life", life_store), heartbeat, rank, devices, limits)
    loop = CommandLoop(
        context, commands, port, limits, note_failure=lambda error: setattr(signs, "raised", error)
    )
    signs.start(functools.partial(_blame, loop, all_logs), Guard(limits.heartbeat_timeout + GUARD_LATER))
    # From here on torchrun's signal to end is one more thing that may end the group: a handler wakes the watch.
    signal.set_wakeup_fd(signs.bell.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if port is not None:
        port.start(on_cancel=loop.cancel)
        log.info("%d ranks await their client on %s", member.degree, options.listen)
    log.info("logs: %s", context.logs)
    _run(loop, signs)


def _door(options: argparse.Namespace) -> tuple[socket.socket, str]:
    """Where rank 0 awaits its client, and the secret that it asks for."""
    make_token(options.token_file)
    token = read_token(options.token_file)
    return tcp_listener(options.listen), token


def _backend(options: argparse.Namespace) -> str:
    return options.backend or ("nccl" if options.device == "cuda" else "gloo")


def _join(
    options: argparse.Namespace,
    member: Member,
    device: torch.device,
    heartbeat: RankHeartbeat,
    store: dist.Store,
    logs: Path,
) -> RankContext:
    """Join the other ranks, and see that the collectives work."""
    rank, degree = member.rank, member.degree
    data, control = join_group(
        device,
        _backend(options),
        options.collective_timeout,
        store=dist.PrefixStore("comfy_tp/group", store),
        rank=rank,
        world_size=degree,
    )
    run_self_test(data, rank, degree, device, failed=lambda error: _end(error, rank))
    host = socket.gethostname()
    where = f"{host}:{logs}"[:LOGS_LIMIT]
    return RankContext(rank, degree, device, data, control, heartbeat, name=f"{device}@{host}", logs=where)


def _port(
    door: tuple[socket.socket, str], options: argparse.Namespace, context: RankContext, devices: Sequence[str]
) -> ClientPort:
    description = {
        "devices": devices,
        "backend": _backend(options),
        "beat": min(wire.BEAT_PERIOD, options.heartbeat_timeout / 8),
        "heartbeat_timeout": options.heartbeat_timeout,
        "logs": context.logs,
    }
    return ClientPort(*door, description)


def _blame(loop: CommandLoop, logs: Sequence[str], verdict: Verdict) -> NoReturn:
    """Tell the client what ends the group, and end this rank."""
    error = _described(verdict, logs)
    log.error("%s", error["message"])
    teller = threading.Thread(target=loop.tell_client, args=(error,), daemon=True)
    teller.start()
    teller.join(TELL_WAIT)
    os._exit(EXIT_PEER_LOST)


def _run(loop: CommandLoop, signs: StoreHeartbeat) -> NoReturn:
    try:
        loop.run()
    except PeerLost as error:
        signs.lost_a_peer(str(error))
        raise
    except BaseException as error:
        log.error("rank %d ends", loop.context.rank, exc_info=error)
        signs.ended_by(loop.context.describe(error))
        raise


def _described(verdict: Verdict, logs: Sequence[str]) -> dict[str, Any]:
    """A verdict as the error that the client gets."""
    if verdict.error:
        return verdict.error
    rank = verdict.rank
    if rank is None:
        return describe(RankError(f"The ranks {verdict.cause}."), None, None, logs[0])
    during = f" during {verdict.doing!r}" if verdict.state in (BUSY, FAILED) else ""
    text = f"Rank {rank} ({verdict.device}) {verdict.cause}{during}.{verdict.guess}"
    return describe(RankError(text), rank, verdict.device, logs[rank])


if __name__ == "__main__":
    main()
