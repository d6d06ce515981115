"""Row-wise layers that share one all-reduce: the right sums, written into one buffer that no other call touches."""

from __future__ import annotations

import copy

import pytest
import torch
from thread_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comfy_tp.core.lora.side import SidePath
from comfy_tp.core.models.modulation import JointLinears
from comfy_tp.core.tp import fp8
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.linear import RowwiseLinear, RowwiseSplitInputLinear, joint_reduce
from comfy_tp.core.tp.norm import JointSums, ShardedRMSNorm
from comfy_tp.core.tp.shard import ShardSpec

WIDTH, FEATURES = 24, 16
LENGTHS = (3, 5)  # tokens of the two streams


class Recorded(Ranks):
    """One of two ranks, the other of which adds nothing."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor)
        return tensor


class Allocations(TorchDispatchMode):
    """Counts the bytes of memory that the operations inside take anew, and names the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.operations: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        known = {
            storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        new = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor) and storage(t) not in known]
        self.bytes += sum(tensor.untyped_storage().nbytes() for tensor in new)
        self.operations.append(function.overloadpacket.__name__)
        return results


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def make_layers(
    ranks: Ranks,
    *,
    bias: bool = False,
    kind: type = RowwiseLinear,
    outputs: tuple[int, ...] = (FEATURES,) * 2,
) -> list[RowwiseLinear]:
    """One row-wise layer per number of outputs, the same on every rank."""
    torch.manual_seed(0)
    layers = []
    for out in outputs:
        linear = nn.Linear(WIDTH, out, bias=bias)
        specs = {"weight": ShardSpec.split((out, WIDTH), ranks.degree, 1)}
        if bias:
            specs["bias"] = ShardSpec.replicated((out,), ranks.degree)
        layers.append(kind(linear, specs, ranks).requires_grad_(False))
    return layers


def tokens(batch: int = 2) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(batch, length, WIDTH, generator=random) for length in LENGTHS]


