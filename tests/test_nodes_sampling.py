"""Stock samplers and guiders on the MODEL of Load TP Model give what they give on ComfyUI's own FLUX.2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from comfy_inprocess import (
    bfl_state,
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    native,
    native_model,
    relative_error,
    save_small_model,
    small_model,
    tp_model,
)

TOLERANCE = 1e-5  # fp32; sums over ranks are taken in another order


pytestmark = pytest.mark.usefixtures("in_comfy")


def both(run) -> tuple[torch.Tensor, torch.Tensor]:
    """The same run on the sharded and on the native model."""
    with torch.inference_mode():
        return run(tp_model()), run(native())


def same(run) -> None:
    found, expected = both(run)
    assert found.shape == expected.shape
    assert expected.norm() > 1
    assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("height", "width", "batch", "length", "cfg"),
    [(4, 4, 1, 77, 1.0), (5, 7, 2, 77, 3.0), (4, 4, 1, 1, 3.0), (4, 4, 2, 530, 1.0)],
    ids=["plain", "odd size, batch of two, guided", "one token", "text longer than 512"],
)
def test_ksampler_equals_comfyuis_own_flux2(height, width, batch, length, cfg):
    same(
        lambda model: ksampler(
            model,
            conditioning(length),
            conditioning(length, seed=2),
            latent(height, width, batch=batch),
            cfg=cfg,
        )
    )


def test_conditionings_of_different_lengths_are_run_apart_and_equal():
    same(lambda model: ksampler(model, conditioning(600), conditioning(20, seed=2), latent(), cfg=2.5))


def test_a_conditioning_with_one_row_per_image_equals():
    same(
        lambda model: ksampler(
            model, conditioning(30, batch=2), conditioning(seed=2), latent(batch=2), cfg=2.0
        )
    )


def test_a_sampler_that_calls_the_model_twice_a_step_equals():
    same(lambda model: ksampler(model, conditioning(), conditioning(), latent(), sampler_name="heun"))


def test_a_noise_mask_keeps_the_masked_part():
    mask = torch.zeros(1, 4, 4)
    mask[:, :2] = 1

    def run(model):
        return ksampler(model, conditioning(), conditioning(), latent(seed=5, noise_mask=mask), denoise=0.7)

    same(run)
    with torch.inference_mode():
        kept = run(tp_model())[..., 2:, :]
    assert relative_error(kept, latent(seed=5)["samples"][..., 2:, :]) < 1e-6


def test_guidance_changes_the_image_and_equals():
    from comfy_extras.nodes_flux import FluxDisableGuidance, FluxGuidance

    images = []
    for node, arguments in ((FluxGuidance, (2.0,)), (FluxGuidance, (6.0,)), (FluxDisableGuidance, ())):
        positive = node.execute(conditioning(), *arguments).args[0]
        found, expected = both(
            lambda model, positive=positive: ksampler(model, positive, conditioning(), latent())
        )
        assert relative_error(found, expected) <= TOLERANCE
        images.append(found)
    assert relative_error(images[0], images[1]) > 1e-3
    assert relative_error(images[1], images[2]) > 1e-3


@pytest.mark.parametrize("method", [None, "index", "offset", "uxo"])
def test_two_reference_latents_equal(method):
    from comfy_extras.nodes_edit_model import ReferenceLatent
    from comfy_extras.nodes_flux import FluxKontextMultiReferenceLatentMethod

    def with_references(cond):
        cond = ReferenceLatent.execute(cond, latent(3, 4, seed=8)).args[0]
        cond = ReferenceLatent.execute(cond, latent(4, 2, seed=9)).args[0]
        if method is not None:
            cond = FluxKontextMultiReferenceLatentMethod.execute(cond, method).args[0]
        return cond

    positive, negative = with_references(conditioning()), with_references(conditioning(seed=2))
    plain = ksampler(tp_model(), conditioning(), conditioning(seed=2), latent(), cfg=2.0)
    found, expected = both(lambda model: ksampler(model, positive, negative, latent(batch=2), cfg=2.0))
    assert relative_error(found, expected) <= TOLERANCE
    assert relative_error(found[:1], plain) > 1e-3


@pytest.mark.parametrize("guider", ["basic", "cfg"])
def test_sampler_custom_advanced_equals(guider):
    from comfy_extras import nodes_custom_sampler as custom

    def run(model):
        if guider == "basic":
            chosen = custom.BasicGuider.execute(model, conditioning()).args[0]
        else:
            chosen = custom.CFGGuider.execute(model, conditioning(), conditioning(seed=2), 4.0).args[0]
        noise = custom.RandomNoise.execute(11).args[0]
        sampler = custom.KSamplerSelect.execute("dpmpp_2m").args[0]
        sigmas = custom.BasicScheduler.execute(model, "beta", 3, 1.0).args[0]
        return custom.SamplerCustomAdvanced.execute(noise, chosen, sampler, sigmas, latent(5, 3)).args[0][
            "samples"
        ]

    same(run)


def test_a_combined_conditioning_with_areas_equals():
    import nodes

    def run(model):
        left = nodes.ConditioningSetAreaPercentage().append(conditioning(), 0.5, 1.0, 0, 0, 1.0)[0]
        right = nodes.ConditioningSetTimestepRange().set_range(conditioning(seed=3), 0.0, 0.6)[0]
        return ksampler(model, left + right, conditioning(seed=2), latent(8, 8), cfg=2.0)

    same(run)


def test_object_patches_such_as_model_sampling_flux_apply_and_are_taken_back():
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    def run(model):
        return ksampler(model, conditioning(), conditioning(), latent())

    def shifted(model):
        return run(ModelSamplingFlux().patch(model, 1.6, 0.5, 512, 512)[0])

    before = run(tp_model())
    same(shifted)
    assert relative_error(shifted(tp_model()), before) > 1e-3
    assert torch.equal(run(tp_model()), before)


def test_wrappers_around_the_diffusion_model_are_honoured():
    import comfy.patcher_extension as extension

    calls = []

    def halve(executor, *args, **kwargs):
        calls.append(type(executor.class_obj).__name__)
        return executor(*args, **kwargs) * 0.5

    def run(model):
        wrapped = model.clone()
        wrapped.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, halve)
        return ksampler(wrapped, conditioning(), conditioning(), latent())

    same(run)
    assert calls == ["ShardedFlux"] * 3 + ["Flux"] * 3


def test_easycache_skips_the_same_steps():
    from comfy_extras.nodes_easycache import EasyCacheNode

    same(
        lambda model: ksampler(
            EasyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0],
            conditioning(),
            conditioning(),
            latent(),
            steps=6,
        )
    )


def test_a_wrapper_may_bring_a_conditioning_of_its_own():
    import comfy.patcher_extension as extension

    other = conditioning(512, seed=4)[0][0]

    def replace(executor, x, timestep, context, *args, **kwargs):
        return executor(x, timestep, other, *args, **kwargs)

    wrapped = tp_model().clone()
    wrapped.add_wrapper(extension.WrappersMP.DIFFUSION_MODEL, replace)
    found = ksampler(wrapped, conditioning(), conditioning(), latent())
    expected = ksampler(native(), conditioning(512, seed=4), conditioning(), latent())
    assert relative_error(found, expected) <= TOLERANCE


def test_bf16_inputs_are_rounded_as_comfyui_rounds_them():
    # Guidance reaches the model in the inference dtype: 3.6 becomes 3.59375 in bf16.
    from comfy_tp.core.calls.keys import KEYS

    tensor = conditioning()[0][0]
    rows = KEYS.rows(tensor, torch.bfloat16, 512)
    assert rows[0].dtype == torch.bfloat16 and rows[0].shape == (1, 512, 48)
    assert torch.equal(rows[0][:, -77:], tensor.to(torch.bfloat16))
    assert not rows[0][:, :-77].any()
    assert KEYS.rows(tensor, torch.bfloat16, 512)[0] is rows[0]


def test_conditionings_and_references_cross_to_the_ranks_once():
    model = tp_model()
    references = [latent(8, 8, seed=23)["samples"], latent(4, 8, seed=24)["samples"]]
    positive = conditioning(seed=21, reference_latents=references)
    negative = conditioning(seed=22, reference_latents=references)
    sent = []
    remote = model.sharded.load()  # another test may have freed the shards
    request = remote.group.request

    def count(command, header=None, tensors=(), **options):
        sent.append((command, sum(tensor.numel() for tensor in tensors)))
        return request(command, header, tensors, **options)

    remote.group.request = count
    try:
        ksampler(model, positive, negative, latent(), cfg=2.0, steps=4)
        ksampler(model, positive, negative, latent(), cfg=2.0, steps=2)
    finally:
        del remote.group.request
    assert [command for command, _ in sent].count("keep") == 4
    assert [command for command, _ in sent].count("forward") == 6
    # The latent of both conds, and the timestep and guidance of each.
    assert {numbers for command, numbers in sent if command == "forward"} == {2 * 128 * 16 + 4}


def test_a_single_file_gives_the_image_of_its_folder(in_comfy):  # noqa: F811
    from safetensors.torch import save_file

    save_file(bfl_state(small_model()), in_comfy / "models/diffusion_models/single.safetensors")
    single = load_tp("single.safetensors")
    assert single.sharded.info.layout == "FLUX.2 single file"
    found = ksampler(single, conditioning(), conditioning(), latent())
    assert torch.equal(found, ksampler(tp_model(), conditioning(), conditioning(), latent()))


def test_two_models_on_the_same_ranks_are_not_mixed_up(in_comfy):  # noqa: F811
    folder = save_small_model(in_comfy / "models/diffusion_models/second-flux2", seed=31, num_layers=1)
    second = load_tp("second-flux2")
    assert second.sharded.load().group is tp_model().sharded.load().group
    pairs = [(tp_model(), native()), (second, native_model(folder))] * 2
    for found, expected in pairs:
        images = [ksampler(model, conditioning(), conditioning(), latent()) for model in (found, expected)]
        assert relative_error(*images) <= TOLERANCE


def test_a_preview_gets_its_estimate_on_the_device_of_the_noise(monkeypatch):
    """The ranks send it from the CPU, and a previewer's own weights lie on ComfyUI's device."""
    from comfy_tp.comfy_tp_nodes import mirrored

    def sample(start, sigmas, *, on_step, **options):
        on_step(0, 1, torch.zeros(1, 4, 2, 2))
        return torch.zeros(1, 4, 2, 2)

    remote = SimpleNamespace(sample=sample, last_step_seconds=None)
    line = SimpleNamespace(begin=lambda steps: None, step=lambda *told: None)
    model = SimpleNamespace(
        sharded=SimpleNamespace(require=lambda: remote, line=line),
        model_sampling=SimpleNamespace(
            noise_scaling=lambda sigma, noise, *rest: noise,
            inverse_noise_scaling=lambda sigma, latent: latent,
        ),
        diffusion_model=SimpleNamespace(reference_method="index"),
    )
    wrap = SimpleNamespace(inner_model=model, cfg=1.0, conds={"positive": [None]})
    monkeypatch.setattr(mirrored, "why_not_mirrored", lambda *arguments: None)
    monkeypatch.setattr(mirrored, "conditioning", lambda *arguments: None)
    sampler = mirrored.MirroredSampler("euler")
    monkeypatch.setattr(sampler, "max_denoise", lambda *arguments: True)
    told = []
    noise = torch.empty(1, 4, 2, 2, device="meta")
    sampler.sample(
        wrap, torch.tensor([1.0, 0.0]), {"model_options": {}}, lambda *step: told.append(step), noise
    )
    assert [(step, x0.device.type, x.device.type) for step, x0, x, _ in told] == [(0, "meta", "meta")]
