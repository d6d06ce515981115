"""Ranks under torchrun, one process tree per node, on the loopback address or in network namespaces."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from group_processes import still_running

from comfy_tp.core.cli import ranks
from comfy_tp.core.errors import RankError
from comfy_tp.core.ranks.client import RankGroup


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


class Nodes:
    """The ranks that `comfy-tp ranks` describes: every line a torchrun of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        per_node: int = 1,
        host: str = "127.0.0.1",
        ports: tuple[int, int] | None = None,
        options: Sequence[str] = (),
        within: Sequence[Sequence[str]] = (),
        environments: Sequence[dict[str, str]] = (),
    ):
        """`within` and `environments`: per node, the command that its line runs in and what its environment adds."""
        rendezvous, port = ports or (free_port(), free_port())
        self.folder = folder
        self.address = f"{host}:{port}"
        self.token_file = folder / "token"
        self.cache, self.temporary = folder / "cache", folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.places = {"XDG_CACHE_HOME": str(self.cache), "TMPDIR": str(self.temporary)}
        settings = argparse.Namespace(
            host=host,
            nodes=nodes,
            per_node=per_node,
            rendezvous_port=rendezvous,
            port=port,
            token_file=str(self.token_file),
            device="cpu",
        )
        with contextlib.redirect_stdout(io.StringIO()):
            _, printed = ranks.run(settings)
        self.processes = []
        for number, line in enumerate(printed["lines"]):
            program, *words = shlex.split(line)
            assert program == "torchrun"
            prefix = list(within[number]) if within else []
            more = environments[number] if environments else {}
            with open(folder / f"node{number}.log", "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*prefix, sys.executable, "-m", "torch.distributed.run", *words, *options],
                        stdout=log,
                        stderr=log,
                        env={**os.environ, **self.places, "OMP_NUM_THREADS": "1", **more},
                        start_new_session=True,
                    )
                )

    @property
    def devices(self) -> str:
        """What Load TP Model's input takes."""
        return f"tcp://{self.address}"

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("node*.log")))

    def connect(self, seconds: float = 120) -> RankGroup:
        """A client, as soon as the ranks answer."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return RankGroup.connect(self.address, self.token_file.read_text().strip())
            except (RankError, OSError) as error:
                assert time.monotonic() < deadline, f"{error}\n{self.logs()}"
                time.sleep(0.2)

    def kill_node(self, number: int, ranks: Sequence[int]) -> None:
        """Lose a node: its torchrun and the ranks with these process ids."""
        os.killpg(self.processes[number].pid, signal.SIGKILL)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)


class Namespaces:
    """Two network namespaces joined by a veth pair; a second pair leads from the first to this process."""

    def __init__(self) -> None:
        mark = os.getpid() % 100_000
        self.names = [f"tp{mark}a", f"tp{mark}b"]
        # Of this process: another run of the tests on this machine has networks of its own.
        net = f"10.{100 + mark // 250 % 150}.{mark % 250}"
        self.hosts = [f"{net}.1", f"{net}.2"]
        self.outer, self.ours = f"{net}.5", f"{net}.6"
        self.interface = "tp0"

    @staticmethod
    def missing() -> str:
        """What this machine lacks for them, or nothing."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "network namespaces need iproute2 (the command ip)"
        probe = f"tp{os.getpid() % 100_000}p"
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=20)
        if made.returncode:
            return f"network namespaces cannot be made here: {made.stderr.strip()}"
        veth = ["ip", "-n", probe, "link", "add", "tpx", "type", "veth", "peer", "name", "tpy"]
        joined = subprocess.run(veth, capture_output=True, text=True, timeout=20)
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=20, check=False)
        return f"veth pairs cannot be made here: {joined.stderr.strip()}" if joined.returncode else ""

    def __enter__(self) -> Namespaces:
        first, second = self.names
        try:
            for name in self.names:
                self._ip("netns", "add", name)
                self._ip("-n", name, "link", "set", "lo", "up")
            inside = self.interface
            self._ip(
                "-n", first, "link", "add", inside, "type", "veth", "peer", "name", inside, "netns", second
            )
            for name, host in zip(self.names, self.hosts, strict=True):
                self._ip("-n", name, "address", "add", f"{host}/30", "dev", inside)
                self._ip("-n", name, "link", "set", inside, "up")
            ours = f"{first}o"
            self._ip("link", "add", ours, "type", "veth", "peer", "name", "out", "netns", first)
            self._ip("address", "add", f"{self.ours}/30", "dev", ours)
            self._ip("link", "set", ours, "up")
            self._ip("-n", first, "address", "add", f"{self.outer}/30", "dev", "out")
            self._ip("-n", first, "link", "set", "out", "up")
            self._ip("route", "add", f"{self.hosts[0]}/32", "via", self.outer)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        # The link too: a connection that still tries to send keeps a namespace alive after its name.
        gone = [["link", "del", f"{self.names[0]}o"], *(["netns", "del", name] for name in self.names)]
        for words in gone:
            subprocess.run(["ip", *words], capture_output=True, timeout=20, check=False)

    def cut(self) -> None:
        """Let the network between the two fall silent: for the first, with no word and no connection reset."""
        self._ip("-n", self.names[1], "link", "set", self.interface, "down")

    def within(self, number: int) -> list[str]:
        """The words in front of a command that shall run in namespace `number`."""
        return ["ip", "netns", "exec", self.names[number]]

    @staticmethod
    def _ip(*words: str) -> None:
        made = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
        assert made.returncode == 0, f"ip {' '.join(words)}: {made.stderr}"


def all_end(pids: Sequence[int], seconds: float = 15) -> bool:
    return still_running(list(pids), seconds) == []
