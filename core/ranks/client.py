"""The client's side of a rank group: start it, send commands, watch it, end it.

    group = RankGroup.start(["cpu", "cpu"])
    reply = group.request("ping")
    group.close()

One request runs at a time; a second thread waits its turn. Events and `poll` run in the thread that called
`request`, so that what they raise (a pressed Cancel) leaves `request` and cancels the command. After any failure of
the processes the group is dead as a whole: `alive` is False, everything is cleaned up, and `request` raises at once.
"""

from __future__ import annotations

import collections
import copy
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import ConfigError, RankError
from . import channel as wire
from . import heartbeat as life
from .address import parse_address
from .channel import Channel, ChannelClosed, ChannelError, Frame
from .failure import rebuild
from .heartbeat import PulseFile
from .logs import LAUNCHER_LOG, make_log_dir, new_log_dir, open_log, rank_log, tail
from .process import exit_cause, python

log = logging.getLogger("comfy_tp.group")

POLL = 0.05
WATCH = 0.5  # how often somebody looks after a command that nobody waits for
SENT_AT_ONCE = 1 << 16  # bytes that the system takes at once, whether rank 0 reads or not
CAUSE_WAIT = 4.0
END_WAIT = 5.0
NODE_TIMEOUT = 10.0

Event = Callable[[dict, list[torch.Tensor]], None]


@dataclass
class Reply:
    """What a command returned on rank 0."""

    header: dict[str, Any]
    tensors: list[torch.Tensor] = field(default_factory=list)


def check_devices(devices: Sequence[str], backend: str | None) -> tuple[list[str], str]:
    """Device names with their indices, and the backend of the model's collectives.

    Raises ConfigError for an unusable name, a mixture of kinds, or a device used twice with nccl.
    """
    if isinstance(devices, str) or not devices:
        raise ConfigError(
            f"devices must be a list with one name per rank, like ['cuda:0', 'cuda:1'], not {devices!r}"
        )
    names = []
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise ConfigError(f"{name!r} is no device; ranks run on devices like 'cuda:0' or 'cpu'") from None
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(f"device {name!r}: ranks run on cuda or cpu devices, not on {device.type}")
        names.append("cpu" if device.type == "cpu" else f"cuda:{device.index or 0}")
    kinds = {name.split(":")[0] for name in names}
    if len(kinds) > 1:
        raise ConfigError(f"the devices {', '.join(names)} are of different kinds; take all cuda or all cpu")
    cuda = kinds == {"cuda"}
    backend = backend or ("nccl" if cuda else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"backend {backend!r} is neither 'nccl' nor 'gloo'")
    if backend == "nccl" and not cuda:
        raise ConfigError("backend 'nccl' needs cuda devices; choose 'gloo' for the CPU")
    if backend == "nccl" and len(set(names)) < len(names):
        raise ConfigError(
            f"the devices {', '.join(names)} name one twice, which nccl cannot do; "
            "choose different devices, or backend 'gloo'"
        )
    return names, backend


