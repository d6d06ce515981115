"""LoRA on the MODEL of Load TP Model, by the stock loader and by Load TP LoRA, against ComfyUI's own FLUX.2."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comfy_inprocess import (
    bfl_state,
    conditioning,
    import_comfy,
    in_comfy,  # noqa: F401  a fixture
    ksampler,
    latent,
    native,
    native_model,
    random_lora,
    relative_error,
    save_lora,
    small_model,
    tp_model,
)

from comfy_tp.core.errors import CheckpointError, InputError, UnsupportedError

TOLERANCE = 1e-5  # fp32; sums over ranks and low-rank products are taken in another order
DEGREES = (2, 4)

pytestmark = pytest.mark.usefixtures("in_comfy")


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """The matrices of the small model by the single file's names, without `.weight`."""
    found = bfl_state(small_model())
    return {name.removesuffix(".weight"): tensor for name, tensor in found.items() if tensor.ndim == 2}


def mixed_adapters(name: str) -> str:
    """LoKr, LoHa, DoRA of rows and of columns, a norm that is set, a difference, and diffusers' split q, k and v."""
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    h = 128
    d = "diffusion_model."
    block = "transformer.transformer_blocks.1.attn"
    tensors = {
        f"{d}double_blocks.0.img_attn.qkv.lokr_w1": random(3, 4),
        f"{d}double_blocks.0.img_attn.qkv.lokr_w2_a": random(h, 4),
        f"{d}double_blocks.0.img_attn.qkv.lokr_w2_b": random(4, h // 4),
        f"{d}double_blocks.0.img_attn.qkv.alpha": torch.tensor(3.0),
        f"{d}single_blocks.0.linear1.hada_w1_a": random(9 * h, 3),
        f"{d}single_blocks.0.linear1.hada_w1_b": random(3, h),
        f"{d}single_blocks.0.linear1.hada_w2_a": random(9 * h, 3),
        f"{d}single_blocks.0.linear1.hada_w2_b": random(3, h),
        f"{d}single_blocks.0.linear2.lora_up.weight": random(h, 4),
        f"{d}single_blocks.0.linear2.lora_down.weight": random(4, 4 * h),
        f"{d}single_blocks.0.linear2.dora_scale": random(h, 1).abs() + 1,
        f"{d}double_blocks.0.txt_mlp.0.lora_up.weight": random(6 * h, 4),
        f"{d}double_blocks.0.txt_mlp.0.lora_down.weight": random(4, h),
        f"{d}double_blocks.0.txt_mlp.0.dora_scale": random(1, h).abs() + 1,
        f"{d}double_blocks.0.img_attn.norm.query_norm.scale.set_weight": random(32) + 1,
        f"{d}double_blocks.1.txt_attn.norm.key_norm.scale.diff": random(32),
        f"{d}img_in.diff": random(h, 128),
        f"{d}single_blocks.1.linear1_qkv.lora_up.weight": random(3 * h, 4),
        f"{d}single_blocks.1.linear1_qkv.lora_down.weight": random(4, h),
        "transformer.norm_out.linear.lora_B.weight": random(2 * h, 4),
        "transformer.norm_out.linear.lora_A.weight": random(4, h),
    }
    for part in ("to_q", "to_v", "add_k_proj"):
        tensors[f"{block}.{part}.lora_B.weight"] = random(h, 4)
        tensors[f"{block}.{part}.lora_A.weight"] = random(4, h)
    tensors[f"{block}.to_v.dora_scale"] = random(h, 1).abs() + 1
    tensors[f"{block}.add_k_proj.dora_scale"] = random(1, h).abs() + 1
    return save_lora(name, tensors)


def stock(model: Any, name: str, strength: float) -> Any:
    """The MODEL from the stock LoraLoaderModelOnly."""
    import nodes

    return nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)[0]


def ours(model: Any, name: str, strength: float) -> tuple[Any, str]:
    """The MODEL from Load TP LoRA and the text it shows."""
    from comfy_tp.comfy_tp_nodes.nodes.load_lora import LoadTPLoRA

    output = LoadTPLoRA.execute(model, name, strength)
    return output.args[0], output.ui.as_dict()["text"][0]


def sample(model: Any) -> torch.Tensor:
    return ksampler(model, conditioning(), conditioning(seed=2), latent(), steps=2)


