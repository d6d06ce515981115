"""Starting a group: where the package may lie, what the machine may lack, and what a failure says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from group_processes import COMMANDS, SOON, command_line, still_running

from comfy_tp.core.errors import ConfigError, RankError
from comfy_tp.core.ranks.client import RankGroup
from comfy_tp.core.ranks.commands import load_commands
from comfy_tp.core.ranks.config import check_devices
from comfy_tp.core.ranks.launcher import innermost_frame, without_async_allocator
from comfy_tp.core.ranks.logs import KEPT, new_log_dir

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "devices, backend, text",
    [
        ([], None, "one name per rank"),
        ("cpu", None, "one name per rank"),
        (["cpu", "gpu7"], None, "'gpu7' is no device"),
        (["meta"], None, "not on meta"),
        (["cpu", "cuda:0"], None, "cpu, cuda:0 are of different kinds"),
        (["cpu", "cpu"], "nccl", "'nccl' needs cuda devices"),
        (["cpu", "cpu"], "mpi", "backend 'mpi' is neither"),
        (["cuda:0", "cuda"], None, "cuda:0, cuda:0 name one twice"),
    ],
)
def test_devices_that_cannot_be_used_are_refused_before_anything_starts(devices, backend, text):
    with pytest.raises(ConfigError, match=text):
        RankGroup.start(devices, backend=backend)


def test_the_backend_follows_the_devices_and_gloo_takes_one_gpu_twice():
    assert check_devices(["cpu", "cpu:0"], None) == (["cpu", "cpu"], "gloo")
    assert check_devices(["cuda", "cuda:1"], None) == (["cuda:0", "cuda:1"], "nccl")
    assert check_devices(["cuda:0", "cuda:0"], "gloo") == (["cuda:0", "cuda:0"], "gloo")


def test_a_device_that_does_not_exist_ends_the_start_with_the_reason(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RankGroup.start(["cuda:98", "cuda:99"], commands=COMMANDS, log_dir=tmp_path)
    text = str(caught.value)
    assert "there is no device cuda:9" in text and "this process sees" in text
    assert re.search(r"rank [01] on cuda:9[89] did not start", text)


@pytest.mark.parametrize(
    "source, text",
    [
        (None, "no such file"),
        ("COMMAND = {}", "has no attribute 'COMMANDS'"),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
    ],
)
def test_a_table_of_commands_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path, source, text):
    table = tmp_path / "table.py"
    if source is not None:
        table.write_text(source)
    with pytest.raises(
        ConfigError, match="the rank commands .*table.py:COMMANDS' cannot be loaded"
    ) as caught:
        load_commands(f"{table}:COMMANDS")
    assert text in str(caught.value)


@pytest.mark.parametrize("where", ["", "nonsense", "file.py", ":NAME", "module:"])
def test_a_table_of_commands_is_named_by_module_or_file_and_name(where):
    with pytest.raises(ConfigError, match="is not of the form 'module:NAME' or 'path/to/file.py:NAME'"):
        load_commands(where)


@pytest.mark.parametrize(
    "source, kind, text",
    [
        ("import no_such_module_at_all", ConfigError, "No module named 'no_such_module_at_all'"),
        (
            "raise ValueError('broken table')",
            RankError,
            "raised ValueError: broken table (rank 0 on cpu did not",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", RankError, "killed by signal 9"),
    ],
)
def test_a_rank_that_ends_while_starting_ends_the_start_with_the_reason(tmp_path, source, kind, text):
    table = tmp_path / "table.py"
    table.write_text(source)
    with pytest.raises(kind) as caught:
        RankGroup.start(["cpu"], commands=f"{table}:COMMANDS", log_dir=tmp_path / "logs")
    assert text in str(caught.value)


def test_a_start_that_takes_too_long_says_what_the_ranks_do_and_leaves_nothing(tmp_path):
    table = tmp_path / "table.py"
    pids = tmp_path / "pids"
    table.write_text(f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(600)")
    started = time.monotonic()
    with pytest.raises(
        RankError,
        match=r"did not start in time \((rank 0: (loading its commands|starting Python)|their launcher is starting)\)",
    ):
        RankGroup.start(["cpu"], commands=f"{table}:COMMANDS", log_dir=tmp_path / "logs", start_timeout=8)
    assert time.monotonic() - started < 90  # 180 unless told otherwise
    if pids.exists():
        assert still_running([int(pid) for pid in pids.read_text().split()], SOON) == []


def test_a_cancel_during_the_start_leaves_at_once(tmp_path):
    class Interrupt(BaseException):
        pass

    started = time.monotonic()

    def poll():
        if time.monotonic() - started > 1:
            raise Interrupt

    with pytest.raises(Interrupt):
        RankGroup.start(["cpu"], commands=COMMANDS, log_dir=tmp_path, poll=poll)
    assert time.monotonic() - started < 90


AS_COMFYUI_LOADS_IT = """
import importlib.util, json, os, sys
folder, commands, logs = sys.argv[1:]
# ComfyUI's own loader: the module's name is the folder's path.
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
client = importlib.import_module(name + ".core.ranks.client")
with client.RankGroup.start(["cpu", "cpu"], commands=commands, log_dir=logs) as group:
    print(json.dumps(group.request("surroundings", {"names": ["PYTORCH_CUDA_ALLOC_CONF"]}).header))
