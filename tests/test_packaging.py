"""The pack as a distribution: what is installed, under which names, and what importing it costs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in_tree() -> set[str]:
    found = {"comfy_tp"}
    for top in ("core", "comfy_tp_nodes", "comfyui"):
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]:
            parts = folder.relative_to(ROOT).parts
            if folder.is_dir() and "web" not in parts and any(folder.glob("*.py")):
                found.add(".".join(("comfy_tp", *parts)))
    return found


def run_python(code: str, **environment: str) -> str:
    """Run code in a new interpreter, away from the repository, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_package_of_the_tree_is_listed_for_installation():
    assert set(project()["tool"]["setuptools"]["packages"]) == packages_in_tree()


def test_every_package_has_its_init_file():
    missing = [name for name in packages_in_tree() if not (ROOT / path_of(name) / "__init__.py").is_file()]
    assert missing == []


def path_of(package: str) -> Path:
    return Path(*package.split(".")[1:])


def test_requirements_equal_the_dependencies_and_leave_torch_alone():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line]
    assert lines == project()["project"]["dependencies"]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower().replace("_", "-") for line in lines}
    assert not names & {"torch", "torchvision", "torchaudio", "numpy", "triton"}
    # Whatever version of these an artist has is left as it is.
    assert {"huggingface_hub", "safetensors", "transformers"} <= set(lines)


def test_the_registry_finds_all_it_asks_for():
    content = project()
    comfy = content["tool"]["comfy"]
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert comfy["requires-comfyui"] == ">=0.3.75"
    assert "comfyui" not in content["project"]["name"].lower()
    assert content["project"]["urls"]["Repository"].startswith("https://")
    assert re.fullmatch(r"\d+\.\d+\.\d+", content["project"]["version"])
    # With a web folder named here as well ComfyUI would register it twice.
    assert "web" not in comfy
    assert (ROOT / "comfy_tp_nodes" / "web").is_dir()


def test_the_changelog_knows_this_version():
    assert f"## {project()['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_importing_the_package_loads_nothing_heavy_and_starts_nothing():
    code = (
        "import sys, threading\n"
        "import comfy_tp, comfy_tp.core, comfy_tp.core.cli, comfy_tp.comfy_tp_nodes\n"
        "heavy = [name for name in ('torch', 'numpy', 'diffusers', 'transformers') if name in sys.modules]\n"
        "print(heavy, threading.active_count())"
    )
    assert run_python(code) == "[] 1"


def test_no_top_level_package_called_core_is_installed():
    code = "import importlib.util\nprint(importlib.util.find_spec('core'))"
    assert run_python(code) == "None"


def imported_from(path: Path) -> set[str]:
    """The top-level names that a file imports absolutely, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_package_imports_itself_relatively():
    """It lies under any name in custom_nodes/, so the name comfy_tp must not occur in its own imports."""
    files = [path for top in ("core", "comfy_tp_nodes", "comfyui") for path in (ROOT / top).rglob("*.py")]
    files.append(ROOT / "__init__.py")
    # The ranks' entry script is run by its path, and registers the package by this name first.
    files.remove(ROOT / "core" / "ranks" / "entry.py")
    assert [str(path) for path in files if imported_from(path) & {"comfy_tp", "comfy_tp_nodes", "core"}] == []


def test_core_never_imports_comfyui():
    comfyui = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "nodes", "server"}
    assert [str(path) for path in (ROOT / "core").rglob("*.py") if imported_from(path) & comfyui] == []


def test_locked_node_packages_name_no_host():
    lock = (ROOT / "tests" / "browser" / "package-lock.json").read_text()
    assert "://" not in lock and '"resolved"' not in lock


def test_an_installed_wheel_is_comfy_tp_alone_and_its_command_runs(tmp_path: Path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "tests", "build", "dist", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored)
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        + ["--no-build-isolation", "--target", str(target), str(source)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")} == {
        "bin",
        "comfy_tp",
    }
    installed = target / "comfy_tp"
    for name in packages_in_tree():
        assert (installed / path_of(name) / "__init__.py").is_file(), name
    for pattern in (
        "comfy_tp_nodes/web/**/*",
        "locales/**/*.json",
        "workflows/**/*.json",
        "core/**/*.safetensors",
    ):
        for path in ROOT.glob(pattern):
            if path.is_file():
                assert (installed / path.relative_to(ROOT)).is_file(), path
    code = "import comfy_tp, comfy_tp.core.cli\nprint(comfy_tp.__file__)\ncomfy_tp.core.cli.main(['--help'])"
    try:
        printed = run_python(code, PYTHONPATH=str(target))
    except AssertionError as error:
        raise AssertionError(f"the installed command does not run: {error}") from error
    assert printed.startswith(str(installed))
    assert "doctor" in printed
