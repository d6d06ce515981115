"""The shared secret of a group over several machines, in a file that its owner alone may read."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from ...errors import ConfigError

log = logging.getLogger("comfy_tp.group")

SHORTEST = 32
LONGEST = 4096


def read_token(path: Path) -> str:
    """The token in the file at `path`.

    Raises ConfigError for a file that cannot be read, a token that is short, or a file that others may read.
    """
    try:
        with open(path, "rb") as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            token = file.read(LONGEST).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror or error}") from None
    if len(token) < SHORTEST:
        raise ConfigError(f"the token in {path} has {len(token)} characters; at least {SHORTEST} are needed")
    if others:
        raise ConfigError(f"others may read the token file {path}; run: chmod 600 {path}")
    return token


def make_token(path: Path) -> None:
    """Write a new random token to `path`, readable by its owner alone; a file that is there is left as it is."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    log.info("made a token in %s", path)
