"""Faults injected many times: how soon each is noticed, and what is lost. Writes the table of docs/reliability.md.

`make test` injects each a few times, `make soak` as often as the page says. Both write tests/output/reliability.md.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    small_model,
)
from group_processes import COMMANDS, SOON, still_running
from test_group_channel import frame, message
from test_group_faults import CLIENT
from torchrun_nodes import Nodes

from comfy_tp.core.calls.keys import KEYS
from comfy_tp.core.calls.remote import RemoteModel
from comfy_tp.core.errors import RankError
from comfy_tp.core.ranks import channel as wire
from comfy_tp.core.ranks.channel import Channel, ChannelError
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.commands import resident_bytes

pytestmark = pytest.mark.timeout(1800)

OUTPUT = Path(__file__).parent / "output"
NAME = "small-flux2"
SOAK = "COMFY_TP_SOAK" in os.environ


@dataclass
class Row:
    """One line of the table; `seconds` are the times from the fault to its effect."""

    fault: str
    injected: int = 0
    recovered: int = 0
    seconds: list[float] = field(default_factory=list)
    remark: str = ""

    def text(self) -> str:
        found = f"{statistics.median(self.seconds):.2f} / {max(self.seconds):.2f} s" if self.seconds else "-"
        lost = self.injected - self.recovered
        return f"| {self.fault} | {self.injected} | {found} | {self.recovered} | {lost} | {self.remark} |"


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    head = "| fault | injected | noticed within (median / longest) | recovered | lost | remark |\n|---|---|---|---|---|---|"
    load = os.getloadavg()
    note = f"{os.cpu_count()} CPU cores, load {load[1]:.0f}, 2 ranks on the CPU, {time.strftime('%Y-%m-%d')}"
    OUTPUT.mkdir(exist_ok=True)
    text = "\n".join([head, *(row.text() for row in rows), "", note, ""])
    (OUTPUT / "reliability.md").write_text(text)
    print(f"\n{text}")


def often(few: int, many: int):
    """`count` few times in `make test` and many times in `make soak`."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.soak)])


def assert_soon(seconds: list[float], limit: float) -> None:
    """Within `limit` in a soak, which has the machine for itself; elsewhere before anything else would end the wait."""
    assert max(seconds) < (limit if SOAK else 40), seconds


def image(model, steps: int = 2) -> torch.Tensor:
    """By the stock KSampler, which asks the ranks once a step."""
    return ksampler(model, conditioning(), conditioning(), latent(), steps=steps)


def mirrored(model, steps: int = 2) -> torch.Tensor:
    """By TP Sampler, whose whole loop is on the ranks."""
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    inputs = (7, steps, 1.0, "euler", "simple", conditioning(), conditioning(), latent(), 1.0)
    with torch.inference_mode():
        return TPSampler.execute(model, *inputs).args[0]["samples"]


def resources(model) -> tuple[list[int], list[int]]:
    """Of this process and of each rank: resident bytes; and what may not grow at all, descriptors and threads."""
    group = model.sharded.remote.group if model.sharded.remote else model.sharded._group(None)
    ranks = group.status()["ranks"]
    fixed = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ["self", *group.pids]]
    fixed += [threading.active_count(), *(entry["threads"] for entry in ranks)]
    return [resident_bytes(), *(entry["rss_bytes"] for entry in ranks)], fixed


@contextmanager
def nothing_grows(model, row: Row) -> Iterator[None]:
    """Of what `resources` tells, over what is done inside; `row` remarks by how much."""
    memory, fixed = resources(model)
    yield
    after, fixed_after = resources(model)
    parts = [new / old - 1 for new, old in zip(after, memory, strict=True)]
    named = zip(("ComfyUI", "rank 0", "rank 1"), parts, strict=True)
    row.remark += "resident memory " + ", ".join(f"{who} {part:+.1%}" for who, part in named)
    # A count may have shrunk: a timer of a test before has run out.
    assert [(old, new) for old, new in zip(fixed, fixed_after, strict=True) if new > old] == []
    row.remark += "; descriptors and threads as before"
    assert max(parts) < 0.02, row.remark


