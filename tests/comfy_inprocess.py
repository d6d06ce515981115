"""ComfyUI's own modules inside the test process, on the CPU, and a small FLUX.2 to run them on.

Importing `comfy` reads the command line once and for all, so this is the only place that does it first.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SMALL = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 48,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (8, 8, 8, 8),
    "rope_theta": 2000,
}


@functools.cache
def import_comfy() -> Path:
    """Make `comfy`, `nodes`, `folder_paths` importable as in ``main.py --cpu``; returns the base folder in use."""
    from comfy_tp.comfyui import comfyui_path

    base = Path(tempfile.mkdtemp(prefix="comfy-tp-inprocess-"))
    owner = os.getpid()
    # A process that was forked from this one has the same list of what to do at its end.
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(base, ignore_errors=True))
    for name in (
        "models/diffusion_models",
        "models/diffusers",
        "input",
        "output",
        "temp",
        "user",
        "custom_nodes",
    ):
        (base / name).mkdir(parents=True)
    sys.path.append(str(comfyui_path()))
    given, sys.argv = sys.argv, ["main.py", "--cpu", "--base-directory", str(base)]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args  # noqa: F401
        import comfy.model_management  # noqa: F401
        import folder_paths  # noqa: F401
    finally:
        sys.argv = given
    return base


def save_small_model(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Save a small FLUX.2 of random weights as a diffusers model folder."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(seed)
    model = Flux2Transformer2DModel(**{**SMALL, **changes})
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    return folder


def bfl_state(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a diffusers folder under the names of the single file."""
    from safetensors.torch import load_file

    from comfy_tp.core.models.flux2_layout import BFL_FLUX2

    parts: dict[str, dict[int, torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            sources = BFL_FLUX2.sources(name)
            assert sources is not None, name
            for (names, part, _count), piece in zip(sources, tensor.chunk(len(sources)), strict=True):
                parts.setdefault(names[0], {})[part] = piece
    return {name: torch.cat([found[part] for part in sorted(found)]) for name, found in parts.items()}


def native_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """ComfyUI's own MODEL (a stock ModelPatcher) with the weights of a diffusers folder."""
    import json

    import comfy.model_patcher
    import comfy.supported_models

    from comfy_tp.comfy_tp_nodes.families.flux2 import unet_config

    written = json.loads((folder / "config.json").read_text())
    config = comfy.supported_models.Flux2(unet_config(written))
    config.set_inference_dtype(dtype, None)
    model = config.get_model({}, "", device="cpu")
    state = config.process_unet_state_dict(bfl_state(folder))  # as ComfyUI's own loader names it
    missing, unexpected = model.diffusion_model.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, in L2."""
    return float((found - expected).norm() / expected.norm())


def save_lora(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Write a LoRA file where ComfyUI finds it."""
    from safetensors.torch import save_file

    folder = import_comfy() / "models/loras"
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    import folder_paths

    folder_paths.filename_list_cache.clear()
    return name


def random_lora(
    name: str, matrices: dict[str, torch.Tensor], *, seed: int, rank: int = 4, size: float = 0.2
) -> str:
    """A LoRA of every matrix of a model, by the single file's names without `.weight`, in ComfyUI's keys, with alpha."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in matrices.items():
        rows, columns = weight.shape
        lora = f"diffusion_model.{module}"
        tensors[f"{lora}.lora_up.weight"] = torch.randn(rows, rank, generator=generator) * size
        tensors[f"{lora}.lora_down.weight"] = torch.randn(rank, columns, generator=generator) * size
        tensors[f"{lora}.alpha"] = torch.tensor(2.0)
    return save_lora(name, tensors)


@functools.cache
def small_model() -> Path:
    """The folder of the small FLUX.2 that most tests share, among ComfyUI's diffusion_models."""
    return save_small_model(import_comfy() / "models/diffusion_models/small-flux2")


@functools.cache
def native() -> Any:
    """ComfyUI's own MODEL of `small_model`."""
    import_comfy()
    return native_model(small_model())


@functools.cache
def tp_model(degree: int = 2) -> Any:
    """The MODEL of `small_model` from Load TP Model, on ranks that all tests share."""
    import_comfy()
    small_model()
    return load_tp("small-flux2", degree)


def load_tp(
    name: str, degree: int = 2, *, policy: str = "keep", dtype: str = "default", devices: str = "cpu"
) -> Any:
    """What Load TP Model hands on."""
    from comfy_tp.comfy_tp_nodes.nodes.load_model import LoadTPModel

    with torch.inference_mode():
        return LoadTPModel.execute(name, degree, devices, dtype, policy).args[0]


def conditioning(length: int = 77, *, seed: int = 1, batch: int = 1, width: int = 48, **values: Any) -> list:
    """A CONDITIONING as FLUX.2's text encoder makes it, of random values."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(batch, length, width, generator=generator), {"pooled_output": None, **values}]]


def latent(height: int = 4, width: int = 4, *, batch: int = 1, seed: int | None = None, **more: Any) -> dict:
    """A LATENT; empty without a seed, else of random values."""
    if seed is None:
        return {"samples": torch.zeros(batch, 128, height, width), **more}
    generator = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(batch, 128, height, width, generator=generator), **more}


def ksampler(model: Any, positive: list, negative: list, into: dict, **changes: Any) -> torch.Tensor:
    """What the stock KSampler node returns: samples [B, 128, h, w]."""
    import nodes

    inputs = {"seed": 7, "steps": 3, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", **changes}
    with torch.inference_mode():
        result = nodes.common_ksampler(model, positive=positive, negative=negative, latent=into, **inputs)
        return result[0]["samples"]


@pytest.fixture(scope="session")
def in_comfy() -> Iterator[Path]:
    """ComfyUI's base folder; the ranks that tests have started in this process end with the session."""
    yield import_comfy()
    from comfy_tp.comfy_tp_nodes import groups

    tp_model.cache_clear()
    groups.close_all()
