"""What the load bench makes of its ranks' figures, and how it ends when a rank fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comfy_tp.core.cli.bench_load import run_ranks, summarise
from comfy_tp.core.errors import ConfigError, RankError


def rank_figures(seconds: float, checksum: int = 7, shape: int = 4) -> dict:
    return {
        "seconds": seconds,
        "cpu_seconds": seconds / 2,
        "bytes_read": 50,
        "rchar": 60,
        "anonymous_peak_mb": 10.0,
        "file_peak_mb": 1.0,
        "shard_mb": 8.0,
        "anonymous_beyond_shard_mb": 2.0,
        "weights": {"w": [shape, checksum]},
    }


def test_ratios_are_of_medians_of_the_slowest_rank():
    figures = summarise(
        {
            "ours": [
                [rank_figures(1.0), rank_figures(2.0)],
                [rank_figures(9.0), rank_figures(1.0)],
                [rank_figures(1.0)] * 2,
            ],
            "restart": [[rank_figures(1.0), rank_figures(0.5)]] * 3,
            "diffusers": [[rank_figures(8.0), rank_figures(1.0)]] * 3,
            "diffusers_after": [[rank_figures(16.0), rank_figures(1.0)]] * 3,
        },
        100,
    )
    assert figures["time_ratio"] == 2.0 / 8.0
    assert figures["time_ratio_after"] == 2.0 / 16.0
    assert figures["cpu_time_ratio"] == 2.0 / 8.0
    assert figures["restart_ratio"] == figures["restart_cpu_ratio"] == 1.0 / 2.0
    assert figures["bytes_read_ratio"] == 1.0
    assert figures["anonymous_beyond_shard_mb"] == 2.0
    assert figures["same_weights"]


def test_different_weights_are_noticed_where_the_shards_have_one_shape():
    ours = [[rank_figures(1.0, checksum=7)]]
    assert not summarise({"ours": ours, "diffusers": [[rank_figures(1.0, checksum=8)]]}, 100)["same_weights"]
    assert summarise({"ours": ours, "diffusers": [[rank_figures(1.0, checksum=8, shape=2)]]}, 100)[
        "same_weights"
    ]


def test_a_rank_that_fails_is_named_with_what_it_said(tmp_path):
    with pytest.raises(RankError, match=r"Rank [01] of .* ended with 1:\n.*No module named"):
        run_ranks("comfy_tp.no_such_program", ["ours"], 2, 1, tmp_path)
    assert os.listdir(tmp_path) == []


REFUSING = """
import os, sys
from comfy_tp.core.cli.rank_processes import refusals_told
from comfy_tp.core.errors import ConfigError
*_, work, rank, degree, threads = sys.argv
with refusals_told(work, int(rank)):
    raise ConfigError(f"the hub is {'off' if os.environ.get('HF_HUB_OFFLINE') == '1' else 'open'}.")
"""


def test_what_a_rank_refuses_is_refused_here_and_the_hub_is_closed_unless_asked_for(tmp_path, monkeypatch):
    (tmp_path / "refusing.py").write_text(REFUSING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for downloads, word in ((False, "off"), (True, "open")):
        with pytest.raises(ConfigError, match=f"^the hub is {word}.$"):
            run_ranks("refusing", [], 1, 1, tmp_path, downloads=downloads)
    (tmp_path / "sleeping.py").write_text("import time; time.sleep(60)")
    with pytest.raises(RankError, match=r"The ranks of sleeping did not finish in 0\.1 s"):
        run_ranks("sleeping", [], 1, 1, tmp_path, limit_s=0.1)


MEASURED_FOREVER = """
import signal, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
from comfy_tp.core.cli import bench
from comfy_tp.core.cli.rank_processes import run_ranks

# A run in the background ignores Ctrl-C, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

def measure(_):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        run_ranks("sleeper", [], 2, 1, Path(folder))

bench.run(SimpleNamespace(run_measurement=measure))
"""
LOAD_MEASURED = """
import argparse, sys
from comfy_tp.core.cli import bench, bench_load

parser = argparse.ArgumentParser()
bench_load.add_arguments(parser)
args = parser.parse_args(["--folder", sys.argv[1]])
bench.run(argparse.Namespace(run_measurement=bench_load.run, **vars(args)))
"""
SLEEPER = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], f"pid-{os.getpid()}").touch()
time.sleep(60)
"""


def found(folder: Path, pattern: str, count: int) -> list[Path]:
    """The `count` files of that pattern, once they are there."""
    deadline = time.monotonic() + 60
    while len(paths := list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{folder} has no {pattern}"
        time.sleep(0.02)
    return paths


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_ranks_and_leaves_no_file(tmp_path, number):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    work = tmp_path / "work"
    work.mkdir()
    bench = subprocess.Popen(
        [sys.executable, "-c", MEASURED_FOREVER, str(work)], env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    try:
        ranks = [int(path.name.removeprefix("pid-")) for path in found(work, "*/*/pid-*", 2)]
        bench.send_signal(number)
        assert bench.wait(timeout=20) == 128 + number
    finally:
        bench.kill()
        bench.wait(timeout=20)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert os.listdir(work) == []


def test_a_terminated_load_bench_takes_its_checkpoint_with_it(tmp_path):
    bench = subprocess.Popen(
        [sys.executable, "-c", LOAD_MEASURED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert "making a FLUX.2-shaped checkpoint" in bench.stdout.readline()
        assert os.listdir(tmp_path)
        bench.terminate()
        assert bench.wait(timeout=20) == 143
    finally:
        bench.kill()
        bench.communicate(timeout=20)
    assert os.listdir(tmp_path) == []
