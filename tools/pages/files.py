"""docs/files.md: every kind of model file, how it is read, and what a rank then holds, computed from the plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ...core.models import architecture_named
from ...core.planning.compare import resolved_for
from ...core.planning.propose import legal, meta_model

DEGREES = (1, 2, 4, 8)
FILES = "tests/test_single_files.py::"
NODES = "tests/test_nodes_files.py::"
MORE_NODES = "tests/test_nodes_other_models.py::"
STOCK_FP8 = "test_an_fp8_file_gives_what_comfyuis_own_fp8_layers_give"
OTHERS = MORE_NODES + "test_a_single_file_gives_what_comfyuis_own_loader_gives"
OTHER_FOLDERS = MORE_NODES + "test_a_diffusers_folder_gives_the_image_of_the_single_file"
FP8_STYLES = FILES + "test_fp8_files_keep_their_weights_and_compute_exactly"

# Which weights a kind of file stores in fp8, by the model's parameter names. Everything else is bf16.
FEED_FORWARD = (  # of FLUX.2 "fp8mixed": both feed-forwards and the single blocks; attention of the double blocks is not
    "*.ff.linear_*.weight",
    "*.ff_context.linear_*.weight",
    "single_transformer_blocks.*.attn.to_*.weight",
)
BLOCKS = ("*transformer_blocks.*.weight",)  # of klein "fp8": every Linear inside a block
LINEARS = ("*.weight",)  # of a plain cast, and of the older scaled files: every Linear


@dataclass(frozen=True)
class FileKind:
    """One row: `published` names the configuration in `architecture.published`; `fp8` are patterns of Linears."""

    title: str
    example: str
    architecture: str
    published: str
    stored: str
    tested: str
    fp8: tuple[str, ...] = ()
    degrees: tuple[int, ...] = field(default=DEGREES)


KINDS = (
    FileKind(
        "FLUX.2-dev, single file",
        "flux2-dev.safetensors",
        "flux2",
        "FLUX.2-dev",
        "bf16",
        NODES + "test_a_single_file_gives_what_comfyuis_own_loader_gives",
    ),
    FileKind(
        "FLUX.2-dev, fp8 mixed",
        "flux2_dev_fp8mixed.safetensors",
        "flux2",
        "FLUX.2-dev",
        "fp8 with scales, and bf16",
        NODES + STOCK_FP8,
        FEED_FORWARD,
    ),
    FileKind(
        "FLUX.2-dev, plain fp8 cast",
        "any file cast to float8_e4m3fn or e5m2",
        "flux2",
        "FLUX.2-dev",
        "fp8 without scales",
        FP8_STYLES,
        LINEARS,
    ),
    FileKind(
        "FLUX.2-dev, older scaled fp8",
        "a file with `scaled_fp8`",
        "flux2",
        "FLUX.2-dev",
        "fp8 with scales",
        NODES + STOCK_FP8,
        LINEARS,
    ),
    FileKind(
        "FLUX.2, diffusers folder",
        "transformer/ with config.json",
        "flux2",
        "FLUX.2-dev",
        "bf16",
        "tests/test_nodes_sampling.py::test_ksampler_equals_comfyuis_own_flux2",
    ),
    FileKind(
        "FLUX.2 klein 9B, fp8",
        "flux-2-klein-9b-fp8.safetensors, flux-2-klein-base-9b-fp8.safetensors",
        "flux2",
        "FLUX.2-klein-9B",
        "fp8 with scales, and bf16",
        NODES + STOCK_FP8,
        BLOCKS,
    ),
    FileKind(
        "FLUX.2 klein 4B, single file",
        "flux-2-klein-4b.safetensors, flux-2-klein-base-4b.safetensors",
        "flux2",
        "FLUX.2-klein-4B",
        "bf16",
        NODES + "test_klein_without_guidance_gives_what_comfyuis_own_loader_gives",
    ),
    FileKind(
        "FLUX.2 klein 4B, fp8",
        "flux-2-klein-4b-fp8.safetensors, flux-2-klein-base-4b-fp8.safetensors",
        "flux2",
        "FLUX.2-klein-4B",
        "fp8 with scales, and bf16",
        NODES + STOCK_FP8,
        BLOCKS,
    ),
    FileKind("FLUX.1, single file", "flux1-dev.safetensors", "flux", "FLUX.1-dev", "bf16", OTHERS),
    FileKind(
        "FLUX.1, plain fp8 cast",
        "flux1-dev-fp8-e4m3fn.safetensors",
        "flux",
        "FLUX.1-dev",
        "fp8 without scales",
        MORE_NODES + "test_a_plain_fp8_cast_gives_what_its_values_give_in_comfyui",
        LINEARS,
    ),
    FileKind(
        "FLUX.1, diffusers folder",
        "transformer/ with config.json",
        "flux",
        "FLUX.1-dev",
        "bf16",
        OTHER_FOLDERS,
    ),
    FileKind(
        "Qwen-Image, single file",
        "qwen_image_bf16.safetensors, qwen_image_edit_2509_bf16.safetensors",
        "qwenimage",
        "Qwen-Image",
        "bf16",
        OTHERS,
    ),
    FileKind(
        "Qwen-Image, plain fp8 cast",
        "qwen_image_fp8_e4m3fn.safetensors",
        "qwenimage",
        "Qwen-Image",
        "fp8 without scales",
        MORE_NODES + "test_a_plain_fp8_cast_gives_what_its_values_give_in_comfyui",
        LINEARS,
    ),
    FileKind(
        "Qwen-Image, diffusers folder",
        "transformer/ with config.json",
        "qwenimage",
        "Qwen-Image",
        "bf16",
        OTHER_FOLDERS,
    ),
)

HEAD = """# Model files

