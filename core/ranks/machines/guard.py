"""Ends one rank that shows no sign of life any more: a stopped process can be ended by another one alone.

    python guard.py PID SECONDS

Its stdin is a pipe from the rank, which writes a byte with every sign of life; with the pipe, the guard ends. It runs
by its path and imports nothing of the package, so that it costs little.
"""

import os
import select
import signal
import sys


def main(pid: int, seconds: float) -> None:
    """SIGKILL the process `pid` when nothing comes for so long."""
    while select.select([0], [], [], seconds)[0]:
        if not os.read(0, 4096):
            return
    print(
        f"process {pid} has shown no sign of life for {seconds:g} s and is killed",
        file=sys.stderr,
        flush=True,
    )
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
