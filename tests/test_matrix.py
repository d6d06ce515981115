"""``make matrix``: which tests it runs, what it makes of a run's end, and that docs/comfyui.md is its own page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matrix
import pytest
from comfyui_repositories import tree_files
from conftest import processes_with, touches_comfyui

TESTS = Path(__file__).parent
SUITE = """
import os, subprocess, sys, time
import pytest

pytestmark = pytest.mark.comfyui

def test_that_passes():
    assert os.environ["COMFYUI_PATH"].endswith("ComfyUI-0.3.75")

@pytest.mark.parametrize("number", [1, 2])
def test_that_fails(number):
    assert not number

@pytest.fixture
def broken():
    raise OSError("no")

def test_whose_fixture_fails(broken):
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_that_is_skipped(number):
    pytest.skip("ComfyUI has no node | Flux " + os.environ["COMFY_TP_CACHE"])

@pytest.mark.xfail(reason="not yet", strict=True)
def test_that_cannot_pass():
    assert False
"""
SLOW = """
import subprocess, sys, time
import pytest

@pytest.mark.comfyui
def test_that_passes():
    pass

@pytest.mark.comfyui
def test_that_hangs():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    time.sleep(60)
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for tests, beside a cache with one small tree."""
    monkeypatch.setenv("COMFY_TP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(matrix, "LOGS", tmp_path / "logs")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly")
    for name, content in tree_files("0.3.75").items():
        file = tmp_path / "cache" / "ComfyUI-0.3.75" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  comfyui\n  soak\n")
    return folder


def test_what_touches_comfyui_is_found_by_a_rule(tmp_path: Path):
    for name in (
        "test_nodes_files",
        "test_nodes_server",
        "test_sampler_node",
        "test_seams",
        "test_workflows",
    ):
        assert touches_comfyui(TESTS / f"{name}.py"), name
    for name in ("test_plan_command", "test_limits", "test_group", "test_comfyui_get"):
        assert not touches_comfyui(TESTS / f"{name}.py"), name
    other = tmp_path / "test_other.py"
    other.write_text("def test(comfy): pass\n")
    assert not touches_comfyui(other, ["tmp_path"]) and touches_comfyui(other, ["tmp_path", "comfy"])


def test_this_run_has_the_marker_where_the_rule_says_so(request: pytest.FixtureRequest):
    for item in request.session.items:
        expected = touches_comfyui(item.path, getattr(item, "fixturenames", ()))
        assert (item.get_closest_marker("comfyui") is not None) == expected, item.nodeid


def test_outcomes_are_counted_and_reasons_grouped(suite: Path):
    (suite / "test_some.py").write_text(SUITE)
    (suite / "test_unimportable.py").write_text("import no_such_module_of_comfyui\n")
    (suite / "test_other.py").write_text("def test_that_does_not_touch_comfyui():\n    assert False\n")
    result = matrix.run("0.3.75", suite, 60, 2)
    assert result.passed == 1
    assert [test.split("::")[-1] for test in result.failed] == [
        *("test_that_fails[1]", "test_that_fails[2]", "test_whose_fixture_fails", "test_unimportable.py")
    ]
    assert result.skipped == {"ComfyUI has no node | Flux the cache": 2, "expected to fail: not yet": 1}
    assert not result.good


def test_a_run_that_takes_too_long_says_so_counts_what_ended_and_leaves_nothing(suite: Path):
    (suite / "test_slow.py").write_text(SLOW)
    result = matrix.run("0.3.75", suite, 6, 0)
    assert (result.passed, result.failed) == (1, [])
    assert result.ended == "timed out after 0.1 minutes" and not result.good
    assert [
        one for one in processes_with(f"COMFY_TP_CACHE={suite.parent / 'cache'}").values() if "sleep" in one
    ] == []


def test_a_matrix_that_is_ended_leaves_nothing(suite: Path):
    """SIGTERM, as from a service manager or `kill`; also where a shell's background job ignores SIGINT."""
    (suite / "test_slow.py").write_text(SLOW)
    program = f"""
import pathlib, matrix
matrix.LOGS = pathlib.Path({str(suite.parent)!r}) / "logs"
matrix.run("0.3.75", pathlib.Path({str(suite)!r}), 600, 0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    mark = f"COMFY_TP_CACHE={suite.parent / 'cache'}"
    deadline = time.monotonic() + 60
    while not any("sleep" in one for one in processes_with(mark).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any("sleep" in one for one in processes_with(mark).values())


def test_the_page_has_a_row_for_every_result(tmp_path: Path):
    matrix.write(
        matrix.Result("0.33.0", "1.48.7", 9, ["tests/test_a.py::test_b"], {"no node a|b": 2}), tmp_path
    )
    matrix.write(matrix.Result("0.8.2", None, 3, ended="timed out after 10 minutes"), tmp_path)
    lines = matrix.page(tmp_path).splitlines()
    rows = [line for line in lines if line.startswith("| 0.")]
    assert rows == [
        "| 0.8.2 | none | 3 | 0 | 0 | timed out after 10 minutes |",
        "| 0.33.0 | 1.48.7 | 9 | 1 | 2 | |",
        "| 0.33.0 | 2 | no node a\\|b |",
    ]
    assert "- 0.33.0: `tests/test_a.py::test_b`" in lines


def test_the_page_has_a_row_for_every_stock_node_with_its_verdict_on_each_release(tmp_path: Path):
    folder = tmp_path / "comfyui"
    folder.mkdir()

    def found(node: str, verdict: str, says: str = "", changes: bool = True) -> dict:
        return {"node": node, "verdict": verdict, "says": says, "changes": changes}

    old = [found("Shift", "works"), found("Nothing", "works", changes=False)]
    new = [*old, found("Shift", "refused", "It cannot|be."), found("Cache", "refused", "No cache.")]
    (folder / "sweep-0.33.0.json").write_text(json.dumps(new))
    (folder / "sweep-0.3.75.json").write_text(json.dumps(old))
    rows = [line for line in matrix.page(tmp_path).splitlines() if line.startswith("| ")]
    assert rows == [
        "| node | 0.3.75 | 0.33.0 | |",
        "| Cache | – | refused | No cache. |",
        "| Nothing | no effect | no effect | |",
        "| Shift | works | works, refused | It cannot\\|be. |",
    ]


def test_a_release_that_cannot_run_is_skipped_by_name(suite: Path, capsys, monkeypatch):
    docs = suite.parent / "docs"
    docs.mkdir()
    monkeypatch.setattr(matrix, "DOCS", docs)
    assert matrix.chosen(["newest", "v0.33.0"]) == ["0.33.0"]
    assert matrix.main(["newest", "master"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"skipped: ComfyUI {version} is not in the cache; `comfy-tp comfyui get {version}` fetches it."
        for version in ("0.33.0", "master")
    ]
    (suite.parent / "cache/ComfyUI-0.3.75").rename(suite.parent / "cache/ComfyUI-0.24.0")
    assert "has no environment" in (matrix.lacking("0.24.0") or "")
    assert "## Tests" not in (docs / "comfyui.md").read_text()


def test_docs_comfyui_md_is_what_its_files_make():
    assert (matrix.DOCS / "comfyui.md").read_text() == matrix.page(matrix.DOCS)
    for file in (matrix.DOCS / "comfyui").glob("*.json"):
        text = file.read_text()
        assert os.path.expanduser("~") not in text and json.loads(text), file.name


def test_the_page_shows_which_templates_are_accepted_run_or_refused(tmp_path):
    folder = tmp_path / "comfyui"
    folder.mkdir()
    accepted = {"families": ["FLUX.2"], "missing": [], "refused": []}
    (folder / "templates-0.3.75.json").write_text(
        json.dumps({"one": {"families": ["FLUX.2"], "missing": ["ComfySwitchNode"]}, "two": accepted})
    )
    (folder / "templates-master.json").write_text(json.dumps({"one": accepted, "three": accepted}))
    runs = {"one": {"ran": True, "small_decoder": True}, "three": {"refused": "It cannot."}}
    (folder / "template-runs-master.json").write_text(json.dumps(runs))
    page = matrix.page(tmp_path)
    assert "| template | 0.3.75 | master |" in page
    assert "| one | lacks ComfySwitchNode | same picture |" in page
    assert "| three | – | refused: It cannot. |" in page
    assert "| two | accepted | – |" in page
