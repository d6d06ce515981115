"""A rank: joins the group, then executes commands in lockstep with the others until its lifetime pipe ends."""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .arena import Arena
from .commands import load_commands
from .config import GroupConfig
from .context import RankContext
from .failure import ENDS, describe, record
from .heartbeat import EXIT_PEER_LOST, HeartbeatFile, RankHeartbeat
from .lockstep import PeerLost
from .loop import CommandLoop
from .port import ClientPort
from .self_test import run_self_test

log = logging.getLogger("comfy_tp.rank")


def open_device(name: str, rank: int) -> torch.device:
    """The rank's device, made current. Raises ConfigError where this process has no such device."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
            raise ConfigError(
                f"rank {rank}: there is no device {name}: this process sees {count} CUDA devices{limit}. "
                "Choose devices that exist."
            )
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"rank {rank}: device {name}: ranks run on cuda or cpu devices")
    return device


def join_group(
    device: torch.device, backend: str, timeout: float, **rendezvous: Any
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup]:
    """Join the process groups: `(data group, control group)`; the control group is always gloo."""
    limit = timedelta(seconds=timeout)
    if backend == "nccl":
        rendezvous["device_id"] = device
    dist.init_process_group(backend, timeout=limit, **rendezvous)
    control = dist.new_group(backend="gloo", timeout=limit)
    return dist.group.WORLD, cast(dist.ProcessGroup, control)


def end_with_lifetime() -> None:
    """Watch the inherited pipe and the parent, in a thread; when either ends, so does this process, at once."""
    parent = os.getppid()

    def watch() -> None:
        while True:
            readable, _, _ = select.select([0], [], [], 1.0)
            if (readable and not os.read(0, 4096)) or os.getppid() != parent:
                os._exit(0)

    threading.Thread(target=watch, name="comfy_tp lifetime", daemon=True).start()


def unix_listener(path: Path) -> socket.socket:
    """A listening socket that appears at `path` only when it is ready."""
    unfinished = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(unfinished))
    os.chmod(unfinished, 0o600)
    listener.listen(8)
    os.rename(unfinished, path)
    return listener


def main(folder_name: str, rank: int) -> NoReturn:
    """Run a rank of a group on one machine, started by the launcher."""
    logging.basicConfig(
        force=True, format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(folder_name)
    end_with_lifetime()
    stacks = open(folder / f"stacks-{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        _serve(folder, rank)
    except BaseException as error:
        _end(folder, rank, error)


def _end(folder: Path, rank: int, error: BaseException) -> NoReturn:
    def write_down() -> None:
        traceback.print_exception(error)
        record(folder, rank, {**describe(error, rank, "its device"), ENDS: True})

    end_process(error, write_down)


def end_process(error: BaseException, tell: Callable[[], None]) -> NoReturn:
    """End this rank's process, whatever its other threads do. `tell` says what ended it, where nobody else can know."""
    code = 1
    if isinstance(error, PeerLost):
        log.error("the group is broken: %s", error)
        code = EXIT_PEER_LOST
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    else:
        tell()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(folder: Path, rank: int) -> NoReturn:
    config = GroupConfig.read((folder / "config.json").read_text())
    devices = config.devices
    degree = len(devices)
    token = ""
    if rank == 0:
        token = (folder / "token").read_text()
        (folder / "token").unlink()
    heartbeat = RankHeartbeat(HeartbeatFile(folder / "heartbeats", degree), rank, config.beat)
    heartbeat.start()
    heartbeat.progress("loading its commands")
    commands = load_commands(config.commands)
    device = open_device(devices[rank], rank)
    heartbeat.progress("joining the group")
    store = dist.FileStore(str(folder / f"store-{config.attempt}"), degree)
    data, control = join_group(
        device, config.backend, config.collective_timeout, store=store, rank=rank, world_size=degree
    )
    heartbeat.progress("testing the collectives")
    run_self_test(data, rank, degree, device, failed=lambda error: _end(folder, rank, error))
    context = RankContext(rank, degree, device, data, control, heartbeat)
    port = None
    if rank == 0:
        description = {"devices": devices, "backend": config.backend, "pid": os.getpid()}
        port = ClientPort(unix_listener(folder / "socket"), token, description)
    heartbeat.progress("ready")
    heartbeat.slowest = 0.0
    loop = CommandLoop(
        context,
        commands,
        port,
        config,
        note_failure=lambda error: record(folder, rank, error),
        arena=Arena(folder),
    )
    if port is not None:
        port.start(on_cancel=loop.cancel)
    loop.run()