def compare(degree: int, with_lora: Callable[[Any], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same LoRA on the ranks and in ComfyUI's own model: equal; returns both results."""
    found, expected = sample(with_lora(tp_model(degree))), sample(with_lora(native()))
    assert relative_error(found, expected) <= TOLERANCE
    return found, expected


@pytest.fixture(scope="module")
def one() -> str:
    return random_lora("one.safetensors", weights(), seed=1)


@pytest.fixture(scope="module")
def two() -> str:
    return random_lora("two.safetensors", weights(), seed=2, rank=7)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_stock_loader_s_lora_equals_comfyui_s_own_and_leaves_no_trace(degree, one, two):
    """Stacked, strengths of both signs, a swap; then without any the output is bit by bit what it was."""
    before = sample(tp_model(degree))
    changed, _ = compare(degree, lambda model: stock(model, one, 0.8))
    assert relative_error(changed, before) > 0.05
    compare(degree, lambda model: stock(model, one, -1.3))
    compare(degree, lambda model: stock(stock(model, one, 0.6), two, -0.5))
    compare(degree, lambda model: stock(model, two, 1.0))
    assert torch.equal(sample(tp_model(degree)), before)


@pytest.mark.parametrize("degree", DEGREES)
def test_every_kind_that_comfyui_knows_equals_its_own(degree, one):
    """Merged kinds beside low-rank ones, split q, k and v, norm_out with its halves exchanged, DoRA on top of a LoRA."""
    name = mixed_adapters("mixed.safetensors")
    before = sample(tp_model(degree))
    changed, _ = compare(degree, lambda model: stock(model, name, 0.9))
    assert relative_error(changed, before) > 0.02
    compare(degree, lambda model: stock(stock(model, one, 0.3), name, -0.4))
    assert torch.equal(sample(tp_model(degree)), before)


def test_a_swap_reads_no_checkpoint_bytes_and_a_new_strength_sends_no_tensors(one, two):
    import psutil

    model = tp_model(2)
    sample(model)
    remote = model.model.sharded.require()
    loads = model.model.sharded.loads
    processes = [psutil.Process(rank["pid"]) for rank in remote.group.status()["ranks"]]
    first = stock(model, one, 1.0)
    sample(first)

    def bytes_read() -> int:
        return sum(process.io_counters().read_chars for process in processes)

    sent = []
    request = remote.group.request

    def counted(name: str, header: Any = None, tensors: Any = (), **more: Any) -> Any:
        if name == "patch":
            sent.append(len(tensors))
        return request(name, header, tensors, **more)

    remote.group.request = counted
    try:
        before = bytes_read()
        weaker = first.clone()
        weaker.patches = {key: [(0.3, *line[1:]) for line in lines] for key, lines in first.patches.items()}
        weaker.patches_uuid = "weaker"
        sample(weaker)
        sample(stock(model, two, 1.0))
        sample(weaker)
        sample(model)
    finally:
        del remote.group.request
    assert model.model.sharded.loads == loads and model.model.sharded.require() is remote
    # Commands go through sockets, which read_chars does not count; a reload would read every file again.
    assert bytes_read() - before < 1 << 20
    assert sent == [0, 2 * len(weights()), 2 * len(weights()), 0]


def test_the_same_patches_are_pushed_once(one, monkeypatch):
    model = stock(tp_model(2), one, 0.4)
    remote = model.model.sharded.require()
    calls = []
    set_patches = remote.set_patches
    monkeypatch.setattr(remote, "set_patches", lambda *a, **k: calls.append(1) or set_patches(*a, **k))
    sample(model)
    sample(model)
    sample(model.clone())
    assert len(calls) == 1


def diffusers_lora(seed: int = 5) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A LoRA of every Linear in diffusers' keys, and the small model's parameters with it merged."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    merged = {}
    for file in small_model().glob("*.safetensors"):
        merged |= load_file(file)
    tensors = {}
    for name, weight in merged.items():
        if weight.ndim != 2:
            continue
        up = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
        down = torch.randn(4, weight.shape[1], generator=generator) * 0.1
        module = name.removesuffix(".weight")
        tensors[f"transformer.{module}.lora_B.weight"] = up
        tensors[f"transformer.{module}.lora_A.weight"] = down
        merged[name] = weight + 0.7 * (up @ down)
    return tensors, merged


@pytest.fixture(scope="module")
def merged_native(tmp_path_factory) -> Iterator[tuple[str, Any]]:
    """A diffusers LoRA's name, and ComfyUI's own model of weights into which it was merged by hand."""
    from safetensors.torch import save_file

    tensors, merged = diffusers_lora()
    name = save_lora("diffusers.safetensors", tensors)
    folder = tmp_path_factory.mktemp("merged")
    save_file(merged, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text((small_model() / "config.json").read_text())
    yield name, native_model(folder)


@pytest.mark.parametrize("degree", DEGREES)
def test_load_tp_lora_applies_a_whole_diffusers_lora(degree, merged_native):
    """The oracle is a model with the LoRA merged by hand under diffusers' own names."""
    name, oracle = merged_native
    expected = sample(oracle)
    patched, text = ours(tp_model(degree), name, 0.7)
    assert relative_error(sample(patched), expected) <= TOLERANCE
    keys = len(diffusers_lora()[0])
    assert text == f"diffusers.safetensors: {keys} keys applied to {len(weights())} weights, none unmatched."


def test_load_tp_lora_works_on_a_model_of_the_stock_loader_too(merged_native):
    name, oracle = merged_native
    patched, _ = ours(native(), name, 0.7)
    assert relative_error(sample(patched), sample(oracle)) <= TOLERANCE


def test_load_tp_lora_equals_the_stock_loader_on_comfyui_s_keys(one):
    found = sample(ours(tp_model(2), one, 0.5)[0])
    assert torch.equal(found, sample(stock(tp_model(2), one, 0.5)))


def test_load_tp_lora_counts_and_names_what_fits_nothing():
    up, down = torch.ones(128, 2), torch.ones(2, 128)
    good = "transformer.transformer_blocks.0.attn.to_q"
    name = save_lora(
        "partly.safetensors",
        {
            f"{good}.lora_B.weight": up,
            f"{good}.lora_A.weight": down,
            "transformer.transformer_blocks.77.attn.to_q.lora_A.weight": down.clone(),
            "text_encoder.layers.0.q_proj.lora_A.weight": down.clone(),
        },
    )
    _, text = ours(tp_model(2), name, 1.0)
    assert text.startswith("partly.safetensors: 2 keys applied to 1 weights, 2 unmatched.\nUnmatched: ")
    assert "text_encoder.layers.0.q_proj.lora_A.weight" in text and "blocks.77" in text


def test_a_lora_that_fits_nothing_and_an_unknown_name_are_errors():
    name = save_lora("foreign.safetensors", {"lora_unet_down_blocks_0_attn.lora_up.weight": torch.ones(2, 2)})
    with pytest.raises(InputError, match="(?s)0 keys applied.*made for another model"):
        ours(tp_model(2), name, 1.0)
    qkv = "diffusion_model.double_blocks.0.img_attn.qkv"
    wide = {f"{qkv}.lora_B.weight": torch.ones(18432, 1), f"{qkv}.lora_A.weight": torch.ones(1, 6144)}
    with pytest.raises(InputError, match=r"^wide\.safetensors: .*\[18432, 6144\].*made for another model"):
        ours(tp_model(2), save_lora("wide.safetensors", wide), 1.0)
    with pytest.raises(ValueError, match="'nothing.safetensors' is not one of the choices"):
        ours(tp_model(2), "nothing.safetensors", 1.0)


def test_a_damaged_lora_file_is_an_error_that_names_it():
    name = save_lora("damaged.safetensors", {"x": torch.ones(2)})
    path = import_comfy() / "models/loras" / name
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"damaged\.safetensors: its header claims .*download it again"):
        ours(tp_model(2), name, 1.0)


def test_a_lora_that_was_read_lasts_when_its_file_shrinks_afterwards():
    from comfy_tp.comfy_tp_nodes.nodes.load_lora import FILES

    name = save_lora("shrinks.safetensors", {"x": torch.arange(1 << 20)})
    path = import_comfy() / "models/loras" / name
    tensors, _ = FILES.read(str(path))
    os.truncate(path, 100)
    assert torch.equal(tensors["x"], torch.arange(1 << 20))


def test_the_loras_that_were_read_last_are_kept_up_to_a_number_of_bytes(monkeypatch):
    from comfy_tp.comfy_tp_nodes.nodes import load_lora

    files = load_lora.LoraFiles()
    monkeypatch.setattr(load_lora, "KEPT_BYTES", 10_000)
    folder = import_comfy() / "models/loras"
    paths = [
        str(folder / save_lora(f"kept-{n}.safetensors", {"x": torch.ones(n)}))
        for n in (1000, 1001, 1002, 9000)
    ]
    first, second, third = (files.read(path) for path in paths[:3])
    assert files.read(paths[1]) is second and files.read(paths[2]) is third
    assert files.read(paths[0]) is not first
    large = files.read(paths[3])
    assert files.read(paths[3]) is large
    assert files.read(paths[2]) is not third


def test_a_lora_that_is_a_pickle_is_not_offered_and_never_opened():
    import folder_paths

    from comfy_tp.comfy_tp_nodes.paths import safetensors_names

    torch.save({"x": torch.ones(2)}, import_comfy() / "models/loras/old.pt")
    name = save_lora("new.safetensors", {"x": torch.ones(2)})
    folder_paths.filename_list_cache.clear()
    assert {"old.pt", name} <= set(folder_paths.get_filename_list("loras"))
    assert name in safetensors_names("loras") and "old.pt" not in safetensors_names("loras")
    with pytest.raises(ValueError, match="'old.pt' is not one of the choices"):
        ours(tp_model(2), "old.pt", 1.0)


def test_strength_zero_changes_nothing(one):
    patched, text = ours(tp_model(2), one, 0.0)
    assert patched is tp_model(2) and "not applied" in text


class _Unknown:
    """A function on a patch."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def _lora_of(*parts: Any) -> Any:
    import comfy.weight_adapter

    return comfy.weight_adapter.LoRAAdapter(set(), parts)


def _oft() -> Any:
    import comfy.weight_adapter

    return comfy.weight_adapter.OFTAdapter(set(), (torch.zeros(4, 32, 32), None, None, None))


KEY = "diffusion_model.double_blocks.0.img_attn.proj.weight"
REFUSED: dict[str, tuple[Callable[[], tuple], type[Exception], str]] = {
    "an OFT": (lambda: (1.0, _oft(), 1.0, None, None), UnsupportedError, f"'{KEY}' has a OFTAdapter"),
    "a merge": (
        lambda: (1.0, [(torch.zeros(128, 128), None)], 1.0, None, None),
        UnsupportedError,
        "ModelMerge",
    ),
    "a function": (
        lambda: (1.0, ("diff", (torch.zeros(128, 128),)), 1.0, None, _Unknown()),
        UnsupportedError,
        "the function '_Unknown'",
    ),
    "another kind": (
        lambda: (1.0, ("model_as_lora", (torch.zeros(128, 128),)), 1.0, None, None),
        UnsupportedError,
        "the kind 'model_as_lora'",
    ),
    "an alpha that is no number": (
        lambda: (
            1.0,
            _lora_of(torch.ones(128, 2), torch.ones(2, 128), float("nan"), None, None, None),
            1.0,
            None,
            None,
        ),
        InputError,
        f"'{KEY}' has the alpha nan. Download the LoRA again",
    ),
    "a strength that is no number": (
        lambda: (float("inf"), ("diff", (torch.zeros(128, 128),)), 1.0, None, None),
        InputError,
        f"'{KEY}' has the strength inf. Give the LoRA loader another one",
    ),
    "another model's": (
        lambda: (1.0, ("diff", (torch.zeros(64, 64),)), 1.0, None, None),
        InputError,
        "made for another model",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_shards_cannot_carry_is_refused_by_name_and_the_previous_lora_stays(what, one):
    line, kind, text = REFUSED[what]
    good = stock(tp_model(2), one, 0.8)
    expected = sample(good)
    bad = tp_model(2).clone()
    bad.patches = {KEY: [line()]}
    bad.patches_uuid = f"bad {what}"
    loads = good.model.sharded.loads
    with pytest.raises(kind, match=text):
        sample(bad)
    assert is_listed(bad)
    assert torch.equal(sample(good), expected)
    assert good.model.sharded.loads == loads


def test_a_cancelled_swap_keeps_the_shards_where_comfyui_can_reclaim_them(one, two, monkeypatch):
    import comfy.model_management as management

    good = stock(tp_model(2), one, 0.8)
    expected = sample(good)
    loads, remote = good.model.sharded.loads, good.model.sharded.require()
    set_patches = remote.set_patches

    def cancelled(*arguments: Any, **named: Any) -> Any:
        management.interrupt_current_processing()
        return set_patches(*arguments, **named)

    other = stock(tp_model(2), two, 0.5)
    with monkeypatch.context() as patched, pytest.raises(management.InterruptProcessingException):
        patched.setattr(remote, "set_patches", cancelled)
        sample(other)
    assert is_listed(other) and other.loaded_size() == other.model_size() > 0
    assert torch.equal(sample(good), expected)
    assert good.model.sharded.loads == loads
    with pytest.raises(management.InterruptProcessingException), monkeypatch.context() as patched:
        patched.setattr(remote, "set_patches", cancelled)
        sample(other)
    management.unload_all_models()
    assert not good.model.sharded.loaded
    assert torch.equal(sample(good), expected)


def is_listed(model: Any) -> bool:
    """Whether ComfyUI lists exactly this clone of the model as loaded."""
    import comfy.model_management as management

    listed = [entry.model for entry in management.current_loaded_models if entry.model is not None]
    return [one for one in listed if one.is_clone(model)] == [model]


def test_the_lora_is_there_again_after_the_shards_were_freed(one):
    model = stock(tp_model(2), one, 0.8)
    expected = sample(model)
    model.model.sharded.unload()
    assert torch.equal(sample(model), expected)
