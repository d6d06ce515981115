"""Checks of weight patches on ranks, for `on_ranks`, and the formulas they are compared with, written out in full."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from comfy_tp.core.errors import TPError
from comfy_tp.core.lora.adapters import Adapter
from comfy_tp.core.lora.apply import WeightPatches
from comfy_tp.core.lora.patch import Entry, Patch
from comfy_tp.core.models import architecture_named, architecture_of
from comfy_tp.core.parallelize import resolve
from comfy_tp.core.tp.apply import apply_plan
from comfy_tp.core.tp.collectives import Ranks
from comfy_tp.core.tp.config import TensorParallelConfig

H = 64  # hidden width: 4 heads of 16
MLP = 3 * H
FLUX2 = {
    "in_channels": 8,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "timestep_guidance_channels": 32,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (4, 4, 4, 4),
}
# File key -> the model's parameters that it holds, in the file's order of rows; negative: the halves are swapped.
FILE = {
    "double_blocks.0.img_attn.qkv.weight": [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_k",
    ]
    + ["transformer_blocks.0.attn.to_v"],
    "double_blocks.0.txt_attn.proj.weight": ["transformer_blocks.0.attn.to_add_out"],
    "double_blocks.0.img_mlp.0.weight": ["transformer_blocks.0.ff.linear_in"],
    "double_blocks.0.img_mlp.2.weight": ["transformer_blocks.0.ff.linear_out"],
    "single_blocks.0.linear1.weight": ["single_transformer_blocks.0.attn.to_qkv_mlp_proj"],
    "single_blocks.0.linear2.weight": ["single_transformer_blocks.0.attn.to_out"],
    "double_stream_modulation_img.lin.weight": ["double_stream_modulation_img.linear"],
    "img_in.weight": ["x_embedder"],
    "final_layer.adaLN_modulation.1.weight": ["norm_out.linear"],
    "double_blocks.0.img_attn.norm.query_norm.scale": ["transformer_blocks.0.attn.norm_q"],
    "transformer_blocks.0.attn.to_q.weight": ["transformer_blocks.0.attn.to_q"],
}
# Places: key, offset, swapped.
PLACES: dict[str, tuple[str, tuple[int, int, int] | None, bool]] = {
    "three col-wise weights fused in the file": ("double_blocks.0.img_attn.qkv.weight", None, False),
    "one of the fused weights by offset": ("double_blocks.0.img_attn.qkv.weight", (0, H, H), False),
    "an offset that cuts through two weights": (
        "double_blocks.0.img_attn.qkv.weight",
        (0, H // 2 + 3, H),
        False,
    ),
    "row-wise": ("double_blocks.0.txt_attn.proj.weight", None, False),
    "packed col-wise halves": ("double_blocks.0.img_mlp.0.weight", None, False),
    "row-wise of another width": ("double_blocks.0.img_mlp.2.weight", None, False),
    "packed col-wise of five blocks": ("single_blocks.0.linear1.weight", None, False),
    "qkv of five packed blocks": ("single_blocks.0.linear1.weight", (0, 0, 3 * H), False),
    "packed row-wise": ("single_blocks.0.linear2.weight", None, False),
    "columns of a packed row-wise weight": ("single_blocks.0.linear2.weight", (1, 40, 100), False),
    "row-wise with a split input": ("double_stream_modulation_img.lin.weight", None, False),
    "replicated": ("img_in.weight", None, False),
    "reordered rows": ("final_layer.adaLN_modulation.1.weight", None, False),
    "reordered rows, swapped change": ("final_layer.adaLN_modulation.1.weight", None, True),
    "a diffusers name": ("transformer_blocks.0.attn.to_q.weight", None, False),
}
# Places of different weights, each patched over the whole length of its rows and columns: there DoRA needs no merge.
WHOLE = [
    place
    for place, (_, offset, swapped) in PLACES.items()
    if offset is None and not swapped and place != "a diffusers name"
]
KINDS = (
    "lora",
    "lora without alpha",
    "lora with mid",
    "loha",
    "loha with Tucker cores",
    "lokr",
    "lokr of factors",
    "lokr with a Tucker core",
    "dora of rows",
    "dora of columns",
    "loha with dora",
    "lokr with dora",
    "diff",
    "set",
)


@functools.cache
def flux2_once() -> nn.Module:
    """A small FLUX.2 with random weights."""
    torch.manual_seed(0)
    return architecture_named("flux2").load_class()(**FLUX2).eval().requires_grad_(False)


def flux2() -> nn.Module:
    """A copy of the small FLUX.2, the same for every rank."""
    return copy.deepcopy(flux2_once())


def sharded(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model on these ranks; degree 1 needs no process group."""
    architecture = architecture_of(type(model))
    plan = resolve(model, TensorParallelConfig(ranks.degree), architecture)
    apply_plan(model, plan, ranks, architecture)
    model.tensor_parallel.compute_dtype = next(model.parameters()).dtype
    return model


