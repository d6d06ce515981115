"""Muon in float32, for training the small FLUX.2 on a CPU.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the step size of Liu et al., "Muon
is Scalable for LLM Training" (arXiv:2502.16982). ``torch.optim.Muon`` does the same in bfloat16, whose matrix products
are many times slower than float32's on most CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The quintic of the post: five rounds bring every singular value near to one.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def orthogonalised(matrix: Tensor) -> Tensor:
    """The matrix [m, n] with its singular values moved to about one (Newton-Schulz)."""
    a, b, c = _COEFFICIENTS
    wide = matrix / (matrix.norm() + 1e-7)
    if tall := matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    for _ in range(_ROUNDS):
        gram = wide @ wide.T
        wide = a * wide + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ wide
    return wide.T if tall else wide


class Muon(torch.optim.Optimizer):
    """Momentum whose step on a matrix is orthogonalised, with decoupled weight decay.

    The step is scaled to the size that AdamW's would have (0.2 a weight, root mean square), so ``lr`` and
    ``weight_decay`` mean what they mean there. All parameters must be matrices.
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the gradients as they are; ``closure`` is not supported."""
        if closure is not None:
            raise ValueError("Muon takes its gradients from .grad: call backward() before step(), no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                step = orthogonalised(parameter.grad.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(step, alpha=-0.2 * max(parameter.shape) ** 0.5 * group["lr"])
