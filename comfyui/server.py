"""Boot a real ComfyUI in a folder of its own, and end it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .choose import comfyui_path
from .client import ComfyClient, ComfyUIError
from .environment import comfyui_python

PACK = Path(__file__).resolve().parents[1]
PACK_NAME = "comfy-tp"

_PR_SET_PDEATHSIG = 1


class ComfyServer(ComfyClient):
    """One ComfyUI process and its first client, as a context manager.

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
        super().__init__()
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
        self.process: subprocess.Popen[bytes] | None = None
        self.base = Path()
        self.boot_s = 0.0

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

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
            self.check_alive("while starting")
            try:
                self.get("/system_stats", timeout_s=5)
                return
            except (OSError, ComfyUIError):
                if time.monotonic() > deadline:
                    raise ComfyUIError(
                        f"ComfyUI did not answer within {self._boot_timeout_s:g} s.{self.log_tail()}"
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
                    f"ComfyUI's log shows no {text!r} within {timeout_s:g} s.{self.log_tail()}"
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

    def check_alive(self, when: str) -> None:
        if not self.alive:
            status = self.process.returncode if self.process is not None else None
            how = (
                f"killed by signal {-status}"
                if status is not None and status < 0
                else f"exit status {status}"
            )
            raise ComfyUIError(f"ComfyUI ended {when}, {how}.{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        tail = "\n".join(self.log().splitlines()[-lines:])
        return f" The end of its log:\n{tail}" if tail else " Its log is empty."


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
