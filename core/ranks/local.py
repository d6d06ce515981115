"""The line to ranks on this machine: it starts their launcher, hears what that tells, and ends them."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ..errors import RankError
from . import heartbeat
from .channel import ChannelError
from .config import GroupConfig
from .failure import rebuild
from .heartbeat import HeartbeatFile
from .line import POLL, Clock, Line
from .logs import LAUNCHER_LOG, open_log, tail
from .process import exit_cause, python
from .watchdog import Verdict

log = logging.getLogger("comfy_tp.group")

CAUSE_WAIT = 4.0
END_WAIT = 5.0
CONNECT_TIMEOUT = 10.0
NEXT_RUN = " The rank group was ended; the next run starts a new one."


class LocalLine(Line):
    """A line to a group whose launcher is a child of this process."""

    def __init__(self, config: GroupConfig):
        super().__init__(config.devices, config.log_dir)
        self._config = replace(config, token=secrets.token_hex(32))
        self._folder: Path | None = None
        self._signs: HeartbeatFile | None = None
        with open_log(Path(config.log_dir) / LAUNCHER_LOG) as errors:
            self._process = subprocess.Popen(
                python("comfy_tp launcher", config.log_dir),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                bufsize=0,
            )
        threading.Thread(target=self._listen, name="comfy_tp launcher", daemon=True).start()

    def start(self, deadline: float, poll: Callable[[], None] | None) -> None:
        """Let the launcher start the ranks, and connect to them before the `deadline`."""
        try:
            cast(Any, self._process.stdin).write(self._config.written().encode() + b"\n")
        except OSError:
            log.debug("the launcher ended at once; its listener tells why")
        clock = Clock("start", poll)
        while True:
            self.await_failure(min(clock.slice(), POLL))
            self.check()
            clock.tick()
            if self._folder is not None and (self._folder / "socket").exists():
                dial = functools.partial(call_unix, str(self._folder / "socket"))
                try:
                    channel, _ = self.call(dial, self._config.token, CONNECT_TIMEOUT)
                    return self.open(channel)
                except (OSError, ChannelError) as error:
                    log.debug("not connected yet: %s", error)
            if time.monotonic() > deadline:
                raise self.error(
                    f"The ranks on {', '.join(self.devices)} did not start in time{self._doing()}."
                )

    def _doing(self) -> str:
        """What each rank that starts is doing, in brackets."""
        if self._signs is None:
            return " (their launcher is starting)"
        notes = (self._signs.note(rank + 1) or "starting Python" for rank in range(len(self.devices)))
        return " (" + ", ".join(f"rank {rank}: {note}" for rank, note in enumerate(notes)) + ")"

    @property
    def reserves(self) -> list[int]:
        if self._signs is None:
            return super().reserves
        return [int(self._signs.get(rank + 1, heartbeat.RESERVE)) for rank in range(len(self.devices))]

    def look(self) -> RankError | None:
        # The launcher watches the ranks; who watches the launcher is whoever waits here.
        if self._signs is None:
            return None
        silent = time.monotonic() - self._signs.get(0, heartbeat.HEARTBEAT)
        limit = heartbeat.silence_limit(self._config.heartbeat_timeout, cancelled=self._cancelled)
        if silent <= limit + 2.0:
            return None
        return self.error(f"The launcher of the ranks has not moved for {silent:.0f} s.")

    def note_cancelled(self, cancelled: bool) -> None:
        super().note_cancelled(cancelled)
        if self._signs is not None:
            self._signs.put(0, heartbeat.CANCELLED, cancelled)

    def connection_lost(self, error: ChannelError) -> None:
        # The launcher knows the cause; its word comes a moment later.
        self.await_failure(CAUSE_WAIT)
        self.fail(self.error(f"The connection to rank 0 ({self.devices[0]}) ended: {error}.", 0))

    def _listen(self) -> None:
        """Read what the launcher tells, until it ends."""
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            try:
                told = json.loads(raw)
            except ValueError:
                continue
            event = told.pop("event", None)
            if event == "folder":
                self._folder = Path(told["path"])
                with contextlib.suppress(FileNotFoundError):  # the start was given up, and the folder is gone
                    self._signs = HeartbeatFile(self._folder / "heartbeats", len(self.devices))
            elif event == "ranks":
                self.pids = told["pids"]
            elif event == "note":
                self.notes.append(told["text"])
                log.warning("%s", told["text"])
            elif event == "failed":
                self.fail(self._explain(Verdict(**told)))
        self._process.stdout.close()
        if not self.closed and self.failure is None:
            try:
                cause = exit_cause(self._process.wait(END_WAIT))
            except subprocess.TimeoutExpired:
                cause = "closed its output"
            end = tail(Path(self.log_dir or "") / LAUNCHER_LOG, 1000)
            self.fail(self.error(f"The launcher of the ranks {cause}.\n{end}"))

    def _explain(self, verdict: Verdict) -> RankError:
        """The error for what the launcher reports: who, where, why, and the log."""
        rank = verdict.rank
        if rank is None:
            return self.error(f"The rank group failed: {verdict.cause}")
        who = f"rank {rank} on {verdict.device}"
        started = verdict.state != heartbeat.STARTING
        if verdict.error:
            described = {**verdict.error, "rank": rank, "device": verdict.device}
            if started:
                return self.ended(described, NEXT_RUN)
            return cast(RankError, rebuild(described, log_dir=self.log_dir, note=f" ({who} did not start)"))
        during = ""
        if not started:
            during = f" while starting ({verdict.doing or 'importing torch'})"
        elif verdict.state in (heartbeat.BUSY, heartbeat.FAILED):
            during = f" during {verdict.doing!r} (step {verdict.step})"
        text = f"Rank {rank} ({verdict.device}, pid {verdict.pid}) {verdict.cause}{during}."
        log_tail = f"\n{verdict.log_tail}" if verdict.log_tail else ""
        return self.error(text + (NEXT_RUN if started else "") + log_tail, rank)

    def end(self) -> None:
        """End the launcher by the end of its stdin, the ranks' lifetime, and remove what it may leave."""
        super().end()
        with self._close_lock:
            process = self._process
            assert process.stdin is not None
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


def call_unix(path: str, timeout: float) -> socket.socket:
    """A connected socket to the one at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock
