"""Load TP Model on ranks that run elsewhere under torchrun: by address and token, and what a lost machine does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    native,
    relative_error,
    save_small_model,
    small_model,
)
from group_processes import SOON
from torchrun_nodes import Namespaces, Nodes, all_end, free_port

from comfy_tp.core.errors import CheckpointError, ConfigError, PlanError, RankError

NAME = "small-flux2"
LIMITS = ["--error-grace", "1", "--keepalive", "1"]
# Far from what it takes, and from the 60 s of the heartbeat unless told otherwise.
NOTICED = 40.0


def image(model, **changes) -> torch.Tensor:
    return ksampler(model, conditioning(), conditioning(), latent(), steps=2, **changes)


@pytest.fixture
def token_of(monkeypatch):
    def give(nodes: Nodes) -> None:
        monkeypatch.setenv("COMFY_TP_TOKEN_FILE", str(nodes.token_file))

    monkeypatch.delenv("COMFY_TP_TOKEN_FILE", raising=False)
    return give


@pytest.mark.usefixtures("in_comfy")
def test_without_a_token_from_the_owner_no_connection_is_even_tried(token_of, monkeypatch, tmp_path):
    from comfy_tp.core.ranks.client import RankGroup

    small_model()
    tried = []
    monkeypatch.setattr(RankGroup, "connect", lambda *arguments: tried.append(arguments))
    with pytest.raises(ConfigError, match=r"tcp://ranks:29500 asks for its token.*COMFY_TP_TOKEN_FILE=FILE"):
        load_tp(NAME, 0, devices="tcp://ranks:29500")
    path = tmp_path / "token"
    monkeypatch.setenv("COMFY_TP_TOKEN_FILE", str(path))
    with pytest.raises(
        ConfigError, match="COMFY_TP_TOKEN_FILE: the token file .* cannot be read: No such file"
    ):
        load_tp(NAME, 0, devices="tcp://ranks:29500")
    path.write_text("a" * 64)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="COMFY_TP_TOKEN_FILE: others may read the token file"):
        load_tp(NAME, 0, devices="tcp://ranks:29500")
    for text in ("tcp://ranks", "tcp://:29500", "tcp://ranks:port", "http://ranks:80", "tcp://"):
        with pytest.raises(ConfigError, match=r"devices: '.*'.*\. Write tcp://HOST:PORT"):
            load_tp(NAME, 0, devices=text)
    assert tried == []


@pytest.mark.usefixtures("in_comfy")
def test_ranks_elsewhere_serve_the_loader_node(token_of, tmp_path, in_comfy):  # noqa: F811
    import comfy.model_management as management

    from comfy_tp.comfy_tp_nodes import groups
    from comfy_tp.comfy_tp_nodes.nodes.status import TPStatus
    from comfy_tp.comfy_tp_nodes.nodes.unload_model import UnloadTPModel
    from comfy_tp.core.calls.remote import RemoteModel
    from comfy_tp.core.ranks.client import RankGroup

    small_model()
    nodes = Nodes(tmp_path, nodes=1, per_node=2, options=LIMITS)
    try:
        nodes.connect().close()
        token_of(nodes)

        # Load: the group's size is the degree, another one is refused, and the heads are checked.
        with pytest.raises(
            ConfigError, match=r"degree 4 was chosen, but the group at .* has 2 ranks. Set degree to 2 or 0"
        ):
            load_tp(NAME, 4, devices=nodes.devices)
        save_small_model(
            in_comfy / "models/diffusion_models/odd-heads",
            num_attention_heads=3,
            num_layers=1,
            num_single_layers=1,
        )
        with pytest.raises(PlanError, match="tp_degree=2 must divide the 3 attention heads"):
            load_tp("odd-heads", 0, devices=nodes.devices)
        model = load_tp(NAME, 0, devices=nodes.devices)
        sharded = model.sharded
        assert sharded.placement.degree == 2 and all("@" in name for name in sharded.placement.devices)
        assert relative_error(image(model), image(native())) < 1e-5
        group = sharded.remote.group

        # A second load reads nothing and opens no second connection.
        again = load_tp(NAME, 2, devices=nodes.devices)
        assert again.sharded is sharded and sharded.remote.group is group and sharded.loads == 1

        # The shards are no memory of this machine, and making room here does not touch them.
        assert model.model_size() == model.loaded_size() == model.get_ram_usage() == 0
        assert model.get_nested_additional_models() == []
        management.unload_all_models()
        assert sharded.loaded and sum(sharded.info.resident_bytes) > 0
        before = image(model)
        assert sharded.loads == 1
        status = TPStatus.execute().args[0]
        assert f"Ranks: 2 on {', '.join(group.devices)}" in status and NAME in status

        # A lost connection: the run ends with its name, the next one connects again, and the ranks hold one model.
        group._line._channel.close()
        deadline = time.monotonic() + SOON
        while group.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(RankError, match=r"The connection to rank 0 \(cpu@\S+\) ended"):
            sharded.require()
        assert torch.equal(image(model), before)
        assert sharded.loads == 2 and sharded.remote.group is not group
        ranks = sharded.remote.group.status()["ranks"]
        assert [len(rank["models"]) for rank in ranks] == [1, 1]

        # A path that a machine lacks is named with the rank and the machine.
        with pytest.raises(
            CheckpointError, match="rank 0 finds no '/nowhere/model' on the machine .*same path"
        ):
            RemoteModel.load(sharded.remote.group, "/nowhere/model")

        # Unload frees the ranks and the place of the client.
        connection = sharded.remote.group
        UnloadTPModel.execute(None, model)
        assert not sharded.loaded and connection not in groups.running().values()
        with RankGroup.connect(nodes.address, nodes.token_file.read_text().strip()) as other:
            assert [len(rank["models"]) for rank in other.status()["ranks"]] == [0, 0]
            with pytest.raises(RankError, match="already serves another client"):
                load_tp(NAME, 0, devices=nodes.devices)
    finally:
        groups.close_all()
        nodes.end()


@contextmanager
def two_machines(folder, token_of, *options: str) -> Iterator[tuple[Namespaces, Nodes]]:
    """One rank in each of two network namespaces that are joined by a veth pair, ready for a client."""
    from comfy_tp.comfy_tp_nodes import groups

    missing = Namespaces.missing()
    if missing:
        pytest.skip(missing)
    small_model()
    with Namespaces() as net:
        nodes = Nodes(
            folder,
            host=net.hosts[0],
            ports=(29400, 29500),
            options=[*LIMITS, *options],
            within=[net.within(0), net.within(1)],
            environments=[{"GLOO_SOCKET_IFNAME": net.interface}] * 2,
        )
        try:
            nodes.connect().close()
            token_of(nodes)
            yield net, nodes
        finally:
            groups.close_all()
            nodes.end()


def seconds_until_lost(model, lose: Callable[[], None], error: str) -> float:
    """How long after `lose`, called in a step of a run, the run ends with `error`."""
    lost_at: list[float] = []

    def in_a_step(*step: object) -> None:
        if not lost_at:
            lose()
            lost_at.append(time.monotonic())

    with pytest.raises(RankError, match=error):
        sample_with(model, in_a_step)
    return time.monotonic() - lost_at[0]


LOST = {0: r"The connection to rank 0 \(cpu@\S+\) ended: ", 1: r"Rank 1 \(cpu@\S+\) is gone during "}


@pytest.mark.usefixtures("in_comfy")
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_two_machines_joined_by_a_network_form_one_group_and_the_loss_of_one_is_named(
    token_of, tmp_path, lost
):
    with two_machines(tmp_path, token_of) as (_, nodes):
        model = load_tp(NAME, 0, devices=nodes.devices)
        group = model.sharded.remote.group
        assert relative_error(image(model), image(native())) < 1e-5
        pids = [rank["pid"] for rank in group.status()["ranks"]]
        links = {os.readlink(f"/proc/{pid}/ns/net") for pid in [*pids, os.getpid()]}
        assert len(links) == 3, "the ranks and the client share a network namespace"

        assert seconds_until_lost(model, lambda: nodes.kill_node(lost, [pids[lost]]), LOST[lost]) < NOTICED
        assert (group.failure.rank, group.failure.device) == (lost, group.devices[lost])
        assert not group.alive and not model.sharded.loaded
        with pytest.raises(RankError, match="cannot be used"):
            image(model)
        assert all_end(pids)


@pytest.mark.usefixtures("in_comfy")
def test_a_network_that_falls_silent_is_noticed_by_the_heartbeat_and_the_machine_behind_it_named(
    token_of, tmp_path
):
    with two_machines(tmp_path, token_of, "--heartbeat-timeout", "4") as (net, nodes):
        model = load_tp(NAME, 0, devices=nodes.devices)
        group = model.sharded.remote.group
        pids = [rank["pid"] for rank in group.status()["ranks"]]
        assert 3 <= seconds_until_lost(model, net.cut, r"Rank 1 \(cpu@.*\) .*no sign of life") < NOTICED
        assert not group.alive and not model.sharded.loaded
        assert all_end(pids, SOON)


@pytest.mark.soak
@pytest.mark.usefixtures("in_comfy")
def test_a_machine_lost_in_a_load_is_named_and_machines_started_again_are_used(token_of, tmp_path):
    from comfy_tp.comfy_tp_nodes import groups

    small_model()
    ports = (free_port(), free_port())
    nodes = Nodes(tmp_path, options=LIMITS, ports=ports)
    try:
        nodes.connect().close()
        token_of(nodes)
        model = load_tp(NAME, 0, devices=nodes.devices)
        expected = image(model)
        pids = [rank["pid"] for rank in model.sharded.remote.group.status()["ranks"]]
        model.sharded.unload()
        # The load waits for this rank, so that the loss falls into it.
        os.kill(pids[1], signal.SIGSTOP)
        threading.Timer(0.5, nodes.kill_node, (1, [pids[1]])).start()
        with pytest.raises(RankError, match=LOST[1] + "'load'") as caught:
            load_tp(NAME, 0, devices=nodes.devices)
        assert caught.value.rank == 1 and "\nLogs: " in str(caught.value)
        assert all_end(pids)
        with pytest.raises(RankError, match="cannot be used"):
            image(model)

        nodes.end()
        nodes = Nodes(tmp_path, options=LIMITS, ports=ports)
        nodes.connect().close()
        assert torch.equal(image(model), expected)
    finally:
        groups.close_all()
        nodes.end()


def sample_with(model, callback) -> None:
    import comfy.sample

    with torch.inference_mode():
        start = latent()["samples"]
        comfy.sample.sample(
            model,
            torch.randn(start.shape),
            200,
            1.0,
            "euler",
            "simple",
            conditioning(),
            conditioning(),
            start,
            callback=callback,
        )
