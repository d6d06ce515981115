"""How the process of a rank begins: forked from the launcher, or as a Python of its own.

Importing torch and diffusers takes seconds of processor time and hundreds of megabytes. A launcher that has imported
them forks its ranks: they start at once and share those pages. A process that has touched CUDA must not be forked,
and whether an import does is not ours to decide, so ranks on CUDA devices start as new Pythons, and their launcher
imports no torch at all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

SCRIPT = Path(__file__).absolute().with_name("entry.py")


def python(*arguments: str) -> list[str]:
    """The command that runs ``entry.py`` with this Python."""
    return [sys.executable, *(["-s"] if sys.flags.no_user_site else []), str(SCRIPT), *arguments]


@dataclass(frozen=True)
class RankProcess:
    """What one rank's process starts with. Its stdin is the launcher's, the group's lifetime."""

    title: str
    folder: Path
    rank: int
    environment: dict[str, str]
    log: Path

    def start(self, *, fork: bool, private: Sequence[int]) -> int:
        """Start it as the head of a session of its own, its output in `log`; returns its pid.

        fork: whether it goes on from here, with what is imported, instead of starting a new Python. private: file
        descriptors of this process that are not the rank's.
        """
        pid = os.fork()
        if pid == 0:
            self._begin(fork, private)
        return pid

    def _begin(self, fork: bool, private: Sequence[int]) -> NoReturn:
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)  # the launcher's own way to end is not a rank's
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for descriptor in (output, *private):
                os.close(descriptor)
            os.environ.update(self.environment)
            arguments = [self.title, str(self.folder), str(self.rank)]
            if not fork:
                os.execv(sys.executable, python(*arguments))
            show_as([str(SCRIPT), *arguments])
            from .rank import main

            main(str(self.folder), self.rank)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def exit_cause(exitcode: int) -> str:
    """How a process ended, in words; a negative number is a signal, as in `subprocess`."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "unknown"
    guess = ", probably out of memory" if -exitcode == signal.SIGKILL else ""
    return f"was killed by signal {-exitcode} ({name}){guess}"


def show_as(arguments: Sequence[str]) -> None:
    """Let ps show this process with these arguments, as far as those it was started with left room.

    The kernel reads them from where the process began (proc(5): arg_start and arg_end of /proc/PID/stat). Where
    there is no such file, the process keeps the name of the one it was forked from.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:
        text = b"\0".join(os.fsencode(argument) for argument in arguments)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
