"""Fixtures that every test may use, and the check that the run leaves no process behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_session import Browser, what_is_missing

from comfy_tp.comfyui import ComfyServer

TESTS = Path(__file__).parent
# Before torch is imported: two ranks and the process that asks them share two processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
RUN_VARIABLE = "COMFY_TP_TEST_RUN"
GRACE_S = 10.0
# Files with few tests that take long. They begin first, so that the processes that share the files end together.
LONG = {
    *(
        "test_machines",
        "test_trust",
        "test_nodes_server",
        "test_generate",
        "test_adherence",
        "test_group_node",
    ),
    *("test_reliability", "test_nodes_memory", "test_sampler_node", "test_architectures", "test_compile"),
}


@pytest.fixture(scope="session")
def comfy() -> Iterator[ComfyServer]:
    """One real ComfyUI for the whole run, with this pack and every pack of tests/custom_nodes/ linked in.

    Tests that end ComfyUI or change how it starts make a ComfyServer of their own.
    """
    with ComfyServer(custom_nodes=test_packs()) as server:
        yield server


@pytest.fixture(scope="session")
def shapes(comfy: ComfyServer) -> dict[str, Any]:
    """What this ComfyUI says about all its nodes."""
    return comfy.object_info()


@pytest.fixture(scope="module")
def browser(comfy: ComfyServer) -> Iterator[Browser]:
    """ComfyUI's own frontend in headless Chromium, on the session's ComfyUI.

    It ends with the module: a page that is open draws its canvas all the time, which costs a sixth of a core.
    """
    missing = what_is_missing()
    if missing:
        pytest.skip(f"no browser tests: {missing}")
    session = Browser(comfy, TESTS / "output")
    yield session
    session.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if touches_comfyui(item.path, getattr(item, "fixturenames", ())):
            item.add_marker("comfyui")
    yield
    items.sort(key=lambda item: item.path.stem not in LONG)


def touches_comfyui(path: Path, fixtures: Iterable[str] = ()) -> bool:
    """Whether a test takes a fixture that runs ComfyUI, or stands in a file that does so itself.

    Such a file imports comfy_inprocess, starts a ComfyServer or asks for the folder. One that brings stand-ins of its
    own for ComfyUI says ``STAND_INS = True``.
    """
    return "stand-ins" not in _names(path) and bool(
        {"comfy", "browser", "in_comfy"} & set(fixtures) or "comfyui" in _names(path)
    )


@functools.cache
def _names(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    found = {"comfyui"} if re.search(r"\b(comfy_inprocess|ComfyServer|comfyui_path)\b", text) else set()
    return found | ({"stand-ins"} if re.search(r"^STAND_INS = True$", text, re.M) else set())


def test_packs() -> dict[str, Path]:
    """The test-only node packs, as ComfyServer takes them."""
    return {
        f"comfy-tp-test-{path.parent.name}": path.parent for path in TESTS.glob("custom_nodes/*/__init__.py")
    }


test_packs.__test__ = False  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    # Inherited by every process that the run starts, however deep, in whatever session or group.
    if not is_worker(config):
        os.environ[RUN_VARIABLE] = uuid.uuid4().hex


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that share the tests of a run (pytest-xdist)."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_worker(session.config):
        # The process that started the workers looks, when all of them are gone.
        return
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of_this_run()) and time.monotonic() < deadline:
        time.sleep(0.1)
    session.config.stash[LEFT_BEHIND] = left
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    left = config.stash.get(LEFT_BEHIND, {})
    if left:
        terminalreporter.section("processes left behind", red=True)
        for pid, command in left.items():
            terminalreporter.line(f"{pid}: {command}")


LEFT_BEHIND = pytest.StashKey[dict[int, str]]()

# Children of the test process itself that Python and torch keep until it exits.
KEPT_UNTIL_EXIT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")


def processes_of_this_run() -> dict[int, str]:
    """Every living process that inherited this run's mark, except this one: pid -> command line."""
    return processes_with(f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}")


def processes_with(variable: str) -> dict[int, str]:
    """Every other living process that was started with a variable, as NAME=VALUE: pid -> command line."""
    mark = variable.encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if not any(word in command for word in KEPT_UNTIL_EXIT):
            found[int(folder.name)] = command
    return found
