"""What the ranks execute for test_requirements: loading, sharding in memory, refusals, saving, disagreement."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import comfy_tp.core as core
from comfy_tp.core import load as loading
from comfy_tp.core.models import Architecture, architecture_named
from comfy_tp.core.parallelize import enable_parallelism
from comfy_tp.core.planning.compare import cast, example_inputs, example_model
from comfy_tp.core.tp.apply import apply_plan
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.config import TensorParallelConfig
from comfy_tp.core.tp.linear import ColwiseLinear, RowwiseLinear
from comfy_tp.core.tp.plan import resolve_plan

FLUX = architecture_named("flux")
WAN = architecture_named("wan")
# Whether the installed diffusers has the tensor parallelism of the document at all; older ones that we run with do not.
DOCUMENTED = hasattr(diffusers, "TensorParallelConfig")


def before_fork() -> None:
    """One forward of one model: diffusers imports most of itself on first use."""
    model = example_model(FLUX, "schnell")
    with torch.no_grad():
        model(**example_inputs(FLUX, model.config))


def small_flux() -> nn.Module:
    return example_model(FLUX, "schnell")


def output(model: nn.Module, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(**example_inputs(FLUX, model.config, seed=seed), return_dict=False)[0]


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The class and text of what the call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def bytes_read() -> int:
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar:")).split()[1])


def load_as_documented(ranks: Ranks, folder: str) -> dict[str, Any]:
    """from_pretrained with subfolder, dtype and parallel_config; what this rank then holds, and its output."""
    model_class = core.FluxTransformer2DModel
    whole = model_class.from_pretrained(folder, subfolder="transformer")
    before = bytes_read()
    model = model_class.from_pretrained(
        folder,
        subfolder="transformer",
        dtype=torch.float32,
        parallel_config=TensorParallelConfig(tp_degree=ranks.degree),
    )
    read = bytes_read() - before
    specs = model.tensor_parallel.plan.specs
    weights = Path(folder) / "transformer" / "diffusion_pytorch_model.safetensors"
    return {
        "whole_class_is_plain": getattr(whole, "tensor_parallel", None) is None,
        "is_the_class": isinstance(model, diffusers.FluxTransformer2DModel),
        "local_shapes": all(
            tuple(parameter.shape) == specs[name].local_shape for name, parameter in model.named_parameters()
        ),
        "sharded": sum(not spec.is_replicated for spec in specs.values()),
        "devices": sorted({str(tensor.device) for tensor in model.state_dict().values()}),
        "held": sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()),
        "needed": sum(4 * torch.Size(spec.local_shape).numel() for spec in specs.values()),
        "read": read,
        "file": weights.stat().st_size,
        "distance": relative(output(model), output(whole)),
    }


def generate(ranks: Ranks, folder: str) -> dict[str, Any]:
    """A whole pipeline around the sharded transformer, against the same pipeline unsharded."""
    sharded = core.from_pretrained(
        diffusers.FluxTransformer2DModel,
        folder,
        subfolder="transformer",
        parallel_config=TensorParallelConfig(tp_degree=ranks.degree),
    )
    pictures = []
    nothing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    for options in ({"transformer": sharded, **nothing}, nothing):
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
        pipeline.set_progress_bar_config(disable=True)
        embeds = torch.Generator().manual_seed(1)
        with torch.no_grad():
            pictures.append(
                pipeline(
                    prompt_embeds=torch.randn(1, 5, 40, generator=embeds),
                    pooled_prompt_embeds=torch.randn(1, 24, generator=embeds),
                    height=16,
                    width=16,
                    num_inference_steps=2,
                    generator=torch.Generator().manual_seed(42),
                    output_type="pt",
                ).images
            )
    vae = dict(pipeline.vae.named_parameters())
    return {
        "shape": list(pictures[0].shape),
        "distance": relative(*pictures),
        "others_whole": all(not getattr(parameter, "is_sharded", False) for parameter in vae.values()),
        "offload": error_of(
            diffusers.DiffusionPipeline.from_pretrained(
                folder, transformer=sharded, **nothing
            ).enable_model_cpu_offload
        ),
    }


def configurations(ranks: Ranks) -> dict[str, Any]:
    """Every kind of configuration shards to the same output."""
    expected = output(small_flux())
    mesh = init_device_mesh("cpu", (ranks.degree,), mesh_dim_names=("tp",))
    kinds: dict[str, Any] = {
        "ours": TensorParallelConfig(tp_degree=ranks.degree),
        "ours with mesh": TensorParallelConfig(mesh=mesh),
        "a number": ranks.degree,
    }
    if DOCUMENTED:
        theirs = diffusers.TensorParallelConfig(tp_degree=ranks.degree)
        kinds["diffusers"] = theirs
        kinds["diffusers with mesh"] = diffusers.TensorParallelConfig(mesh=mesh)
        kinds["diffusers wrapped"] = diffusers.ParallelConfig(tensor_parallel_config=theirs)
    return {
        kind: relative(output(enable_parallelism(small_flux(), config=config)), expected)
        for kind, config in kinds.items()
    }


def checks_come_first(ranks: Ranks, folder: str, odd_folder: str) -> dict[str, Any]:
    """A degree that does not fit is refused by both entry points with nothing read and nothing changed."""
    config = TensorParallelConfig(tp_degree=ranks.degree)
    odd = FLUX.load_class().from_pretrained(odd_folder, subfolder="transformer")
    before = {name: parameter.data_ptr() for name, parameter in odd.named_parameters()}
    modules = [type(module) for module in odd.modules()]

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read before the checks")

    reader, loading.read_shards = loading.read_shards, forbidden
    try:
        read = error_of(
            core.from_pretrained,
            FLUX.load_class(),
            odd_folder,
            subfolder="transformer",
            parallel_config=config,
        )
    finally:
        loading.read_shards = reader
    found = {
        "in memory": error_of(enable_parallelism, odd, config=config),
        "reading": read,
        "device": error_of(enable_parallelism, odd, config=config, device="mps"),
        "size": error_of(enable_parallelism, small_flux(), config=TensorParallelConfig(tp_degree=3)),
        "untouched": before == {name: parameter.data_ptr() for name, parameter in odd.named_parameters()}
        and modules == [type(module) for module in odd.modules()],
    }
    token = torch.ones(1)
    dist.all_reduce(token)
    found["group works"] = token.item() == ranks.degree
    return found


def refusals(ranks: Ranks, folder: str) -> dict[str, Any]:
    """What a model that is already sharded refuses."""
    model = enable_parallelism(small_flux(), config=TensorParallelConfig(tp_degree=ranks.degree))
    return {
        "offload": error_of(model.enable_group_offload, onload_device=torch.device("cpu")),
        "lora": error_of(model.load_lora_adapter, {}),
        "adapter": error_of(model.add_adapter, None),
        "casting": error_of(model.enable_layerwise_casting, torch.float8_e4m3fn),
        "fusing": error_of(model.fuse_qkv_projections) if hasattr(model, "fuse_qkv_projections") else None,
        "again": error_of(enable_parallelism, model, config=TensorParallelConfig(tp_degree=ranks.degree)),
        "again by method": error_of(model.enable_parallelism, config=ranks.degree),
        "save": error_of(model.save_pretrained, folder, safe_serialization=False),
        "size": error_of(model.save_pretrained, folder, max_shard_size="five"),
    }


def save(ranks: Ranks, folder: str, target: str) -> dict[str, Any]:
    """Save a model that was loaded in shards; plain diffusers reads the same tensors back."""
    model = core.FluxTransformer2DModel.from_pretrained(
        folder, subfolder="transformer", parallel_config=TensorParallelConfig(tp_degree=ranks.degree)
    )
    model.save_pretrained(target, max_shard_size="500KB")
    dist.barrier()
    plain = diffusers.FluxTransformer2DModel
    read, original = plain.from_pretrained(target), plain.from_pretrained(folder, subfolder="transformer")
    return {
        "equal": all(
            torch.equal(tensor, read.state_dict()[name]) for name, tensor in original.state_dict().items()
        ),
        "config": dict(read.config)["num_attention_heads"],
        "files": len(list(Path(target).glob("*.safetensors"))),
    }


def disagreement(ranks: Ranks, folder: str, other: str) -> dict[str, Any]:
    """Ranks that were given other seeds, inputs or files."""
    config = TensorParallelConfig(tp_degree=ranks.degree)
    own_seed = example_model(FLUX, "schnell", seed=ranks.rank)
    found = {"seed": error_of(enable_parallelism, own_seed, config=config)}
    model = enable_parallelism(small_flux(), config=config)
    found["input"] = error_of(output, model, seed=ranks.rank)
    inputs = example_inputs(FLUX, model.config)
    inputs["timestep"] = inputs["timestep"] + 0.1 * ranks.rank
    found["timestep"] = error_of(model, **inputs)
    found["files"] = error_of(
        core.from_pretrained,
        FLUX.load_class(),
        other if ranks.rank else folder,
        subfolder="transformer",
        parallel_config=config,
    )
    found["rounding passes"] = error_of(output, enable_parallelism(small_flux(), config=config), seed=0)
    return found


class Feed(nn.Module):
    """Two Linears with biases, one after the other."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)
        self.optional = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks, of which the first is used twice, and a modulation that reads the whole input."""

    def __init__(self) -> None:
        super().__init__()
        shared = Feed()
        self.blocks = nn.ModuleList([shared, Feed(), shared])
        self.modulation = nn.Linear(12, 24)
        self.plain = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(x).chunk(2, dim=-1)
        for block in self.blocks:
            x = block(x) * (1 + scale) + shift
        return self.plain(x)


STACK_PLAN = {
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.optional": "colwise",
    "modulation": "rowwise_split_input",
}


def stack(ranks: Ranks) -> dict[str, Any]:
    """A plan of the three plain styles on blocks that share an instance."""
    torch.manual_seed(0)
    model = Stack()
    x = torch.randn(5, 12)
    expected = model(x).detach()
    plan = resolve_plan(model, STACK_PLAN, ranks.degree)
    apply_plan(model, plan, ranks, Architecture(name="stack", model_class="Stack"))
    before = ranks.collectives
    with torch.no_grad():
        found = model(x)
    return {
        "error_of_output": relative(found, expected),
        "collectives": ranks.collectives - before,
        "predicted": plan.all_reduces,
        "one_instance": model.blocks[0] is model.blocks[2],
        "kinds": [
            isinstance(model.blocks[0].up, ColwiseLinear),
            isinstance(model.blocks[0].down, RowwiseLinear),
            type(model.plain) is nn.Linear,
        ],
    }


def one_pair(ranks: Ranks) -> dict[str, Any]:
    """Collectives of one col-wise and row-wise pair."""
    torch.manual_seed(0)
    model = Feed()
    plan = resolve_plan(model, {"up": "colwise", "down": "rowwise"}, ranks.degree)
    apply_plan(model, plan, ranks, Architecture(name="feed", model_class="Feed"))
    before = ranks.collectives
    with torch.no_grad():
        model(torch.randn(5, 12))
    return {"collectives": ranks.collectives - before, "up": list(model.up(torch.randn(5, 12)).shape)}


def bfloat16(ranks: Ranks) -> dict[str, Any]:
    """The error of the sharded bf16 model against float32, and that of the unsharded bf16 model."""
    expected = output(small_flux())
    inputs = example_inputs(FLUX, small_flux().config, dtype=torch.bfloat16)
    plain = example_model(FLUX, "schnell", dtype=torch.bfloat16)
    with torch.no_grad():
        unsharded = plain(**inputs, return_dict=False)[0]
        model = enable_parallelism(plain, config=TensorParallelConfig(tp_degree=ranks.degree))
        sharded = model(**inputs, return_dict=False)[0]
    return {
        "unsharded": relative(unsharded, expected),
        "sharded": relative(sharded, expected),
        "dtype": str(sharded.dtype),
    }


def kept_in_float32(ranks: Ranks, folder: str) -> dict[str, Any]:
    """Dtypes of a model that keeps some of its modules in float32."""
    config = TensorParallelConfig(tp_degree=ranks.degree)
    model = example_model(WAN, "text", dtype=torch.bfloat16)
    before = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    in_memory = enable_parallelism(copy.deepcopy(model), config=config)
    read = core.from_pretrained(WAN.load_class(), folder, dtype=torch.bfloat16, parallel_config=config)
    plain = WAN.load_class().from_pretrained(folder, torch_dtype=torch.bfloat16)
    return {
        "both": sorted(set(before.values())),
        "in_memory": before == {name: str(p.dtype) for name, p in in_memory.named_parameters()},
        "read": {name: str(p.dtype) for name, p in plain.named_parameters()}
        == {name: str(p.dtype) for name, p in read.named_parameters()},
    }


def degree_one(ranks: Ranks) -> dict[str, Any]:
    """A degree of one leaves plain modules."""
    model = small_flux()
    modules = [type(module) for module in model.modules()]
    expected = output(model)
    one = enable_parallelism(model, config=TensorParallelConfig(tp_degree=1))
    return {
        "plain": modules == [type(module) for module in one.modules()],
        "equal": torch.equal(output(one), expected),
    }


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def same_everywhere(ranks: Ranks) -> dict[str, Any]:
    """The sharded output, bit for bit, of this rank."""
    model = enable_parallelism(cast(small_flux(), torch.float32), config=ranks.degree)
    return {"digest": digest_of(output(model))}
