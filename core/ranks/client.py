"""The client's side of a rank group: start it, send commands, watch it, end it.

    group = RankGroup.start(["cpu", "cpu"])
    reply = group.request("ping")
    group.close()

One request runs at a time; a second thread waits its turn. Events and `poll` run in the thread that called
`request`, so that what they raise (a pressed Cancel) leaves `request` and cancels the command. After any failure of
the processes the group is dead as a whole: `alive` is False, everything is cleaned up, and `request` raises at once.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import RankError
from . import channel as wire
from .config import GroupConfig
from .failure import rebuild
from .line import Clock, Line
from .local import LocalLine
from .logs import logs_for
from .machines.remote import TIMEOUT, RemoteLine

Event = Callable[[dict, list[torch.Tensor]], None]


@dataclass
class Reply:
    """What a command returned on rank 0."""

    header: dict[str, Any]
    tensors: list[torch.Tensor] = field(default_factory=list)


class RankGroup:
    """A resident group of ranks. Made by `start` or `connect`; ended by `close`, by the end of this process, or
    when the object is dropped."""

    def __init__(self, line: Line):
        self._line = line
        self._turn = threading.Lock()
        self._asking: int | None = None  # the thread whose turn it is
        self._finalizer = weakref.finalize(self, Line.close, line)

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
        config = GroupConfig.of(
            devices,
            backend=backend,
            commands=commands,
            fork=fork,
            env=env,
            step_timeout=step_timeout,
            heartbeat_timeout=heartbeat_timeout,
            error_grace=error_grace,
            collective_timeout=collective_timeout,
            keepalive=keepalive,
        )
        line = LocalLine(replace(config, log_dir=str(logs_for(len(config.devices), log_dir))))
        try:
            line.start(time.monotonic() + start_timeout, poll)
        except BaseException:
            line.close()
            raise
        return cls(line)

    @classmethod
    def connect(cls, address: str, token: str, *, timeout: float = TIMEOUT) -> RankGroup:
        """Become the client of a group that runs elsewhere: ``host:port`` or ``unix:/path``, and its token.

        timeout: in seconds; a group that others crowd is called again until then.

        Raises ConfigError for an address that is none, and RankError where nobody answers, the token is wrong, or the
        group has a client already.
        """
        return cls(RemoteLine(address, token, timeout))

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
        return self._line.reserves

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
        clock = Clock(command, poll, timeout)
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
    def _taken(self, clock: Clock) -> Iterator[None]:
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
            self._line.settle(Clock("settled", poll))
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
