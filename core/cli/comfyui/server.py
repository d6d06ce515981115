"""Boot a real ComfyUI in a folder of its own and talk to it as a script would."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import TPError
from .choose import comfyui_path
from .environment import comfyui_python
from .events import EventStream

PACK = Path(__file__).resolve().parents[3]
PACK_NAME = "comfy-tp"

_PR_SET_PDEATHSIG = 1


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


class ComfyServer:
    """One ComfyUI process, as a context manager.

    It runs in a temporary base folder (models, input, output, user, custom_nodes), in which this pack is
    linked as ``custom_nodes/comfy-tp``; the ComfyUI tree itself stays as it is. The process gets SIGTERM when
    the thread that started it ends, so start it from a thread that lives as long.

    - `custom_nodes`: further packs to link in, name -> folder or file.
    - `base`: a base folder to use and keep, instead of a temporary one.
    - `cpu`: start with ``--cpu``; otherwise ComfyUI takes the first GPU.
    - `preview_method`: ComfyUI's ``--preview-method``.
    - `arguments`, `environment`: more of both; a variable set to None is removed.
    - `tree`: the folder of the ComfyUI to run; the default is `comfyui_path()`.
    - `python`: the interpreter; the default is ``$COMFYUI_PYTHON``, else that of the tree's environment in the cache,
      else this one. The frontend is the one that is installed for it.
    """

    def __init__(
        self,
        *,
        custom_nodes: Mapping[str, Path] | None = None,
        base: Path | None = None,
        link_pack: bool = True,
        cpu: bool = True,
        preview_method: str = "latent2rgb",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
        tree: Path | None = None,
        python: str | None = None,
        boot_timeout_s: float = 180.0,
    ):
        self._custom_nodes = dict(custom_nodes or {})
        if link_pack:
            self._custom_nodes.setdefault(PACK_NAME, PACK)
        self._given_base = base
        self._cpu = cpu
        self._preview_method = preview_method
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._tree = tree
        self._python = python or os.environ.get("COMFYUI_PYTHON")
        self._boot_timeout_s = boot_timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.process: subprocess.Popen[bytes] | None = None
        self.base = Path()
        self.port = 0
        self.boot_s = 0.0

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    # -- the process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def models(self) -> Path:
        """The folder of ``diffusion_models/``, ``loras/`` and so on; files put there are seen at once."""
        return self.base / "models"

    @property
    def output(self) -> Path:
        return self.base / "output"

    @property
    def pid(self) -> int:
        if self.process is None:
            raise ComfyUIError("ComfyUI has not been started.")
        return self.process.pid

    def start(self) -> None:
        """Start ComfyUI and wait until it answers. Raises ComfyUIError with the tail of its log."""
        tree = self._tree or comfyui_path()
        python = self._python or comfyui_python(tree)
        self.base = self._given_base or Path(tempfile.mkdtemp(prefix="comfy-tp-comfyui-"))
        try:
            self._prepare_base()
            started = time.monotonic()
            self._spawn(tree, python)
            self._wait_until_up(started + self._boot_timeout_s)
            self.boot_s = time.monotonic() - started
        except BaseException:
            self.close()
            raise

    def _prepare_base(self) -> None:
        for name in ("models/diffusion_models", "input", "output", "temp", "user", "custom_nodes"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        for name, source in self._custom_nodes.items():
            link = self.base / "custom_nodes" / name
            if link.is_symlink():
                link.unlink()
            link.symlink_to(Path(source).resolve())

    def _spawn(self, tree: Path, python: str) -> None:
        self.port = _free_port()
        command = [python, str(tree / "main.py"), "--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--base-directory", str(self.base), "--user-directory", str(self.base / "user")]
        command += ["--database-url", f"sqlite:///{self.base / 'user' / 'comfyui.db'}"]
        command += ["--disable-api-nodes", "--disable-auto-launch", "--preview-method", self._preview_method]
        if self._cpu:
            command.append("--cpu")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        for name, value in self._environment.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        libc = ctypes.CDLL(None, use_errno=True)

        def end_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            # A shell's background jobs ignore Ctrl-C, and so would ComfyUI, which ends by it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command + self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=tree,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _wait_until_up(self, deadline: float) -> None:
        while True:
            if not self.alive:
                raise ComfyUIError(f"ComfyUI ended while starting, {self._how_it_ended()}.{self._log_tail()}")
            try:
                self.get("/system_stats", timeout_s=5)
                return
            except (OSError, ComfyUIError):
                if time.monotonic() > deadline:
                    raise ComfyUIError(
                        f"ComfyUI did not answer within {self._boot_timeout_s:g} s.{self._log_tail()}"
                    ) from None
            time.sleep(0.05)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log_path(self) -> Path:
        return self.base / "comfyui.log"

    def log(self) -> str:
        """Everything ComfyUI has written to its output and error streams."""
        return self.log_path.read_text(errors="replace") if self.log_path.is_file() else ""

    def wait_for_log(self, text: str, *, timeout_s: float = 30.0, start: int = 0) -> str:
        """Wait until the log holds `text` from character `start` on, and return that part of the log."""
        deadline = time.monotonic() + timeout_s
        while text not in (part := self.log()[start:]):
            if time.monotonic() > deadline or not self.alive:
                raise ComfyUIError(
                    f"ComfyUI's log shows no {text!r} within {timeout_s:g} s.{self._log_tail()}"
                )
            time.sleep(0.05)
        return part

    def send_signal(self, number: int) -> None:
        """Send a signal to the ComfyUI process alone."""
        if self.alive and self.process is not None:
            self.process.send_signal(number)

    def terminate(self, *, timeout_s: float = 15.0) -> int:
        """End ComfyUI by SIGTERM, by SIGKILL if that takes too long, and return its exit status."""
        if self.process is None:
            raise ComfyUIError("ComfyUI has not been started.")
        self.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self, *, timeout_s: float = 15.0) -> int:
        """End ComfyUI by SIGKILL, which it cannot see coming, and return its exit status."""
        if self.process is None:
            raise ComfyUIError("ComfyUI has not been started.")
        self.send_signal(signal.SIGKILL)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End ComfyUI and remove the temporary base folder. May be called twice."""
        if self.alive:
            self.terminate()
        if self._given_base is None and self.base != Path():
            shutil.rmtree(self.base, ignore_errors=True)

    def _how_it_ended(self) -> str:
        status = self.process.returncode if self.process is not None else None
        return f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"

    def _log_tail(self, lines: int = 40) -> str:
        tail = "\n".join(self.log().splitlines()[-lines:])
        return f" The end of its log:\n{tail}" if tail else " Its log is empty."

    # -- the interface that scripts use

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
            raise ComfyUIError(f"ComfyUI knows no node {node_type}.{self._log_tail()}")
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
            if not self.alive:
                raise ComfyUIError(
                    f"ComfyUI ended while a prompt was running, {self._how_it_ended()}.{self._log_tail()}"
                )
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                entry = history[prompt_id]
                if check:
                    _check_entry(prompt_id, entry)
                return entry
            if time.monotonic() > deadline:
                raise ComfyUIError(
                    f"Prompt {prompt_id} did not end within {timeout_s:g} s.{self._log_tail()}"
                )
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
