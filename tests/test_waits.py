"""Every wait in the product has a bound: a scan of its source for waits without one, with the exceptions and their reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Without arguments these wait for ever.
WAITS = {"wait", "join", "get", "result", "acquire", "communicate", "exception"}
# Bounded by what was set on the object before, or by nothing.
BLOCKING = {
    "accept",
    "recv",
    "recv_into",
    "recvfrom",
    "recvmsg",
    "sendall",
    "sendmsg",
    "synchronize",
    "barrier",
}
SUBPROCESS = {"run", "call", "check_call", "check_output"}
# Leaving their `with` waits for all that they began.
WAIT_ON_EXIT = {"Popen", "ThreadPoolExecutor", "ProcessPoolExecutor", "Pool"}

WATCHED = "in a rank: the launcher ends a group that makes no progress for step_timeout"
SET = "the socket has a time-out of half a second from its first line on"
READABLE = "select has said that it is readable"
GROUP = "the process group's own time-out, as for every collective"
COMMAND = "a rank of a command: the process that started it ends it after RANK_SECONDS, torch its collectives before"

EXCEPTIONS = {
    ("core/ranks/channel.py", "self._sock.recv_into(view[got:])"): SET,
    ("core/ranks/channel.py", "self._sock.sendmsg(buffers[first:first + 256])"): SET,
    ("core/ranks/port.py", "self._listener.accept()"): SET,
    ("core/ranks/rank.py", "os.read(0, 4096)"): READABLE,
    ("core/ranks/launcher.py", "os.read(0, 4096)"): READABLE,
    ("core/ranks/machines/guard.py", "os.read(0, 4096)"): READABLE,
    ("core/ranks/launcher.py", "os.read(descriptor, 1)"): READABLE,
    ("core/ranks/loop.py", "torch.cuda.synchronize(context.device)"): WATCHED,
    ("core/ranks/loop.py", "torch.cuda.synchronize(device)"): WATCHED,
    ("core/calls/sample.py", "torch.cuda.synchronize(x0.device)"): WATCHED,
    ("core/calls/resident.py", "torch.cuda.synchronize(device)"): WATCHED,
    ("core/checkpoint/memory.py", "self._sent.synchronize()"): WATCHED,
    ("core/checkpoint/memory.py", "self.stream.synchronize()"): WATCHED,
    ("core/checkpoint/memory.py", "buffer.wait()"): WATCHED,
    ("core/checkpoint/writer.py", "dist.recv(_flat(part), self._global(other), group=self._group)"): GROUP,
    ("core/checkpoint/reader.py", "pool.shutdown(wait=True, cancel_futures=True)"): WATCHED,
    (
        "comfyui/events.py",
        "self._closing.wait()",
    ): "set on exit, whose join of the thread is bounded",
    (
        "comfyui/events.py",
        "asyncio.wait({receiving, closing}, return_when=asyncio.FIRST_COMPLETED)",
    ): "ends with the event that exit sets",
    ("comfyui/events.py", "receiving.result()"): "of a task that is done",
}
# Whole files whose collectives and device waits are bounded from outside.
COMMANDS = {
    "core/cli/bench_load.py": COMMAND,
    "core/cli/bench_forward.py": COMMAND,
    "core/cli/doctor.py": COMMAND,
    "core/cli/generate.py": COMMAND + "; under torchrun torch's own time-out of collectives holds",
}
COLLECTIVE = {"init_process_group", "new_group", "barrier", "synchronize"}


def unbounded(source: str) -> Iterator[str]:
    """The calls that wait without a bound of their own."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if isinstance(item.context_expr, ast.Call) and _name(item.context_expr) in WAIT_ON_EXIT:
                    yield ast.unparse(item.context_expr)
        if not isinstance(node, ast.Call):
            continue
        name, owner = _name(node), _owner(node)
        named = {word.arg: word.value for word in node.keywords}
        limit = named.get("timeout")
        limited = limit is not None and not _is(limit, None)
        if (
            (isinstance(node.func, ast.Attribute) and name in WAITS and not limited and _waits_for_ever(node))
            or (name in BLOCKING and isinstance(node.func, ast.Attribute))
            or (owner == "subprocess" and name in SUBPROCESS and not limited)
            or (owner == "select" and name == "select" and len(node.args) < 4)
            or (
                owner == "os" and name in ("read", "waitpid", "waitid") and "WNOHANG" not in ast.unparse(node)
            )
            or (owner in ("asyncio", "futures") and name == "wait" and not limited)
            or (name == "create_connection" and not limited and len(node.args) < 2)
            or (name == "urlopen" and not limited)
            or (name == "settimeout" and node.args and _is(node.args[0], None))
            or (name == "setblocking" and node.args and _is(node.args[0], True))
            or (name in ("init_process_group", "new_group") and not limited)
            or (name == "shutdown" and _is(named.get("wait"), True))
        ):
            yield ast.unparse(node)


