"""What the hardware allows: lower bounds of load and step time of FLUX.2 from bandwidths and arithmetic.

Per block of hidden width d on S tokens (image and text), batch 1: 26 d^2 S + 4 S^2 d operations, and one joined
reduce of 2 d S bytes (bf16) per single block and two per double block. A ring moves 2 (p - 1) / p of each message
per rank. The sum of the parts is a bound: nothing is overlapped, and nothing else is counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """One published FLUX.2: blocks, heads of 128, text width, and parameters by whether the plan shards them."""

    name: str
    double_blocks: int
    single_blocks: int
    heads: int
    text_width: int
    sharded: int
    replicated: int

    @property
    def width(self) -> int:
        return self.heads * 128

    @property
    def parameters(self) -> int:
        return self.sharded + self.replicated

    def rank_bytes(self, degree: int, bytes_per_parameter: float = 2.0) -> float:
        """Bytes of weights that each of `degree` ranks holds."""
        return (self.sharded / degree + self.replicated) * bytes_per_parameter

    def step_operations(self, tokens: int) -> float:
        """Floating-point operations of one model call on `tokens` image and text tokens."""
        blocks = self.double_blocks + self.single_blocks
        return blocks * (26 * self.width**2 * tokens + 4 * tokens**2 * self.width)

    def reduced_bytes(self, tokens: int) -> float:
        """Bytes of all joined reduces of one call, in bf16."""
        return (2 * self.double_blocks + self.single_blocks) * 2.0 * self.width * tokens


@dataclass(frozen=True)
class Machine:
    """Measured bandwidths in bytes a second and arithmetic in operations a second per device."""

    disk: float
    host_to_device: float
    all_reduce: float
    compute: float
    device_bytes: float | None = None


@dataclass(frozen=True)
class Prediction:
    """Bounds for one model at one degree. Seconds, bytes; `fits` None where the device's memory is unknown."""

    degree: int
    rank_bytes: float
    load_cold_s: float
    load_warm_s: float
    compute_s: float
    reduce_s: float
    fits: bool | None

    @property
    def step_s(self) -> float:
        return self.compute_s + self.reduce_s


def predict(size: Size, machine: Machine, degree: int, tokens: int = 4608) -> Prediction:
    """Bounds of `size` at `degree`; 4608 tokens are a 1024x1024 picture with 512 text tokens.

    Cold: every byte from the disk once. Warm: every rank's bytes from host memory to its device, all ranks at once.
    """
    rank_bytes = size.rank_bytes(degree)
    warm = rank_bytes / machine.host_to_device
    wire = size.reduced_bytes(tokens) * 2 * (degree - 1) / degree
    return Prediction(
        degree,
        rank_bytes,
        max(size.parameters * 2 / machine.disk, warm),
        warm,
        size.step_operations(tokens) / degree / machine.compute,
        wire / machine.all_reduce if degree > 1 else 0.0,
        None if machine.device_bytes is None else rank_bytes <= 0.9 * machine.device_bytes,
    )


def published() -> list[Size]:
    """The published FLUX.2 models, their parameters counted through the plan on the meta device."""
    from ..models import architecture_named
    from ..tp.plan import resolve_plan
    from ..tp.skeleton import build_skeleton

    architecture = architecture_named("flux2")
    sizes = []
    for name, changes in architecture.supported(architecture.published).items():
        model = build_skeleton(architecture.load_class(), changes)
        plan = resolve_plan(model, architecture.plan_of(model), 1)
        planned = {path for path in plan.styles}
        split = sum(
            parameter.numel()
            for key, parameter in model.named_parameters()
            if key.rpartition(".")[0] in planned
        )
        total = sum(parameter.numel() for parameter in model.parameters())
        config = model.config
        sizes.append(
            Size(
                name,
                config.num_layers,
                config.num_single_layers,
                config.num_attention_heads,
                config.joint_attention_dim,
                split,
                total - split,
            )
        )
    return sizes
