"""``comfy-tp comfyui``: releases come whole into the cache or not at all, and every bad one is refused in a sentence."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_repositories import (
    LARGE,
    commit,
    git,
    object_file,
    only_from,
    replace_object,
    shell_for_ssh,
    tree_files,
    wheel,
)

import comfy_tp.core.cli as cli
from comfy_tp.comfyui import ComfyServer, comfyui_path, comfyui_python, environment, newest_path
from comfy_tp.comfyui.releases import COMMITS, OFFICIAL, newest
from comfy_tp.core.errors import ConfigError

NEWEST = "0.33.0"
STAND_INS = True


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository without tags that stands for the official one; its only commit is the newest release."""
    folder = tmp_path_factory.mktemp("official") / "ComfyUI"
    commit(folder, tree_files(NEWEST))
    return folder


@pytest.fixture(scope="module")
def full_cache(official: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache into which the newest release has been put, with its environment. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("full")
    wheel(folder / "wheels", "comfyui-frontend-package", "9.9.9")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMMITS, NEWEST, git(official, "rev-parse", "HEAD"))
        redirect(patch, official)
        patch.setenv("COMFY_TP_CACHE", str(folder / "cache"))
        for name, value in only_from(folder / "wheels").items():
            patch.setenv(name, value)
        assert cli.main(["comfyui", "get", "newest"]) == 0
    yield folder / "cache"