def _waits_for_ever(node: ast.Call) -> bool:
    """No argument at all, or a literal None or True where the time-out would be."""
    if any(word.arg in ("blocking", "block") and _is(word.value, False) for word in node.keywords):
        return False
    return not node.args or all(_is(value, None) or _is(value, True) for value in node.args)


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _owner(node: ast.Call) -> str:
    return ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""


def product() -> list[Path]:
    return [
        ROOT / "__init__.py",
        *sorted(ROOT.glob("core/**/*.py")),
        *sorted(ROOT.glob("comfy_tp_nodes/**/*.py")),
        *sorted(ROOT.glob("comfyui/**/*.py")),
    ]


def test_no_wait_in_the_product_is_without_a_bound():
    found, used = [], set()
    for path in product():
        place = path.relative_to(ROOT).as_posix()
        for call in unbounded(path.read_text()):
            if (place, call) in EXCEPTIONS:
                used.add((place, call))
            elif place in COMMANDS and call.split("(")[0].split(".")[-1] in COLLECTIVE:
                used.add(place)
            else:
                found.append(f"{place}: {call}")
    assert not found, "give these waits a bound:\n" + "\n".join(found)
    stale = [entry for entry in (*EXCEPTIONS, *COMMANDS) if entry not in used]
    assert not stale, f"these exceptions are no longer needed: {stale}"


def test_the_exceptions_that_name_a_socket_rest_on_a_time_out_that_is_set():
    channel = (ROOT / "core/ranks/channel.py").read_text()
    port = (ROOT / "core/ranks/port.py").read_text()
    assert "sock.settimeout(WAKE)" in channel
    assert "self._listener.settimeout(wire.WAKE)" in port


def test_the_scan_sees_each_kind_of_endless_wait_and_none_that_ends():
    endless = """
        process.wait()
        thread.join()
        jobs.get()
        jobs.get(True)
        lock.acquire()
        lock.acquire(True)
        event.wait(timeout=None)
        process.communicate()
        future.result()
        sock.recv(10)
        listener.accept()
        sock.settimeout(None)
        subprocess.run(["ls"])
        select.select([0], [], [])
        socket.create_connection(("host", 1))
        dist.init_process_group("gloo")
        dist.new_group(backend="gloo")
        dist.barrier()
        os.waitpid(pid, 0)
        pool.shutdown(wait=True)
    """
    lines = [line.strip() for line in endless.strip().splitlines()]
    assert [line for line in lines if not list(unbounded(line))] == []
    assert list(unbounded("with ThreadPoolExecutor(2) as pool:\n    pass")) == ["ThreadPoolExecutor(2)"]
    ending = """
        process.wait(5)
        thread.join(timeout=2)
        jobs.get(timeout=1)
        "".join(parts)
        table.get("key")
        lock.acquire(timeout=1)
        lock.acquire(blocking=False)
        subprocess.run(["ls"], timeout=5)
        select.select([0], [], [], 1.0)
        socket.create_connection(("host", 1), 5)
        dist.init_process_group("gloo", timeout=limit)
    """
    assert [line for line in ending.strip().splitlines() if list(unbounded(line.strip()))] == []
