"""Real ranks for tests: one process imports what the checks need, then forks a gloo group per degree.

    results = run_on_ranks([2, 3], [Check("name", "rank_checks:architecture", {"name": "flux2"})])
    results[2]["name"]  # what the check returned, one entry per rank

A module of checks may have a function `before_fork()`, for imports that every rank would otherwise pay for.
A check is a function `f(ranks, **arguments) -> JSON value`, called on every rank with a `Ranks` of the default group.
What it raises becomes `{"error": text, "kind": class name}` on that rank; a rank that dies or hangs ends the run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 280.0  # for everything; the collectives of one run time out long before
COLLECTIVE_S = 60


@dataclass
class Check:
    """One function to call on every rank, by `module:function` of a module beside this file."""

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    degrees: tuple[int, ...] | None = None  # None: every degree of the run


def run_on_ranks(degrees: Sequence[int], checks: Sequence[Check]) -> dict[int, dict[str, list[Any]]]:
    """Run `checks` in order on a group of each degree: {degree: {check name: [result of rank 0, ...]}}."""
    with tempfile.TemporaryDirectory(prefix="tp-ranks-") as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"degrees": list(degrees), "checks": [asdict(check) for check in checks]}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = subprocess.Popen(
            [sys.executable, __file__, str(job)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise AssertionError(f"the ranks ended with status {process.returncode}:\n{output[-6000:]}")
        results: dict[int, dict[str, list[Any]]] = {}
        for degree in degrees:
            ranks = [
                json.loads((Path(folder) / f"result-{degree}-{rank}.json").read_text())
                for rank in range(degree)
            ]
            results[degree] = {name: [results_of[name] for results_of in ranks] for name in ranks[0]}
        return results


def main(job: Path) -> int:
    """The process that imports everything once and forks the ranks of one degree after the other."""
    plan = json.loads(job.read_text())
    functions = {check["name"]: _function(check["function"]) for check in plan["checks"]}
    for module in {function.__module__ for function in functions.values()}:
        getattr(sys.modules[module], "before_fork", lambda: None)()
    for degree in plan["degrees"]:
        children = []
        for rank in range(degree):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank(job.parent, plan["checks"], functions, rank, degree))
            children.append(pid)
        if not _wait(children):
            return 1
    return 0


def _wait(children: list[int]) -> bool:
    """Whether every child ends well; after the first that does not, the others are killed."""
    left = set(children)
    good = True
    deadline = time.monotonic() + DEADLINE_S
    while left and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        left.discard(pid)
        if status != 0:
            print(f"rank process {pid} ended with wait status {status}")
            good = False
            break
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return good and not left


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _rank(folder: Path, checks: list[dict], functions: dict[str, Any], rank: int, degree: int) -> int:
    try:
        from datetime import timedelta

        import torch.distributed as dist

        from comfy_tp.core.tp.collectives import Ranks

        store = dist.FileStore(str(folder / f"store-{degree}"), degree)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=degree, timeout=timedelta(seconds=COLLECTIVE_S)
        )
        results: dict[str, Any] = {}
        for check in checks:
            if check["degrees"] and degree not in check["degrees"]:
                continue
            ranks = Ranks(rank, degree, "cpu", dist.group.WORLD)
            try:
                results[check["name"]] = functions[check["name"]](ranks, **check["arguments"])
            except Exception as error:
                print(f"rank {rank} of {degree}, {check['name']}:\n{traceback.format_exc()}", flush=True)
                results[check["name"]] = {"error": str(error), "kind": type(error).__name__}
        (folder / f"result-{degree}-{rank}.json").write_text(json.dumps(results))
        dist.barrier()
        dist.destroy_process_group()
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