def local(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return x.chunk(ranks.degree, dim=-1)[ranks.rank]


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_both_streams_get_the_sums_of_their_own_layers_by_one_reduce(guard):
    whole = [linear_of(seed) for seed in range(2)]

    def work(ranks: Ranks) -> tuple[list[torch.Tensor], int]:
        specs = {
            "weight": ShardSpec.split((FEATURES, WIDTH), 2, 1),
            "bias": ShardSpec.replicated((FEATURES,), 2),
        }
        layers = [RowwiseLinear(linear, specs, ranks).requires_grad_(False) for linear in whole]
        with guard():
            outputs = joint_reduce(
                *((layer, local(x, ranks)) for layer, x in zip(layers, tokens(), strict=True))
            )
        return [output.clone() for output in outputs], ranks.collectives

    for outputs, collectives in on_ranks(2, work):
        assert collectives == 1
        for output, linear, x in zip(outputs, whole, tokens(), strict=True):
            torch.testing.assert_close(output, linear(x).detach(), rtol=1e-5, atol=1e-5)


def linear_of(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, FEATURES)


def test_a_reduce_takes_no_memory_but_the_buffer_that_its_products_are_written_into():
    ranks = Recorded(0, 2, "cpu")
    layers = make_layers(ranks, bias=True)
    inputs = [local(x, ranks).contiguous() for x in tokens()]
    with torch.inference_mode(), Allocations() as counted:
        text, image = joint_reduce(*zip(layers, inputs, strict=True))
    assert storage(text) == storage(image)
    assert counted.bytes == 2 * sum(LENGTHS) * FEATURES * 4
    assert "cat" not in counted.operations


def test_joint_modulations_take_no_memory_but_the_buffer_that_is_reduced():
    ranks = Recorded(0, 2, "cpu")
    layers = make_layers(ranks, kind=RowwiseSplitInputLinear, outputs=(48, 48, 24))
    x = tokens()[0][:, 0].contiguous()
    alone = [layer(x) for layer in layers]
    JointLinears(layers, ranks)
    ranks.collectives = 0
    with torch.inference_mode(), Allocations() as counted:
        outputs = [layer(x) for layer in layers]
    assert ranks.collectives == 1
    assert counted.bytes == sum(output.numel() for output in outputs) * 4
    for output, expected in zip(outputs, alone, strict=True):
        torch.testing.assert_close(output, expected)


def test_the_outputs_of_one_layer_are_untouched_by_the_next():
    ranks = Recorded(0, 2, "cpu")
    layers = make_layers(ranks)
    inputs = [local(x, ranks) for x in tokens()]
    with torch.inference_mode():
        first = joint_reduce(*zip(layers, inputs, strict=True))
        kept = [output.clone() for output in first]
        second = joint_reduce(*zip(layers, [x + 1 for x in inputs], strict=True))
    assert storage(first[0]) != storage(second[0])
    assert all(torch.equal(output, copy) for output, copy in zip(first, kept, strict=True))
    assert not torch.equal(first[0], second[0])


def test_side_paths_and_fp8_weights_join_as_they_run_alone():
    ranks = Recorded(0, 2, "cpu")
    layers = make_layers(ranks)
    layers[0].side = SidePath(torch.randn(4, WIDTH // 2), torch.randn(FEATURES, 4))
    weight, scale = fp8.quantise(layers[1].weight)
    layers[1].weight, layers[1].scales = nn.Parameter(weight, requires_grad=False), fp8.Scales(scale)
    inputs = [local(x, ranks) for x in tokens()]
    with torch.inference_mode():
        joined = joint_reduce(*zip(layers, inputs, strict=True))
        for output, layer, x in zip(joined, layers, inputs, strict=True):
            torch.testing.assert_close(output, layer(x))


def test_gradients_and_autocast_see_every_product():
    ranks = Recorded(0, 2, "cpu")
    layers = make_layers(ranks)
    inputs = [local(x, ranks) for x in tokens()]
    layers[0].requires_grad_(True)
    sum(output.sum() for output in joint_reduce(*zip(layers, inputs, strict=True))).backward()
    expected = inputs[0].sum(dim=(0, 1)).expand(FEATURES, -1)
    torch.testing.assert_close(layers[0].weight.grad, expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert {output.dtype for output in joint_reduce(*zip(layers, inputs, strict=True))} == {
            torch.bfloat16
        }


def test_joint_modulations_with_a_bias_run_under_autograd():
    ranks = Recorded(0, 2, "cpu")
    layers = make_layers(ranks, kind=RowwiseSplitInputLinear, bias=True)
    x = tokens()[0][:, 0].contiguous()
    alone = [layer(x) for layer in layers]
    JointLinears(layers, ranks)
    layers[0].requires_grad_(True)
    outputs = [layer(x) for layer in layers]
    for output, expected in zip(outputs, alone, strict=True):
        torch.testing.assert_close(output, expected)
    outputs[0].sum().backward()
    torch.testing.assert_close(layers[0].bias.grad, torch.full((FEATURES,), float(len(x))))


def test_a_copy_of_joint_modulations_computes_with_its_own_weights():
    ranks = Recorded(0, 2, "cpu")
    layers = nn.ModuleList(make_layers(ranks, kind=RowwiseSplitInputLinear))
    x = tokens()[0][:, 0].contiguous()
    JointLinears(list(layers), ranks)
    copies = copy.deepcopy(layers)
    with torch.inference_mode():
        copies[0].weight.mul_(2)
        torch.testing.assert_close(copies[0](x), 2 * layers[0](x))


def test_a_copy_of_norms_that_share_a_reduce_still_shares_it():
    ranks = Recorded(0, 2, "cpu")
    specs = {"weight": ShardSpec.split((2 * WIDTH,), 2, 0, name="weight")}
    parts = [[nn.Linear(WIDTH, WIDTH), ShardedRMSNorm(nn.RMSNorm(2 * WIDTH), specs, ranks)] for _ in range(2)]
    JointSums(parts)
    copies = copy.deepcopy(nn.ModuleList(nn.ModuleList(pair) for pair in parts))
    before = ranks.collectives
    with torch.inference_mode():
        made = [projection(tokens()[0]) for projection, _ in copies]
        for x, (_, norm) in zip(made, copies, strict=True):
            norm(x)
    assert copies[0][1].ranks.collectives - before == 1