class Cancels:
    """Cancels of a prompt at random moments of one kind, of both samplers in turn; each gives the seconds until it took
    effect, if it shall."""

    def __init__(self, model, count: int):
        self.model = model
        self.samplers = itertools.cycle([image, mirrored])
        self.random = random.Random(count)
        started = time.monotonic()
        image(model, steps=40)
        self.step = (time.monotonic() - started) / 40
        model.sharded.unload()
        started = time.monotonic()
        image(model, steps=1)
        self.load = time.monotonic() - started

    def moments(self) -> Iterator[Callable[[], float | None]]:
        """The kinds in turn, each with every sampler."""
        kinds = (self.in_the_load, self.in_the_first_step, self.in_a_late_step, self.between_prompts)
        return (kind for kind in itertools.cycle(kinds) for _ in range(2))

    def in_the_load(self) -> float:
        self.model.sharded.unload()
        return self._after(self.random.random() * self.load)

    def in_the_first_step(self) -> float:
        return self._after(self.random.random() * self.step)

    def in_a_late_step(self) -> float:
        return self._after((20 + 40 * self.random.random()) * self.step)

    def between_prompts(self) -> None:
        """ComfyUI forgets it at the start of the next prompt."""
        import comfy.model_management as management

        management.interrupt_current_processing()
        management.interrupt_current_processing(False)

    def _after(self, seconds: float) -> float:
        import comfy.model_management as management

        pressed = []

        def press() -> None:
            pressed.append(time.monotonic())
            management.interrupt_current_processing()

        timer = threading.Timer(seconds, press)
        timer.start()
        with pytest.raises(management.InterruptProcessingException):
            next(self.samplers)(self.model, steps=5000)
        took = time.monotonic() - pressed[0]
        timer.join(5)
        return took


@often(8, 56)
@pytest.mark.usefixtures("in_comfy")
def test_cancels_at_random_moments_take_effect_soon_and_the_next_image_is_right(table, count):
    small_model()
    model = load_tp(NAME)
    expected = image(model)
    row = Row("Cancel in ComfyUI: in the load, in the first step, in a late step, between prompts")
    table.append(row)
    cancels = Cancels(model, count)
    row.remark = f"a step took {cancels.step:.2f} s, a load {cancels.load:.2f} s; "
    moments = cancels.moments()
    for _ in range(8):
        next(moments)()
    image(model)
    with nothing_grows(model, row):
        for _ in range(count):
            took = next(moments)()
            row.seconds += [] if took is None else [took]
            row.injected += 1
            row.recovered += bool(torch.equal(image(model), expected))
    assert row.recovered == count
    assert_soon(row.seconds, cancels.step + 0.3)


@often(4, 50)
@pytest.mark.usefixtures("in_comfy")
def test_loading_running_and_unloading_again_and_again_keeps_memory_descriptors_and_threads(table, count):
    small_model()
    model = load_tp(NAME)
    expected = image(model)
    row = Row("load, run, unload")

    def cycle() -> None:
        load_tp(NAME)
        row.recovered += bool(torch.equal(image(model), expected))
        row.injected += 1
        model.sharded.unload()

    for _ in range(3):
        cycle()
    row.injected = row.recovered = 0
    table.append(row)
    with nothing_grows(model, row):
        for _ in range(count):
            cycle()
    assert row.recovered == count


