"""Errors that the product raises on purpose. Each text says what was wrong, where, and what to do."""

from __future__ import annotations


class TPError(Exception):
    """Base of every refusal of ours. Command line and nodes show its text alone, without a traceback."""


class PlanError(TPError, ValueError):
    """A tensor-parallel plan that cannot be resolved on this model at this degree."""


class ConfigError(TPError, ValueError):
    """A parallel configuration, device list or loading option that cannot be honoured."""


class CheckpointError(TPError, ValueError):
    """A weight file that is damaged, incomplete, or does not belong to the model."""


class UnsupportedError(TPError, NotImplementedError):
    """Something that a sharded model cannot honour, refused by name instead of being ignored."""


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
