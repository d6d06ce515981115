"""Errors that the product raises on purpose. Each text says what was wrong, where, and what to do."""

from __future__ import annotations

MODULE = "comfy_tp.core.errors"


class TPError(Exception):
    """Base of every refusal of ours. Command line and nodes show its text alone, without a traceback.

    ComfyUI writes the class's module beside the text. It imports a pack by the path of its folder, which tells nobody
    anything, so the classes here carry the name that they have in an install.
    """

    __module__ = MODULE

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = MODULE


class PlanError(TPError, ValueError):
    """A tensor-parallel plan that cannot be resolved on this model at this degree."""


class ConfigError(TPError, ValueError):
    """A parallel configuration, device list or loading option that cannot be honoured."""


class CheckpointError(TPError, ValueError):
    """A weight file that is damaged, incomplete, or does not belong to the model."""


class UnsupportedError(TPError):
    """Something that a sharded model cannot honour, refused by name instead of being ignored.

    No RuntimeError, as NotImplementedError is one: nodes of ComfyUI's catch those and go on without what was asked for.
    """


class InputError(TPError, ValueError):
    """A latent, conditioning or sampling input that does not fit the loaded model."""


class RankError(TPError, RuntimeError):
    """A rank died, hung, or raised. `rank` and `device` name it where they are known."""

    def __init__(self, message: str, *, rank: int | None = None, device: str | None = None):
        super().__init__(message)
        self.rank = rank
        self.device = device


class RankOutOfMemory(RankError):
    """A rank ran out of device memory. The node raises it as `torch.cuda.OutOfMemoryError`."""


class Cancelled(TPError):
    """The client cancelled the command; the group stays usable."""
