"""Which files make up a model: folders, indexes, variants, the hub's cache, and what is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from damaged_files import outcome
from safetensors.torch import save_file

from comfy_tp.comfy_tp_nodes.source import fingerprint
from comfy_tp.core.checkpoint import Checkpoint, resolve_source
from comfy_tp.core.errors import CheckpointError


def save(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.ones(2, 2) for name in names}, path)
    return path


def save_index(
    folder: Path, weight_map: dict[str, object], name: str = "model.safetensors.index.json"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder / name


def test_a_single_file_is_opened_with_the_config_beside_it(tmp_path):
    save(tmp_path / "flux.safetensors", "a")
    (tmp_path / "config.json").write_text('{"num_layers": 3}')
    checkpoint = Checkpoint.open(tmp_path / "flux.safetensors")
    assert set(checkpoint.entries) == {"a"}
    assert checkpoint.config == {"num_layers": 3}
    assert checkpoint.nbytes == 16


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "model"])
def test_a_folder_is_opened_by_the_names_of_diffusers_and_transformers(tmp_path, stem):
    save(tmp_path / f"{stem}.safetensors", "a")
    save(tmp_path / "unrelated.safetensors", "b")
    assert set(Checkpoint.open(tmp_path).entries) == {"a"}


def test_an_index_joins_several_files(tmp_path):
    save(tmp_path / "model-00001-of-00002.safetensors", "a", "b")
    save(tmp_path / "model-00002-of-00002.safetensors", "c")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_index(tmp_path, {"a": first, "b": first, "c": second})
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.entries) == {"a", "b", "c"}
    assert [os.path.basename(path) for path in checkpoint.files] == [first, second]
    assert checkpoint.entries["c"].path == os.fspath(tmp_path / second)


def test_a_subfolder_of_a_pipeline_is_opened(tmp_path):
    save(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", "a")
    (tmp_path / "model_index.json").write_text("{}")
    assert set(Checkpoint.open(tmp_path, "transformer").entries) == {"a"}
    with pytest.raises(
        CheckpointError, match=r"is a pipeline folder.*subfolder='transformer'; it has: transformer"
    ):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="has no subfolder 'unet'. It has: transformer"):
        Checkpoint.open(tmp_path, "unet")
    with pytest.raises(CheckpointError, match="leads out of"):
        Checkpoint.open(tmp_path, "../elsewhere")


def test_a_variant_is_chosen_and_the_only_one_is_taken(tmp_path):
    save(tmp_path / "model.fp16.safetensors", "half")
    assert set(Checkpoint.open(tmp_path).entries) == {"half"}
    save(tmp_path / "model.safetensors", "full")
    assert set(Checkpoint.open(tmp_path).entries) == {"full"}
    assert set(Checkpoint.open(tmp_path, variant="fp16").entries) == {"half"}
    with pytest.raises(
        CheckpointError, match="has no weights of variant 'bf16'.*It has: model.fp16.safetensors"
    ):
        Checkpoint.open(tmp_path, variant="bf16")


def test_a_variant_in_several_files_is_found_by_its_index(tmp_path):
    save(tmp_path / "model.fp16-00001-of-00001.safetensors", "a")
    save_index(tmp_path, {"a": "model.fp16-00001-of-00001.safetensors"}, "model.safetensors.index.fp16.json")
    assert set(Checkpoint.open(tmp_path, variant="fp16").entries) == {"a"}
    assert set(Checkpoint.open(tmp_path).entries) == {"a"}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("diffusion_pytorch_model.bin", "Only safetensors weights can be read in shards"),
        ("model.pt", "convert them with save_pretrained"),
        ("flux2.gguf", "GGUF weights are not supported yet; use the bf16 or fp8 .safetensors file"),
    ],
)
def test_R16_other_formats_are_refused_by_name(tmp_path, name, advice):
    (tmp_path / name).write_bytes(b"weights")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=advice) as caught:
            Checkpoint.open(path)
        assert str(tmp_path / name) in str(caught.value)


def test_rank_files_are_no_model_and_named_as_such(tmp_path):
    for rank in range(2):
        save(tmp_path / f"rank-0000{rank}-of-00002.safetensors", "a")
    for path in (tmp_path, tmp_path / "rank-00001-of-00002.safetensors"):
        with pytest.raises(
            CheckpointError, match="holds the shards of 2 ranks that save_shards wrote .rank-0000"
        ) as caught:
            Checkpoint.open(path)
        assert "TensorParallelConfig(tp_degree=2); here, choose the file or folder" in str(caught.value)


def test_an_index_may_not_name_files_elsewhere(tmp_path):
    save(tmp_path / "outside.safetensors", "a")
    for name in (
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "x/y.safetensors",
        "..",
        "",
        3,
        ["x"] * 10_000,
        "../" + "x" * 10_000,
    ):
        save_index(tmp_path / "model", {"a": name})
        with pytest.raises(CheckpointError, match="which is outside the model's folder") as caught:
            Checkpoint.open(tmp_path / "model")
        assert len(str(caught.value)) < 1000
    save_index(tmp_path / "model", {"a": "weights.bin"})
    with pytest.raises(CheckpointError, match="weights.bin is not a safetensors file"):
        Checkpoint.open(tmp_path / "model")


def test_missing_and_contradictory_files_are_named(tmp_path):
    save(tmp_path / "one.safetensors", "a")
    save_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match="1 of 2 weight files are missing: two.safetensors. Download"):
        Checkpoint.open(tmp_path)
    save(tmp_path / "two.safetensors", "a", "b")
    with pytest.raises(
        CheckpointError, match="Tensor 'a' lies in two files, .*one.safetensors and .*two.safetensors"
    ):
        Checkpoint.open(tmp_path)
    save(tmp_path / "two.safetensors", "c")
    with pytest.raises(
        CheckpointError, match="tensor 'b' should lie in .*two.safetensors, but that file does not"
    ):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="index.json is not valid JSON"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"weight_map": {"a": "b.safetensors"}, "weight_map": {}}', "key 'weight_map' appears twice"),
        (
            b'{"a": ["\xc3\xa9", ' + b'{"":0},' * 135_000 + b"0]}",
            r"of \d+ bytes would take about \d+ MB to parse",
        ),
        (b'{"a": NaN}', "not valid JSON .NaN is not a number"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "is not UTF-8 .byte 7"),
        (b"[1]", "is not a JSON object"),
        (b"{}" + b" " * 16_000_000, r"has more than the \d+ bytes of any real one"),
    ],
    ids=["twice", "costly", "nan", "deep", "not text", "list", "long"],
)
def test_the_files_beside_the_weights_are_read_as_strictly_as_a_header(tmp_path, file, text, message):
    save(tmp_path / "model.safetensors", "a")
    (tmp_path / file).write_bytes(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / file) in str(caught.value) and "ownload it again" in str(caught.value)


def test_a_file_beside_the_weights_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    save(tmp_path / "model.safetensors", "a")
    (tmp_path / "config.json").mkdir()
    monkeypatch.setattr(Path, "is_file", lambda path: path.name in ("config.json", "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read \(Is a directory\)"):
        Checkpoint.open(tmp_path)


def test_a_byte_order_mark_is_no_damage(tmp_path):
    save(tmp_path / "model.safetensors", "a")
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"num_layers": 3}')
    assert Checkpoint.open(tmp_path).config == {"num_layers": 3}


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.soak)])
def test_damaged_settings_are_each_a_named_error_or_a_model_and_cost_no_memory(tmp_path, count):
    found = outcome(tmp_path, count, "settings")
    assert count / 2 < found["refused"] <= count
    assert found["peak_mb"] <= 64, found["costliest"]


def test_several_sets_and_none_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no safetensors weights. It has: nothing"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="No such model: .*nowhere"):
        Checkpoint.open(tmp_path / "nowhere")
    save(tmp_path / "one.safetensors", "a")
    assert set(Checkpoint.open(tmp_path).entries) == {"a"}
    save(tmp_path / "two.safetensors", "b")
    with pytest.raises(
        CheckpointError, match="several sets of weights: one.safetensors, two.safetensors.*with variant="
    ):
        Checkpoint.open(tmp_path)
    save(tmp_path / "part" / "flux-00001-of-00002.safetensors", "a")
    with pytest.raises(CheckpointError, match="but no .*index.json that names all parts"):
        Checkpoint.open(tmp_path / "part")


def test_the_fingerprint_changes_with_the_file(tmp_path):
    path = save(tmp_path / "one.safetensors", "a")
    before = fingerprint(path)
    assert before == fingerprint(path)
    os.utime(path, ns=(1, 1))
    assert before != fingerprint(path)


def fake_hub(cache: Path, repository: str = "owner/flux", revision: str = "main") -> Path:
    """A hub cache as huggingface_hub leaves it: blobs, a snapshot of links, and the branch's commit."""
    folder = cache / ("models--" + repository.replace("/", "--"))
    commit = "a" * 40
    snapshot = folder / "snapshots" / commit / "transformer"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(commit)
    (folder / "blobs").mkdir()
    save(folder / "blobs" / "b1", "a")
    (folder / "blobs" / "b2").write_text('{"_class_name": "Flux2Transformer2DModel"}')
    (snapshot / "diffusion_pytorch_model.safetensors").symlink_to("../../../blobs/b1")
    (snapshot / "config.json").symlink_to("../../../blobs/b2")
    return snapshot