@often(1, 6)
@pytest.mark.usefixtures("in_comfy")
def test_a_cancel_that_a_stopped_rank_does_not_hear_is_noticed_and_the_next_prompt_has_new_ranks(
    table, count
):
    import comfy.model_management as management

    small_model()
    model = load_tp(NAME)
    expected = image(model)
    row = Row("a rank stopped (SIGSTOP) in a run or a load that is then cancelled")
    row.remark = "the time is from the Cancel to the ready image of the next prompt, on new ranks"
    table.append(row)
    prompts = itertools.cycle(
        [lambda: image(model, 5000), lambda: mirrored(model, 5000), lambda: load_tp(NAME)]
    )
    for index in range(count):
        group = model.sharded.remote.group
        stopped = group.pids[index % 2 == 0]
        if index % 3 == 2:
            model.sharded.unload()
            os.kill(stopped, signal.SIGSTOP)
        timers = [
            threading.Timer(0.3, os.kill, (stopped, signal.SIGSTOP)),
            threading.Timer(0.8, management.interrupt_current_processing),
        ]
        pressed = time.monotonic() + 0.8
        for timer in timers:
            timer.start()
        with pytest.raises(management.InterruptProcessingException):
            next(prompts)()
        assert group.alive, "it has waited for the end of the group"
        row.recovered += bool(torch.equal(image(model), expected))
        row.seconds.append(time.monotonic() - pressed)
        row.injected += 1
        assert model.sharded.remote.group is not group and not still_running(group.pids, SOON)
    assert row.recovered == count
    # A sixth of the heartbeat time-out of 60 s, and the start of the ranks.
    assert_soon(row.seconds, 10 + 15)


class OneGroup:
    """Ranks with the small model on them, and its image."""

    def __init__(self, folder: Path, **options):
        self.group = RankGroup.start(["cpu", "cpu"], error_grace=1.0, **options)
        self.model = RemoteModel.load(self.group, str(folder))

    def image(self, steps: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        start = torch.randn(1, 128, 4, 4, generator=generator)
        context = torch.randn(1, 77, 48, generator=generator)
        sigmas = torch.linspace(1, 0, steps + 1)
        return self.model.sample(start, sigmas, sampler="euler", positive={"context": KEYS.kept(context)})


def faults_of_a_rank(table, row: Row, folder: Path, count: int, number: int, limit: float, **options) -> None:
    """Send the signal to one rank in the middle of a run, again and again; a new group must give the same image."""
    one = OneGroup(folder, **options)
    expected = one.image()
    try:
        for index in range(count):
            pid = one.group.pids[index % 2]
            sent = []

            def send(pid=pid, sent=sent):
                sent.append(time.monotonic())
                os.kill(pid, number)

            timer = threading.Timer(0.3, send)
            timer.start()
            with pytest.raises(RankError, match=f"Rank {index % 2} "):
                one.image(steps=20000)
            row.seconds.append(time.monotonic() - sent[0])
            row.injected += 1
            timer.join(5)
            assert still_running(one.group.pids, SOON) == []
            one.group.close()
            one = OneGroup(folder, **options)
            row.recovered += bool(torch.equal(one.image(), expected))
    finally:
        one.group.close()
    table.append(row)
    assert row.recovered == count
    assert_soon(row.seconds, limit)


@often(1, 6)
@pytest.mark.usefixtures("in_comfy")
def test_ranks_killed_in_a_run_are_noticed_and_the_next_group_is_right(table, count):
    row = Row("a rank killed (SIGKILL) in a run", remark="a new group each time")
    faults_of_a_rank(table, row, small_model(), count, signal.SIGKILL, 5)


@often(1, 4)
@pytest.mark.usefixtures("in_comfy")
def test_ranks_stopped_in_a_run_are_noticed_and_the_next_group_is_right(table, count):
    row = Row("a rank stopped (SIGSTOP) in a run", remark="heartbeat time-out set to 5 s")
    faults_of_a_rank(table, row, small_model(), count, signal.SIGSTOP, 5 + 3 + 1, heartbeat_timeout=5.0)


@often(1, 4)
def test_everything_ends_with_a_client_that_is_killed(table, count, tmp_path):
    row = Row(
        "the client killed (SIGKILL), one rank stopped", remark="until all processes and the folder are gone"
    )
    for index in range(count):
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, COMMANDS, str(tmp_path / str(index))],
            stdout=subprocess.PIPE,
            text=True,
        )
        *numbers, folder = client.stdout.readline().split()
        os.kill(int(numbers[1]), signal.SIGSTOP)
        client.kill()
        killed = time.monotonic()
        client.wait(10)
        client.stdout.close()
        left = still_running([int(number) for number in numbers], SOON)
        while os.path.exists(folder) and time.monotonic() < killed + SOON:
            time.sleep(0.01)
        row.seconds.append(time.monotonic() - killed)
        row.injected += 1
        row.recovered += not left and not os.path.exists(folder)
    table.append(row)
    assert row.recovered == count
    assert_soon(row.seconds, 5)


