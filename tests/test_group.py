"""A group of two ranks on the CPU: requests, events, cancel, errors, and what it looks like from outside."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from group_processes import COMMANDS, command_line, listening_addresses

from comfy_tp.core.errors import Cancelled, CheckpointError, ConfigError, RankError, RankOutOfMemory
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.commands import resident_bytes


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> RankGroup:
    with RankGroup.start(
        ["cpu", "cpu"], commands=COMMANDS, log_dir=tmp_path_factory.mktemp("logs"), step_timeout=60
    ) as started:
        yield started
        assert started.failure is None


# Seconds within which something ends that would last 100 s otherwise.
AT_ONCE = 30.0


class Interrupt(BaseException):
    """Stands for ComfyUI's interrupt, which newer releases derive from BaseException."""


def test_a_ping_is_answered_by_every_rank(group):
    assert group.request("ping").header == {"degree": 2, "ranks": [0, 1]}
    assert group.devices == ["cpu", "cpu"]
    assert group.degree == 2
    assert group.alive


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, 7),
        torch.randn(4, 4).bfloat16(),
        torch.randn(9).half(),
        torch.randn(6, 6).to(torch.float8_e4m3fn),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([True, False, True]),
        torch.arange(12).reshape(3, 4).T,
        torch.tensor([1, 2, 3], dtype=torch.int8),
        torch.randn(5, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_comes_back_as_it_went(group, tensor):
    header = {"text": "grün", "number": 1.5, "list": [1, None, {"a": True}]}
    reply = group.request("echo", header, [tensor, torch.ones(2), tensor])
    assert reply.header == header
    assert [each.dtype for each in reply.tensors] == [tensor.dtype, torch.float32, tensor.dtype]
    for back in (reply.tensors[0], reply.tensors[2]):
        assert back.shape == tensor.shape
        assert (
            back.contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        )


def test_tensors_made_under_inference_mode_cross(group):
    with torch.inference_mode():
        tensor = torch.arange(6.0) * 2
        assert group.request("echo", {}, [tensor]).tensors[0].equal(tensor)


@pytest.mark.parametrize("elements", [1, 1000, 300_000, 5_000_000])
def test_every_rank_gets_the_same_header_and_tensors(group, elements):
    header = {"text": "x" * 10_000, "elements": elements}
    tensors = [torch.randn(elements), torch.randint(0, 100, (7,))]
    reply = group.request("total", header, tensors)
    assert reply.header == {"header": header, "same": True}
    assert reply.tensors[0].equal(tensors[0].double() * 2)
    assert reply.tensors[1].equal(tensors[1].double() * 2)


def test_a_large_header_crosses_and_one_over_the_limit_is_refused_here(group):
    header = {"text": "y" * 8_000_000}
    assert group.request("echo", header).header == header
    with pytest.raises(ValueError, match="the header of 'echo' has 90000.. bytes; the limit is 8388608"):
        group.request("echo", {"text": "y" * 9_000_000})
    assert group.request("ping").header["degree"] == 2


def test_a_command_whose_name_is_no_text_is_refused_here(group):
    for name in ("\ud800", "a\nb", "x" * 1000):
        with pytest.raises(ValueError, match="a message cannot have the name"):
            group.request(name)
    assert group.request("ping").header["degree"] == 2


def test_a_kept_tensor_is_not_overwritten_by_later_requests(group):
    first = torch.randn(400_000)
    group.request("remembers", {"key": "a"}, [first])
    group.request("echo", {}, [torch.zeros(400_000)])
    group.request("total", {}, [torch.zeros(400_000)])
    assert group.request("remembers", {"key": "a"}).tensors[0].equal(first.double() * 2)


def test_events_come_in_order_in_the_callers_thread_before_the_reply(group):
    seen = []

    def on_event(header, tensors):
        seen.append((header["step"], tensors[0].item(), threading.get_ident()))

    reply = group.request("steps", {"steps": 20, "seconds": 0}, on_event=on_event)
    assert reply.header == {"done": 20}
    assert seen == [(index, index, threading.get_ident()) for index in range(20)]


def test_poll_is_called_about_every_50_ms_also_while_events_arrive(group):
    calls = []
    started = time.monotonic()
    group.request(
        "steps",
        {"steps": 50, "seconds": 0.01},
        on_event=lambda header, tensors: None,
        poll=lambda: calls.append(time.monotonic()),
    )
    assert 5 <= len(calls) <= 20 * (time.monotonic() - started) + 1


@pytest.mark.parametrize("kind", [Interrupt, ValueError])
def test_what_poll_raises_leaves_at_once_and_cancels_the_command(group, kind):
    started = time.monotonic()

    def poll():
        if time.monotonic() - started > 0.3:
            raise kind("pressed")

    with pytest.raises(kind, match="pressed"):
        group.request("steps", {"steps": 1000, "seconds": 0.5}, poll=poll)
    assert group._line._unanswered is not None, "it has waited for the ranks"
    # The next request waits for the step that runs, not for the other 999.
    assert group.request("ping").header["degree"] == 2
    assert time.monotonic() - started < AT_ONCE


def test_what_an_event_raises_cancels_the_command_and_its_late_reply_reaches_nobody(group):
    def on_event(header, tensors):
        if header["step"] == 3:
            raise Interrupt("pressed")

    with pytest.raises(Interrupt):
        group.request("steps", {"steps": 1000, "seconds": 0.02}, on_event=on_event)
    seen = []
    reply = group.request(
        "steps", {"steps": 2, "seconds": 0}, on_event=lambda header, tensors: seen.append(header["step"])
    )
    assert reply.header == {"done": 2}
    assert seen == [0, 1]


def test_a_request_from_a_callback_of_another_is_refused_instead_of_waiting_for_itself(group):
    def ask(*_):
        assert group.in_callback
        group.request("ping", timeout=5)

    for callback in ("on_event", "poll"):
        with pytest.raises(
            RankError, match="asked for 'ping' by a callback of another command.*Remove the node"
        ):
            group.request("steps", {"steps": 10, "seconds": 0.02}, **{callback: ask})
        assert not group.in_callback and group.request("ping").header["degree"] == 2


def test_cancel_from_another_thread_takes_effect_at_the_next_step(group):
    timer = threading.Timer(0.3, group.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(Cancelled, match="cancelled"):
        group.request("steps", {"steps": 1000, "seconds": 0.1})
    assert time.monotonic() - started < AT_ONCE
    assert group.alive


def test_cancel_reaches_ranks_that_work_without_the_others(group):
    timer = threading.Timer(0.3, group.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        group.request("alone", {"seconds": 100})
    assert time.monotonic() - started < AT_ONCE
    # Rank 0 is at the boundary already, and rank 1 sees the cancel alone.
    timer = threading.Timer(0.5, group.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(Cancelled):
        group.request("alone", {"seconds": 0.3, "longer": 1})
    assert group.request("ping").header["degree"] == 2


def test_cancel_between_commands_does_nothing(group):
    group.cancel()
    assert group.request("steps", {"steps": 2, "seconds": 0}).header == {"done": 2}


def test_a_timeout_ends_the_wait_and_the_group_stays_usable(group):
    with pytest.raises(RankError, match=r"did not finish 'steps' within 0\.3 s"):
        group.request("steps", {"steps": 1000, "seconds": 0.05}, timeout=0.3)
    assert group.request("ping").header["degree"] == 2


def test_an_error_on_all_ranks_names_rank_device_type_and_place(group):
    with pytest.raises(RankError) as caught:
        group.request("raises", {"ranks": [0, 1], "kind": "ValueError", "others": "end"})
    text = str(caught.value)
    assert text.startswith("Rank 0 (cpu) raised ValueError: it went wrong on rank 0")
    assert "group_commands.py" in text and "in raises" in text
    assert f"Logs: {group.log_dir}" in text
    assert (caught.value.rank, caught.value.device) == (0, "cpu")
    assert group.request("ping").header["degree"] == 2


@pytest.mark.parametrize("others", ["end", "boundary", "gather"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_takes_the_others_out_and_the_group_stays_usable(group, rank, others):
    with pytest.raises(RankError, match=rf"Rank {rank} \(cpu\) raised KeyError") as caught:
        group.request("raises", {"ranks": [rank], "kind": "KeyError", "others": others})
    assert caught.value.rank == rank
    assert group.request("total", {}, [torch.ones(3)]).tensors[0].tolist() == [2, 2, 2]


def test_a_refusal_of_ours_keeps_its_type_and_text(group):
    with pytest.raises(CheckpointError) as caught:
        group.request(
            "raises", {"ranks": [0, 1], "kind": "CheckpointError", "text": "bad file", "others": "end"}
        )
    assert str(caught.value) == "bad file on rank 0"
    with pytest.raises(ConfigError, match="the ranks know no command 'nonsense'; they know .*ping"):
        group.request("nonsense")


def test_out_of_memory_on_one_rank_is_what_the_client_sees(group):
    with pytest.raises(
        RankOutOfMemory, match=r"Rank 1 \(cpu\) ran out of memory: CUDA out of memory"
    ) as caught:
        group.request("raises", {"ranks": [1], "kind": "oom", "others": "boundary"})
    assert (caught.value.rank, caught.value.device) == (1, "cpu")
    assert group.alive


def test_ranks_that_leave_the_lockstep_are_told_so(group):
    with pytest.raises(RankError, match="left the lockstep in command 'uneven'"):
        group.request("uneven")
    assert group.request("ping").header["degree"] == 2


def test_a_reply_that_cannot_be_sent_is_an_error_of_the_command(group):
    with pytest.raises(RankError, match="no JSON"):
        group.request("unusable_reply")
    assert group.request("ping").header["degree"] == 2


def test_two_threads_take_turns_and_get_their_own_answers(group):
    answers = {}

    def ask(number):
        for repeat in range(10):
            reply = group.request("echo", {"number": number, "repeat": repeat}, [torch.full((1000,), number)])
            answers.setdefault(number, []).append(
                (reply.header["repeat"], reply.tensors[0].unique().tolist())
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {number: [(repeat, [number]) for repeat in range(10)] for number in range(4)}


def asks_until_cancelled(group: RankGroup) -> None:
    with pytest.raises(Cancelled):
        group.request("steps", {"steps": 1000, "seconds": 0.1})


def test_waiting_for_ones_turn_can_be_interrupted_too(group):
    first = threading.Thread(target=asks_until_cancelled, args=(group,))
    first.start()
    time.sleep(0.2)

    def poll():
        raise Interrupt

    with pytest.raises(Interrupt):
        group.request("ping", poll=poll)
    assert group.status()["busy"], "it has waited for the other one's end"
    group.cancel()
    first.join(30)


def test_status_describes_every_rank(group):
    group.request("remembers", {"key": "b"}, [torch.ones(1)])
    status = group.status()
    assert status["alive"] and not status["busy"]
    assert status["log_dir"] == group.log_dir
    for rank, entry in enumerate(status["ranks"]):
        assert entry["rank"] == rank and entry["extra"] == rank
        assert entry["device"] == "cpu"
        assert entry["pid"] == group.pids[rank]
        assert entry["rss_bytes"] > 50e6
        assert "b" in entry["models"]


def test_status_does_not_wait_for_a_running_command(group):
    runner = threading.Thread(target=asks_until_cancelled, args=(group,))
    runner.start()
    time.sleep(0.2)
    status = group.status(timeout=AT_ONCE)
    assert status["busy"] and len(status["ranks"]) == 2
    group.cancel()
    runner.join(30)


def test_processes_can_be_recognised_and_know_nothing_of_comfyui(group):
    assert [command_line(pid).split("entry.py ")[1].split(" /")[0] for pid in group.pids] == [
        "comfy_tp rank 0/2 cpu",
        "comfy_tp rank 1/2 cpu",
    ]
    seen = group.request("surroundings", {"names": ["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"]}).header
    assert seen["modules"] == []
    assert seen["env"] == [{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}] * 2
    assert seen["threads"] == 1
    assert not any(path.endswith("core/ranks") for path in seen["path"])
    assert "token" not in " ".join(command_line(pid) for pid in group.pids)


def test_nothing_listens_but_on_the_loopback_address(group):
    launcher = int(Path(f"/proc/{group.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert set(listening_addresses([launcher, *group.pids])) <= loopback


def test_the_folder_is_private_and_the_token_is_gone_from_it(group):
    folder = group._line._folder
    assert os.stat(folder).st_mode & 0o777 == 0o700
    names = {path.name for path in folder.iterdir()}
    assert "token" not in names
    assert os.stat(folder / "socket").st_mode & 0o777 == 0o600
    assert len(str(folder / "socket")) < 108


def test_logs_of_all_ranks_lie_in_the_log_folder(group):
    with pytest.raises(RankError):
        group.request("raises", {"ranks": [1], "kind": "ValueError", "text": "unmistakable", "others": "end"})
    logs = "".join(path.read_text() for path in Path(group.log_dir).glob("rank-*.log"))
    assert "unmistakable on rank 1" in logs


def test_a_hundred_requests_leave_memory_descriptors_and_threads_as_they_were(group):
    tensor = torch.randn(512, 1024)

    def measure():
        gc.collect()  # what tests before this one have left is not counted before and gone after
        ranks = group.status()["ranks"]
        descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ["self", *group.pids]]
        threads = [threading.active_count(), *(entry["threads"] for entry in ranks)]
        return [resident_bytes(), *(entry["rss_bytes"] for entry in ranks)], descriptors, threads

    def use():
        for index in range(100):
            group.request("total", {"index": index}, [tensor])
            if index % 10 == 0:
                with pytest.raises(RankError):
                    group.request(
                        "raises", {"ranks": [index % 20 // 10], "kind": "ValueError", "others": "gather"}
                    )

    use()
    memory, descriptors, threads = measure()
    use()
    memory_after, descriptors_after, threads_after = measure()
    assert descriptors_after == descriptors
    # A thread that an earlier test left may end meanwhile; what must not happen is that there are more.
    assert all(after <= before for before, after in zip(threads, threads_after, strict=True))
    for before, after in zip(memory, memory_after, strict=True):
        assert after - before < 20e6


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_cancels_at_random_moments_leave_the_group_usable(group, count):
    generator = random.Random(count)
    for _ in range(count):
        command, header = generator.choice(
            [("steps", {"steps": 1000, "seconds": 0.05}), ("alone", {"seconds": 0.3}), ("total", {"a": 1})]
        )
        end = time.monotonic() + generator.choice([0.0, 0.01, generator.random() * 0.4])
        pressed = []

        def poll(end=end, pressed=pressed):
            if time.monotonic() >= end:
                pressed.append(time.monotonic())
                raise Interrupt

        try:
            group.request(command, header, [torch.ones(10_000)], poll=poll)
        except Interrupt:
            assert time.monotonic() - pressed[0] < AT_ONCE
        started = time.monotonic()
        assert group.request("total", {}, [torch.ones(2)]).tensors[0].tolist() == [2, 2]
        assert time.monotonic() - started < AT_ONCE


def test_many_small_tensors_cross(group):
    tensors = [torch.full((3,), float(index)) for index in range(2000)]
    reply = group.request("echo", {}, tensors)
    assert all(back.equal(tensor) for back, tensor in zip(reply.tensors, tensors, strict=True))
