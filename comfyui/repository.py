"""A tree of ComfyUI out of a git repository, each file held to the commit's hash, or out of a plain folder."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from ..core.errors import ConfigError, TPError
from .bounded import Deadline, finish, reason
from .releases import OFFICIAL

# Of a repository around us (git sets them for its hooks); no other is meant to be read.
GIT_AROUND = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
# Nothing is asked, nothing replaced, and what a partial clone lacks stays lacking.
GIT_ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "LC_ALL": "C",
}
# What belongs to the owner of a ComfyUI, not to the release.
OWN = {"models", "input", "output", "temp", "user", "custom_nodes", "venv", ".venv"}


@dataclass(frozen=True)
class Snapshot:
    """What was taken from where: `files` are paths in the tree, `missing` those that the source itself lacks."""

    source: str
    commit: str | None
    files: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One file of a commit."""

    mode: str
    kind: str
    object_id: str
    path: str


def resolve(repository: str | None, deadline: Deadline) -> str:
    """Where git goes for `repository`, or for the official one where it is None: an address, or a folder here.

    git's own configuration (``url.….insteadOf``) counts.
    """
    if repository is not None and Path(repository).expanduser().is_dir():
        return str(Path(repository).expanduser().absolute())
    found = repository or OFFICIAL[0]
    for address in [repository] if repository else OFFICIAL:
        done = _git(["ls-remote", "--get-url", "--", address], deadline, "Fetching ComfyUI")
        if not done.returncode and (there := done.stdout.decode().strip()) != address:
            found = there
            break
    return found.removeprefix("file://")


def tagged(repository: str, version: str, deadline: Deadline) -> str | None:
    """The commit of a repository's tag ``v<version>``, None without that tag."""
    tag = f"refs/tags/v{version}"
    done = _git(
        ["ls-remote", "--", repository, tag, tag + "^{}"], deadline, f"Reading the tags of {repository}"
    )
    if done.returncode:
        raise TPError(f"The tags of {repository} cannot be read: {reason(done)}.")
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    # An annotated tag has a second row, for the commit that it names.
    return rows[-1][0] if rows else None


def take(source: str, commit: str | None, target: Path, deadline: Deadline) -> Snapshot:
    """Write the tree of a commit of `source` into the new folder `target`.

    `source` is what `resolve` returned. A folder here may lack files: they are named in the result. A plain folder is
    copied without what is its owner's, and `commit` is None. Raises TPError if the commit cannot be had, or if
    anything of it differs from its hash.
    """
    folder = Path(source)
    if commit is not None:
        read = _read if folder.is_dir() else _fetch
        return read(source, commit, target, deadline)
    if not (folder / "main.py").is_file():
        raise ConfigError(f"{folder} is neither a git repository nor a ComfyUI (it has no main.py).")
    shutil.copytree(
        folder, target, ignore=lambda at, names: {"__pycache__"} | (OWN if Path(at) == folder else set())
    )
    return Snapshot(source, None, listing(target))


def is_plain(folder: Path) -> bool:
    """Whether this is a folder here and no git repository itself, neither a bare one."""
    bare = (folder / "objects").is_dir() and (folder / "HEAD").is_file()
    return folder.is_dir() and not bare and not (folder / ".git").exists()


def listing(tree: Path) -> list[str]:
    """Every file of a tree."""
    return [path.relative_to(tree).as_posix() for path in sorted(tree.rglob("*")) if path.is_file()]


def _fetch(source: str, commit: str, target: Path, deadline: Deadline) -> Snapshot:
    repository = target.with_name(target.name + ".git")
    what = f"Fetching ComfyUI from {source}"
    done = _git(["init", "--quiet", "--bare", str(repository)], deadline, what)
    if not done.returncode:
        fetch = ["fetch", "--quiet", "--no-tags", "--depth", "1", "--", source, commit]
        done = _git([f"--git-dir={repository}", *fetch], deadline, what)
    if done.returncode:
        raise TPError(
            f"{what} failed: {reason(done)}. Check the network, or name another repository or a folder of "
            "this machine with --repository or COMFY_TP_COMFYUI_REPOSITORY."
        )
    return replace(_read(str(repository), commit, target, deadline), source=source)