@pytest.fixture
def cache(tmp_path: Path, official: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, beside an official repository that is `official`."""
    monkeypatch.setitem(COMMITS, NEWEST, git(official, "rev-parse", "HEAD"))
    monkeypatch.setenv("COMFY_TP_CACHE", str(tmp_path / "cache"))
    for name in ("COMFYUI_PATH", "COMFYUI_PYTHON", "COMFY_TP_COMFYUI_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    redirect(monkeypatch, official)
    return tmp_path / "cache"


def redirect(patch: pytest.MonkeyPatch, repository: Path | str, address: str = OFFICIAL[0]) -> None:
    """What an owner does by ``git config --global url.REPOSITORY.insteadOf ADDRESS``."""
    patch.setenv("GIT_CONFIG_COUNT", "1")
    patch.setenv("GIT_CONFIG_KEY_0", f"url.{repository}.insteadOf")
    patch.setenv("GIT_CONFIG_VALUE_0", address)


@pytest.fixture
def no_environments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Only trees are looked at: the releases for which an environment would have been built."""
    built: list[str] = []
    monkeypatch.setattr(environment, "build", lambda version, *rest: built.append(version) or [])
    return built


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence with which ``comfy-tp comfyui get`` refuses; nothing is left in the cache of what it tried."""
    capsys.readouterr()
    assert cli.main(["comfyui", "get", *words, "--json"]) == 1
    captured = capsys.readouterr()
    (error,) = captured.err.splitlines()
    assert json.loads(captured.out.splitlines()[-1])["error"] in error
    return error


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    """The rows of ``comfy-tp comfyui list``."""
    capsys.readouterr()
    assert cli.main(["comfyui", "list", "--json"]) == 0
    return {row["version"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["releases"]}


def use(patch: pytest.MonkeyPatch, full: Path) -> None:
    patch.setenv("COMFY_TP_CACHE", str(full))


def test_every_supported_release_is_named_by_a_whole_commit():
    assert len(COMMITS) >= 5
    assert all(len(one) == 40 and int(one, 16) for one in COMMITS.values())
    assert newest() == NEWEST


def test_a_release_comes_with_its_files_and_its_commit(full_cache: Path, official: Path, capsys, monkeypatch):
    use(monkeypatch, full_cache)
    tree = full_cache / f"ComfyUI-{NEWEST}"
    for name, content in tree_files(NEWEST).items():
        assert (tree / name).read_text() == content
    row = listed(capsys)[NEWEST]
    assert row["commit"] == git(official, "rev-parse", "HEAD")
    assert (row["fault"], row["missing"], row["frontend"]) == (None, [], "9.9.9")
    assert sorted(path.name for path in full_cache.iterdir()) == [".lock", tree.name, f"env-{NEWEST}"]


def test_its_environment_has_its_requirements_and_the_torch_that_runs_here(full_cache: Path, monkeypatch):
    use(monkeypatch, full_cache)
    python = comfyui_python(full_cache / f"ComfyUI-{NEWEST}")
    assert python == str(full_cache / f"env-{NEWEST}/bin/python")
    code = (
        "import importlib.metadata, importlib.util as u\n"
        "print(u.find_spec('torch').origin, importlib.metadata.version('comfyui_frontend_package'))\n"
        "import comfy_tp.core.cli"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == [importlib.util.find_spec("torch").origin, "9.9.9"]


def test_a_server_runs_the_tree_with_its_own_interpreter_and_frontend(full_cache: Path, monkeypatch):
    use(monkeypatch, full_cache)
    monkeypatch.delenv("COMFYUI_PYTHON", raising=False)
    tree = full_cache / f"ComfyUI-{NEWEST}"
    with ComfyServer(tree=tree, boot_timeout_s=30) as server:
        assert server.get("/system_stats") == {"python": comfyui_python(tree), "frontend": "9.9.9"}
    monkeypatch.setenv("COMFYUI_PATH", str(tree))
    assert comfyui_path() == tree
    # Another place has no environment of ours, whatever it holds.
    assert comfyui_python(full_cache / "elsewhere" / tree.name) != comfyui_python(tree)


def test_a_release_that_is_there_is_not_fetched_again(full_cache: Path, cache: Path, capsys, monkeypatch):
    use(monkeypatch, full_cache)
    redirect(monkeypatch, "/nowhere")
    assert cli.main(["comfyui", "get", f"v{NEWEST}"]) == 0
    assert "Fetching" not in capsys.readouterr().out
    assert "--again" in refused(capsys, NEWEST, "--commit", "1" * 40)


def test_the_repository_under_its_old_name_may_be_redirected_too(
    cache: Path, official, no_environments, monkeypatch
):
    redirect(monkeypatch, official, OFFICIAL[1])
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    assert no_environments == [NEWEST]


def test_a_distant_repository_is_fetched_by_the_commit_alone(
    cache: Path, official: Path, tmp_path: Path, no_environments, capsys, monkeypatch
):
    monkeypatch.setenv("GIT_SSH_COMMAND", shell_for_ssh(tmp_path))
    redirect(monkeypatch, f"ssh://distant{official}")
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    row = listed(capsys)[NEWEST]
    assert row["source"] == f"ssh://distant{official}"
    assert (cache / f"ComfyUI-{NEWEST}" / LARGE).is_file()
    assert not (cache / f"ComfyUI-{NEWEST}" / ".git").exists()


def test_without_a_network_it_says_so_and_the_cache_is_as_before(cache: Path, capsys, monkeypatch):
    redirect(monkeypatch, "https://127.0.0.1:1/ComfyUI")
    error = refused(capsys, NEWEST)
    assert "Fetching ComfyUI from https://" in error and "Check the network" in error
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_repository_that_does_not_answer_is_given_up(cache: Path, tmp_path: Path, capsys, monkeypatch):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nsleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setenv("GIT_SSH_COMMAND", str(silent))
    redirect(monkeypatch, "ssh://distant/ComfyUI")
    started = time.monotonic()
    assert "was not done within 1 s" in refused(capsys, NEWEST, "--timeout", "1")
    assert time.monotonic() - started < 50  # it would be silent for 60


def test_a_snapshot_that_lacks_a_file_is_used_and_the_file_named(
    cache: Path, tmp_path: Path, no_environments, capsys, monkeypatch
):
    snapshot = tmp_path / "snapshot"
    monkeypatch.setitem(COMMITS, NEWEST, commit(snapshot, tree_files(NEWEST)))
    object_file(snapshot, LARGE).unlink()
    monkeypatch.setenv("COMFY_TP_COMFYUI_REPOSITORY", str(snapshot))
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    assert f"lacks {LARGE}; the rest is used" in capsys.readouterr().out
    assert listed(capsys)[NEWEST]["missing"] == [LARGE]
    assert (cache / f"ComfyUI-{NEWEST}/comfy/ldm/models/autoencoder.py").is_file()


def test_a_tree_that_differs_from_its_hash_is_refused(cache: Path, tmp_path: Path, capsys, monkeypatch):
    for name, kind, content, said in (
        (LARGE, "blob", b"[]\n", f"The hash differs: {LARGE} of "),
        ("comfy/ldm", "tree", b"", "The hash differs: the list of files of "),
        ("", "tree", b"", "hash mismatch"),
    ):
        repository = tmp_path / f"changed-{name.replace('/', '-')}"
        monkeypatch.setitem(COMMITS, NEWEST, commit(repository, tree_files(NEWEST)))
        replace_object(object_file(repository, name), kind, content)
        assert said in refused(capsys, NEWEST, "--repository", str(repository))
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_another_commit_than_the_one_of_the_release_is_refused(cache: Path, tmp_path: Path, capsys):
    other = tmp_path / "other"
    commit(other, tree_files(NEWEST, **{"nodes.py": "# changed\n"}))
    error = refused(capsys, NEWEST, "--repository", str(other))
    assert COMMITS[NEWEST] in error and "does not hold it" in error


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.34.0", "ComfyUI 0.34.0 is unknown. Known are 0.3.75, "),
        ("0.3.74", "ComfyUI 0.3.74 is too old"),
        ("../elsewhere", "'../elsewhere' names no release"),
    ],
)
def test_a_version_that_cannot_be_is_refused(version: str, said: str, cache: Path, capsys):
    assert said in refused(capsys, version)


def test_what_is_no_comfyui_or_another_one_is_refused(cache: Path, tmp_path: Path, capsys):
    for files, version, said in (
        (tree_files(NEWEST, **{"main.py": None}), NEWEST, "is no ComfyUI: it has no main.py"),
        (tree_files("0.3.60"), "mine", "ComfyUI 0.3.60 is too old"),
        (tree_files("0.24.0"), NEWEST, f"is ComfyUI 0.24.0, not {NEWEST}"),
    ):
        found = commit(tmp_path / "repository", files)
        options = ["--repository", str(tmp_path / "repository"), "--commit", found]
        assert said in refused(capsys, version, *options)
    assert "is no commit" in refused(capsys, NEWEST, "--commit", found[:8])
    (tmp_path / "empty").mkdir()
    assert "neither a git repository nor a ComfyUI" in refused(
        capsys, NEWEST, "--repository", str(tmp_path / "empty")
    )
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_an_owner_may_name_a_tag_a_commit_or_a_plain_folder(
    cache: Path, tmp_path: Path, no_environments, capsys
):
    own = tmp_path / "own"
    found = commit(own, tree_files("0.38.1"), tag="v0.38.1")
    assert "has no tag v0.40.0" in refused(capsys, "0.40.0", "--repository", str(own))
    assert cli.main(["comfyui", "get", "0.38.1", "--repository", str(own)]) == 0
    assert cli.main(["comfyui", "get", "mine", "--repository", str(own), "--commit", found]) == 0
    shutil.rmtree(own / ".git")
    (own / "models").mkdir()
    (own / "models" / "large.safetensors").write_text("the owner's")
    assert cli.main(["comfyui", "get", "folder", "--repository", str(own)]) == 0
    rows = listed(capsys)
    assert rows["0.38.1"]["commit"] == rows["mine"]["commit"] == found
    assert rows["folder"]["commit"] is None and rows["folder"]["source"] == str(own)
    assert not (cache / "ComfyUI-folder/models").exists()
    assert (cache / "ComfyUI-folder/comfy/ldm/models/autoencoder.py").is_file()


def test_half_a_tree_is_said_to_be_one_and_fetched_again(cache: Path, no_environments, capsys, monkeypatch):
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    tree = cache / f"ComfyUI-{NEWEST}"
    shutil.rmtree(tree / "comfy" / "ldm")
    (cache / ".fetch-left" / "tree").mkdir(parents=True)
    assert "lacks 1 of its " in listed(capsys)[NEWEST]["fault"]
    monkeypatch.setenv("COMFYUI_PATH", str(tree))
    with pytest.raises(ConfigError, match="half a ComfyUI"):
        comfyui_path()
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    assert "is fetched again" in capsys.readouterr().out
    assert comfyui_path() == tree
    assert not (cache / ".fetch-left").exists()


def test_half_a_tree_of_the_oldest_release_is_not_started(cache: Path):
    (cache / "ComfyUI-0.3.75" / "comfy").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"half a tree.*comfy-tp comfyui get 0\.3\.75"):
        comfyui_path()


def test_a_comfyui_path_that_is_too_old_is_refused(tmp_path: Path, monkeypatch):
    commit(tmp_path / "old", tree_files("0.3.60"))
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "old"))
    with pytest.raises(ConfigError, match=r"ComfyUI 0\.3\.60 is too old: what COMFYUI_PATH points to"):
        comfyui_path()


def test_requirements_that_cannot_be_installed_leave_the_tree_and_can_be_had_later(
    cache: Path, tmp_path: Path, capsys, monkeypatch
):
    wheels = tmp_path / "wheels"
    wheel(wheels, "comfyui-frontend-package", "9.9.9", "torch<1")
    for name, value in only_from(wheels).items():
        monkeypatch.setenv(name, value)
    error = refused(capsys, NEWEST)
    assert f"Installing the requirements of ComfyUI {NEWEST} failed: " in error
    assert "comfyui-frontend-package==9.9.9" in error and "conflicting dependencies" in error
    assert sorted(path.name for path in cache.iterdir()) == [".lock", f"ComfyUI-{NEWEST}"]
    row = listed(capsys)[NEWEST]
    assert row["cached"] and row["python"] is None
    wheel(wheels, "comfyui-frontend-package", "9.9.9")
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    # No wheel of torchaudio is here: a note, no more.
    assert "runs without its audio nodes" in capsys.readouterr().out
    assert listed(capsys)[NEWEST]["frontend"] == "9.9.9"
    # What ran before stays, where a second time goes wrong.
    (wheels / "comfyui_frontend_package-9.9.9-py3-none-any.whl").unlink()
    assert "comfyui-frontend-package==9.9.9. Its tree stays" in refused(capsys, NEWEST, "--again")
    assert listed(capsys)[NEWEST]["frontend"] == "9.9.9" and environment.ready(NEWEST)
    # The environment that it was built on goes.
    (beneath,) = (cache / f"env-{NEWEST}").glob(f"lib/python*/site-packages/{environment.RUNNING}")
    beneath.write_text(beneath.read_text().replace("site-packages", "gone"))
    assert not environment.ready(NEWEST)
    assert "what it was built on is gone" in listed(capsys)[NEWEST]["fault"]


def test_a_build_that_was_killed_is_named_and_what_was_there_before_comes_back(
    cache: Path, capsys, no_environments
):
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    for name in (f"env-{NEWEST}", f".before-env-{NEWEST}"):
        (cache / name / "bin").mkdir(parents=True)
        (cache / name / "bin/python").touch()
    half = cache / f"env-{NEWEST}" / environment.UNFINISHED
    half.touch()
    with pytest.raises(ConfigError, match="half built"):
        comfyui_python(cache / f"ComfyUI-{NEWEST}")
    assert "half built" in listed(capsys)[NEWEST]["fault"]
    assert cli.main(["comfyui", "get", NEWEST]) == 0
    assert not half.exists() and environment.ready(NEWEST)
    assert no_environments == [NEWEST]


def test_the_demo_takes_the_newest_release_that_is_to_be_had(
    full_cache: Path, cache: Path, official, monkeypatch
):
    said: list[str] = []
    for version in ("0.3.75", "0.24.0"):
        shutil.copytree(full_cache / f"ComfyUI-{NEWEST}", cache / f"ComfyUI-{version}")
    redirect(monkeypatch, "https://127.0.0.1:1/ComfyUI")
    # 0.24.0 has no environment.
    assert newest_path(said.append) == cache / "ComfyUI-0.3.75"
    assert f"ComfyUI {NEWEST} is not in the cache" in said[0] and "Check the network" in said[-1]
    (cache / "env-0.24.0/bin").mkdir(parents=True)
    (cache / "env-0.24.0/bin/python").touch()
    assert newest_path(said.append) == cache / "ComfyUI-0.24.0"
    monkeypatch.setenv("COMFYUI_PATH", str(cache / "ComfyUI-0.3.75"))
    assert newest_path(said.append) == cache / "ComfyUI-0.3.75"
    monkeypatch.delenv("COMFYUI_PATH")
    said.clear()
    use(monkeypatch, full_cache)
    assert newest_path(said.append) == full_cache / f"ComfyUI-{NEWEST}"
    assert said == []
