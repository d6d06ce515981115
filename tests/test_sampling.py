"""The denoising loop of the ranks, against solutions in closed form and against diffusers' own pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comfy_tp.core.calls.forward import Forward
from comfy_tp.core.calls.keys import KEYS
from comfy_tp.core.calls.remote import KEPT_TENSORS, RemoteModel
from comfy_tp.core.calls.sample import JOINT_TOKENS, denoise
from comfy_tp.core.calls.samplers import SAMPLERS
from comfy_tp.core.errors import InputError, UnsupportedError
from comfy_tp.core.ranks.client import RankGroup

SPREAD = 0.6  # standard deviation of the data in the closed-form flow


def gaussian_velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The exact velocity for data drawn from N(0, SPREAD^2), where E[x0 | x] is linear in x."""
    sigma = sigma.view(-1, 1, 1, 1).double()
    variance = ((1 - sigma) * SPREAD) ** 2 + sigma**2
    x0 = (1 - sigma) * SPREAD**2 / variance * x.double()
    return ((x.double() - x0) / sigma).float()


def spread_at(sigma: float) -> float:
    """The standard deviation of x at that noise level; the flow scales x by it."""
    return math.sqrt(((1 - sigma) * SPREAD) ** 2 + sigma**2)


def walk(sampler: str, sigmas: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`denoise` on the closed-form flow."""
    return denoise(lambda x, t, _: gaussian_velocity(x, t), x, sigmas, sampler=sampler, positive={})


def error_with(sampler: str, steps: int) -> float:
    """Relative error after `steps` even steps from sigma 0.9 to 0.3."""
    x = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    found = walk(sampler, torch.linspace(0.9, 0.3, steps + 1), x)
    expected = x * spread_at(0.3) / spread_at(0.9)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_solves_the_flow_with_its_order(sampler: str) -> None:
    coarse, fine = error_with(sampler, 64), error_with(sampler, 128)
    order = 1 if sampler in ("euler", "ddim", "gradient_estimation") else 2
    assert abs(math.log2(coarse / fine) - order) < 0.15, f"{sampler}: {coarse:.1e} to {fine:.1e}"
    assert fine < (5e-3 if order == 1 else 5e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_ends_on_the_clean_latent_of_a_straight_flow(sampler: str) -> None:
    clean = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(1))
    for steps in (1, 2, 7):
        found = denoise(
            lambda x, t, _: (x - clean) / t.view(-1, 1, 1, 1),
            noise,
            torch.linspace(1, 0, steps + 1),
            sampler=sampler,
            positive={},
        )
        assert torch.allclose(found, clean, atol=1e-5)


class Recorder:
    """A model that remembers how it was called; its velocity is the mean of the context, plus guidance."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, x: torch.Tensor, timestep: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        self.calls.append({"x": x, "timestep": timestep, **inputs})
        level = inputs["context"].float().mean((1, 2))
        if "guidance" in inputs:
            level = level + inputs["guidance"].float()
        for reference in inputs.get("references", ()):
            level = level + reference.float().mean((1, 2, 3))
        return (x.float() * 0.1 + level.view(-1, 1, 1, 1)).to(x.dtype)


def side(level: float, length: int = 3, guidance: float | None = None, **more: Any) -> dict[str, Any]:
    strength = {} if guidance is None else {"guidance": torch.tensor([guidance])}
    return {"context": torch.full((1, length, 4), level), **strength, **more}


def guided(
    model: Recorder, x: torch.Tensor, negative: dict[str, Any], cfg: float, **more: Any
) -> torch.Tensor:
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    return denoise(
        model,
        x,
        sigmas,
        sampler="euler",
        positive=side(2.0, guidance=3.5),
        negative=negative,
        cfg=cfg,
        **more,
    )


def test_a_cfg_of_one_leaves_the_negative_out() -> None:
    model = Recorder()
    guided(model, torch.ones(2, 4, 3, 3), side(5.0, guidance=3.5), 1.0)
    assert [call["x"].shape[0] for call in model.calls] == [2, 2]
    assert all((call["context"] == 2.0).all() for call in model.calls)


def test_both_sides_go_through_the_model_at_once_only_when_small_and_alike() -> None:
    x = torch.ones(1, 4, 3, 3)
    large = torch.ones(1, 4, 1, JOINT_TOKENS + 1)
    reference = torch.ones(1, 4, 2, 2)
    cases = {
        "alike": (x, side(5.0, guidance=3.5), [2, 2]),
        "other guidance": (x, side(5.0, guidance=1.0), [2, 2]),
        "large": (large, side(5.0, guidance=3.5), [1] * 4),
        "other length": (x, side(5.0, length=4, guidance=3.5), [1] * 4),
        "no guidance": (x, side(5.0), [1] * 4),
        "a reference": (x, side(5.0, guidance=3.5, references=[reference]), [1] * 4),
    }
    for name, (start, negative, batches) in cases.items():
        model = Recorder()
        found = guided(model, start, negative, 3.0)
        assert [call["x"].shape[0] for call in model.calls] == batches, name
        # x0 = x - sigma (negative + 3 (positive - negative)) in every case.
        level = 2.0 + 3.5
        other = 5.0 + float(negative.get("guidance", 0.0)) + len(negative.get("references", ()))
        expected = start
        for sigma, following in ((1.0, 0.5), (0.5, 0.0)):
            away, towards = expected * 0.1 + other, expected * 0.1 + level
            expected = expected + (following - sigma) * (away + 3.0 * (towards - away))
        assert torch.allclose(found, expected, atol=1e-5), name


def test_the_model_gets_its_dtype_and_the_steps_stay_float32() -> None:
    model = Recorder()
    seen = []
    x = torch.full((1, 4, 3, 3), 1.0 + 2**-12)
    result = guided(
        model, x, side(5.0), 1.0, compute_dtype=torch.bfloat16, on_step=lambda step, x0: seen.append(x0)
    )
    assert all(call["x"].dtype == torch.bfloat16 for call in model.calls)
    assert all(call["guidance"].dtype == torch.bfloat16 for call in model.calls)
    assert all(call["timestep"].dtype == torch.float32 for call in model.calls)
    assert result.dtype == torch.float32
    assert seen[0].dtype == torch.float32
    # x0 is taken from x itself, not from its bfloat16 copy, which lost the 2^-12.
    velocity = (torch.ones(1, 4, 3, 3) * 0.1 + 5.5).bfloat16().float()
    assert torch.equal(seen[0], x - velocity)


def test_conditionings_and_references_are_fitted_to_the_batch() -> None:
    model = Recorder()
    context = torch.stack([torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)])
    reference = torch.stack([torch.full((4, 2, 2), 10.0), torch.full((4, 2, 2), 20.0)])
    denoise(
        model,
        torch.ones(3, 4, 3, 3),
        torch.tensor([1.0, 0.0]),
        sampler="euler",
        positive={"context": context, "references": [reference]},
    )
    (call,) = model.calls
    assert call["context"][:, 0, 0].tolist() == [1.0, 2.0, 1.0]
    assert call["references"][0][:, 0, 0, 0].tolist() == [10.0, 20.0, 10.0]