assert "comfy_tp" not in sys.modules
"""


def test_ranks_start_from_a_linked_folder_of_any_name_without_a_resolvable_hostname(tmp_path):
    pack, folder = tmp_path / "pack", tmp_path / "custom_nodes" / "comfy-tp (2)"
    for made in (pack, folder.parent):
        made.mkdir()
    shutil.copy(ROOT / "__init__.py", pack)
    shutil.copytree(ROOT / "core", pack / "core", ignore=shutil.ignore_patterns("__pycache__"))
    folder.symlink_to(pack)
    command = [sys.executable, "-c", AS_COMFYUI_LOADS_IT, str(folder), COMMANDS, str(tmp_path / "logs")]
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "--uts", "--map-root-user", "true"]
    if unshare and subprocess.run(probe, capture_output=True, timeout=10).returncode == 0:
        script = 'hostname no-such-host.invalid && exec "$@"'
        command = [unshare, "--uts", "--map-root-user", "sh", "-c", script, "sh", *command]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,max_split_size_mb:64"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["package"] == str(folder / "__init__.py")
    assert seen["env"] == [{"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}] * 2
    # Its modules would stand before others of the same names.
    assert not [path for path in seen["path"] if path.endswith("core/ranks")]


@pytest.mark.parametrize(
    "given, left",
    [
        ("backend:cudaMallocAsync", ""),
        ("expandable_segments:True", "expandable_segments:True"),
        ("backend: cudaMallocAsync , garbage_collection_threshold:0.8", " garbage_collection_threshold:0.8"),
        ("", ""),
    ],
)
def test_the_async_allocator_is_taken_out_of_the_settings(given, left):
    assert without_async_allocator(given) == left


WRONG_SUMS = """
import os
import time
from comfy_tp.core.ranks import self_test

true_test = self_test.self_test

def wrong_test(*arguments):
    wrong = true_test(*arguments)
    assert wrong is None
    if os.environ.get("NCCL_P2P_DISABLE"):
        return None
    if {hangs}:
        time.sleep(600)
    return "an all-reduce gave wrong sums"

self_test.self_test = wrong_test
self_test.SELF_TEST_TIMEOUT = 2.0
if {nccl}:
    self_test.p2p_in_use = lambda group: not os.environ.get("NCCL_P2P_DISABLE")
