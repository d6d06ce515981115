"""Who is to blame: finds from the ranks' heartbeats whether one has stopped, hangs, or raised alone.

The launcher judges the ranks of one machine; over several machines every rank judges all, from what they tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import heartbeat
from .config import Limits
from .heartbeat import HeartbeatFile


@dataclass
class Verdict:
    """Why a group ends, and the rank that is to blame, if that is known; with what it was doing.

    raised: it raised an exception that the others never learned of; `error` is that exception, described.
    guess: what else can be said of the cause. self_test: it failed the start-up test, which may pass without P2P.
    """

    cause: str
    rank: int | None = None
    device: str | None = None
    state: int = heartbeat.BUSY
    doing: str = ""
    step: int = 0
    pid: int | None = None
    raised: bool = False
    error: dict[str, Any] | None = None
    guess: str = ""
    log_tail: str = ""
    self_test: bool = False


class Watchdog:
    """Looks at the file of heartbeats.

    frames: where each rank's main thread is, for the error's text; asked once, when ranks hang.
    state_of: a rank's process state as in /proc, where it can be seen.
    """

    def __init__(
        self,
        signs: HeartbeatFile,
        devices: Sequence[str],
        limits: Limits,
        *,
        frames: Callable[[], list[str]] | None = None,
        state_of: Callable[[int], str] | None = None,
    ):
        self.signs = signs
        self.devices = devices
        self.limits = limits
        self._frames = frames
        self._state_of = state_of

    @property
    def tick(self) -> float:
        """How often to look."""
        return min(0.5, self.limits.step_timeout / 10, self.limits.heartbeat_timeout / 10)

    def blame(self, rank: int, cause: str, **more: Any) -> Verdict:
        """The verdict on a rank, with what it does at the moment."""
        slot = rank + 1
        return Verdict(
            cause,
            rank,
            self.devices[rank],
            int(self.signs.get(slot, heartbeat.STATE)),
            self.signs.note(slot),
            int(self.signs.get(slot, heartbeat.STEP)),
            **more,
        )

    def verdict(self) -> Verdict | None:
        """The rank that ends the group and why, or None where all is well."""
        return self._stopped() or self._raised() or self._stuck()

    def _stopped(self) -> Verdict | None:
        now = time.monotonic()
        cancelled = bool(self.signs.get(0, heartbeat.CANCELLED))
        limit = heartbeat.silence_limit(self.limits.heartbeat_timeout, cancelled=cancelled)
        for rank in range(len(self.devices)):
            beat = self.signs.get(rank + 1, heartbeat.HEARTBEAT)
            # Before its first beat a rank is importing torch; the client's start timeout bounds that.
            if beat and now - beat > limit:
                state = self._state_of(rank) if self._state_of is not None else ""
                stopped = " (it is stopped by a signal)" if state == "T" else ""
                during = " in a cancelled command" if cancelled else ""
                return self.blame(rank, f"has shown no sign of life for {now - beat:.0f} s{stopped}{during}")
        return None

    def _states(self) -> list[int]:
        return [int(self.signs.get(rank + 1, heartbeat.STATE)) for rank in range(len(self.devices))]

    def _silence(self) -> float:
        newest = max(self.signs.get(rank + 1, heartbeat.PROGRESS) for rank in range(len(self.devices)))
        return time.monotonic() - newest

    def _raised(self) -> Verdict | None:
        states = self._states()
        if heartbeat.FAILED not in states or self._silence() < self.limits.error_grace:
            return None
        rank = states.index(heartbeat.FAILED)
        return self.blame(rank, "raised while the other ranks waited for it", raised=True)

    def _stuck(self) -> Verdict | None:
        if heartbeat.BUSY not in self._states():
            return None
        slowest = max(self.signs.get(rank + 1, heartbeat.SLOWEST) for rank in range(len(self.devices)))
        silent = self._silence()
        if silent < self.limits.step_timeout + slowest:
            return None
        frames = self._frames() if self._frames is not None else [""] * len(self.devices)
        rank = self._laggard(frames)
        known = [f"rank {each}: {frame}" for each, frame in enumerate(frames) if frame]
        where = f" ({'; '.join(known)})" if known else ""
        return self.blame(rank, f"made no progress for {silent:.0f} s and holds up the group{where}")

    def _laggard(self, frames: list[str]) -> int:
        """The rank that is furthest behind; of equals, the first that does not wait in a collective."""

        def behind(rank: int) -> tuple:
            slot = rank + 1
            done = (self.signs.get(slot, heartbeat.COMMAND), self.signs.get(slot, heartbeat.STEP))
            return (*done, "distributed" in frames[rank], rank)

        return min(range(len(self.devices)), key=behind)
