"""The launcher: a small process between the client and the ranks of one machine.

It reads its configuration as one JSON line from stdin, makes the group's private folder, starts the ranks
(`process`), and tells the client on stdout, in JSON lines, what happens to them. Its stdin is the lifetime of the
group: at its end the ranks are killed by pid and the folder is removed.

It ends the group when a rank dies, stops, hangs, or raised while the others wait for it (`watchdog`), and says which
rank and why.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ..claims import Claim, abandoned
from . import heartbeat
from .config import GroupConfig
from .failure import ENDS, recorded
from .heartbeat import HeartbeatFile
from .logs import RUNNING, rank_log, tail
from .process import RankProcess, exit_cause
from .watchdog import Verdict, Watchdog

log = logging.getLogger("comfy_tp.launcher")

CONFIG_LIMIT = 1 << 20
CONFIG_TIMEOUT = 30.0
SOCKET_PATH_LIMIT = 100
PREFIX = "comfy-tp-group-"  # of the private folders' names
KILL_WAIT = 3.0
# Of several ranks found dead together, one that only lost its peer is not the cause.
CAUSE_WAIT = 0.5
WATCH_TICK = 0.05


def read_line(descriptor: int, limit: int, timeout: float) -> bytes:
    """One line, read byte by byte so that nothing after it is taken; empty at the end of the pipe."""
    line = bytearray()
    deadline = time.monotonic() + timeout
    while len(line) < limit:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            break
        byte = os.read(descriptor, 1)
        if not byte or byte == b"\n":
            break
        line += byte
    return bytes(line)


def private_folder() -> Claim:
    """A new 0700 folder whose path leaves room for a socket's name (108 bytes in all), claimed by this process.

    Those of groups whose launcher was killed together with everybody who could have removed them are removed first.
    """
    bases = [tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR", "")]
    for base in bases:
        if base and len(os.fsencode(base)) + len(f"/{PREFIX}xxxxxxxx/socket.new") < SOCKET_PATH_LIMIT:
            try:
                for left in abandoned(Path(base).glob(f"{PREFIX}*")):
                    log.info("removing %s, whose group is gone", left)
                    shutil.rmtree(left, ignore_errors=True)
                return Claim(lambda base=base: Path(tempfile.mkdtemp(prefix=PREFIX, dir=base)))  # type: ignore[misc]
            except OSError as error:
                log.warning("no folder under %s: %s", base, error)
    raise OSError(f"no writable temporary folder with a short path among {', '.join(filter(None, bases))}")


def rank_environment(config: GroupConfig) -> dict[str, str]:
    """What all ranks get beside the inherited environment."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    added = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if len(config.devices) > 1 and config.devices[0].startswith("cpu"):
        added["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in os.environ:
            added[name] = without_async_allocator(os.environ[name])
    added.update(config.env)
    return added


def without_async_allocator(settings: str) -> str:
    """Allocator settings without `backend:cudaMallocAsync`, which cannot share memory between processes."""
    parts = [part for part in settings.split(",") if part.strip()]
    return ",".join(part for part in parts if part.replace(" ", "") != "backend:cudaMallocAsync")


class Launcher:
    """One group's processes, from the configuration to the removal of the folder."""

    def __init__(self, config: GroupConfig, claim: Claim, speak: TextIO):
        self.config = config
        self.devices = config.devices
        self.degree = len(self.devices)
        self._claim = claim
        self.folder = folder = claim.path
        self._speak = speak
        self._parent = os.getppid()
        self.signs = HeartbeatFile(folder / "heartbeats", self.degree, create=True)
        self.signs.put(0, heartbeat.HEARTBEAT, time.monotonic())
        self.watchdog = Watchdog(
            self.signs,
            self.devices,
            config,
            frames=self._frames,
            state_of=self._process_state,
        )
        self.pids: dict[int, int] = {}
        self._pidfds: list[int] = []

    def tell(self, event: str, **fields: Any) -> None:
        """One JSON line for the client, if it still listens."""
        try:
            self._speak.write(json.dumps({"event": event, **fields}) + "\n")
            self._speak.flush()
        except OSError:
            pass

    def run(self) -> None:
        """Start the ranks and stay until the lifetime ends or the group fails."""
        extra: dict[str, str] = {}
        for attempt in range(2):
            self._start(attempt, extra)
            failure = self._supervise()
            self._kill()
            if failure is None:
                return
            if failure.self_test and attempt == 0:
                note = (
                    "The collectives gave wrong sums on these devices, or none; started again with "
                    "NCCL_P2P_DISABLE=1."
                )
                log.warning(note)
                self.tell("note", text=note)
                extra = {"NCCL_P2P_DISABLE": "1"}
                continue
            self.tell("failed", **asdict(failure))
            return

    def _start(self, attempt: int, extra: dict[str, str]) -> None:
        self._write_private("token", self.config.token)
        self._write_private("config.json", self.config.public(attempt).written())
        common = {**rank_environment(self.config), **extra}
        for slot in range(1, self.degree + 1):
            self.signs.put(slot, heartbeat.HEARTBEAT, 0.0)
            self.signs.put(slot, heartbeat.STATE, heartbeat.STARTING)
            (self.folder / f"error-{slot - 1}.json").unlink(missing_ok=True)
        fork = self.config.fork
        if fork:
            # Read by the libraries when they are imported.
            os.environ.update(common)
            self._import()
        for rank, device in enumerate(self.devices):
            process = RankProcess(
                title=f"comfy_tp rank {rank}/{self.degree} {device}",
                folder=self.folder,
                rank=rank,
                environment={
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.degree),
                    "LOCAL_WORLD_SIZE": str(self.degree),
                },
                log=self._log_of(rank),
            )
            self.pids[rank] = process.start(fork=fork, private=[self._speak.fileno(), self._claim.descriptor])
        self.tell("ranks", pids=[self.pids[rank] for rank in range(self.degree)])
        try:
            self._pidfds = [os.pidfd_open(pid) for pid in self.pids.values()]
        except (AttributeError, OSError):
            self._pidfds = []

    def _log_of(self, rank: int) -> Path:
        return Path(self.config.log_dir) / rank_log(rank)

    def _import(self) -> None:
        """Import what the ranks need, once for all of them."""
        for slot in range(1, self.degree + 1):
            self.signs.set_note(slot, "loading its commands")
        with self._watching():
            from .commands import prepare_commands

            try:
                prepare_commands(self.config.commands)
            except Exception:
                log.exception("the commands cannot be imported; the ranks will say why")
        # What is there by now never becomes garbage: the ranks' collectors leave the shared pages alone.
        gc.collect()
        gc.freeze()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """While the main thread is busy, end everything when the lifetime ends."""
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                self.signs.put(0, heartbeat.HEARTBEAT, time.monotonic())
                readable, _, _ = select.select([0], [], [], WATCH_TICK)
                if (readable and not os.read(0, 4096)) or os.getppid() != self._parent:
                    self.end()
                    os._exit(0)

        thread = threading.Thread(target=watch, name="comfy_tp lifetime", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            # No process with a second thread is forked.
            thread.join(KILL_WAIT)

    def _write_private(self, name: str, text: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    def _supervise(self) -> Verdict | None:
        """Wait for the end of the lifetime (None) or a failure."""
        tick = self.watchdog.tick
        if not self._pidfds:
            tick = min(tick, 0.1)
        while True:
            self.signs.put(0, heartbeat.HEARTBEAT, time.monotonic())
            readable, _, _ = select.select([0, *self._pidfds], [], [], tick)
            if 0 in readable and not os.read(0, 4096):
                return None
            if os.getppid() != self._parent:
                return None
            failure = self._dead() or self._hung()
            if failure is not None:
                return failure

    def _exited(self) -> dict[int, int]:
        """Ranks that have ended and how (negative: a signal), without reaping them."""
        ended = {}
        for rank, pid in self.pids.items():
            try:
                status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended[rank] = 1
                continue
            if status is not None:
                code = status.si_status
                ended[rank] = code if status.si_code == os.CLD_EXITED else -code
        return ended

    def _dead(self) -> Verdict | None:
        ended = self._exited()
        if not ended:
            return None
        deadline = time.monotonic() + CAUSE_WAIT
        while (
            all(code == heartbeat.EXIT_PEER_LOST for code in ended.values()) and time.monotonic() < deadline
        ):
            time.sleep(0.02)
            ended = self._exited()
        # A signal tells more than an exit code, and losing a peer is never the first cause.
        rank = min(ended, key=lambda each: (ended[each] == heartbeat.EXIT_PEER_LOST, ended[each] >= 0, each))
        code = ended[rank]
        if code == heartbeat.EXIT_SELF_TEST:
            return self._blame(rank, "failed the start-up test", self_test=True)
        if code == heartbeat.EXIT_PEER_LOST:
            return self._blame(rank, "lost its connection to the other ranks")
        error = recorded(self.folder, rank) if code == 1 else None
        if error is not None and error.get(ENDS):
            return self._blame(rank, exit_cause(code), error=error)
        return self._blame(rank, exit_cause(code), log_tail=tail(self._log_of(rank)))

    def _blame(self, rank: int, cause: str, **more: Any) -> Verdict:
        return self.watchdog.blame(rank, cause, pid=self.pids[rank], **more)

    def _hung(self) -> Verdict | None:
        """The watchdog's verdict, with the exception of a rank that raised."""
        verdict = self.watchdog.verdict()
        if verdict is not None and verdict.rank is not None:
            verdict.pid = self.pids[verdict.rank]
            if verdict.raised:
                verdict.error = recorded(self.folder, verdict.rank)
        return verdict

    def _process_state(self, rank: int) -> str:
        try:
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def _frames(self) -> list[str]:
        """Where each rank's main thread is, from the stacks that the ranks write on SIGUSR1."""
        for pid in self.pids.values():
            try:
                os.kill(pid, signal.SIGUSR1)
            except OSError:
                pass
        time.sleep(0.3)
        frames = []
        for rank in range(self.degree):
            try:
                text = (self.folder / f"stacks-{rank}").read_text()
            except OSError:
                text = ""
            frames.append(innermost_frame(text))
            log.warning("stacks of rank %d:\n%s", rank, text)
        return frames

    def _kill(self) -> None:
        """SIGKILL every rank with whatever it started, and reap it."""
        log.info("ending ranks %s", self.pids)
        for pid in self.pids.values():
            for kill in (os.killpg, os.kill):
                try:
                    kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        deadline = time.monotonic() + KILL_WAIT
        while len(self._exited()) < len(self.pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._pidfds = []
        for pid in self.pids.values():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        self.pids = {}

    def end(self) -> None:
        """Kill what runs, and remove the folder and the mark of a running group."""
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        (Path(self.config.log_dir) / RUNNING).unlink(missing_ok=True)


def innermost_frame(stacks: str) -> str:
    """`file:line in function` of the main thread, which faulthandler writes last."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1])
    return f"{frame[1]}:{frame[2]} in {frame[3]}" if frame else ""


class Ended(BaseException):
    """Somebody ends the launcher by a signal, whose name this is: the group goes with it, and so does its folder."""


def _end(number: int, frame: object) -> NoReturn:
    # Once: what is cleared away then is not interrupted.
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Ended(signal.Signals(number).name)


def main() -> NoReturn:
    """Run as the launcher; started by `RankGroup.start`."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    # Whatever prints goes to the log; only this stream speaks to the client.
    speak = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line = read_line(0, CONFIG_LIMIT, CONFIG_TIMEOUT)
    if not line:
        os._exit(1)
    config = GroupConfig.read(line)
    claim = private_folder()
    launcher = None
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        (Path(config.log_dir) / RUNNING).write_text(str(os.getpid()))
        launcher = Launcher(config, claim, speak)
        launcher.tell("folder", path=str(claim.path))
        launcher.run()
    except Ended as error:
        log.info("ended by %s", error)
        if launcher is not None:
            launcher.tell("failed", cause=f"the launcher was ended by {error}")
    except BaseException as error:
        log.exception("the launcher failed")
        if launcher is not None:
            launcher.tell("failed", cause=f"the launcher ended: {type(error).__name__}: {error}")
    finally:
        if launcher is not None:
            launcher.end()
        shutil.rmtree(claim.path, ignore_errors=True)
    # Torch's own teardown takes long, and the client waits for this process.
    logging.shutdown()
    os._exit(0)