def test_a_hub_repository_is_found_in_the_local_cache(tmp_path):
    snapshot = fake_hub(tmp_path)
    for options in ({}, {"local_files_only": True}, {"revision": "main"}, {"revision": "a" * 40}):
        found = resolve_source("owner/flux", subfolder="transformer", cache_dir=tmp_path, **options)
        assert found == snapshot
    checkpoint = Checkpoint.open(found)
    assert set(checkpoint.entries) == {"a"}
    assert checkpoint.config == {"_class_name": "Flux2Transformer2DModel"}


def test_offline_a_model_that_is_not_there_is_named_with_how_to_get_it(tmp_path):
    fake_hub(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_source("owner/other", subfolder="transformer", cache_dir=tmp_path, local_files_only=True)
    assert "'owner/other', folder 'transformer' is not complete in the local hub cache" in str(caught.value)
    assert 'Get it with: hf download owner/other --include "transformer/*"' in str(caught.value)
    with pytest.raises(CheckpointError, match="revision 'v2'.*hf download .* --revision v2"):
        resolve_source("owner/flux", revision="v2", cache_dir=tmp_path, local_files_only=True)


def test_an_interrupted_download_is_not_taken_for_a_model(tmp_path):
    snapshot = fake_hub(tmp_path)
    (snapshot / "diffusion_pytorch_model.safetensors").unlink()
    save_index(
        snapshot,
        {"a": "diffusion_pytorch_model-00001-of-00001.safetensors"},
        "diffusion_pytorch_model.safetensors.index.json",
    )
    with pytest.raises(CheckpointError, match="1 of 1 weight files are missing.*downloading is switched off"):
        resolve_source("owner/flux", subfolder="transformer", cache_dir=tmp_path, local_files_only=True)


def test_a_failed_download_says_why_and_what_to_do(tmp_path, monkeypatch):
    import huggingface_hub

    asked: list[dict] = []

    def unreachable(repository: str, **options):
        asked.append(options)
        raise OSError("the hub did not answer\nat length")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError) as caught:
        resolve_source("owner/flux", subfolder="transformer", cache_dir=tmp_path, token="secret")
    assert "could not be downloaded (the hub did not answer). Check the name" in str(caught.value)
    assert "accept the model's licence on its page if it is gated" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert [options["local_files_only"] for options in asked] == [True, False]
    assert asked[1]["allow_patterns"] == ["transformer/*.json", "transformer/*.safetensors"]
    assert asked[1]["token"] == "secret"