class RankGroup:
    """A resident group of ranks. Made by `start` or `connect`; ended by `close`, by the end of this process, or
    when the object is dropped."""

    def __init__(self, line: _Line):
        self._line = line
        self._turn = threading.Lock()
        self._asking: int | None = None  # the thread whose turn it is
        self._finalizer = weakref.finalize(self, _Line.close, line)

    @classmethod
    def start(
        cls,
        devices: Sequence[str],
        *,
        backend: str | None = None,
        commands: str = "comfy_tp.core.calls.commands:COMMANDS",
        start_timeout: float = 180.0,
        step_timeout: float = 120.0,
        heartbeat_timeout: float | None = None,
        error_grace: float = 5.0,
        collective_timeout: float = 1800.0,
        keepalive: float = 30.0,
        fork: bool | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        poll: Callable[[], None] | None = None,
    ) -> RankGroup:
        """Start one rank per device on this machine and wait until the group answers.

        devices: one name per rank, indices within `CUDA_VISIBLE_DEVICES`. backend: of the model's collectives,
        nccl on cuda and gloo on cpu unless given; gloo also runs two ranks on one GPU. commands: the table the
        ranks execute, ``module:NAME`` or ``path/to/file.py:NAME``.
        Times in seconds. step_timeout: how long all ranks may make no progress in a command, beyond the slowest
        step seen. heartbeat_timeout: how long one rank may show no sign of life (default: step_timeout, at most
        60). error_grace: how long ranks may wait for one that raised. collective_timeout: torch's own, of every
        collective. keepalive: how often an idle group exchanges a no-op; must be below collective_timeout.
        fork: whether the launcher imports torch once and forks the ranks, which saves seconds and memory; else each
        rank starts a Python of its own. Default: on CPU devices under Linux; CUDA allows no fork.
        log_dir: default a new folder in the user's cache. env: added to the ranks' environment; what a
        process reads before it runs Python, like LD_PRELOAD, has no effect on forked ranks. poll: called
        while waiting; what it raises ends the start.

        Raises ConfigError for devices that cannot be used or logs that cannot be written, and RankError with the
        reason where a rank does not start; then nothing is left running.
        """
        names, backend = check_devices(devices, backend)
        source, colon, table = commands.rpartition(":")
        if source.endswith(".py"):
            commands = f"{Path(source).absolute()}{colon}{table}"
        if heartbeat_timeout is None:
            heartbeat_timeout = min(step_timeout, 60.0)
        cuda = names[0].startswith("cuda")
        if fork and cuda:
            raise ConfigError("fork=True: ranks on CUDA devices cannot be forked; leave fork out")
        folder = new_log_dir() if log_dir is None else make_log_dir(Path(log_dir))
        for name in (LAUNCHER_LOG, *map(rank_log, range(len(names)))):
            open_log(folder / name).close()
        line = _Line(names, str(folder.absolute()))
        try:
            line.launch(
                {
                    "devices": names,
                    "backend": backend,
                    "fork": not cuda and sys.platform == "linux" if fork is None else fork,
                    "commands": commands,
                    "step_timeout": step_timeout,
                    "heartbeat_timeout": heartbeat_timeout,
                    "heartbeat": min(0.5, heartbeat_timeout / 8),
                    "error_grace": error_grace,
                    "collective_timeout": collective_timeout,
                    "keepalive": min(keepalive, collective_timeout / 2),
                    "log_dir": str(folder.absolute()),
                    "env": dict(env or {}),
                },
                time.monotonic() + start_timeout,
                poll,
            )
        except BaseException:
            line.close()
            raise
        return cls(line)

    @classmethod
    def connect(cls, address: str, token: str, *, timeout: float = NODE_TIMEOUT) -> RankGroup:
        """Become the client of a group that runs elsewhere: ``host:port`` or ``unix:/path``, and its token.

        timeout: in seconds; a group that others crowd is called again until then.

        Raises ConfigError for an address that is none, and RankError where nobody answers, the token is wrong, or the
        group has a client already.
        """
        line = _Line([], None)
        try:
            line.connect(address, token, timeout)
        except (OSError, ChannelError) as error:
            line.close()
            raise RankError(
                f"The rank group at {address} cannot be used: {error}. "
                "Check the address, the token, and that the ranks run."
            ) from None
        return cls(line)

    @property
    def devices(self) -> list[str]:
        """One device name per rank."""
        return list(self._line.devices)

    @property
    def degree(self) -> int:
        return len(self._line.devices)

    @property
    def log_dir(self) -> str | None:
        return self._line.log_dir

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks of a group on this machine."""
        return list(self._line.pids)

    @property
    def reserves(self) -> list[int]:
        """Bytes of its device that each rank on this machine holds for its next command, and nobody else can take."""
        pulse = self._line._pulse
        if pulse is None:
            return [0] * self.degree
        return [int(pulse.get(rank + 1, life.RESERVE)) for rank in range(self.degree)]

    @property
    def notes(self) -> list[str]:
        """What the user should know about the start, such as collectives that run without P2P."""
        return list(self._line.notes)

    @property
    def failure(self) -> RankError | None:
        """Why the group is dead, or None."""
        return copy.copy(self._line.failure)

    @property
    def alive(self) -> bool:
        return self._line.failure is None and not self._line.closed

    def request(
        self,
        command: str,
        header: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
        *,
        on_event: Event | None = None,
        poll: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Run a command on every rank and return rank 0's answer.

        on_event: gets every event in order. poll: called about every 50 ms while waiting. Both run in this
        thread, and whatever they raise cancels the command and leaves `request` at once; the next request waits
        until the ranks have ended the cancelled one (see `settled`). timeout in seconds; without one the wait is
        bounded by the group's liveness (`step_timeout`).

        Raises the ranks' error (a refusal of ours keeps its type), RankError where a rank raised anything else or
        the group died, RankOutOfMemory, or Cancelled after `cancel`.
        """
        message = wire.pack(command, header or {}, tensors)
        clock = _Clock(command, poll, timeout)
        with self._taken(clock):
            line = self._line
            line.check()
            line.settle(clock)
            number = line.begin()
            try:
                line.send(number, message)
                while True:
                    frame = line.next_frame(clock.slice())
                    clock.tick()
                    if frame is None or frame.request != number:
                        continue
                    if frame.kind == wire.EVENT:
                        if on_event is not None:
                            on_event(frame.header, frame.tensors)
                    elif frame.kind == wire.REPLY:
                        return Reply(frame.header, frame.tensors)
                    elif frame.kind == wire.ERROR:
                        raise rebuild(frame.header, log_dir=line.log_dir)
            finally:
                line.leave(number)

    @property
    def in_callback(self) -> bool:
        """Whether this thread is in the middle of a request: in one of the callbacks that it gave."""
        return self._asking == threading.get_ident()

    @contextmanager
    def _taken(self, clock: _Clock) -> Iterator[None]:
        if self.in_callback:
            raise RankError(
                f"The ranks were asked for {clock.command!r} by a callback of another command, in the middle of it, and they "
                f"do one thing at a time. Remove the node that decodes or samples between the steps, such as a full "
                f"preview, or load its model with the stock loader."
            )
        while not self._turn.acquire(timeout=clock.slice()):
            clock.tick()
            self._line.check()
        self._asking = threading.get_ident()
        try:
            yield
        finally:
            self._asking = None
            self._turn.release()

    def cancel(self) -> None:
        """Cancel the command that runs, from any thread; its `request` raises Cancelled at the next step."""
        self._line.cancel()

    def settled(self, *, poll: Callable[[], None] | None = None) -> bool:
        """Wait until the ranks have ended a cancelled command; whether the group is alive then.

        Of such a command the ranks may be silent for a sixth of the heartbeat time-out only (5 s at least), whether
        anybody waits or not; then the group is dead. Raises what `poll` raises.
        """
        try:
            self._line.settle(_Clock("settled", poll, None))
        except RankError:
            if self.alive:
                raise
        return self.alive

    def status(self, *, timeout: float = 30.0) -> dict[str, Any]:
        """`{"alive", "busy", "log_dir", "notes", "ranks": [...]}`: per rank its device, process, memory, models.

        While a command runs the ranks are not asked: they are described as far as this process can see.
        """
        line = self._line
        status: dict[str, Any] = {
            "alive": self.alive,
            "busy": line.busy,
            "log_dir": line.log_dir,
            "notes": self.notes,
            "ranks": [],
        }
        if line.failure is not None:
            status["failure"] = str(line.failure)
        if self.alive and not line.busy:
            ranks = self.request("status", timeout=timeout).header["ranks"]
            line.last_ranks = ranks
            status["ranks"] = ranks
        elif self.alive:
            status["ranks"] = line.last_ranks or [
                {"rank": rank, "device": device} for rank, device in enumerate(line.devices)
            ]
        return status

    def close(self) -> None:
        """End the ranks and remove everything. May be called twice."""
        self._finalizer()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Clock:
    """The pace of one request: when to poll, and when its time is over."""

    def __init__(self, command: str, poll: Callable[[], None] | None, timeout: float | None):
        self.command = command
        self._poll = poll
        self._timeout = timeout
        now = time.monotonic()
        self._deadline = None if timeout is None else now + timeout
        self._next_poll = now

    def slice(self) -> float:
        """How long to wait now, at most."""
        return max(0.0, self._next_poll - time.monotonic()) if self._poll else POLL

    def tick(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            raise RankError(f"The ranks did not finish {self.command!r} within {self._timeout:g} s.")
        if self._poll is not None and now >= self._next_poll:
            self._next_poll = now + POLL
            self._poll()


def _call(address: str, timeout: float) -> socket.socket:
    """A connected socket to ``host:port`` or ``unix:/path``."""
    if not address.startswith("unix:"):
        sock = socket.create_connection(parse_address(address.removeprefix("tcp://")), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(address[len("unix:") :])
    except OSError:
        sock.close()
        raise
    return sock


class _Line:
    """Connection and processes of a group. Its threads hold it, never the RankGroup, so that dropping that ends it."""

    def __init__(self, devices: list[str], log_dir: str | None):
        self.devices = devices
        self.log_dir = log_dir
        self.pids: list[int] = []
        self.notes: list[str] = []
        self.failure: RankError | None = None
        self.closed = False
        self.busy = False
        self.last_ranks: list[dict[str, Any]] = []
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._folder: Path | None = None
        self._pulse: PulseFile | None = None
        self._heartbeat_timeout = 60.0
        self._next_check = 0.0
        self._heard = time.monotonic()
        self._silence = 0.0  # how long rank 0 of a group that runs elsewhere may be silent
        self._changed = threading.Condition()
        self._frames: collections.deque[Frame] = collections.deque()
        self._last = 0
        self._answered = 0
        self._unanswered: int | None = None
        self._cancelled = False  # whether the command that runs on the ranks is
        self._close_lock = threading.Lock()

    # Starting

    def launch(self, config: dict[str, Any], deadline: float, poll: Callable[[], None] | None) -> None:
        """Start launcher and ranks, and connect."""
        self._heartbeat_timeout = config["heartbeat_timeout"]
        token = secrets.token_hex(32)
        with open_log(Path(config["log_dir"]) / LAUNCHER_LOG) as errors:
            self._process = subprocess.Popen(
                python("comfy_tp launcher", config["log_dir"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                bufsize=0,
            )
        threading.Thread(target=self._listen, name="comfy_tp launcher", daemon=True).start()
        try:
            cast(Any, self._process.stdin).write(json.dumps({**config, "token": token}).encode() + b"\n")
        except OSError:
            log.debug("the launcher ended at once; its listener tells why")
        clock = _Clock("start", poll, None)
        while True:
            with self._changed:
                if self.failure is None:
                    self._changed.wait(min(clock.slice(), POLL))
                if self.failure is not None:
                    raise copy.copy(self.failure)
            clock.tick()
            if self._folder is not None and (self._folder / "socket").exists():
                try:
                    self.connect(f"unix:{self._folder / 'socket'}", token, NODE_TIMEOUT)
                    return
                except (OSError, ChannelError) as error:
                    log.debug("not connected yet: %s", error)
            if time.monotonic() > deadline:
                raise RankError(self._late(config))

    def _late(self, config: dict[str, Any]) -> str:
        doing = ""
        if self._folder is not None:
            try:
                pulse = PulseFile(self._folder / "pulse", len(self.devices))
                notes = (pulse.note(rank + 1) or "starting Python" for rank in range(len(self.devices)))
                doing = " (" + ", ".join(f"rank {rank}: {note}" for rank, note in enumerate(notes)) + ")"
            except OSError:
                pass
        return f"The ranks on {', '.join(self.devices)} did not start in time{doing}.\nLogs: {self.log_dir}"

    def connect(self, address: str, token: str, timeout: float) -> None:
        """Connect and prove that we know the token; raises ConfigError, OSError or ChannelError.

        A crowded port puts out whoever has proven nothing yet; then we call again.
        """
        deadline = time.monotonic() + timeout
        while True:
            channel = Channel(_call(address, max(POLL, deadline - time.monotonic())))
            try:
                group = wire.introduce(channel, token, deadline - time.monotonic())
                break
            except ChannelClosed:
                channel.close()
                if time.monotonic() + POLL > deadline:
                    raise ChannelError(
                        f"for {timeout:g} s it ended every connection before the handshake was over; others may "
                        "crowd it, or it is no rank group"
                    ) from None
                time.sleep(POLL)
            except BaseException:
                channel.close()
                raise
        if not self.devices:
            self.devices = [str(name) for name in group.get("devices") or ["unknown"]]
            self._silence = float(group.get("heartbeat_timeout") or 0.0)
            self.log_dir = str(group["logs"]) if group.get("logs") else None
        self._heard = time.monotonic()
        self._channel = channel
        threading.Thread(target=self._read, args=(channel,), name="comfy_tp reader", daemon=True).start()

    # Threads

    def _read(self, channel: Channel) -> None:
        """Take every frame as it comes, so that rank 0 never waits for us."""
        try:
            while True:
                frame = channel.receive()
                self._heard = time.monotonic()
                if frame.kind == wire.ERROR and frame.header.get("ends"):
                    self._fail(self._ended(frame.header, " The rank group was ended."))
                    return
                with self._changed:
                    if frame.kind in (wire.REPLY, wire.ERROR):
                        self._answered = frame.request
                        self._set_cancelled(False)
                        if frame.request == self._unanswered:
                            self._unanswered = None
                    if frame.request == self._last and self.busy:
                        self._frames.append(frame)
                    self._changed.notify_all()
        except ChannelError as error:
            if not self.closed:
                self._connection_lost(error)

    def _ended(self, described: dict[str, Any], note: str) -> RankError:
        """The described error that ended the group, as a RankError also where it was a refusal."""
        error = rebuild(described, log_dir=self.log_dir, note=note)
        if isinstance(error, RankError):
            return error
        return RankError(str(error), rank=described.get("rank"), device=described.get("device"))

    def _connection_lost(self, error: ChannelError) -> None:
        if self._process is not None:
            # The launcher knows the cause; its word comes a moment later.
            deadline = time.monotonic() + CAUSE_WAIT
            with self._changed:
                while self.failure is None and not self.closed and time.monotonic() < deadline:
                    self._changed.wait(0.1)
        guess = "" if self._process is not None else " The rank, its machine or the network between is gone."
        self._rank_0_failed(f"The connection to rank 0 ({self.devices[0]}) ended: {error}.{guess}")

    def _rank_0_failed(self, text: str) -> None:
        logs = f"\nLogs: {self.log_dir}" if self.log_dir else ""
        self._fail(RankError(f"{text}{logs}", rank=0, device=self.devices[0]))

    def _listen(self) -> None:
        """Read what the launcher tells, until it ends."""
        assert self._process is not None and self._process.stdout is not None
        for raw in self._process.stdout:
            try:
                told = json.loads(raw)
            except ValueError:
                continue
            if told.get("event") == "folder":
                self._folder = Path(told["path"])
                self._pulse = PulseFile(self._folder / "pulse", len(self.devices))
            elif told.get("event") == "ranks":
                self.pids = told["pids"]
            elif told.get("event") == "note":
                self.notes.append(told["text"])
                log.warning("%s", told["text"])
            elif told.get("event") == "failed":
                self._fail(self._explain(told))
        self._process.stdout.close()
        if not self.closed and self.failure is None:
            try:
                cause = exit_cause(self._process.wait(END_WAIT))
            except subprocess.TimeoutExpired:
                cause = "closed its output"
            text = f"The launcher of the ranks {cause}."
            end = tail(Path(self.log_dir or "") / LAUNCHER_LOG, 1000)
            self._fail(RankError(f"{text}\n{end}\nLogs: {self.log_dir}"))

    def _explain(self, told: dict[str, Any]) -> RankError:
        """The error for what the launcher reports: who, where, why, and the log."""
        if "rank" not in told:
            return RankError(f"The rank group failed: {told.get('cause')}\nLogs: {self.log_dir}")
        rank, device = told["rank"], told["device"]
        started = told.get("state") != life.STARTING
        error = told.get("error")
        ended = " The rank group was ended; the next run starts a new one." if started else ""
        if error:
            described = {**error, "rank": rank, "device": device}
            note = ended if started else f" (rank {rank} on {device} did not start)"
            if started:
                return self._ended(described, note)
            return cast(RankError, rebuild(described, log_dir=self.log_dir, note=note))
        during = ""
        if not started:
            during = f" while starting ({told.get('doing') or 'importing torch'})"
        elif told.get("state") in (life.BUSY, life.FAILED):
            during = f" during {told.get('doing')!r} (step {told.get('step')})"
        text = f"Rank {rank} ({device}, pid {told['pid']}) {told['cause']}{during}.{ended}"
        log_tail = told.get("log_tail")
        return RankError(
            text + (f"\n{log_tail}" if log_tail else "") + f"\nLogs: {self.log_dir}", rank=rank, device=device
        )

    def _fail(self, error: RankError) -> None:
        with self._changed:
            if self.failure is None and not self.closed:
                self.failure = error
                log.error("%s", error)
            self._changed.notify_all()
        self._end()

    # Requests; one thread at a time

    def check(self) -> None:
        """Raise where the group cannot take a request."""
        if self.failure is not None:
            # Not itself: a raised exception keeps the frames that it passed, and with them the caller's model.
            raise copy.copy(self.failure)
        if self.closed:
            raise RankError("The rank group was closed.")

    def begin(self) -> int:
        with self._changed:
            self._last += 1
            self._frames.clear()
            self.busy = True
            return self._last

    def send(self, number: int, message: wire.Packed) -> None:
        """Send a command; a large one aside, so that the caller can leave while rank 0 does not read it."""
        if len(message.raw) + message.payload_bytes <= SENT_AT_ONCE:
            self._send_command(number, message)
            self.check()
        else:
            self._aside(self._send_command, number, message)

    def _send_command(self, number: int, message: wire.Packed) -> None:
        assert self._channel is not None
        try:
            self._channel.send(wire.COMMAND, number, message)
        except ChannelError as error:
            if not self.closed:
                self._connection_lost(error)

    def next_frame(self, timeout: float) -> Frame | None:
        """The next frame, or None after `timeout`; raises where the group failed."""
        with self._changed:
            if not self._frames and self.failure is None and not self.closed:
                self._changed.wait(timeout)
            if self._frames:
                return self._frames.popleft()
        self.check()
        self._check_launcher()
        return None

    def leave(self, number: int) -> None:
        """The request ends here; if it was not answered, tell the ranks and remember."""
        with self._changed:
            self.busy = False
            self._frames.clear()
            left = self._answered != number and self.failure is None and not self.closed
            if left:
                self._unanswered = number
        if left:
            self._aside(self._send_cancel, number)
            self._aside(self._watch_left)

    @staticmethod
    def _aside(work: Callable[..., None], *arguments: Any) -> None:
        """Do in a thread of its own what may wait for rank 0."""
        threading.Thread(target=work, args=arguments, name="comfy_tp aside", daemon=True).start()

    def _watch_left(self) -> None:
        """Watch over a request that was left until it is answered: no caller waits who would notice a silence."""
        try:
            self.settle(None)
        except RankError as error:
            log.debug("a request that was left ended with its group: %s", error)

    def settle(self, clock: _Clock | None) -> None:
        """Wait until the ranks have ended a request that was left; the group's liveness bounds it."""
        while True:
            with self._changed:
                if self._unanswered is None:
                    return
                if self.failure is None and not self.closed:
                    self._changed.wait(WATCH if clock is None else min(clock.slice(), POLL))
            self.check()
            self._check_launcher()
            if clock is not None:
                clock.tick()

    def cancel(self) -> None:
        with self._changed:
            number = self._last if self.busy else None
        if number is not None:
            self._send_cancel(number)

    def _set_cancelled(self, cancelled: bool) -> None:
        self._cancelled = cancelled
        if self._pulse is not None:
            self._pulse.put(0, life.CANCELLED, cancelled)

    def _send_cancel(self, number: int) -> None:
        with self._changed:
            if self._answered >= number:
                return
            self._set_cancelled(True)
        if self._channel is not None:
            try:
                self._channel.send(wire.CANCEL, number)
            except ChannelError:
                log.debug("the cancelled request's group is gone")

    def _check_launcher(self) -> None:
        # The launcher watches the ranks; who watches the launcher is whoever waits here.
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + 1.0
        silent = now - self._heard
        if self._silence and silent > life.silence_limit(self._silence, cancelled=self._cancelled):
            self._rank_0_failed(f"Rank 0 ({self.devices[0]}) has shown no sign of life for {silent:.0f} s.")
            self.check()
        if self._pulse is None:
            return
        silent = now - self._pulse.get(0, life.HEARTBEAT)
        limit = life.silence_limit(self._heartbeat_timeout, cancelled=self._cancelled)
        if silent > limit + 2.0:
            self._fail(
                RankError(
                    f"The launcher of the ranks has not moved for {silent:.0f} s.\nLogs: {self.log_dir}"
                )
            )
            self.check()

    # Ending

    def close(self) -> None:
        """End everything; from the process that started it alone."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._end()

    def _end(self) -> None:
        with self._close_lock:
            if self._channel is not None:
                self._channel.close()
            process = self._process
            if process is None or process.stdin is None:
                return
            if not process.stdin.closed:
                try:
                    process.stdin.close()
                except OSError:
                    pass
            try:
                process.wait(END_WAIT)
            except subprocess.TimeoutExpired:
                self._kill_all(process)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_all(self, process: subprocess.Popen[bytes]) -> None:
        """The launcher does not end: kill it and the ranks it started."""
        for pid in [*self.pids, process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            process.wait(END_WAIT)
        except subprocess.TimeoutExpired:
            log.error("process %d cannot be killed", process.pid)
