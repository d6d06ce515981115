"""``make matrix``: the tests that touch ComfyUI, on every release in the cache, and docs/comfyui.md from their results.

python tests/matrix.py [RELEASE ...]    newest: the newest one in the cache; none: all that are there

Each result is a file of its own in docs/comfyui/, and the page is made of all that lie there, so that a run on one
release leaves the rows of the others. Exit status 1: a test failed or a run did not end in time.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matrix_report
from conftest import processes_with

from comfy_tp.comfyui import comfyui_python, environment, tree
from comfy_tp.comfyui.choose import runnable
from comfy_tp.comfyui.releases import WHEEL_RELEASE, named, numbers, order
from comfy_tp.core.cli.bench import unwound_by_signals

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LOGS = ROOT / "tests" / "output"
LIMIT_S = 600.0
ENDING_S = 60.0  # what a run that is broken off gets to end its processes
MARK = "COMFY_TP_MATRIX_RUN"
FINISHED = "finished"
SHOWN = 40  # failed tests that the page names


@dataclass(frozen=True)
class Result:
    """What the tests said on one release. `skipped` counts the tests of each reason."""

    release: str
    frontend: str | None
    passed: int
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    ended: str = FINISHED

    @property
    def good(self) -> bool:
        return not self.failed and self.ended == FINISHED


def main(words: Sequence[str] | None = None) -> int:
    """Run, write the page, and return 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("release", nargs="*")
    parser.add_argument("--workers", type=int, default=2, help="how many processes share the test files")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one release (default 600)")
    args = parser.parse_args(words)
    good = True
    for version in chosen(args.release):
        why = lacking(version)
        if why:
            print(f"skipped: {why}", flush=True)
            continue
        result = run(version, ROOT / "tests", args.limit, args.workers)
        write(result, DOCS)
        print(summary(result), flush=True)
        good &= result.good
    (DOCS / "comfyui.md").write_text(page(DOCS))
    return 0 if good else 1


def chosen(words: Sequence[str]) -> list[str]:
    """The releases of these words, each once; of no words all in the cache."""
    if not words:
        return sorted((one.version for one in tree.cached()), key=order)
    younger = [version for version in runnable() if numbers(version) and version != WHEEL_RELEASE]
    found = [younger[-1] if word == "newest" and younger else named(word) for word in words]
    return list(dict.fromkeys(found))


def lacking(version: str) -> str | None:
    """Why there is nothing to run for a release, or None."""
    command = f"`comfy-tp comfyui get {version}`"
    path = tree.tree_folder(version)
    if not path.is_dir():
        return f"ComfyUI {version} is not in the cache; {command} fetches it."
    if why := tree.fault(path):
        return f"ComfyUI {version} {why}; {command} fetches it again."
    if not environment.ready(version):
        return f"ComfyUI {version} has no environment; {command} makes one."
    return None


def run(version: str, suite: Path, limit_s: float, workers: int) -> Result:
    """The tests of a folder that touch ComfyUI, on one release, with its interpreter."""
    folder = tree.tree_folder(version)
    mark = uuid.uuid4().hex
    LOGS.mkdir(exist_ok=True)
    log = LOGS / f"matrix-{version}.log"
    print(f"ComfyUI {version}: at most {limit_s:g} s, log in {log}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.jsonl"
        report.touch()
        # The package of this checkout, whichever one the release's environment was built by.
        (Path(scratch) / "comfy_tp").symlink_to(ROOT)
        before = filter(None, [os.environ.get("PYTHONPATH")])
        variables = {
            "COMFYUI_PATH": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), scratch, *before]),
            matrix_report.VARIABLE: str(report),
            MARK: mark,
        }
        command = [comfyui_python(folder), "-m", "pytest", "-p", "matrix_report"]
        command += ["-m", "comfyui and not soak", "-q", "-n", str(workers), "--dist", "loadfile"]
        ended = _run_pytest(
            [*command, "--no-loadscope-reorder", str(suite)], suite.parent, variables, log, limit_s
        )
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    return Result(version, environment.frontend(version), **count(lines), ended=ended)


