"""A group over several machines: the same ranks under torchrun, here two nodes on the loopback address."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from group_processes import COMMANDS, running, still_running
from torchrun_nodes import Nodes

from comfy_tp.core.errors import Cancelled, ConfigError, RankError
from comfy_tp.core.group import pulse as life
from comfy_tp.core.group.address import parse_address
from comfy_tp.core.group.client import RankGroup
from comfy_tp.core.group.node import StorePulse, tcp_listener
from comfy_tp.core.group.pulse import RankPulse
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
    with pytest.raises(ConfigError, match="--listen '29500' is not of the form host:port"):
        tcp_listener("29500")
    with tcp_listener("127.0.0.1:0") as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1:"):
            tcp_listener(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_group_that_is_not_there_is_a_named_error():
    with pytest.raises(RankError, match=r"The rank group at 127.0.0.1:9 cannot be used: .*[Rr]efused"):
        RankGroup.connect("127.0.0.1:9", "a" * 64)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        *((each, "is not of the form host:port") for each in ("29500", "host:", "host:port", ":80", "[]:80")),
        *((f"127.0.0.1:{digits}", "is not of the form host:port") for digits in ("\u00b2", "-1", "\u0663")),
        *((f"127.0.0.1:{port}", "a port is a number up to 65535") for port in ("65536", "9" * 5000)),
        *((f"{host}:80", "no host can have this name") for host in ("x" * 300, "a..b", "\ud800", "a\0b")),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_text_that_is_no_address_is_refused_by_name(address, text):
    with pytest.raises(ConfigError, match=text) as caught:
        RankGroup.connect(address, "a" * 64)
    assert len(str(caught.value)) < 200


def test_an_ipv6_address_may_stand_in_brackets():
    assert parse_address("[::1]:80") == parse_address("::1:80") == ("::1", 80)


def rank_1_says(store: dist.Store, **said) -> None:
    usual = {"beat": 1, "command": 1, "step": 0, "age": 0.0, "state": life.IDLE, "slowest": 0.0}
    store.set("pulse/1", json.dumps({**usual, "note": "", "place": "", "raised": None, **said}))


class StoreThatIsGone:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def watched(store: dist.Store) -> dict:
    """The verdict of rank 0 of two over what the store says of rank 1."""
    limits = SimpleNamespace(step_timeout=60, heartbeat_timeout=1.0, error_grace=1.0)
    verdicts: queue.Queue = queue.Queue()
    StorePulse(store, RankPulse(None, 0, 1.0), 0, ["cpu", "cpu"], limits).start(verdicts.put)
    return verdicts.get(timeout=10)


def test_a_note_that_is_no_text_does_not_end_the_watch_over_the_ranks():
    store = dist.HashStore()
    rank_1_says(store, note="\ud800")
    verdict = watched(store)
    assert verdict["rank"] == 1 and "no sign of life" in verdict["cause"] and verdict["doing"] == "?"


def test_a_watch_that_cannot_go_on_ends_the_group_by_name():
    store = dist.HashStore()
    store.set("pulse/1", "no JSON")
    verdict = watched(store)
    assert verdict["rank"] == 0
    assert verdict["cause"].startswith("cannot watch the ranks any more: JSONDecodeError: ")
    verdict = watched(StoreThatIsGone())
    assert verdict["cause"] == "cannot watch the ranks any more: torchrun's store is gone (Broken pipe)"
