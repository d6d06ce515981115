"""What ComfyUI says over its websocket while a prompt runs: progress, previews, errors, the end."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# ComfyUI's binary messages begin with a big-endian 32-bit kind (its protocol.py).
PREVIEW_IMAGE = 1
PREVIEW_IMAGE_WITH_METADATA = 4


@dataclass(frozen=True)
class Event:
    """One JSON message: `at` is time.monotonic() of its arrival."""

    at: float
    type: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Preview:
    """One preview: the encoded image (JPEG or PNG), and what ComfyUI says about it, as the node's id."""

    at: float
    image: bytes
    metadata: dict[str, Any] = field(default_factory=dict)


class EventStream:
    """A websocket to ComfyUI, read by a thread of its own, as a context manager.

    Give `client_id` to ``post_prompt``: ComfyUI sends a prompt's events to the client that posted it.
    """

    def __init__(self, url: str, client_id: str, *, preview_metadata: bool = True, timeout_s: float = 30.0):
        self.client_id = client_id
        self.events: list[Event] = []
        self.previews: list[Preview] = []
        self._url = f"{url}?clientId={client_id}"
        self._preview_metadata = preview_metadata
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._closing: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="comfyui-events", daemon=True)

    def __enter__(self) -> EventStream:
        self._thread.start()
        self.wait_for(lambda stream: any(event.type == "status" for event in stream.events), self._timeout_s)
        return self

    def __exit__(self, *exc_info) -> None:
        if self._closing is not None and not self._ended:
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(self._timeout_s)

    def of_type(self, *types: str) -> list[Event]:
        """The events so far of these types, in order."""
        return [event for event in list(self.events) if event.type in types]

    def wait_for(self, condition: Callable[[EventStream], Any], timeout_s: float) -> Any:
        """Wait until `condition(self)` is true and return its value. TimeoutError says what has arrived."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (value := condition(self)):
                remaining = deadline - time.monotonic()
                if self._ended or remaining <= 0:
                    why = "the websocket closed" if self._ended else f"nothing for {timeout_s:g} s"
                    seen = [event.type for event in self.events]
                    raise TimeoutError(
                        f"Waiting for an event from ComfyUI: {why}. {len(self.previews)} previews and these "
                        f"events arrived: {seen[-30:]}"
                    ) from self._failure
                self._changed.wait(remaining)
        return value

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._read())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self._failure = error
        finally:
            self._loop.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    async def _read(self) -> None:
        self._closing = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.ws_connect(self._url, max_msg_size=256 << 20) as socket:
                flags = {"supports_preview_metadata": self._preview_metadata}
                await socket.send_json({"type": "feature_flags", "data": flags})
                closing = asyncio.ensure_future(self._closing.wait())
                while not closing.done():
                    receiving = asyncio.ensure_future(socket.receive())
                    await asyncio.wait({receiving, closing}, return_when=asyncio.FIRST_COMPLETED)
                    if not receiving.done():
                        receiving.cancel()
                        break
                    message = receiving.result()
                    if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                        break
                    self._record(message)
                closing.cancel()

    def _record(self, message: aiohttp.WSMessage) -> None:
        now = time.monotonic()
        with self._changed:
            if message.type == aiohttp.WSMsgType.TEXT:
                content = json.loads(message.data)
                self.events.append(Event(now, content.get("type", ""), content.get("data") or {}))
            else:
                preview = _preview(now, message.data)
                if preview is not None:
                    self.previews.append(preview)
            self._changed.notify_all()


def _preview(at: float, message: bytes) -> Preview | None:
    (kind,) = struct.unpack_from(">I", message)
    if kind == PREVIEW_IMAGE:
        return Preview(at, message[8:])
    if kind == PREVIEW_IMAGE_WITH_METADATA:
        (length,) = struct.unpack_from(">I", message, 4)
        return Preview(at, message[8 + length :], json.loads(message[8 : 8 + length]))
    return None
