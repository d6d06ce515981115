"""Ranks as plain processes of one command: they run a program once, over gloo on the CPU or NCCL, and end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .. import errors
from ..errors import RankError

RANK_SECONDS = 600.0


def run_ranks(
    program: str,
    arguments: list[str],
    ranks: int,
    threads: int,
    folder: Path,
    *,
    limit_s: float = RANK_SECONDS,
    downloads: bool = False,
) -> list[dict]:
    """Run the module `program` once per rank with ARGUMENTS WORK RANK RANKS THREADS; returns each rank's figures.

    A rank writes its figures to WORK/rank-RANK.json. What a rank refused inside of `refusals_told` is raised again.
    Raises `RankError` with the end of a rank's output when it fails otherwise, or when the ranks take longer than
    `limit_s`; no process is left. Only with `downloads` may the ranks ask the hub.
    """
    work = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    if not downloads:
        environment["HF_HUB_OFFLINE"] = "1"
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
        _wait(started, work, [program.rpartition(".")[2], *arguments[:1]], limit_s)
        return [json.loads((work / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def refusals_told(work: str, rank: int) -> Iterator[None]:
    """Inside, a rank that refuses something leaves its sentence for `run_ranks` and ends without a traceback."""
    try:
        yield
    except errors.TPError as error:
        told = {"kind": type(error).__name__, "text": str(error)}
        _refusal(Path(work), rank).write_text(json.dumps(told))
        raise SystemExit(1) from None


def _refusal(work: Path, rank: int) -> Path:
    return work / f"rank-{rank}.refusal"


def _wait(started: list[subprocess.Popen], work: Path, name: list[str], limit_s: float) -> None:
    """Wait until every rank has ended well; the first that has not is named, whichever it is."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in started) or any(process.poll() for process in started):
        for rank, process in enumerate(started):
            if process.poll():
                if _refusal(work, rank).is_file():
                    told = json.loads(_refusal(work, rank).read_text())
                    raise getattr(errors, told["kind"], errors.TPError)(told["text"])
                tail = (work / f"rank-{rank}.log").read_text(errors="replace").strip()[-2000:]
                raise RankError(
                    f"Rank {rank} of {' '.join(name)} ended with {process.poll()}:\n{tail}", rank=rank
                )
        if time.monotonic() > deadline:
            raise RankError(f"The ranks of {' '.join(name)} did not finish in {limit_s:g} s.")
        time.sleep(0.05)
