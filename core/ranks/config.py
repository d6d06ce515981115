"""How a group on one machine is started: what its client tells the launcher, and that the ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """How long a group waits for its ranks, in seconds; see `RankGroup.start`."""

    step_timeout: float
    heartbeat_timeout: float
    error_grace: float
    collective_timeout: float
    keepalive: float


@dataclass(frozen=True)
class GroupConfig(Limits):
    """`attempt`: how often the launcher has started these ranks before."""

    devices: list[str]
    backend: str
    fork: bool
    commands: str
    env: dict[str, str]
    log_dir: str = ""
    token: str = ""
    attempt: int = 0

    @classmethod
    def of(
        cls,
        devices: Sequence[str],
        *,
        backend: str | None,
        commands: str,
        fork: bool | None,
        env: Mapping[str, str] | None,
        heartbeat_timeout: float | None,
        step_timeout: float,
        error_grace: float,
        collective_timeout: float,
        keepalive: float,
    ) -> GroupConfig:
        """What `RankGroup.start` is given, with its defaults. Raises ConfigError for devices that cannot be used."""
        names, backend = check_devices(devices, backend)
        cuda = names[0].startswith("cuda")
        if fork and cuda:
            raise ConfigError("fork=True: ranks on CUDA devices cannot be forked; leave fork out")
        source, colon, table = commands.rpartition(":")
        return cls(
            devices=names,
            backend=backend,
            fork=not cuda and sys.platform == "linux" if fork is None else fork,
            commands=f"{Path(source).absolute()}{colon}{table}" if source.endswith(".py") else commands,
            env=dict(env or {}),
            step_timeout=step_timeout,
            heartbeat_timeout=min(step_timeout, 60.0) if heartbeat_timeout is None else heartbeat_timeout,
            error_grace=error_grace,
            collective_timeout=collective_timeout,
            keepalive=min(keepalive, collective_timeout / 2),
        )

    @classmethod
    def read(cls, text: str | bytes) -> GroupConfig:
        """What `written` wrote."""
        return cls(**json.loads(text))

    def written(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    def public(self, attempt: int) -> GroupConfig:
        """What the ranks may read: no secret, and no environment, which they have."""
        return replace(self, token="", env={}, attempt=attempt)

    @property
    def beat(self) -> float:
        """How often a rank shows a sign of life, in seconds."""
        return min(0.5, self.heartbeat_timeout / 8)


def check_devices(devices: Sequence[str], backend: str | None) -> tuple[list[str], str]:
    """Device names with their indices, and the backend of the model's collectives.

    Raises ConfigError for an unusable name, a mixture of kinds, or a device used twice with nccl.
    """
    if isinstance(devices, str) or not devices:
        raise ConfigError(
            f"devices must be a list with one name per rank, like ['cuda:0', 'cuda:1'], not {devices!r}"
        )
    names = []
    for name in devices:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError):
            raise ConfigError(f"{name!r} is no device; ranks run on devices like 'cuda:0' or 'cpu'") from None
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(f"device {name!r}: ranks run on cuda or cpu devices, not on {device.type}")
        names.append("cpu" if device.type == "cpu" else f"cuda:{device.index or 0}")
    kinds = {name.split(":")[0] for name in names}
    if len(kinds) > 1:
        raise ConfigError(f"the devices {', '.join(names)} are of different kinds; take all cuda or all cpu")
    cuda = kinds == {"cuda"}
    backend = backend or ("nccl" if cuda else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"backend {backend!r} is neither 'nccl' nor 'gloo'")
    if backend == "nccl" and not cuda:
        raise ConfigError("backend 'nccl' needs cuda devices; choose 'gloo' for the CPU")
    if backend == "nccl" and len(set(names)) < len(names):
        raise ConfigError(
            f"the devices {', '.join(names)} name one twice, which nccl cannot do; "
            "choose different devices, or backend 'gloo'"
        )
    return names, backend
