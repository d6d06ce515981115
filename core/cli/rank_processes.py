"""Ranks as plain processes of one command: they run a program once, over gloo on the CPU or NCCL, and end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..errors import RankError

RANK_SECONDS = 600


def run_ranks(program: str, arguments: list[str], ranks: int, threads: int, folder: Path) -> list[dict]:
    """Run the module `program` once per rank with ARGUMENTS WORK RANK RANKS THREADS; returns each rank's figures.

    A rank writes its figures to WORK/rank-RANK.json. Raises `RankError` with the end of a rank's output when it fails
    or takes too long; no process is left.
    """
    work = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    started: list[subprocess.Popen] = []
    try:
        for rank in range(ranks):
            command = [
                sys.executable,
                "-m",
                program,
                *arguments,
                str(work),
                str(rank),
                str(ranks),
                str(threads),
            ]
            with open(work / f"rank-{rank}.log", "wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        _wait(started, work, [program.rpartition(".")[2], *arguments[:1]])
        return [json.loads((work / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        shutil.rmtree(work, ignore_errors=True)


def _wait(started: list[subprocess.Popen], work: Path, name: list[str]) -> None:
    """Wait until every rank has ended well; the first that has not is named, whichever it is."""
    deadline = time.monotonic() + RANK_SECONDS
    while any(process.poll() is None for process in started) or any(process.poll() for process in started):
        for rank, process in enumerate(started):
            if process.poll():
                tail = (work / f"rank-{rank}.log").read_text(errors="replace").strip()[-2000:]
                raise RankError(
                    f"Rank {rank} of {' '.join(name)} ended with {process.poll()}:\n{tail}", rank=rank
                )
        if time.monotonic() > deadline:
            raise RankError(f"The ranks of {' '.join(name)} did not finish in {RANK_SECONDS} s.")
        time.sleep(0.05)
