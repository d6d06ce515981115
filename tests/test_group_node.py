"""A group over several machines: the same ranks under torchrun, here two nodes on the loopback address."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from group_processes import COMMANDS, SOON, running, still_running
from torchrun_nodes import Nodes

from comfy_tp.core.errors import Cancelled, ConfigError, RankError
from comfy_tp.core.ranks import heartbeat as life
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.heartbeat import RankHeartbeat
from comfy_tp.core.ranks.machines.address import parse_address
from comfy_tp.core.ranks.machines.node import tcp_listener
from comfy_tp.core.ranks.machines.secret import make_token, read_token
from comfy_tp.core.ranks.machines.watch import StoreHeartbeat
from comfy_tp.core.ranks.watchdog import Verdict

OPTIONS = ["--heartbeat-timeout", "4", "--step-timeout", "4", "--error-grace", "1", "--commands", COMMANDS]


@pytest.fixture
def cluster(tmp_path):
    made = Nodes(tmp_path, options=OPTIONS)
    yield made
    made.end()
    assert os.listdir(made.temporary) == []


LOST = {0: r"The connection to rank 0 \(cpu@\S+\) ended: ", 1: r"Rank 1 \(cpu@\S+\) is gone"}
STEPS = ("steps", {"steps": 1000, "seconds": 0.05})


def assert_blames(error: RankError, group: RankGroup, rank: int) -> None:
    """The error has the rank, its device with the machine, and the folder of its log."""
    assert (error.rank, error.device) == (rank, group.devices[rank])
    machine, folder = re.search(r"Logs: (\S+?):(/.*)", str(error)).groups()
    assert group.devices[rank].endswith(f"@{machine}")
    assert "comfy_tp.node INFO logs: " in (Path(folder) / f"rank-{rank}.log").read_text()


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

    # Node 1 is lost with its rank, while the group is idle.
    cluster.kill_node(1, [pids[1]])
    with pytest.raises(RankError, match=LOST[1]) as caught:
        for _ in range(100):
            group.request("steps", {"steps": 10, "seconds": 0.05})
    assert_blames(caught.value, group, 1)
    assert not group.alive
    assert still_running(pids, SOON) == []
    group.close()


@pytest.mark.parametrize(
    ("node", "idle"),
    [
        pytest.param(0, False, id="node 0 in a command"),
        pytest.param(0, True, id="node 0 idle", marks=pytest.mark.soak),
        pytest.param(1, False, id="node 1 in a command", marks=pytest.mark.soak),
    ],
)
def test_a_lost_node_is_named_by_the_command_that_it_breaks(cluster, node, idle):
    group = cluster.connect()
    pids = [entry["pid"] for entry in group.status()["ranks"]]
    lose = threading.Timer(0.5, cluster.kill_node, (node, [pids[node]]))
    lose.start()
    if idle:
        lose.join(SOON)
        time.sleep(0.5)
    with pytest.raises(RankError, match=LOST[node]) as caught:
        group.request(*STEPS)
    assert_blames(caught.value, group, node)
    assert still_running(pids, SOON) == []
    group.close()


def test_of_two_ranks_on_one_machine_the_killed_one_is_named_and_they_share_a_log_folder(tmp_path):
    made = Nodes(tmp_path, nodes=1, per_node=2, options=OPTIONS)
    try:
        group = made.connect()
        pids = [entry["pid"] for entry in group.status()["ranks"]]
        # torchrun then ends the other one with SIGTERM, which first tells why.
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
        with pytest.raises(RankError, match=r"Rank 1 \(cpu@\S+\) is gone during 'steps'\. ") as caught:
            group.request(*STEPS)
        assert_blames(caught.value, group, 1)
        assert len(os.listdir(made.cache / "comfy-tp" / "logs")) == 1
        assert still_running(pids, SOON) == []
        group.close()
    finally:
        made.end()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_stopped_rank_is_named_in_the_heartbeats_time_and_every_process_ends_soon_after(cluster, rank):
    group = cluster.connect()
    pids = [entry["pid"] for entry in group.status()["ranks"]]
    os.kill(pids[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    with pytest.raises(RankError, match=rf"Rank {rank} \(cpu@\S+\) has shown no sign of life for") as caught:
        group.request(*STEPS)
    assert 3 < time.monotonic() - stopped < 40  # 60 unless told otherwise
    assert_blames(caught.value, group, rank)
    assert still_running(pids, SOON) == []
    assert still_running([process.pid for process in cluster.processes], SOON) == []
    group.close()


@pytest.mark.soak
def test_a_torchrun_that_is_told_to_end_is_named_with_its_rank(cluster):
    group = cluster.connect()
    threading.Timer(0.5, cluster.processes[1].terminate).start()
    with pytest.raises(RankError, match=r"Rank 1 \(cpu@\S+\) was told to end by SIGTERM") as caught:
        group.request(*STEPS)
    assert_blames(caught.value, group, 1)
    group.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    "command, header, text",
    [
        ("hangs", {"rank": 1}, r"Rank 1 \(cpu@.*\) made no progress for .* in hangs"),
        (
            "raises",
            {"ranks": [1], "kind": "KeyError", "others": "collective"},
            r"Rank 1 \(cpu@.*\) raised KeyError",
        ),
    ],
)
def test_a_rank_of_another_node_that_holds_up_the_group_is_named(cluster, command, header, text):
    group = cluster.connect()
    started = time.monotonic()
    with pytest.raises(RankError, match=text):
        group.request(command, header)
    assert time.monotonic() - started < 40
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
    store.set("heartbeat/1", json.dumps({**usual, "note": "", "frame": "", "raised": None, **said}))


class StoreThatIsGone:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def watched(store: dist.Store) -> Verdict:
    """The verdict of rank 0 of two over what the store says of rank 1."""
    limits = SimpleNamespace(step_timeout=60, heartbeat_timeout=1.0, error_grace=1.0)
    verdicts: queue.Queue = queue.Queue()
    StoreHeartbeat(store, RankHeartbeat(None, 0, 1.0), 0, ["cpu", "cpu"], limits).start(verdicts.put)
    return verdicts.get(timeout=SOON)


def test_a_note_that_is_no_text_does_not_end_the_watch_over_the_ranks():
    store = dist.HashStore()
    rank_1_says(store, note="\ud800")
    verdict = watched(store)
    assert verdict.rank == 1 and "no sign of life" in verdict.cause and verdict.doing == "?"


def test_a_watch_that_cannot_go_on_ends_the_group_by_name():
    store = dist.HashStore()
    store.set("heartbeat/1", "no JSON")
    verdict = watched(store)
    assert verdict.rank == 0
    assert verdict.cause.startswith("cannot watch the ranks any more: JSONDecodeError: ")
    verdict = watched(StoreThatIsGone())
    assert verdict.cause == "cannot watch the ranks any more: torchrun's store is gone (Broken pipe)"


ROLL_LIMITS = SimpleNamespace(step_timeout=60, heartbeat_timeout=60, error_grace=0.5)


def verdicts_after(happens, degree: int = 2, silent: int = 0) -> list:
    """Each answering rank's verdict after `happens(signs of the last of them)`; `silent` more ranks never answer."""
    store = dist.HashStore()
    devices = [f"cpu@{rank}" for rank in range(degree + silent)]
    verdicts: queue.Queue = queue.Queue()
    ranks = []
    for rank in range(degree):
        pulse = RankHeartbeat(None, rank, 1.0)
        pulse.begin(1, "load")
        ranks.append(StoreHeartbeat(store, pulse, rank, devices, ROLL_LIMITS))
        ranks[-1].start(verdicts.put)
    happens(ranks[-1])
    return [verdicts.get(timeout=SOON) for _ in range(degree)]


