"""Reading LoRA files: every style of key names as tables, and which weight of the model each name means.

A key is `prefix + module + suffix`. Suffixes tell the adapter's kind and which of its tensors it is (`SUFFIXES`);
prefixes are stripped (`PREFIXES`); the module is looked up by every name that it is known under: the single file's,
diffusers' (the file layout read backwards) and those of `ALIASES`. Dots and underscores are not told apart, so that
kohya's and LyCORIS' flattened names need no table of their own.

Sources of the names: ComfyUI (`diffusion_model.`), diffusers and PEFT (`transformer.`, `base_model.model.`, `lora_A`),
kohya's sd-scripts (`lora_unet_`), OneTrainer (`lora_transformer_`), LyCORIS and SimpleTuner (`lycoris_`), XLabs and USO
(`processor.qkv_lora1`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ..checkpoint.layout import FileLayout
from ..errors import InputError
from .adapters import Adapter, change_of, is_complete
from .patch import Patch

PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
)

# Suffix -> (kind of adapter, name of its tensor). Kind "" belongs to whatever else the module has.
SUFFIXES: dict[str, tuple[str, str]] = {
    ".lora_up.weight": ("lora", "up"),
    ".lora_down.weight": ("lora", "down"),
    ".lora_mid.weight": ("lora", "mid"),
    ".lora_B.weight": ("lora", "up"),
    ".lora_A.weight": ("lora", "down"),
    ".lora_B": ("lora", "up"),
    ".lora_A": ("lora", "down"),
    ".lora.up.weight": ("lora", "up"),
    ".lora.down.weight": ("lora", "down"),
    "_lora.up.weight": ("lora", "up"),
    "_lora.down.weight": ("lora", "down"),
    ".up.weight": ("lora", "up"),
    ".down.weight": ("lora", "down"),
    ".lora_linear_layer.up.weight": ("lora", "up"),
    ".lora_linear_layer.down.weight": ("lora", "down"),
    ".reshape_weight": ("lora", "reshape"),
    ".hada_w1_a": ("loha", "w1_a"),
    ".hada_w1_b": ("loha", "w1_b"),
    ".hada_w2_a": ("loha", "w2_a"),
    ".hada_w2_b": ("loha", "w2_b"),
    ".hada_t1": ("loha", "t1"),
    ".hada_t2": ("loha", "t2"),
    ".lokr_w1": ("lokr", "w1"),
    ".lokr_w2": ("lokr", "w2"),
    ".lokr_w1_a": ("lokr", "w1_a"),
    ".lokr_w1_b": ("lokr", "w1_b"),
    ".lokr_w2_a": ("lokr", "w2_a"),
    ".lokr_w2_b": ("lokr", "w2_b"),
    ".lokr_t2": ("lokr", "t2"),
    ".alpha": ("", "alpha"),
    ".dora_scale": ("", "dora_scale"),
    ".diff": ("diff", "diff"),
    ".w_norm": ("diff", "diff"),
    ".diff_b": ("diff_bias", "diff"),
    ".b_norm": ("diff_bias", "diff"),
    ".set_weight": ("set", "value"),
}
# PEFT's own DoRA norms the changed weight, ComfyUI's the weight before: its modules are left out whole.
FOREIGN_DORA = ".lora_magnitude_vector"
# Where diffusers writes the PEFT settings that the adapters were trained with, as JSON in the file's header.
SETTINGS = "lora_adapter_metadata"
# PEFT puts the adapter's name between: `lora_A.default.weight`.
NAMED_ADAPTER = re.compile(r"\.lora_([AB])\.(?!weight$)[^.]+\.weight$")


@dataclass(frozen=True)
class Alias:
    """Another name for rows of a file's module: from `start` to `stop` times the weight's number of columns."""

    name: str
    module: str
    start: int = 0
    stop: int | None = None


# What FLUX.1 and FLUX.2 share: q, k and v of a single block's fused projection, and a name without its number.
_FLUX = (
    Alias("single_blocks.{i}.linear1_qkv", "single_blocks.{i}.linear1", 0, 3),
    Alias("transformer_blocks.{i}.attn.to_out", "double_blocks.{i}.img_attn.proj"),
)
_SINGLE = "single_transformer_blocks.{i}"

# Architecture -> names that trainers use besides the single file's and diffusers' own.
ALIASES: dict[str, tuple[Alias, ...]] = {
    "flux": (
        *_FLUX,
        # As XLabs and USO name them: 1 is the picture's stream and 2 the text's. What ends in `_lora` ends before it.
        Alias("double_blocks.{i}.processor.qkv_lora1", "double_blocks.{i}.img_attn.qkv"),
        Alias("double_blocks.{i}.processor.qkv_lora2", "double_blocks.{i}.txt_attn.qkv"),
        Alias("double_blocks.{i}.processor.proj_lora1", "double_blocks.{i}.img_attn.proj"),
        Alias("double_blocks.{i}.processor.proj_lora2", "double_blocks.{i}.txt_attn.proj"),
        Alias("single_blocks.{i}.processor.qkv", "single_blocks.{i}.linear1", 0, 3),
        Alias("single_blocks.{i}.processor.proj", "single_blocks.{i}.linear2"),
    ),
    "flux2": (
        *_FLUX,
        # The fused projection's rows are q, k, v and the feed-forward.
        Alias(f"{_SINGLE}.attn.to_q", "single_blocks.{i}.linear1", 0, 1),
        Alias(f"{_SINGLE}.attn.to_k", "single_blocks.{i}.linear1", 1, 2),
        Alias(f"{_SINGLE}.attn.to_v", "single_blocks.{i}.linear1", 2, 3),
        Alias(f"{_SINGLE}.proj_mlp", "single_blocks.{i}.linear1", 3),
        Alias(f"{_SINGLE}.proj_out", "single_blocks.{i}.linear2"),
        Alias("transformer_blocks.{i}.ff.net.0.proj", "double_blocks.{i}.img_mlp.0"),
        Alias("transformer_blocks.{i}.ff.net.2", "double_blocks.{i}.img_mlp.2"),
        Alias("transformer_blocks.{i}.ff_context.net.0.proj", "double_blocks.{i}.txt_mlp.0"),
        Alias("transformer_blocks.{i}.ff_context.net.2", "double_blocks.{i}.txt_mlp.2"),
        Alias("time_text_embed.timestep_embedder.linear_1", "time_in.in_layer"),
        Alias("time_text_embed.timestep_embedder.linear_2", "time_in.out_layer"),
        Alias("time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer"),
        Alias("time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer"),
    ),
    "qwenimage": (Alias("transformer_blocks.{i}.attn.to_out", "transformer_blocks.{i}.attn.to_out.0"),),
}


@dataclass(frozen=True)
class WeightSlice:
    """What a module's name in a LoRA file means: a tensor of the single file, and where in it (see `Patch`)."""

    key: str
    offset: tuple[int, int, int] | None = None
    swapped: bool = False