def adapter_of(kind: str, rows: int, columns: int, seed: int) -> Adapter:
    """A random adapter of `kind` for a weight of [rows, columns]."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    rank = 5
    if kind in ("diff", "set"):
        return Adapter(kind, {"diff" if kind == "diff" else "value": random(rows, columns)})
    name = kind.split()[0]
    if name in ("lora", "dora"):
        tensors = {"up": random(rows, rank), "down": random(rank, columns)}
        if kind == "lora with mid":
            tensors["mid"] = random(rank, rank, 1, 1)
        found = Adapter("lora", tensors, None if kind == "lora without alpha" else 2.0)
    elif kind == "loha with Tucker cores":
        tensors = {"w1_a": random(rank, rows), "w1_b": random(rank, columns), "t1": random(rank, rank, 1, 1)}
        tensors |= {"w2_a": random(rank, rows), "w2_b": random(rank, columns), "t2": random(rank, rank, 1, 1)}
        found = Adapter("loha", tensors, 3.0)
    elif name == "loha":
        tensors = {"w1_a": random(rows, rank), "w1_b": random(rank, columns)}
        found = Adapter("loha", tensors | {"w2_a": random(rows, rank), "w2_b": random(rank, columns)}, 3.0)
    else:
        tall = next(size for size in (7, 5, 4, 3, 2, 1) if rows % size == 0)
        wide = next(size for size in (8, 5, 4, 3, 2, 1) if columns % size == 0)
        tensors = {"w1": random(tall, wide), "w2": random(rows // tall, columns // wide)}
        if kind == "lokr of factors":
            tensors = {"w1_a": random(tall, 2), "w1_b": random(2, wide)}
        if kind in ("lokr of factors", "lokr with dora"):
            tensors.pop("w2", None)
            tensors |= {"w2_a": random(rows // tall, rank), "w2_b": random(rank, columns // wide)}
        if kind == "lokr with a Tucker core":
            del tensors["w2"]
            tensors |= {"w2_a": random(rank, rows // tall), "w2_b": random(rank, columns // wide)}
            tensors["t2"] = random(rank, rank, 1, 1)
        found = Adapter("lokr", tensors, 4.0)
    if "dora" in kind:
        by_columns = kind == "dora of columns"
        found.tensors["dora_scale"] = random(*((1, columns) if by_columns else (rows, 1))).abs() + 0.5
    return found


def full_merge(weight: torch.Tensor, patch: Patch) -> torch.Tensor:
    """The whole weight [rows, columns] after `patch`, written out without any slicing."""
    tensors, kind = patch.adapter.tensors, patch.adapter.kind
    whole = weight.clone()
    region = whole if patch.offset is None else whole.narrow(*patch.offset)
    region.mul_(patch.strength_model)
    alpha = patch.adapter.alpha
    if kind == "set":
        region.copy_(tensors["value"].reshape(region.shape))
        return whole
    rank = None
    if kind == "diff":
        delta = tensors["diff"].reshape(region.shape)
    elif kind == "lora":
        down = tensors["down"]
        rank = down.shape[0]
        if "mid" in tensors:
            down = torch.einsum("rs,sc->rc", tensors["mid"][:, :, 0, 0], down)
        delta = tensors["up"] @ down
    elif kind == "loha":
        rank = tensors["w1_b"].shape[0]
        halves = []
        for number in "12":
            a, b, core = tensors[f"w{number}_a"], tensors[f"w{number}_b"], tensors.get(f"t{number}")
            halves.append(a @ b if core is None else torch.einsum("ijkl,jr,ip->prkl", core, b, a)[..., 0, 0])
        delta = halves[0] * halves[1]
    else:
        w1, w2 = tensors.get("w1"), tensors.get("w2")
        if w1 is None:
            rank = tensors["w1_b"].shape[0]
            w1 = tensors["w1_a"] @ tensors["w1_b"]
        if w2 is None:
            rank = tensors["w2_b"].shape[0]
            a, b, core = tensors["w2_a"], tensors["w2_b"], tensors.get("t2")
            w2 = a @ b if core is None else torch.einsum("ijkl,jr,ip->prkl", core, b, a)[..., 0, 0]
        delta = torch.kron(w1.contiguous(), w2.contiguous())
    scale = alpha / rank if alpha is not None and rank is not None else 1.0
    if patch.swapped:
        delta = torch.cat([delta[len(delta) // 2 :], delta[: len(delta) // 2]])
    dora = tensors.get("dora_scale")
    if dora is None:
        region.add_(delta * scale * patch.strength)
        return whole
    changed = region + delta * scale
    by_rows = dora.shape[0] == region.shape[0]
    norms = region.norm(dim=1, keepdim=True) if by_rows else changed.norm(dim=0, keepdim=True)
    changed = changed * (dora / (norms + torch.finfo(torch.float32).eps))
    region.copy_(region + patch.strength * (changed - region))
    return whole


def file_tensor(state: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """The file's tensor `key` from the whole model's parameters."""
    parts = [state[f"{module}.weight"] for module in FILE[key]]
    if key.startswith("final_layer.adaLN"):
        second, first = parts[0].chunk(2)
        parts = [first, second]
    whole = torch.cat(parts)
    return whole if whole.ndim == 2 else whole.reshape(-1, 1)


def expected_state(state: dict[str, torch.Tensor], patches: list[Patch]) -> dict[str, torch.Tensor]:
    """The whole model's parameters after `patches`."""
    state = dict(state)
    for patch in patches:
        whole = full_merge(file_tensor(state, patch.key), patch)
        if patch.key.startswith("final_layer.adaLN"):
            first, second = whole.chunk(2)
            whole = torch.cat([second, first])
        for module, part in zip(FILE[patch.key], whole.chunk(len(FILE[patch.key])), strict=True):
            state[f"{module}.weight"] = part.reshape(state[f"{module}.weight"].shape)
    return state


