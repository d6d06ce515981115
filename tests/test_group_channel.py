"""The channel and its port: what crosses, and everything that must not."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from comfy_tp.core.calls.fields import read, write
from comfy_tp.core.calls.patch import PatchSender, SetPatches
from comfy_tp.core.errors import RankError
from comfy_tp.core.lora.adapters import Adapter
from comfy_tp.core.lora.patch import Patch
from comfy_tp.core.ranks import channel as wire
from comfy_tp.core.ranks import port as port_module
from comfy_tp.core.ranks.channel import PREFIX, Channel, ChannelClosed, ChannelError
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.commands import resident_bytes
from comfy_tp.core.ranks.machines.node import tcp_listener
from comfy_tp.core.ranks.port import STRANGERS, ClientPort
from comfy_tp.core.ranks.rank import unix_listener

TOKEN = "a" * 64
QWEN_LINEARS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}_{name}" for stream in ("img", "txt") for name in ("mlp.net.0.proj", "mlp.net.2", "mod.1")),
)


def pair(**options) -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    return Channel(ours, **options), theirs


def frame(
    *,
    magic=wire.MAGIC,
    version=wire.VERSION,
    kind=wire.COMMAND,
    zero=0,
    sequence=0,
    request=1,
    message=None,
    raw=None,
    header_bytes=None,
    payload=b"",
    payload_bytes=None,
) -> bytes:
    """A frame as a stranger may write it; every part can be wrong."""
    if raw is None:
        raw = json.dumps(
            message if message is not None else {"name": "x", "header": {}, "tensors": []}
        ).encode()
    return (
        PREFIX.pack(
            magic,
            version,
            kind,
            zero,
            len(raw) if header_bytes is None else header_bytes,
            sequence,
            request,
            len(payload) if payload_bytes is None else payload_bytes,
        )
        + raw
        + payload
    )


def message(*tensors, **more) -> dict:
    return {"name": "x", "header": {}, "tensors": list(tensors), **more}


def received(data: bytes, **options) -> wire.Frame:
    """What a channel makes of these bytes, after which the peer ends."""
    channel, theirs = pair(stall_timeout=2)
    sender = threading.Thread(target=lambda: (suppressed(theirs.sendall, data), theirs.close()))
    sender.start()
    try:
        return channel.receive(**options)
    finally:
        channel.close()
        sender.join(10)


def suppressed(function, *arguments) -> None:
    try:
        function(*arguments)
    except OSError:
        pass


def test_a_frame_is_what_the_description_says():
    got = received(frame(message=message(["float32", [2]], ["int8", [3]]), payload=bytes(64) + b"\1\2\3"))
    assert (got.kind, got.request, got.name, got.header) == (wire.COMMAND, 1, "x", {})
    assert got.tensors[0].tolist() == [0, 0]
    assert got.tensors[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "data, text",
    [
        (frame(magic=b"HTTP"), "no frame of a rank group"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no frame of a rank group"),
        (frame(version=2), "speaks version 2 of the channel and this side 1"),
        (frame(kind=99), "unknown kind of frame 99"),
        (frame(zero=7), "unknown kind"),
        (frame(sequence=5), "frame 5 where frame 0 is due"),
        (frame(header_bytes=0xFFFFFFFF), "a header of 4294967295 bytes; the limit is 8388608"),
        (frame(payload_bytes=1 << 63), "a payload of 9223372036854775808 bytes where the tensors need 0"),
        (frame(payload=b"abc"), "a payload of 3 bytes where the tensors need 0"),
        (frame(raw=b""), "no JSON"),
        (frame(raw=b"{"), "no JSON"),
        (frame(raw=b"\xff\xfe"), "no JSON"),
        (frame(raw=b"[" * 100_000), "no JSON"),
        (frame(raw=b"1" * 100_000), "no JSON|not an object"),
        (frame(raw=b"[]"), "not an object of name"),
        (frame(message={"name": "x"}), "not an object of name"),
        (frame(message=message(extra=1)), "not an object of name"),
        (frame(message=message(name=3)), "wrong type"),
        (frame(message=message(header=[])), "wrong type"),
        (frame(message=message(name="\ud800")), r"unusable name '\\ud800'"),
        (frame(message=message(name="ping\n2026 rank 0 is fine")), "unusable name"),
        (frame(message=message(name="x" * 129)), "unusable name"),
        (frame(message=message(tensors={})), "wrong type"),
        (frame(message=message(["float32", [0]], tensors=[["uint8", [0]]] * 70_000)), "70000 tensors"),
        (frame(message=message("float32")), "not as .dtype, shape."),
        (frame(message=message(["float32"])), "not as .dtype, shape."),
        (frame(message=message(["object", [1]])), "unknown dtype 'object'"),
        (frame(message=message([["float32"], [1]])), "unknown dtype"),
        (frame(message=message(["float32", 4])), "unusable shape"),
        (frame(message=message(["float32", [-1]])), "unusable shape"),
        (frame(message=message(["float32", [1.5]])), "unusable shape"),
        (frame(message=message(["float32", [True]])), "unusable shape"),
        (frame(message=message(["float32", [1] * 40])), "unusable shape"),
        (frame(message=message(["float32", [2**63]])), "unusable shape"),
        (frame(message=message(["float32", [2**33, 2**33, 2**33]])), "more than .* bytes are announced"),
        (frame(message=message(["float32", [2**34] * 3 + [0]])), "more than .* bytes are announced"),
        (frame(message=message(["float32", [0] + [2**34] * 15])), "more than .* bytes are announced"),
        (frame(message=message(["float32", [4]]), payload=bytes(15)), "15 bytes where the tensors need 16"),
        (frame(message=message(["float32", [4]]), payload_bytes=16), "in the middle of a frame"),
        (frame()[:20], "in the middle of a frame"),
        (frame()[:40], "in the middle of a frame"),
    ],
)
def test_a_malformed_frame_is_refused_by_name(data, text):
    with pytest.raises(ChannelError, match=text):
        received(data)


def test_before_the_handshake_headers_are_short_and_payloads_absent():
    with pytest.raises(ChannelError, match="a header of 600 bytes; the limit is 512"):
        received(frame(raw=b"x" * 600), stranger=512)
    with pytest.raises(ChannelError, match="a payload before the handshake"):
        received(frame(message=message(["uint8", [4]]), payload=bytes(4)), stranger=512)


@pytest.mark.parametrize(
    ("announced", "text"),
    [
        ({"header_bytes": 0xFFFFFFFF}, "a header of 4294967295 bytes; the limit is"),
        ({"payload_bytes": 1 << 63}, "a payload of 9223372036854775808 bytes where the tensors need 0"),
        ({"payload_bytes": 1 << 33}, "a payload of 8589934592 bytes where the tensors need 0"),
        (
            {"message": message(["uint8", [2**33]]), "payload_bytes": 1 << 32},
            "a payload of 4294967296 bytes where the tensors need 8589934592",
        ),
        (
            {"message": message(["uint8", [2**33]]), "payload_bytes": 1 << 33},
            "no memory for a payload of 8589934592 bytes",
        ),
    ],
)
def test_a_number_of_the_peer_is_checked_before_memory_is_taken_by_it(announced, text):
    channel, theirs = pair(stall_timeout=2)
    theirs.sendall(frame(**announced))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # Memory that is taken and not touched shows nowhere else.
    resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20), hard))
    try:
        with pytest.raises(ChannelError, match=text):
            channel.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    channel.close()
    theirs.close()


def test_hundreds_of_damaged_frames_end_in_a_channel_error_and_allocate_nothing():
    generator = random.Random(7)
    good = frame(
        message=message(["float32", [3, 4]], ["uint8", [5]], header={"a": [1, {"b": None}]}),
        payload=bytes(range(48)) + bytes(16) + bytes(5),
    )
    assert received(good).header == {"a": [1, {"b": None}]}
    before = resident_bytes()
    refused = 0
    for _ in range(600):
        data = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            if generator.random() < 0.2:
                del data[generator.randrange(len(data)) :]
                data += bytes(generator.randrange(3))
            if not data:
                break
            # Most damage to the prefix and the header, where it matters.
            data[generator.randrange(min(len(data), 150))] = generator.randrange(256)
        try:
            received(bytes(data))
        except ChannelError:
            refused += 1
    assert refused > 400
    assert resident_bytes() - before < 64e6


def test_a_frame_cannot_be_sent_twice():
    channel, theirs = pair()
    theirs.sendall(frame(sequence=0) + frame(sequence=1) + frame(sequence=1))
    channel.receive()
    channel.receive()
    with pytest.raises(ChannelError, match="frame 1 where frame 2 is due: repeated or lost"):
        channel.receive()
    theirs.close()


def test_a_peer_that_stops_in_the_middle_of_a_frame_is_given_up():
    channel, theirs = pair(stall_timeout=1)
    theirs.sendall(frame()[:10])
    started = time.monotonic()
    with pytest.raises(ChannelError, match="stopped in the middle of a frame"):
        channel.receive()
    assert 0.9 < time.monotonic() - started < 30  # 60 unless told otherwise
    theirs.close()


def test_a_peer_that_does_not_read_is_given_up():
    channel, theirs = pair(stall_timeout=1)
    with pytest.raises(ChannelError, match="stopped in the middle of a frame"):
        channel.send(wire.EVENT, 1, tensors=[torch.zeros(4_000_000)])
    theirs.close()


def test_close_wakes_a_thread_that_receives():
    channel, theirs = pair()
    caught = []

    def receive():
        try:
            channel.receive()
        except ChannelClosed as error:
            caught.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.1)
    channel.close()
    thread.join(20)
    assert len(caught) == 1
    theirs.close()


def test_what_cannot_cross_is_refused_before_it_is_sent():
    with pytest.raises(ValueError, match="the header of 'x' is no JSON"):
        wire.pack("x", {"value": float("inf")})
    with pytest.raises(ValueError, match="the header of 'x' is no JSON"):
        wire.pack("x", {"value": torch.ones(1)})
    with pytest.raises(ValueError, match="torch.complex128 cannot cross the channel"):
        wire.pack("x", {}, [torch.ones(1, dtype=torch.complex128)])


class Port:
    """A port in this process, and connections to it."""

    def __init__(self, folder: Path, *, listener: socket.socket | None = None, **options):
        self.path = folder / "socket"
        self.cancels: list[int] = []
        listener = listener or unix_listener(self.path)
        self.port = ClientPort(listener, TOKEN, {"devices": ["cpu"]}, **options)
        self.port.start(on_cancel=self.cancels.append)

    def raw(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(20)
        deadline = time.monotonic() + 20
        while True:
            try:
                sock.connect(str(self.path))
                return sock
            except BlockingIOError:
                # The backlog is full.
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def client(self, token: str = TOKEN) -> Channel:
        channel = Channel(self.raw())
        try:
            assert wire.introduce(channel, token, 20) == {"devices": ["cpu"]}
        except BaseException:
            channel.close()
            raise
        return channel

    def client_within(self, seconds: float) -> Channel:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.client()
            except ChannelError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


@pytest.fixture
def port(tmp_path):
    made = Port(tmp_path, handshake_timeout=1.0)
    yield made
    made.port.close()


def closed_by_the_port(sock: socket.socket) -> bool:
    """Whether the other side ends the connection within the socket's time-out."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_client_with_the_token_is_heard(port):
    client = port.client()
    client.send(wire.COMMAND, 1, name="echo", header={"a": 1}, tensors=[torch.ones(3)])
    order = port.port.next_order(20)
    assert (order.frame.name, order.frame.header) == ("echo", {"a": 1})
    order.client.send(wire.REPLY, 1, header={"b": 2}, tensors=order.frame.tensors)
    reply = client.receive()
    assert (reply.kind, reply.request, reply.header) == (wire.REPLY, 1, {"b": 2})
    assert reply.tensors[0].tolist() == [1, 1, 1]
    client.close()


