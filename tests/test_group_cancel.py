"""Commands that are cancelled while a rank, the launcher or the whole other machine has stopped: the group ends soon,
whether anybody waits or not, and a rank that only computes long is waited for."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from group_processes import COMMANDS
from test_group_faults import assert_nothing_left, everything
from test_group_node import rank_1_says

from comfy_tp.core.errors import RankError
from comfy_tp.core.ranks import heartbeat as life
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.config import Limits
from comfy_tp.core.ranks.heartbeat import RankHeartbeat
from comfy_tp.core.ranks.machines.node import tcp_listener
from comfy_tp.core.ranks.machines.watch import StoreHeartbeat
from comfy_tp.core.ranks.port import ClientPort
from comfy_tp.core.ranks.watchdog import Watchdog

HEARTBEAT = 30.0
LIMIT = 5.0  # of the silence in a cancelled command, with that heartbeat time-out
TOKEN = "a" * 64
STEPS = ("steps", {"steps": 1000, "seconds": 0.05}, [])
# More than the system takes before rank 0 reads.
LARGE = ("total", {}, [torch.zeros(4 << 20)])


class Cancel(BaseException):
    """A pressed Cancel, as newer ComfyUIs raise it."""


@pytest.fixture
def group(tmp_path) -> Iterator[RankGroup]:
    with RankGroup.start(
        ["cpu", "cpu"], commands=COMMANDS, log_dir=tmp_path / "logs", heartbeat_timeout=HEARTBEAT
    ) as started:
        yield started


def cancel_in(group: RankGroup, command: tuple[str, dict, list], seconds: float = 0.3) -> None:
    """Ask for the command and press Cancel a little later; the request must end at once."""
    pressed = time.monotonic() + seconds

    def poll() -> None:
        if time.monotonic() > pressed:
            raise Cancel

    with pytest.raises(Cancel):
        group.request(*command, poll=poll)
    assert group.alive, "it has waited for the end of the group"


def ends_by_itself(group: RankGroup, seconds: float) -> str:
    """Why the group has ended, though nobody asks it for anything."""
    deadline = time.monotonic() + seconds
    while group.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not group.alive, "nobody has noticed"
    return str(group.failure)


soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("rank", "command"),
    [
        pytest.param(0, LARGE, id="rank 0 while it is sent what it does not read"),
        pytest.param(0, STEPS, id="rank 0 in a step", marks=soak),
        pytest.param(1, STEPS, id="rank 1 in a step", marks=soak),
    ],
)
def test_a_rank_that_is_stopped_in_a_cancelled_command_ends_the_group_though_nobody_waits(
    group, rank, command
):
    processes, folder = everything(group)
    os.kill(group.pids[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    cancel_in(group, command)
    failure = ends_by_itself(group, HEARTBEAT)
    assert LIMIT - 1 < time.monotonic() - stopped < HEARTBEAT - LIMIT
    pid = processes[rank]
    assert failure.startswith(f"Rank {rank} (cpu, pid {pid}) has shown no sign of life for 5 s")
    assert "(it is stopped by a signal) in a cancelled command" in failure
    assert not group.settled()
    assert_nothing_left(processes, folder)


@pytest.mark.soak
def test_a_launcher_that_is_stopped_in_a_cancelled_command_ends_the_group_though_nobody_waits(group):
    processes, folder = everything(group)
    os.kill(processes[-1], signal.SIGSTOP)
    cancel_in(group, STEPS)
    # The ranks go on and would end the command, but for this one.
    os.kill(processes[1], signal.SIGSTOP)
    assert "The launcher of the ranks has not moved" in ends_by_itself(group, HEARTBEAT - LIMIT)
    assert_nothing_left(processes, folder)


@pytest.mark.soak
def test_a_cancelled_step_that_takes_longer_than_the_silence_allowed_is_waited_for(group):
    cancel_in(group, ("steps", {"steps": 2, "seconds": LIMIT + 3}, []))
    started = time.monotonic()
    assert group.settled()
    assert time.monotonic() - started > LIMIT + 1
    assert group.request("ping").header["degree"] == 2


def test_who_waits_for_the_end_of_a_cancelled_command_can_cancel_that_too(group):
    assert group.settled()
    cancel_in(group, ("steps", {"steps": 2, "seconds": 1.5}, []))

    def poll() -> None:
        raise Cancel

    with pytest.raises(Cancel):
        group.settled(poll=poll)
    with pytest.raises(Cancel):
        group.request("ping", poll=poll)
    assert group.settled()
    assert group.request("ping").header["degree"] == 2


def verdict_on(*, beat: float, progress: float, cancelled: bool) -> dict | None:
    """What is said of a rank in a command whose last sign of life and last step were so many seconds ago."""
    pulse = life.HeartbeatFile(None, 1)
    watchdog = Watchdog(pulse, ["cpu"], Limits(120.0, 60.0, 1.0, 1800.0, 30.0))
    now = time.monotonic()
    pulse.put(0, life.CANCELLED, cancelled)
    pulse.put(1, life.HEARTBEAT, now - beat)
    pulse.put(1, life.STATE, life.BUSY)
    pulse.put(1, life.PROGRESS, now - progress)
    return watchdog.verdict()


def test_a_sixth_of_the_heartbeats_time_is_given_in_a_cancelled_command_to_the_silent_alone():
    assert verdict_on(beat=9.0, progress=9.0, cancelled=True) is None
    assert "no sign of life for 11 s" in verdict_on(beat=11.0, progress=11.0, cancelled=True).cause
    assert verdict_on(beat=11.0, progress=11.0, cancelled=False) is None
    assert verdict_on(beat=0.5, progress=110.0, cancelled=True) is None
    assert [life.silence_limit(given, cancelled=True) for given in (3, 20, 60, 120)] == [3, 5, 10, 20]


@pytest.fixture
def short(monkeypatch) -> float:
    """The heartbeat time-out of watches in this process, of which a twentieth is allowed in a cancelled command."""
    monkeypatch.setattr(life, "SILENCE_FLOOR", 0.0)
    monkeypatch.setattr(life, "CANCELLED_PART", 20)
    return 20.0


def watch_of_rank_0(heartbeat: float, verdicts: list, *events: Callable[[RankHeartbeat], None]) -> None:
    store = dist.HashStore()
    rank_1_says(store, state=life.BUSY)
    limits = SimpleNamespace(step_timeout=60, heartbeat_timeout=heartbeat, error_grace=1.0)
    pulse = RankHeartbeat(None, 0, 1.0)
    for event in events:
        event(pulse)
    StoreHeartbeat(store, pulse, 0, ["cpu@a", "cpu@b"], limits).start(verdicts.append)


def test_of_several_machines_rank_0_finds_another_silent_sooner_in_a_cancelled_command(short):
    cancelled: list = []
    running: list = []
    watch_of_rank_0(short, cancelled, lambda pulse: pulse.begin(7, "sample"), lambda p: p.tell_to_stop(7))
    watch_of_rank_0(short, running, lambda pulse: pulse.begin(7, "sample"), lambda p: p.tell_to_stop(6))
    deadline = time.monotonic() + short - 2
    while not cancelled and time.monotonic() < deadline:
        time.sleep(0.02)
    assert cancelled and cancelled[0].rank == 1 and "in a cancelled command" in cancelled[0].cause
    assert running == []


def test_the_client_of_several_machines_notices_a_silent_rank_0_in_the_background(short):
    listener = tcp_listener("127.0.0.1:0")
    description = {"devices": ["cpu@a", "cpu@b"], "heartbeat_timeout": short}
    port = ClientPort(listener, TOKEN, description)
    port.start(on_cancel=lambda request: None)
    try:
        group = RankGroup.connect(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
        cancel_in(group, STEPS)
        failure = ends_by_itself(group, short)
        found = re.search(r"Rank 0 \(cpu@a\) has shown no sign of life for (\d+) s", failure)
        assert found and int(found[1]) < short - 2
        with pytest.raises(RankError, match=re.escape(found[0])):
            group.request("ping")
        group.close()
    finally:
        port.close()