def test_who_does_not_answer_when_a_peer_is_lost_is_gone():
    for verdict in verdicts_after(lambda signs: signs.lost_a_peer("Connection closed"), silent=2):
        assert (verdict.rank, verdict.device) == (2, "cpu@2")
        assert verdict.cause == "is gone, and so is rank 3 (cpu@3),"
        assert (verdict.state, verdict.doing) == (
            life.BUSY,
            "load",
        )  # as far as those who are there know


def test_where_every_rank_answers_it_is_said_that_nobody_knows_which_failed():
    for verdict in verdicts_after(lambda signs: signs.lost_a_peer("Connection closed")):
        assert (verdict.rank, verdict.device) == (None, None)
        assert "which of them failed is unknown (rank 1: Connection closed)" in verdict.cause


def test_a_signal_to_end_is_told_by_the_rank_that_got_it():
    for verdict in verdicts_after(lambda signs: signs.bell.send(b"\x0f")):
        assert verdict.rank == 1 and verdict.cause.startswith("was told to end by SIGTERM")


def test_the_last_words_of_a_rank_reach_the_others():
    for verdict in verdicts_after(lambda signs: signs.ended_by({"message": "no GPU any more"}), silent=1):
        assert (verdict.rank, verdict.error) == (1, {"message": "no GPU any more"})


def test_every_rank_judges_rank_0_too():
    store = dist.HashStore()
    rank_1_says(store)
    limits = SimpleNamespace(step_timeout=60, heartbeat_timeout=1.0, error_grace=1.0)
    verdicts: queue.Queue = queue.Queue()
    store.set("heartbeat/0", store.get("heartbeat/1"))
    StoreHeartbeat(store, RankHeartbeat(None, 1, 1.0), 1, ["cpu@a", "cpu@b"], limits).start(verdicts.put)
    verdict = verdicts.get(timeout=SOON)
    assert (verdict.rank, verdict.device) == (0, "cpu@a") and "no sign of life" in verdict.cause
