"""What a script asks of a running ComfyUI: graphs, histories, images, uploads, events."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import TPError
from .events import EventStream


class ComfyUIError(TPError):
    """ComfyUI did not start, ended, or did not answer in time. The text ends with the tail of its log."""


class PromptRefused(ComfyUIError):
    """``POST /prompt`` was answered with an error. `node_errors` is ComfyUI's own account of it."""

    def __init__(self, message: str, *, status: int, error: Any, node_errors: dict[str, Any]):
        super().__init__(message)
        self.status = status
        self.error = error
        self.node_errors = node_errors


class ExecutionFailed(ComfyUIError):
    """A node raised. `entry` is the history entry; the rest says which node and what it raised."""

    def __init__(self, message: str, *, entry: dict[str, Any], details: dict[str, Any]):
        super().__init__(message)
        self.entry = entry
        self.node_id: str | None = details.get("node_id")
        self.node_type: str | None = details.get("node_type")
        self.exception_type: str | None = details.get("exception_type")
        self.exception_message: str | None = details.get("exception_message")
        self.traceback: str = "".join(details.get("traceback") or [])


class ExecutionInterrupted(ComfyUIError):
    """The prompt was cancelled. `entry` is the history entry."""

    def __init__(self, message: str, *, entry: dict[str, Any]):
        super().__init__(message)
        self.entry = entry


