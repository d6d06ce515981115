"""Python's side of the browser tests: open a workflow in ComfyUI's own frontend, and see what the page says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_tp.core.cli.comfyui import ComfyServer

FOLDER = Path(__file__).parent / "browser"
DRIVER = FOLDER / "open_workflow.mjs"


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
    """Headless Chromium on one ComfyUI. Every `open` is a new browser with a fresh profile."""

    def __init__(self, server: ComfyServer, output: Path):
        self.server = server
        self.output = output

    def open(
        self,
        workflow: Path | Mapping[str, Any],
        *,
        name: str | None = None,
        run: bool = False,
        cancel_at_progress: int | None = None,
        cancel_after_s: float | None = None,
        watch: Mapping[str, str] | None = None,
        evaluate: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> dict[str, Any]:
        """Load a workflow in UI format and return what the page shows.

        - `name`: of the screenshots, ``tests/output/NAME.png`` (and ``NAME-run.png``); default: the file's stem.
        - `run`: press the Run button and wait for the end.
        - `cancel_at_progress`: press Cancel once a progress message carries this value or more;
          `cancel_after_s`: so many seconds after the press of Run.
        - `watch`: name -> JavaScript expression, sampled every 100 ms while the prompt runs; the result lists
          its distinct values in order.
        - `evaluate`: name -> JavaScript expression (may be a promise), taken once at the end.

        The keys of the result are described in ``tests/browser/open_workflow.mjs``. Raises RuntimeError if the
        page cannot be opened at all, TimeoutError after `timeout_s`.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        if isinstance(workflow, Path):
            name = name or workflow.stem
            workflow = json.loads(workflow.read_text())
        options = {
            "url": self.server.url,
            "workflow": workflow,
            "chromium": chromium_path(),
            "screenshot": str(self.output / f"{name or 'workflow'}.png"),
            "runScreenshot": str(self.output / f"{name or 'workflow'}-run.png"),
            "run": run,
            "cancelAtProgress": cancel_at_progress,
            "cancelAfterMs": None if cancel_after_s is None else 1000 * cancel_after_s,
            "watch": dict(watch or {}),
            "evaluate": dict(evaluate or {}),
            "timeoutMs": 1000 * timeout_s,
        }
        with tempfile.TemporaryDirectory(prefix="comfy-tp-browser-") as home:
            return self._drive(options, Path(home), timeout_s)

    def _drive(self, options: Mapping[str, Any], home: Path, timeout_s: float) -> dict[str, Any]:
        (home / "options.json").write_text(json.dumps(options))
        environment = {**os.environ, "HOME": str(home), "TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home)}
        process = subprocess.Popen(
            ["node", str(DRIVER), str(home / "options.json")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=FOLDER,
            env=environment,
            start_new_session=True,
        )
        try:
            # The driver ends by itself at timeout_s; this is the bound for the case that it does not.
            stdout, stderr = process.communicate(timeout=timeout_s + 20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)
            raise TimeoutError(f"The browser did not end within {timeout_s + 20:g} s.") from None
        lines = stdout.strip().splitlines()
        if process.returncode or not lines:
            raise RuntimeError(
                f"The browser failed (exit status {process.returncode}): {stderr.strip()[-3000:]}"
            )
        result = json.loads(lines[-1])
        if "timeout" in result:
            raise TimeoutError(f"The browser gave up after {timeout_s:g} s while {result['timeout']}.")
        return result
