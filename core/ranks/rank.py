"""A rank: joins the group, then executes commands in lockstep with the others until its lifetime pipe ends.

A command is a function ``f(context, header, tensors) -> (header, tensors)`` that every rank calls with the same
arguments; what rank 0 returns goes to the client. The tensors arrive on the CPU as views of one buffer: a command
that keeps one keeps all of them. Built-in commands: `ping`, `echo` and `status`.

Lockstep at the boundaries is kept by `_agree`, one small all-reduce on the control group, made by
`check_cancelled`, by `gather` and at the end of every command. In it a rank says whether it goes on, wants to
cancel (rank 0 alone), has finished, was stopped or has failed, and learns what all say. So a rank that raises takes
the others out of their command at their next boundary, and the group stays usable. Ranks that wait in the model's
own collectives for one that raised are ended by the launcher (`pulse`).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import logging
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from ..errors import Cancelled, ConfigError, RankError
from . import channel as wire
from . import heartbeat as life
from .arena import Arena
from .failure import choose, describe, out_of_memory
from .heartbeat import PulseFile, RankPulse
from .port import Client, ClientPort, Order

log = logging.getLogger("comfy_tp.rank")

Command = Callable[["RankContext", dict, list[torch.Tensor]], tuple[dict, Sequence[torch.Tensor]]]

# Ordered so that the largest and the smallest of all ranks' words tell everything.
_GOES_ON, _CANCELS, _FINISHED, _STOPPED, _FAILED = 0, 1, 2, 3, 4
_NOTHING, _COMMAND, _FORGET = 0, 1, 2
GROUP_ENDS = 0
# Of the start-up test: GPUs whose P2P is broken often do not give wrong sums, but none at all.
SELF_TEST_TIMEOUT = 60.0
_BLOCK = 4096
_BLOCK_HEAD = struct.Struct("<QQQQQ")


class PeerFailed(BaseException):
    """Another rank failed in this command. A BaseException, so that no command mistakes it for its own error."""


class PeerStopped(BaseException):
    """Another rank saw the cancel between two boundaries and has ended this command."""


class DeviceBroken(BaseException):
    """The device failed in a way that only a new process can get over, such as an illegal memory access."""


class LockstepBroken(BaseException):
    """One rank is at a step boundary where another has ended its command."""


class PeerLost(BaseException):
    """The control group is broken: another rank is gone, and so is this group."""


class RankContext:
    """What a command sees of the group.

    rank, degree: this rank's number and how many there are. device: where this rank's shards live.
    data_group: the process group of the model's collectives (nccl or gloo). control_group: always gloo.
    models: what commands keep between calls, by a key of their choice.
    name, logs: what errors call the device, and where they say that this rank's log is, if the client cannot know.
    """

    def __init__(
        self,
        rank: int,
        degree: int,
        device: torch.device,
        data_group: dist.ProcessGroup | None,
        control_group: dist.ProcessGroup | None,
        pulse: RankPulse,
        *,
        name: str | None = None,
        logs: str | None = None,
    ):
        self.rank = rank
        self.degree = degree
        self.device = device
        self.data_group = data_group
        self.control_group = control_group
        self.models: dict[Any, Any] = {}
        self.name = name or str(device)
        self.logs = logs
        self._pulse = pulse
        self._order: Order | None = None
        self._numbers = torch.zeros(3, dtype=torch.int64)

    def report(self, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send an event to the client. Rank 0 alone does; elsewhere nothing happens."""
        if self._order is not None:
            self._order.client.send(wire.EVENT, self._order.frame.request, header=header, tensors=tensors)

    def describe(self, error: BaseException) -> dict[str, Any]:
        """An exception of this rank as JSON."""
        return describe(error, self.rank, self.name, self.logs)

    def pulse(self, note: str | None = None) -> None:
        """Say that the command makes progress: once per step, tensor read, or whatever takes long."""
        self._pulse.mark(note)

    def check_cancelled(self) -> None:
        """A step boundary; all ranks must call it, equally often. Raises Cancelled on all of them or on none.

        If another rank has failed, the command ends here too. Counts as progress.
        """
        self._pulse.mark()
        if self._agree(_GOES_ON if self._wanted() else _CANCELS)[0] == _CANCELS:
            raise Cancelled("The command was cancelled.")

    def stop_if_cancelled(self) -> None:
        """Raise Cancelled on this rank alone, if the client cancelled or another rank has failed.

        For long work without the others, such as reading files: cheap, no collective, any number of calls. A rank
        that misses it meets the others at the next boundary; so let a `check_cancelled` follow before anything is
        kept.
        """
        if not self._wanted() or self._pulse.told_to_stop():
            raise Cancelled("The command was cancelled.")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON can say), on every rank, in rank order. A boundary too."""
        text = json.dumps(value).encode()
        return self._all_texts(text, self._agree(_GOES_ON, len(text))[1])

    def _wanted(self) -> bool:
        return self._order is None or self._order.client.wants(self._order.frame.request)

    def _all_texts(self, text: bytes, longest: int) -> list[Any]:
        own = torch.frombuffer(
            bytearray(len(text).to_bytes(8, "little") + text.ljust(longest)), dtype=torch.uint8
        )
        parts = [torch.empty_like(own) for _ in range(self.degree)]
        self._collective(dist.all_gather, parts, own)
        texts = []
        for part in parts:
            raw = part.numpy().tobytes()
            texts.append(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
        return texts

    def _collective(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            operation(*args, group=self.control_group, **kwargs)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def _agree(self, state: int, size: int = 0) -> tuple[int, int]:
        """What all ranks together say, and the largest `size`.

        Raises PeerFailed or PeerStopped where this rank goes on and another has failed or was stopped, and
        LockstepBroken where some ranks have finished and others have not.
        """
        numbers = self._numbers
        numbers[0], numbers[1], numbers[2] = state, -state, size
        self._collective(dist.all_reduce, numbers, dist.ReduceOp.MAX)
        highest, lowest, longest = numbers.tolist()
        lowest = -lowest
        if state in (_GOES_ON, _CANCELS):
            if highest == _FAILED:
                raise PeerFailed
            if highest == _STOPPED:
                raise PeerStopped
        if highest == _FINISHED and lowest != _FINISHED:
            raise LockstepBroken
        return highest, longest


def ping(context: RankContext, header: dict, tensors: list[torch.Tensor]) -> tuple[dict, list[torch.Tensor]]:
    """Answers who is there."""
    return {"degree": context.degree, "ranks": context.gather(context.rank)}, []


def echo(context: RankContext, header: dict, tensors: list[torch.Tensor]) -> tuple[dict, list[torch.Tensor]]:
    """Gives back what it got: measures the channel."""
    return header, tensors


BUILT_IN: dict[str, Command] = {"ping": ping, "echo": echo}


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserve_on(device: torch.device) -> int:
    """Bytes of `device` that torch holds in this process and that no tensor uses."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def make_status(describe_models: Callable[[RankContext], dict] | None) -> Command:
    """The command that tells of every rank its device, process, memory and models."""

    def status(
        context: RankContext, header: dict, tensors: list[torch.Tensor]
    ) -> tuple[dict, list[torch.Tensor]]:
        own: dict[str, Any] = {
            "rank": context.rank,
            "device": str(context.device),
            "pid": os.getpid(),
            "rss_bytes": resident_bytes(),
            "threads": threading.active_count(),
            "slowest_step_s": context._pulse.slowest,
            "device_bytes": 0,
            "device_total_bytes": 0,
            "models": [],
        }
        if context.device.type == "cuda":
            own["device_name"] = torch.cuda.get_device_name(context.device)
            own["device_bytes"] = torch.cuda.memory_reserved(context.device)
            own["device_total_bytes"] = torch.cuda.get_device_properties(context.device).total_memory
        if describe_models is not None:
            own.update(describe_models(context))
        return {"ranks": context.gather(own)}, []

    return status


