"""The loop of a rank: rank 0 takes orders and hands them to every rank; all execute them in lockstep."""

from __future__ import annotations

import gc
import logging
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import Cancelled, ConfigError, RankError
from . import channel as wire
from . import heartbeat
from .arena import Arena
from .commands import Command
from .config import Limits
from .context import RankContext
from .failure import ENDS, choose, out_of_memory
from .lockstep import FAILED, FINISHED, STOPPED, LockstepBroken, PeerFailed, PeerLost, PeerStopped
from .port import Client, ClientPort

log = logging.getLogger("comfy_tp.rank")

_NOTHING, _COMMAND, _FORGET = 0, 1, 2
GROUP_ENDS = 0
_BLOCK = 4096
_BLOCK_HEAD = struct.Struct("<QQQQQ")


class DeviceBroken(BaseException):
    """The device failed in a way that only a new process can get over, such as an illegal memory access."""


class CommandLoop:
    """Takes orders at rank 0, hands them to every rank, executes them, and answers."""

    def __init__(
        self,
        context: RankContext,
        commands: dict[str, Command],
        port: ClientPort | None,
        limits: Limits,
        *,
        note_failure: Callable[[dict[str, Any]], None],
        arena: Arena | None = None,
    ):
        """`note_failure`: where the others find this rank's error, in case they never come to the end of the command.
        `arena`: what hands tensors from rank to rank faster than the process group; none over several machines."""
        self.context = context
        self.commands = commands
        self.port = port
        self.limits = limits
        self.note_failure = note_failure
        self.arena = arena
        self._block = torch.zeros(_BLOCK, dtype=torch.uint8)
        self._count = 0
        self._client: Client | None = None

    def cancel(self, request: int) -> None:
        """The client cancels: rank 0's reader calls this at once, whatever the main thread does."""
        order = self.context.order
        if order is not None and order.frame.request <= request:
            self.context.heartbeat.tell_to_stop(self._count)

    def tell_client(self, error: dict[str, Any]) -> None:
        """For a group that is about to end: what the client should know, from any thread."""
        order = self.context.order
        if self.port is not None:
            self.port.tell(order.frame.request if order is not None else GROUP_ENDS, {**error, ENDS: True})

    def run(self) -> NoReturn:
        """Execute commands until the process ends; raises PeerLost where the group broke."""
        self.context.heartbeat.set_state(heartbeat.IDLE)
        while True:
            if self.port is not None:
                self._lead(self.port)
            else:
                self._follow()

    def _lead(self, port: ClientPort) -> None:
        order = port.next_order(self.limits.keepalive)
        context = self.context
        if order is None:
            if context.models and not port.has_client:
                self._forget_models()
                return
            self._write_block(_NOTHING, 0, b"", 0, 0)
            context.lockstep.broadcast(self._block)
            return
        if order.client is not self._client:
            # A new client knows nothing of what the one before it left on the ranks.
            if context.models:
                self._forget_models()
            self._client = order.client
        frame = order.frame
        if not order.client.wants(frame.request):
            error = context.describe(Cancelled("The command was cancelled before it began."))
            order.client.send(wire.ERROR, frame.request, header=error)
            return
        self._count += 1
        context.heartbeat.begin(self._count, frame.name)
        payload_bytes = frame.payload.numel()
        if context.degree > 1:
            stored = self.arena.put(frame.payload) if payload_bytes and self.arena is not None else 0
            self._write_block(_COMMAND, self._count, frame.raw, payload_bytes, stored)
            context.lockstep.broadcast(self._block)
            rest = frame.raw[_BLOCK - _BLOCK_HEAD.size :]
            if rest:
                context.lockstep.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
            if payload_bytes and not stored:
                context.lockstep.broadcast(frame.payload)
        context.order = order
        if not order.client.wants(frame.request):
            context.heartbeat.tell_to_stop(self._count)
        try:
            answer = self._execute(frame.name, frame.header, frame.tensors)
        finally:
            context.order = None
        self._rest()
        if isinstance(answer, wire.Packed):
            order.client.send(wire.REPLY, frame.request, answer)
        else:
            order.client.send(wire.ERROR, frame.request, header=answer)

    def _follow(self) -> None:
        context = self.context
        context.lockstep.broadcast(self._block)
        block = self._block.numpy().tobytes()
        kind, count, header_bytes, payload_bytes, stored = _BLOCK_HEAD.unpack_from(block)
        if kind == _NOTHING:
            return
        if kind == _FORGET:
            self._forget()
            return
        raw = block[_BLOCK_HEAD.size : _BLOCK_HEAD.size + header_bytes]
        if len(raw) < header_bytes:
            rest = torch.empty(header_bytes - len(raw), dtype=torch.uint8)
            context.lockstep.broadcast(rest)
            raw += rest.numpy().tobytes()
        if stored and self.arena is not None:
            payload = self.arena.get(stored, payload_bytes)
        else:
            payload = torch.empty(payload_bytes, dtype=torch.uint8)
            if payload_bytes:
                context.lockstep.broadcast(payload)
        name, header, layout, _ = wire.parse_header(raw)
        context.heartbeat.begin(count, name)
        self._execute(name, header, wire.tensors_of(layout, payload))
        self._rest()

    def _rest(self) -> None:
        """A command is over. What it leaves in reserve on the device is known before its answer arrives."""
        self.context.heartbeat.set_reserve(reserve_on(self.context.device))
        self.context.heartbeat.set_state(heartbeat.IDLE)

    def _forget_models(self) -> None:
        log.info("the client left; forgetting %d models", len(self.context.models))
        self._write_block(_FORGET, 0, b"", 0, 0)
        self.context.lockstep.broadcast(self._block)
        self._forget()

    def _forget(self) -> None:
        self.context.models.clear()
        gc.collect()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()

    def _write_block(self, kind: int, count: int, raw: bytes, payload_bytes: int, stored: int) -> None:
        head = _BLOCK_HEAD.pack(kind, count, len(raw), payload_bytes, stored)
        first = head + raw[: _BLOCK - len(head)]
        self._block[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)

    def _execute(self, name: str, header: dict, tensors: list[torch.Tensor]) -> wire.Packed | dict[str, Any]:
        """Run one command and agree on its end. The answer for the client: a packed reply or a described error."""
        context = self.context
        answer: wire.Packed | None = None
        error: dict[str, Any] | None = None
        try:
            answer, error = self._attempt(name, header, tensors)
            tensors.clear()
            if error is None:
                state = context.lockstep.agree(FINISHED)[0]
            elif error["type"] == Cancelled.__name__:
                state = context.lockstep.agree(STOPPED)[0]
            else:
                self.note_failure(error)
                context.heartbeat.set_state(heartbeat.FAILED)
                state = context.lockstep.agree(FAILED)[0]
        except PeerFailed:
            state = FAILED
        except PeerStopped:
            state = STOPPED
        except LockstepBroken:
            text = f"The ranks left the lockstep in command {name!r}: boundaries were not met equally often."
            error = context.describe(RankError(text, rank=context.rank))
            state = FAILED
        if state == FINISHED and answer is not None:
            return answer
        if state == STOPPED:
            return error or context.describe(Cancelled("The command was cancelled."))
        return self._conclude(error)

    def _attempt(
        self, name: str, header: dict, tensors: list[torch.Tensor]
    ) -> tuple[wire.Packed | None, dict[str, Any] | None]:
        """The command itself: its packed answer, or its described error."""
        context = self.context
        try:
            command = self.commands.get(name)
            if command is None:
                known = ", ".join(sorted(self.commands))
                raise ConfigError(f"the ranks know no command {name!r}; they know {known}")
            reply_header, reply_tensors = command(context, header, tensors)
            if context.device.type == "cuda":
                torch.cuda.synchronize(context.device)
            return wire.pack("", reply_header, reply_tensors if context.rank == 0 else ()), None
        except Exception as error:
            described = context.describe(error)
            if not isinstance(error, Cancelled):
                log.error("command %s failed\n%s", name, described["traceback"])
            if context.device.type == "cuda":
                check_device(context.device)
            # Frames of the traceback hold tensors.
            traceback.clear_frames(error.__traceback__)
            if out_of_memory(error):
                gc.collect()
                if context.device.type == "cuda":
                    torch.cuda.empty_cache()
            return None, described

    def _conclude(self, error: dict[str, Any] | None) -> dict[str, Any]:
        """Exchange the errors of all ranks after a failure, and see that no device work is left behind."""
        context = self.context
        if context.device.type == "cuda" and dist.get_backend(context.data_group) == "nccl":
            self._await_device()
        return choose(context.lockstep.exchange(error))

    def _await_device(self) -> None:
        # A peer that raised may have left a collective open on this rank's stream; then the group is lost, and
        # the launcher, which sees no progress, names the one that raised.
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.context.device))
        deadline = time.monotonic() + 4 * self.limits.error_grace
        while not event.query():
            if time.monotonic() > deadline:
                raise PeerLost("a collective was left open")
            time.sleep(0.01)


def reserve_on(device: torch.device) -> int:
    """Bytes of `device` that torch holds in this process and that no tensor uses."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_device(device: torch.device) -> None:
    """After an error: raise DeviceBroken where the device can do nothing more in this process."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceBroken(f"{device} cannot be used any more: {error}") from error