def test_a_wrong_token_gets_nothing(port):
    with pytest.raises(ChannelError, match="refused this client: the token is wrong"):
        port.client("b" * 64)
    sock = port.raw()
    sock.sendall(frame(message=message(name="echo")))
    assert closed_by_the_port(sock)
    assert port.port.next_order(0.2) is None
    port.client().close()


@contextmanager
def serving(*callers: Callable[[Channel], None]) -> Iterator[str]:
    """The address of a listener that deals with its first caller so, and with the next ones likewise."""
    listener = tcp_listener("127.0.0.1:0")
    listener.listen()

    def serve() -> None:
        with suppress(OSError):
            for deal in callers:
                channel = Channel(listener.accept()[0])
                deal(channel)
                channel.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    listener.close()


def pretend(**welcome) -> Callable[[Channel], None]:
    """An impostor, who welcomes whoever answers."""

    def deal(channel: Channel) -> None:
        channel.send(wire.CHALLENGE, 0, header={"nonce": "0" * 64})
        channel.receive()
        suppressed(channel._sock.sendall, frame(kind=wire.WELCOME, sequence=1, **welcome))
        with suppress(ChannelError):
            channel.receive()

    return deal


@pytest.mark.parametrize(
    ("welcome", "text"),
    [
        (
            {"message": message(header={"proof": "0" * 64, "group": {}})},
            "the other side does not know the token",
        ),
        (
            {"raw": b'{"name": "", "header": {"a": [' + b"{}," * 2_700_000 + b'{}]}, "tensors": []}'},
            "a header of 8100050 bytes; the limit is 8192",
        ),
        ({"message": message(["uint8", [4]]), "payload": bytes(4)}, "a payload before the handshake"),
    ],
    ids=["no proof", "a header that takes 245 MB", "a payload"],
)
def test_a_group_that_does_not_know_the_token_is_not_trusted_and_little_of_it_read(welcome, text):
    with serving(pretend(**welcome)) as address, pytest.raises(RankError, match=text):
        RankGroup.connect(address, TOKEN, timeout=5)


