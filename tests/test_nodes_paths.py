"""The list of models: what is offered, what it costs, and that no name leads out of ComfyUI's model folders."""

from __future__ import annotations

import os
import re

import pytest
import torch
from comfy_inprocess import in_comfy  # noqa: F401  a fixture
from safetensors.torch import save_file

from comfy_tp.core.checkpoint.files import Checkpoint, check_identities, identities
from comfy_tp.core.checkpoint.reader import read_whole
from comfy_tp.core.errors import CheckpointError, ConfigError


@pytest.fixture
def models(in_comfy, tmp_path, monkeypatch):  # noqa: F811
    """Empty model folders of ComfyUI: (diffusion_models, diffusers)."""
    import folder_paths

    roots = []
    for kind in ("diffusion_models", "diffusers"):
        root = tmp_path / "models" / kind
        root.mkdir(parents=True)
        monkeypatch.setitem(
            folder_paths.folder_names_and_paths, kind, ([str(root)], {".safetensors", ".sft", ".ckpt"})
        )
        folder_paths.filename_list_cache.pop(kind, None)
        roots.append(root)
    yield roots
    folder_paths.filename_list_cache.clear()


def model_folder(path, *, config: bool = True, weights: str = "diffusion_pytorch_model.safetensors"):
    path.mkdir(parents=True, exist_ok=True)
    if config:
        (path / "config.json").write_text("{}")
    if weights:
        (path / weights).write_bytes(b"")
    return path


def choices() -> list[str]:
    from comfy_tp.comfy_tp_nodes.paths import model_choices

    return model_choices()


def path_of(name: str):
    from comfy_tp.comfy_tp_nodes.paths import model_path

    return model_path(name)


def test_files_and_diffusers_folders_are_offered(models):
    files, folders = models
    (files / "flux2.safetensors").write_bytes(b"")
    (files / "old.ckpt").write_bytes(b"")
    model_folder(files / "klein")
    model_folder(folders / "FLUX.2-dev" / "transformer")
    model_folder(folders / "FLUX.2-dev" / "text_encoder")
    (folders / "FLUX.2-dev" / "model_index.json").write_text("{}")
    model_folder(folders / "deep" / "er" / "model")
    model_folder(folders / "no config", config=False)
    model_folder(folders / "no weights", weights="")
    assert choices() == ["flux2.safetensors", "FLUX.2-dev", "deep/er/model", "klein"]


def test_files_in_a_folder_with_a_config_json_are_offered_unless_their_names_are_those_of_its_weights(models):
    files, _ = models
    model_folder(files / "flux", weights="diffusion_pytorch_model-00001-of-00002.safetensors")
    names = (
        "dev-fp8",
        "klein",
        "model",
        "diffusion_pytorch_model.fp16",
        "models-of-mine",
        "rank-00000-of-00002",
    )
    for name in names:
        (files / "flux" / f"{name}.safetensors").write_bytes(b"")
    assert choices() == [
        "flux/dev-fp8.safetensors",
        "flux/klein.safetensors",
        "flux/models-of-mine.safetensors",
        "flux",
    ]


def test_a_new_model_is_seen_and_a_removed_one_forgotten(models):
    files, folders = models
    assert choices() == []
    folder = model_folder(folders / "one")
    assert choices() == ["one"]
    (folder / "config.json").unlink()
    assert choices() == []
    (folder / "config.json").write_text("{}")
    (files / "two.safetensors").write_bytes(b"")
    assert choices() == ["two.safetensors", "one"]


def test_nothing_is_walked_or_opened_again_for_the_list_when_nothing_changed(models, monkeypatch):
    from comfy_tp.comfy_tp_nodes import paths

    _, folders = models
    for number in range(200):
        model_folder(folders / f"model{number}" / "transformer")
    assert len(choices()) == 200
    touched: list = []
    look = paths._mtime
    monkeypatch.setattr(paths, "holds_model", lambda folder: pytest.fail(f"{folder} is opened"))
    monkeypatch.setattr(paths.FolderList, "_walk", lambda *_: pytest.fail("walked"))
    monkeypatch.setattr(paths, "_mtime", lambda folder: touched.append(folder) or look(folder))
    assert len(choices()) == 200
    assert len(touched) <= 2 * 200 + 4