COMMANDS = {{}}
"""


@pytest.mark.parametrize(
    ("hangs", "text"),
    [
        (False, "an all-reduce gave wrong sums"),
        (True, "an all-reduce over 2 ranks did not end within 2 s"),
    ],
)
def test_wrong_sums_or_none_end_the_start(tmp_path, hangs, text):
    table = tmp_path / "table.py"
    table.write_text(WRONG_SUMS.format(hangs=hangs, nccl=False))
    with pytest.raises(RankError, match=rf"The start-up test failed on rank . \(cpu\): {text}\."):
        RankGroup.start(["cpu", "cpu"], commands=f"{table}:COMMANDS", log_dir=tmp_path / "logs")


@pytest.mark.parametrize("hangs", [False, True])
def test_wrong_sums_or_none_of_nccl_start_the_ranks_again_without_p2p_and_say_so(tmp_path, hangs):
    table = tmp_path / "table.py"
    table.write_text(WRONG_SUMS.format(hangs=hangs, nccl=True))
    with RankGroup.start(["cpu", "cpu"], commands=f"{table}:COMMANDS", log_dir=tmp_path / "logs") as group:
        assert group.request("ping").header["degree"] == 2
        assert group.notes == [
            "The collectives gave wrong sums on these devices, or none; started again with NCCL_P2P_DISABLE=1."
        ]
        assert group.status()["notes"] == group.notes
    logs = (tmp_path / "logs" / "rank-0.log").read_text() + (tmp_path / "logs" / "rank-1.log").read_text()
    assert "Try again with NCCL_P2P_DISABLE=1." in logs


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_the_self_test_knows_a_wrong_sum_of_each_dtype(monkeypatch, dtype):
    from comfy_tp.core.ranks import self_test

    def reduce(tensor, group=None):
        tensor.copy_((tensor.float() * 3).to(tensor.dtype))
        if tensor.dtype == dtype:
            tensor[100] += 1

    monkeypatch.setattr(self_test.dist, "all_reduce", reduce)
    wrong = self_test.self_test(None, 0, 2, torch.device("cpu"))
    assert wrong == (
        f"an all-reduce of {dtype} over 2 ranks gave 1 wrong sums of 4096" if dtype is not None else None
    )


def test_only_nccl_with_p2p_is_started_again_without_it(monkeypatch):
    from comfy_tp.core.ranks import self_test

    backend = "nccl"
    monkeypatch.setattr(self_test.dist, "get_backend", lambda group: backend)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert self_test.p2p_in_use(None)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert not self_test.p2p_in_use(None)
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    backend = "gloo"
    assert not self_test.p2p_in_use(None)


def test_ten_log_folders_are_kept_and_those_of_running_groups(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "comfy-tp" / "logs"
    for number in range(30):
        (root / f"20200101-0000{number:02d}-1").mkdir(parents=True)
    (root / "20200101-000003-1" / "launcher.pid").write_text(str(os.getpid()))
    (root / "20200101-000004-1" / "launcher.pid").write_text("999999999")
    made = new_log_dir()
    kept = sorted(path.name for path in root.iterdir())
    assert made.name == kept[-1]
    assert kept[0] == "20200101-000003-1"
    assert len(kept) == KEPT + 1


def test_logs_that_cannot_be_written_end_the_start_by_name(tmp_path, monkeypatch):
    (tmp_path / "rank-1.log").mkdir()
    with pytest.raises(ConfigError, match=r"no log at .*/rank-1\.log: Is a directory\. .* log_dir in Python"):
        RankGroup.start(["cpu", "cpu"], commands=COMMANDS, log_dir=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no log at .*/file/logs: Not a directory"):
        RankGroup.start(["cpu"], commands=COMMANDS, log_dir=tmp_path / "file" / "logs")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(
        ConfigError, match="no log at /proc/nowhere/comfy-tp/logs: No such file.*XDG_CACHE_HOME"
    ):
        RankGroup.start(["cpu"], commands=COMMANDS)


def test_the_innermost_frame_is_found_in_a_dump_of_all_stacks():
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/a/threading.py", line 5 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/b/model.py", line 7 in forward\n'
        '  File "/b/rank.py", line 9 in main\n'
    )
    assert innermost_frame(dump) == "/b/model.py:7 in forward"
    assert innermost_frame("") == ""


def test_forked_ranks_share_what_the_launcher_imported(tmp_path):
    with RankGroup.start(["cpu", "cpu"], commands=COMMANDS, log_dir=tmp_path) as group:
        for pid in group.pids:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            size = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            # In kB; a rank that imports torch by itself has most of it for itself.
            assert size["Private_Dirty"] < 80_000 < 150_000 < size["Rss"]


def test_ranks_that_are_not_forked_are_pythons_of_their_own(tmp_path):
    with RankGroup.start(["cpu", "cpu"], commands=COMMANDS, log_dir=tmp_path, fork=False) as group:
        lines = [command_line(pid) for pid in group.pids]
        assert all(line.startswith(f"{sys.executable} ") for line in lines)
        assert ["comfy_tp rank 0/2 cpu" in lines[0], "comfy_tp rank 1/2 cpu" in lines[1]] == [True, True]
        answer = group.request("total", tensors=[torch.ones(3)])
        assert torch.equal(answer.tensors[0], torch.full((3,), 2.0, dtype=torch.float64))
    assert still_running(group.pids, SOON) == []


def test_ranks_on_cuda_devices_are_never_forked():
    with pytest.raises(ConfigError, match="fork=True: ranks on CUDA devices cannot be forked"):
        RankGroup.start(["cuda:0"], fork=True)
