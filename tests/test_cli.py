"""The command line itself: its help, its errors, and the one JSON object at the end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import comfy_tp.core.cli as cli
from comfy_tp.core.errors import ConfigError


def stand_in(run) -> SimpleNamespace:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model")
        parser.add_argument("--tp", type=int, default=1)

    return SimpleNamespace(add_arguments=add_arguments, run=run)


def test_help_lists_every_subcommand_without_importing_torch():
    code = (
        "import sys\n"
        "from comfy_tp.core.cli import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert all(f"    {name}" in done.stdout for name in cli.SUBCOMMANDS)
    assert done.stdout.strip().endswith("False")


def test_every_subcommand_has_its_module_and_shows_its_help(capsys: pytest.CaptureFixture[str]):
    for name in cli.SUBCOMMANDS:
        module = cli._load(name)
        assert module is not None, f"core/cli/{name}.py is missing"
        with pytest.raises(SystemExit) as left:
            cli.main([name, "--help"])
        assert left.value.code == 0
        assert f"usage: comfy-tp {name}" in capsys.readouterr().out


def test_the_console_script_is_installed():
    script = Path(sys.executable).parent / "comfy-tp"
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    assert "usage: comfy-tp" in done.stdout


def test_json_is_the_last_line_of_the_output(monkeypatch: pytest.MonkeyPatch, capsys):
    def run(args):
        print("reading", args.model)
        return 0, {"model": args.model, "tp": args.tp}

    monkeypatch.setattr(cli, "_load", lambda name: stand_in(run))
    assert cli.main(["verify", "some/model", "--tp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"model": "some/model", "tp": 2}


def test_a_subcommand_may_fail_with_figures(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(cli, "_load", lambda name: stand_in(lambda args: (1, {"rel_l2": 0.5})))
    assert cli.main(["verify", "some/model", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"rel_l2": 0.5}


def test_a_refusal_is_one_line_and_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys):
    def run(args):
        raise ConfigError("Degree 5 does not divide the 48 heads. Choose 2, 3, 4 or 6.")

    monkeypatch.setattr(cli, "_load", lambda name: stand_in(run))
    assert cli.main(["verify", "some/model"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "comfy-tp verify: Degree 5 does not divide the 48 heads. Choose 2, 3, 4 or 6.\n"
    assert captured.out == ""
    assert cli.main(["verify", "some/model", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "error": "Degree 5 does not divide the 48 heads. Choose 2, 3, 4 or 6.",
        "kind": "ConfigError",
    }


def test_errors_carry_the_installed_name_wherever_the_pack_was_imported_from():
    path = Path(cli.__file__).parents[1] / "errors.py"
    spec = importlib.util.spec_from_file_location("/home/a/custom_nodes/comfy-tp.core.errors", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    assert len(kinds) >= 8 and {kind.__module__ for kind in kinds} == {"comfy_tp.core.errors"}
    # A class of somebody else keeps its own.
    assert type("Other", (module.TPError,), {"__module__": "elsewhere"}).__module__ == "elsewhere"


def test_wrong_usage_is_exit_status_2(capsys: pytest.CaptureFixture[str]):
    for argv in ([], ["no-such-subcommand"]):
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        assert left.value.code == 2
    assert "invalid choice: 'no-such-subcommand'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["demo", "--ranks", "0"], ["verify", "x", "--tp", "two"], ["bench", "load", "--repeats", "-1"]]
)
def test_a_count_below_one_is_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    option, value = words[-2:]
    assert f"argument {option}: '{value}' is not a whole number of at least 1" in capsys.readouterr().err