@dataclass
class LoraFile:
    """What a LoRA file does to a model: `patches` of strength 1, and the file's keys that fit nothing."""

    patches: list[Patch] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)


def read_lora(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Sequence[int]],
    layouts: Iterable[FileLayout],
    architecture: str = "",
    metadata: Mapping[str, str] | None = None,
) -> LoraFile:
    """The patches that a LoRA file's `tensors` make on a model whose single file holds `shapes` (name: shape).

    `layouts` are the architecture's file layouts. `metadata` is the file's header: a file of diffusers keeps alpha there
    and not beside the tensors. A key is unmatched when its module is none of the model's, its suffix
    belongs to no adapter that shards can carry, or the adapter lacks its other half. Raises `InputError` for an alpha
    that is not one number and for factors that do not fit the weight.
    """
    known = names_of(shapes, layouts, ALIASES.get(architecture, ()))
    settings = read_settings(metadata or {})
    foreign = {key.partition(FOREIGN_DORA)[0] for key in tensors if FOREIGN_DORA in key}
    groups: dict[str, dict[str, str]] = {}
    found = LoraFile()
    for key in tensors:
        split = split_key(key)
        if split is None or split[0] in foreign or target_of(split[0], known) is None:
            found.unmatched.append(key)
            continue
        module, suffix = split
        groups.setdefault(module, {})[suffix] = key
    for module, keys in groups.items():
        target = target_of(module, known)
        if target is not None:
            _read_module(found, tensors, shapes, target, keys, trained_alpha(module, settings))
    return found


