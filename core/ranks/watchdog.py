"""Who is to blame: judges from the ranks' signs of life whether one has stopped, hangs, or raised alone.

The launcher judges the ranks of one machine; over several machines every rank judges all, from what they tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from . import heartbeat as life
from .heartbeat import PulseFile


class Judge:
    """Looks at a pulse file. Limits in seconds, as `RankGroup.start` explains them.

    places: where each rank's main thread is, for the error's text; asked once, when ranks hang.
    state_of: a rank's process state as in /proc, where it can be seen.
    """

    def __init__(
        self,
        pulse: PulseFile,
        devices: Sequence[str],
        *,
        step_timeout: float,
        heartbeat_timeout: float,
        error_grace: float,
        places: Callable[[], list[str]] | None = None,
        state_of: Callable[[int], str] | None = None,
    ):
        self.pulse = pulse
        self.devices = devices
        self.step_timeout = step_timeout
        self.heartbeat_timeout = heartbeat_timeout
        self.error_grace = error_grace
        self._places = places
        self._state_of = state_of

    @property
    def tick(self) -> float:
        """How often to look."""
        return min(0.5, self.step_timeout / 10, self.heartbeat_timeout / 10)

    def about(self, rank: int) -> dict[str, Any]:
        """What a rank is and does."""
        slot = rank + 1
        return {
            "rank": rank,
            "device": self.devices[rank],
            "state": int(self.pulse.get(slot, life.STATE)),
            "doing": self.pulse.note(slot),
            "step": int(self.pulse.get(slot, life.STEP)),
        }

    def verdict(self) -> dict[str, Any] | None:
        """The rank that ends the group and why, or None where all is well.

        `raised` is true where the rank raised an exception that the others never learned of.
        """
        return self._stopped() or self._raised() or self._stuck()

    def _stopped(self) -> dict[str, Any] | None:
        now = time.monotonic()
        cancelled = bool(self.pulse.get(0, life.CANCELLED))
        limit = life.silence_limit(self.heartbeat_timeout, cancelled=cancelled)
        for rank in range(len(self.devices)):
            beat = self.pulse.get(rank + 1, life.HEARTBEAT)
            # Before its first beat a rank is importing torch; the client's start timeout bounds that.
            if beat and now - beat > limit:
                state = self._state_of(rank) if self._state_of is not None else ""
                stopped = " (it is stopped by a signal)" if state == "T" else ""
                return {
                    **self.about(rank),
                    "cause": f"has shown no sign of life for {now - beat:.0f} s{stopped}"
                    + (" in a cancelled command" if cancelled else ""),
                }
        return None

    def _states(self) -> list[int]:
        return [int(self.pulse.get(rank + 1, life.STATE)) for rank in range(len(self.devices))]

    def _silence(self) -> float:
        newest = max(self.pulse.get(rank + 1, life.PROGRESS) for rank in range(len(self.devices)))
        return time.monotonic() - newest

    def _raised(self) -> dict[str, Any] | None:
        states = self._states()
        if life.FAILED not in states or self._silence() < self.error_grace:
            return None
        rank = states.index(life.FAILED)
        return {**self.about(rank), "cause": "raised while the other ranks waited for it", "raised": True}

    def _stuck(self) -> dict[str, Any] | None:
        if life.BUSY not in self._states():
            return None
        slowest = max(self.pulse.get(rank + 1, life.SLOWEST) for rank in range(len(self.devices)))
        silent = self._silence()
        if silent < self.step_timeout + slowest:
            return None
        places = self._places() if self._places is not None else [""] * len(self.devices)
        rank = self._laggard(places)
        known = [f"rank {each}: {place}" for each, place in enumerate(places) if place]
        where = f" ({'; '.join(known)})" if known else ""
        return {
            **self.about(rank),
            "cause": f"made no progress for {silent:.0f} s and holds up the group{where}",
        }

    def _laggard(self, places: list[str]) -> int:
        """The rank that is furthest behind; of equals, the first that does not wait in a collective."""

        def behind(rank: int) -> tuple:
            slot = rank + 1
            done = (self.pulse.get(slot, life.COMMAND), self.pulse.get(slot, life.STEP))
            return (*done, "distributed" in places[rank], rank)

        return min(range(len(self.devices)), key=behind)