def test_the_welcome_of_a_hundred_ranks_on_hosts_with_long_names_is_read():
    devices = [f"cuda:{rank % 8}@{'h' * 64}" for rank in range(100)]

    def deal(channel: Channel) -> None:
        wire.welcome(
            channel,
            wire.admit(channel, TOKEN, 5),
            {"devices": devices, "backend": "nccl", "beat": wire.BEAT_PERIOD},
        )

    with serving(deal) as address, RankGroup.connect(address, TOKEN, timeout=5) as group:
        assert group.devices == devices


def test_a_recorded_handshake_does_not_work_again(port):
    sock = port.raw()
    recorder = Channel(sock)
    answers = []
    send = recorder._send_all
    recorder._send_all = lambda buffers: (answers.append(b"".join(buffers)), send(buffers))
    wire.introduce(recorder, TOKEN, 5)
    recorder.close()
    again = port.raw()
    again.sendall(answers[0])
    assert closed_by_the_port(again)
    assert port.port.next_order(0.2) is None
    port.client_within(20).close()


def test_a_second_client_is_refused_while_the_first_is_there(port):
    first = port.client()
    with pytest.raises(ChannelError, match="refused this client: it already serves another client"):
        port.client()
    first.send(wire.COMMAND, 1, name="still here")
    assert port.port.next_order(20).frame.name == "still here"
    first.close()
    port.client_within(20).close()


