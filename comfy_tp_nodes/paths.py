"""What the loaders offer: names within ComfyUI's model folders, and the way back from a name."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import folder_paths

from ..core.checkpoint.files import RANK_FILE, STEMS, is_safetensors
from ..core.errors import ConfigError

# Names of the weights in a folder that is a model as a whole.
FOLDERS_OWN = re.compile(rf"(?:{'|'.join(STEMS)})[.-].*|{RANK_FILE.pattern}")
DEPTH = 4  # how deep below a model folder a diffusers folder is looked for
FOLLOW_LINKS = "COMFY_TP_FOLLOW_LINKS"


@dataclass(frozen=True)
class Component:
    """A part of a pipeline that a loader offers: its folder's name in a pipeline, and ComfyUI's folders to look in.

    `input` is the loader's input, for errors. `single_files` of the first folder are offered too. `beside` are the
    folders of the pipeline that the loader reads with it.
    """

    name: str
    folders: tuple[str, ...]
    input: str
    single_files: bool = False
    beside: tuple[str, ...] = ()


TRANSFORMER = Component("transformer", ("diffusion_models", "diffusers"), "model", single_files=True)
TEXT_ENCODER = Component(
    "text_encoder", ("text_encoders", "diffusers"), "text_encoder", beside=("tokenizer",)
)
VAE = Component("vae", ("vae", "diffusers"), "vae")


class FolderList:
    """The diffusers folders below one root that hold a component, kept until a directory below it changes."""

    def __init__(self, root: str, component: str):
        self.root = root
        self.component = component
        self._seen: dict[str, int] = {}
        self._found: list[str] = []
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Paths relative to the root, with forward slashes."""
        with self._lock:
            if not self._seen or any(_mtime(folder) != mtime for folder, mtime in self._seen.items()):
                self._seen, self._found = {self.root: _mtime(self.root)}, []
                self._walk(self.root, DEPTH)
                self._found.sort()
            return list(self._found)

    def _walk(self, folder: str, depth: int) -> None:
        try:
            below = [
                entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")
            ]
        except OSError:
            return
        for entry in below:
            self._seen[entry.path] = _mtime(entry.path)
            component = os.path.join(entry.path, self.component)
            if os.path.isdir(component):
                self._seen[component] = _mtime(component)
            if holds_model(entry.path) or holds_model(component):
                self._found.append(os.path.relpath(entry.path, self.root).replace(os.sep, "/"))
            elif depth > 1 and not os.path.isfile(os.path.join(entry.path, "model_index.json")):
                self._walk(entry.path, depth - 1)


_lists: dict[tuple[str, str], FolderList] = {}


def choices(component: Component) -> list[str]:
    """All names for a loader's input: single files first, then diffusers folders. Cheap when nothing changed."""
    folders: set[str] = set()
    inside: set[str] = set()
    for kind in component.folders:
        for root in folder_paths.get_folder_paths(kind):
            names = _lists.setdefault((root, component.name), FolderList(root, component.name)).names()
            folders.update(names)
            if kind == component.folders[0]:
                inside.update(names)
    if not component.single_files:
        return sorted(folders)
    files = [name.replace(os.sep, "/") for name in safetensors_names(component.folders[0])]
    parts = tuple(f"{name}/" for name in inside)
    # A file of another name is a model of its own, whatever config.json lies in its folder.
    files = [
        name
        for name in files
        if not (name.startswith(parts) and FOLDERS_OWN.fullmatch(PurePosixPath(name).name))
    ]
    return files + sorted(folders)


def safetensors_names(kind: str) -> list[str]:
    """The safetensors files in ComfyUI's folders of that kind, by ComfyUI's names; others may hold pickles."""
    names = folder_paths.get_filename_list(kind)
    return [name for name in names if is_safetensors(name)]


def component_path(component: Component, name: str) -> Path:
    """The file, or the folder with the component's weights, that a name from `choices` means.

    Links that lie in a model folder are followed, as `_follow` says. Raises `ConfigError` for a name that leads out of
    ComfyUI's model folders by itself (absolute, `..`), and for one that is not in the list.
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"{component.input}: a name is text, got {type(name).__name__}. Choose one from the list."
        )
    pure = PurePosixPath(name.replace("\\", "/"))
    if (
        not name.strip()
        or "\0" in name
        or pure.is_absolute()
        or Path(name).is_absolute()
        or ".." in pure.parts
    ):
        raise ConfigError(
            f"{component.input}: '{name}' leads out of ComfyUI's model folders. Choose one from the list; other folders are "
            f"added in extra_model_paths.yaml."
        )
    roots = [Path(root) for kind in component.folders for root in folder_paths.get_folder_paths(kind)]
    for root in roots if str(pure) in choices(component) else []:
        path = root / pure
        if os.path.isdir(path) and not holds_model(path) and holds_model(path / component.name):
            path = path / component.name
        if (os.path.isfile(path) and component.single_files) or holds_model(path):
            for part in (path, *(path.parent / folder for folder in component.beside)):
                if part.exists():
                    _follow(component, part, root, roots, name)
            return path
    raise ConfigError(
        f"{component.input}: there is no '{name}' in {' or '.join(component.folders)}. Put it there, press R to refresh "
        f"the list, and choose it again."
    )


def model_choices() -> list[str]:
    """The names for the `model` input of Load TP Model."""
    return choices(TRANSFORMER)


def model_path(name: str) -> Path:
    """The file or folder of the transformer that a name from `model_choices` means."""
    return component_path(TRANSFORMER, name)


def holds_model(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` holds a config.json and safetensors weights."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return False
    return any(is_safetensors(name) for name in os.listdir(folder))


def _follow(component: Component, path: Path, root: Path, roots: list[Path], name: str) -> None:
    """Raise `ConfigError` where more than one link to a folder leads out of the model folders on the way to `path`.

    Who put a link into a model folder wants it followed: a link to a file, and one to a folder of files, which may be
    links themselves as in the hub's cache. Links to folders in such a folder may come with it from elsewhere.
    """
    if os.environ.get(FOLLOW_LINKS) == "1":
        return
    allowed = [folder.resolve() for folder in roots]
    files = [path] if path.is_file() else [path, *path.iterdir()]
    for file in files:
        left = root
        links = 0
        for part in file.relative_to(root).parts:
            left = left / part
            real = left.resolve()
            if left.is_symlink() and left.is_dir() and not any(real.is_relative_to(one) for one in allowed):
                links += 1
            if links > 1:
                raise ConfigError(
                    f"{component.input}: '{name}' leads through {left}, a link in a linked folder, to {real}. Put a link "
                    f"to that folder into one of ComfyUI's model folders, name it in extra_model_paths.yaml, or start "
                    f"ComfyUI with {FOLLOW_LINKS}=1 to follow all links."
                )


def _mtime(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
