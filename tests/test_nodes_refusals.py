"""What ranks cannot honour is refused with an error that names it; nothing is dropped in silence."""

from __future__ import annotations

import logging

import pytest
import torch
from comfy_inprocess import (
    conditioning,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    load_tp,
    native,
    save_small_model,
    small_model,
    tp_model,
)

from comfy_tp.core.errors import CheckpointError, ConfigError, InputError, PlanError, UnsupportedError

pytestmark = pytest.mark.usefixtures("in_comfy")


def run(model=None, positive=None, **changes) -> torch.Tensor:
    return ksampler(
        model or tp_model(), positive or conditioning(), conditioning(seed=2), latent(), **changes
    )


@pytest.fixture(autouse=True)
def the_next_prompt_works():
    yield
    assert run(steps=1).isfinite().all()


def refused(error: type[Exception], *words: str):
    """Expect `error` whose text holds every word."""
    pattern = "".join(f"(?=[\\s\\S]*{word})" for word in words)
    return pytest.raises(error, match=pattern)


def test_a_controlnet_is_refused():
    import comfy.controlnet

    with refused(UnsupportedError, "ControlNet", "Apply ControlNet"):
        run(positive=conditioning(control=comfy.controlnet.ControlBase()))


def test_gligen_is_refused():
    with refused(UnsupportedError, "GLIGEN"):
        run(positive=conditioning(gligen=("position", native(), [])))


def test_hooks_are_refused():
    import comfy.hooks

    group = comfy.hooks.HookGroup()
    group.add(comfy.hooks.WeightHook())
    with refused(UnsupportedError, "hooks", "WeightHook"):
        run(positive=conditioning(hooks=group))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.set_model_patch(print, "post_input"), ("patches of the model's blocks", "post_input")),
        (
            lambda m: m.set_model_patch_replace(print, "dit", "double_block", 0),
            ("replacements of the model's blocks", "dit"),
        ),
        (
            lambda m: m.set_model_rope_options(1.0, 0.0, 2.0, 0.0, 1.0, 0.0),
            ("rotary positions", "ScaleROPE", "scale_y"),
        ),
        (
            lambda m: m.model_options["transformer_options"].update(optimized_attention_override=print),
            ("attention override",),
        ),
        (
            lambda m: m.add_object_patch("diffusion_model.img_in", None),
            ("object patches", "diffusion_model.img_in"),
        ),
        (
            lambda m: m.weight_wrapper_patches.update({"diffusion_model.img_in.weight": [print]}),
            ("weight wrappers", "img_in"),
        ),
        (
            lambda m: m.set_model_compute_dtype(torch.float16),
            ("compute dtype float16", "ModelComputeDtype", "compute in float32"),
        ),
        (lambda m: m.set_injections("pulid", [None]), ("injections", "pulid")),
        (lambda m: m.model_options.update(torch_compile_kwargs={"backend": "inductor"}), ("torch.compile",)),
    ],
    ids=[
        "block patch",
        "block replacement",
        "rope options",
        "attention override",
        "object patch inside the model",
        "weight wrapper",
        "compute dtype",
        "injection",
        "torch.compile",
    ],
)
def test_a_change_inside_the_model_is_refused_by_name(change, words):
    model = tp_model().clone()
    change(model)
    with refused(UnsupportedError, "Load TP Model", *words):
        run(model)


@pytest.mark.parametrize(
    "begin",
    [
        lambda m: m.add_weight_wrapper("diffusion_model.img_in.weight", print),
        lambda m: m.model.requires_grad_(False),
        lambda m: list(m.model.named_modules()),
        lambda m: m.clone(force_deepcopy=True),
    ],
    ids=["LoRA around a weight", "frozen weights", "adapters for modules", "copy of its own"],
)
def test_training_is_refused_where_it_begins(begin):
    with refused(UnsupportedError, "Load TP Model", "cannot be trained", "stock loader"):
        begin(tp_model().clone())


def test_weights_may_be_frozen_for_inference():
    with torch.inference_mode():
        assert tp_model().model.requires_grad_(False) is tp_model().model


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_compute_dtype_that_the_ranks_have_may_be_asked_for(dtype):
    model = tp_model().clone()
    model.set_model_compute_dtype(dtype)
    assert run(model, steps=1).equal(run(steps=1))


def test_a_refusal_leaves_the_shards_loaded():
    loads = tp_model().sharded.loads
    model = tp_model().clone()
    model.set_injections("pulid", [None])
    with refused(UnsupportedError, "pulid"):
        run(model)
    assert tp_model().sharded.loaded
    run(steps=1)
    assert tp_model().sharded.loads == loads


def test_an_unknown_keyword_of_the_model_call_is_refused():
    import comfy.patcher_extension as extension

    model = tp_model().clone()
    model.add_wrapper(
        extension.WrappersMP.DIFFUSION_MODEL,
        lambda executor, *args, **kw: executor(*args, timestep_zero_index=3, **kw),
    )
    with refused(UnsupportedError, "keyword 'timestep_zero_index'"):
        run(model)


def test_an_attention_mask_with_a_size_is_refused():
    mask = torch.ones(1, 16, 77)
    with refused(UnsupportedError, "attention bias", "Apply Style Model", "attn_bias"):
        run(positive=conditioning(attention_mask=mask, attention_mask_img_shape=(4, 4)), cfg=1.0)