BASES = [
    frame(sequence=1),
    frame(sequence=1, header_bytes=0xFFFFFFFF),
    frame(sequence=1, payload_bytes=1 << 63),
    frame(sequence=1, raw=b"[" * 5000),
    frame(sequence=1, message=message(["float32", [2**63]])),
    frame(sequence=1, message=message(["float32", [4]]), payload=bytes(15)),
    frame(sequence=1, message=message(["object", [1]])),
    frame(sequence=1, message=message(["float32", [2**34, 2**34, 2**34, 0]])),
    frame(sequence=1, message=message(name="\ud800")),
    frame(sequence=1, message=message(name="\udcff" * 1000)),
    frame(sequence=0),
    frame(sequence=1, kind=wire.REPLY),
    b"GET / HTTP/1.1\r\n\r\n",
]


def damaged_message(generator: random.Random) -> bytes:
    """A malformed frame: one of `BASES`, mostly with bytes changed, cut off or added."""
    data = bytearray(generator.choice(BASES))
    for _ in range(generator.randrange(6)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    if generator.random() < 0.2:
        del data[generator.randrange(len(data)) :]
    if generator.random() < 0.2:
        data += generator.randbytes(generator.randrange(300))
    return bytes(data)


@often(100, 2000)
def test_malformed_messages_with_and_without_the_token_do_nothing_to_the_ranks(table, count, tmp_path):
    nodes = Nodes(tmp_path, nodes=1, per_node=2, options=["--commands", COMMANDS])
    try:
        group = nodes.connect()
        before = group.status()["ranks"]
        group.close()
        token = nodes.token_file.read_text().strip()
        host, _, port = nodes.address.rpartition(":")
        row = Row("malformed messages, half of them from a peer with the token")
        generator = random.Random(count)
        for data in BASES:
            # A command of a client that has left is not begun.
            with introduced(host, int(port), token) as sock, suppress(TimeoutError, ConnectionError):
                sock.settimeout(1)
                sock.sendall(data)
                while sock.recv(65536):
                    pass
        for index in range(count):
            sock = introduced(host, int(port), token if index % 2 else None)
            started = time.monotonic()
            try:
                sock.sendall(damaged_message(generator))
                sock.shutdown(1)
                while sock.recv(65536):
                    pass
            except OSError:
                pass
            sock.close()
            row.seconds.append(time.monotonic() - started)
            row.injected += 1
        group = nodes.connect(20)
        after = group.status()["ranks"]
        assert group.request("total", {}, [torch.ones(3)]).tensors[0].tolist() == [2, 2, 2]
        group.close()
        assert [rank["pid"] for rank in after] == [rank["pid"] for rank in before]
        row.recovered = count
        growth = after[0]["rss_bytes"] - before[0]["rss_bytes"]
        row.remark = (
            f"resident memory of rank 0 {growth / 1e6:+.0f} MB; the time is until the peer is cut off"
        )
        table.append(row)
        assert growth < 64e6
    finally:
        nodes.end()


def introduced(host: str, port: int, token: str | None):
    """A connected socket, after the handshake where there is a token."""
    import socket

    deadline = time.monotonic() + 20
    while True:
        sock = socket.create_connection((host, port), 10)
        if token is None:
            return sock
        channel = Channel(sock)
        try:
            wire.introduce(channel, token, 10)
            sock.settimeout(10)
            return sock
        except ChannelError:
            # The one before has not been put out yet.
            channel.close()
            assert time.monotonic() < deadline
            time.sleep(0.005)


@often(20, 500)
def test_damaged_files_are_each_refused_by_name(table, count, tmp_path):
    row = Row("damaged checkpoint files")
    script = Path(__file__).with_name("damaged_files.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(count)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row.injected = row.recovered = count
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["refused"] == count and found["peak_mb"] <= 64
    row.remark = f"each named; memory rose by {found['peak_mb']:.0f} MB at most"
    table.append(row)
