"""Frames between the client and rank 0: a JSON header and raw tensor bytes, never pickle.

A frame is a prefix of 32 bytes, a JSON header and a payload::

    magic "ctp1" | version u8 | kind u8 | 0 u16 | header bytes u32 | sequence u32 | request u64 | payload bytes u64

all little-endian. The JSON header is ``{"name": str, "header": object, "tensors": [[dtype, shape], ...]}``. The
payload holds the tensors in order, each starting at a multiple of 64 bytes, the gaps filled with zeros. The
sequence counts the frames of one direction from 0, so that a frame cannot be sent twice.

Nothing is believed: lengths have limits, the payload must be exactly what the tensors' dtypes and shapes need, and
before it has proven that it knows the token a peer may send 512 bytes of header (the ranks' welcome, which holds
their proof, 8192) and no payload at all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

MAGIC = b"ctp1"
VERSION = 1
PREFIX = struct.Struct("<4sBBHIIQQ")
# Ten LoRAs of every layer of Qwen-Image take 3 MB and 17,000 tensors.
HEADER_LIMIT = 8 << 20
STRANGER_HEADER_LIMIT = 512
# The welcome names the devices: a hundred ranks on hosts with names as long as Linux allows.
WELCOME_HEADER_LIMIT = 8192
NAME_LIMIT = 128
PAYLOAD_LIMIT = 16 << 30
TENSOR_LIMIT = 65536
DIM_LIMIT = 16
ALIGNMENT = 64
WAKE = 0.5
SOCKET_BUFFER = 4 << 20
# How often rank 0 of a group that runs elsewhere tells its client that it lives, in seconds.
BEAT_PERIOD = 2.0

CHALLENGE, ANSWER, WELCOME, REFUSED = 1, 2, 3, 4
COMMAND, CANCEL, EVENT, REPLY, ERROR, BEAT = 16, 17, 18, 19, 20, 21
KINDS = frozenset((CHALLENGE, ANSWER, WELCOME, REFUSED, COMMAND, CANCEL, EVENT, REPLY, ERROR, BEAT))

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 "
        "int64 int32 int16 int8 uint8 bool complex64"
    ).split()
    if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_ZEROS = bytes(ALIGNMENT)


class ChannelError(Exception):
    """A peer broke the rules of the channel, or stopped in the middle of a frame."""


class ChannelClosed(ChannelError):
    """The connection ended between two frames, or was closed on this side."""


@dataclass
class Packed:
    """A message ready for the wire: its JSON header and the buffers of its payload."""

    raw: bytes
    buffers: list[memoryview]
    payload_bytes: int


@dataclass
class Frame:
    """One received message. `payload` is the byte tensor that `tensors` are views of."""

    kind: int
    request: int
    raw: bytes
    name: str
    header: dict[str, Any]
    payload: torch.Tensor
    tensors: list[torch.Tensor]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat byte tensor on the CPU."""
    return cast(Any, tensor.numpy()).data


def usable_name(name: str) -> bool:
    """Whether a message may have this name: text that can be logged, so no control characters or half surrogates."""
    return len(name) <= NAME_LIMIT and name.isprintable()


def pack(name: str, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Packed:
    """Write a message. Tensors on a device are copied to the CPU, those on the CPU are sent from where they lie.

    Raises ValueError where the name is not usable, the header is no JSON (NaN and infinity included) or too long, or
    a dtype is not in `DTYPES`.
    """
    if not usable_name(name):
        raise ValueError(f"a message cannot have the name {ascii(name)[:80]}")
    layout = []
    buffers: list[memoryview] = []
    offset = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"a tensor of dtype {tensor.dtype} cannot cross the channel; convert it first")
        layout.append([DTYPE_NAMES[tensor.dtype], list(tensor.shape)])
        gap = -offset % ALIGNMENT
        if gap:
            buffers.append(memoryview(_ZEROS)[:gap])
            offset += gap
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            buffers.append(bytes_of(flat))
            offset += flat.numel()
    if offset > PAYLOAD_LIMIT:
        raise ValueError(f"a message of {offset} bytes is over the channel's limit of {PAYLOAD_LIMIT}")
    try:
        text = json.dumps({"name": name, "header": header, "tensors": layout}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the header of {name!r} is no JSON: {error}") from error
    raw = text.encode()
    if len(raw) > HEADER_LIMIT:
        raise ValueError(f"the header of {name!r} has {len(raw)} bytes; the limit is {HEADER_LIMIT}")
    return Packed(raw, buffers, offset)


def parse_header(
    raw: bytes,
) -> tuple[str, dict[str, Any], list[tuple[torch.dtype, list[int], int, int]], int]:
    """Read a JSON header: name, header, `(dtype, shape, start, bytes)` per tensor, and the payload's length.

    Raises ChannelError with the reason where anything is not as `pack` writes it.
    """
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"the header is no JSON: {error}") from None
    if not isinstance(message, dict) or message.keys() != {"name", "header", "tensors"}:
        raise ChannelError("the header is not an object of name, header and tensors")
    name, header, tensors = message["name"], message["header"], message["tensors"]
    if not isinstance(name, str) or not isinstance(header, dict) or not isinstance(tensors, list):
        raise ChannelError("name, header or tensors of the header has the wrong type")
    if not usable_name(name):
        raise ChannelError(f"unusable name {ascii(name)[:80]}")
    if len(tensors) > TENSOR_LIMIT:
        raise ChannelError(f"{len(tensors)} tensors in one message; the limit is {TENSOR_LIMIT}")
    layout = []
    offset = 0
    for entry in tensors:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ChannelError(f"a tensor is announced as {str(entry)[:80]}, not as [dtype, shape]")
        dtype_name, shape = entry
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise ChannelError(f"unknown dtype {str(dtype_name)[:80]!r}")
        if not isinstance(shape, list) or len(shape) > DIM_LIMIT:
            raise ChannelError(f"unusable shape {str(shape)[:80]}")
        if any(type(size) is not int or not 0 <= size <= PAYLOAD_LIMIT for size in shape):
            raise ChannelError(f"unusable shape {str(shape)[:80]}")
        # An empty tensor too has strides, whose numbers must not overflow.
        if math.prod(size or 1 for size in shape) > PAYLOAD_LIMIT:
            raise ChannelError(f"tensors of more than {PAYLOAD_LIMIT} bytes are announced")
        dtype = DTYPES[dtype_name]
        length = math.prod(shape) * dtype.itemsize
        start = offset + -offset % ALIGNMENT
        if length:
            offset = start + length
        elif offset % ALIGNMENT:
            offset = start
        if offset > PAYLOAD_LIMIT:
            raise ChannelError(f"tensors of more than {PAYLOAD_LIMIT} bytes are announced")
        layout.append((dtype, shape, start, length))
    return name, header, layout, offset


