"""TP Sampler in ComfyUI's own code: beside KSampler on ComfyUI's own FLUX.2 with the same weights (sampler_checks.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comfy_tp.comfyui import comfyui_path
from comfy_tp.core.calls.samplers import SAMPLERS

PROGRAM = Path(__file__).parent / "sampler_checks.py"
DEADLINE_S = 500.0
pytestmark = pytest.mark.timeout(DEADLINE_S + 30)  # the first test waits for all checks
SAME = 1e-5  # float32 through four or five steps of a small model; two ranks add in another order than one


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all checks, from one process with ComfyUI's tree on its path."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(comfyui_path()), str(tmp_path_factory.mktemp("models"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, errors[-4000:]
    found = json.loads(output.splitlines()[-1])
    broken = {name: result for name, result in found.items() if isinstance(result, str)}
    assert not broken, "\n".join(f"{name}:\n{text}" for name, text in broken.items())
    return found


def assert_same(cases: dict[str, Any]) -> None:
    far = {name: case for name, case in cases.items() if not case["distance"] <= SAME}
    assert not far


def assert_mirrored(cases: dict[str, Any]) -> None:
    assert_same(cases)
    elsewhere = {name: case["path"] for name, case in cases.items() if case["path"] != "ranks"}
    assert not elsewhere


def test_every_mirrored_sampler_gives_ksamplers_latent_on_comfyuis_own_model(results: dict[str, Any]) -> None:
    cases = results["mirrored_samplers"]
    assert {f"{name} cfg 3.5" for name in SAMPLERS} <= set(cases)
    assert_mirrored(cases)


def test_every_mirrored_sampler_equals_comfyuis_on_every_schedule(results: dict[str, Any]) -> None:
    cases = results["mirrored_samplers_on_a_formula"]
    assert len(cases) == 20 * len(SAMPLERS)
    assert not {name: distance for name, distance in cases.items() if not distance <= SAME}


def test_other_samplers_go_through_the_proxy_with_the_same_result(results: dict[str, Any]) -> None:
    cases = results["stock_samplers_through_the_proxy"]
    assert_same(cases)
    for name, case in cases.items():
        assert case["path"] == f"the ranks do not run the sampler {name} themselves."


def test_shapes_batches_references_and_texts_are_ksamplers(results: dict[str, Any]) -> None:
    cases = dict(results["shapes_and_conditionings"])
    nothing_to_do = cases.pop("denoise 0")
    assert nothing_to_do["distance"] == 0
    assert_mirrored(cases)


def test_in_bfloat16_every_cast_is_where_comfyui_has_it(results: dict[str, Any]) -> None:
    case = results["casts_in_bfloat16"]
    assert_mirrored({"bfloat16": case})
    assert case["effect"] > 1e-3  # so much bfloat16 itself is worth


def test_sigmas_replace_steps_scheduler_and_denoise(results: dict[str, Any]) -> None:
    cases = dict(results["sigmas_input"])
    rising = cases.pop("rising")
    assert rising["path"].startswith("of the sigmas (at step 1 they go from 0.")
    assert rising["distance"] <= SAME
    assert_mirrored(cases)


OPTIONS = {
    "sampler_cfg_function": "the model has the option sampler_cfg_function.",
    "sampler_post_cfg_function": "the model has the option sampler_post_cfg_function.",
    "sampler_pre_cfg_function": "the model has the option sampler_pre_cfg_function.",
    "sampler_calc_cond_batch_function": "the model has the option sampler_calc_cond_batch_function.",
    "disable_cfg1_optimization": "the model has the option disable_cfg1_optimization.",
    "model_function_wrapper": "the model has the option model_function_wrapper.",
    "denoise_mask_function": "the model has the option denoise_mask_function.",
    "context_handler": "the model has the option context_handler.",
    "wrapper outer_sample": "the model has a wrapper outer_sample of test.",
    "wrapper prepare_sampling": "the model has a wrapper prepare_sampling of test.",
    "wrapper sampler_sample": "the model has a wrapper sampler_sample of test.",
    "wrapper predict_noise": "the model has a wrapper predict_noise of test.",
    "wrapper calc_cond_batch": "the model has a wrapper calc_cond_batch of test.",
    "wrapper apply_model": "the model has a wrapper apply_model of test.",
    "wrapper diffusion_model": "the model has a wrapper diffusion_model of test.",
    "callback on_prepare_state": "the model has a callback on_prepare_state.",
    "callback on_apply_hooks": "the model has a callback on_apply_hooks.",
    "EasyCache": "the model has the transformer option easycache.",
    "ModelSamplingSD3": "the model's timesteps are not its sigmas (a ModelSampling node changed them).",
    "object patch": "a node replaced memory_usage_factor of the model.",
    "transformer option": "the model has the transformer option something_new.",
    "additional models": "the model brings another model along (test).",
}
CHANGES_THE_IMAGE = {
    "sampler_cfg_function",
    "sampler_post_cfg_function",
    "sampler_pre_cfg_function",
    "sampler_calc_cond_batch_function",
    "model_function_wrapper",
    "EasyCache",
    "ModelSamplingSD3",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_the_ranks_do_not_know_takes_the_proxy_and_works(
    results: dict[str, Any], option: str
) -> None:
    case = results["every_option_takes_the_proxy"][option]
    assert case["path"] == OPTIONS[option]
    assert case["distance"] <= SAME
    if option in CHANGES_THE_IMAGE:
        assert case["effect"] > 1e-3


@pytest.mark.parametrize(
    "option", ["nothing", "callback on_pre_run", "callback on_cleanup", "ModelSamplingFlux"]
)
def test_what_lies_outside_the_loop_stays_on_the_ranks(results: dict[str, Any], option: str) -> None:
    case = results["every_option_takes_the_proxy"][option]
    assert case["path"] == "ranks"
    assert case["distance"] <= SAME
    assert case["effect"] > 1e-3 if option == "ModelSamplingFlux" else case["effect"] <= SAME


CONDITIONINGS = {
    "area": "the positive conditioning carries area.",
    "strength": "the positive conditioning carries strength.",
    "mask": "the positive conditioning carries mask.",
    "start_percent": "the positive conditioning carries start_percent.",
    "end_percent": "the positive conditioning carries end_percent.",
    "an unknown key": "the positive conditioning carries something_new.",
    "several on one side": "the positive side has 2 conditionings.",
    "mask on the negative": "the negative conditioning carries mask.",
    "noise_mask": "the latent has a noise_mask.",
    "unused negative at cfg 1": "ranks",
}


@pytest.mark.parametrize("case", CONDITIONINGS)
def test_a_conditioning_that_the_ranks_do_not_know_takes_the_proxy(
    results: dict[str, Any], case: str
) -> None:
    found = results["every_conditioning_option_takes_the_proxy"][case]
    assert found["path"] == CONDITIONINGS[case]
    assert found["distance"] <= SAME


def test_wrong_inputs_are_refused_in_a_sentence_and_the_next_run_works(results: dict[str, Any]) -> None:
    said = results["refusals"]
    assert said["stock model"].startswith(
        "InputError: TP Sampler needs a model from Load TP Model, and this one is a Flux2"
    )
    assert said["stock model"].endswith("Load it with Load TP Model, or sample it with KSampler.")
    assert "sampler_name: 'eulre' is not one of the choices. Choose euler, " in said["unknown sampler"]
    assert "scheduler: 'simpel' is not one of the choices." in said["unknown scheduler"]
    assert said["channels"].startswith(
        "InputError: The latent has 16 channels, but this FLUX.2 model takes 128."
    )
    assert said["width"].startswith("InputError: The conditioning is 24 wide, but this model takes 48")
    assert said["then a good one"] == "accepted"


def test_a_cancel_ends_the_run_within_a_step_or_two_and_the_next_one_is_right(
    results: dict[str, Any],
) -> None:
    found = results["cancel_in_the_middle"]
    assert found["raised"] == "InterruptProcessingException"
    assert [step[:2] for step in found["seen"][:3]] == [[0, 200], [1, 200], [2, 200]]
    assert len(found["seen"]) < 150
    assert all(step[2] == [1, 128, 5, 7] for step in found["seen"])
    assert_mirrored({"next": found["next"]})


def test_the_progress_bar_counts_steps_not_model_calls(results: dict[str, Any]) -> None:
    told = results["progress_and_previews"]
    assert told[0] == [1, 3] and told[-1] == [3, 3]  # newer ComfyUIs leave out what follows within a moment
    assert told in ([[1, 3], [3, 3]], [[1, 3], [2, 3], [3, 3]])


def test_the_latents_other_keys_are_handed_on(results: dict[str, Any]) -> None:
    assert results["metadata_is_kept"] == {"keys": ["samples", "something"], "input untouched": True}
