"""One rank of a group over several machines, started by torchrun on each of them::

    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=HOST0 --master-port=29400 \\
        -m comfy_tp.core.group.node --listen HOST0:29500 --token-file ranks.token

(from a folder under custom_nodes: ``.../core/group/launch.py "comfy_tp node" --listen ...``). Rank 0 listens; the
loader node connects to it by address and token. The ranks and the commands are the same as on one machine.
torchrun's own store and the ranks' connections have no authentication: a trusted network only.

The ranks' signs of life travel through torchrun's store; rank 0 judges them and tells the client. When any rank
ends, torchrun ends the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import ConfigError, RankError
from . import channel as wire
from . import pulse as life
from .address import parse_address
from .failure import describe
from .judge import Judge
from .port import ClientPort
from .pulse import PulseFile, RankPulse
from .rank import CommandLoop, PeerLost, RankContext, join_group, load_commands, open_device, run_self_test
from .secret import make_token, read_token

log = logging.getLogger("comfy_tp.node")

DEFAULT_COMMANDS = "comfy_tp.core.group.commands:COMMANDS"


def parser() -> argparse.ArgumentParser:
    """The command line of a rank under torchrun."""
    made = argparse.ArgumentParser(prog="comfy_tp.core.group.node", description=__doc__.split("\n")[0])
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


def main_place() -> str:
    """`file:line in function` of this process's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


class StorePulse:
    """Carries the ranks' signs of life through the rendezvous store, in a thread of every rank.

    Ages travel, not times, since machines have different clocks. Rank 0 mirrors them in a pulse file of its own
    memory, and calls `blame` once with the judge's verdict. On every rank, whatever keeps the thread from going on
    is a verdict too: a group that nobody watches ends.
    """

    def __init__(self, store: dist.Store, pulse: RankPulse, rank: int, devices: Sequence[str], limits: Any):
        self._store = store
        self._pulse = pulse
        self._rank = rank
        self._mirror = PulseFile(None, len(devices))
        self._judge = Judge(
            self._mirror,
            devices,
            step_timeout=limits.step_timeout,
            heartbeat_timeout=limits.heartbeat_timeout,
            error_grace=limits.error_grace,
            places=lambda: [self._places.get(each, "") for each in range(len(devices))],
        )
        self._places: dict[int, str] = {}
        self._period = max(0.1, min(2.0, limits.heartbeat_timeout / 8, limits.step_timeout / 8))
        self._beats: dict[int, int] = {}
        self.raised: dict[str, Any] | None = None

    def start(self, blame: Any) -> None:
        threading.Thread(target=self._run, args=(blame,), name="comfy_tp pulse", daemon=True).start()

    def _run(self, blame: Any) -> None:
        try:
            verdict = self._watch()
        except Exception as error:
            gone = isinstance(error, RuntimeError)
            why = f"torchrun's store is gone ({error})" if gone else f"{type(error).__name__}: {error}"
            log.error("the signs of life end", exc_info=None if gone else error)
            verdict = {**self._judge.about(self._rank), "cause": f"cannot watch the ranks any more: {why}"}
        blame(verdict)

    def _watch(self) -> dict[str, Any]:
        beat = 0
        while True:
            beat += 1
            self._write(beat)
            verdict = self._read() if self._rank == 0 else None
            if verdict is not None:
                return verdict
            time.sleep(self._period)

    def _write(self, beat: int) -> None:
        pulse = self._pulse
        said = {
            "beat": beat,
            "command": pulse.command,
            "step": pulse.steps,
            "age": time.monotonic() - pulse.progress_at,
            "state": pulse.state,
            "slowest": pulse.slowest,
            "note": pulse.note,
            "place": main_place() if pulse.state == life.BUSY else "",
            "raised": self.raised if pulse.state == life.FAILED else None,
        }
        self._store.set(f"pulse/{self._rank}", json.dumps(said))

    def _read(self) -> dict[str, Any] | None:
        now = time.monotonic()
        raised = {}
        for rank in range(self._mirror.degree):
            if not self._store.check([f"pulse/{rank}"]):
                continue
            said = json.loads(self._store.get(f"pulse/{rank}"))
            slot = rank + 1
            raised[rank] = said["raised"]
            self._places[rank] = said["place"]
            if said["beat"] != self._beats.get(rank):
                self._beats[rank] = said["beat"]
                self._mirror.put(slot, life.HEARTBEAT, now)
                self._mirror.put(slot, life.PROGRESS, now - said["age"])
            self._mirror.put(slot, life.COMMAND, said["command"])
            self._mirror.put(slot, life.STEP, said["step"])
            self._mirror.put(slot, life.STATE, said["state"])
            self._mirror.put(slot, life.SLOWEST, said["slowest"])
            self._mirror.set_note(slot, said["note"])
        verdict = self._judge.verdict()
        if verdict is not None and verdict.get("raised"):
            verdict["error"] = raised.get(verdict["rank"])
        return verdict


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run as a rank under torchrun."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    options = parser().parse_args(arguments)
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        sys.exit("comfy_tp.core.group.node runs under torchrun; see --help and the documentation")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    try:
        _serve(options, rank)
    except BaseException as error:
        _end(error, rank)


