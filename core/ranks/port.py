"""Rank 0's side of the channel: it listens, admits one client that knows the token, and reads its frames.

A stranger costs a thread for a few seconds and nothing else; at most `STRANGERS` of them are heard at once. Nobody is
refused because they are silent: the next one waits until one leaves, or until the oldest has been heard for
`HEARD_AT_LEAST` seconds and is put out.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import channel as wire
from .channel import Channel, ChannelClosed, ChannelError, Frame

log = logging.getLogger("comfy_tp.port")

STRANGERS = 16
# Many round trips of the handshake.
HEARD_AT_LEAST = 0.25
# Strangers that wait in the system's queue until they are heard.
BACKLOG = 128
WAITING_COMMANDS = 8
# Above every request's number: a client that left wants none of its answers.
CLIENT_LEFT = 1 << 64


@dataclass
class Order:
    """A command and the client it came from."""

    client: Client
    frame: Frame


class Client:
    """The admitted client: where answers go, and which of its requests it no longer wants."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.welcome = False
        self._cancelled_up_to = -1

    def cancel(self, request: int) -> None:
        self._cancelled_up_to = max(self._cancelled_up_to, request)

    def wants(self, request: int) -> bool:
        """Whether the client is there and has not cancelled the request (requests are numbered upwards)."""
        return request > self._cancelled_up_to and not self.channel.closed

    def send(
        self,
        kind: int,
        request: int,
        message: wire.Packed | None = None,
        *,
        header: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Send if the client is still there; a client that left misses nothing it wants."""
        if self.channel.closed:
            return
        try:
            self.channel.send(kind, request, message, header=header, tensors=tensors)
        except ChannelError as error:
            log.warning("the client is gone: %s", error)
            self.channel.close()


class ClientPort:
    """Listens on a bound socket and hands on the commands of the one admitted client."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        description: dict[str, Any],
        *,
        handshake_timeout: float = 5.0,
    ):
        self._listener = listener
        self._token = token
        self._description = description
        self._handshake_timeout = handshake_timeout
        self._orders: queue.Queue[Order] = queue.Queue(WAITING_COMMANDS)
        self._strangers: dict[Channel, float] = {}  # since when each is heard, the oldest first
        self._stranger_left = threading.Condition()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False

    def start(self, on_cancel: Callable[[int], None]) -> None:
        """Begin to listen. `on_cancel(request)` is called in the reader's thread: requests up to that one."""
        self._on_cancel = on_cancel
        self._listener.settimeout(wire.WAKE)
        self._listener.listen(BACKLOG)
        threading.Thread(target=self._accept, name="comfy_tp port", daemon=True).start()
        if self._description.get("beat"):
            threading.Thread(target=self._beat, name="comfy_tp beat", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        with self._lock:
            if self._client is not None:
                self._client.channel.close()

    @property
    def has_client(self) -> bool:
        """Whether a client is connected."""
        with self._lock:
            return self._client is not None and not self._client.channel.closed

    def next_order(self, timeout: float) -> Order | None:
        """The next command, or None after `timeout` seconds."""
        try:
            return self._orders.get(timeout=timeout)
        except queue.Empty:
            return None

    def _beat(self) -> None:
        while not self._closed:
            time.sleep(self._description["beat"])
            with self._lock:
                client = self._client if self._client is not None and self._client.welcome else None
            if client is not None:
                client.send(wire.BEAT, 0)

    def tell(self, request: int, header: dict[str, Any]) -> None:
        """Send an error to the present client, from any thread."""
        with self._lock:
            client = self._client
        if client is not None and client.welcome:
            client.send(wire.ERROR, request, header=header)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed:
                    return
                log.warning("accept failed: %s", error)
                time.sleep(wire.WAKE)
                continue
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            channel = Channel(sock)
            self._make_room_for(channel)
            threading.Thread(target=self._meet, args=(channel,), name="comfy_tp client", daemon=True).start()

    def _make_room_for(self, stranger: Channel) -> None:
        with self._stranger_left:
            while len(self._strangers) >= STRANGERS:
                oldest, since = next(iter(self._strangers.items()))
                left = since + HEARD_AT_LEAST - time.monotonic()
                if left > 0:
                    self._stranger_left.wait(left)
                else:
                    del self._strangers[oldest]
                    oldest.close()
            self._strangers[stranger] = time.monotonic()

    def _meet(self, channel: Channel) -> None:
        client = None
        try:
            try:
                proof = wire.admit(channel, self._token, self._handshake_timeout)
                client = self._take_place(channel)
                if client is None:
                    channel.send(wire.REFUSED, 0, header={"reason": "it already serves another client"})
                    raise ChannelError("a second client")
                wire.welcome(channel, proof, self._description)
                client.welcome = True
            finally:
                with self._stranger_left:
                    self._strangers.pop(channel, None)
                    self._stranger_left.notify_all()
            self._read(client)
        except ChannelClosed as error:
            log.info("connection ended: %s", error)
        except ChannelError as error:
            log.warning("connection refused or cut: %s", error)
        finally:
            channel.close()
            if client is not None:
                client.cancel(CLIENT_LEFT)
                self._on_cancel(CLIENT_LEFT)
                with self._lock:
                    if self._client is client:
                        self._client = None

    def _take_place(self, channel: Channel) -> Client | None:
        with self._lock:
            if self._client is not None and not self._client.channel.closed:
                return None
            self._client = Client(channel)
            return self._client

    def _read(self, client: Client) -> None:
        newest = 0
        while True:
            frame = client.channel.receive()
            if frame.kind == wire.CANCEL:
                client.cancel(frame.request)
                self._on_cancel(frame.request)
            elif frame.kind == wire.COMMAND:
                if frame.request <= newest:
                    raise ChannelError(f"request {frame.request} after request {newest}")
                newest = frame.request
                try:
                    self._orders.put_nowait(Order(client, frame))
                except queue.Full:
                    raise ChannelError(f"more than {WAITING_COMMANDS} commands are waiting") from None
            else:
                raise ChannelError(f"a client sends no frames of kind {frame.kind}")
