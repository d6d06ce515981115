"""LoRA on resident ranks: all of them take a set of patches or none does, and fp8 files carry one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flux2_files import call_inputs, fp8_tensors, save_single_file, single_file_tensors, small_flux2
from safetensors.torch import save_file

from comfy_tp.core.calls.remote import RemoteModel
from comfy_tp.core.errors import RankOutOfMemory
from comfy_tp.core.lora.adapters import Adapter
from comfy_tp.core.lora.patch import Patch
from comfy_tp.core.ranks.client import RankGroup


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    where = Path(__file__).with_name("lora_faults.py")
    group = RankGroup.start(["cpu", "cpu"], commands=f"{where}:COMMANDS", env={"OMP_NUM_THREADS": "1"})
    yield group
    group.close()


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in single_file_tensors(small_flux2()).items()}


def lora(tensors: dict[str, torch.Tensor], seed: int, strength: float = 1.0) -> list[Patch]:
    """A LoRA of every matrix of the single file."""
    generator = torch.Generator().manual_seed(seed)
    patches = []
    for name, weight in tensors.items():
        if weight.ndim == 2:
            up = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
            down = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            patches.append(
                Patch(f"diffusion_model.{name}", Adapter("lora", {"up": up, "down": down}), strength)
            )
    return patches


def call(model: RemoteModel) -> torch.Tensor:
    inputs = call_inputs()
    given = {"context": inputs["context"], "guidance": inputs["guidance"]}
    return model.forward(inputs["x"], inputs["timestep"], given).clone()


def test_when_one_rank_fails_no_rank_takes_the_new_patches(group, tensors, tmp_path):
    model = RemoteModel.load(group, str(save_single_file(tmp_path / "flux2.safetensors", tensors)))
    before = call(model)
    first, second = lora(tensors, 1), lora(tensors, 2)
    report = model.set_patches(first, mode="merge")
    assert report.applied == len(first) and report.merged and not report.unmatched
    patched = call(model)
    assert not torch.equal(patched, before)
    with pytest.raises(RankOutOfMemory, match="Rank 1 .*no memory for the side path"):
        model.set_patches(second, mode="side")
    assert torch.equal(call(model), patched)
    model.set_patches(second, mode="merge")
    assert not torch.equal(call(model), patched)
    model.set_patches(first, mode="merge")
    assert torch.equal(call(model), patched)
    model.set_patches([])
    assert torch.equal(call(model), before)
    model.unload()


def test_a_lora_on_an_fp8_file_equals_the_same_lora_on_the_exact_weights(group, tensors, tmp_path):
    """The fp8 weights are multiplied exactly on the CPU, and the LoRA goes beside them."""
    held, metadata, exact = fp8_tensors(tensors, "metadata")
    save_file(
        {name: tensor.contiguous() for name, tensor in held.items()}, tmp_path / "fp8.safetensors", metadata
    )
    save_single_file(tmp_path / "exact.safetensors", exact)
    patches = lora(tensors, 3, 0.7)
    outputs = {}
    for name in ("fp8", "exact"):
        model = RemoteModel.load(group, str(tmp_path / f"{name}.safetensors"))
        before = call(model)
        report = model.set_patches(patches)
        outputs[name] = call(model)
        model.set_patches([])
        assert torch.equal(call(model), before), name
        model.unload()
        if name == "fp8":
            assert report.side and not report.merged
            effect = (outputs[name] - before).norm() / before.norm()
    assert effect > 0.02
    assert (outputs["fp8"] - outputs["exact"]).norm() <= 1e-5 * outputs["exact"].norm()