def test_every_step_is_checked_before_and_reported_after() -> None:
    order: list[str] = []
    model = Recorder()

    def predict(*args: Any) -> torch.Tensor:
        order.append("model")
        return model(*args)

    denoise(
        predict,
        torch.ones(1, 4, 3, 3),
        torch.tensor([1.0, 0.5, 0.0]),
        sampler="heun",
        positive=side(1.0),
        on_step=lambda step, x0: order.append(f"step {step}"),
        check=lambda: order.append("check"),
    )
    assert order == ["check", "model", "model", "step 0", "check", "model", "step 1"]


@pytest.mark.parametrize(
    ("sigmas", "said"),
    [
        ([1.0], r"a row of two or more is needed, and these have the shape \[1\]"),
        ([1.0, float("nan"), 0.0], "one of them is not a number"),
        ([1.0, 0.5, 0.5, 0.0], "at step 2 they go from 0.5 to 0.5"),
        ([0.5, 0.0, -0.5], "the last one is -0.5"),
    ],
)
def test_sigmas_that_do_not_descend_are_refused(sigmas: list[float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        denoise(Recorder(), torch.ones(1, 4, 3, 3), torch.tensor(sigmas), sampler="lms", positive=side(1.0))


def test_a_sampler_that_draws_noise_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'euler_ancestral' themselves. They run: .*, euler, "):
        denoise(
            Recorder(),
            torch.ones(1, 4, 3, 3),
            torch.tensor([1.0, 0.0]),
            sampler="euler_ancestral",
            positive=side(1.0),
        )


def test_guidance_without_a_negative_is_refused() -> None:
    with pytest.raises(InputError, match="cfg 4 needs a negative conditioning"):
        denoise(
            Recorder(),
            torch.ones(1, 4, 3, 3),
            torch.tensor([1.0, 0.0]),
            sampler="euler",
            positive=side(1.0),
            cfg=4.0,
        )


# --- on ranks ---------------------------------------------------------------------------------------------------

CONFIG = {
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 4, 4, 4),
}


@pytest.fixture(scope="module")
def transformer() -> Any:
    """diffusers' own small FLUX.2 of random weights."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    model = Flux2Transformer2DModel(**CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def folder(transformer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a model folder."""
    made = tmp_path_factory.mktemp("flux2")
    transformer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def remote(folder: Path) -> Iterator[RemoteModel]:
    """They on two CPU ranks."""
    with on_ranks(folder, 2) as model:
        yield model


@contextmanager
def on_ranks(folder: Path, degree: int) -> Iterator[RemoteModel]:
    """The model in `folder` on a group of its own."""
    group = RankGroup.start(["cpu"] * degree)
    try:
        yield RemoteModel.load(group, str(folder))
    finally:
        group.close()


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_four_steps_are_the_pipelines(
    remote: RemoteModel, transformer: Any, height: int, width: int, batch: int, length: int
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline

    pipeline = Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    noise, embeds = random(batch, 128, height, width, seed=1), random(1, length, 48, seed=2)
    sigmas = [1.0, 0.9, 0.7, 0.4]
    with torch.no_grad():
        expected = pipeline(
            prompt_embeds=embeds.expand(batch, -1, -1),
            latents=noise.clone(),
            height=16 * height,
            width=16 * width,
            sigmas=list(np.array(sigmas)),
            num_inference_steps=4,
            guidance_scale=3.5,
            output_type="latent",
        ).images
    found = remote.sample(
        noise,
        torch.tensor([*sigmas, 0.0]),
        sampler="euler",
        positive={"context": KEYS.kept(embeds), "guidance": torch.tensor([3.5])},
    )
    tokens = found.flatten(2).transpose(1, 2)
    assert float((tokens - expected).norm() / expected.norm()) < 1e-5
    assert float((tokens - noise.flatten(2).transpose(1, 2)).norm() / expected.norm()) > 0.1


def test_the_ranks_keep_the_conditionings_that_were_used_last_and_no_others(remote: RemoteModel) -> None:
    def velocity(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        latent = random(1, 128, 2, 2, seed=1)
        return remote.forward(latent, torch.tensor([0.5]), {"context": KEYS.kept(tensor)}, **options)

    def cancel() -> None:
        raise KeyboardInterrupt

    def held_by_the_ranks(tensor: torch.Tensor) -> bool:
        inputs = {"context": KEYS.kept(tensor)}
        try:
            remote.ask(Forward, random(1, 128, 2, 2, seed=1), torch.tensor([0.5]), inputs)
        except InputError as error:
            assert f"hold no tensor under key {KEYS.key_of(tensor)}" in str(error)
            return False
        return True

    tensors = [random(1, 3, 48, seed=index) for index in range(KEPT_TENSORS + 1)]
    expected = velocity(tensors[0])
    # What was cancelled may have reached the ranks, or not: they are told to forget it all the same.
    cancelled = random(1, 3, 48, seed=99)
    with pytest.raises(KeyboardInterrupt):
        velocity(cancelled, poll=cancel)
    for tensor in tensors[1:-1]:
        remote.hold({"context": KEYS.kept(tensor)})
    velocity(tensors[0])  # used again: it is not the next to go
    assert velocity(tensors[-1]).isfinite().all()
    assert torch.equal(velocity(tensors[0]), expected)
    assert [held_by_the_ranks(tensor) for tensor in (tensors[1], cancelled, tensors[2])] == [
        False,
        False,
        True,
    ]
    assert velocity(tensors[1]).isfinite().all()  # sent again
    assert velocity(cancelled).isfinite().all()


@pytest.mark.parametrize(
    ("height", "width", "batch", "length"), [(5, 7, 1, 77), (4, 6, 2, 1), (8, 8, 1, 520)]
)
def test_four_steps_on_two_ranks_are_those_of_diffusers_pipeline(
    remote: RemoteModel, transformer: Any, height: int, width: int, batch: int, length: int
) -> None:
    assert_four_steps_are_the_pipelines(remote, transformer, height, width, batch, length)


def test_four_steps_on_four_ranks_are_those_of_diffusers_pipeline(folder: Path, transformer: Any) -> None:
    with on_ranks(folder, 4) as model:
        assert model.info.degree == 4
        assert_four_steps_are_the_pipelines(model, transformer, 5, 7, 2, 77)


def test_steps_arrive_with_previews_and_times(remote: RemoteModel) -> None:
    seen: list[tuple[int, int, torch.Tensor | None]] = []
    context, noise = random(1, 9, 48, seed=3), random(1, 128, 4, 4, seed=4)
    result = remote.sample(
        noise,
        torch.linspace(1, 0, 4),
        sampler="heun",
        positive={"context": KEYS.kept(context)},
        on_step=lambda *step: seen.append(step),
    )
    assert [step[:2] for step in seen] == [(0, 3), (1, 3), (2, 3)]
    assert torch.equal(seen[-1][2], result)  # the last step lands on x0
    assert remote.last_step_seconds is not None and 0 < remote.last_step_seconds < 60
    seen.clear()
    remote.sample(
        noise,
        torch.linspace(1, 0, 4),
        sampler="euler",
        positive={"context": KEYS.kept(context)},
        on_step=lambda *step: seen.append(step),
        preview=False,
    )
    assert [step[2] for step in seen] == [None] * 3


def test_a_cancel_between_steps_leaves_the_group_usable(remote: RemoteModel) -> None:
    class Pressed(Exception):
        pass

    context, noise = random(1, 9, 48, seed=3), random(1, 128, 4, 4, seed=4)
    positive = {"context": KEYS.kept(context)}
    expected = remote.sample(noise, torch.linspace(1, 0, 4), sampler="euler", positive=positive)
    steps: list[int] = []

    def press(step: int, total: int, x0: torch.Tensor | None) -> None:
        steps.append(step)
        if step == 3:
            raise Pressed

    with pytest.raises(Pressed):
        remote.sample(noise, torch.linspace(1, 0, 2001), sampler="euler", positive=positive, on_step=press)
    assert steps[:4] == [0, 1, 2, 3]
    assert remote.alive
    found = remote.sample(noise, torch.linspace(1, 0, 4), sampler="euler", positive=positive)
    assert torch.equal(found, expected)


def test_a_refusal_of_the_ranks_reaches_the_client_and_the_next_run_works(remote: RemoteModel) -> None:
    context, noise = random(1, 9, 48, seed=3), random(1, 128, 4, 4, seed=4)
    positive = {"context": KEYS.kept(context)}
    with pytest.raises(UnsupportedError, match="do not run the sampler 'dpm_fast'"):
        remote.sample(noise, torch.linspace(1, 0, 4), sampler="dpm_fast", positive=positive)
    with pytest.raises(InputError, match="The latent has 16 channels"):
        remote.sample(
            random(1, 16, 4, 4, seed=5), torch.linspace(1, 0, 4), sampler="euler", positive=positive
        )
    assert remote.sample(noise, torch.linspace(1, 0, 3), sampler="lms", positive=positive).isfinite().all()