Which files load, how they are read, and what a rank then holds. This page is printed by
`comfy-tp plan --files`; do not edit it.

A model is recognised from the names and shapes of its tensors alone, never from the file's name; the names may begin
with `diffusion_model.` or `model.diffusion_model.`, in any order. Every rank reads only its own byte ranges.

| kind | files | stored as | loads | sharded on read | {} | tested by |
|---|---|---|---|---|{}---|
"""
REFUSED = (
    (
        "nvfp4, mxfp8, int8 and other packed formats",
        "flux2-dev-nvfp4.safetensors",
        FILES + "test_an_unknown_quantisation_is_refused_by_name",
    ),
    (
        "files that are not safetensors",
        ".gguf, .ckpt, .pt",
        "tests/test_checkpoint_files.py::test_R16_other_formats_are_refused_by_name",
    ),
)
FOOT = """
GB are 10^9 bytes of the transformer's weights on one rank, at the degree above the column, without activations, text
encoder and VAE; "-" marks a degree that does not divide the model. fp8 weights stay fp8 on the ranks. Load TP Model makes
a MODEL of every kind; they load from Python (`from_pretrained`) and in `comfy-tp verify` as well.

## fp8

Four ways of declaring it are read: the header's `_quantization_metadata`, a `.comfy_quant` tensor per layer, the older
`scaled_fp8` with `.scale_weight`, and a plain cast without scales. Layers may differ. A scale is one number per layer
and belongs to every shard of it alike.

The input `dtype` of Load TP Model: `default` keeps what the file holds; a float dtype casts while reading (fp8 is
scaled); `float8_e4m3fn` quantises the sharded layers of a float file while it is read.

## Check a file

```
comfy-tp verify FILE --tp 2
```

compares the shards with the whole model, block by block. A file that is truncated, damaged, of another model or of
another shape is refused before anything is allocated, with the tensor's name.
"""


def page() -> str:
    """docs/files.md."""
    columns = " | ".join("GB whole" if degree == 1 else f"at {degree}" for degree in DEGREES)
    text = HEAD.format(columns, "---|" * len(DEGREES))
    for kind in KINDS:
        held = [f"{size / 1e9:.2f}" if size is not None else "-" for size in resident(kind)]
        cells = [kind.title, kind.example, kind.stored, "yes", "yes"]
        text += f"| {' | '.join([*cells, *held, f'`{kind.tested}`'])} |\n"
    for title, example, tested in REFUSED:
        blank = ["-"] * len(DEGREES)
        text += f"| {' | '.join([title, example, '-', 'refused by name', '-', *blank, f'`{tested}`'])} |\n"
    return text + FOOT


def resident(kind: FileKind) -> Iterator[int | None]:
    """Bytes of the weights on one rank at each of the kind's degrees; None for a degree that is not legal."""

    architecture = architecture_named(kind.architecture)
    config = architecture.published[kind.published]
    model = meta_model(architecture.load_class(config), config)
    possible = legal(model, architecture.plan_of(model), architecture.heads(model.config))
    for degree in kind.degrees:
        if degree not in possible:
            yield None
            continue
        specs = resolved_for(model, architecture, degree).specs
        yield sum(
            math.prod(spec.local_shape) * _itemsize(kind, name, spec.shape) for name, spec in specs.items()
        )


def _itemsize(kind: FileKind, name: str, shape: tuple[int, ...]) -> int:
    """1 for a matrix that the kind stores in fp8, else 2."""
    return 1 if len(shape) == 2 and any(fnmatchcase(name, pattern) for pattern in kind.fp8) else 2