def _read(source: str, commit: str, target: Path, deadline: Deadline) -> Snapshot:
    what = f"Reading commit {commit} of {source}"
    entries = _entries(source, commit, what, deadline)
    blobs = [entry for entry in entries if entry.kind == "blob"]
    wanted = "".join(f"{entry.object_id}\n" for entry in blobs).encode()
    done = _git(["-C", source, "cat-file", "--batch"], deadline, what, given=wanted)
    files: list[str] = []
    missing: list[str] = []
    for entry, content in zip(blobs, _contents(done.stdout), strict=False):
        if content is None:
            missing.append(entry.path)
            continue
        _check(hash_of("blob", content), entry.object_id, f"{entry.path} of {source}")
        _write(target / _inside(entry, source), content, executable=entry.mode == "100755")
        files.append(entry.path)
    if done.returncode or len(files) + len(missing) != len(blobs):
        raise TPError(f"{what} failed: {reason(done)}.")
    return Snapshot(source, commit, files, missing)


def _entries(source: str, commit: str, what: str, deadline: Deadline) -> list[Entry]:
    """The files of a commit, after its hash and that of all its folders have been found right."""
    here = ["-C", source]
    done = _git([*here, "cat-file", "commit", commit], deadline, what)
    if done.returncode:
        raise TPError(f"{what} failed: {reason(done)}. That repository does not hold it.")
    _check(hash_of("commit", done.stdout), commit, f"the commit in {source}")
    tree = done.stdout.split(b"\n", 1)[0].removeprefix(b"tree ").decode()
    done = _git([*here, "ls-tree", "-r", "-z", "--full-tree", tree], deadline, what)
    if done.returncode:
        raise TPError(f"{what} failed: {reason(done)}.")
    entries = []
    for row in filter(None, done.stdout.split(b"\0")):
        head, path = row.split(b"\t", 1)
        mode, kind, object_id = head.decode().split()
        entries.append(Entry(mode, kind, object_id, os.fsdecode(path)))
    _check(tree_hash(entries), tree, f"the list of files of {commit} in {source}")
    return entries


def tree_hash(entries: Iterable[Entry]) -> str:
    """git's hash of a folder that holds these files, paths relative to it."""
    rows = []
    for name, group in itertools.groupby(
        sorted(entries, key=lambda entry: os.fsencode(entry.path).split(b"/")),
        key=lambda entry: entry.path.split("/", 1)[0],
    ):
        held = list(group)
        if "/" in held[0].path:
            inner = [
                Entry(one.mode, one.kind, one.object_id, one.path.split("/", 1)[1])
                for one in held
                if "/" in one.path
            ]
            rows.append((os.fsencode(name) + b"/", "40000", name, tree_hash(inner)))
        else:
            rows.append((os.fsencode(name), held[0].mode, name, held[0].object_id))
    content = b"".join(
        f"{mode} ".encode() + os.fsencode(name) + b"\0" + bytes.fromhex(object_id)
        for _, mode, name, object_id in sorted(rows)
    )
    return hash_of("tree", content)


def hash_of(kind: str, content: bytes) -> str:
    """The name that git gives to an object."""
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise TPError(
            f"The hash differs: {what} has {found}, not {expected}. Nothing of it is used; take another repository."
        )


def _contents(output: bytes) -> Iterator[bytes | None]:
    """What ``git cat-file --batch`` printed: each object's content, None for one that is not there."""
    at = 0
    while at < len(output):
        head, _, _ = output[at : at + 200].partition(b"\n")
        words = head.split()
        at += len(head) + 1
        if words[-1] == b"missing":
            yield None
            continue
        size = int(words[2])
        yield output[at : at + size]
        at += size + 1


def _inside(entry: Entry, source: str) -> PurePosixPath:
    path = PurePosixPath(entry.path)
    if path.is_absolute() or not entry.mode.startswith("100") or {"..", ".git"} & set(path.parts):
        raise TPError(f"{entry.path} of {source} is no plain file inside the tree; that tree is not used.")
    return path


def _write(path: Path, content: bytes, *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if executable:
        path.chmod(0o755)


def _git(
    arguments: list[str], deadline: Deadline, what: str, *, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in GIT_AROUND}
    return finish(
        ["git", *arguments], deadline, what, environment={**environment, **GIT_ENVIRONMENT}, given=given
    )
