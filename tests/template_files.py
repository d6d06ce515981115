"""Small stand-ins of the files that the official FLUX.2 templates name: random weights, the real files' layouts and widths.

The VAEs are not small: ComfyUI fixes their sizes. Only the small decoder's width is the file's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from flux2_files import QUANTISED, fp8_tensors, save_single_file, single_file_tensors, small_flux2

HEAD = 128  # as ComfyUI takes it for granted
DEV, KLEIN_4B, KLEIN_9B = 15360, 7680, 12288  # widths of the conditioning
EVERY_LINEAR = (*QUANTISED, "attn.qkv", "attn.proj")
Tensors = dict[str, torch.Tensor]


def transformer(seed: int, width: int, heads: int = 2, *, guidance: bool = False) -> Tensors:
    """The weights of a FLUX.2 by the names of its single file, in bfloat16."""
    model = small_flux2(
        seed,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=HEAD,
        num_attention_heads=heads,
        joint_attention_dim=width,
        axes_dims_rope=(HEAD // 4,) * 4,
        guidance_embeds=guidance,
    )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return {name: tensor.bfloat16() for name, tensor in single_file_tensors(model).items()}


# Name -> seed, width, heads, layers in fp8.
TRANSFORMERS = {
    "flux2_dev_fp8mixed": (1, DEV, 4, QUANTISED),
    "flux-2-klein-4b": (2, KLEIN_4B, 2, ()),
    "flux-2-klein-base-4b": (3, KLEIN_4B, 2, ()),
    "flux-2-klein-4b-fp8": (4, KLEIN_4B, 2, EVERY_LINEAR),
    "flux-2-klein-base-4b-fp8": (5, KLEIN_4B, 2, EVERY_LINEAR),
    "flux-2-klein-9b-fp8": (6, KLEIN_9B, 4, EVERY_LINEAR),
    "flux-2-klein-base-9b-fp8": (7, KLEIN_9B, 4, EVERY_LINEAR),
    "flux-2-klein-9b-kv-fp8": (8, KLEIN_9B, 4, EVERY_LINEAR),
}
EXACT = "exact-"  # begins the name of a file with what the fp8 weights of another are worth
LORAS = {"Flux_2-Turbo-LoRA_comfyui": ("lora_A", "lora_B"), "Flux2TurboComfyv2": ("lora_down", "lora_up")}
VAES = {"flux2-vae": 128, "full_encoder_small_decoder": 96}  # the decoder's width


def width_of(file: str) -> int:
    """The width of the conditioning for a transformer's file."""
    return TRANSFORMERS[file.removeprefix(EXACT).removesuffix(".safetensors")][1]


def write_files(models: Path) -> None:
    """Write them all into ComfyUI's models/, those that are there excepted."""
    for name, (seed, width, heads, quantised) in TRANSFORMERS.items():
        if (models / "diffusion_models" / f"{name}.safetensors").exists():
            continue
        plain = transformer(seed, width, heads, guidance=width == DEV)
        held, metadata, exact = fp8_tensors(plain, "metadata", quantised=quantised)
        _write(models / "diffusion_models" / f"{name}.safetensors", held, metadata if quantised else None)
        if width == DEV:
            _write(models / "diffusion_models" / f"{EXACT}{name}.safetensors", exact)
    for name, halves in LORAS.items():
        _write(models / "loras" / f"{name}.safetensors", turbo_lora(*halves))
    for name, decoder in VAES.items():
        _write(models / "vae" / f"{name}.safetensors", vae(decoder))


def _write(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_single_file(path, tensors, metadata)


def turbo_lora(down: str, up: str) -> Tensors:
    """A LoRA of every Linear in dev's blocks. The names of the halves are one of two fashions; one has an alpha."""
    random = torch.Generator().manual_seed(20)
    found = {}
    for name, weight in transformer(1, DEV, 4, guidance=True).items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.endswith(EVERY_LINEAR):
            rows, columns = weight.shape
            lora = f"diffusion_model.{module}"
            found[f"{lora}.{down}.weight"] = torch.randn(4, columns, generator=random) / columns**0.5
            found[f"{lora}.{up}.weight"] = torch.randn(rows, 4, generator=random) * 0.4
            if down == "lora_down":
                found[f"{lora}.alpha"] = torch.tensor(2.0)
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def vae(decoder: int) -> Tensors:
    """A FLUX.2 VAE by the names of BFL's own file, with a decoder of that width."""
    random = torch.Generator().manual_seed(30)
    made: Tensors = {}
    for name, shape in (*_encoder(), *_decoder(decoder)):
        fan_in = torch.Size(shape[1:]).numel()
        made[f"{name}.weight"] = torch.randn(shape, generator=random).mul_(fan_in**-0.5).bfloat16()
        made[f"{name}.bias"] = torch.zeros(shape[0], dtype=torch.bfloat16)
        if len(shape) == 1:  # a norm
            made[f"{name}.weight"].fill_(1.0)
    made["bn.running_mean"] = torch.randn(128, generator=random) * 0.1
    made["bn.running_var"] = torch.rand(128, generator=random) + 0.5
    made["bn.num_batches_tracked"] = torch.tensor(1)
    return made


Layer = tuple[str, tuple[int, ...]]


def _encoder() -> Iterator[Layer]:
    widths = (128, 256, 512, 512)
    yield "encoder.conv_in", (128, 3, 3, 3)
    before = 128
    for level, width in enumerate(widths):
        for block in range(2):
            yield from _block(f"encoder.down.{level}.block.{block}", before, width)
            before = width
        if level < 3:
            yield f"encoder.down.{level}.downsample.conv", (width, width, 3, 3)
    yield from _middle("encoder", 512)
    yield "encoder.norm_out", (512,)
    yield "encoder.conv_out", (64, 512, 3, 3)
    yield "encoder.quant_conv", (64, 64, 1, 1)


def _decoder(width: int) -> Iterator[Layer]:
    widths = (width, 2 * width, 4 * width, 4 * width)
    before = widths[3]
    yield "decoder.post_quant_conv", (32, 32, 1, 1)
    yield "decoder.conv_in", (before, 32, 3, 3)
    yield from _middle("decoder", before)
    for level in (3, 2, 1, 0):
        for block in range(3):
            yield from _block(f"decoder.up.{level}.block.{block}", before, widths[level])
            before = widths[level]
        if level:
            yield f"decoder.up.{level}.upsample.conv", (before, before, 3, 3)
    yield "decoder.norm_out", (width,)
    yield "decoder.conv_out", (3, width, 3, 3)


def _block(name: str, into: int, out: int) -> Iterator[Layer]:
    yield f"{name}.norm1", (into,)
    yield f"{name}.conv1", (out, into, 3, 3)
    yield f"{name}.norm2", (out,)
    yield f"{name}.conv2", (out, out, 3, 3)
    if into != out:
        yield f"{name}.nin_shortcut", (out, into, 1, 1)


def _middle(side: str, width: int) -> Iterator[Layer]:
    yield from _block(f"{side}.mid.block_1", width, width)
    yield f"{side}.mid.attn_1.norm", (width,)
    for part in ("q", "k", "v", "proj_out"):
        yield f"{side}.mid.attn_1.{part}", (width, width, 1, 1)
    yield from _block(f"{side}.mid.block_2", width, width)
