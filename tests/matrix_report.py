"""A pytest plugin: every outcome as a line of JSON, at once, in the file that ``$COMFY_TP_MATRIX_REPORT`` names.

What is there when a run is broken off counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "COMFY_TP_MATRIX_REPORT"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for a test that has ended, two where its teardown fails as well."""
    if report.skipped:
        _write(report.nodeid, "skipped", _reason(report))
    elif report.failed:
        _write(report.nodeid, "failed")
    elif report.when == "call":
        _write(report.nodeid, "passed")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or that is skipped as a whole."""
    if report.failed:
        _write(report.nodeid, "failed")
    elif report.skipped:
        _write(report.nodeid, "skipped", _reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _write(name: str, outcome: str, reason: str = "") -> None:
    # The processes that share a run's files report to the one that started them, which writes.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[VARIABLE]).open("a") as file:
            file.write(json.dumps({"test": name, "outcome": outcome, "reason": reason}) + "\n")