def load_commands(where: str) -> dict[str, Command]:
    """The command table named by ``module:NAME`` or ``path/to/file.py:NAME``, with the built-in ones.

    If the table's module has a function `describe_models(context) -> dict`, `status` adds its entries.
    Raises ConfigError where there is no such module or table.
    """
    module, table = _import_commands(where)
    status = make_status(getattr(module, "describe_models", None))
    return {**BUILT_IN, "status": status, **table}


def prepare_commands(where: str) -> None:
    """Import the commands, and call their module's `prepare()` if it has one: for what all ranks would import later."""
    module, _ = _import_commands(where)
    getattr(module, "prepare", lambda: None)()


def _import_commands(where: str) -> tuple[ModuleType, dict[str, Command]]:
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"commands {where!r} is not of the form 'module:NAME' or 'path/to/file.py:NAME'")
    try:
        module = _import_file(source) if source.endswith(".py") else importlib.import_module(source)
        return module, getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"the rank commands {where!r} cannot be loaded: {error}") from error


def _import_file(source: str) -> ModuleType:
    """The module of the file `source`; a forked rank finds the one that its launcher has imported."""
    known = sys.modules.get("comfy_tp_commands")
    if known is not None and known.__file__ == source:
        return known
    spec = importlib.util.spec_from_file_location("comfy_tp_commands", source)
    if spec is None or spec.loader is None or not Path(source).is_file():
        raise FileNotFoundError(f"no such file: {source}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


class CommandLoop:
    """Takes orders at rank 0, hands them to every rank, executes them, and answers."""

    def __init__(
        self,
        context: RankContext,
        commands: dict[str, Command],
        port: ClientPort | None,
        *,
        keepalive: float,
        error_grace: float,
        folder: Path | None = None,
        on_raised: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.context = context
        self.commands = commands
        self.port = port
        self.keepalive = keepalive
        self.error_grace = error_grace
        # What the ranks of one machine share beside the process group; absent over several machines.
        self.folder = folder
        self.arena = Arena(folder) if folder is not None else None
        self.on_raised = on_raised
        self._block = torch.zeros(_BLOCK, dtype=torch.uint8)
        self._count = 0
        self._client: Client | None = None

    def cancel(self, request: int) -> None:
        """The client cancels: rank 0's reader calls this at once, whatever the main thread does."""
        order = self.context._order
        if order is not None and order.frame.request <= request:
            self.context._pulse.tell_to_stop(self._count)

    def tell_client(self, error: dict[str, Any]) -> None:
        """For a group that is about to end: what the client should know, from any thread."""
        order = self.context._order
        if self.port is not None:
            self.port.tell(order.frame.request if order is not None else GROUP_ENDS, {**error, "ends": True})

    def run(self) -> NoReturn:
        """Execute commands until the process ends; raises PeerLost where the group broke."""
        self.context._pulse.set_state(life.IDLE)
        while True:
            if self.port is not None:
                self._lead(self.port)
            else:
                self._follow()

    def _lead(self, port: ClientPort) -> None:
        order = port.next_order(self.keepalive)
        context = self.context
        if order is None:
            if context.models and not port.has_client:
                self._forget_models()
                return
            self._write_block(_NOTHING, 0, b"", 0, 0)
            context._collective(dist.broadcast, self._block, 0)
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
        context._pulse.begin(self._count, frame.name)
        payload_bytes = frame.payload.numel()
        if context.degree > 1:
            stored = self.arena.put(frame.payload) if payload_bytes and self.arena is not None else 0
            self._write_block(_COMMAND, self._count, frame.raw, payload_bytes, stored)
            context._collective(dist.broadcast, self._block, 0)
            rest = frame.raw[_BLOCK - _BLOCK_HEAD.size :]
            if rest:
                context._collective(dist.broadcast, torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0)
            if payload_bytes and not stored:
                context._collective(dist.broadcast, frame.payload, 0)
        context._order = order
        if not order.client.wants(frame.request):
            context._pulse.tell_to_stop(self._count)
        try:
            answer = self._execute(frame.name, frame.header, frame.tensors)
        finally:
            context._order = None
        self._rest()
        if isinstance(answer, wire.Packed):
            order.client.send(wire.REPLY, frame.request, answer)
        else:
            order.client.send(wire.ERROR, frame.request, header=answer)

    def _follow(self) -> None:
        context = self.context
        context._collective(dist.broadcast, self._block, 0)
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
            context._collective(dist.broadcast, rest, 0)
            raw += rest.numpy().tobytes()
        if stored and self.arena is not None:
            payload = self.arena.get(stored, payload_bytes)
        else:
            payload = torch.empty(payload_bytes, dtype=torch.uint8)
            if payload_bytes:
                context._collective(dist.broadcast, payload, 0)
        name, header, layout, _ = wire.parse_header(raw)
        context._pulse.begin(count, name)
        self._execute(name, header, wire.tensors_of(layout, payload))
        self._rest()

    def _rest(self) -> None:
        """A command is over. What it leaves in reserve on the device is known before its answer arrives."""
        self.context._pulse.set_reserve(reserve_on(self.context.device))
        self.context._pulse.set_state(life.IDLE)

    def _forget_models(self) -> None:
        log.info("the client left; forgetting %d models", len(self.context.models))
        self._write_block(_FORGET, 0, b"", 0, 0)
        self.context._collective(dist.broadcast, self._block, 0)
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
                state = context._agree(_FINISHED)[0]
            elif error["type"] == Cancelled.__name__:
                state = context._agree(_STOPPED)[0]
            else:
                self._note_failure(error)
                context._pulse.set_state(life.FAILED)
                state = context._agree(_FAILED)[0]
        except PeerFailed:
            state = _FAILED
        except PeerStopped:
            state = _STOPPED
        except LockstepBroken:
            text = f"The ranks left the lockstep in command {name!r}: boundaries were not met equally often."
            error = context.describe(RankError(text, rank=context.rank))
            state = _FAILED
        if state == _FINISHED and answer is not None:
            return answer
        if state == _STOPPED:
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
        text = json.dumps(error).encode()
        sizes = torch.tensor([len(text)], dtype=torch.int64)
        context._collective(dist.all_reduce, sizes, dist.ReduceOp.MAX)
        return choose(context._all_texts(text, int(sizes[0])))

    def _await_device(self) -> None:
        # A peer that raised may have left a collective open on this rank's stream; then the group is lost, and
        # the launcher, which sees no progress, names the one that raised.
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.context.device))
        deadline = time.monotonic() + 4 * self.error_grace
        while not event.query():
            if time.monotonic() > deadline:
                raise PeerLost("a collective was left open")
            time.sleep(0.01)

    def _note_failure(self, error: dict[str, Any]) -> None:
        # For the launcher, in case the others never come to the end of this command.
        if self.on_raised is not None:
            self.on_raised(error)
        if self.folder is not None:
            write_error(self.folder / f"raised-{self.context.rank}.json", error)