def test_HF_HUB_OFFLINE_and_HF_HUB_CACHE_are_honoured(tmp_path):
    snapshot = fake_hub(tmp_path)
    script = (
        "from comfy_tp.core.checkpoint import resolve_source\n"
        "print(resolve_source('owner/flux', subfolder='transformer'))\n"
        "try:\n    resolve_source('owner/none')\nexcept Exception as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second = done.stdout.strip().splitlines()
    assert first == str(snapshot)
    assert (
        f"'owner/none' is not complete in the local hub cache {tmp_path}, and downloading is switched off"
        in second
    )


def test_a_local_path_comes_before_the_hub_and_nonsense_is_no_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "owner" / "flux" / "model.safetensors", "local")
    assert set(Checkpoint.open(resolve_source("owner/flux")).entries) == {"local"}
    for name in ("/no/such/folder", "../up", "a/b/c", "flux.safetensors", "owner/..", "x y", ""):
        with pytest.raises(CheckpointError):
            resolve_source(name, local_files_only=True)
    with pytest.raises(CheckpointError, match="neither a file or folder here nor the id of a hub repository"):
        resolve_source("/no/such/folder")
    with pytest.raises(CheckpointError, match="leads out of the repository"):
        resolve_source("owner/remote", subfolder="../..", local_files_only=True)