def test_silent_and_slow_strangers_are_put_out_and_do_not_keep_the_client_out(port):
    strangers = [port.raw() for _ in range(STRANGERS)]
    drip = frame(kind=wire.ANSWER, raw=b"x" * 400)

    def trickle():
        for index in range(20):
            suppressed(strangers[0].sendall, drip[index : index + 1])
            time.sleep(0.2)

    thread = threading.Thread(target=trickle)
    thread.start()
    port.client_within(30).close()
    assert all(closed_by_the_port(sock) for sock in strangers)
    thread.join(10)


def test_a_stranger_is_heard_for_a_moment_however_many_wait_behind_it(tmp_path, monkeypatch):
    monkeypatch.setattr(port_module, "HEARD_AT_LEAST", 2.0)
    port = Port(tmp_path)
    first = Channel(port.raw())
    others = [port.raw() for _ in range(3 * STRANGERS)]
    time.sleep(0.3)
    wire.introduce(first, TOKEN, 1)
    first.close()
    port.port.close()
    for sock in others:
        sock.close()


def test_a_client_that_was_put_out_before_it_had_its_say_calls_again_until_its_time_is_over():
    def deal(channel: Channel) -> None:
        wire.welcome(channel, wire.admit(channel, TOKEN, 5), {"devices": ["cpu"]})

    def challenge(channel: Channel) -> None:
        channel.send(wire.CHALLENGE, 0, header={"nonce": "0" * 64})

    with serving(Channel.close, challenge, deal) as address:
        RankGroup.connect(address, TOKEN, timeout=5).close()
    started = time.monotonic()
    with serving(*[Channel.close] * 1000) as address, pytest.raises(RankError, match="others may crowd it"):
        RankGroup.connect(address, TOKEN, timeout=1)
    assert time.monotonic() - started < 30  # 1000 calls, 50 ms apart