def gathered(model: nn.Module, ranks: Ranks, keys: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The whole parameters (those of the file's `keys`, or all), gathered from the shards of all ranks."""
    whole = {}
    names = [f"{module}.weight" for key in keys for module in FILE[key]]
    for name in names or [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        spec = model.tensor_parallel.plan.specs[name]
        if ranks.degree == 1 or spec.is_replicated:
            whole[name] = parameter.detach().clone()
            continue
        whole[name] = spec.gather(ranks.all_gather(parameter.detach()))
    return whole


def patch_for(state: dict[str, torch.Tensor], place: str, kind: str, seed: int, **strengths: float) -> Patch:
    """A random patch of `kind` at one of `PLACES`."""
    key, offset, swapped = PLACES[place]
    rows, columns = file_tensor(state, key).shape
    if offset is not None:
        rows, columns = (offset[2], columns) if offset[0] == 0 else (rows, offset[2])
    return Patch(key, adapter_of(kind, rows, columns, seed), offset=offset, swapped=swapped, **strengths)


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any parameter, relative to its largest value."""
    return max(
        float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-3))
        for name in wanted
    )


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether all parameters are equal bit by bit."""
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def call(model: nn.Module) -> torch.Tensor:
    """One forward on fixed inputs."""
    generator = torch.Generator().manual_seed(11)
    inputs = model.tensor_parallel.architecture.inputs(model.config, generator)
    with torch.inference_mode():
        return model(**inputs, return_dict=False)[0].clone()


def merged_everywhere(ranks: Ranks) -> dict[str, Any]:
    """Every kind at every place, merged: the errors of the gathered weights, and whether all came back."""
    model = flux2()
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model = sharded(model, ranks)
    patches = WeightPatches(model)
    errors: dict[str, float] = {}
    restored = True
    for number, kind in enumerate(KINDS):
        for place in PLACES:
            patch = patch_for(state, place, kind, number, strength=-0.7, strength_model=1.3)
            report = patches.set([patch], mode="merge")
            if report.applied != 1 or report.unmatched or not report.merged or report.side:
                return {"error": f"{kind}, {place}: {report}"}
            found = gathered(model, ranks, [patch.key])
            wanted = expected_state(state, [patch])
            errors[f"{kind}, {place}"] = difference(found, {name: wanted[name] for name in found})
            patches.set([])
            found = gathered(model, ranks, [patch.key])
            restored = restored and same(found, {name: state[name] for name in found})
    return {"errors": errors, "restored": restored, "host_bytes": patches.host_bytes}


def vectors(ranks: Ranks) -> dict[str, Any]:
    """A norm weight changed and set; there is no matrix to slice."""
    model = flux2()
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model = sharded(model, ranks)
    patches = WeightPatches(model)
    key = "double_blocks.0.img_attn.norm.query_norm.scale"
    errors = []
    for adapter in (
        Adapter("diff", {"diff": torch.linspace(-1, 1, 16)}),
        Adapter("set", {"value": torch.linspace(-1, 1, 16)}),
    ):
        patch = Patch(key, adapter, 0.5)
        patches.set([patch])
        errors.append(difference(gathered(model, ranks), expected_state(state, [patch])))
    return {"errors": errors}


def stacked(ranks: Ranks) -> dict[str, Any]:
    """Several patches on the same weights, strengths of both signs, a swap and a removal, in each mode."""
    model = flux2()
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    plain = flux2()
    plain.tensor_parallel = sharded(flux2(), Ranks.single()).tensor_parallel
    model = sharded(model, ranks)
    before = call(model)
    patches = WeightPatches(model)
    first = [patch_for(state, place, "lora", 1, strength=0.8) for place in PLACES]
    second = [patch_for(state, place, "lora without alpha", 2, strength=-0.5) for place in PLACES]
    kin = [kind for kind in KINDS if kind.split()[0] in ("loha", "lokr") and "dora" not in kind]
    doras = ("dora of rows", "dora of columns", "loha with dora")
    bent = [patch_for(state, place, "loha with dora", 3, strength=0.4) for place in list(PLACES)[:3]]
    results: dict[str, Any] = {"outputs": {}, "back": {}, "reports": {}}

    def oracle(chosen: list[Patch]) -> torch.Tensor:
        with torch.no_grad():
            for name, value in expected_state(state, chosen).items():
                plain.get_parameter(name).copy_(value)
        return call(plain)

    for mode in ("merge", "side"):
        for label, chosen in {
            "stacked": [*first, *second],
            "stacked with DoRA": [*first, *bent, *second],
            **{
                f"{kind} on LoRA": [
                    *first,
                    *(patch_for(state, place, kind, 7, strength=0.3) for place in PLACES),
                ]
                for kind in (kin if mode == "side" else ())
            },
            **{
                f"{kind} between LoRAs": [
                    *first,
                    *(patch_for(state, place, kind, 8, strength=0.3) for place in PLACES),
                    *second,
                ]
                for kind in (doras if mode == "side" else ())
            },
            "DoRA on LoKr": [
                patch_for(state, place, kind, 12, strength=0.5)
                for kind in ("lokr", "dora of columns", "lokr with dora")
                for place in WHOLE
            ],
            "swapped": second,
            "doubled": [*second, *second],
        }.items():
            report = patches.set(chosen, mode=mode)
            wanted = oracle(chosen)
            error = float((call(model) - wanted).norm() / wanted.norm())
            results["outputs"][f"{label}, {mode}"] = error
            results["reports"][f"{label}, {mode}"] = [report.applied, report.merged, report.side]
        patches.set([])
        results["back"][mode] = bool(torch.equal(call(model), before)) and same(gathered(model, ranks), state)
    results["effect"] = float((oracle(first) - before).norm() / before.norm())
    # What is held already is told by its strengths: the norms that it needs are known, and those of rows to any DoRA.
    results["dora alone"] = {}
    for kind in ("dora of rows", "dora of columns"):
        for step, seed, strength in (("first", 10, 0.9), ("new strength", 10, -0.4), ("swap", 11, 0.6)):
            chosen = [patch_for(state, place, kind, seed, strength=strength) for place in WHOLE]
            held = step == "new strength"
            entries = [
                Entry(100 * seed + index, None if held else patch, strength)
                for index, patch in enumerate(chosen)
            ]
            started = ranks.collectives
            report = patches.commit(patches.stage(entries, mode="side"))
            reduces = ranks.collectives - started
            wanted = oracle(chosen)
            error = float((call(model) - wanted).norm() / wanted.norm())
            results["dora alone"][kind, step] = [error, reduces, report.merged]
    return results


def refused(ranks: Ranks) -> dict[str, Any]:
    """Patches that cannot be carried: the texts, and whether those in place stayed."""
    model = flux2()
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model = sharded(model, ranks)
    patches = WeightPatches(model)
    good = [patch_for(state, place, "lora", 1) for place in PLACES]
    merged = [patch_for(state, "row-wise", "diff", 1)]
    patches.set([*good, *merged])
    output, weights = call(model), gathered(model, ranks)
    qkv = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    up, down = torch.ones(3 * H, 2), torch.ones(2, H)
    bad = {
        "kind": Patch(qkv, Adapter("oft", {"blocks": torch.zeros(2, 2, 2)})),
        "shape": Patch(qkv, Adapter("lora", {"up": torch.ones(2 * H, 2), "down": down})),
        "factors": Patch(qkv, Adapter("lora", {"up": up, "down": torch.ones(3, H)})),
        "rank 0": Patch(qkv, Adapter("lora", {"up": torch.ones(3 * H, 0), "down": torch.ones(0, H)})),
        "missing": Patch(qkv, Adapter("lora", {"up": up})),
        "missing half": Patch(qkv, Adapter("lokr", {"w1": torch.ones(2, 2), "w2_a": torch.ones(2, 2)})),
        "reshape": Patch(qkv, Adapter("lora", {"up": up, "down": down}, reshape=(3 * H, 2 * H))),
        "kernel": Patch(qkv, Adapter("lora", {"up": up, "down": down, "mid": torch.ones(2, 2, 3, 3)})),
        "offset": Patch(qkv, Adapter("lora", {"up": up, "down": down}), offset=(0, H, 3 * H)),
        "dora": Patch(qkv, Adapter("lora", {"up": up, "down": down, "dora_scale": torch.ones(5, 1)})),
    }
    texts = {}
    stayed = True
    for name, patch in bad.items():
        try:
            patches.set([*good, patch])
            texts[name] = None
        except TPError as error:
            texts[name] = f"{type(error).__name__}: {error}"
        stayed = stayed and torch.equal(call(model), output) and same(gathered(model, ranks), weights)
    unknown = patches.set([*good, Patch("double_blocks.7.img_attn.qkv.weight", good[0].adapter)])
    return {
        "texts": texts,
        "stayed": bool(stayed),
        "unmatched": list(unknown.unmatched),
        "applied": unknown.applied,
    }


class Biased(nn.Module):
    """Two Linears with biases and a plan of its own, to be addressed by the model's own names."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def biases(ranks: Ranks) -> dict[str, Any]:
    """Changed biases and weights of a model without a file layout; a DoRA scales the weight's product alone."""
    generator = torch.Generator().manual_seed(5)
    model = Biased().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    plain = copy.deepcopy(model)
    sharded(model, ranks)
    x = torch.randn(3, 8, generator=generator)
    patches = WeightPatches(model)
    errors, counts = {}, []
    for kind in ("lora", "dora of rows", "dora of columns"):
        adapters = {
            "up.bias": Adapter("diff", {"diff": torch.randn(24, generator=generator)}),
            "down.bias": Adapter("diff", {"diff": torch.randn(8, generator=generator)}),
            "up.weight": adapter_of(kind, 24, 8, 1),
            "down.weight": adapter_of(kind, 8, 24, 2),
        }
        report = patches.set([Patch(key, adapter, 0.5) for key, adapter in adapters.items()], mode="side")
        whole = copy.deepcopy(plain)
        for key, adapter in adapters.items():
            parameter = whole.get_parameter(key)
            matrix = parameter.reshape(len(parameter), -1)
            parameter.copy_(full_merge(matrix, Patch(key, adapter, 0.5)).reshape(parameter.shape))
        errors[kind] = float((model(x) - whole(x)).norm() / whole(x).norm())
        counts.append((report.merged, report.side))
    return {"errors": errors, "counts": counts}


def fp8(ranks: Ranks) -> dict[str, Any]:
    """On fp8 weights LoRA, LoHa, LoKr and DoRA are side paths and leave them alone; what must be merged is rounded anew."""
    from comfy_tp.core.tp import fp8
    from comfy_tp.core.tp.skeleton import hold_fp8

    model = flux2()
    whole = flux2()
    model = sharded(model, ranks)
    plan = model.tensor_parallel.plan
    for key in ("single_transformer_blocks.0.attn.to_qkv_mlp_proj", "x_embedder"):
        tensor, scale = fp8.quantise(whole.get_parameter(f"{key}.weight"))
        hold_fp8(model, key, fp8.Scales(scale), plan, ranks)
        module = model.get_submodule(key)
        module.weight = nn.Parameter(
            plan.specs[f"{key}.weight"].shard(tensor, ranks.rank), requires_grad=False
        )
        whole.get_parameter(f"{key}.weight").copy_(fp8.dequantise(tensor, scale, torch.float32))
    state = {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}
    whole.tensor_parallel = sharded(flux2(), Ranks.single()).tensor_parallel
    before = call(model)
    patches = WeightPatches(model)
    places = ("packed col-wise of five blocks", "replicated")
    results: dict[str, Any] = {}
    for kind in ("lora", "loha", "lokr", "dora of rows", "dora of columns", "diff"):
        chosen = [
            patch_for(state, place, kind, 4, strength=4.0 if kind == "loha" else 0.6) for place in places
        ]
        # The LoHa has rank 25, which weights as small as these would rather have merged.
        report = patches.set(chosen, mode="side" if kind == "loha" else "auto")
        for name, value in expected_state(state, chosen).items():
            whole.get_parameter(name).copy_(value)
        wanted = call(whole)
        weight = model.x_embedder.weight
        results[kind] = {
            "error": float((call(model) - wanted).norm() / wanted.norm()),
            "effect": float((wanted - before).norm() / wanted.norm()),
            "merged": report.merged,
            "side": report.side,
            "dtype": str(weight.dtype),
        }
    patches.set([])
    results["back"] = bool(torch.equal(call(model), before))
    return results
