"""``comfy-tp comfyui``: releases of ComfyUI for the demo and the tests, fetched into a cache of their own."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..core.cli.arguments import count
from ..core.cli.bench import unwound_by_signals
from . import environment, tree
from .bounded import Deadline
from .get import TIMEOUT_S, Wish, get
from .releases import COMMITS, KNOWN, WHEEL_RELEASE, named, newest, order

REPOSITORY_VARIABLE = "COMFY_TP_COMFYUI_REPOSITORY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``get`` and ``list``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    getting = actions.add_parser(
        "get",
        help="put a release and its requirements into the cache",
        description="Put a release of ComfyUI and an environment of its requirements into the cache.",
    )
    listing = actions.add_parser(
        "list", help="show what is known and what is in the cache", description="Show every known release."
    )
    for action in (getting, listing):
        # Also understood here; the default must not undo a --json that came before the action's name.
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    getting.add_argument("version", metavar="VERSION", help=f"{', '.join(KNOWN)}, or newest ({newest()})")
    getting.add_argument(
        "--repository",
        default=None,
        help="another git repository than the official one (an address or a folder, which may lack files: they are "
        f"named), or a plain folder with a ComfyUI (default: ${REPOSITORY_VARIABLE})",
    )
    getting.add_argument("--commit", default=None, help="another commit, in full")
    getting.add_argument(
        "--again", action="store_true", help="fetch and install again what is in the cache already"
    )
    getting.add_argument(
        "--timeout",
        type=count,
        default=int(TIMEOUT_S),
        metavar="SECONDS",
        help=f"how long all of it may take (default {TIMEOUT_S:g})",
    )
    getting.set_defaults(run_action=run_get)
    listing.set_defaults(run_action=run_list)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Run the chosen action."""
    return args.run_action(args)


def run_get(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Fetch one release; figures are those of its row in the list, with notes on what it lacks."""
    version = named(args.version)
    repository = args.repository
    if repository is None and version != WHEEL_RELEASE:
        repository = os.environ.get(REPOSITORY_VARIABLE) or None
    wish = Wish(version, repository, args.commit, args.again)
    with unwound_by_signals():
        found, notes = get(wish, Deadline(args.timeout), lambda text: print(text, flush=True))
    row = figures(version, found)
    print(line(row))
    for note in notes:
        print(f"  {note}")
    return 0, {**row, "notes": notes}


def run_list(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print a line for each known release, and for each other tree in the cache."""
    here = {one.version: one for one in tree.cached()}
    rows = [figures(version, here.get(version)) for version in sorted({*KNOWN, *here}, key=order)]
    print(f"In {tree.cache_folder()}:")
    for row in rows:
        print(line(row))
    return 0, {"cache": str(tree.cache_folder()), "releases": rows}


def figures(version: str, found: tree.Tree | None) -> dict[str, Any]:
    """What is known of one release."""
    row: dict[str, Any] = {
        "version": version,
        "supported": version in KNOWN,
        "cached": found is not None,
        "commit": COMMITS.get(version) if found is None else found.commit,
    }
    if found is not None:
        broken = environment.environment_folder(version).exists() and not environment.ready(version)
        row |= {
            "path": str(found.path),
            "prints": found.prints,
            "source": found.source,
            "missing": list(found.missing),
            "fault": found.fault or (f"has an environment that {environment.BROKEN}" if broken else None),
            "python": environment.comfyui_python(found.path) if environment.ready(version) else None,
            "frontend": environment.frontend(version),
        }
    return row


def line(row: dict[str, Any]) -> str:
    """One release in one line."""
    if not row["cached"]:
        return f"{row['version']:>8}  -"
    parts = [
        f"commit {row['commit'][:12]}" if row["commit"] else f"from {row['source'] or 'an unknown source'}"
    ]
    if row["prints"] != row["version"]:
        parts.append(f"prints {row['prints']}")
    if row["frontend"]:
        parts.append(f"frontend {row['frontend']}")
    if row["missing"]:
        parts.append(f"without {', '.join(row['missing'])}, which its source lacked")
    if row["fault"]:
        parts.append(f"does not run: it {row['fault']}")
    elif row["python"] is None:
        parts.append(f"has no environment: `comfy-tp comfyui get {row['version']}` makes one")
    parts.append(row["path"])
    return f"{row['version']:>8}  {', '.join(parts)}"