def test_silent_strangers_that_call_again_at_once_do_not_keep_the_client_out(tmp_path):
    listener = tcp_listener("127.0.0.1:0")
    where = listener.getsockname()
    port = Port(tmp_path, listener=listener).port
    over = threading.Event()

    def sit() -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection(where, 5) as sock:
                while sock.recv(4096):
                    pass

    strangers = [threading.Thread(target=sit, daemon=True) for _ in range(32)]
    for stranger in strangers:
        stranger.start()
    try:
        deadline = time.monotonic() + 20
        while len(port._strangers) < STRANGERS and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(10):
            RankGroup.connect(f"127.0.0.1:{where[1]}", TOKEN, timeout=30).close()
            deadline = time.monotonic() + 30
            while port.has_client and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        over.set()
        port.close()
        for stranger in strangers:
            stranger.join(10)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_hundreds_of_hostile_connections_leave_the_port_as_it_was(port):
    generator = random.Random(3)
    hostile = [
        b"",
        b"\x00" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        frame(kind=wire.ANSWER, message=message(header={"nonce": 1, "proof": []})),
        frame(kind=wire.ANSWER, message=message(header={"nonce": "a", "proof": "é"})),
        frame(kind=wire.ANSWER, message=message(header={})),
        frame(kind=wire.COMMAND, message=message(name="ping")),
        frame(kind=wire.ANSWER, header_bytes=1 << 31),
        frame(kind=wire.ANSWER, payload_bytes=1 << 62),
        frame(kind=wire.ANSWER, message=message(["uint8", [2**33]]), payload_bytes=2**33),
        frame(kind=wire.ANSWER, message=message(["float32", [2**34] * 3 + [0]])),
        frame(kind=wire.ANSWER, message=message(name="\ud800")),
    ]
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    before = resident_bytes()
    for index in range(300):
        data = hostile[index] if index < len(hostile) else generator.choice(hostile)
        if index > 100:
            data += generator.randbytes(generator.randrange(200))
        sock = port.raw()
        suppressed(sock.sendall, data)
        if index < len(hostile) or index % 50 == 0:
            time.sleep(0.05)
        sock.close()
    client = port.client_within(20)
    client.send(wire.COMMAND, 1, name="works")
    assert port.port.next_order(20).frame.name == "works"
    client.close()
    deadline = time.monotonic() + 20

    def left() -> tuple[int, int]:
        return threading.active_count() - threads, len(os.listdir("/proc/self/fd")) - descriptors

    # The port ends its connections in threads of their own, a little after the client has gone.
    while max(left()) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert max(left()) <= 0, left()
    assert resident_bytes() - before < 64e6


@pytest.mark.parametrize(
    "kind, request_number, text",
    [(wire.REPLY, 1, "kind"), (wire.CHALLENGE, 1, "kind"), (wire.COMMAND, 0, "request 0 after request 0")],
)
def test_a_client_that_breaks_the_rules_is_cut_off_and_another_may_come(
    port, kind, request_number, text, caplog
):
    client = port.client()
    client.send(kind, request_number)
    with pytest.raises(ChannelError):
        client.receive()
    client.close()
    port.client_within(20).close()
    assert text in caplog.text


def test_a_client_cannot_pile_up_commands(port):
    client = port.client()
    with pytest.raises(ChannelError):
        for number in range(1, 100):
            client.send(wire.COMMAND, number)
            time.sleep(0.005)
    client.close()


def test_a_cancel_and_a_leaving_client_are_told_at_once_and_late_answers_vanish(port):
    client = port.client()
    client.send(wire.COMMAND, 1, name="long")
    order = port.port.next_order(20)
    assert order.client.wants(1)
    client.send(wire.CANCEL, 1)
    deadline = time.monotonic() + 20
    while order.client.wants(1) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not order.client.wants(1) and order.client.wants(2)
    assert port.cancels == [1]
    client.close()
    while order.client.wants(2) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not order.client.wants(2)
    order.client.send(wire.REPLY, 1, tensors=[torch.zeros(1_000_000)])


def test_ten_loras_of_every_layer_of_qwen_image_cross_in_one_message():
    """As many as a prompt may stack; after the ranks were started anew all of them are sent at once."""
    up, down = torch.zeros(2, 1, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16)
    patches = [
        Patch(
            f"diffusion_model.transformer_blocks.{block}.{module}.weight",
            Adapter("lora", {"up": up, "down": down}, 16.0),
            strength=-1 / 3,
        )
        for _ in range(10)
        for block in range(60)
        for module in QWEN_LINEARS
    ]
    tensors: list[torch.Tensor] = []
    call = write(SetPatches("m1", "auto", PatchSender().write(patches)[0]), tensors)
    packed = wire.pack("patch", call, tensors)
    _, header, layout, _ = wire.parse_header(packed.raw)
    found = read(SetPatches, header, [up] * len(layout), "the call")
    assert [entry.patch.key for entry in found.patches] == [patch.key for patch in patches]
    assert len(packed.raw) < wire.HEADER_LIMIT / 2
