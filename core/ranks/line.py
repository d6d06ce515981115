"""The line to a group of ranks: the connection to rank 0, and the requests that cross it, one at a time.

A line has threads of its own: one takes every frame as it comes. They hold the line, never the `RankGroup`, so that
dropping that ends it. `local` and `machines.remote` say how the ranks are reached, watched and ended.
"""

from __future__ import annotations

import collections
import copy
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import RankError
from . import channel as wire
from .channel import Channel, ChannelClosed, ChannelError, Frame
from .failure import ENDS, rebuild

log = logging.getLogger("comfy_tp.group")

POLL = 0.05
WATCH = 0.5  # how often somebody looks after a command that nobody waits for
LOOK = 1.0  # how often at the ranks' heartbeats
SENT_AT_ONCE = 1 << 16  # bytes that the system takes at once, whether rank 0 reads or not


class Clock:
    """The pace of one request: when to poll, and when its time is over."""

    def __init__(self, command: str, poll: Callable[[], None] | None = None, timeout: float | None = None):
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


class Line:
    """What lines to ranks here and elsewhere share.

    devices: one name per rank. pids: of the ranks' processes, where they run here. notes: what the user should know
    about the start. failure: why the group is dead. busy: whether a request runs.
    """

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
        self._channel: Channel | None = None
        self._next_look = 0.0
        self._changed = threading.Condition()
        self._frames: collections.deque[Frame] = collections.deque()
        self._last = 0
        self._answered = 0
        self._unanswered: int | None = None
        self._cancelled = False  # whether the command that runs on the ranks is
        self._close_lock = threading.Lock()

    # What the two kinds of line do in their own ways

    @property
    def reserves(self) -> list[int]:
        """Bytes of its device that each rank holds for its next command, as far as this machine knows."""
        return [0] * len(self.devices)

    def look(self) -> RankError | None:
        """What is wrong with whoever watches the ranks; asked once a second while somebody waits for them."""
        return None

    def connection_lost(self, error: ChannelError) -> None:
        """The connection to rank 0 ended; `fail` with the best cause there is."""
        raise NotImplementedError

    def note_cancelled(self, cancelled: bool) -> None:
        """The client awaits the end of a command that it cancelled, or does so no more."""
        self._cancelled = cancelled

    def end(self) -> None:
        """Give up the connection, and what else this process holds of the group."""
        if self._channel is not None:
            self._channel.close()

    # Connecting

    @staticmethod
    def call(
        sock: Callable[[float], socket.socket], token: str, timeout: float
    ) -> tuple[Channel, dict[str, Any]]:
        """Connect through what `sock(timeout)` opens, and prove that we know the token; with the group's description.

        A crowded port puts out whoever has proven nothing yet; then we call again. Raises OSError or ChannelError.
        """
        deadline = time.monotonic() + timeout
        while True:
            channel = Channel(sock(max(POLL, deadline - time.monotonic())))
            try:
                return channel, wire.introduce(channel, token, deadline - time.monotonic())
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

    def open(self, channel: Channel) -> None:
        """Begin to read; from here on there may be requests."""
        self._channel = channel
        self.heard()
        threading.Thread(target=self._read, args=(channel,), name="comfy_tp reader", daemon=True).start()

    def heard(self) -> None:
        """Rank 0 has sent something."""

    def _read(self, channel: Channel) -> None:
        """Take every frame as it comes, so that rank 0 never waits for us."""
        try:
            while True:
                frame = channel.receive()
                self.heard()
                if frame.kind == wire.ERROR and frame.header.get(ENDS):
                    self.fail(self.ended(frame.header, " The rank group was ended."))
                    return
                with self._changed:
                    if frame.kind in (wire.REPLY, wire.ERROR):
                        self._answered = frame.request
                        self.note_cancelled(False)
                        if frame.request == self._unanswered:
                            self._unanswered = None
                    if frame.request == self._last and self.busy:
                        self._frames.append(frame)
                    self._changed.notify_all()
        except ChannelError as error:
            if not self.closed:
                self.connection_lost(error)

    # Failing

    def ended(self, described: dict[str, Any], note: str) -> RankError:
        """The described error that ended the group, as a RankError also where it was a refusal."""
        error = rebuild(described, log_dir=self.log_dir, note=note)
        if isinstance(error, RankError):
            return error
        return RankError(str(error), rank=described.get("rank"), device=described.get("device"))

    def error(self, text: str, rank: int | None = None) -> RankError:
        """An error with this text that names the logs."""
        logs = f"\nLogs: {self.log_dir}" if self.log_dir else ""
        return RankError(f"{text}{logs}", rank=rank, device=None if rank is None else self.devices[rank])

    def fail(self, error: RankError) -> None:
        """The group is dead: whoever waits gets `error`, and what is left of it is cleaned up."""
        with self._changed:
            if self.failure is None and not self.closed:
                self.failure = error
                log.error("%s", error)
            self._changed.notify_all()
        self.end()

    def await_failure(self, seconds: float) -> None:
        """Wait until the group has failed or was closed, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self.closed, seconds)

    def check(self) -> None:
        """Raise where the group cannot take a request."""
        if self.failure is not None:
            # Not itself: a raised exception keeps the frames that it passed, and with them the caller's model.
            raise copy.copy(self.failure)
        if self.closed:
            raise RankError("The rank group was closed.")

    # Requests; one thread at a time

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
            aside(self._send_command, number, message)

    def _send_command(self, number: int, message: wire.Packed) -> None:
        assert self._channel is not None
        try:
            self._channel.send(wire.COMMAND, number, message)
        except ChannelError as error:
            if not self.closed:
                self.connection_lost(error)

    def next_frame(self, timeout: float) -> Frame | None:
        """The next frame, or None after `timeout`; raises where the group failed."""
        with self._changed:
            if not self._frames and self.failure is None and not self.closed:
                self._changed.wait(timeout)
            if self._frames:
                return self._frames.popleft()
        self._check_life()
        return None

    def _check_life(self) -> None:
        """Whoever waits for the ranks watches those who watch them."""
        self.check()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK
            if wrong := self.look():
                self.fail(wrong)
                self.check()

    def leave(self, number: int) -> None:
        """The request ends here; if it was not answered, tell the ranks and remember."""
        with self._changed:
            self.busy = False
            self._frames.clear()
            left = self._answered != number and self.failure is None and not self.closed
            if left:
                self._unanswered = number
        if left:
            aside(self._send_cancel, number)
            aside(self._watch_left)

    def _watch_left(self) -> None:
        """Watch over a request that was left until it is answered: no caller waits who would notice a silence."""
        try:
            self.settle(None)
        except RankError as error:
            log.debug("a request that was left ended with its group: %s", error)

    def settle(self, clock: Clock | None) -> None:
        """Wait until the ranks have ended a request that was left; the group's liveness bounds it."""
        while True:
            with self._changed:
                if self._unanswered is None:
                    return
                if self.failure is None and not self.closed:
                    self._changed.wait(WATCH if clock is None else min(clock.slice(), POLL))
            self._check_life()
            if clock is not None:
                clock.tick()

    def cancel(self) -> None:
        """Cancel the request that runs, from any thread."""
        with self._changed:
            number = self._last if self.busy else None
        if number is not None:
            self._send_cancel(number)

    def _send_cancel(self, number: int) -> None:
        with self._changed:
            if self._answered >= number:
                return
            self.note_cancelled(True)
        if self._channel is not None:
            try:
                self._channel.send(wire.CANCEL, number)
            except ChannelError:
                log.debug("the cancelled request's group is gone")

    def close(self) -> None:
        """End everything; from the process that started it alone."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self.end()


def aside(work: Callable[..., None], *arguments: Any) -> None:
    """Do in a thread of its own what may wait for rank 0."""
    threading.Thread(target=work, args=arguments, name="comfy_tp aside", daemon=True).start()