def test_an_unknown_reference_method_is_refused():
    references = [latent(seed=3)["samples"]]
    with refused(UnsupportedError, "index_timestep_zero", "index, offset, uxo"):
        run(
            positive=conditioning(
                reference_latents=references, reference_latents_method="index_timestep_zero"
            )
        )


def test_an_unknown_transformer_option_is_told_in_the_log(caplog):
    model = tp_model().clone()
    model.model_options["transformer_options"]["somebody_elses_option"] = 1
    with caplog.at_level(logging.WARNING, "comfy_tp.nodes"):
        run(model, steps=2)
    assert caplog.text.count("somebody_elses_option") == 1


def test_weights_cannot_be_read_saved_merged_or_copied():
    import copy

    for action in (
        lambda: tp_model().get_key_patches("diffusion_model."),
        lambda: copy.deepcopy(tp_model()),
        lambda: tp_model().patch_weight_to_device("diffusion_model.img_in.weight"),
    ):
        with refused(UnsupportedError, "shards on the ranks", "stock loader"):
            action()
    with refused(UnsupportedError, "cannot be saved"):
        tp_model().model.state_dict_for_saving()


def test_a_model_of_another_loader_cannot_be_unloaded_here():
    from comfy_tp.comfy_tp_nodes.nodes.unload_model import UnloadTPModel

    with refused(ConfigError, "not from Load TP Model"):
        UnloadTPModel.execute(1, object())


def test_a_latent_with_other_channels_is_refused():
    # 16 channels that are not empty: ComfyUI leaves them as they are.
    wrong = {"samples": torch.ones(1, 16, 4, 4)}
    with refused(InputError, "16 channels", "EmptyFlux2LatentImage"):
        ksampler(tp_model(), conditioning(), conditioning(), wrong)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_sde"])  # on the ranks, and in ComfyUI's own loop
def test_latents_of_another_models_vae_are_refused_with_their_shapes(sampler):
    from comfy_tp.comfy_tp_nodes.nodes.sampler import TPSampler

    def sampled(positive: list, samples: torch.Tensor) -> None:
        inputs = (7, 1, 1.0, sampler, "simple", positive, positive, {"samples": samples}, 1.0)
        with torch.inference_mode():
            TPSampler.execute(tp_model(), *inputs)

    for reference in (torch.ones(1, 16, 8, 8), torch.ones(1, 128, 2, 4, 4)):
        positive = conditioning(reference_latents=[latent(seed=3)["samples"], reference])
        with refused(InputError, "Reference latent 2 has the shape", "takes 128 channels", "VAE"):
            sampled(positive, latent()["samples"])
    with refused(InputError, r"The latent has the shape \[1, 128, 2, 4, 4\]", "another model"):
        sampled(conditioning(), torch.ones(1, 128, 2, 4, 4))


def test_a_conditioning_of_another_width_is_refused_and_says_where_it_belongs():
    with refused(InputError, "15360", "48"):
        run(positive=conditioning(width=15360))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"degree": 3}, PlanError, ("tp_degree=3", "4 attention heads", "1, 2, 4")),
        ({"degree": 9}, ConfigError, ("degree 9", "8 ranks")),
        ({"devices": "cuda:0"}, ConfigError, ("cuda:0", "does not exist", "auto")),
        ({"devices": "gpu"}, ConfigError, ("'gpu' is no device", "cuda:0,cuda:1")),
        ({"dtype": "int3"}, ConfigError, ("dtype: 'int3'", "bfloat16")),
        ({"policy": "hide"}, ConfigError, ("policy: 'hide'", "keep, park, release")),
        ({"name": "nothing-here"}, ConfigError, ("there is no 'nothing-here'", "diffusion_models")),
        ({"name": "../../secret.safetensors"}, ConfigError, ("leads out",)),
        ({"name": "/etc/passwd"}, ConfigError, ("leads out",)),
    ],
)
def test_wrong_inputs_are_refused_by_name(changes, error, words):
    inputs = {"name": small_model().name, "degree": 2, "devices": "cpu", **changes}
    with refused(error, *words):
        load_tp(inputs.pop("name"), **inputs)


def test_damaged_files_are_refused_before_any_rank_is_asked(in_comfy, tmp_path):  # noqa: F811
    folder = in_comfy / "models/diffusion_models"
    (folder / "text.safetensors").write_bytes(b"this is no model")
    (folder / "other.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    truncated = save_small_model(folder / "truncated", seed=3)
    weights = next(truncated.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    for name in ("text.safetensors", "other.safetensors", "truncated"):
        with refused(CheckpointError, name):
            load_tp(name)


def test_missing_and_extra_tensors_are_refused_by_name(in_comfy):  # noqa: F811
    from safetensors.torch import load_file, save_file

    folder = save_small_model(in_comfy / "models/diffusion_models/changed", seed=4)
    file = next(folder.glob("*.safetensors"))
    state = load_file(file)
    state["strange.weight"] = state.pop("proj_out.weight")
    save_file(state, file)
    with refused(CheckpointError, "proj_out.weight", "strange.weight"):
        load_tp("changed")


def test_the_fault_of_a_rank_without_memory_is_comfyuis_own_out_of_memory_error():
    import comfy.model_management

    from comfy_tp.comfy_tp_nodes.errors import comfy_errors
    from comfy_tp.core.errors import RankOutOfMemory

    with pytest.raises(comfy.model_management.OOM_EXCEPTION, match="Rank 1"), comfy_errors():
        raise RankOutOfMemory("Rank 1 (cuda:1) ran out of memory", rank=1, device="cuda:1")