def _run_pytest(
    command: list[str], folder: Path, variables: dict[str, str], log: Path, limit_s: float
) -> str:
    """Run to the end or the limit, leave no process behind, and say how it ended."""
    # Where one of several pytest processes runs the matrix, those that it starts are not of the same run.
    given = {
        name: value
        for name, value in os.environ.items()
        if name != "COMFYUI_PYTHON" and not name.startswith("PYTEST_XDIST_")
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**given, **variables},
            start_new_session=True,
            # `_end` ends it as Ctrl-C does, which a shell's background jobs ignore.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        # 0: all passed, 1: some failed, 5: there was none.
        with unwound_by_signals():
            status = process.wait(limit_s)
        return FINISHED if status in (0, 1, 5) else f"pytest ended with exit status {status}"
    except subprocess.TimeoutExpired:
        return f"timed out after {limit_s / 60:g} minutes"
    finally:
        _end(process, f"{MARK}={variables[MARK]}")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End pytest as Ctrl-C does, so that it ends what it started; then whatever still carries this run's mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    deadline = time.monotonic() + ENDING_S
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def count(lines: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Passed, failed and skipped of a report's lines. A test that failed anywhere failed."""
    failed = dict.fromkeys(line["test"] for line in lines if line["outcome"] == "failed")
    skipped = {line["test"]: plain(line["reason"]) for line in lines if line["outcome"] == "skipped"}
    passed = {line["test"] for line in lines if line["outcome"] == "passed"} - failed.keys()
    reasons = collections.Counter(reason for test, reason in skipped.items() if test not in failed)
    return {
        "passed": len(passed),
        "failed": sorted(failed),
        "skipped": dict(sorted(reasons.items(), key=lambda one: (-one[1], one[0]))),
    }


def plain(reason: str) -> str:
    """A reason in one line, without this machine's folders."""
    for folder, short in ((tree.cache_folder(), "the cache"), (ROOT, "."), (Path.home(), "~")):
        reason = reason.replace(str(folder), short)
    return " ".join(reason.split())


def summary(result: Result) -> str:
    """One release in one line."""
    counts = f"{result.passed} passed, {len(result.failed)} failed, {sum(result.skipped.values())} skipped"
    return f"ComfyUI {result.release}: {counts}" + ("" if result.ended == FINISHED else f", {result.ended}")


# -- the page


def write(result: Result, docs: Path) -> None:
    """Put a result where the page finds it."""
    (docs / "comfyui").mkdir(exist_ok=True)
    file = docs / "comfyui" / f"tests-{result.release}.json"
    file.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")


def page(docs: Path) -> str:
    """docs/comfyui.md, of the files in docs/comfyui/."""
    parts = [section(docs / "comfyui") for section in SECTIONS]
    return "\n".join(
        [
            "# Releases of ComfyUI",
            "",
            "`make matrix` writes this page of the results that it keeps in docs/comfyui/. What it runs, and where the",
            "releases come from: [development](development.md).",
            "",
            *(part for part in parts if part),
        ]
    )


def tests_section(folder: Path) -> str:
    """The tests that touch ComfyUI, a row for each release."""
    results = sorted(
        (Result(**json.loads(file.read_text())) for file in folder.glob("tests-*.json")),
        key=lambda result: order(result.release),
    )
    if not results:
        return ""
    lines = [
        "## Tests",
        "",
        "| release | frontend | passed | failed | skipped | |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        ended = "" if one.ended == FINISHED else one.ended
        counts = f"{one.passed} | {len(one.failed)} | {sum(one.skipped.values())}"
        lines.append(
            f"| {one.release} | {one.frontend or 'none'} | {counts} | {ended} |".replace("|  |", "| |")
        )
    if any(one.skipped for one in results):
        lines += ["", "What is skipped, and why:", "", "| release | tests | reason |", "|---|---|---|"]
        for one in results:
            for reason, number in one.skipped.items():
                lines.append(f"| {one.release} | {number} | {_cell(reason)} |")
    if any(one.failed for one in results):
        lines += ["", "What failed:", ""]
        for one in results:
            lines += [f"- {one.release}: `{test}`" for test in one.failed[:SHOWN]]
            if len(one.failed) > SHOWN:
                lines.append(f"- {one.release}: and {len(one.failed) - SHOWN} more")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def nodes_section(folder: Path) -> str:
    """Every stock node that takes a MODEL: what it does on ours, by the sweeps of the releases."""
    files = {file.stem.removeprefix("sweep-"): file for file in folder.glob("sweep-*.json")}
    releases = sorted(files, key=order)
    if not releases:
        return ""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for release in releases:
        for finding in json.loads(files[release].read_text()):
            found.setdefault(finding["node"], {}).setdefault(release, []).append(finding)
    lines = [
        "## Stock nodes",
        "",
        "Every stock node of a release that takes a MODEL, on FLUX.2 with Load TP Model. *works*: with the result of the",
        "stock MODEL. *refused*: with the sentence beside it. *no effect*: it changes nothing on the stock MODEL either.",
        "*not for FLUX.2*: it fails on the stock MODEL too. Several verdicts are those of several choices of its widgets.",
        "",
        f"| node | {' | '.join(releases)} | |",
        f"|{'---|' * (len(releases) + 2)}",
    ]
    for node in sorted(found, key=str.lower):
        verdicts = [_verdicts(found[node].get(release, [])) for release in releases]
        said = dict.fromkeys(one["says"] for release in releases for one in found[node].get(release, []))
        sentences = " / ".join(_cell(text) for text in said if text)
        lines.append(f"| {_cell(node)} | {' | '.join(verdicts)} | {sentences} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _verdicts(findings: Sequence[dict[str, Any]]) -> str:
    """Those of one node on one release in words, each once."""
    words = (
        "no effect" if one["verdict"] == "works" and not one["changes"] else one["verdict"]
        for one in findings
    )
    return ", ".join(dict.fromkeys(words)) or "–"


def templates_section(folder: Path) -> str:
    """The official templates with our loader in place of theirs, and those that were run on small files."""
    found = _by_release(folder, "templates-[0-9m]*.json", "templates-")
    runs = _by_release(folder, "template-runs-*.json", "template-runs-")
    if not found:
        return ""
    lines = [
        "## Official templates",
        "",
        "With Load TP Model in place of their loader. *accepted*: the server takes it as it takes the original.",
        "*same picture*: it was run on small files of the named kinds, and gave the picture of the stock loaders. Else the",
        "node that the release lacks, or the sentence that refuses it.",
        "",
        f"| template | {' | '.join(found)} |",
        f"|{'---|' * (len(found) + 1)}",
    ]
    for name in sorted({name for one in found.values() for name in one}):
        cells = [
            _template_cell(one.get(name), runs.get(release, {}).get(name)) for release, one in found.items()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_release(folder: Path, pattern: str, prefix: str) -> dict[str, dict[str, Any]]:
    files = {file.stem.removeprefix(prefix): file for file in folder.glob(pattern)}
    return {release: json.loads(files[release].read_text()) for release in sorted(files, key=order)}


def _template_cell(accepted: dict[str, Any] | None, ran: dict[str, Any] | None) -> str:
    if accepted is None:
        return "–"
    if ran and ran.get("refused"):
        return _cell(f"refused: {ran['refused']}")
    if ran and ran.get("ran"):
        return "same picture"
    if accepted.get("refused"):
        return _cell("refused: " + "; ".join(accepted["refused"]))
    lacks = accepted.get("missing") or []
    return f"lacks {', '.join(lacks)}" if lacks else "accepted"


# In the page's order: each makes its part of the files that are its own, or returns "".
SECTIONS: tuple[Callable[[Path], str], ...] = (tests_section, templates_section, nodes_section)


if __name__ == "__main__":
    sys.exit(main())
