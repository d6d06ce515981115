"""The environment of a release: its own requirements on top of the running environment, whose torch it uses."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import ConfigError, TPError
from .bounded import Deadline, finish, reason
from .releases import WHEEL_RELEASE
from .tree import cache_folder, version_of

# The running environment's; nothing of what a release asks for may choose another.
KEPT = ("torch", "torchvision")
# Without it ComfyUI has no audio nodes, and no more is lost. The newest, which runs with any later torch.
AUDIO = "torchaudio==2.11.1"
# In an environment that is being built, as its first file and until its last step.
UNFINISHED = ".unfinished"
BROKEN = "is half built, or what it was built on is gone"
# Begins the name of the environment that one under construction is to replace.
BEFORE = ".before-"
# Names, in an environment, the package folders of the one that it was built on; last in the order of names.
RUNNING = "zz_running.pth"
ADD = "import site; site.addsitedir"


def environment_folder(version: str) -> Path:
    """Where the environment of a release lies in the cache."""
    return cache_folder() / f"env-{version}"


def ready(version: str) -> bool:
    """Whether a release has all that it needs to run: 0.3.75 has it in the running environment."""
    folder = environment_folder(version)
    if version == WHEEL_RELEASE:
        return True
    whole = _python(folder).exists() and not (folder / UNFINISHED).exists()
    return whole and all(Path(path).is_dir() for path in _beneath(folder))


def comfyui_python(tree: Path) -> str:
    """The interpreter for a tree: that of its environment in the cache where it has one, else the running one.

    Raises ConfigError if that environment is half built.
    """
    version = version_of(tree)
    if version is None or not environment_folder(version).exists():
        return sys.executable
    if not ready(version):
        raise ConfigError(
            f"{environment_folder(version)} {BROKEN}. Run `comfy-tp comfyui get {version}`, which builds it."
        )
    return str(_python(environment_folder(version))) if version != WHEEL_RELEASE else sys.executable


def frontend(version: str) -> str | None:
    """The version of the frontend that belongs to a release in the cache, None without one."""
    if version == WHEEL_RELEASE:
        found = importlib.metadata.distributions(name="comfyui_frontend_package")
    else:
        folders = [str(path) for path in environment_folder(version).glob("lib/python*/site-packages")]
        found = importlib.metadata.distributions(name="comfyui_frontend_package", path=folders)
    return next((distribution.version for distribution in found), None)


def build(version: str, requirements: Path, deadline: Deadline) -> list[str]:
    """Build the environment of a release anew and return what it lacks, in sentences.

    Raises TPError if the requirements cannot be installed or would bring another torch; an environment that was
    there before stays then.
    """
    folder = environment_folder(version)
    with _replacing(folder):
        folder.mkdir()
        (folder / UNFINISHED).touch()
        what = f"Making an environment for ComfyUI {version}"
        # The running environment's pip serves it too.
        done = finish([sys.executable, "-m", "venv", "--without-pip", str(folder)], deadline, what)
        if done.returncode:
            raise TPError(f"{what} failed: {reason(done)}.")
        _add_running_environment(folder)
        _install(version, requirements, folder, deadline)
        notes = _add_audio(folder, deadline)
        _check_torch(version, folder, deadline)
        (folder / UNFINISHED).unlink()
    return notes


@contextmanager
def _replacing(folder: Path) -> Iterator[None]:
    """Inside, `folder` does not exist; whatever was there comes back if an exception leaves."""
    before = folder.with_name(BEFORE + folder.name)
    if folder.exists():
        folder.rename(before)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def recover() -> None:
    """Undo what a process that was killed in `build` has left."""
    for before in cache_folder().glob(f"{BEFORE}*"):
        folder = before.with_name(before.name.removeprefix(BEFORE))
        if (folder / UNFINISHED).exists():
            shutil.rmtree(folder)
        if folder.exists():
            shutil.rmtree(before)
        else:
            before.rename(folder)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _add_running_environment(folder: Path) -> None:
    """Append the running environment's packages to the import path; its own .pth files count too."""
    (site,) = folder.glob("lib/python*/site-packages")
    running = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / RUNNING).write_text("".join(f"{ADD}({path!r})\n" for path in running))


def _beneath(folder: Path) -> list[str]:
    """The package folders of the environment that this one was built on."""
    files = folder.glob(f"lib/python*/site-packages/{RUNNING}")
    lines = [line for path in files for line in path.read_text().splitlines() if line.startswith(ADD)]
    return [ast.literal_eval(line.removeprefix(ADD)) for line in lines]


def _install(version: str, requirements: Path, folder: Path, deadline: Deadline) -> None:
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={value}\n" for name, value in _versions().items()))
    what = f"Installing the requirements of ComfyUI {version}"
    wanted = without_torch(requirements.read_text())
    done = finish([*_pip(folder), "-c", str(constraints), *wanted], deadline, what) if wanted else None
    if done is not None and done.returncode:
        raise TPError(
            f"{what} failed: {reason(done)}. Its tree stays in the cache; run the command again when they can be had."
        )


def without_torch(text: str) -> list[str]:
    """A requirements file as pip's arguments, without torch, torchvision and torchaudio."""
    names = (*KEPT, AUDIO.split("==")[0])
    found = []
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if line.startswith("-"):
            found += shlex.split(line)
        elif line and re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() not in names:
            found.append(line)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in KEPT:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _add_audio(folder: Path, deadline: Deadline) -> list[str]:
    try:
        done = finish([*_pip(folder), "--no-deps", AUDIO], deadline, f"Installing {AUDIO}")
        why = reason(done) if done.returncode else ""
    except TPError as error:
        why = str(error)
    return [f"{AUDIO} is not there ({why}): ComfyUI runs without its audio nodes."] if why else []


def _check_torch(version: str, folder: Path, deadline: Deadline) -> None:
    code = (
        "import importlib.util as u; print(*(getattr(u.find_spec(n), 'origin', None) for n in %r), sep='\\n')"
    )
    what = f"Looking for torch in the environment of ComfyUI {version}"
    done = finish([str(_python(folder)), "-c", code % (KEPT,)], deadline, what)
    found = done.stdout.decode().splitlines()
    expected = [str(getattr(importlib.util.find_spec(name), "origin", None)) for name in KEPT]
    if done.returncode or found != expected:
        raise TPError(
            f"The requirements of ComfyUI {version} bring another torch ({', '.join(found) or reason(done)}) "
            f"than the running environment's ({', '.join(expected)}), so they are not used."
        )


def _pip(folder: Path) -> list[str]:
    return [str(_python(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
