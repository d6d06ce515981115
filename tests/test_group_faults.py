"""Ranks that die, stop, hang or raise, and clients that vanish: what is said, how soon, and what is left."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from group_processes import COMMANDS, SOON, running, still_running

from comfy_tp.core.errors import CheckpointError, RankError, RankOutOfMemory
from comfy_tp.core.ranks import heartbeat as life
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.config import Limits
from comfy_tp.core.ranks.watchdog import Watchdog


def start(tmp_path: Path, **options) -> RankGroup:
    options = {"step_timeout": 5.0, "error_grace": 1.0, "keepalive": 1.0, **options}
    return RankGroup.start(["cpu", "cpu"], commands=COMMANDS, log_dir=tmp_path / "logs", **options)


def everything(group: RankGroup) -> tuple[list[int], Path]:
    """All processes of a group, the launcher last, and its folder."""
    return [*group.pids, group._line._process.pid], group._line._folder


def assert_nothing_left(processes: list[int], folder: Path) -> None:
    assert still_running(processes, SOON) == []
    deadline = time.monotonic() + SOON
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()


def assert_dead(group: RankGroup, processes: list[int], folder: Path, error: RankError) -> None:
    assert not group.alive
    assert str(group.failure) == str(error) and type(group.failure) is type(error)
    assert_nothing_left(processes, folder)
    started = time.monotonic()
    with pytest.raises(RankError) as again:
        group.request("ping")
    assert str(again.value) == str(error)
    assert time.monotonic() - started < 3  # less than any of the group's limits
    group.close()


def test_an_idle_group_outlives_the_collectives_timeout_and_a_rank_killed_then_is_noticed(tmp_path):
    group = start(tmp_path, collective_timeout=4.0)
    processes, folder = everything(group)
    time.sleep(6)
    assert group.request("total", {}, [torch.ones(1)]).tensors[0].item() == 2
    # Rank 0 answers; the other one may take a moment more to be idle again.
    deadline = time.monotonic() + SOON
    while group._line._signs.get(2, life.STATE) != life.IDLE and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(group.pids[1], signal.SIGKILL)
    deadline = time.monotonic() + SOON
    while group.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert group.failure is not None
    text = str(group.failure)
    assert text.startswith(
        f"Rank 1 (cpu, pid {processes[1]}) was killed by signal 9 (SIGKILL), probably out of memory. "
        "The rank group was ended; the next run starts a new one."
    )
    assert f"Logs: {group.log_dir}" in text
    assert (group.failure.rank, group.failure.device) == (1, "cpu")
    assert_dead(group, processes, folder, group.failure)
    assert group.status()["failure"] == text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_killed_in_a_command_is_named_with_what_it_did(tmp_path, rank):
    group = start(tmp_path)
    processes, folder = everything(group)
    with pytest.raises(RankError) as caught:
        group.request("dies", {"rank": rank, "how": "kill"})
    assert f"Rank {rank} (cpu, pid {processes[rank]}) was killed by signal 9" in str(caught.value)
    assert "during 'dies'" in str(caught.value)
    assert_dead(group, processes, folder, caught.value)


def test_a_rank_that_exits_is_named_with_the_end_of_its_log(tmp_path):
    group = start(tmp_path)
    processes, folder = everything(group)
    with pytest.raises(
        RankError, match=r"Rank 1 \(cpu, pid \d+\) ended with exit code 3 during 'dies'"
    ) as caught:
        group.request("dies", {"rank": 1, "how": "exit"})
    assert "last words of the rank" in str(caught.value)
    assert_dead(group, processes, folder, caught.value)


def test_a_stopped_rank_is_detected_and_the_whole_group_ends(tmp_path):
    group = start(tmp_path)
    processes, folder = everything(group)
    stop = threading.Timer(0.5, os.kill, (group.pids[1], signal.SIGSTOP))
    stop.start()
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.request("steps", {"steps": 1000, "seconds": 0.05})
    took = time.monotonic() - started
    assert 5 < took < 40  # 60 unless told otherwise
    assert f"Rank 1 (cpu, pid {processes[1]}) has shown no sign of life for" in str(caught.value)
    assert "stopped by a signal" in str(caught.value)
    assert_dead(group, processes, folder, caught.value)


def test_a_collective_that_never_completes_is_detected_and_the_rank_that_is_missing_named(tmp_path):
    group = start(tmp_path, step_timeout=3.0)
    processes, folder = everything(group)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.request("hangs", {"rank": 1})
    assert 3 < time.monotonic() - started < 40  # 120 unless told otherwise
    text = str(caught.value)
    assert f"Rank 1 (cpu, pid {processes[1]}) made no progress for" in text
    assert "during 'step 1' (step 1)" in text
    assert "in hangs" in text
    assert "rank 0:" in text and "all_reduce" in text
    assert_dead(group, processes, folder, caught.value)


@pytest.mark.parametrize(
    "kind, expected", [pytest.param("KeyError", RankError, marks=pytest.mark.soak), ("oom", RankOutOfMemory)]
)
def test_a_rank_that_raises_while_the_others_wait_in_a_collective_ends_the_group_and_is_named(
    tmp_path, kind, expected
):
    group = start(tmp_path, step_timeout=60)
    processes, folder = everything(group)
    started = time.monotonic()
    with pytest.raises(expected, match=r"Rank 1 \(cpu\) (raised KeyError|ran out of memory)") as caught:
        group.request("raises", {"ranks": [1], "kind": kind, "others": "collective"})
    assert 1 < time.monotonic() - started < 40  # the step time-out is 60
    assert caught.value.rank == 1
    assert "The rank group was ended" in str(caught.value)
    assert_dead(group, processes, folder, caught.value)


def test_a_launcher_that_is_killed_takes_the_ranks_with_it(tmp_path):
    group = start(tmp_path)
    processes, folder = everything(group)
    os.kill(processes[-1], signal.SIGSTOP)
    os.kill(processes[-1], signal.SIGKILL)
    assert still_running(processes, SOON) == []
    with pytest.raises(
        RankError, match=r"The launcher of the ranks was killed by signal 9|connection to rank 0 ended"
    ):
        group.request("ping")
    assert_nothing_left(processes, folder)
    group.close()
    assert kept_after_a_refused_request(group)() is None


class Model:
    """What a caller holds while it asks."""


def kept_after_a_refused_request(group: RankGroup) -> weakref.ref:
    """A reference to something that the frame of a failed request held."""
    model = Model()
    with pytest.raises(RankError):
        group.request("ping")
    return weakref.ref(model)


def test_a_launcher_that_stops_is_noticed_by_a_waiting_client(tmp_path):
    group = start(tmp_path, heartbeat_timeout=1.5)
    processes, folder = everything(group)
    os.kill(processes[-1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RankError, match="The launcher of the ranks has not moved"):
        group.request("steps", {"steps": 1000, "seconds": 0.05})
    assert time.monotonic() - started < 40  # 60 unless told otherwise
    assert_nothing_left(processes, folder)
    group.close()


def test_close_ends_everything_also_twice_and_in_the_middle_of_a_command(tmp_path, monkeypatch):
    group = start(tmp_path)
    processes, folder = everything(group)
    failed = []

    def ask():
        try:
            group.request("steps", {"steps": 1000, "seconds": 0.05})
        except RankError as error:
            failed.append(str(error))

    asker = threading.Thread(target=ask)
    asker.start()
    time.sleep(0.3)
    killed = []
    monkeypatch.setattr(type(group._line), "_kill_all", lambda *line: killed.append(line))
    group.close()
    assert killed == [], "the launcher has not ended the ranks by itself"
    assert_nothing_left(processes, folder)
    asker.join(SOON)
    assert failed == ["The rank group was closed."]
    group.close()
    assert not group.alive and group.failure is None
    with pytest.raises(RankError, match="was closed"):
        group.request("ping")


def test_a_dropped_group_ends_and_leaves_no_thread_or_descriptor(tmp_path):
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    group = start(tmp_path)
    processes, folder = everything(group)
    del group
    assert_nothing_left(processes, folder)
    deadline = time.monotonic() + SOON
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


SOAK_SIGNALS = [pytest.param(each, marks=pytest.mark.soak) for each in (signal.SIGTERM, signal.SIGINT)]

CLIENT = """
import sys, threading, time
from comfy_tp.core.ranks.client import RankGroup
group = RankGroup.start(["cpu", "cpu"], commands=sys.argv[1], log_dir=sys.argv[2])
line = group._line
print(*group.pids, line._process.pid, line._folder, flush=True)
group.request("steps", {"steps": 10000, "seconds": 0.05})
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, *SOAK_SIGNALS])
def test_nothing_outlives_a_client_that_is_killed_even_with_a_rank_stopped(tmp_path, how):
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, COMMANDS, str(tmp_path / "logs")], stdout=subprocess.PIPE, text=True
    )
    *numbers, folder = client.stdout.readline().split()
    processes = [int(number) for number in numbers]
    time.sleep(0.3)
    if how == signal.SIGKILL:
        os.kill(processes[1], signal.SIGSTOP)
    client.send_signal(how)
    client.wait(SOON)
    client.stdout.close()
    assert_nothing_left(processes, Path(folder))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_group_leaves_that_is_ended_with_its_client_is_removed_by_its_launcher_or_by_the_next(
    tmp_path, how
):
    """As systemd stops a service, and as the kernel ends a control group that has no memory left."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, COMMANDS, str(tmp_path / "logs")], stdout=subprocess.PIPE, text=True
    )
    *numbers, name = client.stdout.readline().split()
    processes, folder = [*map(int, numbers), client.pid], Path(name)
    with start(tmp_path) as living:
        for pid in processes:
            os.kill(pid, how)
        client.wait(SOON)
        client.stdout.close()
        assert still_running(processes, SOON) == []
        if how == signal.SIGTERM:
            assert_nothing_left(processes, folder)
        else:
            assert folder.exists()
        with start(tmp_path):
            assert not folder.exists()
            assert everything(living)[1].exists()


def test_a_group_whose_folder_was_cleaned_away_goes_on_and_keeps_the_cause_of_its_errors(tmp_path):
    with start(tmp_path) as group:
        shutil.rmtree(everything(group)[1])
        for kind, error in (("CheckpointError", CheckpointError), ("oom", RankOutOfMemory)):
            with pytest.raises(error):
                group.request("raises", {"ranks": [1], "kind": kind, "others": "boundary"})
        assert group.request("total", {}, [torch.ones(3_000_000)]).tensors[0][-1] == 2
        assert group.alive


FORKING_CLIENT = CLIENT.replace(
    "group.request(",
    "import os\nif os.fork() == 0:\n    time.sleep(30)\n    os._exit(0)\ngroup.request(",
)


@pytest.mark.soak
def test_nothing_outlives_a_client_whose_forked_child_still_holds_the_pipe(tmp_path):
    client = subprocess.Popen(
        [sys.executable, "-c", FORKING_CLIENT, COMMANDS, str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    *numbers, folder = client.stdout.readline().split()
    time.sleep(0.5)
    client.kill()
    client.wait(SOON)
    try:
        assert_nothing_left([int(number) for number in numbers], Path(folder))
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.stdout.close()


def test_a_group_is_given_its_step_timeout_beyond_the_slowest_step_that_was_seen():
    pulse = life.HeartbeatFile(None, 2)
    watchdog = Watchdog(pulse, ["cpu", "cpu"], Limits(5.0, 60.0, 1.0, 1800.0, 30.0))
    now = time.monotonic()
    for slot in (1, 2):
        pulse.put(slot, life.HEARTBEAT, now)
        pulse.put(slot, life.STATE, life.BUSY)
        pulse.put(slot, life.PROGRESS, now - 8.0)
    pulse.put(2, life.SLOWEST, 4.0)
    assert watchdog.verdict() is None
    pulse.put(2, life.SLOWEST, 2.0)
    assert "made no progress for 8 s" in watchdog.verdict().cause


def test_a_group_waits_two_minutes_unless_told_otherwise():
    limits = inspect.signature(RankGroup.start).parameters
    assert limits["step_timeout"].default == 120.0
    assert limits["heartbeat_timeout"].default is None  # the same, at most a minute


def test_ctrl_c_in_the_terminal_does_not_reach_the_ranks(tmp_path):
    group = start(tmp_path)
    assert all(os.getsid(pid) != os.getsid(0) for pid in everything(group)[0])
    os.kill(group.pids[1], signal.SIGINT)
    assert group.request("ping").header["degree"] == 2
    assert all(running(pid) for pid in group.pids)
    group.close()
