"""Load TP CLIP and Load TP VAE under ComfyUI's own nodes, beside diffusers' pipeline in one process."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    relative_error,
    save_small_model,
)
from random_pipeline import save_pipeline

from comfy_tp.core.errors import ConfigError, InputError, UnsupportedError

pytestmark = [pytest.mark.usefixtures("in_comfy"), pytest.mark.timeout(600)]

NAME = "small-pipeline"
PROMPT = "a red circle on a blue background"
SAME = 1e-5  # float32; two ranks add in another order than one process
ENDS = (0, 0xFFFFFFFFFFFFFFFF)  # of a seed


@pytest.fixture(scope="module")
def folder(in_comfy) -> Path:  # noqa: F811
    """A whole pipeline among ComfyUI's diffusers folders; its VAE has random weights everywhere."""
    from diffusers import AutoencoderKLFlux2

    path = in_comfy / "models/diffusers" / NAME
    if path.is_dir():
        return path
    save_pipeline(path)
    torch.manual_seed(5)
    vae = AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32, 32), layers_per_block=1, norm_num_groups=8, latent_channels=32
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    vae.save_pretrained(path / "vae")
    return path


def load_clip(name: str = NAME, degree: int = 2, policy: str = "keep") -> Any:
    from comfy_tp.comfy_tp_nodes.nodes.load_clip import LoadTPCLIP

    with torch.inference_mode():
        return LoadTPCLIP.execute(name, degree, "cpu", "float32", policy).args[0]


def load_vae(name: str = NAME, degree: int = 2, policy: str = "keep") -> Any:
    from comfy_tp.comfy_tp_nodes.nodes.load_vae import LoadTPVAE

    with torch.inference_mode():
        return LoadTPVAE.execute(name, degree, "cpu", "float32", policy).args[0]


@pytest.fixture(scope="module")
def clip(folder) -> Any:
    return load_clip()


@pytest.fixture(scope="module")
def vae(folder) -> Any:
    return load_vae()


def stock(node: str, *inputs: Any, **named: Any) -> Any:
    """The first output of a stock node."""
    import nodes

    kind = getattr(nodes, node)
    with torch.inference_mode():
        return getattr(kind(), kind.FUNCTION)(*inputs, **named)[0]


def encoded(clip: Any, prompt: str) -> torch.Tensor:
    ((tensor, values),) = stock("CLIPTextEncode", clip, prompt)
    assert values["pooled_output"] is None
    return tensor


class Pipeline:
    """diffusers' own classes on the same folder, whole in this process."""

    def __init__(self, folder: Path):
        from diffusers import AutoencoderKLFlux2
        from transformers import AutoProcessor, Mistral3ForConditionalGeneration

        encoder = Mistral3ForConditionalGeneration.from_pretrained(folder / "text_encoder")
        self.encoder = encoder.float().eval()
        self.tokenizer = AutoProcessor.from_pretrained(folder / "tokenizer")
        self.vae = AutoencoderKLFlux2.from_pretrained(folder / "vae").eval()

    def embeds(self, prompt: str) -> torch.Tensor:
        from diffusers import Flux2Pipeline

        with torch.inference_mode():
            return Flux2Pipeline._get_mistral_3_small_prompt_embeds(
                self.encoder, self.tokenizer, [prompt], max_sequence_length=512
            )

    def _normal(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.vae.bn.running_mean.view(1, -1, 1, 1)
        return mean, torch.sqrt(self.vae.bn.running_var.view(1, -1, 1, 1) + self.vae.config.batch_norm_eps)

    def decode(self, latents: torch.Tensor, **_: Any) -> torch.Tensor:
        from diffusers import Flux2Pipeline

        mean, deviation = self._normal()
        with torch.inference_mode():
            return self.vae.decode(Flux2Pipeline._unpatchify_latents(latents * deviation + mean)).sample

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        from diffusers import Flux2Pipeline

        mean, deviation = self._normal()
        with torch.inference_mode():
            found = Flux2Pipeline._patchify_latents(self.vae.encode(pixels).latent_dist.mode())
            return (found - mean) / deviation


@pytest.fixture(scope="module")
def pipeline(folder) -> Pipeline:
    return Pipeline(folder)


@pytest.fixture(scope="module")
def single(vae, pipeline) -> Any:
    """The same VAE whose first stage model is diffusers' own in this process."""

    class Local(torch.nn.Module):
        decode = staticmethod(pipeline.decode)
        encode = staticmethod(pipeline.encode)

    local = copy.copy(vae)
    local.first_stage_model = Local()
    for name in ("decode", "decode_tiled", "encode", "encode_tiled"):
        import comfy.sd

        setattr(local, name, getattr(comfy.sd.VAE, name).__get__(local))
    return local


def image(height: int = 48, width: int = 64, seed: int = 3) -> torch.Tensor:
    """An IMAGE [1, H, W, 3] of random values in 0..1."""
    return torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, "", "a (red:1.5) circle [IMG] BREAK {x|y}", "círculo 赤 \U0001f534"],
    ids=["plain", "empty", "brackets", "other scripts"],
)
def test_cliptextencode_gives_the_prompt_embeds_of_the_pipeline(clip, pipeline, prompt):
    found, want = encoded(clip, prompt), pipeline.embeds(prompt)
    assert found.shape == want.shape == (1, 512, 192)
    assert relative_error(found, want) <= SAME


