"""The VAE over several ranks: decoding in bands of rows equals the single-device decode."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from thread_ranks import on_ranks

from comfy_tp.core.checkpoint.files import Checkpoint
from comfy_tp.core.errors import CheckpointError, InputError, UnsupportedError
from comfy_tp.core.load import load_opened
from comfy_tp.core.parts import vae as tp_vae
from comfy_tp.core.tp.collectives import Ranks

SMALL = {
    "block_out_channels": (16, 32, 32, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 32,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(0)
    vae = AutoencoderKLFlux2(**SMALL).eval()
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    path = tmp_path_factory.mktemp("pipeline") / "vae"
    vae.save_pretrained(path)
    return path


def load(folder, ranks: Ranks):
    return load_opened(tp_vae.open_vae(Checkpoint.open(folder)), ranks)[0]


def by_diffusers(folder, latents: torch.Tensor) -> torch.Tensor:
    """The pixels that diffusers' own Flux2 pipeline makes of normalised latents."""
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline

    vae = AutoencoderKLFlux2.from_pretrained(folder)
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    with torch.inference_mode():
        return vae.decode(Flux2Pipeline._unpatchify_latents(latents * deviation + mean), return_dict=False)[0]


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 5, 7), (1, 3, 9)], ids=str)
def test_decoding_in_bands_equals_the_single_device_decode(folder, degree, shape):
    batch, height, width = shape
    latents = torch.randn(batch, 128, height, width, generator=torch.Generator().manual_seed(1))
    want = by_diffusers(folder, latents)
    for pixels in on_ranks(degree, lambda ranks: tp_vae.decode(load(folder, ranks), latents, ranks)):
        assert pixels.shape == (batch, 3, 16 * height, 16 * width)
        assert (pixels - want).abs().max().item() <= 1e-4 * want.abs().max().item()


def test_a_picture_with_fewer_rows_than_ranks_is_decoded_whole(folder):
    latents = torch.randn(1, 128, 1, 4, generator=torch.Generator().manual_seed(1))
    for pixels in on_ranks(4, lambda ranks: tp_vae.decode(load(folder, ranks), latents, ranks)):
        assert torch.allclose(pixels, by_diffusers(folder, latents), atol=1e-5)


def test_a_decoder_is_left_as_it_was(folder):
    latents = torch.randn(1, 128, 4, 4)

    def work(ranks: Ranks) -> bool:
        vae = load(folder, ranks)
        tp_vae.decode(vae, latents, ranks)
        return any("forward" in module.__dict__ for module in vae.modules())

    assert on_ranks(2, work) == [False, False]


def test_encoding_gives_the_latents_of_the_pipeline(folder):
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline

    pixels = torch.rand(1, 3, 48, 35) * 2 - 1
    whole = AutoencoderKLFlux2.from_pretrained(folder)
    with torch.inference_mode():
        want = Flux2Pipeline._patchify_latents(whole.encode(pixels[..., :32]).latent_dist.mode())
        mean = whole.bn.running_mean.view(1, -1, 1, 1)
        want = (want - mean) / torch.sqrt(
            whole.bn.running_var.view(1, -1, 1, 1) + whole.config.batch_norm_eps
        )
    assert torch.allclose(tp_vae.encode(load(folder, Ranks.single()), pixels), want, atol=1e-5)


def test_latents_of_another_vae_are_refused(folder):
    vae = load(folder, Ranks.single())
    with pytest.raises(InputError, match="16 channels, but this VAE takes 128"):
        tp_vae.decode(vae, torch.zeros(1, 16, 4, 4), Ranks.single())


def test_an_image_smaller_than_one_latent_is_refused(folder):
    with pytest.raises(InputError, match="1x1 pixels, but the VAE needs at least 16x16"):
        tp_vae.encode(load(folder, Ranks.single()), torch.zeros(1, 3, 1, 1))


def test_a_folder_of_another_class_is_refused(tmp_path, folder):
    from flux2_files import small_flux2

    small_flux2().save_pretrained(tmp_path / "transformer")
    with pytest.raises(
        UnsupportedError, match="Flux2Transformer2DModel; the ranks decode with AutoencoderKLFlux2"
    ):
        tp_vae.open_vae(Checkpoint.open(tmp_path / "transformer"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_per_block": 10**6}, "`layers_per_block` is 1000000, but the weights are those of 4 layers"),
        (
            {"block_out_channels": [16] * 100_000},
            "`block_out_channels` lists 100000 values, but there are only",
        ),
        ({"block_out_channels": [10**9]}, r"is \[1000000000\], more than all weights have bytes"),
        ({"patch_size": [10**5, 10**4]}, r"'bn.running_mean' has shape \[128\], expected \[32000000000\]"),
        ({"block_out_channels": []}, r"makes no AutoencoderKLFlux2 \(IndexError: "),
        ({"norm_num_groups": 0}, r"makes no AutoencoderKLFlux2 \(ZeroDivisionError: "),
        ({"in_channels": -1}, r"makes no AutoencoderKLFlux2 \(RuntimeError: .*negative dimension"),
        ({"sample_size": "x"}, r"makes no AutoencoderKLFlux2 \(TypeError: "),
        ({"_class_name": ["a"]}, r"`_class_name` is \['a'\], which is no class"),
    ],
    ids=repr,
)
def test_a_config_json_that_makes_no_vae_is_named(tmp_path, folder, changes, message):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        tp_vae.open_vae(Checkpoint.open(tmp_path))
    said = str(caught.value)
    assert str(tmp_path) in said and ("ownload it again" in said or "choose the whole model's file" in said)


def test_a_vae_without_one_of_its_tensors_is_refused(tmp_path, folder):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    del tensors["decoder.conv_out.weight"]
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensor 'decoder\.conv_out\.weight'"):
        tp_vae.open_vae(Checkpoint.open(tmp_path))
