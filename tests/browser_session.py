"""Python's side of the browser tests: open a workflow in ComfyUI's own frontend, and see what the page says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tp.comfyui import ComfyServer

FOLDER = Path(__file__).parent / "browser"
DRIVER = FOLDER / "driver.mjs"


def chromium_path() -> str | None:
    """``$CHROMIUM``, else the first of the usual names on the path."""
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def what_is_missing() -> str | None:
    """What the browser tests lack on this machine, in words, or None."""
    missing = []
    if chromium_path() is None:
        missing.append("Chromium is not installed (set CHROMIUM to its path if it is)")
    if shutil.which("node") is None:
        missing.append("Node is not installed")
    if not (FOLDER / "node_modules" / "playwright-core").is_dir():
        missing.append("the Node packages are not installed (make browser)")
    return ", ".join(missing) or None


class Browser:
    """Headless Chromium on one ComfyUI. One page serves all workflows, as loading it takes seconds."""

    def __init__(self, server: ComfyServer, output: Path):
        self.server = server
        self.output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._home: tempfile.TemporaryDirectory[str] | None = None

    def open(
        self,
        workflow: Path | Mapping[str, Any],
        *,
        name: str | None = None,
        fresh: bool = False,
        locale: str = "en",
        settings: Mapping[str, Any] | None = None,
        run: bool = False,
        cancel_at_progress: int | None = None,
        cancel_in_node: int | None = None,
        cancel_after_s: float | None = None,
        watch: Mapping[str, str] | None = None,
        evaluate: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> dict[str, Any]:
        """Load a workflow in UI format and return what the page shows.

        - `name`: of the tab and of the screenshots, ``tests/output/NAME.png`` (and ``NAME-run.png``); the
          default is the file's stem.
        - `fresh`: load the frontend anew, as for a `locale` other than that of the page so far.
        - `settings`: of the frontend, beside those that every page has; they need `fresh` too.
        - `run`: press the Run button and wait for the end.
        - `cancel_at_progress`: press Cancel once a progress message (of `cancel_in_node` alone) carries this value or more;
          `cancel_after_s`: so many seconds after the press of Run.
        - `watch`: name -> JavaScript expression, sampled about every 100 ms while the prompt runs; the result
          lists its distinct values in order.
        - `evaluate`: name -> JavaScript expression (may be a promise), taken once at the end.

        The keys of the result are described in ``tests/browser/driver.mjs``. Raises RuntimeError if the page
        cannot be opened at all, TimeoutError after `timeout_s`.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        if isinstance(workflow, Path):
            name = name or workflow.stem
            workflow = json.loads(workflow.read_text())
        name = name or "workflow"
        return self._request(
            {
                "url": self.server.url,
                "workflow": workflow,
                "name": name,
                "screenshot": str(self.output / f"{name}.png"),
                "runScreenshot": str(self.output / f"{name}-run.png"),
                "fresh": fresh,
                "locale": locale,
                "settings": dict(settings or {}),
                "run": run,
                "cancelAtProgress": cancel_at_progress,
                "cancelInNode": None if cancel_in_node is None else str(cancel_in_node),
                "cancelAfterMs": None if cancel_after_s is None else 1000 * cancel_after_s,
                "watch": dict(watch or {}),
                "evaluate": dict(evaluate or {}),
                "timeoutMs": 1000 * timeout_s,
            },
            timeout_s,
        )

    def close(self) -> None:
        """End the browser; the next `open` starts another."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        if self._home is not None:
            self._home.cleanup()
            self._home = None

    def _request(self, options: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(options).encode() + b"\n")
            process.stdin.flush()
            # The driver gives up by itself at timeout_s; the rest is for one that does not.
            answer = json.loads(self._read_line(process, timeout_s + 20))
        except (OSError, ValueError, TimeoutError):
            errors = self._errors()
            self.close()
            raise RuntimeError(f"The browser failed while opening {options['name']}: {errors}") from None
        if "timeout" in answer or "failure" in answer:
            self.close()
        if "timeout" in answer:
            raise TimeoutError(f"The browser gave up after {timeout_s:g} s while {answer['timeout']}.")
        if "failure" in answer:
            raise RuntimeError(f"The browser failed {answer['failure']}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        chromium = chromium_path()
        if chromium is None:
            raise RuntimeError(f"No browser: {what_is_missing()}")
        self._home = tempfile.TemporaryDirectory(prefix="comfy-tp-browser-", ignore_cleanup_errors=True)
        home = self._home.name
        with open(Path(home) / "driver.log", "wb") as log:
            self._process = subprocess.Popen(
                ["node", str(DRIVER), chromium],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=FOLDER,
                env={**os.environ, "HOME": home, "TMPDIR": home, "XDG_RUNTIME_DIR": home},
                start_new_session=True,
            )
        return self._process

    def _errors(self) -> str:
        log = Path(self._home.name) / "driver.log" if self._home is not None else None
        return log.read_text(errors="replace").strip()[-3000:] if log is not None and log.is_file() else ""

    @staticmethod
    def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise OSError("the driver ended")
            line += part
        return line
