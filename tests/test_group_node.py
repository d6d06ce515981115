"""A group over several machines: the same ranks under torchrun, here two nodes on the loopback address."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from group_processes import COMMANDS, running, still_running
from torchrun_nodes import Nodes

from comfy_tp.core.errors import Cancelled, ConfigError, RankError
from comfy_tp.core.group.client import RankGroup
from comfy_tp.core.group.node import tcp_listener
from comfy_tp.core.group.secret import make_token, read_token

OPTIONS = ["--heartbeat-timeout", "4", "--step-timeout", "4", "--error-grace", "1", "--commands", COMMANDS]


@pytest.fixture
def cluster(tmp_path):
    made = Nodes(tmp_path, options=OPTIONS)
    yield made
    made.end()


def test_ranks_on_two_nodes_serve_one_client_after_another_and_the_loss_of_a_node_is_told(cluster):
    group = cluster.connect()
    assert group.degree == 2 and all(device.startswith("cpu@") for device in group.devices)
    big = torch.randn(2_000_000)
    assert group.request("total", {}, [big]).tensors[0].equal(big.double() * 2)
    pids = [entry["pid"] for entry in group.status()["ranks"]]

    with pytest.raises(RankError, match="the token is wrong"):
        RankGroup.connect(cluster.address, "b" * 64)
    with pytest.raises(RankError, match="already serves another client"):
        RankGroup.connect(cluster.address, cluster.token_file.read_text().strip())

    threading.Timer(0.3, group.cancel).start()
    with pytest.raises(Cancelled):
        group.request("steps", {"steps": 1000, "seconds": 0.05})
    threading.Timer(0.3, group.cancel).start()
    with pytest.raises(Cancelled):
        group.request("alone", {"seconds": 1})

    # A client that leaves in the middle of a command leaves a usable group behind.
    with pytest.raises(RankError, match="within 0.3 s"):
        group.request("steps", {"steps": 1000, "seconds": 0.05}, timeout=0.3)
    group.close()
    group = cluster.connect(10)
    assert group.request("ping").header == {"degree": 2, "ranks": [0, 1]}
    assert all(running(pid) for pid in pids)

    # Node 1 is lost with its rank.
    cluster.kill_node(1, [pids[1]])
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        for _ in range(100):
            group.request("steps", {"steps": 10, "seconds": 0.05})
    assert time.monotonic() - started < 5
    assert "lost its connection to the other ranks" in str(caught.value)
    assert not group.alive
    assert still_running(pids, 15) == []
    group.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    "command, header, text",
    [
        ("hangs", {"rank": 1}, r"Rank 1 \(cpu@.*\) made no progress for .* in hangs"),
        (
            "raises",
            {"ranks": [1], "kind": "KeyError", "others": "collective"},
            r"Rank 1 \(.*\) raised KeyError",
        ),
    ],
)
def test_a_rank_of_another_node_that_holds_up_the_group_is_named(cluster, command, header, text):
    group = cluster.connect()
    started = time.monotonic()
    with pytest.raises(RankError, match=text):
        group.request(command, header)
    assert time.monotonic() - started < 4 + 3
    group.close()


@pytest.mark.soak
def test_a_stopped_rank_0_is_noticed_by_the_client(cluster):
    group = cluster.connect()
    pid = group.status()["ranks"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"Rank 0 \(cpu@.*\) has not been heard for"):
        group.request("steps", {"steps": 1000, "seconds": 0.05})
    os.kill(pid, signal.SIGKILL)
    group.close()


def test_a_token_file_is_made_private_and_refused_when_it_is_not(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="the token file .*token cannot be read: No such file"):
        read_token(path)
    make_token(path)
    token = read_token(path)
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600
    make_token(path)
    assert read_token(path) == token
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read the token file .*chmod 600"):
        read_token(path)
    path.write_text("short")
    with pytest.raises(ConfigError, match="has 5 characters; at least 32"):
        read_token(path)


def test_an_address_that_cannot_be_listened_on_is_refused():
    for address in ("29500", "host:", "host:port"):
        with pytest.raises(ConfigError, match="is not of the form host:port"):
            tcp_listener(address)
    with tcp_listener("127.0.0.1:0") as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1:"):
            tcp_listener(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_group_that_is_not_there_is_a_named_error():
    with pytest.raises(RankError, match=r"The rank group at 127.0.0.1:9 cannot be used: .*[Rr]efused"):
        RankGroup.connect("127.0.0.1:9", "a" * 64)
    with pytest.raises(RankError, match="'nowhere' is not of the form host:port"):
        RankGroup.connect("nowhere", "a" * 64)