def test_a_prompt_of_more_than_512_tokens_is_cut_as_the_pipeline_does_and_the_log_says_so(
    clip, pipeline, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    prompt = "a red circle " * 300
    with caplog.at_level(logging.WARNING):
        found = encoded(clip, prompt)
    assert "FLUX.2 reads 512, so the last" in caplog.text and "are cut off" in caplog.text
    assert "indexing errors" not in caplog.text
    assert relative_error(found, pipeline.embeds(prompt)) <= SAME


def test_a_clone_is_a_plain_clip_that_encodes_the_same(clip):
    import comfy.sd

    clone = clip.clone()
    assert type(clone) is comfy.sd.CLIP
    assert encoded(clone, PROMPT).equal(encoded(clip, PROMPT))
    assert clone.patcher.sharded is clip.patcher.sharded


def test_a_second_prompt_reads_no_weights(clip):
    encoded(clip, PROMPT)
    sharded = clip.patcher.sharded
    loads, remote = sharded.loads, sharded.remote
    encoded(load_clip(), "make it green")
    assert sharded.loads == loads and sharded.remote is remote


def test_a_degree_that_does_not_divide_the_key_value_heads_gives_the_same_embeds(folder, clip):
    alone = load_clip(degree=3)
    assert relative_error(encoded(alone, PROMPT), encoded(clip, PROMPT)) <= SAME


@pytest.mark.parametrize("size", [(5, 7), (4, 4)], ids=str)
def test_vaedecode_gives_the_picture_of_one_process(vae, single, size):
    samples = latent(*size, batch=2, seed=4)
    found = stock("VAEDecode", vae, samples)
    assert found.shape == (2, 16 * size[0], 16 * size[1], 3)
    assert float((found - stock("VAEDecode", single, samples)).abs().max()) <= 1e-4
    whole = single.first_stage_model.decode(samples["samples"])
    assert float((found - ((whole + 1) / 2).clamp(0, 1).movedim(1, -1)).abs().max()) <= 1e-4


def test_vaeencode_gives_the_latent_of_one_process(vae, single):
    pixels = image(50, 67)  # cut to 48x64 around its middle
    found = stock("VAEEncode", vae, pixels)["samples"]
    assert found.shape == (1, 128, 3, 4)
    assert relative_error(found, stock("VAEEncode", single, pixels)["samples"]) <= SAME


def test_vaedecodetiled_and_vaeencodetiled_give_what_the_stock_tiling_gives(vae, single):
    samples, pixels = latent(8, 10, seed=6), image(128, 160)
    tiles = {"tile_size": 64, "overlap": 16}
    found = stock("VAEDecodeTiled", vae, samples, **tiles)
    assert found.shape == (1, 128, 160, 3)
    assert float((found - stock("VAEDecodeTiled", single, samples, **tiles)).abs().max()) <= 1e-4
    found = stock("VAEEncodeTiled", vae, pixels, **tiles)["samples"]
    assert found.shape == (1, 128, 8, 10)
    assert relative_error(found, stock("VAEEncodeTiled", single, pixels, **tiles)["samples"]) <= SAME


def test_release_after_use_frees_the_encoder_and_the_next_prompt_loads_it_again(folder, clip):
    kept = encoded(clip, PROMPT)
    released = load_clip(policy="release after use")
    sharded = released.patcher.sharded
    assert encoded(released, PROMPT).equal(kept)
    assert not sharded.loaded
    assert encoded(released, PROMPT).equal(kept)
    assert not sharded.loaded


def test_release_after_use_loads_the_vae_once_for_all_tiles(folder):
    released = load_vae(policy="release after use")
    sharded = released.patcher.sharded
    sharded.unload()
    loads = sharded.loads
    stock("VAEDecodeTiled", released, latent(8, 10, seed=6), tile_size=64, overlap=16)
    assert sharded.loads == loads + 1 and not sharded.loaded
    stock("VAEEncode", released, image())
    assert sharded.loads == loads + 2 and not sharded.loaded


def test_unload_models_frees_encoder_and_vae_and_they_come_back(clip, vae):
    import comfy.model_management as management

    before = encoded(clip, PROMPT), stock("VAEDecode", vae, latent(seed=4))
    management.unload_all_models()
    assert not clip.patcher.sharded.loaded and not vae.patcher.sharded.loaded
    assert encoded(clip, PROMPT).equal(before[0])
    assert stock("VAEDecode", vae, latent(seed=4)).equal(before[1])


@pytest.mark.parametrize("load", [load_clip, load_vae])
def test_what_the_ranks_hold_on_further_devices_is_counted_and_gets_room_there(folder, monkeypatch, load):
    import comfy.model_management as management

    from comfy_tp.comfy_tp_nodes.component import ComponentPatcher

    own = load().patcher
    sharded = own.model.sharded
    sharded.load()
    # The shards pass for lying on two GPUs.
    devices = ("cuda:0", "cuda:1")
    monkeypatch.setattr(sharded, "placement", dataclasses.replace(sharded.placement, devices=devices))
    monkeypatch.setattr(management, "get_torch_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(management, "soft_empty_cache", lambda force=False: None)
    asked = []

    def free_memory(device=None, torch_free_too=False):
        return (1 << 40, 0) if torch_free_too else 1 << 40

    monkeypatch.setattr(management, "get_free_memory", free_memory)
    free = management.free_memory
    monkeypatch.setattr(
        management,
        "free_memory",
        lambda need, device, *rest, **named: (
            asked.append((str(device), need)) or free(need, device, *rest, **named)
        ),
    )
    patcher = ComponentPatcher.of(own.model)
    (stub,) = patcher.get_additional_models()
    assert [patcher.model_size(), stub.model_size()] == sharded.info.resident_bytes
    decode = 7 << 30  # what the work itself needs, on every device
    management.load_models_gpu([patcher], memory_required=decode)
    listed = {entry.model: str(entry.device) for entry in management.current_loaded_models}
    assert listed[patcher] == "cuda:0" and listed[stub] == "cuda:1"
    assert all(any(device == name and need >= decode for name, need in asked) for device in devices)
    management.unload_all_models()
    assert not sharded.loaded


def test_the_text_encoder_of_another_model_is_refused_with_both_widths(in_comfy, clip):  # noqa: F811
    path = in_comfy / "models/diffusion_models/narrow-flux2"
    if not path.is_dir():
        save_small_model(path)
    model = load_tp("narrow-flux2")
    text = stock("CLIPTextEncode", clip, PROMPT)
    with pytest.raises(InputError, match="The conditioning is 192 wide, but this model takes 48"):
        ksampler(model, text, text, latent(), steps=1)


def test_a_latent_of_another_model_is_refused_by_the_vae(vae):
    with pytest.raises(InputError, match="The latent has 16 channels, but this VAE takes 128"):
        stock("VAEDecode", vae, {"samples": torch.zeros(1, 16, 8, 8)})
    assert stock("VAEDecode", vae, latent(seed=4)).shape == (1, 64, 64, 3)


def test_a_picture_smaller_than_a_latent_position_is_refused_with_its_size(vae):
    with pytest.raises(InputError, match="The image is 1x1 pixels, but the VAE needs at least 16x16"):
        stock("VAEEncode", vae, image(1, 1))
    with pytest.raises(InputError, match="The image is 300x15 pixels"):
        stock("VAEEncodeTiled", vae, image(15, 300), tile_size=64, overlap=16)


def test_a_grey_picture_and_a_video_latent_are_refused_with_their_shapes(vae):
    with pytest.raises(InputError, match="The image has 1 channel, but the VAE needs red, green and blue"):
        stock("VAEEncode", vae, image()[..., :1])
    video = torch.rand(1, 128, 2, 4, 4)
    try:
        decoded = stock("VAEDecode", vae, {"samples": video})
        # Newer ComfyUIs give a VAE of pictures the first picture of a video.
        assert torch.equal(decoded, stock("VAEDecode", vae, {"samples": video[:, :, 0]}))
    except InputError as error:
        assert "The latent has the shape [1, 128, 2, 4, 4], but this VAE takes" in str(error)
    assert stock("VAEEncode", vae, torch.rand(1, 64, 64, 4))["samples"].shape == (1, 128, 4, 4)


def test_half_a_character_in_a_prompt_is_refused_and_says_where(clip):
    with pytest.raises(InputError, match="half of a character behind 'a red ', such as an emoji"):
        encoded(clip, "a red \ud83d circle")


def test_a_very_wide_reference_picture_is_encoded_and_used(folder, clip, vae):
    """8000x50 pixels: 500x3 latent positions, many more than the picture itself has."""
    import node_helpers

    reference = stock("VAEEncode", vae, image(50, 8000))["samples"]
    assert reference.shape == (1, 128, 3, 500)
    model = load_tp(NAME)
    text = stock("CLIPTextEncode", clip, PROMPT)
    edit = node_helpers.conditioning_set_values(text, {"reference_latents": [reference]}, append=True)
    plain = ksampler(model, text, text, latent(), steps=1)
    edited = ksampler(model, edit, text, latent(), steps=1)
    assert edited.shape == plain.shape and torch.isfinite(edited).all()


@pytest.mark.parametrize("seed", ENDS, ids=["smallest", "largest"])
def test_the_ends_of_the_seeds_range_give_ksamplers_latent(folder, clip, seed):
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    model = load_tp(NAME)
    text = stock("CLIPTextEncode", clip, PROMPT)
    want = ksampler(model, text, text, latent(), seed=seed, steps=2)
    with torch.inference_mode():
        found = TPSampler.execute(model, seed, 2, 1.0, "euler", "simple", text, text, latent(), 1.0).args[0]
    assert relative_error(found["samples"], want) <= SAME


def test_a_folder_without_a_tokenizer_is_refused_before_anything_is_loaded(folder):
    from comfy_tp.comfy_tp_nodes.sharded import known_models

    bare = folder.with_name("no-tokenizer")
    shutil.copytree(folder, bare, dirs_exist_ok=True)
    shutil.rmtree(bare / "tokenizer")
    with pytest.raises(ConfigError, match=r"There is no tokenizer in .*no-tokenizer.*Put the pipeline's"):
        load_clip("no-tokenizer")
    # Nor is a model remembered that nothing will ever use.
    assert not any("no-tokenizer" in known.source.path for known in known_models())


def test_a_folder_with_another_encoder_or_vae_is_refused_by_name(folder):
    other = folder.with_name("other-parts")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    for part, change in (
        ("text_encoder", {"architectures": ["T5EncoderModel"]}),
        ("vae", {"_class_name": "AutoencoderKL"}),
    ):
        file = other / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UnsupportedError, match="T5EncoderModel, which is no text encoder of FLUX.2"):
        load_clip("other-parts")
    with pytest.raises(UnsupportedError, match="AutoencoderKL; the ranks decode with AutoencoderKLFlux2"):
        load_vae("other-parts")


def test_a_name_that_is_not_there_is_refused(folder):
    with pytest.raises(ConfigError, match="text_encoder: there is no 'gone' in text_encoders or diffusers"):
        load_clip("gone")
    with pytest.raises(ConfigError, match="vae: there is no 'gone' in vae or diffusers"):
        load_vae("gone")


def test_clip_set_last_layer_is_refused(clip):
    skipped = stock("CLIPSetLastLayer", clip, -2)
    with pytest.raises(UnsupportedError, match="Remove the CLIP Set Last Layer node"):
        encoded(skipped, PROMPT)


def test_tokens_of_another_clip_are_refused(clip):
    with pytest.raises(UnsupportedError, match="cut into tokens by another CLIP"):
        clip.encode_from_tokens_scheduled({"l": [[(1, 1.0)]]})


def test_a_lora_on_the_text_encoder_is_refused(clip):
    patched = clip.clone()
    patched.patcher.patches = {"model.layers.0.self_attn.q_proj.weight": [(1.0, ("diff",), 1.0, None, None)]}
    patched.patcher.patches_uuid = "another"
    with pytest.raises(UnsupportedError, match="takes no LoRA"):
        patched.patcher.partially_load(torch.device("cpu"))


def test_random_conditioning_of_the_right_width_is_taken(folder):
    """The check of widths is on the width alone."""
    model = load_tp(NAME)
    text = conditioning(20, width=192)
    assert ksampler(model, text, text, latent(), steps=1).shape == (1, 128, 4, 4)