def _end(error: BaseException, rank: int) -> NoReturn:
    """End this process, whatever its other threads do, with what ended the rank in its log."""
    code = 1
    if isinstance(error, PeerLost):
        log.error("the group is broken: %s", error)
        code = life.EXIT_PEER_LOST
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    elif isinstance(error, (ConfigError, RankError)):
        log.error("%s", error)
    else:
        log.error("rank %d ended", rank, exc_info=error)
    sys.stderr.flush()
    os._exit(code)


def _serve(options: argparse.Namespace, rank: int) -> NoReturn:
    degree = int(os.environ["WORLD_SIZE"])
    pulse = RankPulse(None, rank, 1.0)
    commands = load_commands(options.commands)
    name = "cpu" if options.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = open_device(name, rank)
    backend = options.backend or ("nccl" if options.device == "cuda" else "gloo")
    listener = None
    if rank == 0:
        make_token(options.token_file)
        token = read_token(options.token_file)
        listener = tcp_listener(options.listen)
    store, _, _ = next(dist.rendezvous("env://", rank, degree))
    life_store, _, _ = next(dist.rendezvous("env://", rank, degree))
    data, control = join_group(
        device,
        backend,
        options.collective_timeout,
        store=dist.PrefixStore("comfy_tp/group", store),
        rank=rank,
        world_size=degree,
    )
    run_self_test(data, rank, degree, device, failed=lambda error: _end(error, rank))
    context = RankContext(rank, degree, device, data, control, pulse)
    devices = context.gather(f"{name}@{socket.gethostname()}")
    port = None
    if listener is not None:
        port = ClientPort(listener, token, {"devices": devices, "backend": backend, "beat": wire.BEAT_PERIOD})
    pulse.slowest = 0.0
    signs = StorePulse(dist.PrefixStore("comfy_tp/life", life_store), pulse, rank, devices, options)
    loop = CommandLoop(
        context,
        commands,
        port,
        keepalive=min(options.keepalive, options.collective_timeout / 2),
        error_grace=options.error_grace,
        on_raised=lambda error: setattr(signs, "raised", error),
    )

    def blame(verdict: dict[str, Any]) -> None:
        log.error("rank %s (%s) %s", verdict["rank"], verdict["device"], verdict["cause"])
        try:
            loop.tell_client(_described(verdict))
        finally:
            os._exit(life.EXIT_PEER_LOST)

    signs.start(blame)
    if port is not None:
        port.start(on_cancel=loop.cancel)
        log.info("%d ranks await their client on %s", degree, options.listen)
    try:
        loop.run()
    except PeerLost as error:
        # Its own cause is known elsewhere; what this rank knows is better than a closed connection.
        lost = RankError(f"Rank {rank} ({devices[rank]}) lost its connection to the other ranks: {error}")
        loop.tell_client(describe(lost, rank, devices[rank]))
        raise


def _described(verdict: dict[str, Any]) -> dict[str, Any]:
    if verdict.get("error"):
        return verdict["error"]
    text = f"Rank {verdict['rank']} ({verdict['device']}) {verdict['cause']} during {verdict['doing']!r}."
    return describe(RankError(text), verdict["rank"], verdict["device"])


if __name__ == "__main__":
    main()
