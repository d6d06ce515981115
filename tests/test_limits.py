"""The bounds that `comfy-tp doctor` prints, against figures counted independently; and its environment checks."""

from __future__ import annotations

import argparse

import pytest

from comfy_tp.core.cli import doctor, ranks
from comfy_tp.core.errors import ConfigError
from comfy_tp.core.planning import bounds as limits

DEV = limits.Size("dev", 8, 48, 48, 15360, sharded=32_000_000_000, replicated=223_281_152)
MACHINE = limits.Machine(disk=7e9, host_to_device=25e9, all_reduce=20e9, compute=600e12, device_bytes=24e9)


def test_operations_and_messages_of_flux2_dev_agree_with_the_counted_ones():
    # 282.6 TFLOP with the embedders and 3.624 GB of messages at 1024x1024 with 512 text tokens.
    assert DEV.step_operations(4608) == pytest.approx(282.6e12, rel=0.01)
    assert DEV.reduced_bytes(4608) == pytest.approx(3.624e9, rel=0.001)


def test_a_prediction_follows_from_the_bandwidths():
    bound = limits.predict(DEV, MACHINE, 4)
    assert bound.rank_bytes == pytest.approx(2 * (8e9 + 223_281_152))
    assert bound.load_warm_s == pytest.approx(bound.rank_bytes / 25e9)
    assert bound.load_cold_s == pytest.approx(64.447e9 / 7e9, rel=1e-3)
    assert bound.compute_s == pytest.approx(0.118, rel=0.02)
    assert bound.reduce_s == pytest.approx(3.624e9 * 1.5 / 20e9, rel=1e-3)
    assert bound.step_s == bound.compute_s + bound.reduce_s
    assert bound.fits is True
    assert limits.predict(DEV, MACHINE, 2).fits is False
    assert limits.predict(DEV, MACHINE, 1).reduce_s == 0.0


def test_the_published_models_are_counted_through_the_plan():
    dev = next(size for size in limits.published() if "dev" in size.name)
    assert dev.parameters == 32_223_281_152
    assert dev.replicated / dev.parameters < 0.01  # 2.5% before the modulations were sharded too


def test_a_missing_or_old_package_is_a_problem_with_its_mend():
    assert doctor.check_version("torch", "2.4")[1] is None
    assert "pip install -U 'torch>=99.0'" in doctor.check_version("torch", "99.0")[1]
    assert "no-such-package is not installed" in doctor.check_version("no-such-package", "1.0")[1]


def test_the_doctor_finds_this_environment_ready(capsys):
    status, figures = doctor.run(argparse.Namespace(quick=True, folder=None, ranks=0))
    assert status == 0, figures["problems"]
    assert "ready" in capsys.readouterr().out


def test_the_doctor_fails_when_a_package_is_too_old(monkeypatch, capsys):
    monkeypatch.setitem(doctor.FLOORS, "diffusers", "99.0")
    status, figures = doctor.run(argparse.Namespace(quick=True, folder=None, ranks=0))
    assert status == 1
    assert "diffusers" in figures["problems"][0]
    assert "not ready" in capsys.readouterr().out


def lines(**changes) -> argparse.Namespace:
    settings = {"host": "10.1.2.3", "nodes": 2, "per_node": 4, "rendezvous_port": 29400, "port": 29500}
    return argparse.Namespace(**{**settings, "token_file": "t", "device": "cuda", **changes})


def test_the_lines_for_several_machines_name_the_module_and_the_address(capsys):
    status, figures = ranks.run(lines())
    assert status == 0
    first, second = figures["lines"]
    assert first.startswith("torchrun --nnodes=2 --node-rank=0 --nproc-per-node=4 ")
    assert "--master-addr=10.1.2.3 --master-port=29400" in first
    assert "--log-dir=/dev/null" in first  # else torchrun leaves a folder in /tmp
    assert "logs of its ranks in ~/.cache/comfy-tp/logs" in capsys.readouterr().out
    assert "comfy_tp.core.ranks.machines.node --listen 10.1.2.3:29500 --token-file t" in first
    assert second == first.replace("--node-rank=0", "--node-rank=1")
    assert figures["devices"] == "tcp://10.1.2.3:29500"
    assert figures["degree"] == 8


def test_no_machines_are_refused():
    with pytest.raises(ConfigError, match="must be at least 1"):
        ranks.run(lines(nodes=0))