class ComfyClient:
    """One client of the ComfyUI that listens on `port` of this machine."""

    def __init__(self) -> None:
        self.port = 0
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def check_alive(self, when: str) -> None:
        """Raise `ComfyUIError` where it is known that ComfyUI has ended, `when` that was."""

    def log_tail(self) -> str:
        """The end of ComfyUI's log as a sentence for an error, where it is known."""
        return ""

    def request(
        self,
        path: str,
        *,
        data: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = 30.0,
    ) -> tuple[int, bytes]:
        """GET `path`, or POST `data` to it; return the status and the body. HTTP errors do not raise."""
        request = urllib.request.Request(self.url + path, data=data)
        if data is not None:
            request.add_header("Content-Type", content_type)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def get(self, path: str, *, timeout_s: float = 30.0) -> Any:
        """GET `path` and return its JSON."""
        status, body = self.request(path, timeout_s=timeout_s)
        if status != 200:
            raise ComfyUIError(f"GET {path} was answered with HTTP {status}: {_text(body)}")
        return json.loads(body)

    def post(self, path: str, content: Any, *, timeout_s: float = 30.0) -> Any:
        """POST `content` as JSON to `path` and return the JSON of the answer, or None if it has none."""
        status, body = self.request(path, data=json.dumps(content).encode(), timeout_s=timeout_s)
        if status != 200:
            raise ComfyUIError(f"POST {path} was answered with HTTP {status}: {_text(body)}")
        return json.loads(body) if body.strip() else None

    def object_info(self, node_type: str | None = None) -> dict[str, Any]:
        """What ComfyUI says about all its nodes, or about one."""
        if node_type is None:
            return self.get("/object_info", timeout_s=120)
        info = self.get(f"/object_info/{urllib.parse.quote(node_type)}")
        if node_type not in info:
            raise ComfyUIError(f"ComfyUI knows no node {node_type}.{self.log_tail()}")
        return info[node_type]

    def post_prompt(self, prompt: Mapping[str, Any], *, client_id: str | None = None, **fields: Any) -> str:
        """Queue a graph in API format and return its prompt id. `fields` go beside it, as ``extra_data``.

        Raises PromptRefused, whose text names each node and what was wrong with it.
        """
        content: dict[str, Any] = {"prompt": dict(prompt), **fields}
        if client_id is not None:
            content["client_id"] = client_id
        status, body = self.request("/prompt", data=json.dumps(content).encode())
        if status == 200:
            return json.loads(body)["prompt_id"]
        try:
            answer = json.loads(body)
        except ValueError:
            answer = {"error": _text(body)}
        raise PromptRefused(
            _refusal(status, answer),
            status=status,
            error=answer.get("error"),
            node_errors=answer.get("node_errors") or {},
        )

    def wait(self, prompt_id: str, timeout_s: float = 120.0, *, check: bool = True) -> dict[str, Any]:
        """Wait until a prompt has ended and return its history entry.

        Raises ExecutionFailed or ExecutionInterrupted unless `check` is False, and ComfyUIError if ComfyUI
        ends or the time runs out.
        """
        deadline = time.monotonic() + timeout_s
        pause = 0.02
        while True:
            self.check_alive("while a prompt was running")
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                entry = history[prompt_id]
                if check:
                    _check_entry(prompt_id, entry)
                return entry
            if time.monotonic() > deadline:
                raise ComfyUIError(f"Prompt {prompt_id} did not end within {timeout_s:g} s.{self.log_tail()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def run(self, prompt: Mapping[str, Any], timeout_s: float = 120.0, **fields: Any) -> dict[str, Any]:
        """Queue a graph in API format, wait for its end and return its history entry."""
        return self.wait(self.post_prompt(prompt, **fields), timeout_s)

    def images(self, entry: Mapping[str, Any]) -> list[bytes]:
        """The files of all images in a history entry, in the order of the node ids."""
        found = []
        for _, output in sorted(entry["outputs"].items()):
            found += [self.view(image) for image in output.get("images") or []]
        return found

    def view(self, image: Mapping[str, str]) -> bytes:
        """The file of one image, named as in a history entry: filename, subfolder, type."""
        query = urllib.parse.urlencode(
            {key: image[key] for key in ("filename", "subfolder", "type") if key in image}
        )
        status, body = self.request(f"/view?{query}")
        if status != 200:
            raise ComfyUIError(f"GET /view of {dict(image)} was answered with HTTP {status}: {_text(body)}")
        return body

    def upload_image(self, image: Path | bytes, name: str | None = None) -> str:
        """Put an image among the inputs and return the name that LoadImage takes."""
        if isinstance(image, Path):
            name = name or image.name
            image = image.read_bytes()
        name = name or "image.png"
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="overwrite"\r\n\r\ntrue\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        status, body = self.request(
            "/upload/image",
            data=head.encode() + image + f"\r\n--{boundary}--\r\n".encode(),
            content_type=f"multipart/form-data; boundary={boundary}",
        )
        if status != 200:
            raise ComfyUIError(f"POST /upload/image was answered with HTTP {status}: {_text(body)}")
        answer = json.loads(body)
        return f"{answer['subfolder']}/{answer['name']}" if answer.get("subfolder") else answer["name"]

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Cancel what runs now, or only if it is `prompt_id`."""
        self.post("/interrupt", {} if prompt_id is None else {"prompt_id": prompt_id})

    def free(self, *, unload_models: bool = True, free_memory: bool = False) -> None:
        """Ask ComfyUI to unload its models or drop its caches; its worker does so a moment later."""
        self.post("/free", {"unload_models": unload_models, "free_memory": free_memory})

    def events(self, *, preview_metadata: bool = True) -> EventStream:
        """A new client's event stream, to be entered with ``with``; pass its `client_id` to post_prompt."""
        return EventStream(
            f"ws://127.0.0.1:{self.port}/ws", uuid.uuid4().hex, preview_metadata=preview_metadata
        )


def _text(body: bytes, limit: int = 2000) -> str:
    return body[:limit].decode(errors="replace")


def _refusal(status: int, answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, Mapping):
        error = " ".join(str(part) for part in (error.get("message"), error.get("details")) if part)
    lines = [f"ComfyUI refused the prompt (HTTP {status}): {error}"]
    for node_id, node in (answer.get("node_errors") or {}).items():
        for reason in node.get("errors") or []:
            what = f"{reason.get('message')}: {reason.get('details')}"
            lines.append(f"  node {node_id} ({node.get('class_type')}): {what}")
    return "\n".join(lines)


def _check_entry(prompt_id: str, entry: dict[str, Any]) -> None:
    status = entry.get("status") or {}
    if status.get("status_str") == "success":
        return
    for kind, details in status.get("messages") or []:
        if kind == "execution_interrupted":
            raise ExecutionInterrupted(f"Prompt {prompt_id} was cancelled.", entry=entry)
        if kind == "execution_error":
            raise ExecutionFailed(
                f"Node {details.get('node_id')} ({details.get('node_type')}) raised "
                f"{details.get('exception_type')}: {str(details.get('exception_message')).strip()}",
                entry=entry,
                details=details,
            )
    raise ExecutionFailed(f"Prompt {prompt_id} failed without saying why: {status}", entry=entry, details={})