def write_error(path: Path, error: dict[str, Any]) -> None:
    """A described error, for the launcher; the file is there only when it is complete.

    Where it cannot be written (no room, or a cleaner has removed the folder), the error goes its other ways.
    """
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(json.dumps(error))
        unfinished.replace(path)
    except OSError as reason:
        log.warning("%s cannot be written: %s", path, reason)


def self_test(group: dist.ProcessGroup | None, rank: int, degree: int, device: torch.device) -> str | None:
    """One all-reduce per dtype against the known sum; returns what is wrong, or None.

    All sums are whole numbers up to 256, which every dtype here holds exactly.
    """
    weight = degree * (degree + 1) // 2
    top = max(1, 256 // weight)
    pattern = torch.arange(4096, device=device) % (top + 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = (pattern * (rank + 1)).to(dtype)
        dist.all_reduce(tensor, group=group)
        wrong = int((tensor.float() != (pattern * weight).float()).sum())
        if wrong:
            return f"an all-reduce of {dtype} over {degree} ranks gave {wrong} wrong sums of {len(pattern)}"
    return None


def run_self_test(
    group: dist.ProcessGroup | None,
    rank: int,
    degree: int,
    device: torch.device,
    failed: Callable[[BaseException], None],
) -> None:
    """`self_test`, in bounded time.

    Raises RankError where it fails, or `SystemExit(EXIT_SELF_TEST)` where it may pass without P2P. Where it does not
    end, `failed` is called with the same, in another thread, and must end this process.
    """

    def failure(wrong: str) -> BaseException:
        hint = " Try again with NCCL_P2P_DISABLE=1." if p2p_in_use(group) else ""
        text = f"The start-up test failed on rank {rank} ({device}): {wrong}.{hint}"
        if not hint:
            return RankError(text, rank=rank)
        log.error("%s", text)
        return SystemExit(life.EXIT_SELF_TEST)

    late = f"an all-reduce over {degree} ranks did not end within {SELF_TEST_TIMEOUT:g} s"
    timer = threading.Timer(SELF_TEST_TIMEOUT, lambda: failed(failure(late)))
    timer.daemon = True
    timer.start()
    try:
        wrong = self_test(group, rank, degree, device)
    finally:
        timer.cancel()
    if wrong:
        raise failure(wrong)


def p2p_in_use(group: dist.ProcessGroup | None) -> bool:
    """Whether the collectives may go directly from GPU to GPU."""
    return dist.get_backend(group) == "nccl" and not os.environ.get("NCCL_P2P_DISABLE")


def check_device(device: torch.device) -> None:
    """After an error: raise DeviceBroken where the device can do nothing more in this process."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceBroken(f"{device} cannot be used any more: {error}") from error


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
        write_error(folder / f"ended-{rank}.json", describe(error, rank, "its device"))

    end_process(error, write_down)


def end_process(error: BaseException, tell: Callable[[], None]) -> NoReturn:
    """End this rank's process, whatever its other threads do. `tell` says what ended it, where nobody else can know."""
    code = 1
    if isinstance(error, PeerLost):
        log.error("the group is broken: %s", error)
        code = life.EXIT_PEER_LOST
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    else:
        tell()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(folder: Path, rank: int) -> NoReturn:
    config = json.loads((folder / "config.json").read_text())
    devices = config["devices"]
    degree = len(devices)
    token = ""
    if rank == 0:
        token = (folder / "token").read_text()
        (folder / "token").unlink()
    pulse = RankPulse(PulseFile(folder / "pulse", degree), rank, config["heartbeat"])
    pulse.start()
    pulse.mark("loading its commands")
    commands = load_commands(config["commands"])
    device = open_device(devices[rank], rank)
    pulse.mark("joining the group")
    store = dist.FileStore(str(folder / f"store-{config['attempt']}"), degree)
    data, control = join_group(
        device, config["backend"], config["collective_timeout"], store=store, rank=rank, world_size=degree
    )
    pulse.mark("testing the collectives")
    run_self_test(data, rank, degree, device, failed=lambda error: _end(folder, rank, error))
    context = RankContext(rank, degree, device, data, control, pulse)
    port = None
    if rank == 0:
        description = {"devices": devices, "backend": config["backend"], "pid": os.getpid()}
        port = ClientPort(unix_listener(folder / "socket"), token, description)
    pulse.mark("ready")
    pulse.slowest = 0.0
    loop = CommandLoop(
        context,
        commands,
        port,
        keepalive=config["keepalive"],
        error_grace=config["error_grace"],
        folder=folder,
    )
    if port is not None:
        port.start(on_cancel=loop.cancel)
    loop.run()