def tensors_of(
    layout: list[tuple[torch.dtype, list[int], int, int]], payload: torch.Tensor
) -> list[torch.Tensor]:
    """The announced tensors as views of the payload (a byte tensor)."""
    tensors = []
    for dtype, shape, start, length in layout:
        if length:
            tensors.append(payload[start : start + length].view(dtype).reshape(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
    return tensors


class Channel:
    """One connection. One thread may receive; any thread may send.

    A wait lasts at most `stall_timeout` once a frame has begun. Between frames `receive` waits until the peer
    sends or `close` is called, in slices of half a second.
    """

    def __init__(self, sock: socket.socket, *, stall_timeout: float = 60.0):
        sock.settimeout(WAKE)
        # More than the default per turn of the two sides; the system caps it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        self._sock = sock
        self._stall_timeout = stall_timeout
        self._deadline: float | None = None
        self._send_lock = threading.Lock()
        self._sent = 0
        self._received = 0
        self._prefix = bytearray(PREFIX.size)
        self.closed = False

    def set_deadline(self, deadline: float | None) -> None:
        """Give up every wait at this `time.monotonic()`: for the handshake."""
        self._deadline = deadline

    def send(
        self,
        kind: int,
        request: int,
        message: Packed | None = None,
        *,
        name: str = "",
        header: dict[str, Any] | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Send one frame; raises ChannelError where the peer is gone or does not read."""
        if message is None:
            message = pack(name, header or {}, tensors)
        if not self._send_lock.acquire(timeout=self._stall_timeout):
            raise ChannelError(f"another thread has been sending for {self._stall_timeout:.0f} s")
        try:
            prefix = PREFIX.pack(
                MAGIC, VERSION, kind, 0, len(message.raw), self._sent, request, message.payload_bytes
            )
            self._sent = (self._sent + 1) & 0xFFFFFFFF
            self._send_all([memoryview(prefix + message.raw), *message.buffers])
        finally:
            self._send_lock.release()

    def _send_all(self, buffers: list[memoryview]) -> None:
        first = 0
        moved_at = time.monotonic()
        while first < len(buffers):
            if self.closed:
                raise ChannelClosed("the channel was closed")
            try:
                count = self._sock.sendmsg(buffers[first : first + 256])
            except TimeoutError:
                self._check_wait(moved_at)
                continue
            except OSError as error:
                self.closed = True
                raise ChannelClosed(f"the peer is gone ({error.strerror or error})") from None
            moved_at = time.monotonic()
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            if count:
                buffers[first] = buffers[first][count:]

    def _check_wait(self, moved_at: float, *, idle: bool = False) -> None:
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            raise ChannelError("the handshake took too long")
        if not idle and now - moved_at > self._stall_timeout:
            raise ChannelError(f"the peer stopped in the middle of a frame for {self._stall_timeout:.0f} s")

    def _fill(self, view: memoryview, *, between_frames: bool = False) -> None:
        got = 0
        moved_at = time.monotonic()
        while got < len(view):
            if self.closed:
                raise ChannelClosed("the channel was closed")
            try:
                count = self._sock.recv_into(view[got:])
            except TimeoutError:
                self._check_wait(moved_at, idle=between_frames and got == 0)
                continue
            except OSError as error:
                raise ChannelClosed(f"the connection broke ({error.strerror or error})") from None
            if count == 0:
                if between_frames and got == 0:
                    raise ChannelClosed("the peer closed the connection")
                raise ChannelError("the peer closed the connection in the middle of a frame")
            got += count
            if self._deadline is not None:
                self._check_wait(moved_at, idle=True)
            moved_at = time.monotonic()

    def receive(self, *, stranger: int | None = None) -> Frame:
        """Wait for one frame. From a peer that has proven nothing: `stranger` bytes of header at most, and no payload.

        Raises ChannelClosed at the end of the connection and ChannelError for a malformed frame; after either
        the channel is of no more use.
        """
        self._fill(memoryview(self._prefix), between_frames=True)
        magic, version, kind, zero, header_bytes, sequence, request, payload_bytes = PREFIX.unpack(
            self._prefix
        )
        if magic != MAGIC:
            raise ChannelError("this is no frame of a rank group")
        if version != VERSION:
            raise ChannelError(
                f"the peer speaks version {version} of the channel and this side {VERSION}; install the same release"
            )
        if kind not in KINDS or zero:
            raise ChannelError(f"unknown kind of frame {kind}")
        if sequence != self._received:
            raise ChannelError(f"frame {sequence} where frame {self._received} is due: repeated or lost")
        self._received = (self._received + 1) & 0xFFFFFFFF
        limit = HEADER_LIMIT if stranger is None else stranger
        if header_bytes > limit:
            raise ChannelError(f"a header of {header_bytes} bytes; the limit is {limit}")
        if payload_bytes and stranger is not None:
            raise ChannelError("a payload before the handshake")
        raw = bytearray(header_bytes)
        self._fill(memoryview(raw))
        name, header, layout, expected = parse_header(bytes(raw))
        if payload_bytes != expected:
            raise ChannelError(f"a payload of {payload_bytes} bytes where the tensors need {expected}")
        try:
            payload = torch.empty(expected, dtype=torch.uint8)
        except RuntimeError:
            raise ChannelError(f"no memory for a payload of {expected} bytes") from None
        if expected:
            self._fill(bytes_of(payload))
        return Frame(kind, request, bytes(raw), name, header, payload, tensors_of(layout, payload))

    def close(self) -> None:
        """End the connection; a thread in `receive` or `send` gets ChannelClosed."""
        self.closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


def _proof(token: str, side: str, first: str, second: str) -> str:
    text = f"comfy-tp {VERSION} {side} {first} {second}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _text(frame: Frame, key: str) -> str:
    value = frame.header.get(key)
    if not isinstance(value, str):
        raise ChannelError(f"the handshake lacks {key}")
    return value


def admit(channel: Channel, token: str, timeout: float) -> str:
    """The listening side of the handshake: a fresh nonce, and the peer's proof that it knows the token.

    Returns our own proof before the welcome, so that the caller can still refuse; `welcome` ends the handshake.
    """
    channel.set_deadline(time.monotonic() + timeout)
    nonce = secrets.token_hex(32)
    channel.send(CHALLENGE, 0, header={"nonce": nonce})
    frame = channel.receive(stranger=STRANGER_HEADER_LIMIT)
    if frame.kind != ANSWER:
        raise ChannelError("the peer does not answer the challenge")
    peer = _text(frame, "nonce")
    if not hmac.compare_digest(_text(frame, "proof").encode(), _proof(token, "client", nonce, peer).encode()):
        channel.send(REFUSED, 0, header={"reason": "the token is wrong"})
        raise ChannelError("the peer does not know the token")
    return _proof(token, "ranks", peer, nonce)


def welcome(channel: Channel, proof: str, description: dict[str, Any]) -> None:
    """Tell an admitted peer that it is the client, with our own proof of the token."""
    channel.send(WELCOME, 0, header={"proof": proof, "group": description})
    channel.set_deadline(None)


def introduce(channel: Channel, token: str, timeout: float) -> dict[str, Any]:
    """The connecting side of the handshake; returns the group's description.

    Raises ChannelError where the other side refuses, or cannot prove that it knows the token, and ChannelClosed where
    it ends the connection before it has said either.
    """
    channel.set_deadline(time.monotonic() + timeout)
    frame = channel.receive(stranger=STRANGER_HEADER_LIMIT)
    if frame.kind != CHALLENGE:
        raise ChannelError("no challenge came: this is no rank group")
    nonce = secrets.token_hex(32)
    peer = _text(frame, "nonce")
    channel.send(ANSWER, 0, header={"nonce": nonce, "proof": _proof(token, "client", peer, nonce)})
    frame = channel.receive(stranger=WELCOME_HEADER_LIMIT)
    if frame.kind == REFUSED:
        raise ChannelError(f"the rank group refused this client: {_text(frame, 'reason')[:200]}")
    if frame.kind != WELCOME:
        raise ChannelError("no welcome came")
    if not hmac.compare_digest(_text(frame, "proof").encode(), _proof(token, "ranks", nonce, peer).encode()):
        raise ChannelError("the other side does not know the token")
    channel.set_deadline(None)
    group = frame.header.get("group")
    if not isinstance(group, dict):
        raise ChannelError("the welcome does not describe the group")
    return group
