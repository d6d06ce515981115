"""Other programs, run for a bounded time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import TPError


class Deadline:
    """A moment until which all of several steps together may last."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._at - time.monotonic())


def finish(
    command: Sequence[str],
    deadline: Deadline,
    what: str,
    *,
    environment: Mapping[str, str] | None = None,
    given: bytes = b"",
    folder: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end and return its output, whatever its exit status.

    Raises TPError if the program does not exist, or if it has not ended by the deadline: it and all that it started
    are killed then. `what` begins the sentence, as "Fetching ComfyUI".
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise TPError(f"{what} needs the program {command[0]}, which is not on this machine.") from None
    with process:
        try:
            output, errors = process.communicate(given, timeout=deadline.left())
        except subprocess.TimeoutExpired:
            raise TPError(f"{what} was not done within {deadline.seconds:g} s.") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why a program failed, in one line: its first error, without the words that say only that it is one."""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    marks = ("fatal:", "error:", "ERROR:")
    line = next((line for line in lines if line.startswith(marks)), lines[-1] if lines else "")
    for mark in marks:
        line = line.removeprefix(mark).strip()
    # pip adds every version that there is.
    line = re.sub(r" \(from versions: .*", "", line)
    return line.rstrip(".")[:500] or f"exit status {done.returncode}"