def read_settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The transformer's PEFT settings in a file's header; empty where there are none that can be read."""
    try:
        settings = json.loads(metadata.get(SETTINGS, "{}"))
    except ValueError:
        return {}
    if not isinstance(settings, dict):
        return {}
    return {key.removeprefix("transformer."): value for key, value in settings.items()}


def trained_alpha(module: str, settings: Mapping[str, Any]) -> Callable[[int], float | None]:
    """Of a LoRA's rank: the alpha that PEFT's `settings` give `module`, where the file has none of its own."""

    def alpha(rank: int) -> float | None:
        value = settings.get("lora_alpha")
        patterns = settings.get("alpha_pattern")
        for pattern, special in (patterns if isinstance(patterns, dict) else {}).items():
            if module == pattern or module.endswith(f".{pattern}"):
                value = special
        if not isinstance(value, (int, float)):
            return None
        return value * rank**0.5 if settings.get("use_rslora") else float(value)

    return alpha


def _read_module(
    found: LoraFile,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Sequence[int]],
    target: WeightSlice,
    keys: Mapping[str, str],
    trained: Callable[[int], float | None],
) -> None:
    """Add the patches that a module's keys (suffix: key) make at `target`, and sort the keys.

    `trained` gives the alpha of a LoRA that has none beside it, from its rank.
    """
    shared = {SUFFIXES[suffix][1]: key for suffix, key in keys.items() if SUFFIXES[suffix][0] == ""}
    used: set[str] = set()
    for kind in dict.fromkeys(SUFFIXES[suffix][0] for suffix in keys):
        own = {SUFFIXES[suffix][1]: key for suffix, key in keys.items() if SUFFIXES[suffix][0] == kind}
        at = target
        if kind == "diff_bias":
            at = WeightSlice(target.key.removesuffix(".weight") + ".bias", target.offset, target.swapped)
        if kind == "" or at.key not in shapes:
            continue
        low_rank = kind in ("lora", "loha", "lokr")
        parts = {**own, **shared} if low_rank else own
        numbers = {name: parts.pop(name) for name in ("alpha", "reshape") if name in parts}
        alpha = _number(tensors, numbers["alpha"]) if "alpha" in numbers else None
        if kind == "lora" and alpha is None and "down" in parts and tensors[parts["down"]].ndim:
            alpha = trained(tensors[parts["down"]].shape[0])
        adapter = Adapter(
            "diff" if kind == "diff_bias" else kind,
            {name: tensors[key] for name, key in parts.items()},
            alpha,
            tuple(tensors[numbers["reshape"]].flatten().long().tolist()) if "reshape" in numbers else None,
        )
        if not is_complete(adapter):
            continue
        size = [shapes[at.key][0], prod(shapes[at.key][1:])]
        if at.offset is not None:
            size[at.offset[0]] = at.offset[2]
        rows, columns = size
        change_of(adapter, rows, columns, at.key)  # raises where it does not fit
        found.patches.append(Patch(at.key, adapter, offset=at.offset, swapped=at.swapped))
        used.update([*parts.values(), *numbers.values()])
    for key in keys.values():
        (found.applied if key in used else found.unmatched).append(key)


def _number(tensors: Mapping[str, torch.Tensor], key: str) -> float:
    """The value of a file's tensor that holds one number. Raises `InputError` for more or none."""
    if tensors[key].numel() != 1:
        raise InputError(
            f"The LoRA's '{key}' has the shape {list(tensors[key].shape)}, expected one number. Download it again."
        )
    return float(tensors[key])


def split_key(key: str) -> tuple[str, str] | None:
    """A LoRA file's key as (module with its prefix, suffix of `SUFFIXES`), or None for a suffix that is not there."""
    key = NAMED_ADAPTER.sub(r".lora_\1.weight", key)
    for suffix in _LONGEST_FIRST:
        if key.endswith(suffix):
            return key.removesuffix(suffix), suffix
    return None


_LONGEST_FIRST = sorted(SUFFIXES, key=len, reverse=True)


def target_of(module: str, known: Mapping[str, WeightSlice]) -> WeightSlice | None:
    """What `module` of a LoRA file means among the `known` names, with prefixes stripped until it fits."""
    name = _flat(module)
    while name not in known:
        prefix = next((one for one in _FLAT_PREFIXES if name.startswith(one)), None)
        if prefix is None:
            return None
        name = name[len(prefix) :]
    return known[name]


def names_of(
    shapes: Mapping[str, Sequence[int]], layouts: Iterable[FileLayout], aliases: Sequence[Alias] = ()
) -> dict[str, WeightSlice]:
    """Every name, flattened, under which LoRA files know the weights of a model whose single file holds `shapes`."""
    names: dict[str, WeightSlice] = {}
    layouts = [layout for layout in layouts if layout.rules is not None]
    patterns = [(re.compile(re.escape(alias.module).replace(r"\{i\}", r"(\d+)")), alias) for alias in aliases]
    for key, shape in shapes.items():
        module, _, last = key.rpartition(".")
        if last == "bias":
            continue
        names[_flat(module)] = WeightSlice(key)
        if last != "weight":
            names[_flat(key)] = WeightSlice(key)
        for layout in layouts:
            for name, target in _backwards(layout, module, key, shape[0]):
                names.setdefault(_flat(name), target)
        for pattern, alias in patterns:
            match = pattern.fullmatch(module)
            if match is None or last != "weight":
                continue
            number = match.group(1) if match.groups() else ""
            start = alias.start * shape[1]
            stop = shape[0] if alias.stop is None else alias.stop * shape[1]
            offset = None if (start, stop) == (0, shape[0]) else (0, start, stop - start)
            names.setdefault(_flat(alias.name.replace("{i}", number)), WeightSlice(key, offset))
    return names


def _backwards(layout: FileLayout, module: str, key: str, rows: int) -> list[tuple[str, WeightSlice]]:
    """The model's modules that the file's `module` feeds, and what each of them is in it."""
    fed: dict[str, list[tuple[int, int, int, int]]] = {}
    for target in layout.targets(module):
        fed.setdefault(target.module, []).append((target.part, target.of, target.index, target.count))
    found = []
    for name, parts in fed.items():
        parts.sort(key=lambda part: part[2])
        part, of, _, count = parts[0]
        if parts == [(part + index, of, index, count) for index in range(count)]:
            size = rows // of
            offset = (0, part * size, count * size) if of > count else None
            found.append((name, WeightSlice(key, offset)))
        elif parts == [(1, 2, 0, 2), (0, 2, 1, 2)]:
            found.append((name, WeightSlice(key, swapped=True)))
    return found


def _flat(name: str) -> str:
    return name.replace(".", "_")


_FLAT_PREFIXES = tuple(_flat(prefix) for prefix in PREFIXES)
