"""How the ranks of several machines watch one another: their signs of life travel through torchrun's store.

Every rank judges all of them, rank 0 too, so that no machine goes on with a group that is broken on another. Who comes
to a verdict, loses a connection or is told to end asks all: each rank answers, whoever has a verdict tells it,
and who does not answer is gone. A rank that is stopped is ended by its `Guard`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import heartbeat
from ..config import Limits
from ..heartbeat import HeartbeatFile, RankHeartbeat
from ..watchdog import Verdict, Watchdog

log = logging.getLogger("comfy_tp.watch")

# How often a rank asks whether they are asked, in seconds.
TICK = 0.2
# How long the answers are awaited.
ANSWER_WAIT = 3.0
# How much later than the judges the guard finds a rank silent: they can say which one it is.
GUARD_LATER = 2.0
ASKED = "asked"

GONE = " It was killed, perhaps for want of memory, or its machine cannot be reached."
ENDED = "was told to end by SIGTERM, as torchrun does when it is ended or another of its ranks has ended"


def main_frame() -> str:
    """`file:line in function` of this process's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


class Guard:
    """A process that kills this one when `beat` has not been called for `seconds`."""

    def __init__(self, seconds: float):
        script = Path(__file__).absolute().with_name("guard.py")
        # Of a session of its own: torchrun ends a rank with everything in the rank's.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(seconds)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def beat(self) -> None:
        # A guard that is gone or stopped guards no more, and harms nobody.
        with suppress(OSError):
            os.write(self._pipe, b"\0")