def test_names_lead_to_the_file_or_to_the_folder_of_the_weights(models):
    files, folders = models
    (files / "a" / "b").mkdir(parents=True)
    (files / "a" / "b" / "flux2.safetensors").write_bytes(b"")
    model_folder(folders / "pipeline" / "transformer")
    model_folder(files / "plain")
    assert path_of("a/b/flux2.safetensors") == files / "a" / "b" / "flux2.safetensors"
    assert path_of("pipeline") == folders / "pipeline" / "transformer"
    assert path_of("plain") == files / "plain"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "a/../../secret.safetensors",
        "/etc/passwd",
        "..\\secret.safetensors",
        "a\0b",
        "",
        " ",
    ],
)
def test_a_name_that_leads_out_is_refused(models, name):
    (models[0].parent / "secret.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="leads out of ComfyUI's model folders"):
        path_of(name)


def test_rank_files_are_refused_by_name(models):
    from comfy_tp.comfy_tp_nodes.source import ModelSource

    model_folder(models[1] / "saved shards", weights="rank-00000-of-00002.safetensors")
    assert choices() == ["saved shards"]
    with pytest.raises(CheckpointError, match="holds the shards of 2 ranks that save_shards wrote"):
        ModelSource.open(path_of("saved shards"))


def test_links_to_another_disk_are_followed_for_listed_names(models, tmp_path):
    """To a file, to a folder of files, to a folder of the hub's cache whose weights are links; at any depth of the list."""
    files, folders = models
    disk = tmp_path / "disk"
    model_folder(disk / "many", config=False, weights="one.safetensors")
    (disk / "blob").write_bytes(b"")
    snapshot = model_folder(disk / "hub" / "snapshots" / "1" / "transformer", weights="")
    (snapshot / "model.safetensors").symlink_to(disk / "blob")
    (files / "link.safetensors").symlink_to(disk / "many" / "one.safetensors")
    (files / "sub").mkdir()
    (files / "sub" / "blob.safetensors").symlink_to(disk / "blob")
    (files / "many").symlink_to(disk / "many")
    (folders / "hub").symlink_to(disk / "hub" / "snapshots" / "1")
    model_folder(folders / "linked weights", weights="")
    (folders / "linked weights" / "model.safetensors").symlink_to(disk / "blob")
    names = ["link.safetensors", "many/one.safetensors", "sub/blob.safetensors", "hub", "linked weights"]
    assert choices() == names
    assert path_of("many/one.safetensors") == files / "many" / "one.safetensors"
    assert path_of("hub") == folders / "hub" / "transformer"
    assert all(path_of(name).exists() for name in names)


def test_a_link_to_a_folder_behind_a_linked_folder_is_refused_unless_the_owner_allows_it(
    models, tmp_path, monkeypatch
):
    files, folders = models
    elsewhere = model_folder(tmp_path / "elsewhere", weights="model.safetensors")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "more").symlink_to(elsewhere)
    (folders / "disk").symlink_to(tmp_path / "disk")
    (files / "disk").symlink_to(tmp_path / "disk")
    (elsewhere / "own.safetensors").write_bytes(b"")
    assert choices() == ["disk/more/own.safetensors", "disk/more"]
    for name in choices():
        with pytest.raises(
            ConfigError, match=rf"'{name}' leads through .*disk/more, a link .*to {elsewhere}\."
        ):
            path_of(name)
    monkeypatch.setenv("COMFY_TP_FOLLOW_LINKS", "1")
    assert path_of("disk/more") == files / "disk" / "more"


def test_a_file_that_is_not_listed_is_refused_though_it_is_there(models):
    files, _ = models
    (files / "old.ckpt").write_bytes(b"")
    model_folder(files / ".hidden")
    for name in ("old.ckpt", ".hidden"):
        with pytest.raises(ConfigError, match=f"there is no '{re.escape(name)}'"):
            path_of(name)


def test_the_ranks_open_the_file_that_the_link_led_to_and_no_other(tmp_path):
    first, second, link = (tmp_path / name for name in ("first", "second", "link.safetensors"))
    for path in (first, second):
        save_file({"a": torch.zeros(2)}, path)
    link.symlink_to(first)
    chosen = identities(link)
    assert list(chosen) == [str(first)]
    checkpoint = Checkpoint.open(link)
    check_identities(checkpoint, chosen)
    link.unlink()
    link.symlink_to(second)
    with pytest.raises(
        CheckpointError, match=f"the ranks opened .{second}.: it or a link to it was replaced"
    ):
        check_identities(Checkpoint.open(link), chosen)
    assert set(read_whole(checkpoint)) == {"a"}  # of the first file
    times = first.stat().st_mtime_ns
    os.replace(second, first)
    os.utime(first, ns=(times, times))
    with pytest.raises(CheckpointError, match="the file changed since its header was read"):
        read_whole(checkpoint)
    link.unlink()
    link.symlink_to(first)
    with pytest.raises(CheckpointError, match="was replaced meanwhile"):
        check_identities(Checkpoint.open(link), chosen)


def test_links_within_the_model_folders_and_linked_roots_are_fine(models, tmp_path, monkeypatch):
    import folder_paths

    files, _ = models
    (files / "real.safetensors").write_bytes(b"")
    (files / "link.safetensors").symlink_to(files / "real.safetensors")
    assert path_of("link.safetensors")
    (tmp_path / "root").symlink_to(files)
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path / "root")], {".safetensors"})
    )
    assert path_of("real.safetensors") == tmp_path / "root" / "real.safetensors"


def test_a_loop_of_links_ends(models):
    _, folders = models
    os.symlink(folders, folders / "loop")
    model_folder(folders / "one")
    assert "one" in choices()


def test_a_model_that_is_gone_says_so(models):
    with pytest.raises(ConfigError, match="there is no 'gone.safetensors' in diffusion_models or diffusers"):
        path_of("gone.safetensors")


def test_a_tokenizer_folder_may_be_a_link_but_not_behind_a_linked_folder(models, tmp_path):
    from comfy_tp.comfy_tp_nodes.paths import TEXT_ENCODER, component_path

    _, folders = models
    outside = tmp_path / "outside"
    outside.mkdir()
    for pipe in (folders / "pipe", tmp_path / "disk"):
        model_folder(pipe / "text_encoder", weights="model.safetensors")
        (pipe / "tokenizer").symlink_to(outside)
    (folders / "linked").symlink_to(tmp_path / "disk")
    assert component_path(TEXT_ENCODER, "pipe") == folders / "pipe" / "text_encoder"
    with pytest.raises(ConfigError, match=f"'linked' leads through .*tokenizer, a link .*to {outside}"):
        component_path(TEXT_ENCODER, "linked")


@pytest.mark.parametrize("name", [5, None, ["a"], "a" * 5000, "\ud800"])
def test_what_is_no_name_at_all_is_refused(models, name):
    with pytest.raises(ConfigError, match=r"model: (a name is text, got|there is no )"):
        path_of(name)
