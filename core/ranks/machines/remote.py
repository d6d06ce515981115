"""The line to ranks that were started elsewhere, by torchrun: rank 0 tells now and then that it lives."""

from __future__ import annotations

import functools
import socket
import time

from ...errors import RankError
from .. import heartbeat
from ..channel import ChannelError
from ..line import Line
from ..local import call_unix
from .address import parse_address

TIMEOUT = 10.0
GONE = " The rank, its machine or the network between is gone."


class RemoteLine(Line):
    """A line to ``host:port`` or ``unix:/path``."""

    def __init__(self, address: str, token: str, timeout: float):
        super().__init__([], None)
        self._heard = time.monotonic()
        self._silence = 0.0  # how long rank 0 may be silent; 0 where it does not promise to tell
        try:
            channel, group = self.call(functools.partial(dial, address), token, timeout)
        except (OSError, ChannelError) as error:
            self.close()
            raise RankError(
                f"The rank group at {address} cannot be used: {error}. "
                "Check the address, the token, and that the ranks run."
            ) from None
        self.devices = [str(name) for name in group.get("devices") or ["unknown"]]
        self._silence = float(group.get("heartbeat_timeout") or 0.0)
        self.log_dir = str(group["logs"]) if group.get("logs") else None
        self.open(channel)

    def heard(self) -> None:
        self._heard = time.monotonic()

    def look(self) -> RankError | None:
        silent = time.monotonic() - self._heard
        if not self._silence or silent <= heartbeat.silence_limit(self._silence, cancelled=self._cancelled):
            return None
        return self.error(f"Rank 0 ({self.devices[0]}) has shown no sign of life for {silent:.0f} s.", 0)

    def connection_lost(self, error: ChannelError) -> None:
        self.fail(self.error(f"The connection to rank 0 ({self.devices[0]}) ended: {error}.{GONE}", 0))


def dial(address: str, timeout: float) -> socket.socket:
    """A connected socket to ``host:port`` or ``unix:/path``."""
    if address.startswith("unix:"):
        return call_unix(address.removeprefix("unix:"), timeout)
    sock = socket.create_connection(parse_address(address.removeprefix("tcp://")), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
