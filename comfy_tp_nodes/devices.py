"""Which devices the ranks run on: the node's `devices` and `degree` inputs as a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core.errors import ConfigError
from ..core.ranks.machines.address import parse_address
from ..core.tp.plan import check_heads, legal_degrees
from . import groups

MOST_CPU_RANKS = 8
ELSEWHERE = "tcp://"


@dataclass(frozen=True)
class Placement:
    """One device per rank. `backend` None leaves the choice to the group; `reason` is for the log.

    With an `address` the ranks run elsewhere, and `devices` are the group's own names for them ("cuda:0@host").
    """

    devices: tuple[str, ...]
    backend: str | None
    reason: str
    address: str | None = None

    @property
    def degree(self) -> int:
        return len(self.devices)


def usable_devices(comfy_device: torch.device) -> list[str]:
    """All devices that "auto" may take: every CUDA device, ComfyUI's own first, or the CPU where ComfyUI uses it."""
    if comfy_device.type != "cuda" or not torch.cuda.is_available():
        return ["cpu"]
    own = comfy_device.index or 0
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    return [f"cuda:{index}" for index in (own, *others)]


def parse(text: str, comfy_device: torch.device) -> list[str]:
    """The devices that the `devices` input names: "auto", "cpu", or a list such as "cuda:0,cuda:1".

    Raises `ConfigError` for a name that is no device, or a device that this machine does not have.
    """
    names = [name.strip().lower() for name in text.replace(";", ",").split(",") if name.strip()]
    if not names or names == ["auto"]:
        return usable_devices(comfy_device)
    devices = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise ConfigError(
                f"devices: '{name}' is no device. Write auto, cpu, or a list such as cuda:0,cuda:1."
            ) from None
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"devices: ranks run on cuda devices or on the cpu, not on '{name}'.")
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            index = device.index or 0
            if index >= count:
                have = ", ".join(f"cuda:{number}" for number in range(count)) or "no CUDA device"
                raise ConfigError(
                    f"devices: '{name}' does not exist: this machine has {have}. Set devices to auto."
                )
            devices.append(f"cuda:{index}")
        else:
            devices.append("cpu")
    if len({name.split(":")[0] for name in devices}) > 1:
        raise ConfigError(
            f"devices: '{text}' mixes the CPU and CUDA devices. List CUDA devices only, or write cpu."
        )
    return devices


def place(text: str, degree: int, heads: int | None, model: str, comfy_device: torch.device) -> Placement:
    """The placement for the inputs `devices` and `degree` of a model with that many attention `heads`.

    Degree 0 takes the largest legal degree that the devices allow; on the CPU it means 1. Raises `ConfigError` for
    more ranks than devices, `PlanError` for a degree that does not divide the heads.

    "tcp://HOST:PORT" connects to the group there, whose size is the degree. Raises `RankError` where that fails.
    """
    address = remote_address(text)
    if address is not None:
        return _elsewhere(address, degree, heads, model)
    devices = parse(text, comfy_device)
    on_cpu = devices[0] == "cpu"
    if degree == 0:
        return _largest(devices, heads, on_cpu)
    if on_cpu:
        most = len(devices) if len(devices) > 1 else MOST_CPU_RANKS
        if degree > most:
            raise ConfigError(
                f"degree {degree} is more than the {most} ranks that the CPU may run. Set degree to {most} or less."
            )
        check_heads(heads, degree, model)
        return Placement(("cpu",) * degree, None, f"degree {degree} as set, on the CPU")
    if degree > len(devices):
        raise ConfigError(
            f"degree {degree} needs {degree} devices, but there {_are(devices)}: {', '.join(devices)}. Set degree to "
            f"{len(devices)} or less, or 0 to let the pack choose."
        )
    check_heads(heads, degree, model)
    chosen = tuple(devices[:degree])
    return Placement(chosen, _backend(chosen), f"degree {degree} as set, on {', '.join(chosen)}")


def remote_address(text: str) -> str | None:
    """The address of a group on other machines ("tcp://HOST:PORT"), or None where the input names devices.

    Raises `ConfigError` for an address that is none.
    """
    if "//" not in text:
        return None
    address = text.strip().lower().removeprefix(ELSEWHERE)
    try:
        parse_address(address)
    except ConfigError as error:
        raise ConfigError(
            f"devices: {error}. Write tcp://HOST:PORT, as `comfy-tp ranks` prints it."
        ) from None
    return ELSEWHERE + address


def _elsewhere(address: str, degree: int, heads: int | None, model: str) -> Placement:
    group = groups.connected(address)
    if degree not in (0, group.degree):
        raise ConfigError(
            f"degree {degree} was chosen, but the group at {address} has {group.degree} "
            f"rank{'s' if group.degree > 1 else ''}. Set degree to {group.degree} or 0."
        )
    check_heads(heads, group.degree, model)
    chosen = tuple(group.devices)
    return Placement(chosen, None, f"degree {len(chosen)} on {', '.join(chosen)}, at {address}", address)


def _largest(devices: Sequence[str], heads: int | None, on_cpu: bool) -> Placement:
    if on_cpu:
        return Placement(("cpu",), None, "degree 1: one rank on the CPU; set degree to use more")
    legal = legal_degrees(heads, len(devices)) if heads else list(range(1, len(devices) + 1))
    degree = legal[-1]
    chosen = tuple(devices[:degree])
    reason = f"degree {degree} on {', '.join(chosen)}: "
    if degree == len(devices):
        reason += "all usable devices"
    else:
        reason += (
            f"the largest that divides the {heads} attention heads; {', '.join(devices[degree:])} not used"
        )
    return Placement(chosen, _backend(chosen), reason)


def _backend(devices: Sequence[str]) -> str | None:
    """gloo where one GPU holds several ranks (a check without a second GPU), which nccl cannot."""
    return "gloo" if len(set(devices)) < len(devices) else None


def _are(devices: Sequence[str]) -> str:
    return "is 1" if len(devices) == 1 else f"are {len(devices)}"
