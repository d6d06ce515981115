"""Where a group that runs elsewhere listens: ``host:port``."""

from __future__ import annotations

from ...errors import ConfigError
from ...wording import short

HIGHEST_PORT = 65535


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host may stand in brackets.

    Raises ConfigError where the text has another form, the port is none, or no host can have such a name.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    shown = f"'{short(address)}'"
    if not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{shown} is not of the form host:port")
    if len(port) > len(str(HIGHEST_PORT)) or int(port) > HIGHEST_PORT:
        raise ConfigError(f"{shown}: a port is a number up to {HIGHEST_PORT}")
    try:
        host.encode("idna")
        possible = host.isprintable() and "/" not in host
    except UnicodeError:
        possible = False
    if not possible:
        raise ConfigError(f"{shown}: no host can have this name")
    return host, int(port)
