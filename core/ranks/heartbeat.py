"""Signs of life: a mapped file in which every rank and the launcher write what they are doing.

One slot of 128 bytes per process, the launcher's first. A slot holds doubles (each written by one aligned store)
and a short note. Times are `time.monotonic()`, which all processes of one machine share.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

SLOT = 128
NOTE = 56
NOTE_BYTES = SLOT - NOTE

HEARTBEAT, COMMAND, STEP, PROGRESS, STATE, SLOWEST, RESERVE = range(7)
# In the launcher's slot. Written by rank 0: the command that was cancelled.
STOP = 1
# By the client, since a rank 0 that is stopped hears nothing: whether it awaits the end of a command that it cancelled.
CANCELLED = 2
STARTING, IDLE, BUSY, FAILED = 0, 1, 2, 3

# What part of the heartbeat's time a rank may be silent in a cancelled command, and seconds that are not too long then.
CANCELLED_PART = 6
SILENCE_FLOOR = 5.0

# How a rank ends that has nothing to tell but this: its peers are gone, or the start-up test of nccl gave wrong sums.
EXIT_PEER_LOST = 86
EXIT_SELF_TEST = 87


def silence_limit(heartbeat_timeout: float, *, cancelled: bool) -> float:
    """How many seconds a process may show no sign of life.

    In a cancelled command less than otherwise: nobody wants its result, and the next command waits for its end. One that
    only computes long goes on showing signs of life and is waited for.
    """
    if not cancelled:
        return heartbeat_timeout
    return min(heartbeat_timeout, max(SILENCE_FLOOR, heartbeat_timeout / CANCELLED_PART))


class HeartbeatFile:
    """The mapped file of a group of `degree` ranks; without a path it is memory of this process alone."""

    def __init__(self, path: Path | None, degree: int, *, create: bool = False):
        size = SLOT * (degree + 1)
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            if create:
                path.write_bytes(bytes(size))
                path.chmod(0o600)
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("d")
        self._bytes = memoryview(self._map)
        self.degree = degree

    def get(self, slot: int, field: int) -> float:
        return self._numbers[slot * (SLOT // 8) + field]

    def put(self, slot: int, field: int, value: float) -> None:
        self._numbers[slot * (SLOT // 8) + field] = value

    def note(self, slot: int) -> str:
        start = slot * SLOT + NOTE
        return bytes(self._bytes[start : start + NOTE_BYTES]).split(b"\0")[0].decode(errors="replace")

    def set_note(self, slot: int, text: str) -> None:
        start = slot * SLOT + NOTE
        raw = text.encode(errors="replace")[: NOTE_BYTES - 1]
        self._bytes[start : start + NOTE_BYTES] = raw.ljust(NOTE_BYTES, b"\0")


class RankHeartbeat:
    """What one rank writes. Without a file (several machines) it only counts."""

    def __init__(self, file: HeartbeatFile | None, rank: int, heartbeat: float):
        self._file = file
        self._slot = rank + 1
        self._period = heartbeat
        self._last = time.monotonic()
        self.slowest = 0.0
        self.state = STARTING
        self.steps = 0
        self.command = 0
        self._told_to_stop = 0
        self.note = ""
        self.progress_at = self._last

    def start(self) -> None:
        """Begin to beat, in a thread of its own."""
        self._put(PROGRESS, self._last)
        self._put(HEARTBEAT, self._last)
        threading.Thread(target=self._beat, name="comfy_tp heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._put(HEARTBEAT, time.monotonic())
            time.sleep(self._period)

    def _put(self, field: int, value: float) -> None:
        if self._file is not None:
            self._file.put(self._slot, field, value)

    def begin(self, command: int, note: str) -> None:
        """A command starts."""
        self.steps = 0
        self.command = command
        self._last = self.progress_at = time.monotonic()
        self._put(PROGRESS, self._last)
        self._put(COMMAND, command)
        self._put(STEP, 0)
        self.set_state(BUSY)
        self.note = note
        if self._file is not None:
            self._file.set_note(self._slot, note)

    def progress(self, note: str | None = None) -> None:
        """The command made progress."""
        now = time.monotonic()
        self.slowest = max(self.slowest, now - self._last)
        self._last = self.progress_at = now
        self.steps += 1
        self._put(SLOWEST, self.slowest)
        self._put(PROGRESS, now)
        self._put(STEP, self.steps)
        if note is not None:
            self.note = note
            if self._file is not None:
                self._file.set_note(self._slot, note)

    def tell_to_stop(self, command: int) -> None:
        """For rank 0: let `told_to_stop` be true on all ranks of this machine, and `cancelled` here."""
        self._told_to_stop = command
        if self._file is not None:
            self._file.put(0, STOP, command)

    @property
    def cancelled(self) -> bool:
        """For rank 0: whether it is in a command that was cancelled."""
        return self.state != IDLE and 0 < self.command == self._told_to_stop

    def told_to_stop(self) -> bool:
        """Whether this command was cancelled, or another rank has failed in it."""
        if self._file is None:
            return False
        if self._file.get(0, STOP) == self.command:
            return True
        return any(
            self._file.get(slot, STATE) == FAILED and self._file.get(slot, COMMAND) == self.command
            for slot in range(1, self._file.degree + 1)
        )

    def set_state(self, state: int) -> None:
        self.state = state
        self._put(STATE, state)

    def set_reserve(self, size: int) -> None:
        """Bytes of its device that this process holds and does not use at the moment."""
        self._put(RESERVE, size)
