"""Looking at processes from outside: what runs, and what listens."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

# Seconds that things are given which happen at once where nothing else holds the machine.
SOON = 20.0

COMMANDS = f"{Path(__file__).with_name('group_commands.py')}:COMMANDS"


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def still_running(pids: list[int], seconds: float) -> list[int]:
    """Those of the processes that run after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(running(pid) for pid in pids):
        time.sleep(0.02)
    return [pid for pid in pids if running(pid)]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def folder_of(rank: int) -> Path:
    """The folder of the group of a rank's process, which its command line names."""
    (found,) = re.findall(r"/\S*comfy-tp-\S+(?= \d)", command_line(rank))
    return Path(found)


def launcher_of(rank: int) -> int:
    """The launcher's process, which has started the rank's."""
    return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


def socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def listening_addresses(pids: list[int]) -> list[str]:
    """The hexadecimal addresses that the processes listen on over TCP, IPv4 and IPv6."""
    inodes = set().union(*(socket_inodes(pid) for pid in pids))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found