class StoreHeartbeat:
    """Carries the ranks' signs of life through the rendezvous store, in a thread of every rank.

    Ages travel, not times, since machines have different clocks. Each rank mirrors them in a file of heartbeats of its
    own memory, and calls `blame` once with the verdict, which must end the process. Whatever keeps the thread from going
    on is a verdict too: a group that nobody watches ends.
    """

    def __init__(
        self, store: dist.Store, own: RankHeartbeat, rank: int, devices: Sequence[str], limits: Limits
    ):
        self._store = store
        self._own = own
        self._rank = rank
        self._mirror = HeartbeatFile(None, len(devices))
        self._watchdog = Watchdog(
            self._mirror,
            devices,
            limits,
            frames=lambda: [self._frames.get(each, "") for each in range(len(devices))],
        )
        self._frames: dict[int, str] = {}
        self._period = max(0.1, min(1.0, limits.heartbeat_timeout / 8, limits.step_timeout / 8))
        self._answer_wait = min(ANSWER_WAIT, limits.error_grace, limits.heartbeat_timeout)
        self._beats: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._guard: Guard | None = None
        self._rung = False
        self._lost = ""
        self._verdict: Verdict | None = None
        # Rung by this process's main thread, and by its signals: see `signal.set_wakeup_fd`.
        self._ear, self.bell = socket.socketpair()
        self.bell.setblocking(False)
        self.raised: dict[str, Any] | None = None

    def start(self, blame: Callable[[Verdict], Any], guard: Guard | None = None) -> None:
        self._guard = guard
        self._thread = threading.Thread(
            target=self._run, args=(blame,), name="comfy_tp heartbeat", daemon=True
        )
        self._thread.start()

    def lost_a_peer(self, why: str) -> None:
        """For the main thread: the group is broken. Returns only where `blame` has not ended the process in time."""
        self._lost = why
        self._ring()

    def ended_by(self, error: dict[str, Any]) -> None:
        """For the main thread: a described error has ended this rank. Returns as `lost_a_peer` does."""
        self._verdict = self._watchdog.blame(self._rank, "ended", error=error)
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):
            self.bell.send(b"\0")
        if self._thread is not None:
            self._thread.join(self._answer_wait + self._watchdog.limits.heartbeat_timeout)

    def _run(self, blame: Callable[[Verdict], Any]) -> None:
        try:
            verdict = self._ask_all(self._watch())
        except Exception as error:
            gone = isinstance(error, RuntimeError)
            why = f"torchrun's store is gone ({error})" if gone else f"{type(error).__name__}: {error}"
            log.error("the signs of life end", exc_info=None if gone else error)
            verdict = self._watchdog.blame(self._rank, f"cannot watch the ranks any more: {why}")
        blame(verdict)

    def _watch(self) -> Verdict | None:
        """Until there is a verdict, or everybody is asked."""
        beat = 0
        while True:
            beat += 1
            self._write(beat)
            verdict = self._read()
            if verdict is not None:
                return verdict
            if self._guard is not None:
                self._guard.beat()
            due = time.monotonic() + self._period
            while (left := due - time.monotonic()) > 0:
                self._rung = bool(select.select([self._ear], [], [], min(TICK, left))[0])
                if self._rung or self._store.check([ASKED]):
                    return self._verdict

    def _write(self, beat: int) -> None:
        own = self._own
        said = {
            "beat": beat,
            "command": own.command,
            "step": own.steps,
            "age": time.monotonic() - own.progress_at,
            "state": own.state,
            "slowest": own.slowest,
            "note": own.note,
            "frame": main_frame() if own.state == heartbeat.BUSY else "",
            "raised": self.raised if own.state == heartbeat.FAILED else None,
        }
        self._store.set(f"heartbeat/{self._rank}", json.dumps(said))

    def _told(self, key: str) -> dict[int, dict[str, Any]]:
        """What each rank has said under this key, if it has."""
        keys = {rank: f"{key}/{rank}" for rank in range(self._mirror.degree)}
        return {
            rank: json.loads(self._store.get(each))
            for rank, each in keys.items()
            if self._store.check([each])
        }

    def _read(self) -> Verdict | None:
        raised = {}
        for rank, said in self._told("heartbeat").items():
            slot = rank + 1
            self._frames[rank] = said["frame"]
            raised[rank] = said["raised"]
            if said["beat"] != self._beats.get(rank):
                now = time.monotonic()
                self._beats[rank] = said["beat"]
                self._mirror.put(slot, heartbeat.HEARTBEAT, now)
                self._mirror.put(slot, heartbeat.PROGRESS, now - said["age"])
            self._mirror.put(slot, heartbeat.COMMAND, said["command"])
            self._mirror.put(slot, heartbeat.STEP, said["step"])
            self._mirror.put(slot, heartbeat.STATE, said["state"])
            self._mirror.put(slot, heartbeat.SLOWEST, said["slowest"])
            self._mirror.set_note(slot, said["note"])
        self._mirror.put(0, heartbeat.CANCELLED, self._own.cancelled)
        verdict = self._watchdog.verdict()
        if verdict is not None and verdict.raised and verdict.rank is not None:
            verdict.error = raised.get(verdict.rank)
        return verdict

    def _ask_all(self, verdict: Verdict | None) -> Verdict:
        """Answer, with the verdict if there is one, hear the other ranks' answers, and find who is to blame."""
        answer = {
            "verdict": asdict(verdict) if verdict is not None else None,
            "lost": self._lost,
            "ended": self._rung and not self._lost,
            "raised": self.raised if self._own.state == heartbeat.FAILED else None,
        }
        self._store.set(f"answer/{self._rank}", json.dumps(answer))
        self._store.set(ASKED, "")
        deadline = time.monotonic() + self._answer_wait
        while True:
            answers = self._told("answer")
            verdicts = [each["verdict"] for each in answers.values() if each["verdict"]]
            if verdicts:
                return Verdict(**verdicts[0])
            if len(answers) == self._mirror.degree or time.monotonic() > deadline:
                return self._to_blame(answers)
            time.sleep(TICK / 4)

    def _to_blame(self, answers: dict[int, dict[str, Any]]) -> Verdict:
        """The verdict from the answers, none of which holds one."""
        gone = [rank for rank in range(self._mirror.degree) if rank not in answers]
        if gone:
            others = ", ".join(f"rank {rank} ({self._watchdog.devices[rank]})" for rank in gone[1:])
            together = f", and so is {others}," if others else ""
            verdict = self._watchdog.blame(gone[0], f"is gone{together}", guess=GONE)
            # What it last said may be a command ago; this rank is in the same one as those that are gone.
            return replace(verdict, state=self._own.state, doing=self._own.note)
        for rank, answer in answers.items():
            if answer["raised"]:
                return self._watchdog.blame(rank, "raised", error=answer["raised"])
        for rank, answer in answers.items():
            if answer["ended"]:
                return self._watchdog.blame(rank, ENDED)
        heard = "; ".join(
            f"rank {rank}: {answer['lost']}" for rank, answer in answers.items() if answer["lost"]
        )
        return Verdict(f"lost their connection, and which of them failed is unknown ({heard})")
